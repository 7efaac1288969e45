"""What of a run goes into a checkpoint, and how a run continues from one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from megalite.checkpoint.format import manifest as manifests
from megalite.checkpoint.format.manifest import Manifest
from megalite.checkpoint.run import loader
from megalite.checkpoint.run.saver import Saver
from megalite.checkpoint.storage import protocol as storage
from megalite.checkpoint.storage.location import CheckpointError, Location
from megalite.config.check import check
from megalite.config.console import complain, show
from megalite.config.field import MODEL, TRAINING, facts_of
from megalite.config.options import CheckpointConfig, Config, ConfigError, ModelConfig, build
from megalite.config.toml import parse_toml
from megalite.data.errors import DataError
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.interop.convert import ANY_RUN
from megalite.optim.loss_scale import LossScaler
from megalite.optim.lr import Rates
from megalite.parallel.spec import Piece
from megalite.train.setup import SetupError
from megalite.train.start.fit import MAIN, across_precisions, kinds_of, misfit
from megalite.train.state import Run
from megalite.train.watch.spikes import Spikes

TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_size", "tiktoken_pattern")


Numbers = tuple[dict[str, int], int, LossScaler, Rates, Spikes]  # progress, updates, loss scaler, rates, spikes


@dataclass(frozen=True)
class Start:
    """How to start from a checkpoint. `weights_only`: the optimizer begins afresh; `afresh`: step and data do too;
    `later`: `step` is the earliest."""

    step: int | None = None
    weights_only: bool = False
    afresh: bool = False
    later: bool = False

    @property
    def optimizer(self) -> bool:
        """Whether the optimizer's state is loaded too."""
        return not (self.weights_only or self.afresh)


def pieces_to_save(run: Run, optimizer: bool = True) -> list[Piece]:
    """What this rank writes; without optimizer state the main weights are left out too."""
    owned = [entry.piece for entry in run.optimizer.pieces() if entry.owned]
    return [piece for piece in owned if optimizer or piece.name.startswith("model/")]


def open_saver(run: Run, config: Config) -> Saver | None:
    """Lock and try the directory of --save; None without one; collective. Raises CheckpointError."""
    c = config.checkpoint
    if c.save is None:
        return None
    pieces = pieces_to_save(run, not c.no_save_optim)
    background = c.asynchronous_save == "on" or (c.asynchronous_save == "auto" and run.mesh.device.type == "cuda")
    saver = Saver.open(
        c.save_local or c.save,
        run.mesh,
        sum(piece.data.numel() * piece.data.element_size() for piece in pieces),
        keep_last=c.keep_last,
        retain_interval=c.save_retain_interval,
        background=background,
        upload_to=c.save if c.save_local else None,
    )
    saver.megatron = config.log.log_style == "megatron"
    return saver


def save(run: Run, saver: Saver, config_toml: str, *, optimizer: bool = True, last: bool = False) -> Location:
    """Write a checkpoint of the run as it is, or start to: the next update waits for the copy. Collective. Raises
    CheckpointError on all ranks."""
    run.buffer.wait_gather()
    run.before_update = saver.before_update
    state: dict[str, Any] = {
        "progress": run.state.to_json(),
        "updates": run.optimizer.updates,
        "rates": run.rates.to_json(),
        "loss_scaler": run.loss_scaler.to_json(),
        "spikes": run.spikes.to_json(),
        "config": config_toml,
        "vocab_size": run.vocab_size,
        "tokenizer": _identity(run.tokenizer),
    }
    if run.ledger is not None and run.mesh.world.is_first:  # the first rank's copy is the one that is written
        state["data"] = run.ledger.to_json(run.state.consumed_samples)
    return saver.save(run.state.step, pieces_to_save(run, optimizer), state, last=last)


