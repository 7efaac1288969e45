"""Resume a run from a checkpoint."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megalite.checkpoint.format.manifest import MODEL_PREFIXES, Manifest
from megalite.checkpoint.manager import loader
from megalite.checkpoint.storage.location import CheckpointError, Location
from megalite.common.console import print_out
from megalite.common.wording import plural
from megalite.config.options import CheckpointConfig, Config
from megalite.config.plugins import changed_plugins, missing_plugins_message
from megalite.data.errors import DataError
from megalite.models.specs import checkpoint_specs
from megalite.optim.loss_scale import LossScaler
from megalite.optim.lr import OptimSchedules
from megalite.parallel.spec import TensorShard
from megalite.training.checkpointing.compatibility import (
    MAX_NAMED,
    checkpoint_config,
    model_differences,
    tokenizer_differences,
)
from megalite.training.checkpointing.upcycling import (
    UPCYCLING_NOTE,
    dense_shards,
    model_to_read,
    upcycles,
    upcycling_hint,
)
from megalite.training.monitoring.spike_detector import SpikeDetector
from megalite.training.setup import SetupError
from megalite.training.state import Run

MAIN_WEIGHTS = "optimizer.main"
Kinds = Mapping[str, str]  # the KIND of tensors named KIND/NAME -> dtype


@dataclass(frozen=True)
class SavedState:
    """The state of a run in a checkpoint's manifest."""

    progress: dict[str, int]
    num_updates: int
    loss_scaler: LossScaler
    schedules: OptimSchedules
    spikes: SpikeDetector


@dataclass(frozen=True)
class LoadOptions:
    """The options of a load: which checkpoint, and which of its parts."""

    step: int | None = None  # None: the newest checkpoint
    weights_only: bool = False  # do not load the optimizer state
    reset_progress: bool = False  # nor step and data position
    or_newer: bool = False  # a checkpoint after `step` will do too

    @property
    def optimizer(self) -> bool:
        """True if the optimizer state is loaded."""
        return not (self.weights_only or self.reset_progress)


def resume(
    run: Run, directory: str, config: Config, options: LoadOptions, local_dir: str | None = None
) -> tuple[Location, list[str]] | None:
    """Resume from the newest valid checkpoint of `directory`, or load only its weights; collective.

    Args:
        local_dir: Another directory, which is preferred if both have the checkpoint (--save-local).

    Returns:
        (the checkpoint, notes), or None if there is no checkpoint.

    Raises:
        SetupError: if the checkpoint does not fit the run.
        CheckpointError: if no checkpoint can be read.
    """
    notes: list[str] = []

    def make_plan(checkpoint_dir: Location, manifest: Manifest) -> loader.LoadPlan:
        notes.clear()  # from a checkpoint that was tried before
        return _load_plan(run, config, options, checkpoint_dir, manifest, notes)

    loaded = loader.load_newest(
        directory, run.mesh, make_plan, options.step, or_newer=options.or_newer, preferred=local_dir
    )
    if loaded is None:
        return None
    checkpoint_dir, manifest = loaded
    saved = _read_run_state(run, checkpoint_dir, manifest, config.checkpoint)
    run.optimizer.sync_after_load(main_loaded=options.optimizer)
    if options.reset_progress:
        return checkpoint_dir, [*notes, "only the weights are loaded: step, optimizer and data start from scratch"]
    for name, value in saved.progress.items():
        setattr(run.progress, name, value)
    run.spikes = saved.spikes
    if not options.optimizer:
        notes.append("the optimizer's state is not loaded: its moments start at zero")
    else:
        run.optimizer.num_updates = saved.num_updates
        run.loss_scaler = saved.loss_scaler
        if config.checkpoint.use_checkpoint_opt_param_scheduler:
            run.schedules = saved.schedules
        if "rates" not in manifest.state:
            notes.append("the checkpoint has no learning rate and weight decay: those of the options are used")
    ledger = manifest.state.get("data")
    if run.ledger is not None and ledger is not None:
        try:
            notes += run.ledger.resume(ledger)
        except DataError:
            raise
        except (ArithmeticError, TypeError, ValueError, LookupError) as error:
            problem = f"{checkpoint_dir}: its data ledger is damaged ({error!r}); use another checkpoint"
            raise CheckpointError(problem) from None
    return checkpoint_dir, notes


