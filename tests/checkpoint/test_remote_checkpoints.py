"""Checkpoints behind URLs: in memory, and in a real object store (moto's server)."""

import functools
import gc
import os
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoint_loads
import fsspec
import programs
import pytest
import torch
from checkpoint_loads import BACKGROUND, SINGLE_PROCESS, constant_shards, save_steps
from fsspec.implementations.memory import MemoryFileSystem
from train_cases import SMALL_RUN

from megalite.checkpoint import offline
from megalite.checkpoint.format import manifest as manifests
from megalite.checkpoint.format import reader
from megalite.checkpoint.format import safetensors_file as tensor_file
from megalite.checkpoint.manager import loader, retention, saver
from megalite.checkpoint.manager.saver import CheckpointSaver
from megalite.checkpoint.storage import location
from megalite.checkpoint.storage import remote_storage as object_store
from megalite.checkpoint.storage import storage as storage
from megalite.checkpoint.storage.location import CheckpointError, RemotePath, parse_location
from megalite.parallel.spec import Box, TensorShard

ROOT = Path(__file__).resolve().parents[2]
KINDS = ["memory", "s3"]


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    """Yield the address of an S3 server in this process, with a bucket "runs"; children get it from the environment."""
    from moto.server import ThreadedMotoServer
    from werkzeug.serving import WSGIRequestHandler

    WSGIRequestHandler.disable_nagle_algorithm = True  # otherwise each answer waits 40 ms for an acknowledgement
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    names = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**names, "AWS_ENDPOINT_URL": address, "NO_PROXY": "127.0.0.1"}.items():
            patch.setenv(name, value)
        fsspec.filesystem("s3").mkdir("runs")
        yield address
    server.stop()


@pytest.fixture(params=KINDS)
def base(request: pytest.FixtureRequest) -> str:
    """Return the URL of a new --save directory."""
    if request.param == "s3":
        request.getfixturevalue("s3_server")
    return f"{request.param}://runs/{uuid.uuid4().hex}"


@pytest.fixture
def on_s3(request: pytest.FixtureRequest) -> str:
    request.getfixturevalue("s3_server")
    return f"s3://runs/{uuid.uuid4().hex}"


SIZES = {"columns": 1 << 12, "count": 2}
pieces, save_small = functools.partial(constant_shards, **SIZES), functools.partial(save_steps, **SIZES)


def files(url: str) -> dict[str, int]:
    """Return the sizes of all objects below `url`, by their relative names."""
    remote_path = parse_location(url)
    entries = remote_path.files.find(remote_path.path, detail=True)
    return {name[len(remote_path.path) + 1 :]: entry["size"] for name, entry in entries.items()}


def change(url: str, content: bytes | None) -> None:
    remote_path = parse_location(url)
    remote_path.files.rm_file(remote_path.path) if content is None else remote_path.files.pipe_file(
        remote_path.path, content
    )


def load_value(url: str) -> float:
    """Return the value of the newest checkpoint, verified and loaded into other boxes than it was saved in."""
    newest = checkpoint_loads.load_newest(url, SINGLE_PROCESS)
    targets = []
    for n in range(2):
        box = Box((1, 3), (3, 1 << 12))
        targets.append(TensorShard(f"model/{n}", (4, 1 << 12), box, range(5, box.numel), torch.zeros(box.numel - 5)))
    checkpoint_loads.load_shards(*newest, targets, SINGLE_PROCESS, exact=True)
    value = float(targets[0].data[0])
    assert all((target.data == value).all() for target in targets)
    return value


