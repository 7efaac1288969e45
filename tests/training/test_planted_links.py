"""A run does not write through links that someone has planted in its directory under the names of its files.

The names are those that a run opens, as recorded by Python's audit hook, including temporary files.
"""

import errno
import os
import re
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from program_runs import ROOT, run_pretrain
from train_cases import SMALL_RUN

from megalite.checkpoint.storage.local_storage import DirectoryLock, LocalStorage
from megalite.checkpoint.storage.location import CheckpointError
from megalite.common.safe_open import open_in_run_dir, open_nofollow, write_atomically
from megalite.data.file_lock import file_lock
from megalite.interop.tensor_mapping import atomic_directory
from megalite.training.logging.event_log import AppendOnlyFile
from tools import python_corpus, train_tokenizer
from tools.bench import timeout as limited
from tools.bench.format_results import write_csv
from tools.cli_common import write_json

HOOK = """
import os, sys
log = os.open(os.environ["OPENED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def hook(event, args):
    if event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR) and not isinstance(args[0], int):
        os.write(log, os.fsencode(args[0]) + b"\\n")
sys.addaudithook(hook)
"""


def run_with_hook(run_dir: Path, tmp_path: Path) -> tuple[int, str]:
    """Run with saves, all logs and an error at the end, after which the log of the rank stays."""
    (tmp_path / "hook").mkdir(exist_ok=True)
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
    argv = [*SMALL_RUN, "--train-iters", "4", "--save", str(run_dir), "--save-interval", "1", "--log-progress"]
    argv += ["--profile", "--profile-step-start", "1", "--profile-step-end", "2"]
    env = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path / 'hook'}:{ROOT}",
        "OPENED": str(tmp_path / f"{run_dir.name}.opened"),
    }
    env["MEGALITE_FAULT"] = "step.begin:0:3:raise"
    result = run_pretrain(*argv, env=env)
    return result.returncode, result.stdout + result.stderr


def written_files(run_dir: Path, tmp_path: Path) -> set[str]:
    """Return the names that the run opened for writing in its directory, and those of the files in it."""
    lines = (tmp_path / f"{run_dir.name}.opened").read_text().splitlines()
    names = {line.removeprefix(f"{run_dir}/") for line in lines if line.startswith(f"{run_dir}/")}
    return names | {str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file()}


def test_planted_links_are_not_followed(tmp_path: Path) -> None:
    first, run_dir, targets = (tmp_path / name for name in ("first", "planted", "targets"))
    code, output = run_with_hook(first, tmp_path)
    assert code == 1, output
    names = {name for name in written_files(first, tmp_path) if not name.startswith(("iter_", ".iter_"))}
    expected = {".lock", ".run.lock", ".probe-00000", ".latest_checkpointed_iteration.txt.part"}
    expected |= {"latest_checkpointed_iteration.txt", "progress.txt", "metrics.jsonl", "ranks/rank-00000.log"}
    assert expected | {"log.txt", "events.jsonl", "status.json", "run_config.toml"} <= names
    targets.mkdir()
    for number, name in enumerate(sorted(names - {".lock"})):  # a link there ends the start, see below
        (targets / str(number)).write_text("of somebody\n")
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).symlink_to(targets / str(number))
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in targets.iterdir()}
    code, output = run_with_hook(run_dir, tmp_path)
    assert code == 1 and (run_dir / "iter_0000002" / "COMPLETE").is_file(), output
    for name in ("log.txt", "events.jsonl", ".run.lock"):
        assert output.count(f"WARNING: {run_dir / name}: is a link") == 1, output
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in targets.iterdir()} == before
    assert (run_dir / "latest_checkpointed_iteration.txt").read_text().strip() == "2"


@pytest.mark.parametrize("plant", [os.symlink, os.link])
def test_symbolic_and_hard_links(tmp_path: Path, plant: object) -> None:
    """Refuse hard links, too, which O_NOFOLLOW follows, and links in the place of directories that a run creates."""
    target, run_dir = tmp_path / "target", tmp_path / "run"
    target.write_text("of somebody\n")
    run_dir.mkdir()
    for name in ("log", ".lock", "cache.lock", f".status.json.{os.getpid()}", ".tracker.part", ".probe-00007"):
        plant(target, run_dir / name)  # type: ignore[operator]
    for write in (
        lambda: AppendOnlyFile(run_dir / "log").write("x"),
        lambda: open_nofollow(run_dir / "log", os.O_WRONLY | os.O_TRUNC),
        lambda: DirectoryLock(run_dir),
        lambda: file_lock(run_dir / "cache.lock", "x").__enter__(),
    ):
        with pytest.raises(OSError, match="is a link to another file"):
            write()
    write_atomically(run_dir / "status.json", "x")
    LocalStorage().write_text(run_dir / "tracker", "x")
    LocalStorage().check_writable(run_dir, 7)
    assert target.read_text() == "of somebody\n" and (run_dir / "status.json").read_text() == "x"
    (tmp_path / "elsewhere").mkdir()
    (run_dir / "ranks").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="is a link"):
        open_in_run_dir(run_dir / "ranks" / "rank-00000.log", os.O_WRONLY | os.O_CREAT)
    assert not list((tmp_path / "elsewhere").iterdir())
    (run_dir / ".model.part").symlink_to(tmp_path / "elsewhere")
    with atomic_directory(run_dir / "model") as part:
        (part / "config.json").write_text("x")
    assert not list((tmp_path / "elsewhere").iterdir()) and (run_dir / "model/config.json").is_file()
    link = tmp_path / "shown"
    link.symlink_to(run_dir)  # a directory that the user names may be a link
    AppendOnlyFile(link / "events").write("x")
    assert (run_dir / "events").read_text() == "x\n"


