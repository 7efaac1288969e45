"""What a run consists of, and the few numbers that a resume needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from megalite.data.samples.batches import Prefetcher
from megalite.data.samples.ledger import Ledger
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.optim.buffer import ParamBuffer
from megalite.optim.loss_scale import LossScaler
from megalite.optim.lr import Rates
from megalite.optim.zero1 import Zero1
from megalite.parallel.mesh import Mesh
from megalite.pipeline.runtime import Pipeline
from megalite.plan.batch_size import BatchSizes
from megalite.train.batch import HostBatch
from megalite.train.sources import NamedSet
from megalite.train.watch.spikes import Spikes

Loader = Prefetcher[HostBatch]


class BadResult(RuntimeError):
    """The training has come to numbers that going on does not mend; raised on all ranks."""


@dataclass
class State:
    """Where the run is. Everything else that training needs is a pure function of these and the configuration."""

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_steps: int = 0
    skipped_samples: int = 0  # of steps that updated nothing: the learning rate does not count them

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
    """What all ranks know of a step. `unscale`: what makes of a gradient the mean over tokens."""

    norm_sq: float
    loss_sum: float
    tokens: float
    stop: float
    z_sum: float
    unscale: float
    zeros: float | None
    copies_differ: bool = False  # of the weights that it was computed with

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
    """Why a step is not trusted: the same on all ranks.

    reason    what is wrong with its numbers
    finding   what was found about it, in words; "" for nothing
    passed    computed again it was right; that is what was used
    differs   ranks that got other bits the second time
    finite    its numbers are, so what is wrong is their size
    """

    reason: str
    finding: str = ""
    passed: bool = False
    differs: tuple[int, ...] = ()
    finite: bool = True

    def __str__(self) -> str:
        return f"{self.reason}; {self.finding}" if self.finding else self.reason


@dataclass(frozen=True)
class StepResult:
    """What one step tells; the same on every rank but for the times. Seconds; loss in nats per token. `lr`: of the
    next update."""

    loss: float
    grad_norm: float
    lr: float
    batch_size: int
    skipped: bool
    stop: bool
    data_s: float
    step_s: float
    z_loss: float = 0.0  # what was added to the loss
    zeros: int | None = None  # elements of the gradient that are 0, where they were counted
    doubt: Doubt | None = None
    copies: str | None = None  # of weights: how they differed, in words


@dataclass
class Run:
    """The parts that train/setup.py built and introduced to each other."""

    mesh: Mesh
    pipeline: Pipeline
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
    rerun: str = "disabled"  # --rerun-mode
    check_copies: str | None = None  # --check-replicas-action, where copies of weights are compared
    spikes: Spikes = field(default_factory=Spikes)
    state: State = field(default_factory=State)
    valid: list[NamedSet[Loader]] = field(default_factory=list)
    test: list[NamedSet[Loader]] = field(default_factory=list)
    ledger: Ledger | None = None  # of what was read; None: generated data
    tokenizer: Tokenizer | None = None  # what the ids mean; None: nobody said
    before_update: Callable[[], None] = lambda: None  # a save may still be copying what an update changes

    def pass_over(self) -> None:
        """The next step's samples are not trained on."""
        size = self.batch_sizes.at(self.state.consumed_samples)
        self.state.advance(size, tokens=size * self.seq_length, skipped=True)

    def close(self) -> None:
        """Stop the threads that read."""
        for data in (self.data, *(one.data for one in (*self.valid, *self.test))):
            data.close()
