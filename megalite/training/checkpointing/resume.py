"""Saves a run in a checkpoint, and continues it from one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from megalite.checkpoint.format import manifest as manifests
from megalite.checkpoint.format.manifest import MODEL_PREFIXES, Manifest
from megalite.checkpoint.manager import loader
from megalite.checkpoint.manager.saver import CheckpointSaver
from megalite.checkpoint.storage import storage as storage
from megalite.checkpoint.storage.location import CheckpointError, Location, parse_location
from megalite.config.config_file import parse_config_text
from megalite.config.console import print_err, print_out
from megalite.config.option import EXECUTION, MODEL, option_spec
from megalite.config.options import CheckpointConfig, Config, ConfigError, ModelConfig, build, is_given
from megalite.config.plugins import changed_plugins, missing_plugins_message, plugin_hashes
from megalite.config.validation import find_problems
from megalite.data.errors import DataError
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.interop.tensor_mapping import PLACEHOLDER_OPTIONS
from megalite.models.specs import checkpoint_specs
from megalite.optim.loss_scale import LossScaler
from megalite.optim.lr import OptimSchedules
from megalite.parallel.spec import TensorShard
from megalite.training.checkpointing.named_tokenizer import Note, announce
from megalite.training.checkpointing.upcycling import (
    BEGUN,
    OF_EXPERTS,
    dense_shards,
    model_to_read,
    upcycles,
    upcycling_hint,
)
from megalite.training.datasets import TOKENIZER_OPTIONS
from megalite.training.monitoring.spike_detector import SpikeDetector
from megalite.training.setup import SetupError
from megalite.training.state import Run

MAX_NAMED = 3  # options that are named
MAIN_WEIGHTS = "optimizer.main"
Kinds = Mapping[str, str]  # KIND of KIND/NAME -> dtype
Numbers = tuple[
    dict[str, int], int, LossScaler, OptimSchedules, SpikeDetector
]  # progress, updates, loss scaler, rates, spikes


@dataclass(frozen=True)
class LoadOptions:
    """`weights_only`: the optimizer begins afresh; `afresh`: so do step and data; `later`: `step` is the earliest."""

    step: int | None = None
    weights_only: bool = False
    reset_progress: bool = False
    or_newer: bool = False

    @property
    def optimizer(self) -> bool:
        """Whether the optimizer's state is loaded."""
        return not (self.weights_only or self.reset_progress)


def pieces_to_save(run: Run, optimizer: bool = True) -> list[TensorShard]:
    """The pieces that this rank writes; without the optimizer's state also without the main weights."""
    pieces = [*run.optimizer.checkpoint_shards(), *run.expert_balancer.state_shards()]
    return [piece for piece in pieces if piece.is_owner and (optimizer or piece.name.startswith(MODEL_PREFIXES))]


def open_saver(run: Run, config: Config) -> CheckpointSaver | None:
    """Lock and test the directory of --save; None without one; collective. Raises CheckpointError."""
    c = config.checkpoint
    if c.save is None:
        return None
    size = sum(piece.data.nbytes for piece in pieces_to_save(run, not c.no_save_optim))
    background = c.async_save == "on" or (c.async_save == "auto" and run.mesh.device.type == "cuda")
    policy: dict[str, Any] = dict(keep_last=c.keep_last, retain_interval=c.save_retain_interval, background=background)
    saver = CheckpointSaver(
        c.save_local or c.save, run.mesh, size, upload_to=c.save if c.save_local else None, **policy
    )
    saver.megatron = config.log.log_style == "megatron"
    return saver


def save(run: Run, saver: CheckpointSaver, config_toml: str, *, optimizer: bool = True, last: bool = False) -> Location:
    """Write a checkpoint, or begin to. Collective. Raises CheckpointError on all ranks."""
    run.buffer.wait_param_sync()
    run.before_update = saver.before_update
    state: dict[str, Any] = {
        "progress": run.state.to_json(),
        "updates": run.optimizer.num_updates,
        "rates": run.schedules.to_json(),
        "loss_scaler": run.loss_scaler.to_json(),
        "spikes": run.spikes.to_json(),
        "config": config_toml,
        "plugins": plugin_hashes(),
        "vocab_size": run.vocab_size,
        "tokenizer": _tokenizer_identity(run.tokenizer),
    }
    if run.ledger is not None and run.mesh.world.is_first:  # the first rank's state is written
        state["data"] = run.ledger.to_json(run.state.consumed_samples)
    return saver.save(run.state.step, pieces_to_save(run, optimizer), state, last=last)


