"""What a run begins with, and what happens to the checkpoints that it does not continue from.

--load, or --pretrained-checkpoint while --load holds no checkpoint of megalite's, may also name the weights of another
program: a Hugging Face directory (config.json and safetensors files) or checkpoints of Megatron-LM (format torch_dist
or torch). Each rank reads its part of them; everything else begins afresh.
"""

import contextlib
import difflib
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from megalite.checkpoint.format import manifest as manifests
from megalite.checkpoint.manager.collective import run_on_all_ranks
from megalite.checkpoint.manager.saver import CheckpointSaver
from megalite.checkpoint.storage import storage as storage
from megalite.checkpoint.storage.location import (
    CheckpointError,
    Location,
    is_megatron_checkpoint,
    is_url,
    parse_location,
)
from megalite.config.console import print_err, print_out
from megalite.config.options import Config, DataConfig, training_options
from megalite.config.registry import REGISTRIES
from megalite.data.tokenizers.build_tokenizer import build_tokenizer
from megalite.data.tokenizers.huggingface_tokenizer import find_tokenizer_in
from megalite.interop.huggingface.model_files import open_model
from megalite.interop.megatron import torch_format as megatron
from megalite.interop.megatron.torch_dist_format import open_checkpoint
from megalite.interop.megatron.torch_format import true_vocab_size
from megalite.interop.tensor_mapping import ExternalModel, load_external_weights
from megalite.models.specs import checkpoint_specs
from megalite.parallel.comm import broadcast_int
from megalite.parallel.mesh import Mesh
from megalite.training.checkpointing.named_tokenizer import Note, announce, fitting
from megalite.training.checkpointing.resume import (
    LoadOptions,
    apply_checkpoint_args,
    apply_model,
    checkpoint_config,
    model_differences,
    resume,
)
from megalite.training.checkpointing.upcycling import BEGUN, dense_shards, model_to_read, upcycles, upcycling_hint
from megalite.training.datasets import TOKENIZER_OPTIONS, open_tokenizer
from megalite.training.setup import SetupError
from megalite.training.state import Run

AGAIN = "and does not begin again; for that, change an option of the training, or rename its checkpoints"
UNKNOWN_VOCABULARY = "the checkpoint does not hold its true vocabulary size: rows of padding count as tokens"


def load_initial_state(run: Run, config: Config, resumes: bool = False) -> tuple[Location | None, list[str]]:
    """Begin as --load, --finetune and --pretrained-checkpoint say, or, where the launcher starts it again (`resumes`),
    with what this same training has saved: (the checkpoint, notes); collective."""
    c = config.checkpoint
    after = LoadOptions(
        weights_only=c.no_save_optim and (c.no_load_optim or c.finetune)
    )  # with what this run has saved
    again = c.save is not None and has_own_checkpoint(run.mesh, config, c.save, c.save_local, resumes)
    if again and (loaded := resume(run, c.save or "", config, after, c.save_local)):
        return loaded[0], ["the run was started again", *loaded[1]]
    if theirs := load_external_model(run, config):
        return theirs
    if c.load is not None:
        # symbolic links may differ between machines
        in_save = c.save is not None and broadcast_int(_same(c.load, c.save), run.mesh)
        local = c.save_local if in_save else None  # may have newer checkpoints that are not uploaded yet
        start = LoadOptions(c.ckpt_step, c.no_load_optim or config.train.skip_train, c.finetune)
        again = (
            in_save and (c.finetune or c.ckpt_step is not None) and has_own_checkpoint(run.mesh, config, c.load, local)
        )
        if again:
            start = replace(after, step=1 if c.finetune else c.ckpt_step, or_newer=True)
        if loaded := resume(run, c.load, config, start, local):
            notes = [f"this same training has saved that: it continues, {AGAIN}"] if again else []
            return loaded[0], [*notes, *loaded[1]]
        if c.exit_on_missing_checkpoint:
            near = similar_directories(c.load)
            raise SetupError(f"load={c.load!r} holds no checkpoint{near}; drop --exit-on-missing-checkpoint")
    if (name := c.pretrained_checkpoint) is not None:
        if loaded := resume(run, name, config, LoadOptions(reset_progress=True)):
            return loaded
        raise SetupError(f"pretrained_checkpoint={name!r} holds no checkpoint; give the --save of a run")
    if (load := c.load) is None:
        return None, []
    run_on_all_ranks(run.mesh, lambda: _refuse_abandoned(parse_location(load)), f"looking for checkpoints in {load}")
    begins = "the run starts from scratch; --exit-on-missing-checkpoint stops it"
    return None, [f"load={load!r} holds no checkpoint{similar_directories(load)}: {begins}"]


