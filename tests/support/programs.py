"""Replacements for subprocess.run and Popen that fork Python programs, which then need not import torch again.

Programs are forked from one process per test process, which has imported what a run needs. Each has its own session,
signals, environment, working directory and exit code. A command is forked if it begins with sys.executable; if its
environment differs in what an interpreter or torch reads when it starts, `Popen` starts an interpreter instead.
"""

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
NUMBER_BYTES = 4  # of a number that the processes send each other


class Popen(subprocess.Popen[Any]):
    """A program: `script.py ARGS`, `-m module ARGS` or `-c TEXT ARGS`."""

    def __init__(self, argv: Sequence[str], **options: Any):
        self._socket: socket.socket | None = None
        super().__init__(list(argv), **options)

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
        request = {"argv": args, "cwd": os.path.abspath(cwd or os.getcwd()), "start_new_session": start_new_session}
        request["pass_fds"] = list(pass_fds)
        request["env"] = dict(os.environ if env is None else env)
        self._socket, far = socket.socketpair()
        fds = [far.fileno(), *(end if end != -1 else i for i, end in enumerate((p2cread, c2pwrite, errwrite)))]
        _send_request(json.dumps(request).encode(), [*fds, *pass_fds])
        far.close()
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]
        self.pid = self._receive_number()
        self._child_created = True

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._socket is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc]
        if wait_flags & os.WNOHANG and not select.select([self._socket], [], [], 0)[0]:
            return 0, 0
        status = self._receive_number()
        self._socket.close()
        return self.pid, status

    def _receive_number(self) -> int:
        number = self._socket.recv(NUMBER_BYTES, socket.MSG_WAITALL)
        assert len(number) == NUMBER_BYTES, "the process that programs are forked from has ended"
        return int.from_bytes(number, sys.byteorder)

    def _internal_poll(self, *args: Any, **kwargs: Any) -> int | None:
        if self._socket is None:
            return super()._internal_poll(*args, **kwargs)  # type: ignore[misc]
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


def run(
    argv: Sequence[str], *, capture_output: bool = False, check: bool = False, timeout: float | None = None,
    input: str | bytes | None = None, **options: Any,
) -> subprocess.CompletedProcess[Any]:  # fmt: skip
    """Run a program like subprocess.run. With `check`, its exit code must be 0."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(argv, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:  # the timeout, among others
            process.kill()
            raise
    assert process.returncode == 0 or not check, f"{process.returncode}\n{out}{err}"
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


@contextlib.contextmanager
def program_session(argv: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a program in its own session, with one pipe for all output. Kill the session at the end of the block."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
    process = subprocess.Popen(argv, start_new_session=True, **pipes | options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class ProgramOutput:
    """A program and the lines of its output, which a thread reads."""

    def __init__(self, process: subprocess.Popen[str]):
        self.process, self.lines = process, list[str]()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_for_line(self, text: str, timeout_s: float = 90, from_line: int = 0) -> int:
        """Wait for a line that contains `text`, from number `from_line` on, and return the line's number."""
        end = time.monotonic() + timeout_s
        while True:
            is_over = time.monotonic() > end or not self._reader.is_alive()
            for number, line in enumerate(self.lines[from_line:], from_line):
                if text in line:
                    return number
            assert not is_over, f"no {text!r} within {timeout_s} s in:\n{self.output}"
            time.sleep(0.02)

    def wait(self, timeout_s: float) -> int:
        """Wait for the end, and return the exit code."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output}") from None
        self._reader.join(5)
        return code


def run_python(*args: str, **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run `python tools/x.py ARGS`, `-m` or `-c` in the repository, unless `cwd` is another directory."""
    script = args[0] if args[0].startswith("-") else str(ROOT / args[0])
    defaults: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 100}
    return run([sys.executable, script, *args[1:]], **defaults | options)


def without_safe_path(argv: Sequence[str]) -> list[str]:
    """Return the command without the interpreter's -P."""
    return [argv[0], *argv[2:]] if [*argv[1:2]] == ["-P"] else [*argv]


def _can_be_forked(argv: Sequence[str], cwd: str | os.PathLike[str] | None, env: Mapping[str, str] | None) -> bool:
    argv = without_safe_path(argv)
    if argv[0] != sys.executable or (argv[1].startswith("-") and argv[1] not in ("-m", "-c")):
        return False
    if not argv[1].startswith("-") and not Path(cwd or ".", argv[1]).resolve().is_relative_to(ROOT):
        return False  # it may import another megalite
    variables, initial = os.environ if env is None else env, initial_environment()
    changed = {name for name in {*variables, *initial} if variables.get(name) != initial.get(name)}
    if variables.get("PYTHONPATH") == str(ROOT):  # sys.path has it anyway
        changed.discard("PYTHONPATH")
    return not any(name.startswith(READ_AT_START) for name in changed)


def _send_request(request: bytes, fds: list[int]) -> None:
    server = _server()
    socket.send_fds(server, [len(request).to_bytes(NUMBER_BYTES, sys.byteorder)], fds)
    server.sendall(request)