@BACKGROUND
def test_remote_save_and_load(base: str, background: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    put, create = object_store.RemoteStorage.write_text, object_store.RemoteStorage.open_new
    monkeypatch.setattr(
        object_store.RemoteStorage, "write_text", lambda s, p, t, **k: (order.append(p.name), put(s, p, t))[1]
    )
    monkeypatch.setattr(object_store.RemoteStorage, "open_new", lambda s, p: (order.append(p.name), create(s, p))[1])
    assert checkpoint_loads.load_newest(base, SINGLE_PROCESS) is None
    checkpoint_saver = CheckpointSaver(
        base, SINGLE_PROCESS, 1 << 60, background=background
    )  # no store reports its free space
    for step in (1, 2):
        order.clear()
        checkpoint_saver.save(step, pieces(float(step)), {"step": step})
        checkpoint_saver.wait()
        names = ["rank-00000.safetensors", "rank-00000.json", "manifest.json", "COMPLETE", storage.TRACKER]
        assert order == names  # COMPLETE, which makes the checkpoint exist, follows all that it needs
    targets = pieces(0.0)
    newest = loader.load_newest(base, SINGLE_PROCESS, lambda *_: loader.LoadPlan(targets, exact_dtype=True))
    assert newest is not None and all((target.data == 2.0).all() for target in targets)
    assert load_value(base) == 2.0 and storage.steps_in(base) == [1, 2]
    checkpoint_saver.close()
    file_names = ["COMPLETE", "manifest.json", "rank-00000.safetensors"]
    assert sorted(files(base)) == sorted(
        [storage.TRACKER, *(f"iter_000000{n}/{f}" for n in (1, 2) for f in file_names)]
    )
    assert checkpoint_loads.load_newest(base, SINGLE_PROCESS, step=1)[1].state == {"step": 1}  # type: ignore[index]
    with pytest.raises(CheckpointError, match="holds no checkpoint of step 3"):
        checkpoint_loads.load_newest(base, SINGLE_PROCESS, step=3)
    checkpoint_saver = CheckpointSaver(base + "/", SINGLE_PROCESS, 0)
    checkpoint_saver.save(2, pieces(5.0), {})  # the same step again
    checkpoint_saver.close()
    assert load_value(base) == 5.0


DAMAGE: dict[str, Any] = {
    "flipped": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "longer": lambda data: data + b"\0\0",
    "missing": lambda data: None,
}


@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_remote_damage_falls_back_to_the_previous_checkpoint(base: str, damage: str, capsys) -> None:
    save_small(base, 1, 2)
    for name in ("rank-00000.safetensors", "manifest.json", "COMPLETE"):
        url = f"{base}/iter_0000002/{name}"
        remote_path = parse_location(url)
        content = remote_path.files.cat_file(remote_path.path)  # type: ignore[union-attr]
        change(url, DAMAGE[damage](content))
        assert load_value(base) == 1.0
        assert ("manifest.json" if name == "COMPLETE" else name) in capsys.readouterr().err
        change(url, content)
    assert load_value(base) == 2.0
    for step in (1, 2):
        change(f"{base}/iter_000000{step}/COMPLETE", None)
    with pytest.raises(CheckpointError, match="no checkpoint in it is valid"):  # and it does not start from scratch
        checkpoint_loads.load_newest(base, SINGLE_PROCESS)


def test_remote_retention_and_cleanup(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save_small(base, *range(1, 7))
    change(f"{base}/iter_0000001/KEEP", b"")
    change(f"{base}/iter_0000007/mp_rank_00/model_optim_rng.pt", b"of Megatron-LM")
    change(f"{base}/iter_0000008/notes.txt", b"of somebody")
    remote_path = parse_location(base)
    assert retention.RetentionPolicy(remote_path, 2, 4).prune(dry=True) == [2, 3] and len(storage.steps_in(base)) == 8
    assert retention.RetentionPolicy(remote_path, 2, 4).prune() == [2, 3]
    assert storage.steps_in(base) == [1, 4, 5, 6, 7, 8]
    real, deletions_left = object_store.RemoteStorage.delete, [1]

    def delete_until_killed(self: Any, path: RemotePath) -> None:
        if not deletions_left[0]:
            raise KeyboardInterrupt
        deletions_left[0] -= 1
        real(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(object_store.RemoteStorage, "delete", delete_until_killed)
        with pytest.raises(KeyboardInterrupt):
            retention.RetentionPolicy(remote_path, 2).prune()
    assert "COMPLETE" not in files(f"{base}/iter_0000004")  # deleted first, so this is no checkpoint any more
    checkpoint_saver = CheckpointSaver(base, SINGLE_PROCESS, 0)
    assert "iter_0000004" in checkpoint_saver.pop_messages()[0]
    checkpoint_saver.close()
    assert storage.steps_in(base) == [1, 5, 6, 7, 8]  # directories of others stay


def test_remote_checkpoint_in_use_is_not_deleted(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save_small(base, 1, 2, 3)
    remote_path, real, pruned = parse_location(base), object_store.RemoteFile.pread, []

    def prune_and_read(self: Any, target: memoryview, offset: int) -> None:
        pruned.extend(retention.RetentionPolicy(remote_path, 1).prune())
        real(self, target, offset)

    with monkeypatch.context() as patch:
        patch.setattr(object_store.RemoteFile, "pread", prune_and_read)
        assert offline.open_checkpoint(f"{base}/iter_0000001").read("model/0")[0, 0] == 1.0
    assert pruned == [2] and storage.steps_in(base) == [1, 3]
    assert not any(".reading-" in name for name in files(base))
    checkpoint_dir, store = location.checkpoint_dir(base, 1), storage.storage_of(remote_path)
    monkeypatch.setattr(object_store, "RENEW_S", 0.02)
    monkeypatch.setattr(object_store, "STALE_S", 1.0)
    with store.read_lock(checkpoint_dir):
        time.sleep(1.3)  # longer than a mark is valid: it is renewed
        assert store.in_use(checkpoint_dir) and retention.RetentionPolicy(remote_path, 1).prune() == []
    for n, content in enumerate((b"", b"nan", b"\xff", b"9" * 200, str(time.time() - 2).encode())):
        change(f"{base}/iter_0000001/.reading-{n:032x}", content)  # from a reader that was killed, or invalid
    with monkeypatch.context() as patch:
        refuse = lambda *_: (_ for _ in ()).throw(PermissionError("read only"))  # noqa: E731
        patch.setattr(object_store.RemoteStorage, "write_text", refuse)
        with store.read_lock(checkpoint_dir):  # the checkpoint is not protected, but it can be read
            assert not store.in_use(checkpoint_dir)
    assert retention.RetentionPolicy(remote_path, 1).prune() == [1]
    assert not any("iter_0000001" in name for name in files(base))


def test_later_run_takes_over_and_the_earlier_ends(base: str) -> None:
    first_saver = CheckpointSaver(base, SINGLE_PROCESS, 0, keep_last=2)
    first_saver.save(1, pieces(1.0), {})
    second_saver = CheckpointSaver(base, SINGLE_PROCESS, 0)
    with pytest.raises(CheckpointError, match=f"taken over by process {os.getpid()} on .* this run stops saving"):
        first_saver.save(2, pieces(2.0), {})
    assert storage.steps_in(base) == [1]
    first_saver.background = True
    with pytest.raises(CheckpointError, match="taken over"):
        first_saver.save(2, pieces(2.0), {})
    second_saver.save(3, pieces(3.0), {})
    first_saver.close()
    second_saver.save(4, pieces(4.0), {})
    second_saver.close()
    assert load_value(base) == 4.0 and location.LOCK_FILE not in files(base)


def test_takeover_between_files_and_commit(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_saver = CheckpointSaver(base, SINGLE_PROCESS, 0, background=True)
    real = manifests.write_rank_file

    def write_and_take_over(*args: Any) -> None:
        real(*args)
        CheckpointSaver(base, SINGLE_PROCESS, 0)

    monkeypatch.setattr(manifests, "write_rank_file", write_and_take_over)
    checkpoint_saver.save(1, pieces(1.0), {})
    with pytest.raises(CheckpointError, match="taken over"):
        checkpoint_saver.wait()
    assert not any("COMPLETE" in name for name in files(base))


def test_upload_that_fails_half_way_is_aborted(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "PART_BYTES", 5 << 20)  # the smallest that S3 takes
    values = torch.randn(3 << 20)  # 12 MiB: two parts, since 4 MiB are handed over at a time
    box = Box((0,), (len(values),))
    piece = TensorShard("model/w", box.stop, box, range(len(values)), values)
    checkpoint_dir = saver.save(base, 1, [piece], {}, SINGLE_PROCESS)
    name = next(iter(manifests.load_manifest(checkpoint_dir).files))
    if base.startswith("s3"):
        assert (checkpoint_dir / name).files.info((checkpoint_dir / name).path)["ETag"].strip('"').endswith("-2")
    reloaded = TensorShard(piece.name, piece.shape, box, piece.span, torch.zeros_like(values))
    monkeypatch.setattr(object_store, "READ_BYTES", 1 << 20)
    reader.verify_checkpoint(checkpoint_dir, manifests.load_manifest(checkpoint_dir))
    checkpoint_loads.load_shards(
        checkpoint_dir, manifests.load_manifest(checkpoint_dir), [reloaded], SINGLE_PROCESS, exact=True
    )
    assert torch.equal(reloaded.data, values)

    def failing_blocks(size: int = 6 << 20) -> Iterator[torch.Tensor]:
        yield torch.zeros(size, dtype=torch.uint8)
        raise RuntimeError("half way")

    target = parse_location(base) / "iter_0000002" / "rank-00000.safetensors"
    with pytest.raises(RuntimeError, match="half way"):
        tensor_file.write_safetensors(target, [], failing_blocks())
    gc.collect()  # fsspec closes, and so commits, files that are collected
    if base.startswith("s3"):
        assert not any("iter_0000002" in name for name in files(base))
        uploads = target.files.call_s3("list_multipart_uploads", Bucket="runs")  # type: ignore[union-attr]
        assert not uploads.get("Uploads")  # they would cost money


def test_checkpoint_tool_accepts_urls(base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from test_checkpoint_tool import tool

    for step in (1, 2):
        saver.save(base, step, pieces(float(step)), {"progress": {"step": step}}, SINGLE_PROCESS)
    assert tool.main(["inspect", base]) == 0 and "iter_0000002: step 2" in capsys.readouterr().out
    assert tool.main(["verify", base, "--all"]) == 0
    assert tool.main(["reshard", base, str(tmp_path), "--files", "2"]) == 0
    assert tool.main(["reshard", str(tmp_path), f"{base}/back", "--files", "3"]) == 0
    assert tool.main(["diff", base, f"{base}/back/iter_0000002"]) == 0
    assert "2 tensors, equal to the bit" in capsys.readouterr().out
    assert tool.main(["average", f"{base}/mean", f"{base}/iter_0000001", base]) == 0
    assert float(offline.open_checkpoint(f"{base}/mean").read("model/0")[0, 0]) == 1.5
    assert tool.main(["prune", base, "--keep-last", "1"]) == 0 and storage.steps_in(base) == [2]
    assert tool.main(["inspect", f"{base}/nothing"]) == 3


# ---- refused, retried
def test_invalid_urls_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for url, text in {
        "nobody://x/y": "nobody.*install what it names",
        "simplecache::s3://x/y": "chains protocols",
        "file://relative": "not absolute: give file:///directory",
    }.items():
        with pytest.raises(CheckpointError, match=text):
            CheckpointSaver(url, SINGLE_PROCESS, 0)
    CheckpointSaver(f"file://{tmp_path}/local", SINGLE_PROCESS, 0).close()
    save_small(f"file://{tmp_path}/local", 1)
    assert (tmp_path / "local" / "iter_0000001" / "COMPLETE").is_file() and load_value(f"{tmp_path}/local") == 1.0
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(CheckpointError, match="needs the package fsspec; pip install fsspec"):
        parse_location("memory://x")


def test_missing_bucket_is_refused(on_s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "FIRST_WAIT_S", 0.0)
    with pytest.raises(CheckpointError, match="save='s3://nobodys/x' cannot be written .*check its name"):
        CheckpointSaver("s3://nobodys/x", SINGLE_PROCESS, 0)
    assert not fsspec.filesystem("s3").exists("nobodys")  # and is not created
    monkeypatch.setattr(object_store, "ATTEMPTS", 1)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody listens
    type(fsspec.filesystem("s3")).clear_instance_cache()  # a client reads the environment once
    with pytest.raises(CheckpointError, match="looking for checkpoints in s3://runs/x: .*listing it"):
        checkpoint_loads.load_newest("s3://runs/x", SINGLE_PROCESS)  # never taken for an empty directory
    type(fsspec.filesystem("s3")).clear_instance_cache()


class Unsteady(MemoryFileSystem):
    """A store in which every call with the same arguments fails `bad` times before it works."""

    protocol = "unsteady"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    bad = 0
    calls: Counter[tuple[Any, ...]] = Counter()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("unsteady://").strip("/")

    def _fail(self, *key: Any) -> None:
        Unsteady.calls[key] += 1
        if Unsteady.calls[key] % (Unsteady.bad + 1):
            raise ConnectionError("reset by peer")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        self._fail("cat", path, start)
        return super().cat_file(path, start, end, **kwargs)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self._fail("pipe", path)
        super().pipe_file(path, value, mode, **kwargs)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        self._fail("ls", path)
        return super().ls(path, detail, **kwargs)


fsspec.register_implementation("unsteady", Unsteady, clobber=True)


def test_intermittent_store_failures_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "FIRST_WAIT_S", 0.0)
    url = f"unsteady://runs/{uuid.uuid4().hex}"
    monkeypatch.setattr(Unsteady, "bad", 2)
    checkpoint_saver = CheckpointSaver(url, SINGLE_PROCESS, 0)
    checkpoint_saver.save(1, pieces(1.0), {})
    assert load_value(url) == 1.0
    monkeypatch.setattr(Unsteady, "bad", 10**9)
    with pytest.raises(CheckpointError, match=r"unsteady://runs/.*ConnectionError: reset by peer"):
        checkpoint_saver.save(2, pieces(2.0), {})
    with pytest.raises(CheckpointError, match="ConnectionError: reset by peer"):
        checkpoint_loads.load_newest(url, SINGLE_PROCESS)
    monkeypatch.setattr(Unsteady, "bad", 0)
    assert load_value(url) == 1.0
    checkpoint_saver.save(3, pieces(3.0), {})
    checkpoint_saver.close()
    assert load_value(url) == 3.0


# ---- several processes


def test_program_saves_to_a_store_and_resumes(on_s3: str, tmp_path: Path) -> None:
    flags = [*SMALL_RUN, "--save", on_s3, "--load", on_s3, "--save-interval", "2", "--keep-last", "1", "--nproc", "2"]
    for train_iters in ("3", "5"):
        more_flags = ["--lr-decay-style", "constant", "--train-iters", train_iters]
        result = programs.run_python("pretrain_gpt.py", *flags, *more_flags, cwd=tmp_path, check=True)
    assert f"resumed from {on_s3}/iter_0000003 at step 3" in result.stdout
    assert storage.steps_in(on_s3) == [5]
    (run_dir,) = (tmp_path / "runs").iterdir()  # logs are appended to, so they stay here
    assert run_dir.name == on_s3.rpartition("/")[2] and (run_dir / "metrics.jsonl").is_file()
