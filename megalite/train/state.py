"""The parts of a run, the few numbers that a resume needs, and the results of a step."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megalite.data.samples.batches import Prefetcher
from megalite.data.samples.ledger import Ledger
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.nn.micro_batch import Batch
from megalite.optim.buffer import ParamBuffer
from megalite.optim.loss_scale import LossScaler
from megalite.optim.lr import Rates
from megalite.optim.zero1 import Zero1
from megalite.parallel.mesh import Mesh
from megalite.pipeline.runtime import Pipeline
from megalite.plan.batch_size import BatchSizes
from megalite.train.balance import Balance
from megalite.train.moments import Figures
from megalite.train.sources import NamedSet
from megalite.train.watch.spikes import Spikes

Loader = Prefetcher[Batch]


class BadResult(RuntimeError):
    """Numbers that further training would not repair; raised on all ranks."""


@dataclass
class State:
    """The position of a run: everything else in it is a pure function of this and the configuration."""

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_steps: int = 0
    skipped_samples: int = 0  # of steps without an update, which the learning rate does not count

    def advance(self, samples: int, tokens: int, skipped: bool) -> None:
        self.step += 1
        self.consumed_samples += samples
        self.consumed_tokens += tokens
        if skipped:
            self.skipped_steps += 1
            self.skipped_samples += samples

    def to_json(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class Numbers:
    """A step's sums over all ranks. `tokens`: labels that count; `unpadded`: tokens that are not padding. `unscale`:
    the factor that turns a gradient into the mean over `tokens`."""

    norm_sq: float
    loss_sum: float
    tokens: float
    unpadded: float
    stop: float
    z_sum: float
    unscale: float
    zeros: float | None
    copies_differ: bool = False  # replicas of the weights that the step was computed with

    @property
    def finite(self) -> bool:
        return math.isfinite(self.norm_sq) and math.isfinite(self.loss_sum)

    @property
    def loss(self) -> float:
        return self.loss_sum / self.tokens if self.tokens else 0.0

    @property
    def grad_norm(self) -> float:
        return self.norm_sq**0.5 * self.unscale


@dataclass(frozen=True)
class Doubt:
    """Why a step is not trusted: the same on all ranks."""

    reason: str  # what is wrong with its numbers
    finding: str = ""  # the result of the search for the cause
    passed: bool = False  # the second computation was right, and was used
    differs: tuple[int, ...] = ()  # ranks whose second result has other bits
    finite: bool = True  # its numbers are finite, but too large

    def __str__(self) -> str:
        return f"{self.reason}; {self.finding}" if self.finding else self.reason


@dataclass(frozen=True)
class StepResult:
    """The same on every rank but for the times. Seconds; loss in nats per token. `lr`: of the next update."""

    loss: float
    grad_norm: float
    lr: float
    batch_size: int
    skipped: bool
    stop: bool
    data_s: float
    step_s: float
    tokens: int = 0  # without padding
    labels: int | None = None  # that count; None: not known
    z_loss: float = 0.0  # added to the loss, and not part of `loss`
    zeros: int | None = None  # elements of the gradient that are 0, where they were counted
    doubt: Doubt | None = None
    copies: str | None = None  # how replicas of weights differed
    balance: Mapping[str, Any] = field(default_factory=dict)  # of experts (train/balance.py: figures)


@dataclass
class Run:
    """The parts that train/setup.py built and connected."""

    mesh: Mesh
    pipeline: Pipeline
    balance: Balance
    buffer: ParamBuffer
    optimizer: Zero1
    rates: Rates
    loss_scaler: LossScaler
    batch_sizes: BatchSizes
    eval_batch_size: int
    last_step: int
    data: Loader
    seq_length: int
    max_norm: float
    check_finite: bool
    vocab_size: int
    figures: Figures  # of plugins
    rerun: str = "disabled"  # --rerun-mode
    check_copies: str | None = None  # --check-replicas-action, where replicas of weights are compared
    spikes: Spikes = field(default_factory=Spikes)
    state: State = field(default_factory=State)
    valid: list[NamedSet[Loader]] = field(default_factory=list)
    test: list[NamedSet[Loader]] = field(default_factory=list)
    ledger: Ledger | None = None  # of the data that was read; None: generated data
    tokenizer: Tokenizer | None = None  # None: unknown
    before_update: Callable[[], None] = lambda: None  # waits while a save copies what an update changes

    def pass_over(self) -> None:
        """Skip the next step and its samples."""
        size = self.batch_sizes.at(self.state.consumed_samples)
        self.state.advance(size, tokens=size * self.seq_length, skipped=True)

    def close(self) -> None:
        """Stop the threads that read."""
        for data in (self.data, *(one.data for one in (*self.valid, *self.test))):
            data.close()
