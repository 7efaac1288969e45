"""What a run of one machine lets other machines reach: nothing."""

import ipaddress
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import programs
from train_cases import SMALL

ROOT = Path(__file__).resolve().parents[2]
LISTEN = "0A"


def processes(first: int) -> Iterator[int]:
    yield first
    with suppress(OSError):
        for child in Path(f"/proc/{first}/task/{first}/children").read_text().split():
            yield from processes(int(child))


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


def test_a_table_of_sockets_is_read_right() -> None:
    assert address("0100007F") == "127.0.0.1" and address("00000000000000000000000001000000") == "::1"
    assert address("00000000") == "0.0.0.0" and address("0000000000000000FFFF00000100007F") == "127.0.0.1"


def test_ranks_of_one_machine_listen_on_its_loopback_only(tmp_path: Path) -> None:
    words = [
        sys.executable,
        str(ROOT / "pretrain_gpt.py"),
        *SMALL,
        "--train-iters",
        "100000",
        "--run-dir",
        str(tmp_path),
        "--nproc",
        "2",
    ]
    run = programs.Popen([*words, "--device", "cpu", "--pp", "2"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert run.stdout is not None
        assert any("step     2/" in line for line in run.stdout)
        found = [ipaddress.ip_address(a) for pid in processes(run.pid) for a in listeners(pid)]
        assert len(found) >= 2 and all(one.is_loopback for one in found), found
    finally:
        run.kill()
        run.communicate(timeout=20)