def _load_plan(
    run: Run, config: Config, options: LoadOptions, directory: Location, manifest: Manifest, notes: list[str]
) -> loader.LoadPlan:
    """Return the plan that loads this checkpoint; adds to `notes`.

    Raises:
        SetupError: if the checkpoint does not fit the run.
    """
    notes += _check_plugins(directory, manifest)
    local_kinds = run.optimizer.shard_dtypes()
    saved_kinds = _kinds_of(manifest)
    notes += _check_compatible(run, config, options, directory, manifest, local_kinds, saved_kinds)
    shards = [*run.optimizer.checkpoint_shards(), *run.expert_balancer.state_shards()]
    if not options.optimizer:
        shards = [shard for shard in shards if shard.name.startswith(MODEL_PREFIXES)]
        if options.reset_progress and upcycles(config):
            shards = dense_shards(shards)
            notes.append(UPCYCLING_NOTE)
    else:
        shards = map_precision(shards, {name: tensor.dtype for name, tensor in manifest.tensors.items()})
        if local_kinds["model"] != saved_kinds["model"]:
            notes.append(
                f"saved in {saved_kinds['model']}: the main weights continue bit for bit, in {local_kinds['model']}"
            )
    return loader.LoadPlan(shards, options.optimizer, progress_title=_log_load(run, config, directory, manifest))


def _check_plugins(directory: Location, manifest: Manifest) -> list[str]:
    """Return a note for each plugin that has changed since the checkpoint; raise SetupError if one is missing."""
    plugins = manifest.state.get("plugins")
    if missing_plugins := missing_plugins_message(plugins):
        raise SetupError(f"{directory} {missing_plugins}")
    return [
        f"plugin={name!r} differs from the one in {directory}: sha256 {local_hash}..., not {saved_hash}..."
        for name, saved_hash, local_hash in changed_plugins(plugins)
    ]


def _check_compatible(
    run: Run,
    config: Config,
    options: LoadOptions,
    directory: Location,
    manifest: Manifest,
    local_kinds: Kinds,
    saved_kinds: Kinds,
) -> list[str]:
    """Return notes on differences that a load without the progress allows.

    Raises:
        SetupError: with all other differences of model, tokenizer, optimizer and schedules.
    """
    saved_schedules = _read_run_state(run, directory, manifest, config.checkpoint).schedules
    saved_model = checkpoint_config(manifest, directory).model
    model = model_to_read(config, saved_model, str(directory)) if options.reset_progress else config.model
    model_problems = model_differences(model, saved_model, "the checkpoint")
    saved_vocab_size = manifest.state.get("vocab_size", run.vocab_size)
    if saved_vocab_size != run.vocab_size:
        model_problems.append(f"vocab_size: {run.vocab_size} here, {saved_vocab_size} in the checkpoint")
    tokenizer_problems = tokenizer_differences(run.tokenizer, manifest)
    notes: list[str] = []
    if options.reset_progress:
        notes = [f"changed since the checkpoint: {line}" for line in [*model_problems, *tokenizer_problems]]
        model_problems, tokenizer_problems = [], []
    local_states: dict[str, str] = {}
    optimizer_problems: list[str] = []
    if options.optimizer:
        local_states = _optimizer_states(local_kinds)
        optimizer_problems = _schedule_problems(run.schedules, saved_schedules, config.checkpoint)
    if local_states and not any(kind.startswith("optimizer.") for kind in saved_kinds):
        local_states = {}
        remedy = "add --no-load-optim to continue without it, or --finetune to start a new training with its weights"
        optimizer_problems.insert(0, f"{directory} holds no optimizer state: {remedy}")
    shapes = {spec.stored_name: spec.stored_shape for spec in checkpoint_specs(model, run.vocab_size).values()}
    problems = _incompatibilities(
        shapes, manifest, model_problems, tokenizer_problems, local_states, _optimizer_states(saved_kinds)
    )
    if problems:
        problems = [f"{directory} does not fit this run:", *problems, *upcycling_hint(model, saved_model)]
    if problems or optimizer_problems:
        raise SetupError("\n".join([*problems, *optimizer_problems]))
    return notes


