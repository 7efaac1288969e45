"""Two simulated nodes: Linux namespaces with separate networks, host names, /etc/hosts and processes.

    with two_nodes(directory) as (a, b):
        process = a.start([...])
        a.set_cable("down")
        b.kill()
        b.boot()

Their cables end in a switch, a third namespace. So a node whose cable is pulled keeps its address, like a real one.
The nodes share the file system. This needs Linux and root, or the permission to create user namespaces.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from programs import ProgramOutput

ROOT = Path(__file__).resolve().parents[2]
HOSTS = "127.0.0.1 localhost\n10.77.0.1 node-a\n10.77.0.2 node-b\n"
INTERFACE = "wire0"


class NamespaceError(Exception):
    """The machine cannot create or configure namespaces. The text is the error message of the command that failed."""


def _run_command(argv: Sequence[str]) -> None:
    try:
        result = subprocess.run(argv, capture_output=True, text=True, timeout=20)
    except FileNotFoundError as error:
        raise NamespaceError(str(error)) from None
    if result.returncode:
        raise NamespaceError(f"{' '.join(argv)}: {result.stderr.strip()}")


class Machine:
    """A set of namespaces. Without root, it shares the user namespace of `parent`, if any."""

    def __init__(self, name: str, hosts: Path, parent: "Machine | None" = None):
        self.name, self._hosts, self._parent = name, hosts, parent
        self._outer: subprocess.Popen[str] | None = None

    def boot(self) -> None:
        root, parent = os.geteuid() == 0, self._parent
        enter = [] if root or parent is None else ["nsenter", "-t", parent.pid(), "-U", "--preserve-credentials"]
        user_namespace = [] if root or parent is not None else ["--user", "--map-root-user"]
        namespaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        script = f"hostname {self.name} && mount --bind {self._hosts} /etc/hosts && ip link set lo up"
        argv = [*enter, "unshare", *user_namespace, *namespaces, "sh", "-c", f"{script} && echo on && exec sleep 900"]
        pipe = subprocess.PIPE
        try:
            self._outer = subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True)
        except FileNotFoundError as error:
            raise NamespaceError(str(error)) from None
        if self._outer.stdout.readline() != "on\n":
            raise NamespaceError(self._outer.stderr.read().strip())

    def pid(self) -> str:
        """Return the id, outside of the namespace, of its first process: the last of a chain of only children."""
        pid = str(self._outer.pid)
        while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            pid = children[0]
        return pid

    def command_prefix(self, with_processes: bool = True) -> list[str]:
        """Return the prefix of a command that runs in these namespaces, except for processes unless `with_processes`."""
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        process = ["--pid"] if with_processes else []
        return ["nsenter", "-t", self.pid(), *user, "--net", "--uts", "--mount", *process, "env", "-C", str(ROOT)]

    def ip(self, *args: str) -> None:
        # process ids in the arguments are those outside of the namespace
        _run_command([*self.command_prefix(with_processes=False), "ip", *args])

    def kill(self) -> None:
        """Kill all its processes at once."""
        if self._outer is not None and self._outer.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(self.pid()), signal.SIGKILL)
            self._outer.wait(10)


class Node(Machine):
    def __init__(self, name: str, address: str, hosts: Path, switch: Machine):
        super().__init__(name, hosts, switch)
        self.address, self.switch, self.programs = address, switch, list[ProgramOutput]()

    def boot(self) -> None:
        """Start the node, with its cable connected."""
        super().boot()
        self.switch.ip("link", "add", self.name, "type", "veth", "peer", "name", INTERFACE, "netns", self.pid())
        self.switch.ip("link", "set", self.name, "master", "switch", "up")
        self.ip("address", "add", f"{self.address}/24", "dev", INTERFACE)
        self.ip("link", "set", INTERFACE, "up")

    def set_cable(self, state: str) -> None:
        """Set the cable's state: up or down."""
        self.switch.ip("link", "set", self.name, state)

    def slow_down(self) -> None:
        """Delay incoming packets by 20 ms, or limit the cable to 8 Mbit/s if the kernel cannot delay."""
        options = (["netem", "delay", "20ms"], ["tbf", "rate", "8mbit", "burst", "16kb", "latency", "400ms"])
        tc = [*self.switch.command_prefix(), "tc", "qdisc", "replace", "dev", self.name, "root"]
        if not any(
            subprocess.run([*tc, *option], capture_output=True, timeout=20).returncode == 0 for option in options
        ):
            raise NamespaceError("tc has neither netem nor tbf")

    def start(self, argv: Sequence[str], **variables: str) -> ProgramOutput:
        env, pipe, out = {**os.environ, "OMP_NUM_THREADS": "1", **variables}, subprocess.PIPE, subprocess.STDOUT
        self.programs.append(
            ProgramOutput(
                subprocess.Popen([*self.command_prefix(), *argv], stdout=pipe, stderr=out, text=True, env=env)
            )
        )
        return self.programs[-1]

    def kill(self) -> None:
        super().kill()
        for program in self.programs:
            program.wait(10)


@contextlib.contextmanager
def two_nodes(directory: Path) -> Iterator[tuple[Node, Node]]:
    """Start two nodes, and kill them at the end of the block. Raises NamespaceError."""
    (hosts := directory / "hosts").write_text(HOSTS)
    switch = Machine("switch", hosts)
    nodes = [Node(name, address, hosts, switch) for name, address in (("node-a", "10.77.0.1"), ("node-b", "10.77.0.2"))]
    try:
        switch.boot()
        switch.ip("link", "add", "switch", "type", "bridge")
        switch.ip("link", "set", "switch", "up")
        for node in nodes:
            node.boot()
        yield nodes[0], nodes[1]
    finally:
        for machine in (*nodes, switch):
            machine.kill()