def resume(
    run: Run, directory: str, config: Config, start: LoadOptions, first: str | None = None
) -> tuple[Location, list[str]] | None:
    """Continue from the newest valid checkpoint of `directory`, or of `first`, or start from its weights: (it, notes);
    None where there is none; collective. Raises SetupError where it does not fit, and CheckpointError."""
    notes: list[str] = []

    def wanted(folder: Location, manifest: Manifest) -> loader.LoadPlan:
        notes.clear()  # of the checkpoint looked at before
        return _load_plan(run, config, start, folder, manifest, notes)

    if (
        loaded := loader.load_newest(directory, run.mesh, wanted, start.step, later=start.or_newer, first=first)
    ) is None:
        return None
    folder, manifest = loaded
    progress, updates, scaler, rates, spikes = _read_run_state(run, folder, manifest, config.checkpoint)
    run.optimizer.sync_after_load(main_loaded=start.optimizer)
    if start.reset_progress:
        return folder, [*notes, "only the weights are loaded: step, optimizer and data begin afresh"]
    for name, value in progress.items():
        setattr(run.state, name, value)
    run.spikes = spikes
    if not start.optimizer:
        notes.append("the optimizer's state is not loaded: its moments begin at zero")
    else:
        run.optimizer.num_updates = updates
        run.loss_scaler = scaler
        if config.checkpoint.use_checkpoint_opt_param_scheduler:
            run.schedules = rates
        if "rates" not in manifest.state:
            notes.append("the checkpoint has no learning rate and weight decay: those of the options are used")
    ledger = manifest.state.get("data")
    if run.ledger is not None and ledger is not None:
        try:
            notes += run.ledger.resume(ledger)
        except DataError:
            raise
        except (ArithmeticError, TypeError, ValueError, LookupError) as error:
            raise CheckpointError(f"{folder}: its ledger of data is damaged ({error!r}); use another one") from None
    return folder, notes


def _load_plan(
    run: Run, config: Config, start: LoadOptions, folder: Location, manifest: Manifest, notes: list[str]
) -> loader.LoadPlan:
    """The pieces to fill from this checkpoint; adds notes. Raises SetupError where it does not fit the run."""
    plugins = manifest.state.get("plugins")
    if lacks := missing_plugins_message(plugins):
        raise SetupError(f"{folder} {lacks}")
    text = "plugin={!r} has another text than in {}: sha256 {}..., not {}..."
    notes += [text.format(name, folder, here, there) for name, there, here in changed_plugins(plugins)]
    theirs = _read_run_state(run, folder, manifest, config.checkpoint)[3]
    there = checkpoint_config(manifest, folder).model
    model = model_to_read(config, there, str(folder)) if start.reset_progress else config.model
    options = model_differences(model, there, "the checkpoint")
    if (rows := manifest.state.get("vocab_size", run.vocab_size)) != run.vocab_size:
        options.append(f"vocab_size: {run.vocab_size} here, {rows} in the checkpoint")
    tokenizer = tokenizer_differences(run.tokenizer, manifest)
    if start.reset_progress:
        notes += [f"changed since the checkpoint: {line}" for line in [*options, *tokenizer]]
        options, tokenizer = [], []
    pieces, own = (
        [*run.optimizer.checkpoint_shards(), *run.expert_balancer.state_shards()],
        run.optimizer.shard_dtypes(),
    )
    saved = {name.partition("/")[0]: whole.dtype for name, whole in manifest.tensors.items()}  # of the names KIND/NAME
    states = _states(own) if start.optimizer else {}
    of_optimizer = _rate_problems(run.schedules, theirs, config.checkpoint) if start.optimizer else []
    if states and not any(kind.startswith("optimizer.") for kind in saved):
        states, remedy = {}, "add --no-load-optim to continue without it, or --finetune to start afresh"
        of_optimizer.insert(0, f"{folder} holds no optimizer state: {remedy}")
    shapes = {spec.stored_name: spec.stored_shape for spec in checkpoint_specs(model, run.vocab_size).values()}
    if why := _incompatibilities(shapes, manifest, options, tokenizer, [states, _states(saved)]):
        why = [f"{folder} does not fit this run:", *why, *upcycling_hint(model, there)]
    if why or of_optimizer:
        raise SetupError("\n".join([*why, *of_optimizer]))
    if not start.optimizer:
        pieces = [piece for piece in pieces if piece.name.startswith(MODEL_PREFIXES)]
        if start.reset_progress and upcycles(config):
            pieces = dense_shards(pieces)
            notes.append(BEGUN)
    elif own["model"] != saved["model"]:
        pieces = map_precision(pieces, own, saved)
        notes.append(f"saved in {saved['model']}: the main weights continue bit for bit, in {own['model']}")
    return loader.LoadPlan(pieces, start.optimizer, tell=_log_load(run, config, folder, manifest))


