"""tools/bench/timeout.py: every command ends, leaves no process behind, and its last output is reported."""

import os
import signal
import sys
import time
from pathlib import Path

import programs
import pytest
from program_runs import is_alive

from tools.bench import timeout as limited

ROOT = Path(__file__).resolve().parents[2]
HANG_IN_C = """
import ctypes, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
def in_the_driver(): ctypes.CDLL(None).sleep(1000)
in_the_driver()
"""
CHILDREN = """
import os, subprocess, sys
argv = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"]
for session in (False, True):
    print(subprocess.Popen(argv, start_new_session=session).pid, flush=True)
if os.fork() == 0:  # an orphan from its first moment on, in a session of its own
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        os.execv(sys.executable, argv)
    os._exit(0)
os.wait()
import time; time.sleep(0.3)
"""


def has_ended(pid: int, within_s: float = 0) -> bool:
    deadline = time.monotonic() + within_s
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)


def run(directory: Path, code: str, seconds: float = 30, **variables: str) -> tuple[str, list[str]]:
    return limited.run([sys.executable, "-c", code], directory / "log.txt", seconds, variables)


@pytest.mark.parametrize(
    "code, status, message",
    [
        ("print('a' * 10)", "ok", "aaaaaaaaaa"),
        ("def f(): 1 / 0\nf()", "failed (exit code 1)", "ZeroDivisionError"),
        ("import os; print('last words'); os.kill(os.getpid(), 9)", "failed (exit code -9)", "last words"),
        ("import ctypes; ctypes.string_at(0)", "failed (exit code -11)", "Fatal Python error: Segmentation fault"),
    ],
)
def test_status_and_traceback_are_reported(tmp_path: Path, code: str, status: str, message: str) -> None:
    result = run(tmp_path, code)
    assert result[0] == status and any(message in line for line in result[1])


def test_hang_in_c_code_is_located_and_killed(tmp_path: Path) -> None:
    status, output = run(tmp_path, HANG_IN_C, seconds=1.5)
    assert status == "out of time" and any("in in_the_driver" in line for line in output)


def test_children_in_other_sessions_are_killed(tmp_path: Path) -> None:
    status, output = run(tmp_path, CHILDREN)
    children = [int(line) for line in output]
    assert status == "ok" and len(children) == 3 and all(has_ended(pid) for pid in children)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ended_parent_ends_the_command(tmp_path: Path, number: int) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from pathlib import Path; from tools.bench import timeout as limited"
    program += f"\nlimited.run([sys.executable, '-c', {code!r}], Path({str(tmp_path / 'log.txt')!r}), 60)"
    parent = programs.Popen([sys.executable, "-c", program])
    log = tmp_path / "log.txt"
    deadline = time.monotonic() + 60
    while not (log.is_file() and log.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(parent.pid, number)
    parent.wait()
    assert has_ended(int(log.read_text()), within_s=60)


def test_killed_supervisor_ends_the_command(tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); os.kill(os.getppid(), 9); time.sleep(60)"
    status, output = run(tmp_path, code)
    assert status == "failed (its supervisor was killed)"
    assert has_ended(int(output[0]), within_s=20)


def test_stopped_supervisor_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor stands for one that itself waits for the driver."""
    monkeypatch.setattr(limited, "SLACK_S", 0.5)
    start = time.monotonic()
    status, _ = run(tmp_path, "import os, time; os.kill(os.getppid(), 19); time.sleep(60)", seconds=1)
    assert status == "failed (its supervisor was killed)" and time.monotonic() - start < 30


def test_long_output_keeps_start_and_end(tmp_path: Path) -> None:
    code = (
        "import sys\nprint('first')\nfor i in range(1000): print('x' * 99_999)\nprint('y' * 99_999)\nsys.exit('last')"
    )
    status, output = run(tmp_path, code)
    assert status == "failed (exit code 1)" and output[-1] == "last"
    assert max(map(len, output)) <= limited.MAX_WIDTH and len(output) <= limited.MAX_LINES + 1
    log = tmp_path / "log.txt"
    assert log.stat().st_size < 3 * limited.LOG_BYTES and log.read_text().startswith("first\nxxx")


def test_full_disk_stops_the_command_and_removes_its_files(tmp_path: Path) -> None:
    """Simulate a disk with 64 MB more free space than the minimum."""
    code = "import os, tempfile, time\npath = tempfile.mkdtemp()\nprint(path)\nfile = open(path + '/x', 'wb')\n"
    code += "for _ in range(600): file.write(bytes(1 << 20)); file.flush(); os.fsync(file.fileno()); time.sleep(0.02)"
    script = tmp_path / "limited.py"
    text = Path(limited.__file__).read_text()
    free = "MIN_FREE_BYTES + (64 << 20) - sum(p.stat().st_size for p in Path(temporary).rglob('x'))"
    script.write_text(text.replace("shutil.disk_usage(directory).free for", f"{free} for"))
    program = "import sys; from pathlib import Path; import limited\n"
    program += f"print(limited.run([sys.executable, '-c', {code!r}], Path({str(tmp_path / 'log.txt')!r}), 60))"
    done = programs.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert "stopped: it has filled the disk" in done.stdout, done.stdout + done.stderr
    assert not Path((tmp_path / "log.txt").read_text().splitlines()[0]).exists()


def test_unkillable_process_is_named_and_not_waited_for() -> None:
    """The process stands for one that is stuck in the driver, where no signal reaches it."""
    assert limited.kill_all(lambda: {1 << 30: "python3"}, trace=True, seconds=0.1) == f"python3 ({1 << 30})"


def test_first_traceback_of_many_ranks_is_kept() -> None:
    others = "\n".join(f"Traceback (most recent call last):\n  in rank {n}\nConnectionError: closed" for n in range(99))
    lines = limited.error_tail(f"noise\n{limited.TRACEBACK_MARKS[0]}\nValueError: the cause\n{others}\nthe end")
    assert lines[1] == "ValueError: the cause" and lines[-1] == "the end" and len(lines) == limited.MAX_LINES + 1
    assert limited.error_tail("\n".join(map(str, range(100)))) == [str(n) for n in range(100 - limited.MAX_LINES, 100)]


def test_missing_command_is_reported(tmp_path: Path) -> None:
    status, _ = limited.run(["/nonexistent/compute-sanitizer"], tmp_path / "log.txt", 5)
    assert status.startswith("failed (cannot be started") and "compute-sanitizer" in status
