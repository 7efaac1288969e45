"""The parts of a run, the few numbers that a resume needs, and the results of a step."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megalite.data.datasets.batches import Prefetcher
from megalite.data.datasets.ledger import DataLedger
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.nn.micro_batch import Batch
from megalite.optim.buffer import ParamAndGradBuffer
from megalite.optim.distributed_optimizer import DistributedOptimizer
from megalite.optim.loss_scale import LossScaler
from megalite.optim.lr import OptimSchedules
from megalite.parallel.mesh import Mesh
from megalite.pipeline.runtime import Pipeline
from megalite.planning.batch_size import BatchSizeSchedule
from megalite.training.callbacks import PluginMetrics
from megalite.training.datasets import NamedDataset
from megalite.training.expert_balancer import ExpertLoadBalancer
from megalite.training.monitoring.spike_detector import SpikeDetector

Loader = Prefetcher[Batch]


class InvalidResultError(RuntimeError):
    """Numbers that further training would not repair; raised on all ranks."""


@dataclass
class Progress:
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
class StepSums:
    """A step's sums over all ranks. `tokens`: labels that count; `unpadded`: tokens that are not padding. `unscale`:
    the factor that turns a gradient into the mean over `tokens`."""

    norm_sq: float
    loss_sum: float
    tokens: float
    unpadded: float
    stop_requests: float
    z_sum: float
    unscale: float
    zeros: float | None
    replicas_differ: bool = False  # replicas of the weights that the step was computed with

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
class Anomaly:
    """Why a step is not trusted: the same on all ranks."""

    reason: str  # what is wrong with its numbers
    finding: str = ""  # the result of the search for the cause
    transient: bool = False  # the second computation was right, and was used
    differing_ranks: tuple[int, ...] = ()  # ranks whose second result has other bits
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
    anomaly: Anomaly | None = None
    replica_mismatch: str | None = None  # how replicas of weights differed
    moe_metrics: Mapping[str, Any] = field(default_factory=dict)  # of experts (training/expert_balancer.py: figures)


@dataclass
class Run:
    """The parts that training/setup.py built and connected."""

    mesh: Mesh
    pipeline: Pipeline
    expert_balancer: ExpertLoadBalancer
    buffer: ParamAndGradBuffer
    optimizer: DistributedOptimizer
    schedules: OptimSchedules
    loss_scaler: LossScaler
    batch_sizes: BatchSizeSchedule
    eval_batch_size: int
    last_step: int
    train_loader: Loader
    seq_length: int
    clip_grad: float
    check_finite: bool
    vocab_size: int
    plugin_metrics: PluginMetrics  # of plugins
    rerun_mode: str = "disabled"  # --rerun-mode
    replica_action: str | None = None  # --check-replicas-action, where replicas of weights are compared
    spikes: SpikeDetector = field(default_factory=SpikeDetector)
    state: Progress = field(default_factory=Progress)
    valid_loaders: list[NamedDataset[Loader]] = field(default_factory=list)
    test_loaders: list[NamedDataset[Loader]] = field(default_factory=list)
    ledger: DataLedger | None = None  # of the data that was read; None: generated data
    tokenizer: Tokenizer | None = None  # None: unknown
    before_update: Callable[[], None] = lambda: None  # waits while a save copies what an update changes

    def skip_step(self) -> None:
        """Skip the next step and its samples."""
        size = self.batch_sizes.at(self.state.consumed_samples)
        self.state.advance(size, tokens=size * self.seq_length, skipped=True)

    def close(self) -> None:
        """Stop the threads that read."""
        for data in (self.train_loader, *(one.data for one in (*self.valid_loaders, *self.test_loaders))):
            data.close()