def map_precision(pieces: Sequence[TensorShard], kinds: Kinds, there: Kinds) -> list[TensorShard]:
    """The pieces under the names that they are read from, where a run continues in another precision: the fp32 weights,
    which are the main weights, or in fp32 the model's, are read bit for bit, and weights in half precision are made of
    them. `kinds`: of this run, `there`: of the checkpoint."""
    own, source = (MAIN_WEIGHTS if MAIN_WEIGHTS in known else "model" for known in (kinds, there))
    kept = [piece for piece in pieces if own == "model" or not piece.name.startswith("model/")]
    return [p._replace(name=p.name.replace(f"{own}/", f"{source}/", 1)) for p in kept]


def _states(kinds: Kinds) -> dict[str, str]:
    return {kind: dtype for kind, dtype in kinds.items() if kind.startswith("optimizer.") and kind != MAIN_WEIGHTS}


def _incompatibilities(
    own: Mapping[str, tuple[int, ...]], there: Manifest, options: list[str], tokenizer: list[str], states: list[Kinds]
) -> list[str]:
    """Why the checkpoint does not fit and what to do, in at most seven lines; [] where it fits. `own`: name -> shape of
    what is of the model. `options`, `tokenizer`: their differences, a line each. `states`: of the optimizer, -> dtype,
    those wanted and those there. All ranks find the same, as the answer is about whole tensors."""
    saved = {name: whole.shape for name, whole in there.tensors.items() if name.startswith(MODEL_PREFIXES)}
    wrong = [name for name in sorted({*own, *saved}) if own.get(name) != saved.get(name)]
    other = states[0] and states[0] != states[1]
    if not (options or tokenizer or wrong or other):
        return []
    lines = [*options[:MAX_NAMED], *tokenizer]
    if (unnamed := len(options) - MAX_NAMED) > 0:
        lines.append(f"and {unnamed} more option{'s' * (unnamed > 1)}")
    if wrong:
        shapes = [str(shapes.get(wrong[0], "nothing")) for shapes in (own, saved)]
        lines.append(f"{len(wrong)} tensors, as {wrong[0][6:]}: {shapes[0]} here, {shapes[1]} in the checkpoint")
    if other:
        named = [", ".join(f"{k.partition('.')[2]} {v}" for k, v in kinds.items()) for kinds in states]
        lines.append(f"optimizer: {named[0]} here, {named[1]} in the checkpoint")
    remedies = []
    if options:
        remedies.append("give its options (--use-checkpoint-args takes them over)")
        if not wrong:
            remedies.append("--finetune to begin afresh with its weights")
    elif wrong:
        remedies.append("give the options of its model, or another --load")
    if tokenizer:
        remedies.append("its tokenizer, or --finetune")
    if other:
        remedies.append("its optimizer, or --no-load-optim to continue without that state")
    return [*(f"  {line}" for line in lines), "; ".join(remedies)]


def _rate_problems(own: OptimSchedules, saved: OptimSchedules, c: CheckpointConfig) -> list[str]:
    """Facts of the rates that differ from the checkpoint's, a line each, and the remedy, unless options choose."""
    if c.use_checkpoint_opt_param_scheduler and saved.decoupled and not own.decoupled:  # no bucket would follow it
        peak = f"{saved.decoupled.peak:g}"
        return [f"decoupled_lr={peak} in the checkpoint, but none here; add --decoupled-lr {peak}"]
    if c.override_opt_param_scheduler or c.use_checkpoint_opt_param_scheduler:
        return []
    mine, theirs = own.resume_facts(), saved.resume_facts()
    lines = [
        f"{name}={_short(mine.get(name))}, but {_short(theirs.get(name))} in the checkpoint"
        for name in dict.fromkeys((*mine, *theirs))
        if mine.get(name) != theirs.get(name)
    ]
    if not lines:
        return []
    if mine.get("decay in samples") != theirs.get("decay in samples"):
        lines.append("a decay is as long as the training unless --lr-decay-iters or --lr-decay-samples keeps it")
    remedy = "--override-opt-param-scheduler takes those here, --use-checkpoint-opt-param-scheduler the checkpoint's"
    return [*lines, f"the rates differ from the checkpoint's: {remedy}"]


