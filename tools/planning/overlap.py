"""The exposed communication of one layout, by the size of a micro-batch and by the number of micro-batches.

Communication of weights and gradients does not grow with the batch, so a larger one hides more of it: larger
micro-batches give each collective more compute to overlap with, and more of them share one reduction of gradients.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megalite.config.options import ConfigError, replace_options
from megalite.planning.bottleneck import COMMUNICATION_AXES
from megalite.planning.cluster import DeviceProfile
from megalite.planning.memory import rank_memory
from megalite.planning.run_plan import RunPlan
from megalite.planning.run_shape import RunShape
from megalite.planning.step_time import predict_step
from tools.planning.plan_request import Request, plan_problems

FACTORS = (1, 2, 4, 8, 16)  # multiples of the smallest micro-batch, or of the smallest number of micro-batches
BAR_WIDTH = 30  # characters of a bar for a step that only communicates


@dataclass(frozen=True)
class BatchPoint:
    """A step with one batch.

    Attributes:
        exposed: The exposed communication as a share of the step.
        tokens_per_s: Of the cluster.
        peak: Bytes of the fullest rank.
    """

    micro_batch: int
    num_microbatches: int
    global_batch: int
    exposed: float
    seconds: float
    tokens_per_s: float
    peak: int


def plan_point(request: Request, profile: DeviceProfile | None, micro_batch: int, num_microbatches: int) -> BatchPoint:
    """Plan a step with another batch. Raises ConfigError with all problems."""
    world = request.cluster.world
    dp = RunShape(request.config, world, request.vocab_size).dp
    global_batch = micro_batch * num_microbatches * dp
    config = replace_options(request.config, micro_batch_size=micro_batch, global_batch_size=global_batch)
    if problems := plan_problems(config, world):
        raise ConfigError(problems)
    plan = RunPlan(RunShape(config, world, request.vocab_size))
    step = predict_step(plan, request.cluster, profile)
    exposed_s = sum(step.parts.get(axis, 0.0) for axis in COMMUNICATION_AXES)
    peak = max(rank.peak for rank in rank_memory(plan))
    return BatchPoint(
        micro_batch, num_microbatches, global_batch, exposed_s / step.seconds, step.seconds, step.tokens_per_s, peak
    )


def by_micro_batch(request: Request, profile: DeviceProfile | None) -> Iterator[BatchPoint]:
    """Yield steps with growing micro-batches, as few as keep all pipeline ranks busy."""
    for factor in FACTORS:
        yield plan_point(request, profile, factor, request.config.parallel.pipeline_model_parallel_size)


def by_number(request: Request, profile: DeviceProfile | None) -> Iterator[BatchPoint]:
    """Yield steps with growing numbers of micro-batches of the size that the request has."""
    pp, micro_batch = request.config.parallel.pipeline_model_parallel_size, request.config.train.micro_batch_size
    for factor in FACTORS:
        yield plan_point(request, profile, micro_batch, factor * pp)


def overlap_rows(points: Sequence[BatchPoint], limit: int) -> list[list[str]]:
    """Return the rows of a table, with its head.

    Args:
        limit: The bytes of a device that a plan may use.
    """
    rows = [["micro-batch", "micro-batches", "global batch", "step s", "tokens/s", "GiB", "exposed", ""]]
    for point in points:
        bar = "#" * round(BAR_WIDTH * point.exposed)
        rows.append(
            [
                f"{point.micro_batch}",
                f"{point.num_microbatches}",
                f"{point.global_batch:,}",
                f"{point.seconds:.3g}",
                f"{point.tokens_per_s:,.0f}",
                f"{point.peak / 2**30:.1f}{'' if point.peak <= limit else ' too much'}",
                f"{100 * point.exposed:.1f} %",
                f"{bar:<{BAR_WIDTH}}",
            ]
        )
    return rows