def resume(
    run: Run, directory: str, config: Config, start: Start, first: str | None = None
) -> tuple[Location, list[str]] | None:
    """Continue from the newest valid checkpoint of `directory`, or of `first`, or start from its weights: (it, what is
    worth telling); None where there is none; collective. Raises SetupError where it does not fit, and
    CheckpointError."""
    seen: list[tuple[Numbers, list[str]]] = []  # of the last one looked at, its notes

    def wanted(folder: Location, manifest: Manifest) -> loader.Wanted:
        numbers = _numbers(run, folder, manifest, config.checkpoint)
        want, notes = _wanted(run, config, start, folder, manifest, numbers[3])
        seen[:] = [(numbers, notes)]
        return want

    found = loader.load(directory, run.mesh, wanted, start.step, later=start.later, first=first)
    if found is None:
        return None
    folder, manifest = found
    (progress, updates, scaler, rates, spikes), notes = seen[0]
    run.optimizer.after_load(main_loaded=start.optimizer)
    if start.afresh:
        return folder, [*notes, "only the weights are loaded: step, optimizer and data begin afresh"]
    for name, value in progress.items():
        setattr(run.state, name, value)
    run.spikes = spikes
    if not start.optimizer:
        notes.append("the optimizer's state is not loaded: its moments begin at zero")
    else:
        run.optimizer.updates = updates
        run.loss_scaler = scaler
        if config.checkpoint.use_checkpoint_opt_param_scheduler:
            run.rates = rates
        if "rates" not in manifest.state:
            notes.append("the checkpoint does not tell its learning rate and weight decay: those of the options hold")
    ledger = manifest.state.get("data")
    if run.ledger is not None and ledger is not None:
        try:
            notes += run.ledger.go_on(ledger)
        except DataError:
            raise
        except (ArithmeticError, TypeError, ValueError, LookupError) as error:
            raise CheckpointError(f"{folder}: its ledger of data is damaged ({error!r}); use another one") from None
    return folder, notes


def go_back(run: Run, config: Config, step: int) -> None:
    """Load the run's own checkpoint of `step`; collective, as `resume`."""
    resume(run, config.checkpoint.save or "", config, Start(step), config.checkpoint.save_local)


def _wanted(
    run: Run, config: Config, start: Start, folder: Location, manifest: Manifest, theirs: Rates
) -> tuple[loader.Wanted, list[str]]:
    """(what to fill from this checkpoint, what is worth telling). Raises SetupError where it does not fit the run."""
    notes: list[str] = []
    options = model_differences(config, manifest, folder, run.vocab_size)
    tokenizer = tokenizer_differences(run.tokenizer, manifest)
    if start.afresh:
        notes = [f"changed since the checkpoint: {line}" for line in [*options, *tokenizer]]
        options, tokenizer = [], []
    pieces, here, there = [entry.piece for entry in run.optimizer.pieces()], run.optimizer.kinds(), kinds_of(manifest)
    states = {kind: dtype for kind, dtype in here.items() if kind not in ("model", MAIN)} if start.optimizer else {}
    more = _rate_problems(run.rates, theirs, config.checkpoint) if start.optimizer else []
    if states and not any(kind.startswith("optimizer.") for kind in there):
        states, remedy = {}, "add --no-load-optim to continue without it, or --finetune to start afresh"
        more.insert(0, f"{folder} holds no optimizer state: {remedy}")
    why = misfit(folder, manifest, config.model, run.vocab_size, options, tokenizer, states)
    if lines := [*why, *more]:
        raise SetupError("\n".join(lines))
    if not start.optimizer:
        pieces = [piece for piece in pieces if piece.name.startswith("model/")]
    elif here["model"] != there["model"]:
        pieces = across_precisions(pieces, here, there)
        notes.append(f"saved in {there['model']}: the main weights continue bit for bit, in {here['model']}")
    return loader.Wanted(pieces, start.optimizer, tell=_tell_load(run, config, folder, manifest)), notes


def _rate_problems(here: Rates, there: Rates, c: CheckpointConfig) -> list[str]:
    """Why the run cannot continue with its learning rates over the checkpoint's, one line each."""
    if c.use_checkpoint_opt_param_scheduler and there.decoupled and not here.decoupled:  # no bucket would follow it
        peak = f"{there.decoupled.peak:g}"
        return [f"decoupled_lr={peak} in the checkpoint, but none here; add --decoupled-lr {peak}"]
    asked = c.override_opt_param_scheduler or c.use_checkpoint_opt_param_scheduler
    return [] if asked else rates_that_differ(here, there)