PLANTS = """
import os, pathlib, megalite
class Plants:
    def on_train_step_end(self, run, result):
        if run.progress.step == 1 and run.mesh.world.is_first:
            for name in ("run/.iter_0000002.part", "run/.iter_0000003.part", "run/.iter_0000004.part",
                         "run/iter_0000002", "run/iter_0000003", "run/.iter_0000003.replaced"):
                target = {"2": "target", "3": "nothing", "4": "file"}[name.split("000000")[1][0]]
                os.symlink(os.path.abspath(target), name)
            os.symlink(os.path.abspath("target"), ".hf.part")
megalite.register("callback", "plants", Plants())
"""


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_links_in_place_of_checkpoints_are_replaced(tmp_path: Path, nproc: str) -> None:
    """Plant links to a directory, to nothing and to a file after the start, which removes them; then save and export."""
    target_dir, file = tmp_path / "target", tmp_path / "file"
    target_dir.mkdir()
    for path in (file, target_dir / "kept", target_dir / "COMPLETE"):
        path.write_text("of somebody\n")
    (tmp_path / "plants.py").write_text(PLANTS)
    model = "--train-iters 4 --disable-bias-linear --swiglu --normalization RMSNorm --position-embedding-type rope"
    argv = [*SMALL_RUN, *model.split(), "--nproc", nproc]
    result = run_pretrain(
        *argv, *"--save run --save-interval 1 --plugin plants.py --export-hf hf".split(), cwd=tmp_path
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (tmp_path / ".without.weights").symlink_to(target_dir)  # the temporary weights of a run that saves nothing
    result = run_pretrain(*argv, "--export-hf", "without", cwd=tmp_path)
    assert result.returncode == 0 and (tmp_path / "without/config.json").is_file(), result.stdout + result.stderr
    for step in (1, 2, 3, 4):
        checkpoint_dir = tmp_path / f"run/iter_000000{step}"
        assert (checkpoint_dir / "manifest.json").is_file() and not checkpoint_dir.is_symlink()
    assert {path.name for path in target_dir.iterdir()} == {"kept", "COMPLETE"}
    assert (tmp_path / "hf/config.json").is_file()
    assert all(path.read_text() == "of somebody\n" for path in (file, *target_dir.iterdir()))
    assert not [*(tmp_path / "run").glob(".iter*"), *tmp_path.glob(".[hw]*")]


def test_unremovable_link_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = tmp_path / ".iter_0000002.part"
    part.symlink_to(tmp_path)
    error = PermissionError(errno.EPERM, os.strerror(errno.EPERM))
    monkeypatch.setattr(os, "unlink", Mock(side_effect=error))  # as in another user's directory with the sticky bit
    message = f"{part} is in the way and cannot be removed (Operation not permitted): remove it, or save elsewhere"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        LocalStorage().make_staging(part)


def test_planted_link_does_not_become_a_checkpoint(tmp_path: Path) -> None:
    """Restore the checkpoint that a killed run was replacing, but not planted links."""
    target_dir, save_dir = tmp_path / "target", tmp_path / "run"
    target_dir.mkdir()
    (target_dir / "COMPLETE").write_text("")
    (save_dir / ".iter_0000007.replaced").mkdir(parents=True)
    for name in (".iter_0000001.part", ".iter_0000002.replaced", ".iter_0000003.old"):
        (save_dir / name).symlink_to(target_dir)
    (save_dir / ".iter_0000004.part").symlink_to(tmp_path / "nothing")
    LocalStorage().remove_leftovers(save_dir)
    assert [path.name for path in save_dir.iterdir()] == ["iter_0000007"] and (target_dir / "COMPLETE").exists()


@pytest.mark.parametrize("plant", [os.symlink, os.link])
def test_tools_do_not_follow_links(tmp_path: Path, plant: object) -> None:
    target, out_dir = tmp_path / "target", tmp_path / "out"
    target.write_text("of somebody\n")
    out_dir.mkdir()
    pid = os.getpid()
    names = [f".a.json.{pid}", "a.csv", "train.jsonl.partial", "valid.jsonl.partial", "log.txt"]
    names += ["spm.partial.model", "spm.partial.vocab", "tokenizer.json.partial", "tokenizer_config.json.partial"]
    for name in names:
        plant(target, out_dir / name)  # type: ignore[operator]
    write_json(out_dir / "a.json", {})
    write_csv([], out_dir / "a.csv")
    python_corpus.write(Path(__file__).parent, out_dir, 2)
    train_tokenizer.train_sentencepiece(["a b c"] * 9, str(out_dir / "spm"), 266, 1)
    train_tokenizer.train_hugging_face(["a b c"] * 9, str(out_dir), 258, 1)
    limited.run([sys.executable, "-c", "print('x')"], out_dir / "log.txt", 60)
    assert target.read_text() == "of somebody\n" and (out_dir / "log.txt").read_text() == "x\n"
