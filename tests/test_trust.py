"""What SECURITY.md says of the network and of code that lies beside what is read."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from train_cases import SMALL

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.data.tokenizers.tokenizer_types import build_tokenizer
from megalite.interop.hugging_face.model_files import open_model

ROOT = Path(__file__).resolve().parents[1]
LISTENS = "0A"  # the state in /proc/net/tcp


def processes(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from processes(int(child))


def listeners(pid: int) -> list[str]:
    """The addresses, as the kernel writes them, on which a process or one below it listens."""
    sockets = set()
    for one in processes(pid):
        for number in os.listdir(f"/proc/{one}/fd"):
            try:
                target = os.readlink(f"/proc/{one}/fd/{number}")
            except FileNotFoundError:
                continue
            sockets |= set(re.findall(r"^socket:\[(\d+)\]$", target))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == LISTENS and row[9] in sockets]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_of_one_node_listen_on_that_node_alone(tmp_path: Path) -> None:
    flags = [*SMALL, "--train-iters", "1000000", "--nproc", "2", "--run-dir", str(tmp_path)]
    words = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)
    late = threading.Timer(120, os.killpg, (process.pid, signal.SIGKILL))
    late.start()
    try:
        assert process.stdout is not None
        assert any("step     2/" in line for line in process.stdout)
        found = listeners(process.pid)
    finally:
        late.cancel()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert found and all(address.startswith("0100007F:") for address in found), found  # 127.0.0.1


def test_code_beside_a_tokenizer_or_a_model_is_not_run(tmp_path: Path) -> None:
    """Where transformers runs it, if it is told to trust it."""
    canary = tmp_path / "ran"
    Tokenizer(models.BPE({"<|endoftext|>": 0, "a": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    names = {
        "AutoTokenizer": ["evil.Evil", "evil.Evil"],
        "AutoConfig": "evil.Evil",
        "AutoModelForCausalLM": "evil.Evil",
    }
    for name in ("tokenizer_config.json", "config.json"):
        shape = {"model_type": "evil", "auto_map": names, "tokenizer_class": "Evil", "eos_token": "<|endoftext|>"}
        (tmp_path / name).write_text(json.dumps(shape))
    for name in ("evil.py", "__init__.py", "conftest.py"):
        (tmp_path / name).write_text(f"open({str(canary)!r}, 'w')\nclass Evil: pass\n")
    assert build_tokenizer("HuggingFaceTokenizer", str(tmp_path)).encode("a") == [1]
    with pytest.raises(CheckpointError, match="model_type='evil' is not one of"):
        open_model(tmp_path)
    assert not canary.exists()
