"""The checkpoint that a run begins with, and what happens to those that it does not continue from."""

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
from megalite.parallel.mesh import Mesh
from megalite.train.setup import SetupError
from megalite.train.start import foreign_weights as foreign
from megalite.train.start.resume import Start, resume, saved_config
from megalite.train.state import Run


def start_run(run: Run, config: Config, resumes: bool = False) -> tuple[Location | None, list[str]]:
    """Begin as --load, --finetune and --pretrained-checkpoint say, or, where the launcher starts it again (`resumes`),
    with what this same training has saved: (the checkpoint, notes); collective."""
    c, loaded = config.checkpoint, None
    after = Start(weights_only=c.no_save_optim and (c.no_load_optim or c.finetune))  # with what this run has saved
    if c.save is not None and started_again(run.mesh, config, c.save, c.save_local, resumes):
        loaded = resume(run, c.save, config, after, c.save_local)
    if loaded is not None:
        return loaded[0], ["the run was started again", *loaded[1]]
    if (theirs := foreign.start(run, config)) is not None:
        return theirs
    if c.load is not None:
        # symbolic links may differ between machines
        in_save = c.save is not None and first_says(_same(c.load, c.save), run.mesh)
        local = c.save_local if in_save else None  # may have newer checkpoints that are not uploaded yet
        start = Start(c.ckpt_step, c.no_load_optim or config.train.skip_train, c.finetune)
        again = in_save and (c.finetune or c.ckpt_step is not None) and started_again(run.mesh, config, c.load, local)
        if again:
            start = replace(after, step=1 if c.finetune else c.ckpt_step, later=True)
        loaded = resume(run, c.load, config, start, local)
        if loaded is not None:
            notes = [f"this same training has saved that: it continues, {AGAIN}"] if again else []
            return loaded[0], [*notes, *loaded[1]]
        if c.exit_on_missing_checkpoint:
            near = near_names(c.load)
            raise SetupError(f"load={c.load!r} holds no checkpoint{near}; drop --exit-on-missing-checkpoint")
    if c.pretrained_checkpoint is not None:
        loaded = resume(run, c.pretrained_checkpoint, config, Start(afresh=True))
        if loaded is None:
            name = f"pretrained_checkpoint={c.pretrained_checkpoint!r}"
            raise SetupError(f"{name} holds no checkpoint; give the --save of a run")
        return loaded
    if (load := c.load) is None:
        return None, []
    together(run.mesh, lambda: _none_was_left(parse(load)), f"looking for checkpoints in {load}")
    begins = "the run starts from scratch; --exit-on-missing-checkpoint stops it"
    return None, [f"load={load!r} holds no checkpoint{near_names(load)}: {begins}"]


def near_names(load: str) -> str:
    """If `load` does not exist: directories beside it with similar names that hold checkpoints, in words."""
    place = parse(load)
    if not isinstance(place, Path) or place.exists() or not place.parent.is_dir():
        return ""
    neighbours = [p.name for p in place.parent.iterdir() if p.is_dir() and (storage.steps_in(p) or megatron.holds(p))]
    near = difflib.get_close_matches(place.name, neighbours, n=3)
    if not near:
        return " and does not exist"
    return f", but {' and '.join(str(place.with_name(name)) for name in near)} {'does' if len(near) == 1 else 'do'}"


def _none_was_left(directory: Location) -> None:
    """Raises CheckpointError where all checkpoints were abandoned, as --finetune does with what it began with: after
    the loss of the disk of --save-local before its first upload, nobody wants a training from scratch."""
    if isinstance(directory, Path) and (left := sorted(directory.glob("abandoned-iter_*"))):
        raise CheckpointError(
            f"load={str(directory)!r} holds only checkpoints that a run has abandoned, as {left[-1].name}: rename the "
            "one to begin with to iter_NUMBER, or, to start from scratch, move them away"
        )


AGAIN = "and does not begin again; for that, change an option of the training, or rename its checkpoints"


def started_again(mesh: Mesh, config: Config, root: str, local: str | None, asked: bool = True) -> bool:
    """Whether this training has saved in `root` or `local` already: the newest checkpoint there, beyond that of
    --ckpt-step, is of a run with the same options of the training. A scheduler that restarts a command with --ckpt-step
    or --finetune would repeat the same steps for ever otherwise. Collective; rank 0 looks, if `asked`."""
    c = config.checkpoint
    roots = [root for root in (root, local) if root is not None]
    begin = 0 if c.finetune or c.ckpt_step is None or c.load is None or not _same(root, c.load) else c.ckpt_step

    def look() -> bool:
        saved = [(step, root) for root in roots for step in storage.steps_in(root) if step > begin]
        for step, root in sorted(saved, reverse=True) if mesh.world.is_first and asked else []:
            folder = storage.folder_of(root, step)
            with contextlib.suppress(CheckpointError):  # a damaged one; the load reports it
                return _training(saved_config(manifests.load(folder), folder)) == _training(config)
        return False

    return bool(first_says(together(mesh, look, f"looking for checkpoints in {c.load}"), mesh))


def _training(config: Config) -> dict[str, Any]:
    """The options that decide the weights at a step, of a run that resumes in its own directory."""
    c = config.checkpoint
    in_save = c.load is not None and c.save is not None and _same(c.load, c.save)
    return training_of(replace(config, checkpoint=replace(c, load=None)) if in_save else config)


def begin_branch(run: Run, config: Config, saver: Saver | None, found: Location | None) -> tuple[int | None, list[str]]:
    """Tell the saver where the run begins. Returns (the step of the loaded checkpoint, if it is in the directory of
    --save; on rank 0, notes). Collective. Raises CheckpointError."""
    if saver is None:
        return None, []
    step = run.state.step
    saved = step if found and any(_same(found, place) for place in saver.places_of(step)) else None
    chosen = saved is None or config.checkpoint.ckpt_step == saved  # else later checkpoints were tried, and are damaged
    note = saver.begins_at(step, damaged=not chosen)
    return saved, [] if note is None else [note]


def _same(a: str | Location, b: str | Location) -> bool:
    first, second = (place.resolve() if isinstance(place, Path) else place for place in map(parse, (a, b)))
    return first == second