@functools.cache
def initial_environment() -> dict[str, str]:
    """Return the environment of the process that programs are forked from: the one at the first call."""
    return dict(os.environ)


@contextlib.contextmanager
def environment_restored() -> Iterator[None]:
    """Restore, after the block, the variables that make `Popen` start an interpreter.

    Other variables may belong to longer-lived fixtures.
    """
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
    argv = [sys.executable, __file__, str(far.fileno())]
    subprocess.Popen(
        argv, pass_fds=[far.fileno()], cwd=ROOT, env=initial_environment(), start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    far.close()
    return near


# --- in the process that programs are forked from


def _serve(client: socket.socket) -> dict[str, Any] | None:
    """Fork a program for each request. Return the request in the program, and None when the socket is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the parents of programs
    while True:
        header, fds, _, _ = socket.recv_fds(client, NUMBER_BYTES, 16)
        if len(header) < NUMBER_BYTES:
            return None
        size = int.from_bytes(header, sys.byteorder)
        request = json.loads(client.recv(size, socket.MSG_WAITALL))
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            client.close()
            return request if _fork(fds, request["pass_fds"], request["start_new_session"]) else None
        for fd in fds:
            os.close(fd)


def _take_terminal() -> None:
    """Make stdin's terminal the controlling terminal of this session."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _fork(fds: list[int], pass_fds: list[int], start_new_session: bool) -> bool:
    """Fork a program, and return True in it. Its parent reports its process id and its end to the requesting process."""
    reply_fd, *streams = fds
    pid = os.fork()
    if pid == 0:
        if start_new_session:
            os.setsid()
        min_fd = max([2, *pass_fds, *fds]) + 1  # so that no descriptor overwrites another one
        for i, fd in zip((0, 1, 2, *pass_fds), [fcntl.fcntl(fd, fcntl.F_DUPFD, min_fd) for fd in streams], strict=True):
            os.dup2(fd, i)
            os.close(fd)
        if start_new_session and os.isatty(0):
            _take_terminal()
        for fd in {*fds}.difference(pass_fds):
            os.close(fd)
        return True
    for fd in streams:
        os.close(fd)
    os.write(reply_fd, pid.to_bytes(NUMBER_BYTES, sys.byteorder))
    status = os.waitpid(pid, 0)[1]
    with contextlib.suppress(OSError):
        os.write(reply_fd, status.to_bytes(NUMBER_BYTES, sys.byteorder))
    os._exit(0)


def _forked_server(spawn: Any) -> Any:
    """Return a replacement for util.spawnv_passfds that also forks the fork server of ranks."""

    def start(path: Any, argv: list[Any], pass_fds: Sequence[int]) -> int:
        if "multiprocessing.forkserver" not in str(argv[-1]):
            return spawn(path, argv, pass_fds)
        if pid := os.fork():
            return pid
        for signal_number in signal.valid_signals():  # remove handlers, as exec does
            if callable(signal.getsignal(signal_number)):
                signal.signal(signal_number, signal.SIG_DFL)
        open_fds = sorted({0, 1, 2, *pass_fds})
        for low, high in zip(open_fds, [*open_fds[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(low + 1, min(high, 1 << 16))
        from multiprocessing import forkserver

        forkserver._forkserver.__init__()  # type: ignore[attr-defined,misc]  # its lock is taken, since it forks
        try:
            exec(argv[-1], {})
        finally:
            os._exit(0)

    return start


def _run_program(request: dict[str, Any]) -> None:
    """Run the requested program in this process, as its interpreter would."""
    import runpy
    from multiprocessing import util

    from megalite.common.fault_injection import inject_fault

    util.spawnv_passfds = _forked_server(util.spawnv_passfds)  # type: ignore[attr-defined]
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    with contextlib.suppress(ValueError):  # the program reports it itself
        inject_fault.__init__()  # it has read the environment when it was imported
    argv = without_safe_path(request["argv"])
    sys.orig_argv[:] = request["argv"]
    import_dir = {"-m": os.getcwd(), "-c": ""}.get(argv[1], str(Path(argv[1]).resolve().parent))
    sys.path[:1] = [import_dir] if argv == request["argv"] else []
    if argv[1] == "-m":
        sys.argv[:] = argv[2:]
        runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
    elif argv[1] == "-c":
        sys.argv[:] = ["-c", *argv[3:]]
        exec(compile(argv[2], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.argv[:] = argv[1:]
        runpy.run_path(argv[1], run_name="__main__")


def _import_modules() -> None:
    """Import the modules that the programs share."""
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


def _main(client: socket.socket) -> None:
    _import_modules()
    request = _serve(client)
    if request is None:
        return
    try:
        _run_program(request)
    except SystemExit as error:
        _end(error.code)
    except KeyboardInterrupt:
        raise  # the interpreter ends itself with the signal
    except BaseException:
        sys.excepthook(*sys.exc_info())
        _end(1)
    _end(0)


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