def _kinds_of(manifest: Manifest) -> Kinds:
    """Return the dtype of each kind of tensor, the narrowest one if it has several: some weights stay in fp32.

    Raises CheckpointError if a tensor has neither dtype.
    """
    kinds: dict[str, str] = {}
    for name, tensor in manifest.tensors.items():
        kind = name.partition("/")[0]
        if kind not in kinds or getattr(torch, tensor.dtype).itemsize < getattr(torch, kinds[kind]).itemsize:
            kinds[kind] = tensor.dtype
    for name, tensor in manifest.tensors.items():
        expected = kinds[name.partition("/")[0]]
        if tensor.dtype not in (expected, "float32"):  # weights that stay in fp32
            raise CheckpointError(f"{name} is {tensor.dtype}, but others are {expected}: its manifest is damaged")
    return kinds


def exact_name(parameter: str, names: Container[str]) -> str:
    """Return the name of a parameter's tensor with its exact weights: the main weights if `names` has them."""
    main_name = f"{MAIN_WEIGHTS}/{parameter}"
    return main_name if main_name in names else f"model/{parameter}"


def map_precision(shards: Sequence[TensorShard], saved_dtypes: Mapping[str, str]) -> list[TensorShard]:
    """Return the shards to read, with their names in the checkpoint.

    If the weights of a parameter were saved in another dtype, its fp32 weights (the main weights, or the model weights
    if they are fp32) are read bit for bit. Its weights in half precision are not read, but cast from them.

    Args:
        shards: The shards of this rank: for each parameter those of all kinds.
        saved_dtypes: The names of the tensors in the checkpoint, and their dtypes.
    """
    local_dtypes = {shard.name: str(shard.data.dtype).removeprefix("torch.") for shard in shards}
    mapped: list[TensorShard] = []
    for shard in shards:
        kind, _, parameter = shard.name.partition("/")
        weight_name = f"model/{parameter}"
        if kind not in ("model", MAIN_WEIGHTS) or local_dtypes[weight_name] == saved_dtypes.get(weight_name):
            mapped.append(shard)
        elif shard.name == exact_name(parameter, local_dtypes):
            mapped.append(replace(shard, name=exact_name(parameter, saved_dtypes)))
    return mapped


def _optimizer_states(kinds: Kinds) -> dict[str, str]:
    """Return the kinds that are optimizer state, without main weights."""
    return {kind: dtype for kind, dtype in kinds.items() if kind.startswith("optimizer.") and kind != MAIN_WEIGHTS}


def _incompatibilities(
    local_shapes: Mapping[str, tuple[int, ...]],
    manifest: Manifest,
    model_problems: list[str],
    tokenizer_problems: list[str],
    local_states: Kinds,
    saved_states: Kinds,
) -> list[str]:
    """Return why the checkpoint does not fit and what to do, in at most seven lines; [] if it fits.

    The result is the same on all ranks, because it is about full tensors.

    Args:
        local_shapes: The shapes of the model's tensors, by their names in a checkpoint.
        model_problems: A line for each difference of model options.
        tokenizer_problems: A line for each difference of the tokenizers.
        local_states: The optimizer states to load, none if they are not loaded.
        saved_states: The optimizer states in the checkpoint.
    """
    saved_shapes = {name: tensor.shape for name, tensor in manifest.tensors.items() if name.startswith(MODEL_PREFIXES)}
    mismatches = [
        name for name in sorted({*local_shapes, *saved_shapes}) if local_shapes.get(name) != saved_shapes.get(name)
    ]
    states_differ = bool(local_states) and local_states != saved_states
    if not (model_problems or tokenizer_problems or mismatches or states_differ):
        return []
    lines = [*model_problems[:MAX_NAMED], *tokenizer_problems]
    if (unnamed := len(model_problems) - MAX_NAMED) > 0:
        lines.append(f"and {unnamed} more {plural('option', unnamed)}")
    if mismatches:
        name = mismatches[0]
        local, saved = (str(shapes.get(name, "nothing")) for shapes in (local_shapes, saved_shapes))
        lines.append(
            f"{len(mismatches)} tensors, such as {name.partition('/')[2]}: {local} here, {saved} in the checkpoint"
        )
    if states_differ:
        local, saved = (
            ", ".join(f"{kind.partition('.')[2]} {dtype}" for kind, dtype in states.items())
            for states in (local_states, saved_states)
        )
        lines.append(f"optimizer: {local} here, {saved} in the checkpoint")
    remedies = []
    if model_problems:
        remedies.append("give its options (--use-checkpoint-args takes them over)")
        if not mismatches:
            remedies.append("--finetune to start a new training with its weights")
    elif mismatches:
        remedies.append("give the options of its model, or another --load")
    if tokenizer_problems:
        remedies.append("its tokenizer, or --finetune")
    if states_differ:
        remedies.append("its optimizer, or --no-load-optim to continue without that state")
    return [*(f"  {line}" for line in lines), "; ".join(remedies)]


