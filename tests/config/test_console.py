"""The status bar at the bottom of a real terminal (os.openpty), and plain lines everywhere else."""

import fcntl
import os
import re
import select
import struct
import sys
import termios
import time
from pathlib import Path
from typing import Any

import programs
import pytest
from pairwise import nightly_except

from megalite.common import console

ROOT = Path(__file__).resolve().parents[2]
RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --lr 0.01 --mock-data --vocab-size 93 --log-interval 1 --device cpu"
).split()
LOGGED = re.compile(r"^\d\d:\d\d:\d\d  step +(\d+)/\d+  loss [\d.]+", re.MULTILINE)
SHOWN = re.compile(r"^step .*?(\d+)/\d+ .*loss [\d.]+.*tok/s/gpu.*MFU.*GiB")
COLOURS = re.compile(r"\x1b\[[\d;]*m")
GUARDS = ("megalite/common/console.py", "megalite/common/rich_progress.py")


class Terminal:
    """A program on a terminal of 24 lines; `raw` is its output, `shown` the lines that a person would see."""

    def __init__(self, argv: list[str], *, columns: int = 160, cwd: Path = ROOT, **variables: str):
        unset = {"NO_COLOR", "RANK", "SLURM_PROCID", "TORCHELASTIC_RUN_ID"}
        env = {name: value for name, value in os.environ.items() if name not in unset}
        env |= {"TERM": "xterm-256color", **variables}
        self.raw = ""
        self.number, terminal_fd = os.openpty()
        fcntl.ioctl(terminal_fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        options: dict[str, Any] = {"cwd": cwd, "env": env, "start_new_session": True}
        self.process = programs.Popen(argv, stdin=terminal_fd, stdout=terminal_fd, stderr=terminal_fd, **options)
        os.close(terminal_fd)

    def read(self, until: str = "", timeout_s: float = 90.0) -> str:
        """Read the output until this pattern appears or the program ends, and return all of it."""
        deadline = time.monotonic() + timeout_s
        while not (until and re.search(until, self.raw)):
            assert time.monotonic() < deadline, self.raw
            try:
                if select.select([self.number], [], [], 0.2)[0]:
                    self.raw += os.read(self.number, 1 << 16).decode(errors="replace")
            except OSError:  # the other end is closed
                break
        return self.raw

    def end(self) -> int:
        self.read()
        os.close(self.number)
        return self.process.wait(60)

    def shown(self) -> list[str]:
        """Return the lines of a screen with endless scrollback, without the erased text."""
        lines = [""]
        for part in re.split(r"(\r\n|\n|\r|\x1b\[2K|\x1b\[1A)", COLOURS.sub("", self.raw)):
            if part in ("\r\n", "\n"):
                lines.append("")
            elif part == "\x1b[1A":
                assert lines.pop() == "", "the cursor goes up from below a bar only"
            elif part in ("\r", "\x1b[2K"):
                lines[-1] = lines[-1] if part == "\r" and not lines[-1] else ""
            else:
                lines[-1] += part
        return lines

    def bars(self) -> list[str]:
        """Return the successive contents of the status bar."""
        return [part.partition("\r")[0] for part in COLOURS.sub("", self.raw).split(console.ERASE)[1:]]


def python(*args: str) -> list[str]:
    return [sys.executable, *args]


def start_run(*flags: str, **options: str) -> Terminal:
    return Terminal(python("pretrain_gpt.py", *RUN, *flags), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("nproc", nightly_except(["1", "2"], ["2"], str, guards=GUARDS))
def test_run_on_a_terminal_shows_a_status_bar(nproc: str, tmp_path: Path) -> None:
    run = start_run("--train-iters", "60", "--eval-iters", "3", "--nproc", nproc, "--run-dir", str(tmp_path))
    assert run.end() == 0, run.raw
    text = "\n".join(run.shown())
    assert [int(step) for step in LOGGED.findall(text)] == list(range(1, 61))
    bars = [match for match in map(SHOWN.match, run.bars()) if match]
    assert len({int(match[1]) for match in bars}) > 1 and all(len(match[0]) < 160 for match in bars)
    assert any(bar.startswith("evaluating") for bar in run.bars())
    assert not any(map(SHOWN.match, run.shown())), "no bar is left"
    assert "\x1b[?25l" not in run.raw, "the cursor was hidden"
    assert "\x1b" not in (tmp_path / "log.txt").read_text()


def test_log_line_is_cut_on_the_terminal_and_complete_in_the_log(tmp_path: Path) -> None:
    argv = python("pretrain_gpt.py", *RUN, "--train-iters", "3", "--eval-iters", "0", "--run-dir", str(tmp_path))
    run = Terminal(argv, columns=80)
    assert run.end() == 0, run.raw
    shown = [line for line in run.shown() if LOGGED.match(line)]
    assert len(shown) == 3 and all(60 < len(line) <= 80 and "grad norm" in line and "eta" not in line for line in shown)
    logged = [line for line in (tmp_path / "log.txt").read_text().splitlines() if LOGGED.match(line)]
    assert len(logged) == 3 and all(len(line) > 110 and line.count(" | ") == 4 for line in logged)
    assert all(line.startswith(short[:60]) for line, short in zip(logged, shown, strict=True))


@pytest.mark.parametrize("saves", nightly_except([True, False], [True], str, guards=GUARDS))
def test_ctrl_c_leaves_a_clean_terminal_line(saves: bool, tmp_path: Path) -> None:
    flags = ["--save", str(tmp_path), "--save-interval", "50000"] if saves else ["--run-dir", str(tmp_path)]
    run = start_run("--train-iters", "100000", *flags)
    run.read(until=r"step .*? 5/100000 .*MFU")
    os.write(run.number, b"\x03")
    assert run.end() == (75 if saves else 130), run.raw
    last = run.shown()
    assert "\x1b[?25l" not in run.raw and "Traceback" not in run.raw
    assert not any(map(SHOWN.match, last)) and last[-1] == "" and "to resume" in "\n".join(last)


def test_tools_show_progress(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "some words"}\n' * 2000)
    programs.run_python("pretrain_gpt.py", *RUN, "--train-iters", "1", "--save", str(tmp_path / "s"), check=True)
    text = "--input t.jsonl --output-prefix mine --tokenizer-type ByteTokenizer --workers 1"
    prefix = "mine_text_document"
    tokenizing = r"tokenizing t.jsonl \S+ [\d.]+/100 % .*documents/s"
    for line, bar, last in (
        (f"preprocess_data.py {text}", tokenizing, f"{prefix}: 2000"),
        (f"inspect_data.py {prefix} --verify", rf"verifying {prefix} \S+ \S+ tokens", "empty documents"),
        ("checkpoint.py verify s", r"verifying s/iter_0000001 \S+ \S+ GiB", "all as they were written"),
        ("convert_checkpoint.py --load s --to-hf hf", r"writing for Hugging Face \S+ \d+/\d+ tensors", "hf"),
        ("convert_checkpoint.py --from-hf hf --save back", r"writing back/iter_0000000 \S+ \d+/\d+ tensors", "back"),
        ("convert_checkpoint.py --load s --to-megatron old", r"writing for Megatron-LM \S+ 1/1 ranks", "old"),
    ):
        name, *args = line.split()
        run = Terminal(python(str(ROOT / "tools" / name), *args), cwd=tmp_path)
        assert run.end() == 0, run.raw
        assert any(re.match(bar, shown) for shown in run.bars()), (line, run.raw)
        assert last in "\n".join(run.shown()) and not any(re.match(bar, shown) for shown in run.shown())


PLAIN = [{"NO_COLOR": "1"}, {"TERM": "dumb"}]


@pytest.mark.parametrize("variables", nightly_except(PLAIN, PLAIN[1:], str, guards=GUARDS))
def test_dumb_terminal_gets_plain_lines(variables: dict[str, str], tmp_path: Path) -> None:
    run = start_run("--train-iters", "3", "--eval-iters", "1", "--run-dir", str(tmp_path), **variables)
    assert run.end() == 0 and "\x1b" not in run.raw and len(LOGGED.findall(run.raw.replace("\r", ""))) == 3


def test_torchrun_and_pipes_get_plain_lines(tmp_path: Path) -> None:
    flags = [*RUN, "--train-iters", "3", "--eval-iters", "1", "--run-dir", str(tmp_path)]
    run = Terminal(python("-m", "torch.distributed.run", "--standalone", "pretrain_gpt.py", *flags))
    assert run.end() == 0 and console.ERASE not in run.raw and len(LOGGED.findall(run.raw.replace("\r", ""))) == 3
    result = programs.run_python("pretrain_gpt.py", *flags, env={**os.environ, "TERM": "xterm"})
    assert (
        "\x1b" not in result.stdout + result.stderr
        and "\r" not in result.stdout
        and len(LOGGED.findall(result.stdout)) == 3
    )


WORK = """
import sys, time
from megalite.common.console import ProgressBar, print_err, print_out
with ProgressBar("outer", 50, "things") as outer:
    for i in range(50):
        outer.update(i + 1, "some [red] text " + "and more " * 20)
        if i == 20:
            with ProgressBar("inner", 3, "parts") as inner:
                for _ in inner.track(range(3)):
                    time.sleep(0.3)
                    print_out("a line")
        if i == 30:
            print_err("a complaint")
        time.sleep(0.02)
print("end")
"""


@pytest.mark.parametrize("columns", nightly_except([160, 60, 0], [60], str, guards=GUARDS))
def test_bar_fits_the_terminal_and_lines_scroll_above_it(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # set by a shell in a wider window; the terminal's own size counts
    run = Terminal(python("-c", WORK), columns=columns)
    assert run.end() == 0, run.raw
    assert run.shown() == ["a line"] * 3 + ["a complaint", "end", ""]
    bars = run.bars()
    assert any(re.match(r"outer \S+ \d+/50 things", bar) for bar in bars)
    assert any(bar.startswith("inner") for bar in bars)
    assert max(map(len, bars)) <= (columns or 80), bars
    assert len([bar for bar in bars if bar.startswith("outer")]) < 15  # of 50
    assert columns != 160 or "some [red] text" in run.raw


def test_bar_without_a_terminal_writes_nothing() -> None:
    result = programs.run_python("-c", WORK)
    assert (result.stdout, result.stderr) == ("a line\n" * 3 + "end\n", "a complaint\n")


def test_closed_or_blocked_terminal_does_not_block_the_program(tmp_path: Path) -> None:
    """The program ends although its window was closed (it ignores SIGHUP, as with nohup) or stopped with Ctrl-S."""
    work = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{WORK}"
    for is_closed in (True, False):
        done_file = tmp_path / str(is_closed)
        program = work.replace("        if i == 30", "        if i == 300")
        program = program.replace("print_out(", "str(").replace("print(", "str(")
        run = Terminal(python("-c", f"{program}\nopen({str(done_file)!r}, 'w').close()"))
        run.read(until="outer")
        if is_closed:
            os.close(run.number)
        else:
            termios.tcflow(run.number, termios.TCOOFF)
        deadline = time.monotonic() + 60
        while not done_file.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert done_file.exists(), is_closed
        if not is_closed:
            termios.tcflow(run.number, termios.TCOON)
            run.end()
        else:
            run.process.wait(60)


def test_progress_lines_are_rare_and_absent_for_short_work(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    progress = console.logged_progress("loading X", 50, "tensors")
    for _ in range(50):
        now[0] += 0.5
        progress.add(1)
    assert capsys.readouterr().out.splitlines() == ["loading X: 20 of 50 tensors", "loading X: 40 of 50 tensors"]


def test_bar_closed_by_two_threads_is_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both threads of a run see at once that the terminal is gone."""
    monkeypatch.setattr(console, "is_interactive", lambda: True)
    outer, bar = console.ProgressBar("outer", 10), console.ProgressBar("inner", 10)
    console._bars.remove(bar)  # the other thread has come this far
    bar.close()
    outer.close()
    assert not console._bars
