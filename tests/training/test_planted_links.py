"""Whoever may write into a run's folder plants links there, by the names that a run is known to write: it writes
through none. The names are those that a run of now opens, seen by Python's audit hook, also those that go again."""

import errno
import os
import re
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from program_runs import ROOT, pretrain
from train_cases import SMALL

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


def run(folder: Path, tmp_path: Path) -> tuple[int, str]:
    """A run that saves, tells all it can, and ends in an error, so that its rank's log stays."""
    (tmp_path / "hook").mkdir(exist_ok=True)
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
    words = [*SMALL, "--train-iters", "4", "--save", str(folder), "--save-interval", "1", "--log-progress"]
    words += ["--profile", "--profile-step-start", "1", "--profile-step-end", "2"]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'hook'}:{ROOT}", "OPENED": str(tmp_path / f"{folder.name}.opened")}
    env["MEGALITE_FAULT"] = "step.begin:0:3:raise"
    done = pretrain(*words, env=env)
    return done.returncode, done.stdout + done.stderr


def opened(folder: Path, tmp_path: Path) -> set[str]:
    """What the run has opened for writing in its folder, and what it has left there."""
    lines = (tmp_path / f"{folder.name}.opened").read_text().splitlines()
    names = {line.removeprefix(f"{folder}/") for line in lines if line.startswith(f"{folder}/")}
    return names | {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_planted_links_are_not_followed(tmp_path: Path) -> None:
    first, folder, targets = (tmp_path / name for name in ("first", "planted", "targets"))
    code, said = run(first, tmp_path)
    assert code == 1, said
    names = {name for name in opened(first, tmp_path) if not name.startswith(("iter_", ".iter_"))}
    must = {".lock", ".run.lock", ".probe-00000", ".latest_checkpointed_iteration.txt.part", "log.txt", "events.jsonl"}
    must |= {"latest_checkpointed_iteration.txt", "progress.txt", "metrics.jsonl", "ranks/rank-00000.log"}
    assert must | {"status.json", "run_config.toml"} <= names
    targets.mkdir()
    for number, name in enumerate(sorted(names - {".lock"})):  # that one ends the start, see below
        (targets / str(number)).write_text("of somebody\n")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(targets / str(number))
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in targets.iterdir()}
    code, said = run(folder, tmp_path)
    assert code == 1 and (folder / "iter_0000002" / "COMPLETE").is_file(), said
    for name in ("log.txt", "events.jsonl", ".run.lock"):
        assert said.count(f"WARNING: {folder / name}: is a link") == 1, said
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in targets.iterdir()} == before
    assert (folder / "latest_checkpointed_iteration.txt").read_text().strip() == "2"


@pytest.mark.parametrize("plant", [os.symlink, os.link])
def test_symbolic_and_hard_links(tmp_path: Path, plant: object) -> None:
    """A hard link, too: O_NOFOLLOW follows it. And a link in the place of a folder that the run makes."""
    target, place = tmp_path / "target", tmp_path / "run"
    target.write_text("of somebody\n")
    place.mkdir()
    for name in ("log", ".lock", "cache.lock", f".status.json.{os.getpid()}", ".tracker.part", ".probe-00007"):
        plant(target, place / name)  # type: ignore[operator]
    for write in (
        lambda: AppendOnlyFile(place / "log").write("x"),
        lambda: open_nofollow(place / "log", os.O_WRONLY | os.O_TRUNC),
        lambda: DirectoryLock(place),
        lambda: file_lock(place / "cache.lock", "x").__enter__(),
    ):
        with pytest.raises(OSError, match="is a link to another file"):
            write()
    write_atomically(place / "status.json", "x")
    LocalStorage().write_text(place / "tracker", "x")
    LocalStorage().check_writable(place, 7)
    assert target.read_text() == "of somebody\n" and (place / "status.json").read_text() == "x"
    (tmp_path / "elsewhere").mkdir()
    (place / "ranks").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="is a link"):
        open_in_run_dir(place / "ranks" / "rank-00000.log", os.O_WRONLY | os.O_CREAT)
    assert not list((tmp_path / "elsewhere").iterdir())
    (place / ".model.part").symlink_to(tmp_path / "elsewhere")
    with atomic_directory(place / "model") as part:
        (part / "config.json").write_text("x")
    assert not list((tmp_path / "elsewhere").iterdir()) and (place / "model/config.json").is_file()
    shown = tmp_path / "shown"
    shown.symlink_to(place)  # a folder that the user names may be one
    AppendOnlyFile(shown / "events").write("x")
    assert (place / "events").read_text() == "x\n"