def _short(value: float | str | None) -> float | str | None:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _log_load(run: Run, config: Config, folder: Location, manifest: Manifest) -> str | None:
    """Log the beginning of the load; returns the name of its progress bar. Only on the first rank."""
    if not run.mesh.world.is_first:
        return None
    if config.log.log_style == "megatron":
        step = manifest.state["progress"]["step"]
        print_out(f" loading distributed checkpoint from {folder.parent} at iteration {step}")
    else:
        gib = sum(stamp.size for stamp in manifest.files.values()) / 2**30
        print_out(f"loading {folder} ({gib:.3g} GiB)")
    return f"loading {folder}"


def load_message(run: Run, config: Config, folder: Location) -> str:
    """The log line about a start from a checkpoint."""
    if config.log.log_style == "megatron":
        where = f"[ t 1/{run.mesh.tp.size}, p 1/{run.mesh.pp.size} ] at iteration {run.state.step}"
        return f"  successfully loaded checkpoint from {folder.parent} {where}"
    return f"{'resumed from' if run.state.step else 'begins with'} {folder} at step {run.state.step}"


def _read_run_state(run: Run, folder: Location, manifest: Manifest, c: CheckpointConfig) -> Numbers:
    """The checkpoint's numbers, without changing the run. Raises CheckpointError."""
    scaler, spikes, state = replace(run.loss_scaler), replace(run.spikes), manifest.state
    try:
        progress = {name: int(state["progress"][name]) for name in run.state.to_json()}
        scaler.from_json(state["loss_scaler"])
        if "spikes" in state:
            spikes.from_json(state["spikes"])
        updates, rates = (
            int(state["updates"]),
            OptimSchedules.from_json(state["rates"]) if "rates" in state else run.schedules,
        )
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError, OverflowError) as error:
        raise CheckpointError(f"{folder}: its state is damaged ({error!r}); use another checkpoint") from None
    if c.override_opt_param_scheduler and rates.resume_facts() != run.schedules.resume_facts():
        progress["skipped_samples"] = 0  # as in Megatron-LM: other rates count all consumed samples
    return progress, updates, scaler, rates, spikes


def checkpoint_config(manifest: Manifest, folder: Location) -> Config:
    """The configuration of the run that wrote the checkpoint. Raises CheckpointError."""
    try:
        config = build(parse_config_text(str(manifest.state["config"]), str(folder)))
        if problems := find_problems(replace(build(PLACEHOLDER_OPTIONS), model=config.model)):
            raise ConfigError(problems)
        data, rows = config.data, manifest.state.get("vocab_size")
        if data.tokenizer_type == "NullTokenizer" and data.vocab_size is not None and rows == data.vocab_size + 1:
            config = replace(config, data=replace(data, vocab_size=rows))  # old ones do not count the end of document
        return config
    except (KeyError, ConfigError, OverflowError) as error:
        lacks = missing_plugins_message(manifest.state.get("plugins"))
        why = f": its configuration cannot be read ({error}); use another checkpoint"
        raise CheckpointError(f"{folder}{f' {lacks}' if lacks else why}") from None


def model_differences(own: ModelConfig, saved: ModelConfig, where: str) -> list[str]:
    """A line for each option that changes what weights mean and whose effective values differ."""
    lines = []
    for f in fields(ModelConfig):
        facts = option_spec(f)
        if facts.resume != MODEL or facts.acts_through is not None:
            continue
        mine, theirs = (getattr(m, facts.effective_property or f.name) for m in (own, saved))
        if mine != theirs and isinstance(mine, tuple):  # a number per layer is too long to show
            mine, theirs = getattr(own, f.name), getattr(saved, f.name)
        if mine != theirs:
            lines.append(f"{f.name}: {mine!r} here, {theirs!r} in {where}")
    return lines


def _tokenizer_identity(tokenizer: Tokenizer | None) -> dict[str, str] | None:
    if tokenizer is None or tokenizer.is_null:
        return None
    return {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint}


