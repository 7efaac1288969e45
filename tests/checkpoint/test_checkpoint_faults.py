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
from checkpoint_loads import ALONE, BACKGROUND, flip, reseal, row, save_steps
from checkpoint_loads import filled as pieces
from data.test_preprocess_resume import dies_at, in_child
from pairwise import rarely
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
    """kill -9 before every call that makes something last or visible; leftovers are swept by the next start."""

    def save_two() -> None:
        one = CheckpointSaver(folder, ALONE, 0, keep_last=1, background=background)
        for step in (2, 3):
            one.save(step, pieces(float(step)), {"step": step})
        one.close()

    status, seen = -1, []
    while status != 0:
        folder = tmp_path / str(len(seen))
        save_steps(folder, 1)
        status = in_child(dies_at(len(seen), save_two))
        assert status in (0, -signal.SIGKILL)
        found, targets = checkpoint_loads.newest(folder, ALONE), pieces(0.0)
        checkpoint_loads.fill(*found, targets, ALONE, exact=True)
        seen.append(found[1].state["step"])
        assert all((target.data == seen[-1]).all() for target in targets)
        CheckpointSaver(folder, ALONE, 0).close()
        assert not list(folder.glob(".iter_*"))
    assert seen == sorted(seen) and set(seen) == {1, 2, 3} and len(seen) > 20