def _schedule_problems(
    schedules: OptimSchedules, saved_schedules: OptimSchedules, checkpoint: CheckpointConfig
) -> list[str]:
    """Return a line for each difference of the schedules, and the remedy; [] if an option chooses between them."""
    if checkpoint.use_checkpoint_opt_param_scheduler and saved_schedules.decoupled and not schedules.decoupled:
        # The checkpoint's decoupled rate would have no effect, because no bucket has it.
        peak = f"{saved_schedules.decoupled.peak:g}"
        return [f"decoupled_lr={peak} in the checkpoint, but none here; add --decoupled-lr {peak}"]
    if checkpoint.override_opt_param_scheduler or checkpoint.use_checkpoint_opt_param_scheduler:
        return []
    local, saved = schedules.resume_facts(), saved_schedules.resume_facts()
    lines = [
        f"{name}={_shorten(local.get(name))}, but {_shorten(saved.get(name))} in the checkpoint"
        for name in dict.fromkeys((*local, *saved))
        if local.get(name) != saved.get(name)
    ]
    if not lines:
        return []
    if local.get("decay in samples") != saved.get("decay in samples"):
        lines.append("a decay is as long as the training unless --lr-decay-iters or --lr-decay-samples sets its length")
    remedy = "--override-opt-param-scheduler uses the options, --use-checkpoint-opt-param-scheduler the checkpoint"
    return [*lines, f"the rates differ from the checkpoint's: {remedy}"]


def _shorten(value: float | str | None) -> float | str | None:
    """Return an integral float as an int, to print it without a fraction."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _log_load(run: Run, config: Config, directory: Location, manifest: Manifest) -> str | None:
    """Log the start of the load and return the title of its progress bar, on rank 0; return None elsewhere."""
    if not run.mesh.world.is_first:
        return None
    if config.log.log_style == "megatron":
        step = manifest.state["progress"]["step"]
        print_out(f" loading distributed checkpoint from {directory.parent} at iteration {step}")
    else:
        gib = sum(file.size for file in manifest.files.values()) / 2**30
        print_out(f"loading {directory} ({gib:.3g} GiB)")
    return f"loading {directory}"


def load_message(run: Run, config: Config, directory: Location) -> str:
    """Return the log line about a start from a checkpoint."""
    if config.log.log_style == "megatron":
        position = f"[ t 1/{run.mesh.tp.size}, p 1/{run.mesh.pp.size} ] at iteration {run.progress.step}"
        return f"  successfully loaded checkpoint from {directory.parent} {position}"
    return f"{'resumed from' if run.progress.step else 'starts from'} {directory} at step {run.progress.step}"


def _read_run_state(run: Run, directory: Location, manifest: Manifest, checkpoint: CheckpointConfig) -> SavedState:
    """Return the checkpoint's state without changing the run; raises CheckpointError if it is damaged."""
    loss_scaler, spikes = replace(run.loss_scaler), replace(run.spikes)
    state = manifest.state
    try:
        progress = {name: int(state["progress"][name]) for name in run.progress.to_json()}
        loss_scaler.from_json(state["loss_scaler"])
        if "spikes" in state:
            spikes.from_json(state["spikes"])
        num_updates = int(state["updates"])
        schedules = OptimSchedules.from_json(state["rates"]) if "rates" in state else run.schedules
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError, OverflowError) as error:
        raise CheckpointError(f"{directory}: its state is damaged ({error!r}); use another checkpoint") from None
    if checkpoint.override_opt_param_scheduler and schedules.resume_facts() != run.schedules.resume_facts():
        progress["skipped_samples"] = 0  # as in Megatron-LM: new schedules count all consumed samples
    return SavedState(progress, num_updates, loss_scaler, schedules, spikes)
