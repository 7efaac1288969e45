"""Where a run begins: with which checkpoint, and what becomes of those that it does not continue from."""

from __future__ import annotations

import contextlib
import difflib
from dataclasses import replace
from pathlib import Path
from typing import Any

from megalite.checkpoint.format import manifest as manifests
from megalite.checkpoint.run.agreement import together
from megalite.checkpoint.run.saver import Saver
from megalite.checkpoint.storage import protocol as storage
from megalite.checkpoint.storage.location import CheckpointError, Location, parse
from megalite.config.options import Config, training_of
from megalite.interop.megatron import rank_files as megatron
from megalite.parallel.comm import first_says
from megalite.parallel.launch import Ranks
from megalite.parallel.mesh import Mesh
from megalite.train.setup import SetupError
from megalite.train.start.resume import Start, resume, saved_config
from megalite.train.state import Run


def start_run(run: Run, config: Config) -> tuple[Location | None, list[str]]:
    """What --load, --finetune, --pretrained-checkpoint and their like ask for: (the checkpoint, notes); collective."""
    c = config.checkpoint
    if c.load is not None:
        # symbolic links may differ between machines
        here = c.save is not None and first_says(_same(c.load, c.save), run.mesh)
        local = c.save_local if here else None  # it may hold newer ones that are not uploaded yet
        start = Start(c.ckpt_step, c.no_load_optim or config.train.skip_train, c.finetune)
        again = here and (c.finetune or c.ckpt_step is not None) and started_again(run.mesh, config, c.load, local)
        if again:
            bare = c.no_save_optim and (c.no_load_optim or c.finetune)  # there is no more to load
            start = Start(1 if c.finetune else c.ckpt_step, bare, later=True)
        found = resume(run, c.load, config, start, local)
        if found is not None:
            notes = [f"this same training has saved that: it continues, {AGAIN}"] if again else []
            return found[0], [*notes, *found[1]]
        if c.exit_on_missing_checkpoint:
            near = near_names(c.load)
            raise SetupError(f"load={c.load!r} holds no checkpoint{near}; drop --exit-on-missing-checkpoint")
    if c.pretrained_checkpoint is not None:
        found = resume(run, c.pretrained_checkpoint, config, Start(afresh=True))
        if found is None:
            name = f"pretrained_checkpoint={c.pretrained_checkpoint!r}"
            raise SetupError(f"{name} holds no checkpoint; give one's --save")
        return found
    if (load := c.load) is None:
        return None, []
    together(run.mesh, lambda: _none_was_left(parse(load)), f"looking for checkpoints in {load}")
    begins = "the run starts from scratch; --exit-on-missing-checkpoint stops it"
    return None, [f"load={load!r} holds no checkpoint{near_names(load)}: {begins}"]


def near_names(load: str) -> str:
    """Where `load` does not exist: which directories beside it are spelt alike and do hold checkpoints."""
    place = parse(load)
    if not isinstance(place, Path) or place.exists() or not place.parent.is_dir():
        return ""
    there = [p.name for p in place.parent.iterdir() if p.is_dir() and (storage.steps_in(p) or megatron.holds(p))]
    near = difflib.get_close_matches(place.name, there, n=3)
    if not near:
        return " and does not exist"
    return f", but {' and '.join(str(place.with_name(name)) for name in near)} {'does' if len(near) == 1 else 'do'}"


def _none_was_left(directory: Location) -> None:
    """Raises CheckpointError where all that is there was left by a run, as --finetune leaves what it began with: when
    the disk of --save-local is lost before anything was sent, nobody wants a training from scratch."""
    if isinstance(directory, Path) and (left := sorted(directory.glob("abandoned-iter_*"))):
        raise CheckpointError(
            f"load={str(directory)!r} holds no checkpoint but those that a run has left, as {left[-1].name}: rename "
            "the one to begin with to iter_NUMBER, or, to start from scratch, move them away"
        )


AGAIN = "and does not begin again; for that, change an option of the training, or rename what it has saved"


def continue_run(run: Run, config: Config, ranks: Ranks) -> tuple[Location | None, list[str]] | None:
    """After a rank had died and all were started again: what this same training has saved meanwhile, whatever it began
    with. None at a first start, and where it has saved nothing yet: then it begins as it did. Collective."""
    c = config.checkpoint
    if c.save is None or not started_again(run.mesh, config, c.save, c.save_local, ranks.resumes):
        return None
    bare = c.no_save_optim and (c.no_load_optim or c.finetune)
    found = resume(run, c.save, config, Start(weights_only=bare), c.save_local)
    return found and (found[0], ["the run was started again", *found[1]])


def started_again(mesh: Mesh, config: Config, root: str, local: str | None, asked: bool = True) -> bool:
    """Whether the run has saved in `root` or `local` already: the newest checkpoint there, beyond that of --ckpt-step,
    was written by a run that begins and trains alike. Collective; rank 0 looks, if it is `asked`. Where --ckpt-step or
    --finetune begin in the directory of --save, beginning again would make the same steps once more, and a scheduler
    that restarts a command would never get beyond them."""
    c = config.checkpoint
    roots = [root for root in (root, local) if root is not None]
    begin = 0 if c.finetune or c.ckpt_step is None or c.load is None or not _same(root, c.load) else c.ckpt_step

    def look() -> bool:
        found = [(step, root) for root in roots for step in storage.steps_in(root) if step > begin]
        for step, root in sorted(found, reverse=True) if mesh.world.is_first and asked else []:
            folder = storage.folder_of(root, step)
            with contextlib.suppress(CheckpointError):  # damaged: the load will say so
                return _training(saved_config(manifests.load(folder), folder)) == _training(config)
        return False

    return bool(first_says(together(mesh, look, f"looking for checkpoints in {c.load}"), mesh))


def _training(config: Config) -> dict[str, Any]:
    """What decides which weights a run that resumes in its own directory has at a step."""
    c = config.checkpoint
    here = c.load is not None and c.save is not None and _same(c.load, c.save)
    return training_of(replace(config, checkpoint=replace(c, load=None)) if here else config)


def begin_branch(
    run: Run, config: Config, saver: Saver | None, loaded: Location | None
) -> tuple[int | None, list[str]]:
    """Tell the saver where the run begins. Returns the step of the checkpoint that it has come from, if that is one of
    the directory that it saves to (a run that was at its end already writes nothing), and, on rank 0, notes for people.
    Collective. Raises CheckpointError."""
    if saver is None:
        return None, []
    step = run.state.step
    saved = step if loaded and any(_same(loaded, place) for place in saver.places_of(step)) else None
    chosen = saved is None or config.checkpoint.ckpt_step == saved  # else what is later was tried, and is damaged
    note = saver.begins_at(step, damaged=not chosen)
    return saved, [] if note is None else [note]


def _same(a: str | Location, b: str | Location) -> bool:
    one, two = parse(a), parse(b)
    return one.resolve() == two.resolve() if isinstance(one, Path) and isinstance(two, Path) else one == two
