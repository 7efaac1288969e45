"""What a run of one machine lets other machines reach: nothing."""

import ipaddress
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from train_cases import SMALL
from whole_runs import children, running

LISTEN = "0A"


def address(text: str) -> str:
    """Of a field of /proc/net/tcp: words of 32 bits, in the machine's order."""
    raw = b"".join(bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8))
    found = ipaddress.ip_address(raw)
    return str(getattr(found, "ipv4_mapped", None) or found)


def listeners(pid: int) -> Iterator[str]:
    """Addresses at which a process waits for connections."""
    mine = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            mine |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(descriptor)))
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == LISTEN and fields[9] in mine:
                yield address(fields[1].partition(":")[0])


def test_ranks_of_one_machine_listen_on_its_loopback_only(tmp_path: Path) -> None:
    flags = ["--train-iters", "100000", "--run-dir", tmp_path, "--nproc", "2", "--device", "cpu", "--pp", "2"]
    with running(*SMALL, *flags) as run:
        pids = [run.pid, *children(run.pid), *(rank for server in children(run.pid) for rank in children(server))]
        found = [ipaddress.ip_address(a) for pid in pids for a in listeners(pid)]
    assert len(found) >= 2 and all(one.is_loopback for one in found), found