def similar_directories(load: str) -> str:
    """If `load` does not exist: directories beside it with similar names that hold checkpoints, in words."""
    place = parse_location(load)
    if not isinstance(place, Path) or place.exists() or not place.parent.is_dir():
        return ""
    neighbours = [
        p.name for p in place.parent.iterdir() if p.is_dir() and (storage.steps_in(p) or megatron.has_checkpoint(p))
    ]
    if not (near := difflib.get_close_matches(place.name, neighbours, n=3)):
        return " and does not exist"
    return f", but {' and '.join(str(place.with_name(name)) for name in near)} {'does' if len(near) == 1 else 'do'}"


def _refuse_abandoned(directory: Location) -> None:
    """Raises CheckpointError where all checkpoints were abandoned, as --finetune does with what it began with: after
    the loss of the disk of --save-local before its first upload, nobody wants a training from scratch."""
    if isinstance(directory, Path) and (left := sorted(directory.glob("abandoned-iter_*"))):
        raise CheckpointError(
            f"load={str(directory)!r} holds only checkpoints that a run has abandoned, as {left[-1].name}: rename the "
            "one to begin with to iter_NUMBER, or, to start from scratch, move them away"
        )


def has_own_checkpoint(mesh: Mesh, config: Config, root: str, local: str | None, asked: bool = True) -> bool:
    """Whether this training has saved in `root` or `local` already: the newest checkpoint there, beyond that of
    --ckpt-step, is of a run with the same options of the training. A scheduler that restarts a command with --ckpt-step
    or --finetune would repeat the same steps for ever otherwise. Collective; rank 0 looks, if `asked`."""
    c = config.checkpoint
    roots = [root for root in (root, local) if root is not None]
    begin = 0 if c.finetune or c.ckpt_step is None or c.load is None or not _same(root, c.load) else c.ckpt_step

    def look() -> bool:
        saved = [(step, root) for root in roots for step in storage.steps_in(root) if step > begin]
        for step, root in sorted(saved, reverse=True) if mesh.world.is_first and asked else []:
            folder = storage.checkpoint_dir(root, step)
            with contextlib.suppress(CheckpointError):  # a damaged one; the load reports it
                return _training(checkpoint_config(manifests.load_manifest(folder), folder)) == _training(config)
        return False

    return bool(broadcast_int(run_on_all_ranks(mesh, look, f"looking for checkpoints in {c.load}"), mesh))


def _training(config: Config) -> dict[str, Any]:
    """The options that decide the weights at a step, of a run that resumes in its own directory."""
    c = config.checkpoint
    in_save = c.load is not None and c.save is not None and _same(c.load, c.save)
    return training_options(replace(config, checkpoint=replace(c, load=None)) if in_save else config)


def start_saving_from(
    run: Run, config: Config, saver: CheckpointSaver | None, found: Location | None
) -> tuple[int | None, list[str]]:
    """Tell the saver where the run begins. Returns (the step of the loaded checkpoint, if it is in the directory of
    --save; on rank 0, notes). Collective. Raises CheckpointError."""
    if saver is None:
        return None, []
    step = run.state.step
    saved = (
        step
        if found and any(_same(found, storage.checkpoint_dir(place, step)) for place in saver.directories)
        else None
    )
    chosen = saved is None or config.checkpoint.ckpt_step == saved  # else later checkpoints were tried, and are damaged
    note = saver.set_start_step(step, damaged=not chosen)
    return saved, [] if note is None else [note]


