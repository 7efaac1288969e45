"""Programs that a test types, as processes of their own that need not import torch again: `run` and `Popen` are those
of subprocess, for words that begin with sys.executable. They are forked from one process per test process that has
imported what a run needs, with their own session, signals, environment, folder and exit code; what an interpreter or
torch reads when it starts makes `Popen` start one."""

import contextlib
import fcntl
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
READ_AT_START = ("PYTHON", "TORCH", "LD_", "OMP_", "MKL_", "CUDA", "TRITON", "LANG", "LC_", "MEGALITE_SIMULATED")
WORD = 4  # bytes of a number between the processes


class Popen(subprocess.Popen[Any]):
    """A program: `script.py ARGS`, `-m module ARGS` or `-c TEXT ARGS`."""

    def __init__(self, words: Sequence[str], **options: Any):
        self._line: socket.socket | None = None
        super().__init__(list(words), **options)

    def _execute_child(self, args: list[str], executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any,
                       cwd: Any, env: Mapping[str, str] | None, *others: Any) -> None:  # fmt: skip
        *_, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, _, _, _, _, _, start_new_session, _ = others
        if preexec_fn is not None or not _can_be_forked(args, cwd, env):
            if start_new_session and preexec_fn is None and p2cread != -1 and os.isatty(p2cread):
                preexec_fn = _take_terminal
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others
            )
            return
        told = {"words": args, "cwd": os.path.abspath(cwd or os.getcwd()), "session": start_new_session}
        told["passed"] = list(pass_fds)
        told["env"] = dict(os.environ if env is None else env)
        self._line, far = socket.socketpair()
        fds = [far.fileno(), *(end if end != -1 else i for i, end in enumerate((p2cread, c2pwrite, errwrite)))]
        _ask(json.dumps(told).encode(), [*fds, *pass_fds])
        far.close()
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]
        self.pid = self._told()
        self._child_created = True

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._line is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc]
        if wait_flags & os.WNOHANG and not select.select([self._line], [], [], 0)[0]:
            return 0, 0
        status = self._told()
        self._line.close()
        return self.pid, status

    def _told(self) -> int:
        number = self._line.recv(WORD, socket.MSG_WAITALL)
        assert len(number) == WORD, "the process that programs are forked from has ended"
        return int.from_bytes(number, sys.byteorder)

    def _internal_poll(self, *args: Any, **kwargs: Any) -> int | None:
        if self._line is None:
            return super()._internal_poll(*args, **kwargs)  # type: ignore[misc]
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


def run(
    words: Sequence[str], *, capture_output: bool = False, ok: bool = False, timeout: float | None = None,
    input: str | bytes | None = None, **options: Any,
) -> subprocess.CompletedProcess[Any]:  # fmt: skip
    """Run a program like subprocess.run. With `ok`, it must exit with 0."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(words, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:  # too long among others
            process.kill()
            raise
    assert process.returncode == 0 or not ok, f"{process.returncode}\n{out}{err}"
    return subprocess.CompletedProcess(words, process.returncode, out, err)


@contextlib.contextmanager
def group(words: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a program in a session with one pipe for all output. The whole session ends with the block."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
    process = subprocess.Popen(words, start_new_session=True, **pipes | options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Talk:
    """A program and its output lines, which a thread reads."""

    def __init__(self, process: subprocess.Popen[str]):
        self.process, self.lines = process, list[str]()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line)

    @property
    def said(self) -> str:
        return "".join(self.lines)

    def until(self, what: str, timeout_s: float = 90, after: int = 0) -> int:
        """Wait for a line that contains `what`, from line `after` on, and return its number."""
        end = time.monotonic() + timeout_s
        while True:
            over = time.monotonic() > end or not self._reader.is_alive()
            for number, line in enumerate(self.lines[after:], after):
                if what in line:
                    return number
            assert not over, f"no {what!r} within {timeout_s} s in:\n{self.said}"
            time.sleep(0.02)

    def end(self, timeout_s: float) -> int:
        """Wait for the end, and return the exit code."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"still running after {timeout_s} s:\n{self.said}") from None
        self._reader.join(5)
        return code


