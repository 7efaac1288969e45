"""Killed, damaged, hostile: never a checkpoint that loads wrong, never no checkpoint, and no code ever runs."""

import copy
import json
import os
import random
import shutil
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import checkpoint_loads
import pytest
import torch
from checkpoint_loads import BACKGROUND, SINGLE_PROCESS, invert_bit, replace_manifest, row_shard, save_steps
from checkpoint_loads import constant_shards as pieces
from data.test_preprocess_resume import dies_at, in_child
from pairwise import nightly_except
from ranks import run_ranks

from megalite.checkpoint.format import manifest as manifests
from megalite.checkpoint.format import reader
from megalite.checkpoint.format import safetensors_file as tensor_file
from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.manager import loader, saver
from megalite.checkpoint.manager.saver import CheckpointSaver
from megalite.checkpoint.storage import storage as storage
from megalite.checkpoint.storage.local_storage import LocalFile, LocalStorage
from megalite.parallel.mesh import build_mesh
from megalite.parallel.spec import Box, TensorShard

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


# ---- killed


@BACKGROUND
def test_save_killed_at_any_time_leaves_a_complete_checkpoint(tmp_path: Path, background: bool) -> None:
    """Kill the process before every call that makes something durable or visible; the next start removes leftovers."""

    def save_two() -> None:
        checkpoint_saver = CheckpointSaver(directory, SINGLE_PROCESS, 0, keep_last=1, background=background)
        for step in (2, 3):
            checkpoint_saver.save(step, pieces(float(step)), {"step": step})
        checkpoint_saver.close()

    status, loaded_steps = -1, []
    while status != 0:
        directory = tmp_path / str(len(loaded_steps))
        save_steps(directory, 1)
        status = in_child(dies_at(len(loaded_steps), save_two))
        assert status in (0, -signal.SIGKILL)
        newest, targets = checkpoint_loads.load_newest(directory, SINGLE_PROCESS), pieces(0.0)
        checkpoint_loads.load_shards(*newest, targets, SINGLE_PROCESS, exact=True)
        loaded_steps.append(newest[1].state["step"])
        assert all((target.data == loaded_steps[-1]).all() for target in targets)
        CheckpointSaver(directory, SINGLE_PROCESS, 0).close()
        assert not list(directory.glob(".iter_*"))
    assert loaded_steps == sorted(loaded_steps) and set(loaded_steps) == {1, 2, 3} and len(loaded_steps) > 20


# ---- damaged
DAMAGE = {
    "missing": lambda f: f.unlink(),
    "shorter by one": lambda f: os.truncate(f, f.stat().st_size - 1),
    "longer by one": lambda f: f.write_bytes(f.read_bytes() + b"\0"),
    "empty": lambda f: os.truncate(f, 0),
    "a link": lambda f: (shutil.copy(f, f.with_name("copy")), f.unlink(), f.symlink_to(f.with_name("copy"))),
    "a directory": lambda f: (f.unlink(), f.mkdir()),
    "zeros": lambda f: f.write_bytes(bytes(f.stat().st_size)),
    "a flipped bit": lambda f: invert_bit(f, 12345),
}


@pytest.mark.parametrize("damage", sorted(DAMAGE))
@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00002.safetensors", "manifest.json", "COMPLETE"])
def test_load_names_a_damaged_file_and_uses_the_previous_checkpoint(
    tmp_path: Path, capsys, name: str, damage: str
) -> None:
    from test_checkpoint import cut, save_all

    for step in (1, 2):
        save_all(tmp_path, cut(torch.full((6, 4), float(step)), "model/w", 0, 1, 3), step, {"step": step})
    DAMAGE[damage](tmp_path / "iter_0000002" / name)
    newest = checkpoint_loads.load_newest(tmp_path, SINGLE_PROCESS)
    if damage == "shorter by one" and name == "COMPLETE":  # the end of the line after the hash: nothing is lost
        assert newest is not None and newest[1].state == {"step": 2}
        return
    assert newest is not None and newest[1].state == {"step": 1}
    reported_name = "manifest.json" if name == "COMPLETE" else name
    assert reported_name in capsys.readouterr().err