def tokenizer_differences(tokenizer: Tokenizer | None, manifest: Manifest) -> list[str]:
    """A line where the checkpoint was trained with another tokenizer, whose ids mean different text."""
    own, saved = _tokenizer_identity(tokenizer), manifest.state.get("tokenizer")
    if own is None or not isinstance(saved, dict) or saved.get("fingerprint") == own["fingerprint"]:
        return []
    other = f"{saved.get('name')} {str(saved.get('fingerprint'))[:12]}"
    return [f"tokenizer: {own['name']} {own['fingerprint'][:12]} here, {other} in the checkpoint"]


def apply_checkpoint_args(config: Config, note: Note = print_err) -> Config:
    """With --use-checkpoint-args: the model's options, and the tokenizer's where none is given, from the newest
    checkpoint that can be read. Raises SetupError where a given option contradicts it."""
    c = config.checkpoint
    if not c.use_checkpoint_args:
        return config
    source = c.load if c.load is not None and storage.steps_in(c.load) else c.pretrained_checkpoint
    steps = [] if source is None else storage.steps_in(source)
    if c.ckpt_step is not None and source is not None and source == c.load:
        steps = [c.ckpt_step]
    passed: list[str] = []
    for step in reversed(steps):
        folder = storage.checkpoint_dir(source or "", step)
        try:
            saved = checkpoint_config(manifests.load_manifest(folder), folder)
            break
        except CheckpointError as error:
            passed.append(str(error))
    else:
        why = f": none in it can be read: {'; '.join(passed)}" if passed else " holds no checkpoint"
        raise SetupError(f"use_checkpoint_args: load={source or c.load!r}{why}; give the model's options instead")
    for line in passed if config.train.dry_run else []:  # a run reports them as it loads
        print_err(f"skipping {line}")
    config, data = apply_model(config, saved.model, "the checkpoint"), config.data
    if data.tokenizer_type is None and data.vocab_size is None:
        tokenizer = {name: getattr(saved.data, name) for name in TOKENIZER_OPTIONS if name not in config.given}
        announce(tokenizer, parse_location(source or ""), note)
        data = replace(data, **tokenizer)
    return replace(config, data=data)


def apply_model(config: Config, saved: ModelConfig, where: str) -> Config:
    """`config` with the model of `where`, but for the options that are given, whatever their values, and those that
    only say how to compute. Raises SetupError where a given option contradicts what the weights mean."""
    begins_dense = upcycles(config) and not saved.num_experts  # then the options of experts are this run's
    own = {f.name for f in fields(ModelConfig) if option_spec(f).resume == EXECUTION or is_given(config, f.name)}
    own |= {*OF_EXPERTS} if begins_dense else set()
    values = {name: getattr(config.model, name) for name in sorted(own)}
    others = {name: value for name, value in values.items() if value != getattr(saved, name)}
    compared = {name: value for name, value in others.items() if not (begins_dense and name in OF_EXPERTS)}
    wrong = [name for name, value in compared.items() if _contradicts({name: value}, config, saved)]
    if not wrong and _contradicts(compared, config, saved):  # only together, as a number of groups and its switch
        wrong = [*compared]
    if wrong:
        lines = [f"{name}={values[name]!r}, but {getattr(saved, name)!r} in {where}; drop the option" for name in wrong]
        raise SetupError("\n".join([*lines, *([] if upcycles(config) else upcycling_hint(config.model, saved))]))
    return replace(config, model=replace(saved, **values))


def _contradicts(values: Mapping[str, Any], config: Config, saved: ModelConfig) -> bool:
    """Whether the weights of `saved` mean something else with these options of `config`."""
    if not is_given(config, "activation") and _asks_for_other_gelu(values, config.model.openai_gelu, saved):
        return True
    try:
        return bool(model_differences(replace(saved, **values), saved, ""))
    except ValueError:  # a pattern of another number of layers
        return True


def _asks_for_other_gelu(values: Mapping[str, Any], openai_gelu: bool, saved: ModelConfig) -> bool:
    """Whether Megatron-LM's flags for the form of gelu, where no flag names an activation, ask for another form than
    that of `saved`."""
    if saved.activation not in ("gelu", "gelu_erf"):
        return False
    if values.get("openai_gelu"):
        return saved.activation != "gelu"
    fused = values.get("bias_gelu_fusion")
    if fused is None or openai_gelu:
        return False
    return saved.activation == "gelu_erf" and saved.add_bias_linear if fused else saved.activation == "gelu"
