"""tools/checkpoint.py: what it prints, what it writes, and its exit codes."""

import re
from pathlib import Path

import checkpoint_loads
import programs
import pytest
import torch
from checkpoint_loads import SINGLE_PROCESS, full_shard, invert_bit

from megalite.checkpoint import offline
from megalite.checkpoint.format import manifest
from megalite.checkpoint.manager import loader, saver
from megalite.checkpoint.storage import local_storage as file_system
from megalite.checkpoint.storage import storage as storage
from tools import checkpoint as tool

STATE = {"progress": {"step": 3, "consumed_tokens": 1234}, "config": "[model]\nnum_layers = 2\n"}


def make(directory: Path, step: int, scale: float = 1.0, bf16: bool = False, change: int = 0) -> Path:
    torch.manual_seed(1)
    pieces = []
    shapes = {"model/a": (6, 4), "model/b": (5,), "optimizer.exp_avg/a": (6, 4), "state/router.bias": (3,)}
    for name, shape in shapes.items():
        values = scale * torch.randn(shape)
        values.view(-1)[:change] += 0.25
        if bf16 and name.startswith("model/"):
            pieces.append(full_shard(values, name.replace("model", "optimizer.main")))
            values = values.bfloat16()
        pieces.append(full_shard(values, name))
    return saver.save(directory, step, pieces, STATE, SINGLE_PROCESS)


def test_inspect_and_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (3, 4):
        make(tmp_path, step)
    assert tool.main(["inspect", str(tmp_path), "--tensors"]) == 0
    out = capsys.readouterr().out
    assert "iter_0000004: step 3, 1,234 tokens" in out and "29 elements of float32" in out
    assert "model/b" in out and "num_layers = 2" in out
    assert tool.main(["verify", str(tmp_path / "iter_0000003")]) == 0
    invert_bit(tmp_path / "iter_0000003" / "rank-00000.safetensors")
    assert tool.main(["verify", str(tmp_path)]) == 0  # the newest is intact
    capsys.readouterr()
    assert tool.main(["verify", str(tmp_path), "--all"]) == 1
    captured = capsys.readouterr()
    assert "iter_0000004: 4 tensors in 1 files, all as" in captured.out and "optimizer.exp_avg/a" in captured.err


DAMAGE = {
    "manifest": lambda directory: (directory / "manifest.json").write_text("{}"),
    "file": lambda directory: (directory / "rank-00000.safetensors").unlink(),
    "COMPLETE": lambda directory: (directory / "COMPLETE").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_inspect_reports_skipped_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    """All tools that take the newest checkpoint of a directory report them, and answer for an older one."""
    old, new = (str(make(tmp_path / "run", step)) for step in (2, 3))
    DAMAGE[damage](Path(new))
    run = str(tmp_path / "run")
    out = [str(tmp_path / name / "iter_0000001") for name in "ab"]
    commands = [["inspect", run], ["diff", run, old], ["reshard", run, out[0]], ["average", out[1], run, old]]
    for command in (*commands, ["data-usage", run]):
        assert tool.main(command) == 0
        output = capsys.readouterr().err
        assert output.count(f"skipping {new}: {new}/") == 1, (command, output)
    assert (
        loader.load_newest(run, SINGLE_PROCESS, lambda directory, manifest: loader.LoadPlan([])) is not None
    )  # as a run and generate do
    output = capsys.readouterr()
    assert f"skipping {new}: {new}/" in output.err and not output.out  # generate --json prints objects to stdout
    assert tool.main(["verify", run]) == 1  # the damaged one is reported first
    output = capsys.readouterr()
    assert output.err.startswith(f"{new}: {new}/") and output.out.startswith(f"{old}: 4 tensors")
    assert tool.main(["verify", new]) == 1 and not capsys.readouterr().out
    assert tool.main(["verify", old]) == 0
    assert tool.main(["verify", str(tmp_path)]) == 3


def test_diff_reports_location_and_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = make(tmp_path / "a", 1), make(tmp_path / "b", 1, change=2), make(tmp_path / "c", 1, bf16=True)
    assert tool.main(["diff", str(a), str(tmp_path / "a")]) == 0
    assert "4 tensors, equal to the bit" in capsys.readouterr().out
    assert tool.main(["diff", str(a), str(b)]) == 1
    out = capsys.readouterr().out
    assert "model/a: 2 elements; first at [0, 0]:" in out and "largest 0.25" in out and "4 tensors differ" in out
    assert tool.main(["diff", str(a), str(c)]) == 1
    out = capsys.readouterr().out
    assert "optimizer.main/b: only in the second" in out and "model/a: float32 and bfloat16, " in out


def test_diff_detects_every_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bits are compared: 0 and -0 are equal numbers, and a NaN is not even equal to itself."""

    def save(name: str, values: list[float]) -> Path:
        return saver.save(tmp_path / name, 1, [full_shard(torch.tensor(values), "model/a")], STATE, SINGLE_PROCESS)

    a = save("a", [1.0, 0.0, float("nan")])
    assert tool.main(["diff", str(a), str(save("same", [1.0, 0.0, float("nan")]))]) == 0
    capsys.readouterr()
    assert tool.main(["diff", str(a), str(save("zero", [1.0, -0.0, float("nan")]))]) == 1
    assert "model/a: 1 elements; first at [1]: 0 and -0; largest 0" in capsys.readouterr().out


def test_commands_verify_the_files_that_they_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tools open a checkpoint without hashing it all; a damaged block is detected when a value in it is read."""
    a, b = make(tmp_path / "a", 1), make(tmp_path / "b", 1)
    invert_bit(b / "rank-00000.safetensors")
    for argv in (["diff", a, b], ["reshard", b, tmp_path / "c"], ["average", tmp_path / "c", a, b]):
        assert tool.main([str(arg) for arg in argv]) == 3
        assert "its content changed after it was written" in capsys.readouterr().err
    assert not list((tmp_path / "c").glob("*iter_*"))


@pytest.mark.parametrize("files", [1, 2, 7])
def test_reshard_keeps_every_value(tmp_path: Path, files: int) -> None:
    a = make(tmp_path / "a", 5)
    assert tool.main(["reshard", str(a), str(tmp_path / "b"), "--files", str(files)]) == 0
    newest = checkpoint_loads.load_newest(tmp_path / "b", SINGLE_PROCESS)  # verified
    assert newest is not None and len(newest[1].files) == files and newest[1].state == STATE
    assert tool.main(["diff", str(a), str(newest[0])]) == 0
    assert tool.main(["reshard", str(a), str(tmp_path / "w" / "iter_0000009"), "--weights"]) == 0
    weights_only = manifest.load_manifest(tmp_path / "w" / "iter_0000009")
    assert sorted(weights_only.tensors) == ["model/a", "model/b", "state/router.bias"]
    assert tool.main(["reshard", str(a), str(tmp_path / "b")]) == 3  # never overwrites another


@pytest.mark.parametrize("bf16", [False, True])
def test_average_uses_the_main_weights(tmp_path: Path, bf16: bool) -> None:
    sources = [make(tmp_path / n, 2, scale, bf16) for n, scale in (("a", 1.0), ("b", 2.0), ("c", 6.0))]
    assert tool.main(["average", str(tmp_path / "mean"), *map(str, sources)]) == 0
    mean = offline.open_checkpoint(tmp_path / "mean", verified=True)
    assert sorted(mean.manifest.tensors) == ["model/a", "model/b", "state/router.bias"]
    first_source = offline.open_checkpoint(sources[0])
    for name in mean.manifest.tensors:
        expected = first_source.read(name.replace("model", "optimizer.main") if bf16 else name).double() * 3
        actual = mean.read(name)
        assert actual.dtype == (torch.bfloat16 if bf16 and name.startswith("model/") else torch.float32)
        torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=1e-6, atol=0)
    other = saver.save(tmp_path / "d", 1, [full_shard(torch.ones(1), "model/z")], {}, SINGLE_PROCESS)
    assert tool.main(["average", str(tmp_path / "m2"), str(sources[0]), str(other)]) == 3
    assert not list((tmp_path / "m2").glob("*iter_*"))