def python(*words: str, **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run `python tools/x.py ARGS`, `-m` or `-c` in the repository, unless `cwd` is another directory."""
    script = words[0] if words[0].startswith("-") else str(ROOT / words[0])
    usual: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 100}
    return run([sys.executable, script, *words[1:]], **usual | options)


def without_safe_path(words: Sequence[str]) -> list[str]:
    """Return the arguments without python's -P."""
    return [words[0], *words[2:]] if [*words[1:2]] == ["-P"] else [*words]


def _can_be_forked(words: Sequence[str], cwd: str | os.PathLike[str] | None, env: Mapping[str, str] | None) -> bool:
    words = without_safe_path(words)
    if words[0] != sys.executable or (words[1].startswith("-") and words[1] not in ("-m", "-c")):
        return False
    if not words[1].startswith("-") and not Path(cwd or ".", words[1]).resolve().is_relative_to(ROOT):
        return False  # it may have a megalite of its own
    given, own = os.environ if env is None else env, environment()
    changed = {name for name in {*given, *own} if given.get(name) != own.get(name)}
    if given.get("PYTHONPATH") == str(ROOT):  # which has it already
        changed.discard("PYTHONPATH")
    return not any(name.startswith(READ_AT_START) for name in changed)


def _ask(told: bytes, fds: list[int]) -> None:
    line = _server()
    socket.send_fds(line, [len(told).to_bytes(WORD, sys.byteorder)], fds)
    line.sendall(told)


@functools.cache
def environment() -> dict[str, str]:
    """Return the environment that programs are forked with: the one at the first call."""
    return dict(os.environ)


@contextlib.contextmanager
def environment_kept() -> Iterator[None]:
    """Restore the variables that make `Popen` start an interpreter. Others may belong to longer-lived fixtures."""
    before = dict(os.environ)
    yield
    for name in {*before, *os.environ}:
        if not name.startswith(READ_AT_START):
            continue
        if name not in before:
            del os.environ[name]
        elif os.environ.get(name) != before[name]:
            os.environ[name] = before[name]


@functools.cache
def _server() -> socket.socket:
    """Return a socket to the process that programs are forked from. It ends when this process does."""
    near, far = socket.socketpair()
    words = [sys.executable, __file__, str(far.fileno())]
    subprocess.Popen(
        words, pass_fds=[far.fileno()], cwd=ROOT, env=environment(), start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    far.close()
    return near


# --- in the process that programs are forked from


def _serve(line: socket.socket) -> dict[str, Any] | None:
    """Fork programs on request. Return the request in a forked program, and None at the end of the socket."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those in between
    while True:
        head, fds, _, _ = socket.recv_fds(line, WORD, 16)
        if len(head) < WORD:
            return None
        size = int.from_bytes(head, sys.byteorder)
        told = json.loads(line.recv(size, socket.MSG_WAITALL))
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            line.close()
            return told if _fork(fds, told["passed"], told["session"]) else None
        for fd in fds:
            os.close(fd)


def _take_terminal() -> None:
    """Make stdin's terminal the controlling terminal of this session."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _fork(fds: list[int], passed: list[int], session: bool) -> bool:
    """Return True in the program itself. Its parent reports its end to the requesting process."""
    answer, *streams = fds
    pid = os.fork()
    if pid == 0:
        if session:
            os.setsid()
        above = max([2, *passed, *fds]) + 1  # so that no number that is given takes the place of another
        for i, fd in zip((0, 1, 2, *passed), [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in streams], strict=True):
            os.dup2(fd, i)
            os.close(fd)
        if session and os.isatty(0):
            _take_terminal()
        for fd in {*fds}.difference(passed):
            os.close(fd)
        return True
    for fd in streams:
        os.close(fd)
    os.write(answer, pid.to_bytes(WORD, sys.byteorder))
    status = os.waitpid(pid, 0)[1]
    with contextlib.suppress(OSError):
        os.write(answer, status.to_bytes(WORD, sys.byteorder))
    os._exit(0)


def _forked_server(spawn: Any) -> Any:
    """Return a replacement for util.spawnv_passfds that forks the fork server of ranks as well."""

    def start(path: Any, words: list[Any], passed: Sequence[int]) -> int:
        if "multiprocessing.forkserver" not in str(words[-1]):
            return spawn(path, words, passed)
        if pid := os.fork():
            return pid
        for number in signal.valid_signals():  # as an exec does: what has a handler has none
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        kept = sorted({0, 1, 2, *passed})
        for low, high in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(low + 1, min(high, 1 << 16))
        try:
            exec(words[-1], {})
        finally:
            os._exit(0)

    return start


def _become(told: dict[str, Any]) -> None:
    import runpy
    from multiprocessing import util

    from megalite.common.fault_injection import inject_fault

    util.spawnv_passfds = _forked_server(util.spawnv_passfds)  # type: ignore[attr-defined]
    os.chdir(told["cwd"])
    os.environ.clear()
    os.environ.update(told["env"])
    with contextlib.suppress(ValueError):  # the program says so itself
        inject_fault.__init__()  # of the environment when it was imported
    words = without_safe_path(told["words"])
    sys.orig_argv[:] = told["words"]
    beside = {"-m": os.getcwd(), "-c": ""}.get(words[1], str(Path(words[1]).resolve().parent))
    sys.path[:1] = [beside] if words == told["words"] else []
    if words[1] == "-m":
        sys.argv[:] = words[2:]
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    elif words[1] == "-c":
        sys.argv[:] = ["-c", *words[3:]]
        exec(compile(words[2], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.argv[:] = words[1:]
        runpy.run_path(words[1], run_name="__main__")


def _import_for_all() -> None:
    import gc
    import importlib

    sys.path[0] = str(ROOT)
    from megalite.launch.local_launcher import PRELOAD

    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _end(code: object) -> None:
    """End like an interpreter, but without unloading modules, which takes longer than most programs."""
    import atexit
    import threading

    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _main(line: socket.socket) -> None:
    _import_for_all()
    told = _serve(line)
    if told is None:
        return
    try:
        _become(told)
    except SystemExit as error:
        _end(error.code)
    except KeyboardInterrupt:
        raise  # the interpreter ends itself by the signal
    except BaseException:
        sys.excepthook(*sys.exc_info())
        _end(1)
    _end(0)


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
