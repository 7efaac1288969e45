"""Megatron-LM's torch_dist format: torch.distributed.checkpoint writes the fixtures, or they are cut as its ranks do."""

import argparse
import io
import itertools
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.filesystem as dcp_files
import torch.distributed.checkpoint.metadata as dcp_meta
from test_convert_megatron import (
    Calls,
    Case,
    L,
    V,
    assert_holds,
    assert_refused,
    evil,
    full_weights,
    old_member,
    stage,
    tool,
)
from torch import Tensor

GPT = Case()
LLAMA = Case(groups=2, llama=True, tied=False)


def global_tensors(case: Case, stacked: bool) -> dict[str, Tensor]:
    """Return Megatron Core's sharded state: one tensor per name, layers stacked or numbered."""
    names = stage(case, full_weights(case), 1, 0, range(L))
    if not stacked:
        return names
    result = {name: values for name, values in names.items() if ".layers." not in name}
    for name in [name for name in names if ".layers.0." in name]:
        result[name.replace(".0.", ".")] = torch.stack([names[name.replace(".0.", f".{n}.")] for n in range(L)])
    return result


def _save(directory: Path, case: Case, stacked: bool) -> None:
    """Save the state as one process does."""
    state: dict[str, Any] = dict(global_tensors(case, stacked))
    state["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.zeros(3)
    state["rng_state/shard_0_1"] = {"a": 1}
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=directory, no_dist=True)


def _save_cut(directory: Path, case: Case, stacked: bool) -> None:
    """Save the state as 2 x 2 ranks do: layers over one axis (pp), rows over the other (tp), if they divide."""
    files = [io.BytesIO() for _ in range(4)]
    metadata, storage = {}, {}
    for key, full_tensor in global_tensors(case, stacked).items():
        shape, chunks = full_tensor.shape, []
        cuts = [2 if dim < 2 and n % 2 == 0 else 1 for dim, n in enumerate(shape)]
        for coordinates in itertools.product(*map(range, cuts)):
            sizes = [n // cut for n, cut in zip(shape, cuts, strict=True)]
            offsets = [i * n for i, n in zip(coordinates, sizes, strict=True)]
            file = files[sum(coordinates)]
            start = file.tell()
            shard = full_tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
            torch.save(shard.clone(), file)
            chunks.append(dcp_meta.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            index = dcp_meta.MetadataIndex(key, torch.Size(offsets))
            storage[index] = dcp_files._StorageInfo(f"__{sum(coordinates)}_0.distcp", start, file.tell() - start)
        properties = dcp_meta.TensorProperties(full_tensor.dtype)
        metadata[key] = dcp_meta.TensorStorageMetadata(properties, shape, chunks)
    for rank, file in enumerate(files):
        (directory / f"__{rank}_0.distcp").write_bytes(file.getvalue())
    data = dcp_meta.Metadata(metadata, storage_data=storage)
    (directory / ".metadata").write_bytes(pickle.dumps(data))


def write(directory: Path, case: Case, stacked: bool = True, cut: bool = False) -> Path:
    target = directory / "iter_0000007"
    target.mkdir(parents=True)
    (directory / "latest_checkpointed_iteration.txt").write_text("7")
    (_save_cut if cut else _save)(target, case, stacked)
    torch.save({"args": argparse.Namespace(**case.args), "iteration": 7}, target / "common.pt")
    return target


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("stacked", [False, True], ids=["numbered", "stacked"])
@pytest.mark.parametrize("case", [GPT, LLAMA], ids=["gpt", "llama"])
def test_every_chunk_is_read_at_its_position(case: Case, stacked: bool, cut: bool, tmp_path: Path, capsys) -> None:
    write(tmp_path / "theirs", case, stacked, cut)
    assert tool("--from-megatron", tmp_path / "theirs", "--save", tmp_path / "ours", "--vocab-size", V, "--check") == 0
    assert "all bits equal" in capsys.readouterr().out
    assert_holds(tmp_path / "ours", full_weights(case), V)


def test_early_python_3_11_enums_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_meta._MEM_FORMAT_ENCODING, "__reduce_ex__", old_member)
    write(tmp_path / "theirs", GPT, False)
    assert b"getattr" in (tmp_path / "theirs" / "iter_0000007" / ".metadata").read_bytes()
    assert tool("--from-megatron", tmp_path / "theirs", "--save", tmp_path / "ours", "--vocab-size", V, "--check") == 0


def _metadata(directory: Path, change: Callable[[Any], object]) -> None:
    data = pickle.loads((directory / ".metadata").read_bytes())
    change(data)
    (directory / ".metadata").write_bytes(pickle.dumps(data))


def _update_storage(data: Any, **values: Any) -> None:
    for info in data.storage_data.values():
        for name, value in values.items():
            setattr(info, name, value)


QKV = "decoder.layers.self_attention.linear_qkv.weight"
HOSTILE: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "command": (lambda f, c: (f / ".metadata").write_bytes(pickle.dumps(evil(c))), "names posix.system, which is not"),
    "inside": (lambda f, c: _metadata(f, lambda d: setattr(d, "planner_data", evil(c))), "names posix.system"),
    "method": (lambda f, c: _metadata(f, lambda d: setattr(d, "planner_data", Calls(Path.touch, c))), r"names \w+.getattr|names pathlib"),
    "in common": (lambda f, c: torch.save({"args": evil(c)}, f / "common.pt"), "names posix.system"),
    "in a chunk": (lambda f, c: (torch.save(evil(c), f / "__0_0.distcp"),
                                 _metadata(f, lambda d: _update_storage(d, offset=0, length=(f / "__0_0.distcp").stat().st_size))),
                   "cannot be read .UnpicklingError"),
    "truncated": (lambda f, c: os.truncate(f / ".metadata", 100), "refused: pickle data was truncated"),
    "garbage": (lambda f, c: (f / ".metadata").write_bytes(b"\x80\x04" + bytes(range(256))), "refused: invalid load key"),
    "parent": (lambda f, c: _metadata(f, lambda d: _update_storage(d, relative_path="../x")), "'../x', which is not a file"),
    "absolute": (lambda f, c: _metadata(f, lambda d: _update_storage(d, relative_path="/etc/passwd")), "which is not a file"),
    "offset": (lambda f, c: _metadata(f, lambda d: _update_storage(d, offset=1 << 40)), "ends before"),
    "no file": (lambda f, c: (f / "__0_0.distcp").unlink(), "which is not a file"),
    "cut file": (lambda f, c: os.truncate(f / "__0_0.distcp", 2000), "ends before"),
    "missing": (lambda f, c: _metadata(f, lambda d: d.state_dict_metadata.pop(QKV)), "linear_qkv.weight is missing"),
    "hole": (lambda f, c: _metadata(f, lambda d: d.state_dict_metadata[QKV].chunks.clear()), "has a hole: 0 of"),
    "no place": (lambda f, c: _metadata(f, lambda d: d.storage_data.clear()), "cannot be read"),
    "other size": (lambda f, c: _metadata(f, lambda d: setattr(d.state_dict_metadata[QKV], "size", torch.Size((4, 9, 9)))),
                   "outside|not"),
    "no common": (lambda f, c: (f / "common.pt").unlink(), "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_dist_files_are_refused_without_execution(attack: str, tmp_path: Path, capsys) -> None:
    change, reason = HOSTILE[attack]
    change(write(tmp_path / "theirs", GPT), tmp_path / "canary")
    assert_refused(tmp_path / "theirs", capsys, reason)
