"""The duration of a training step, by simulation of the schedule that the runtime runs (megalite/pipeline/).

    pipeline    the actions of pipeline/schedule.py, with the durations of planning/stage_time.py. A message takes the
                time of its link, and a rank's messages in one direction follow each other. Of a long step only the
                first groups of micro-batches are simulated (planning/step_schedule.py)
    dp          gathers and reductions, which follow each other on the rank's channel over dp (planning/dp_time.py).
                The difference to a simulation without them is exposed
    update      the gradient norm, the all-reduce over all ranks, and the optimizer's step

One rank of each pipeline position is simulated, because all others at that position do the same.
"""

from collections.abc import Callable
from dataclasses import dataclass

from megalite.pipeline.schedule import ActionCosts
from megalite.pipeline.simulate import Durations
from megalite.planning.cluster import Cluster, DeviceProfile, default_profile
from megalite.planning.comm_time import CommTimes
from megalite.planning.dp_time import DpTimes
from megalite.planning.layer_kinds import flops_per_token
from megalite.planning.run_plan import RunPlan
from megalite.planning.stage_time import CP_WAIT, TOTAL, TP_WAIT, TimeModel
from megalite.planning.step_schedule import SIMULATED_GROUPS


@dataclass(frozen=True)
class StepTime:
    """The predicted duration of a step.

    Attributes:
        seconds: The duration.
        parts: Seconds of compute, bubble, optimizer and exposed tp, cp, pp and dp, as means over the ranks. Their sum
            is `seconds`.
        mfu: The MFU per device by `flops_per_token`, as the trainer logs it.
        tokens_per_s: The tokens per second of the cluster.
        fixed_s: Seconds of `optimizer` that even the smallest step takes.
        muon_s: Seconds of `optimizer` for Newton-Schulz and its exchanges.
    """

    seconds: float
    parts: dict[str, float]
    mfu: float
    tokens_per_s: float
    fixed_s: float
    muon_s: float = 0.0


def predict_step(plan: RunPlan, cluster: Cluster, profile: DeviceProfile | None = None) -> StepTime:
    """Predict the duration of a step.

    Args:
        plan: The plan of the run.
        cluster: The cluster.
        profile: The profile of the device; None for the default one.

    Raises:
        ValueError: Cluster and plan differ in size, or the dtype has no known peak.
    """
    if cluster.world != plan.shape.world:
        raise ValueError(f"the cluster has {cluster.world} devices, the plan {plan.shape.world} ranks; give as many")
    times = TimeModel(plan, cluster, profile or default_profile(cluster.device.name))
    parts = _parts(times)
    seconds = sum(parts.values())
    tokens = plan.shape.batch_sizes.final * plan.config.model.seq_length
    flops = flops_per_token(plan.config.model, plan.shape.padded_vocab) * tokens
    return StepTime(
        seconds,
        parts,
        mfu=flops / (seconds * plan.shape.world * times.peak_flops),
        tokens_per_s=tokens / seconds,
        fixed_s=times.profile.step_s,
        muon_s=times.muon_s,
    )


def _parts(times: TimeModel) -> dict[str, float]:
    """Return the seconds of the parts of a step."""
    plan, profile = times.plan, times.profile
    schedule = plan.balance.schedule
    microbatches_per_rank = plan.shape.num_microbatches / plan.shape.pp  # for means over the ranks
    busy, tp, cp = (
        microbatches_per_rank * sum(sum(stage_times[row].tolist()) for stage_times in times.stage_times)
        for row in (TOTAL, TP_WAIT, CP_WAIT)
    )
    dp_times = DpTimes(times)
    costs: list[ActionCosts] = [tuple(stage_times[TOTAL].tolist()) for stage_times in times.stage_times]
    delay = _message_delay(times) if plan.shape.pp > 1 else None
    durations = [Durations(costs), Durations(costs, delay)]
    if dp_times.stage_syncs is not None:
        durations.append(Durations(costs, delay, dp_times.stage_syncs))
    # deferred weight gradients may take long to settle
    num_groups = SIMULATED_GROUPS if schedule.split_backward is None else schedule.reported_groups
    simulated = schedule.simulate(durations, num_groups)
    without_comm, with_p2p, with_dp = (simulated[0], simulated[1], simulated[-1])
    exposed = max(0.0, with_dp.seconds - with_p2p.seconds)
    hidden = max(0.0, with_dp.channel_s - exposed)
    norm_s, update_s = times.update_s()
    # the ranks agree on a few numbers
    agreement_s = times.comm_times.all_reduce(64, times.group(range(plan.shape.world)))
    return {
        "compute": busy - tp - cp,
        "bubble": without_comm.seconds - busy,
        "tp": tp,
        "cp": cp,
        "pp": with_p2p.seconds - without_comm.seconds,
        "dp": exposed + profile.contention * hidden + agreement_s + dp_times.tied_grad_s,
        "optimizer": norm_s + update_s + profile.step_s,
    }


def _message_delay(times: TimeModel) -> Callable[[int, int], float]:
    """Return the time of a message between two pipeline ranks: this tp rank's shard of the hidden states."""
    ranks = times.mesh.pp.ranks
    p2p_bytes = times.plan.shape.p2p_bytes
    message_times = CommTimes.with_measured(times.cluster, times.profile.message)
    return lambda source, target: message_times.p2p(p2p_bytes, ranks[source], ranks[target])