def _same(a: str | Location, b: str | Location) -> bool:
    first, second = (place.resolve() if isinstance(place, Path) else place for place in map(parse_location, (a, b)))
    return first == second


def open_external_model(config: Config, folder: Path) -> ExternalModel:
    """Of Megatron-LM's checkpoints that of --ckpt-step, or the one that it would load. Raises CheckpointError."""
    c = config.checkpoint
    step = c.ckpt_step if c.load is not None and Path(c.load) == folder else None
    release = None if (folder / "config.json").is_file() else megatron.find_checkpoint(folder, step)
    if release is None:
        return open_model(folder, config.model.seq_length or None)
    return open_checkpoint(release, lambda line: None)


def external_vocabulary(theirs: ExternalModel, note: Note) -> tuple[dict[str, Any], int | None]:
    """(the options of its tokenizer, how many of its rows are tokens, if known)."""
    if theirs.args is None:
        tokenizer, why = fitting(lambda: find_tokenizer_in(theirs.folder), theirs.rows)
        known: int | None = theirs.rows
    else:
        named = tokenizer_from_args(theirs.args)
        announce(named, theirs.folder, note)
        tokenizer, why = fitting(lambda: named, theirs.rows)
        size = build_tokenizer(**tokenizer).vocab_size if tokenizer else None
        known = true_vocab_size(theirs.args, theirs.rows, size)
    if why is not None:
        note(f"note: the tokenizer of {theirs.folder} is left out: {why}")
    return tokenizer, known


def named_external_dir(config: Config) -> Path | None:
    """The other program's directory that --load or --pretrained-checkpoint names, even if the run does not use it."""
    for name in (config.checkpoint.load, config.checkpoint.pretrained_checkpoint):
        if name is None or storage.steps_in(folder := Path(name)):
            continue
        if (folder / "config.json").is_file() or is_megatron_checkpoint(folder) or megatron.has_checkpoint(folder):
            return folder
    return None


def external_weights_dir(config: Config) -> Path | None:
    """The other program's directory that the run begins with; None where it begins with its own checkpoint, or none."""
    c, folder = config.checkpoint, named_external_dir(config)
    if folder is None or (c.load is not None and storage.steps_in(c.load)):
        return None
    missing = c.load is not None and folder != Path(c.load)
    return None if missing and c.exit_on_missing_checkpoint else folder


def complete_config(config: Config, note: Note = print_err) -> Config:
    """`config` completed from the checkpoint or the other program's directory: the model with --use-checkpoint-args,
    of the directory also vocabulary and tokenizer. `note` gets what is worth a line. Raises SetupError with all
    contradictions at once."""
    folder, c = named_external_dir(config), config.checkpoint
    if c.save is not None and not is_url(c.save) and megatron.has_checkpoint(Path(c.save)):
        raise SetupError(f"save={c.save!r} holds checkpoints of Megatron-LM, which are kept; give another directory")
    if folder is None:
        return apply_checkpoint_args(config, note)
    try:
        theirs = open_external_model(config, folder)
    except CheckpointError as error:
        raise SetupError(str(error)) from None
    problems: list[str] = []
    if external_weights_dir(config) is None:
        config = apply_checkpoint_args(config, note)
    else:
        if c.ckpt_step is not None and theirs.args is None:
            problems.append(f"ckpt_step={c.ckpt_step}, but {folder} has no steps; drop --ckpt-step")
        model = model_to_read(config, theirs.model, str(folder))
        if c.use_checkpoint_args:
            config = apply_model(config, theirs.model, str(folder))
        else:
            remedy = "; correct it, or give --use-checkpoint-args and drop the model's options"
            lines = model_differences(model, theirs.model, str(theirs.folder))
            own, other = config.model.max_positions, theirs.model.max_positions
            if theirs.model.position_embedding_type == "learned_absolute" and own != other:
                lines.append(f"max_position_embeddings: {own} here, {other} in {theirs.folder}")
            problems += [line + remedy for line in lines] + upcycling_hint(model, theirs.model)
    tokenizer, of_tokenizer = _tokenizer(config.data, theirs, note)
    if problems or of_tokenizer:
        raise SetupError("\n".join([*problems, *of_tokenizer]))
    tokenizer = {name: value for name, value in tokenizer.items() if name not in config.given}
    return replace(config, data=replace(config.data, **tokenizer))