def _tell_load(run: Run, config: Config, folder: Location, manifest: Manifest) -> str | None:
    """Say that it is being loaded; what that is called; on the first rank."""
    if not run.mesh.world.is_first:
        return None
    if config.log.log_style == "megatron":
        step = manifest.state["progress"]["step"]
        show(f" loading distributed checkpoint from {folder.parent} at iteration {step}")
    else:
        gib = sum(stamp.size for stamp in manifest.files.values()) / 2**30
        show(f"loading {folder} ({gib:.3g} GiB)")
    return f"loading {folder}"


def loaded_line(run: Run, config: Config, folder: Location) -> str:
    """What the log says of a start from a checkpoint."""
    if config.log.log_style == "megatron":
        where = f"[ t 1/{run.mesh.tp.size}, p 1/{run.mesh.pp.size} ] at iteration {run.state.step}"
        return f"  successfully loaded checkpoint from {folder.parent} {where}"
    return f"{'resumed from' if run.state.step else 'begins with'} {folder} at step {run.state.step}"


def _numbers(run: Run, folder: Location, manifest: Manifest, c: CheckpointConfig) -> Numbers:
    """Those of the checkpoint. Raises CheckpointError, before anything changes."""
    scaler, spikes, state = replace(run.loss_scaler), replace(run.spikes), manifest.state
    try:
        _check_scaler(state["loss_scaler"])
        progress = {name: int(state["progress"][name]) for name in run.state.to_json()}
        scaler.from_json(state["loss_scaler"])
        if "spikes" in state:
            spikes.from_json(state["spikes"])
        updates, rates = int(state["updates"]), Rates.from_json(state["rates"]) if "rates" in state else run.rates
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError, OverflowError) as error:
        raise CheckpointError(f"{folder}: its state is damaged ({error!r}); use another checkpoint") from None
    if c.override_opt_param_scheduler and rates.facts() != run.rates.facts():
        progress["skipped_samples"] = 0  # as Megatron-LM does: other rates count all that was consumed
    return progress, updates, scaler, rates, spikes