@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_damage_during_load_falls_back_to_the_previous_checkpoint(tmp_path, monkeypatch, damage: str) -> None:
    """The pieces hold the complete older checkpoint or, if there is none, nothing that a run could train on."""
    with monkeypatch.context() as patch:  # damage in the middle: some blocks are filled before it
        patch.setattr(tensor_file.write_safetensors, "__defaults__", (1 << 12,))
        save_steps(tmp_path, 1, 2)
    DAMAGE[damage](tmp_path / "iter_0000002" / "rank-00000.safetensors")
    targets = pieces(9.0)
    plan_load = lambda *_: loader.LoadPlan(targets, exact_dtype=True)  # noqa: E731
    newest = loader.load_newest(tmp_path, SINGLE_PROCESS, plan_load)
    assert newest is not None and newest[1].state == {"step": 1}
    assert all((target.data == 1.0).all() for target in targets)
    shutil.rmtree(tmp_path / "iter_0000001")
    for target in targets:
        target.data.fill_(9.0)
    with pytest.raises(CheckpointError, match="no checkpoint in it is valid"):
        loader.load_newest(tmp_path, SINGLE_PROCESS, plan_load)
    partly_filled = damage in ("zeros", "a flipped bit")  # only its bytes show it; all else is known before
    assert all((target.data.isnan() if partly_filled else target.data == 9.0).all() for target in targets)


def _load_with_failure_on_rank_1(directory: str, deleted: bool) -> tuple[float, list[float]]:
    """Load while the newest checkpoint is damaged where only rank 1 reads it, or deleted for rank 1 during the load."""
    mesh = build_mesh(tp=1, pp=1, device=CPU)
    for step in (1, 2):
        target = row_shard(mesh, 10.0 * step + mesh.world.rank, 1 << 10)
        saver.save(directory, step, [target], {"step": step}, mesh)
    if mesh.world.rank == 1 and deleted:
        real = LocalStorage.read_lock

        def failing_read_lock(self: LocalStorage, checkpoint_dir: Path) -> Any:
            if checkpoint_dir.name == "iter_0000002":
                (checkpoint_dir / "COMPLETE.gone").read_text()
            return real(self, checkpoint_dir)

        LocalStorage.read_lock = failing_read_lock  # type: ignore[method-assign, assignment]
    elif mesh.world.rank == 0 and not deleted:
        invert_bit(Path(directory) / "iter_0000002" / "rank-00001.safetensors", 8 * 5000)
    torch.distributed.barrier()
    newest = loader.load_newest(directory, mesh, lambda *_: loader.LoadPlan([target], exact_dtype=True))
    return float(newest[1].state["step"]), target.data.unique().tolist()


@pytest.mark.parametrize("deleted", [False, True], ids=["damaged", "pruned"])
def test_failure_on_one_rank_sends_all_to_the_previous_checkpoint(tmp_path: Path, deleted: bool) -> None:
    assert run_ranks(2, _load_with_failure_on_rank_1, str(tmp_path), deleted) == [(1.0, [10.0]), (1.0, [11.0])]


def test_out_of_memory_for_a_block_is_a_checkpoint_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver.save(tmp_path, 1, pieces(1.0), {}, SINGLE_PROCESS)

    def no_memory(*_: Any) -> None:
        raise OSError("can't allocate memory")

    monkeypatch.setattr("megalite.checkpoint.format.reader.mmap.mmap", no_memory)
    with pytest.raises(CheckpointError, match="can't allocate memory"):
        loader.load_newest(tmp_path, SINGLE_PROCESS, lambda *_: loader.LoadPlan(pieces(9.0)))


def test_load_reads_every_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box((0, 0), (64, 1 << 17))  # 32 MiB: 8 blocks and the header
    state = [TensorShard("model/w", box.stop, box, range(box.numel), torch.randn(box.numel))]
    saver.save(tmp_path, 1, state, {}, SINGLE_PROCESS)
    reads: list[tuple[int, int]] = []
    real = LocalFile.pread
    monkeypatch.setattr(
        LocalFile,
        "pread",
        lambda self, target, offset: (reads.append((offset, len(target))), real(self, target, offset))[1],
    )
    half = Box((0, 0), (32, 1 << 17))
    targets = [TensorShard("model/w", box.stop, half, range(half.numel), torch.zeros(half.numel))]
    loader.load_newest(tmp_path, SINGLE_PROCESS, lambda *_: loader.LoadPlan(targets))
    assert torch.equal(targets[0].data, state[0].data[: half.numel])
    header, reads = reads[:2], sorted(reads[2:])  # its length, and its text
    assert sum(size for _, size in header) < 20_000
    # the last block ends in the other half
    assert sum(size for _, size in reads) == half.numel * 4 + tensor_file.BLOCK_BYTES
    assert all(offset + size == next_offset for (offset, size), (next_offset, _) in pairwise(reads))