PLANTS = """
import os, pathlib, megalite
class Plants:
    def on_train_step_end(self, run, result):
        if run.progress.step == 1 and run.mesh.world.is_first:
            for name in ("run/.iter_0000002.part", "run/.iter_0000003.part", "run/.iter_0000004.part",
                         "run/iter_0000002", "run/iter_0000003", "run/.iter_0000003.replaced"):
                target = {"2": "theirs", "3": "nothing", "4": "file"}[name.split("000000")[1][0]]
                os.symlink(os.path.abspath(target), name)
            os.symlink(os.path.abspath("theirs"), ".hf.part")
megalite.register("callback", "plants", Plants())
"""


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_links_in_place_of_checkpoints_are_replaced(tmp_path: Path, ranks: str) -> None:
    """Planted after the start, which clears the names: to a folder, to nothing, to a file; the run saves and exports."""
    theirs, file = tmp_path / "theirs", tmp_path / "file"
    theirs.mkdir()
    for path in (file, theirs / "kept", theirs / "COMPLETE"):
        path.write_text("of somebody\n")
    (tmp_path / "plants.py").write_text(PLANTS)
    model = "--train-iters 4 --disable-bias-linear --swiglu --normalization RMSNorm --position-embedding-type rope"
    words = [*SMALL, *model.split(), "--nproc", ranks]
    done = pretrain(*words, *"--save run --save-interval 1 --plugin plants.py --export-hf hf".split(), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / ".without.weights").symlink_to(theirs)  # where a run that saves nothing puts its weights meanwhile
    done = pretrain(*words, "--export-hf", "without", cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "without/config.json").is_file(), done.stdout + done.stderr
    for step in (1, 2, 3, 4):
        folder = tmp_path / f"run/iter_000000{step}"
        assert (folder / "manifest.json").is_file() and not folder.is_symlink()
    assert {path.name for path in theirs.iterdir()} == {"kept", "COMPLETE"} and (tmp_path / "hf/config.json").is_file()
    assert all(path.read_text() == "of somebody\n" for path in (file, *theirs.iterdir()))
    assert not [*(tmp_path / "run").glob(".iter*"), *tmp_path.glob(".[hw]*")]


def test_unremovable_link_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = tmp_path / ".iter_0000002.part"
    part.symlink_to(tmp_path)
    refuse = PermissionError(errno.EPERM, os.strerror(errno.EPERM))
    monkeypatch.setattr(os, "unlink", Mock(side_effect=refuse))  # as in a folder with the sticky bit, of another user
    rule = f"{part} is in the way and cannot be removed (Operation not permitted): remove it, or save elsewhere"
    with pytest.raises(CheckpointError, match=re.escape(rule)):
        LocalStorage().make_staging(part)


def test_planted_link_does_not_become_a_checkpoint(tmp_path: Path) -> None:
    """As the one does that a killed run has put aside, while it replaced it."""
    theirs, folder = tmp_path / "theirs", tmp_path / "run"
    theirs.mkdir()
    (theirs / "COMPLETE").write_text("")
    (folder / ".iter_0000007.replaced").mkdir(parents=True)
    for name in (".iter_0000001.part", ".iter_0000002.replaced", ".iter_0000003.old"):
        (folder / name).symlink_to(theirs)
    (folder / ".iter_0000004.part").symlink_to(tmp_path / "nothing")
    LocalStorage().remove_leftovers(folder)
    assert [path.name for path in folder.iterdir()] == ["iter_0000007"] and (theirs / "COMPLETE").exists()


@pytest.mark.parametrize("plant", [os.symlink, os.link])
def test_tools_do_not_follow_links(tmp_path: Path, plant: object) -> None:
    target, place = tmp_path / "target", tmp_path / "out"
    target.write_text("of somebody\n")
    place.mkdir()
    mine = os.getpid()
    names = [f".a.json.{mine}", "a.csv", "train.jsonl.partial", "valid.jsonl.partial", "log.txt"]
    names += ["spm.partial.model", "spm.partial.vocab", "tokenizer.json.partial", "tokenizer_config.json.partial"]
    for name in names:
        plant(target, place / name)  # type: ignore[operator]
    write_json(place / "a.json", {})
    write_csv([], place / "a.csv")
    python_corpus.write(Path(__file__).parent, place, 2)
    train_tokenizer.train_sentencepiece(["a b c"] * 9, str(place / "spm"), 266, 1)
    train_tokenizer.train_hugging_face(["a b c"] * 9, str(place), 258, 1)
    limited.run([sys.executable, "-c", "print('x')"], place / "log.txt", 60)
    assert target.read_text() == "of somebody\n" and (place / "log.txt").read_text() == "x\n"