def rates_that_differ(here: Rates, there: Rates) -> list[str]:
    """A line for every fact of learning rate and weight decay that the checkpoint has otherwise, and the remedy:
    continuing silently would be another training."""
    mine, theirs = here.facts(), there.facts()
    lines = [
        f"{name}={_short(mine.get(name))}, but {_short(theirs.get(name))} in the checkpoint"
        for name in (*mine, *(name for name in theirs if name not in mine))
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


def _check_scaler(saved: dict[str, Any]) -> None:
    """A scale that is NaN would skip every step there is. Raises KeyError, TypeError, ValueError."""
    if type(saved["dynamic"]) is not bool:
        raise TypeError(f"loss_scaler: dynamic is {str(saved['dynamic'])[:40]!r}")
    scale, counts = saved["scale"], (saved["clean_steps"], saved["patience"] or 0)
    if type(scale) not in (int, float) or not 0 < scale < math.inf:
        raise ValueError(f"loss_scaler: scale is {str(scale)[:40]!r}, not a number above 0")
    if any(type(n) is not int or n < 0 for n in counts):
        raise ValueError(f"loss_scaler: {str(counts)[:80]} are not numbers from 0")


def saved_config(manifest: Manifest, folder: Location) -> Config:
    """The configuration of the run that wrote the checkpoint. Raises CheckpointError."""
    try:
        config = build(parse_toml(str(manifest.state["config"]), str(folder)))
        if problems := check(replace(build(ANY_RUN), model=config.model)):
            raise ConfigError(problems)
        data, rows = config.data, manifest.state.get("vocab_size")
        if data.tokenizer_type == "NullTokenizer" and data.vocab_size is not None and rows == data.vocab_size + 1:
            config = replace(config, data=replace(data, vocab_size=rows))  # once the end of document was not counted
        return config
    except (KeyError, ConfigError, OverflowError) as error:
        raise CheckpointError(f"{folder}: its configuration cannot be read ({error}); use another checkpoint") from None


def model_differences(config: Config, manifest: Manifest, folder: Location, vocab_size: int) -> list[str]:
    """Options that change what the weights mean, one line each; shapes are compared tensor by tensor."""
    lines = options_that_differ(config.model, saved_config(manifest, folder).model, "the checkpoint")
    then = manifest.state.get("vocab_size", vocab_size)
    if then != vocab_size:
        lines.append(f"vocab_size: {vocab_size} here, {then} in the checkpoint")
    return lines


def options_that_differ(here: ModelConfig, there: ModelConfig, where: str) -> list[str]:
    """One line per option that changes what weights mean; of those with a default, what it comes to."""
    lines = []
    for f in fields(ModelConfig):
        facts = facts_of(f)
        if facts.resume != MODEL or facts.through is not None:
            continue
        mine, theirs = (getattr(m, facts.same_as or f.name) for m in (here, there))
        if mine != theirs and isinstance(mine, tuple):  # a number per layer is too long to show
            mine, theirs = getattr(here, f.name), getattr(there, f.name)
        if mine != theirs:
            lines.append(f"{f.name}: {mine!r} here, {theirs!r} in {where}")
    return lines


def _identity(tokenizer: Tokenizer | None) -> dict[str, str] | None:
    if tokenizer is None or tokenizer.is_null:
        return None
    return {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint}


def tokenizer_differences(tokenizer: Tokenizer | None, manifest: Manifest) -> list[str]:
    """One line where the checkpoint was trained with another tokenizer: its ids mean different text."""
    here, there = _identity(tokenizer), manifest.state.get("tokenizer")
    if here is None or not isinstance(there, dict) or there.get("fingerprint") == here["fingerprint"]:
        return []
    then = f"{there.get('name')} {str(there.get('fingerprint'))[:12]}"
    return [f"tokenizer: {here['name']} {here['fingerprint'][:12]} here, {then} in the checkpoint"]


def with_checkpoint_args(config: Config) -> Config:
    """--use-checkpoint-args: the model's options, and those of the tokenizer where none is given, from the newest
    checkpoint that can be read. Raises SetupError where an option that is given says something else."""
    c = config.checkpoint
    if not c.use_checkpoint_args:
        return config
    source = c.load if c.load is not None and storage.steps_in(c.load) else c.pretrained_checkpoint
    saved, passed = _newest_config(source, c.ckpt_step if source == c.load else None) if source else (None, [])
    if saved is None:
        why = f": none in it can be read: {'; '.join(passed)}" if passed else " holds no checkpoint"
        raise SetupError(f"use_checkpoint_args: load={source or c.load!r}{why}; give the model's options instead")
    for line in passed if config.train.dry_run else []:  # a run tells them when it loads
        complain(f"skipping {line}")
    config, data = with_model(config, saved.model, "the checkpoint"), config.data
    if data.tokenizer_type is None and data.vocab_size is None:
        data = replace(data, **{name: getattr(saved.data, name) for name in TOKENIZER})
    return replace(config, data=data)


def with_model(config: Config, saved: ModelConfig, where: str) -> Config:
    """`config` with the model of `where`. Raises SetupError where an option that is given says something else."""
    problems, model = [], {}
    for f in fields(ModelConfig):
        mine, theirs = getattr(config.model, f.name), getattr(saved, f.name)
        if facts_of(f).resume == TRAINING and mine != f.default:
            continue  # may change on the way: the weights fit
        if mine not in (f.default, theirs):
            problems.append(f"{f.name}={mine!r}, but {theirs!r} in {where}; drop the option")
        model[f.name] = theirs
    if problems:
        raise SetupError("\n".join(problems))
    return replace(config, model=replace(config.model, **model))


def _newest_config(directory: str, step: int | None) -> tuple[Config | None, list[str]]:
    """And why newer ones were passed over. Not collective: every rank reads the same files."""
    passed: list[str] = []
    steps: Sequence[int] = storage.steps_in(directory) if step is None else [step]
    for candidate in reversed(steps):
        folder = storage.folder_of(directory, candidate)
        try:
            return saved_config(manifests.load(folder), folder), passed
        except CheckpointError as error:
            passed.append(str(error))
    return None, passed
