"""The initial state of a run: its own checkpoint, another run's, external weights, or none.

--load, or --pretrained-checkpoint if --load has no megalite checkpoint, may also name external weights: a Hugging Face
directory (config.json and safetensors files) or Megatron-LM checkpoints (format torch_dist or torch). Each rank reads
its shards of them; step, optimizer and data start from scratch.
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
from megalite.checkpoint.storage import storage
from megalite.checkpoint.storage.location import (
    CheckpointError,
    Location,
    is_megatron_checkpoint,
    is_url,
    parse_location,
)
from megalite.common.console import print_err, print_out
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
from megalite.training.checkpointing.compatibility import (
    apply_checkpoint_args,
    apply_model,
    checkpoint_config,
    model_differences,
)
from megalite.training.checkpointing.named_tokenizer import PrintLine, find_usable_tokenizer, print_external_paths
from megalite.training.checkpointing.resume import LoadOptions, exact_name, resume
from megalite.training.checkpointing.upcycling import (
    UPCYCLING_NOTE,
    dense_shards,
    model_to_read,
    upcycles,
    upcycling_hint,
)
from megalite.training.datasets import TOKENIZER_OPTIONS, open_tokenizer
from megalite.training.setup import SetupError
from megalite.training.state import Run

UNKNOWN_VOCABULARY = "the checkpoint does not hold its true vocabulary size: rows of padding count as tokens"


def load_initial_state(run: Run, config: Config, is_restart: bool = False) -> tuple[Location | None, list[str]]:
    """Load what --load, --finetune and --pretrained-checkpoint name; collective.

    If the launcher restarts the run (`is_restart`), a checkpoint that this training has saved is preferred. Returns
    (the checkpoint or None, notes).
    """
    loaded = _load_own_checkpoint(run, config, is_restart) or load_external_model(run, config)
    if loaded is None and config.checkpoint.load is not None:
        loaded = _load_from_load(run, config, config.checkpoint.load)
    if loaded is None and config.checkpoint.pretrained_checkpoint is not None:
        loaded = _load_pretrained(run, config, config.checkpoint.pretrained_checkpoint)
    if loaded is not None:
        return loaded
    load = config.checkpoint.load
    if load is None:
        return None, []
    run_on_all_ranks(run.mesh, lambda: _check_not_abandoned(parse_location(load)), f"looking for checkpoints in {load}")
    consequence = "the run starts from scratch; --exit-on-missing-checkpoint stops it"
    return None, [f"load={load!r} holds no checkpoint{similar_directories(load)}: {consequence}"]


def _options_of_own_load(config: Config) -> LoadOptions:
    """Return the options that load a checkpoint which this training has saved."""
    checkpoint = config.checkpoint
    return LoadOptions(weights_only=checkpoint.no_save_optim and (checkpoint.no_load_optim or checkpoint.finetune))


def _load_own_checkpoint(run: Run, config: Config, is_restart: bool) -> tuple[Location, list[str]] | None:
    """Resume a restarted run from a checkpoint that it has saved itself, if there is one; collective."""
    save, save_local = config.checkpoint.save, config.checkpoint.save_local
    if save is None or not has_own_checkpoint(run.mesh, config, save, save_local, is_restart):
        return None
    loaded = resume(run, save, config, _options_of_own_load(config), save_local)
    if loaded is None:
        return None
    checkpoint_dir, notes = loaded
    return checkpoint_dir, ["the run was restarted", *notes]


def _load_from_load(run: Run, config: Config, load: str) -> tuple[Location, list[str]] | None:
    """Load a checkpoint of --load, or return None if it has none; collective.

    Raises:
        SetupError: if there is none and --exit-on-missing-checkpoint is given.
    """
    checkpoint = config.checkpoint
    # Rank 0 compares the paths, because symbolic links may differ between machines.
    in_save = checkpoint.save is not None and broadcast_int(_is_same(load, checkpoint.save), run.mesh)
    local_dir = checkpoint.save_local if in_save else None  # may have newer checkpoints that are not uploaded yet
    options = LoadOptions(
        checkpoint.ckpt_step, checkpoint.no_load_optim or config.train.skip_train, checkpoint.finetune
    )
    notes: list[str] = []
    chooses_start = checkpoint.finetune or checkpoint.ckpt_step is not None
    if in_save and chooses_start and has_own_checkpoint(run.mesh, config, load, local_dir):
        first_step = 1 if checkpoint.finetune else checkpoint.ckpt_step
        options = replace(_options_of_own_load(config), step=first_step, or_newer=True)
        notes.append(
            "these checkpoints are from the same training, so it continues from them; to start over, "
            "change an option of the training, or rename its checkpoints"
        )
    loaded = resume(run, load, config, options, local_dir)
    if loaded is not None:
        checkpoint_dir, resume_notes = loaded
        return checkpoint_dir, [*notes, *resume_notes]
    if checkpoint.exit_on_missing_checkpoint:
        suggestion = similar_directories(load)
        raise SetupError(f"load={load!r} holds no checkpoint{suggestion}; drop --exit-on-missing-checkpoint")
    return None


def _load_pretrained(run: Run, config: Config, pretrained: str) -> tuple[Location, list[str]]:
    """Load the weights of --pretrained-checkpoint; collective. Raises SetupError if there is no checkpoint."""
    loaded = resume(run, pretrained, config, LoadOptions(reset_progress=True))
    if loaded is None:
        raise SetupError(f"pretrained_checkpoint={pretrained!r} holds no checkpoint; give the --save of a run")
    return loaded


def similar_directories(load: str) -> str:
    """Return a clause for an error message if `load` does not exist, else "".

    It names sibling directories that have similar names and hold checkpoints.
    """
    path = parse_location(load)
    if not isinstance(path, Path) or path.exists() or not path.parent.is_dir():
        return ""
    siblings = [
        directory.name
        for directory in path.parent.iterdir()
        if directory.is_dir() and (storage.steps_in(directory) or megatron.has_checkpoint(directory))
    ]
    matches = difflib.get_close_matches(path.name, siblings, n=3)
    if not matches:
        return " and does not exist"
    return (
        f", but {' and '.join(str(path.with_name(name)) for name in matches)} {'does' if len(matches) == 1 else 'do'}"
    )


def _check_not_abandoned(directory: Location) -> None:
    """Raise CheckpointError if `directory` has only abandoned checkpoints.

    --finetune abandons the checkpoints that it starts from. If the disk of --save-local is lost before its first
    upload, a restart would otherwise train from scratch.
    """
    if isinstance(directory, Path) and (abandoned := sorted(directory.glob("abandoned-iter_*"))):
        raise CheckpointError(
            f"load={str(directory)!r} holds only checkpoints that a run has abandoned, such as {abandoned[-1].name}: "
            "rename the one to start from to iter_NUMBER, or move them away to start from scratch"
        )


def has_own_checkpoint(mesh: Mesh, config: Config, directory: str, local_dir: str | None, enabled: bool = True) -> bool:
    """Return True if this training has already saved a checkpoint in `directory` or `local_dir`.

    The newest checkpoint there, after the one of --ckpt-step, must be of a run with the same training options. A
    scheduler that restarts a command with --ckpt-step or --finetune would otherwise repeat the same steps forever.
    Collective; rank 0 decides, and returns False everywhere if it is not `enabled`.
    """
    checkpoint = config.checkpoint
    directories = [path for path in (directory, local_dir) if path is not None]
    start_step = 0
    loads_from_here = checkpoint.load is not None and _is_same(directory, checkpoint.load)
    if checkpoint.ckpt_step is not None and loads_from_here and not checkpoint.finetune:
        start_step = checkpoint.ckpt_step

    def newest_is_own() -> bool:
        if not (mesh.world.is_first and enabled):
            return False
        saved = [(step, root) for root in directories for step in storage.steps_in(root) if step > start_step]
        for step, root in sorted(saved, reverse=True):
            directory = storage.checkpoint_dir(root, step)
            with contextlib.suppress(CheckpointError):  # skip a damaged checkpoint; the load reports it
                saved_config = checkpoint_config(manifests.load_manifest(directory), directory)
                return _training(saved_config) == _training(config)
        return False

    is_own = run_on_all_ranks(mesh, newest_is_own, f"looking for checkpoints in {checkpoint.load}")
    return bool(broadcast_int(is_own, mesh))


def _training(config: Config) -> dict[str, Any]:
    """Return the options that determine the weights at a step; --load is not one of them if it equals --save."""
    checkpoint = config.checkpoint
    if checkpoint.load is not None and checkpoint.save is not None and _is_same(checkpoint.load, checkpoint.save):
        config = replace(config, checkpoint=replace(checkpoint, load=None))
    return training_options(config)


def start_saving_from(
    run: Run, config: Config, saver: CheckpointSaver | None, loaded: Location | None
) -> tuple[int | None, list[str]]:
    """Set the saver's start step after `loaded` (a checkpoint, or None) was loaded; collective.

    Returns (the step of the loaded checkpoint if it is in a directory of --save, notes on rank 0). Raises
    CheckpointError on all ranks.
    """
    if saver is None:
        return None, []
    step = run.progress.step
    saved_step = None
    if loaded and any(_is_same(loaded, storage.checkpoint_dir(root, step)) for root in saver.directories):
        saved_step = step
    # Unless the step was requested, the load has tried all later checkpoints, so they are damaged.
    was_chosen = saved_step is None or config.checkpoint.ckpt_step == saved_step
    note = saver.set_start_step(step, damaged=not was_chosen)
    return saved_step, [] if note is None else [note]


def _is_same(a: str | Location, b: str | Location) -> bool:
    """Return True if both are the same location, with symbolic links resolved."""
    first, second = (
        location.resolve() if isinstance(location, Path) else location for location in map(parse_location, (a, b))
    )
    return first == second


def open_external_model(config: Config, directory: Path) -> ExternalModel:
    """Open the external model in `directory`; raises CheckpointError if it cannot be read.

    A directory of Megatron-LM checkpoints is opened at --ckpt-step if --load names it, otherwise at the checkpoint that
    Megatron-LM would load.
    """
    checkpoint = config.checkpoint
    step = checkpoint.ckpt_step if checkpoint.load is not None and Path(checkpoint.load) == directory else None
    megatron_checkpoint = None if (directory / "config.json").is_file() else megatron.find_checkpoint(directory, step)
    if megatron_checkpoint is None:
        return open_model(directory, config.model.seq_length or None)
    return open_checkpoint(megatron_checkpoint, lambda line: None)


def external_vocabulary(external: ExternalModel, print_line: PrintLine) -> tuple[dict[str, Any], int | None]:
    """Return (the options of the model's tokenizer, the number of embedding rows that are tokens, None if unknown).

    The options are empty if the model has no tokenizer, or one that does not fit or open; `print_line` gets the reason.
    """
    if external.args is None:
        tokenizer, reason = find_usable_tokenizer(lambda: find_tokenizer_in(external.directory), external.rows)
        vocab_size: int | None = external.rows
    else:
        named_tokenizer = tokenizer_from_args(external.args)
        print_external_paths(named_tokenizer, external.directory, print_line)
        tokenizer, reason = find_usable_tokenizer(lambda: named_tokenizer, external.rows)
        size = build_tokenizer(**tokenizer).vocab_size if tokenizer else None
        vocab_size = true_vocab_size(external.args, external.rows, size)
    if reason is not None:
        print_line(f"note: the tokenizer of {external.directory} is left out: {reason}")
    return tokenizer, vocab_size


def named_external_dir(config: Config) -> Path | None:
    """Return the external directory that --load or --pretrained-checkpoint names, even if the run does not use it."""
    for name in (config.checkpoint.load, config.checkpoint.pretrained_checkpoint):
        if name is None or storage.steps_in(directory := Path(name)):
            continue
        if (
            (directory / "config.json").is_file()
            or is_megatron_checkpoint(directory)
            or megatron.has_checkpoint(directory)
        ):
            return directory
    return None


def external_weights_dir(config: Config) -> Path | None:
    """Return the external directory that the run starts from, or None if it starts from its own checkpoint or none."""
    checkpoint = config.checkpoint
    directory = named_external_dir(config)
    if directory is None or (checkpoint.load is not None and storage.steps_in(checkpoint.load)):
        return None
    load_is_missing = checkpoint.load is not None and directory != Path(checkpoint.load)
    return None if load_is_missing and checkpoint.exit_on_missing_checkpoint else directory


def complete_config(config: Config, print_line: PrintLine = print_err) -> Config:
    """Return `config` completed from the checkpoint or external model that it names.

    With --use-checkpoint-args the model's options are taken over; vocabulary and tokenizer of an external model always
    are. `print_line` is called with lines for the user.

    Raises:
        SetupError: with all contradictions between the options and the checkpoint.
    """
    directory = named_external_dir(config)
    checkpoint = config.checkpoint
    if checkpoint.save is not None and not is_url(checkpoint.save) and megatron.has_checkpoint(Path(checkpoint.save)):
        raise SetupError(
            f"save={checkpoint.save!r} holds checkpoints of Megatron-LM, which megalite keeps; give another directory"
        )
    if directory is None:
        return apply_checkpoint_args(config, print_line)
    try:
        external = open_external_model(config, directory)
    except CheckpointError as error:
        raise SetupError(str(error)) from None
    problems: list[str] = []
    if external_weights_dir(config) is None:
        config = apply_checkpoint_args(config, print_line)
    else:
        if checkpoint.ckpt_step is not None and external.args is None:
            problems.append(f"ckpt_step={checkpoint.ckpt_step}, but {directory} has no steps; drop --ckpt-step")
        model = model_to_read(config, external.model, str(directory))
        if checkpoint.use_checkpoint_args:
            config = apply_model(config, external.model, str(directory))
        else:
            remedy = "; correct it, or give --use-checkpoint-args and drop the model's options"
            differences = model_differences(model, external.model, str(external.directory))
            local_positions, external_positions = config.model.max_positions, external.model.max_positions
            learned = external.model.position_embedding_type == "learned_absolute"
            if learned and local_positions != external_positions:
                differences.append(
                    f"max_position_embeddings: {local_positions} here, {external_positions} in {external.directory}"
                )
            problems += [line + remedy for line in differences] + upcycling_hint(model, external.model)
    vocabulary, vocabulary_problems = _vocabulary_options(config.data, external, print_line)
    if problems or vocabulary_problems:
        raise SetupError("\n".join([*problems, *vocabulary_problems]))
    vocabulary = {name: value for name, value in vocabulary.items() if name not in config.explicit}
    return replace(config, data=replace(config.data, **vocabulary))


def _vocabulary_options(
    data: DataConfig, external: ExternalModel, print_line: PrintLine
) -> tuple[dict[str, Any], list[str]]:
    """Return (options of tokenizer and vocabulary to take from the external model, contradictions).

    A tokenizer may have fewer tokens than the model has rows.
    """
    rows = external.rows
    is_padded = external.args is not None  # Megatron-LM pads its vocabulary
    tokenizer_options, external_vocab_size = external_vocabulary(external, print_line)
    vocab_size = data.vocab_size
    if data.tokenizer_type is not None and vocab_size is None:
        tokenizer = open_tokenizer(data)
        vocab_size = None if tokenizer is None else tokenizer.vocab_size
        if vocab_size is not None and vocab_size <= rows and not is_padded:
            vocab_size = None
    if vocab_size is not None and (vocab_size > rows if is_padded else vocab_size != rows):
        remedy = "drop --vocab-size" if data.vocab_size is not None else "give the model's own tokenizer"
        return {}, [f"vocab_size: {vocab_size} here, {rows} in {external.directory}; {remedy}"]
    differs = tokenizer_options.get("vocab_size", vocab_size) != vocab_size
    if vocab_size is not None and (data.tokenizer_type is not None or differs):
        return {}, []
    options = dict(tokenizer_options) if data.tokenizer_type is None else {}
    if data.vocab_size is None:
        options["vocab_size"] = external_vocab_size or rows  # from the weights, as in a conversion
    return options, []


def tokenizer_from_args(args: Namespace | None) -> dict[str, Any]:
    """Return the data options of the tokenizer in Megatron-LM's args; {} if megalite does not have its type."""
    if getattr(args, "tokenizer_type", None) not in REGISTRIES["tokenizer_type"]:
        return {}
    types = {"vocab_size": int}
    values = {name: getattr(args, name, None) for name in TOKENIZER_OPTIONS}
    return {name: value for name, value in values.items() if type(value) is types.get(name, str)}


def load_external_model(run: Run, config: Config) -> tuple[Path, list[str]] | None:
    """Load the weights from the external directory that the run starts from; collective.

    Returns (the directory, notes), or None if the run does not start from one. Raises CheckpointError on all ranks.
    """
    mesh = run.mesh
    directory = external_weights_dir(config)
    if not broadcast_int(directory is not None, mesh):  # rank 0 decides, since others may see a new checkpoint late
        return None

    def read() -> tuple[Path, ExternalModel, int | None]:
        if directory is None:
            raise CheckpointError("it does not exist here, but rank 0 sees it: share it, or copy it to all nodes")
        external = open_external_model(config, directory)
        shards = run.optimizer.checkpoint_shards()
        names = {shard.name for shard in shards}
        targets = [shard for shard in shards if shard.name == exact_name(shard.name.partition("/")[2], names)]
        targets += run.expert_balancer.state_shards()
        if upcycles(config):
            targets = dense_shards(targets)
        rows = external.rows if external.args is None else run.vocab_size
        if mesh.world.is_first:
            print_out(f"loading {external.directory} ({len(external.tensors)} tensors)")
        specs = checkpoint_specs(external.model, rows)
        load_external_weights(external.tensors, targets, specs, str(directory), mesh.world.is_first)
        return directory, external, external_vocabulary(external, lambda _: None)[1]

    directory, external, vocab_size = run_on_all_ranks(mesh, read, f"reading the weights of {directory}")
    run.optimizer.sync_after_load()
    dtype = str(external.dtype).removeprefix("torch.")
    notes = [f"weights of {external.name} in {dtype}; step, optimizer and data start from scratch"]
    if upcycles(config):
        notes.append(UPCYCLING_NOTE)
    if vocab_size is None and run.vocab_size == external.rows:
        notes.append(f"{UNKNOWN_VOCABULARY}; give the tokenizer, or --vocab-size")
    checkpoint = config.checkpoint
    if checkpoint.load is not None and Path(checkpoint.load) == directory and checkpoint.save:
        notes.append(
            "a restart with this --load starts from scratch again; to continue, give "
            f"--load {checkpoint.save} --pretrained-checkpoint {directory}"
        )
    return external.directory, notes
