"""Two simulated nodes: Linux namespaces with separate networks, host names, /etc/hosts and processes.

    with two_nodes(folder) as (a, b): run = a.start([...]); a.cable("down"); b.kill(); b.boot()

Their cables end in a switch, a third namespace: a node whose cable is pulled keeps its address, like a real one.
They share the file system. This needs Linux and root, or the permission to create user namespaces.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from programs import Talk

ROOT = Path(__file__).resolve().parents[2]
HOSTS = "127.0.0.1 localhost\n10.77.0.1 node-a\n10.77.0.2 node-b\n"
CARD = "wire0"


class Unpermitted(Exception):
    """The machine refuses to create namespaces; the text is its error."""


def _do(words: Sequence[str]) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    except FileNotFoundError as error:
        raise Unpermitted(str(error)) from None
    if done.returncode:
        raise Unpermitted(f"{' '.join(words)}: {done.stderr.strip()}")


class Machine:
    """One set of namespaces. Without root, it shares the user namespace of `within`."""

    def __init__(self, name: str, hosts: Path, within: "Machine | None" = None):
        self.name, self._hosts, self._within = name, hosts, within
        self._outer: subprocess.Popen[str] | None = None

    def boot(self) -> None:
        root, within = os.geteuid() == 0, self._within
        into = [] if root or within is None else ["nsenter", "-t", within.pid(), "-U", "--preserve-credentials"]
        user = [] if root or within is not None else ["--user", "--map-root-user"]
        parts = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        script = f"hostname {self.name} && mount --bind {self._hosts} /etc/hosts && ip link set lo up"
        words = [*into, "unshare", *user, *parts, "sh", "-c", f"{script} && echo on && exec sleep 900"]
        pipe = subprocess.PIPE
        try:
            self._outer = subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True)
        except FileNotFoundError as error:
            raise Unpermitted(str(error)) from None
        if self._outer.stdout.readline() != "on\n":
            raise Unpermitted(self._outer.stderr.read().strip())

    def pid(self) -> str:
        """Return the id of its first process outside of the namespace: the last in a chain of only children."""
        pid = str(self._outer.pid)
        while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            pid = children[0]
        return pid

    def inside(self, processes: bool = True) -> list[str]:
        """Return the prefix of a command that runs here, with `processes` also in its process namespace."""
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        own = ["--pid"] if processes else []
        return ["nsenter", "-t", self.pid(), *user, "--net", "--uts", "--mount", *own, "env", "-C", str(ROOT)]

    def ip(self, *words: str) -> None:
        _do([*self.inside(processes=False), "ip", *words])  # numbers of processes are those out here

    def kill(self) -> None:
        """Kill all its processes at once."""
        if self._outer is not None and self._outer.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(self.pid()), signal.SIGKILL)
            self._outer.wait(10)


class Node(Machine):
    def __init__(self, name: str, address: str, hosts: Path, switch: Machine):
        super().__init__(name, hosts, switch)
        self.address, self.switch, self.started = address, switch, list[Talk]()

    def boot(self) -> None:
        """Start the node, with its cable connected."""
        super().boot()
        self.switch.ip("link", "add", self.name, "type", "veth", "peer", "name", CARD, "netns", self.pid())
        self.switch.ip("link", "set", self.name, "master", "switch", "up")
        self.ip("address", "add", f"{self.address}/24", "dev", CARD)
        self.ip("link", "set", CARD, "up")

    def cable(self, state: str) -> None:
        """Set the cable's state: up or down."""
        self.switch.ip("link", "set", self.name, state)

    def slow_down(self) -> None:
        """Delay incoming packets by 20 ms, or limit the cable to 8 Mbit/s if the kernel cannot delay."""
        ways = (["netem", "delay", "20ms"], ["tbf", "rate", "8mbit", "burst", "16kb", "latency", "400ms"])
        tc = [*self.switch.inside(), "tc", "qdisc", "replace", "dev", self.name, "root"]
        if not any(subprocess.run([*tc, *way], capture_output=True, timeout=20).returncode == 0 for way in ways):
            raise Unpermitted("tc has neither netem nor tbf")

    def start(self, words: Sequence[str], **variables: str) -> Talk:
        env, pipe, out = {**os.environ, "OMP_NUM_THREADS": "1", **variables}, subprocess.PIPE, subprocess.STDOUT
        self.started.append(
            Talk(subprocess.Popen([*self.inside(), *words], stdout=pipe, stderr=out, text=True, env=env))
        )
        return self.started[-1]

    def kill(self) -> None:
        super().kill()
        for one in self.started:
            one.end(10)


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[tuple[Node, Node]]:
    """Create two nodes. Raises Unpermitted."""
    (hosts := folder / "hosts").write_text(HOSTS)
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