def test_swapped_files_of_two_checkpoints_are_detected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (saver.save(tmp_path, step, pieces(float(step)), {}, SINGLE_PROCESS) for step in (1, 2))

    def swap(name: str) -> None:
        (first / name).rename(tmp_path / "x")
        (second / name).rename(first / name)
        (tmp_path / "x").rename(second / name)

    for name in ("rank-00000.safetensors", "manifest.json"):
        swap(name)
        with pytest.raises(CheckpointError, match="no checkpoint in it is valid"):
            checkpoint_loads.load_newest(tmp_path, SINGLE_PROCESS)
        assert name in capsys.readouterr().err
        swap(name)
    (second / "rank-00007.safetensors").write_bytes(b"stale")  # no manifest names it, so it is ignored
    assert checkpoint_loads.load_newest(tmp_path, SINGLE_PROCESS)[0] == second  # type: ignore[index]


def test_flipped_bits_are_detected_and_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.checkpoint.format.safetensors_file.write_safetensors.__defaults__", (256,))
    box = Box((0,), (500,))
    state = [TensorShard(f"model/{n}", (500,), box, range(500), torch.randn(500)) for n in range(6)]
    checkpoint_dir = saver.save(tmp_path, 1, state, {}, SINGLE_PROCESS)
    manifest = manifests.load_manifest(checkpoint_dir)
    (file,) = (checkpoint_dir / name for name in manifest.files)
    tensor_names = {row.key: name for name, tensor in manifest.tensors.items() for row in tensor.boxes}
    header = tensor_file.read_header(file)
    for n in range(40):
        bit = n * 997 * 8 % (file.stat().st_size * 8) + n % 8
        invert_bit(file, bit)
        with pytest.raises(CheckpointError, match=file.name) as error:
            reader.verify_checkpoint(checkpoint_dir, manifest)
        damaged_names = [tensor_names[key] for key, entry in header.items() if entry.start <= bit // 8 < entry.end]
        if damaged_names:
            assert damaged_names[0] in str(error.value)
        invert_bit(file, bit)
    reader.verify_checkpoint(checkpoint_dir, manifest)


def test_tracker_file_is_not_trusted(tmp_path: Path) -> None:
    save_steps(tmp_path, 3, 4)
    for text in (b"", b"99\n", b"\xff\xfe", b"release\n", b"-1"):
        (tmp_path / storage.TRACKER).write_bytes(text)
        newest = checkpoint_loads.load_newest(tmp_path, SINGLE_PROCESS)
        assert newest is not None and newest[1].state == {"step": 4}
    (tmp_path / storage.TRACKER).unlink()
    assert checkpoint_loads.load_newest(tmp_path, SINGLE_PROCESS, step=3)[1].state == {"step": 3}  # type: ignore[index]
    with pytest.raises(CheckpointError, match="holds no checkpoint of step 5"):
        checkpoint_loads.load_newest(tmp_path, SINGLE_PROCESS, step=5)
    for name in ("iter_3", "iter_0000003x", "iter_٣", "iter_-000003"):
        (tmp_path / name).mkdir()
    assert storage.steps_in(tmp_path) == [3, 4]


# ---- hostile
def mutated(data: Any, rng: random.Random) -> Any:
    """Return a copy of a JSON value with one random entry deleted or replaced by an invalid one."""
    data = copy.deepcopy(data)
    bad = [None, True, -1, 2**63, 2**200, 1e308, "", "../x", "/etc/passwd", [], {}, [[]], "NaN", 0.5, "\0", "x" * 1000]
    parent, key = None, None
    value = data
    while isinstance(value, (dict, list)) and value and rng.random() < 0.9:
        parent, key = value, rng.choice(sorted(value)) if isinstance(value, dict) else rng.randrange(len(value))
        value = parent[key]
    if parent is None:
        return rng.choice(bad)
    if rng.random() < 0.2:
        del parent[key]
    else:
        parent[key] = rng.choice(bad)
    return data


def test_hostile_manifests_are_refused_or_harmless(tmp_path: Path, monkeypatch) -> None:
    checkpoint_dir = saver.save(tmp_path, 1, pieces(1.0, rows=1)[:2], {"progress": {"step": 1}}, SINGLE_PROCESS)
    sealed = json.loads((checkpoint_dir / "manifest.json").read_text())
    opened: list[str] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda p, *a, **k: (opened.append(os.fspath(p)), real(p, *a, **k))[1])
    rng, num_refused = random.Random(3), 0
    for _ in range(500):
        replace_manifest(checkpoint_dir, mutated(sealed, rng))
        targets = pieces(0.0, rows=1)[:2]
        try:
            manifest = manifests.load_manifest(checkpoint_dir)
            reader.verify_checkpoint(checkpoint_dir, manifest)
            checkpoint_loads.load_shards(checkpoint_dir, manifest, targets, SINGLE_PROCESS, exact=True)
        except CheckpointError:
            num_refused += 1
            continue
        assert all((target.data == 1.0).all() for target in targets)
    assert num_refused > 250
    assert all(Path(p).resolve().is_relative_to(tmp_path) for p in opened)