# ---- damaged
DAMAGE = {
    "missing": lambda f: f.unlink(),
    "shorter by one": lambda f: os.truncate(f, f.stat().st_size - 1),
    "longer by one": lambda f: f.write_bytes(f.read_bytes() + b"\0"),
    "empty": lambda f: os.truncate(f, 0),
    "a link": lambda f: (shutil.copy(f, f.with_name("copy")), f.unlink(), f.symlink_to(f.with_name("copy"))),
    "a folder": lambda f: (f.unlink(), f.mkdir()),
    "zeros": lambda f: f.write_bytes(bytes(f.stat().st_size)),
    "a flipped bit": lambda f: flip(f, 12345),
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
    found = checkpoint_loads.newest(tmp_path, ALONE)
    if damage == "shorter by one" and name == "COMPLETE":  # the end of the line after the hash: nothing is lost
        assert found is not None and found[1].state == {"step": 2}
        return
    assert found is not None and found[1].state == {"step": 1}
    shown = "manifest.json" if name == "COMPLETE" else name
    assert shown in capsys.readouterr().err


@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_damage_during_load_falls_back_to_the_previous_checkpoint(tmp_path, monkeypatch, damage: str) -> None:
    """The pieces hold the older checkpoint whole, or, where there is none, nothing that anyone could train on."""
    with monkeypatch.context() as small:  # damage in the middle: some is filled before it
        small.setattr(tensor_file.write_safetensors, "__defaults__", (1 << 12,))
        save_steps(tmp_path, 1, 2)
    DAMAGE[damage](tmp_path / "iter_0000002" / "rank-00000.safetensors")
    targets = pieces(9.0)
    wanted = lambda *_: loader.LoadPlan(targets, exact_dtype=True)  # noqa: E731
    found = loader.load_newest(tmp_path, ALONE, wanted)
    assert found is not None and found[1].state == {"step": 1}
    assert all((target.data == 1.0).all() for target in targets)
    shutil.rmtree(tmp_path / "iter_0000001")
    for target in targets:
        target.data.fill_(9.0)
    with pytest.raises(CheckpointError, match="no checkpoint in it is valid"):
        loader.load_newest(tmp_path, ALONE, wanted)
    late = damage in ("zeros", "a flipped bit")  # its bytes had to be read; all else is known before
    assert all((target.data.isnan() if late else target.data == 9.0).all() for target in targets)


def _one_rank_cannot_take_it(directory: str, gone: bool) -> tuple[float, list[float]]:
    """The newest is damaged where rank 1 alone reads it; or `gone`, as rank 1 sees it, since its files were looked at."""
    mesh = build_mesh(tp=1, pp=1, device=CPU)
    for step in (1, 2):
        target = row(mesh, 10.0 * step + mesh.world.rank, 1 << 10)
        saver.save(directory, step, [target], {"step": step}, mesh)
    if mesh.world.rank == 1 and gone:
        real = LocalStorage.read_lock

        def reading(self: LocalStorage, folder: Path) -> Any:
            if folder.name == "iter_0000002":
                (folder / "COMPLETE.gone").read_text()
            return real(self, folder)

        LocalStorage.read_lock = reading  # type: ignore[method-assign, assignment]
    elif mesh.world.rank == 0 and not gone:
        flip(Path(directory) / "iter_0000002" / "rank-00001.safetensors", 8 * 5000)
    torch.distributed.barrier()
    found = loader.load_newest(directory, mesh, lambda *_: loader.LoadPlan([target], exact_dtype=True))
    return float(found[1].state["step"]), target.data.unique().tolist()


@pytest.mark.parametrize("gone", [False, True], ids=["damaged", "pruned"])
def test_failure_on_one_rank_sends_all_to_the_previous_checkpoint(tmp_path: Path, gone: bool) -> None:
    assert run_ranks(2, _one_rank_cannot_take_it, str(tmp_path), gone) == [(1.0, [10.0]), (1.0, [11.0])]


def test_out_of_memory_for_a_block_is_a_checkpoint_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver.save(tmp_path, 1, pieces(1.0), {}, ALONE)

    def no_memory(*_: Any) -> None:
        raise OSError("can't allocate memory")

    monkeypatch.setattr("megalite.checkpoint.format.reader.mmap.mmap", no_memory)
    with pytest.raises(CheckpointError, match="can't allocate memory"):
        loader.load_newest(tmp_path, ALONE, lambda *_: loader.LoadPlan(pieces(9.0)))


def test_load_reads_every_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box((0, 0), (64, 1 << 17))  # 32 MiB: 8 blocks and the header
    state = [TensorShard("model/w", box.stop, box, range(box.numel), torch.randn(box.numel))]
    saver.save(tmp_path, 1, state, {}, ALONE)
    reads: list[tuple[int, int]] = []
    real = LocalFile.pread
    monkeypatch.setattr(LocalFile, "pread", lambda self, to, at: (reads.append((at, len(to))), real(self, to, at))[1])
    half = Box((0, 0), (32, 1 << 17))
    targets = [TensorShard("model/w", box.stop, half, range(half.numel), torch.zeros(half.numel))]
    loader.load_newest(tmp_path, ALONE, lambda *_: loader.LoadPlan(targets))
    assert torch.equal(targets[0].data, state[0].data[: half.numel])
    header, reads = reads[:2], sorted(reads[2:])  # its length, and its text
    assert sum(size for _, size in header) < 20_000
    # the last block ends in the other half
    assert sum(size for _, size in reads) == half.numel * 4 + tensor_file.BLOCK_BYTES
    assert all(at + size == after for (at, size), (after, _) in pairwise(reads))


def test_swapped_files_of_two_checkpoints_are_detected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (saver.save(tmp_path, step, pieces(float(step)), {}, ALONE) for step in (1, 2))

    def swap(name: str) -> None:
        (one / name).rename(tmp_path / "x")
        (two / name).rename(one / name)
        (tmp_path / "x").rename(two / name)

    for name in ("rank-00000.safetensors", "manifest.json"):
        swap(name)
        with pytest.raises(CheckpointError, match="no checkpoint in it is valid"):
            checkpoint_loads.newest(tmp_path, ALONE)
        assert name in capsys.readouterr().err
        swap(name)
    (two / "rank-00007.safetensors").write_bytes(b"stale")  # that no manifest names: not looked at
    assert checkpoint_loads.newest(tmp_path, ALONE)[0] == two  # type: ignore[index]


def test_flipped_bits_are_detected_and_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.checkpoint.format.safetensors_file.write_safetensors.__defaults__", (256,))
    box = Box((0,), (500,))
    state = [TensorShard(f"model/{n}", (500,), box, range(500), torch.randn(500)) for n in range(6)]
    folder = saver.save(tmp_path, 1, state, {}, ALONE)
    loaded = manifests.load_manifest(folder)
    (file,) = (folder / name for name in loaded.files)
    places = {row.key: name for name, whole in loaded.tensors.items() for row in whole.boxes}
    where = tensor_file.read_header(file)
    for n in range(40):
        bit = n * 997 * 8 % (file.stat().st_size * 8) + n % 8
        flip(file, bit)
        with pytest.raises(CheckpointError, match=file.name) as error:
            reader.verify_checkpoint(folder, loaded)
        hit = [places[key] for key, place in where.items() if place.start <= bit // 8 < place.end]
        if hit:
            assert hit[0] in str(error.value)
        flip(file, bit)
    reader.verify_checkpoint(folder, loaded)


def test_tracker_file_is_not_trusted(tmp_path: Path) -> None:
    save_steps(tmp_path, 3, 4)
    for text in (b"", b"99\n", b"\xff\xfe", b"release\n", b"-1"):
        (tmp_path / storage.TRACKER).write_bytes(text)
        found = checkpoint_loads.newest(tmp_path, ALONE)
        assert found is not None and found[1].state == {"step": 4}
    (tmp_path / storage.TRACKER).unlink()
    assert checkpoint_loads.newest(tmp_path, ALONE, step=3)[1].state == {"step": 3}  # type: ignore[index]
    with pytest.raises(CheckpointError, match="holds no checkpoint of step 5"):
        checkpoint_loads.newest(tmp_path, ALONE, step=5)
    for name in ("iter_3", "iter_0000003x", "iter_٣", "iter_-000003"):
        (tmp_path / name).mkdir()
    assert storage.steps_in(tmp_path) == [3, 4]


# ---- hostile
def mutated(data: Any, rng: random.Random) -> Any:
    """One random place of a JSON value replaced by something unpleasant."""
    data = copy.deepcopy(data)
    bad = [None, True, -1, 2**63, 2**200, 1e308, "", "../x", "/etc/passwd", [], {}, [[]], "NaN", 0.5, "\0", "x" * 1000]
    place, key = None, None
    spot = data
    while isinstance(spot, (dict, list)) and spot and rng.random() < 0.9:
        place, key = spot, rng.choice(sorted(spot)) if isinstance(spot, dict) else rng.randrange(len(spot))
        spot = place[key]
    if place is None:
        return rng.choice(bad)
    if rng.random() < 0.2:
        del place[key]
    else:
        place[key] = rng.choice(bad)
    return data


def test_hostile_manifests_are_refused_or_harmless(tmp_path: Path, monkeypatch) -> None:
    folder = saver.save(tmp_path, 1, pieces(1.0, rows=1)[:2], {"progress": {"step": 1}}, ALONE)
    sealed = json.loads((folder / "manifest.json").read_text())
    opened: list[str] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda p, *a, **k: (opened.append(os.fspath(p)), real(p, *a, **k))[1])
    rng, refused = random.Random(3), 0
    for _ in range(500):
        reseal(folder, mutated(sealed, rng))
        targets = pieces(0.0, rows=1)[:2]
        try:
            loaded = manifests.load_manifest(folder)
            reader.verify_checkpoint(folder, loaded)
            checkpoint_loads.fill(folder, loaded, targets, ALONE, exact=True)
        except CheckpointError:
            refused += 1
            continue
        assert all((target.data == 1.0).all() for target in targets)
    assert refused > 250
    assert all(Path(p).resolve().is_relative_to(tmp_path) for p in opened)


def test_manifest_bombs_are_refused(tmp_path: Path) -> None:
    folder = saver.save(tmp_path, 1, pieces(1.0, rows=1)[:1], {}, ALONE)
    good = json.loads((folder / "manifest.json").read_text())
    for text in ("[" * 200_000, '{"a":' * 50_000, "NaN", "\ufeff{}", '{"format": 2}', "null", "[]", "2"):
        reseal(folder, text)
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            manifests.load_manifest(folder)
    part = good["tensors"]["model/0"]["parts"][0]
    for start, stop in (([0, 0], [1, 1 << 13]), ([0, 4], [1, 1 << 14])):  # twice the same elements, and a hole
        bad = copy.deepcopy(good)
        bad["tensors"]["model/0"]["parts"] = [[part[0], part[1], start, stop]] * 2
        reseal(folder, bad)
        with pytest.raises(CheckpointError, match="elements"):
            manifests.load_manifest(folder)


@pytest.mark.parametrize("dims", rarely([1, 2, 3], [2], str, guards=("megalite/checkpoint/format",)))
def test_many_boxes_are_checked_quickly(tmp_path: Path, dims: int) -> None:
    """90,000 boxes of one element, side by side in one row: pairs of them would take minutes."""
    folder = saver.save(tmp_path, 1, pieces(1.0, rows=1)[:1], {}, ALONE)
    data = json.loads((folder / "manifest.json").read_text())
    count, tensor = 90_000, data["tensors"]["model/0"]
    file, key = tensor["parts"][0][:2]
    ones, zeros = [1] * (dims - 1), [0] * (dims - 1)
    parts = [[file, key, [*zeros, i], [*ones, i + 1]] for i in range(count)]
    for last in (count - 1, 0):  # all of them; one twice in place of the last
        data["tensors"]["model/0"] = {**tensor, "shape": [*ones, count], "parts": [*parts[:-1], parts[last]]}
        reseal(folder, data)
        if last:
            assert len(manifests.load_manifest(folder).tensors["model/0"].boxes) == count
        else:
            with pytest.raises(CheckpointError, match="two of its boxes hold the same elements"):
                manifests.load_manifest(folder)
    data["tensors"]["model/0"] = {**tensor, "shape": [1] * 60, "parts": [[file, key, [0] * 60, [1] * 60]]}
    reseal(folder, data)
    with pytest.raises(CheckpointError, match="has 60 dims"):
        manifests.load_manifest(folder)


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
    """With hashes that fit: whoever wrote it wrote the manifest too."""
    folder = saver.save(tmp_path, 1, pieces(1.0, rows=1)[:1], {}, ALONE)
    file = folder / "rank-00000.safetensors"
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    changed = HEADERS[attack](content[:end])
    assert changed != content[:end] and len(changed) == end
    file.write_bytes(changed + content[end:])
    stamp = tensor_file.BlockHash()
    stamp.update(memoryview(file.read_bytes()))
    data = json.loads((folder / "manifest.json").read_text())
    made = stamp.checksum()
    data["files"][file.name] = [made.size, made.algorithm, made.block_size, made.digests]
    reseal(folder, data)
    loaded = manifests.load_manifest(folder)
    reader.verify_checkpoint(folder, loaded)
    target = pieces(0.0, rows=1)[:1]
    with pytest.raises(CheckpointError, match="rank-00000|cannot be read"):
        reader.CheckpointReader(folder, loaded).fill(target)
    assert not target[0].data.any()
