"""Whoever may write into a run's folder plants links there, by the names that a run is known to write: it writes
through none. The names are those that a run of now opens, seen by Python's audit hook, also those that go again."""

import os
import sys
from pathlib import Path

import pytest
from train_cases import SMALL
from whole_runs import ROOT, pretrain

from megalite.checkpoint.storage.file_system import LocalStorage, Lock
from megalite.config.own_file import inner_opener, opener
from megalite.data.locks import locked
from megalite.train.tell.run_dir import AppendedFile, write_atomically
from tools import python_corpus, train_tokenizer
from tools.bench import limited
from tools.bench.tables import write_csv
from tools.program import write_json

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


def test_no_planted_link_is_written_through(tmp_path: Path) -> None:
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
def test_links_of_both_kinds(tmp_path: Path, plant: object) -> None:
    """A hard link, too: O_NOFOLLOW follows it. And a link in the place of a folder that the run makes."""
    target, place = tmp_path / "target", tmp_path / "run"
    target.write_text("of somebody\n")
    place.mkdir()
    for name in ("log", ".lock", "cache.lock", f".status.json.{os.getpid()}", ".tracker.part", ".probe-00007"):
        plant(target, place / name)  # type: ignore[operator]
    for write in (
        lambda: AppendedFile(place / "log").write("x"),
        lambda: opener(place / "log", os.O_WRONLY | os.O_TRUNC),
        lambda: Lock(place),
        lambda: locked(place / "cache.lock", "x").__enter__(),
    ):
        with pytest.raises(OSError, match="is a link to another file"):
            write()
    write_atomically(place / "status.json", "x")
    LocalStorage().put(place / "tracker", "x")
    LocalStorage().probe(place, 7)
    assert target.read_text() == "of somebody\n" and (place / "status.json").read_text() == "x"
    (tmp_path / "elsewhere").mkdir()
    (place / "ranks").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="is a link"):
        inner_opener(place / "ranks" / "rank-00000.log", os.O_WRONLY | os.O_CREAT)
    assert not list((tmp_path / "elsewhere").iterdir())
    shown = tmp_path / "shown"
    shown.symlink_to(place)  # a folder that the user names may be one
    AppendedFile(shown / "events").write("x")
    assert (place / "events").read_text() == "x\n"


@pytest.mark.parametrize("plant", [os.symlink, os.link])
def test_tools_write_through_no_link(tmp_path: Path, plant: object) -> None:
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
    train_tokenizer.train(["a b c"] * 9, str(place / "spm"), 266, 1)
    train_tokenizer.train_hugging_face(["a b c"] * 9, str(place), 258, 1)
    limited.run([sys.executable, "-c", "print('x')"], place / "log.txt", 60)
    assert target.read_text() == "of somebody\n" and (place / "log.txt").read_text() == "x\n"