def test_manifest_bombs_are_refused(tmp_path: Path) -> None:
    checkpoint_dir = saver.save(tmp_path, 1, pieces(1.0, rows=1)[:1], {}, SINGLE_PROCESS)
    good = json.loads((checkpoint_dir / "manifest.json").read_text())
    for text in ("[" * 200_000, '{"a":' * 50_000, "NaN", "\ufeff{}", '{"format": 2}', "null", "[]", "2"):
        replace_manifest(checkpoint_dir, text)
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            manifests.load_manifest(checkpoint_dir)
    part = good["tensors"]["model/0"]["parts"][0]
    for start, stop in (([0, 0], [1, 1 << 13]), ([0, 4], [1, 1 << 14])):  # the same elements twice, and a hole
        bad = copy.deepcopy(good)
        bad["tensors"]["model/0"]["parts"] = [[part[0], part[1], start, stop]] * 2
        replace_manifest(checkpoint_dir, bad)
        with pytest.raises(CheckpointError, match="elements"):
            manifests.load_manifest(checkpoint_dir)


@pytest.mark.parametrize("dims", nightly_except([1, 2, 3], [2], str, guards=("megalite/checkpoint/format",)))
def test_many_boxes_are_checked_quickly(tmp_path: Path, dims: int) -> None:
    """There are 90,000 boxes of one element, side by side in one row; comparing pairs of them would take minutes."""
    checkpoint_dir = saver.save(tmp_path, 1, pieces(1.0, rows=1)[:1], {}, SINGLE_PROCESS)
    data = json.loads((checkpoint_dir / "manifest.json").read_text())
    count, tensor = 90_000, data["tensors"]["model/0"]
    file, key = tensor["parts"][0][:2]
    ones, zeros = [1] * (dims - 1), [0] * (dims - 1)
    parts = [[file, key, [*zeros, i], [*ones, i + 1]] for i in range(count)]
    for last in (count - 1, 0):  # all of them; one twice in place of the last
        data["tensors"]["model/0"] = {**tensor, "shape": [*ones, count], "parts": [*parts[:-1], parts[last]]}
        replace_manifest(checkpoint_dir, data)
        if last:
            assert len(manifests.load_manifest(checkpoint_dir).tensors["model/0"].boxes) == count
        else:
            with pytest.raises(CheckpointError, match="two of its boxes hold the same elements"):
                manifests.load_manifest(checkpoint_dir)
    data["tensors"]["model/0"] = {**tensor, "shape": [1] * 60, "parts": [[file, key, [0] * 60, [1] * 60]]}
    replace_manifest(checkpoint_dir, data)
    with pytest.raises(CheckpointError, match="has 60 dims"):
        manifests.load_manifest(checkpoint_dir)


HEADERS = {
    "longer than the file": lambda h: (1 << 40).to_bytes(8, "little") + h[8:],
    "beyond the end": lambda h: h.replace(b'"data_offsets":[0,', b'"data_offsets":[9,'),
    "negative": lambda h: h.replace(b'"data_offsets":[0', b'"data_offsets":[-'),
    "dtype": lambda h: h.replace(b'"F32"', b'"F99"'),
    "another shape": lambda h: h.replace(b"[1,16384]", b"[16384,1]"),
    "no JSON": lambda h: h[:8] + b"[" * (len(h) - 8),
}


@pytest.mark.parametrize("attack", sorted(HEADERS))
def test_hostile_safetensors_header_is_refused(tmp_path: Path, attack: str) -> None:
    """The hashes match, since whoever wrote the file wrote the manifest too."""
    checkpoint_dir = saver.save(tmp_path, 1, pieces(1.0, rows=1)[:1], {}, SINGLE_PROCESS)
    file = checkpoint_dir / "rank-00000.safetensors"
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    changed = HEADERS[attack](content[:end])
    assert changed != content[:end] and len(changed) == end
    file.write_bytes(changed + content[end:])
    block_hash = tensor_file.BlockHash()
    block_hash.update(memoryview(file.read_bytes()))
    data = json.loads((checkpoint_dir / "manifest.json").read_text())
    checksum = block_hash.checksum()
    data["files"][file.name] = [checksum.size, checksum.algorithm, checksum.block_size, checksum.digests]
    replace_manifest(checkpoint_dir, data)
    manifest = manifests.load_manifest(checkpoint_dir)
    reader.verify_checkpoint(checkpoint_dir, manifest)
    target = pieces(0.0, rows=1)[:1]
    with pytest.raises(CheckpointError, match="rank-00000|cannot be read"):
        reader.CheckpointReader(checkpoint_dir, manifest).fill(target)
    assert not target[0].data.any()