def _tokenizer(data: DataConfig, theirs: ExternalModel, note: Note) -> tuple[dict[str, Any], list[str]]:
    """(options of the vocabulary, contradictions). A tokenizer may have fewer tokens than the model has rows."""
    rows, given, padded = theirs.rows, data.vocab_size, theirs.args is not None
    own, known = external_vocabulary(theirs, note)
    if data.tokenizer_type is not None and given is None:
        tokenizer = open_tokenizer(data)
        given = None if tokenizer is None else tokenizer.vocab_size
        if given is not None and given <= rows and not padded:
            given = None
    if given is not None and (given > rows if padded else given != rows):
        remedy = "drop --vocab-size" if data.vocab_size is not None else "give the model's own tokenizer"
        return {}, [f"vocab_size: {given} here, {rows} in {theirs.folder}; {remedy}"]
    if given is not None and (data.tokenizer_type is not None or own.get("vocab_size", given) != given):
        return {}, []
    options = dict(own) if data.tokenizer_type is None else {}
    if data.vocab_size is None:
        options["vocab_size"] = known or rows  # the weights decide, as in a conversion
    return options, []


def tokenizer_from_args(args: Namespace | None) -> dict[str, Any]:
    """The data options of the tokenizer that Megatron-LM's args name; {} for a type that megalite does not have."""
    if getattr(args, "tokenizer_type", None) not in REGISTRIES["tokenizer_type"]:
        return {}
    kinds = {"vocab_size": int}
    values = {name: getattr(args, name, None) for name in TOKENIZER_OPTIONS}
    return {name: value for name, value in values.items() if type(value) is kinds.get(name, str)}


def load_external_model(run: Run, config: Config) -> tuple[Path, list[str]] | None:
    """Fill the weights from the other program's directory: (it, notes); None where the run does not begin with one;
    collective. Raises CheckpointError on all ranks."""
    folder, mesh = external_weights_dir(config), run.mesh
    if not broadcast_int(folder is not None, mesh):  # the first rank decides, as others may see a new checkpoint late
        return None

    def read() -> tuple[Path, ExternalModel, int | None]:
        if folder is None:
            raise CheckpointError("it does not exist here, but rank 0 sees it: share it, or copy it to all nodes")
        theirs = open_external_model(config, folder)
        pieces = run.optimizer.checkpoint_shards()
        main = [piece for piece in pieces if piece.name.startswith("optimizer.main/")]  # exact where weights are not
        wanted = main or [piece for piece in pieces if piece.name.startswith("model/")]
        wanted += run.expert_balancer.state_shards()
        wanted = dense_shards(wanted) if upcycles(config) else wanted
        rows = theirs.rows if theirs.args is None else run.vocab_size
        if mesh.world.is_first:
            print_out(f"loading {theirs.folder} ({len(theirs.tensors)} tensors)")
        load_external_weights(
            theirs.tensors, wanted, checkpoint_specs(theirs.model, rows), str(folder), mesh.world.is_first
        )
        return folder, theirs, external_vocabulary(theirs, lambda _: None)[1]

    folder, theirs, known = run_on_all_ranks(mesh, read, f"reading the weights of {folder}")
    run.optimizer.sync_after_load()
    dtype = str(theirs.dtype)[6:]
    notes = [f"weights of {theirs.name} in {dtype}; step, optimizer and data begin afresh"]
    notes += [BEGUN] * upcycles(config)
    if known is None and run.vocab_size == theirs.rows:
        notes.append(f"{UNKNOWN_VOCABULARY}; give the tokenizer, or --vocab-size")
    if config.checkpoint.load is not None and Path(config.checkpoint.load) == folder and config.checkpoint.save:
        again = "a restart with this --load begins afresh again; to continue, give --load"
        notes.append(f"{again} {config.checkpoint.save} --pretrained-checkpoint {folder}")
    return theirs.folder, notes
