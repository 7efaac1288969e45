"""The parts of a run, the few numbers that a resume needs, and the results of a training step."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megalite.data.datasets.batches import Prefetcher
from megalite.data.datasets.ledger import DataLedger
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.nn.loss_sums import LossSums
from megalite.nn.micro_batch import Batch
from megalite.optim.distributed_optimizer import DistributedOptimizer
from megalite.optim.loss_scale import LossScaler
from megalite.optim.lr import OptimSchedules
from megalite.optim.zero.sync import BucketSync
from megalite.parallel.mesh import Mesh
from megalite.pipeline.runtime import Pipeline
from megalite.planning.batch_size import BatchSizeSchedule
from megalite.training.datasets import NamedDataset
from megalite.training.expert_balancer import ExpertLoadBalancer
from megalite.training.monitoring.spike_detector import SpikeDetector
from megalite.training.noise_scale import NoiseScale, NoiseSums
from megalite.training.plugin_metrics import PluginMetrics
from megalite.training.request_loader import RequestLoader

Loader = Prefetcher[Batch]


class InvalidResultError(RuntimeError):
    """A result that further training would not repair; raised on all ranks."""


@dataclass
class Progress:
    """The position of a run: everything else in it is a pure function of this and the configuration."""

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_steps: int = 0
    skipped_samples: int = 0  # samples of steps without an update, which the learning rate schedule does not count

    def advance(self, samples: int, tokens: int, skipped: bool) -> None:
        """Count a finished step; `skipped` if it did not update the weights."""
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
    """A step's sums over all ranks."""

    norm_sq: float  # squared norm of the gradient before `unscale`
    labels: float  # labels that count
    tokens: float  # tokens that are not padding
    stop_requests: float  # ranks that want to stop
    losses: Mapping[str, float]  # means by name, nats (nn/loss_sums.py)
    layer_losses: Mapping[tuple[str, int], float]  # the same of each layer, by name and number of the layer
    unscale: float  # the factor that turns a gradient into the mean over `labels`
    zeros: float | None  # elements of the gradient that are 0, if they were counted
    replicas_differ: bool = False  # replicas of the weights that the step used have different checksums
    noise: NoiseSums | None = None  # if the noise scale is measured

    @property
    def finite(self) -> bool:
        return math.isfinite(self.norm_sq) and math.isfinite(self.loss)

    @property
    def loss(self) -> float:
        return self.losses["loss"]

    @property
    def grad_norm(self) -> float:
        return self.norm_sq**0.5 * self.unscale


@dataclass(frozen=True)
class Anomaly:
    """Why a step is suspicious; the same on all ranks."""

    reason: str  # the problem with its loss or gradient norm
    finding: str = ""  # the result of the search for the cause
    transient: bool = False  # the rerun was right, and its result was used
    differing_ranks: tuple[int, ...] = ()  # ranks whose rerun gave other bits
    finite: bool = True  # its values are finite, but too large

    def __str__(self) -> str:
        return f"{self.reason}; {self.finding}" if self.finding else self.reason


@dataclass(frozen=True)
class StepResult:
    """The result of a training step; the same on every rank except for the times."""

    loss: float  # of the head, nats per token; losses["loss"]
    grad_norm: float
    lr: float  # of the next update
    batch_size: int
    skipped: bool  # the weights were not updated
    stop: bool  # a rank wants to stop
    data_s: float  # wait for the batch, part of step_s
    step_s: float
    tokens: int = 0  # without padding
    labels: int | None = None  # labels that count; None if unknown
    # all losses that are trained, by name: means in nats per token, without coefficients except that of the z-loss
    losses: Mapping[str, float] = field(default_factory=dict)
    layer_losses: Mapping[tuple[str, int], float] = field(default_factory=dict)  # of each layer: (name, number)
    zeros: int | None = None  # elements of the gradient that are 0, if they were counted
    anomaly: Anomaly | None = None
    replica_mismatch: str | None = None  # message if replicas of the weights differed
    moe_metrics: Mapping[str, Any] = field(default_factory=dict)  # from ExpertLoadBalancer.metrics
    noise_scale: float | None = None  # the gradient noise scale in labels, if it is measured and known


@dataclass
class Run:
    """The parts that training/setup.py built and connected."""

    mesh: Mesh
    pipeline: Pipeline
    loss_sums: LossSums
    expert_balancer: ExpertLoadBalancer
    sync: BucketSync
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
    plugin_metrics: PluginMetrics
    noise_scale: NoiseScale | None = None  # None if it is not measured
    rerun_mode: str = "disabled"  # --rerun-mode
    replica_action: str | None = None  # --check-replicas-action; None if replicas of weights are not compared
    spikes: SpikeDetector = field(default_factory=SpikeDetector)
    progress: Progress = field(default_factory=Progress)
    valid_loaders: list[NamedDataset[Loader]] = field(default_factory=list)
    test_loaders: list[NamedDataset[Loader]] = field(default_factory=list)
    requests: RequestLoader | None = None  # what each evaluation scores by likelihood
    ledger: DataLedger | None = None  # record of the training data; None for generated data
    tokenizer: Tokenizer | None = None  # None if unknown
    before_update: Callable[[], None] = lambda: None  # waits while a save still copies the state that an update changes

    def skip_step(self) -> None:
        """Skip the next step and its samples."""
        batch_size = self.batch_sizes.at(self.progress.consumed_samples)
        self.progress.advance(batch_size, tokens=batch_size * self.seq_length, skipped=True)

    def close(self) -> None:
        """Stop the threads of the data loaders."""
        self.train_loader.close()
        for loader in (*self.valid_loaders, *self.test_loaders):
            loader.data.close()