def test_prune_announces_deletions_and_respects_the_lock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(1, 6):
        make(tmp_path, step)
    flags = ["prune", str(tmp_path), "--keep-last", "1", "--save-retain-interval", "2"]
    assert tool.main([*flags, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("would delete") == 2 and len(storage.steps_in(tmp_path)) == 5
    lock = file_system.DirectoryLock(tmp_path)
    assert tool.main(flags) == 3 and "in use by process" in capsys.readouterr().err
    lock.close()
    assert tool.main(flags) == 0 and storage.steps_in(tmp_path) == [2, 4, 5]
    assert tool.main(["prune", str(tmp_path / "no"), "--keep-last", "1"]) == 3


def test_usage_errors_and_missing_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["inspect", str(tmp_path)]) == 3 and "no checkpoint" in capsys.readouterr().err
    for bad in (["prune", "x", "--keep-last", "0"], ["what"], []):
        with pytest.raises(SystemExit) as stop:
            tool.main(bad)
        assert stop.value.code == 2
    assert "reshard" in programs.run_python("tools/checkpoint.py", "--help").stdout


def test_output_hides_url_secrets_and_escapes_control_characters(tmp_path: Path, capsys) -> None:
    for url in ("memory://b/x?token=hunter2", "s3://hunter2@host/x", "a::https://h/x?sig=hunter2"):
        assert tool.main(["inspect", url]) == tool.main(["data-usage", url]) == 3
        output = capsys.readouterr().err
        assert "in its URL" in output and "hunter2" not in output
    state = {"config": "title = '\x1b]0;mine\x07'\n", "data": {"\x1b[2J": 1}}
    checkpoint_dir = saver.save(tmp_path, 1, [full_shard(torch.zeros(2), "model/\x1b[2Ja")], state, SINGLE_PROCESS)
    other = make(tmp_path / "other", 1)
    for command in (
        ["inspect", "--tensors", str(checkpoint_dir)],
        ["diff", str(checkpoint_dir), str(other)],
        ["verify", str(checkpoint_dir)],
    ):
        tool.main(command)
    tool.main(["data-usage", str(checkpoint_dir)])
    output = capsys.readouterr()
    assert not re.search("[\x1b\x07]", output.out + output.err)
    assert output.out.count("model/\\x1b[2Ja") == 2 and "title = '\\x1b]0;mine\\x07'" in output.out
