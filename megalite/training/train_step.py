"""One training step: get the batch, run forward and backward, reduce, validate, update.

A single all-reduce over the world carries everything that the ranks must agree on: the squared gradient norm, the
losses, the number of labels that count, the number of ranks that want to stop, and the load of experts. All ranks
therefore make the same decision at the same step, and rank 0 knows the loss, which the last stage computes. If layers
have losses, two more numbers are summed before the forward passes (`_labels_per_token`).
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megalite.common.fault_injection import inject_fault
from megalite.config.run_options import DETERMINISM_REPORTS
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.parallel.comm import all_reduce_
from megalite.training.batch import to_device
from megalite.training.logging.timers import Timers
from megalite.training.monitoring.rerun import diagnose_step, find_anomaly, format_samples, rerun_forward_backward
from megalite.training.noise_scale import NoiseSums
from megalite.training.replica_check import check_replicas, replica_checksums
from megalite.training.state import Anomaly, InvalidResultError, Run, StepResult, StepSums

REDUCED_FIELDS = ("norm_sq", "labels", "tokens", "stop_requests")  # fields of StepSums
NOISE_FIELDS = ("noise_local_norm_sq", "noise_norm_sq", "noise_labels_sq")  # fields of NoiseSums
NO_TIMERS = Timers()  # measures nothing
REPLICA_FIELDS = ("weights differ", "main weights differ")  # the two elements of replica_checksums


def train_step(
    run: Run,
    want_stop: bool = False,
    *,
    count_zeros: bool = False,
    timers: Timers = NO_TIMERS,
    empty_cache_level: int = 0,
) -> StepResult:
    """Advance `run` by one step; collective over all ranks.

    A loss or gradient that is not finite raises InvalidResultError on all ranks without an update, unless the loss
    scaler handles it or the run skips such steps. A step in which no label counts updates nothing either.

    Args:
        want_stop: This rank asks the run to stop after the step.
        count_zeros: Count the elements of the gradient that are 0; adds one number to the all-reduce.
        empty_cache_level: 1 returns the allocator's unused memory to CUDA before the update, 2 also after it.
    """
    start = time.perf_counter()
    mesh = run.mesh
    progress = run.progress
    step = progress.step + 1
    batch_size = run.batch_sizes.at(progress.consumed_samples)
    with timers("batch-generator", 2), mesh.phase_timer.span("data", "wait for data"):
        inject_fault("data.get", mesh.world.rank, step)
        host_batches, _ = run.train_loader.get(progress.consumed_samples, batch_size)
    data_s = time.perf_counter() - start
    batches = [to_device(batch, mesh.device) for batch in host_batches]
    # Gradients are divided by the number of tokens of the batch, masked or not, to keep them in the range of the dtype;
    # `_update` corrects that to the number of labels.
    num_tokens = batch_size * run.seq_length
    ctx = ForwardContext(
        step,
        loss_grad=run.loss_scaler.scale / num_tokens,
        token_weight=_labels_per_token(run, host_batches),
        loss_sums=run.loss_sums,
    )

    noise_scale = run.noise_scale
    if noise_scale is not None:
        noise_scale.start_step()
        run.sync.pre_reduce_hook = noise_scale.add_local_gradients
    with timers("forward-backward", 1):
        run.expert_balancer.reset()
        run.loss_sums.zero_()
        run.pipeline.step(batches, ctx)
    inject_fault("step.after_forward_backward", mesh.world.rank, step, run.loss_sums.values)
    with timers("all-grads-sync", 1):
        run.sync.finish_grad_sync()
    run.sync.pre_reduce_hook = None
    if empty_cache_level >= 1 and mesh.device.type == "cuda":
        torch.cuda.empty_cache()

    def reduce_sums() -> StepSums:
        return _reduce_step_sums(run, host_batches, want_stop, count_zeros, num_tokens)

    sums, anomaly, replica_mismatch = _validate_step(run, batches, ctx, reduce_sums)
    if not sums.finite and run.check_finite and not run.loss_scaler.dynamic:
        raise _invalid_result(run, anomaly, batch_size)
    is_anomalous = anomaly is not None and not anomaly.transient
    skipped = not sums.finite or sums.labels == 0 or (is_anomalous and run.spikes.action != "log")
    is_one_pass = anomaly is None and replica_mismatch is None  # a rerun has no gradients of single ranks
    if noise_scale is not None and sums.noise is not None and sums.finite and is_one_pass:
        noise_scale.update(sums.noise, run.loss_scaler.scale / num_tokens)
    if not skipped:
        _update(run, sums.grad_norm, sums.unscale, timers)
        if empty_cache_level >= 2 and mesh.device.type == "cuda":
            torch.cuda.empty_cache()
    run.loss_scaler.update(overflow=not sums.finite)
    run.spikes.record(sums.loss, sums.grad_norm, skipped)
    tokens = round(sums.tokens)
    progress.advance(batch_size, tokens=tokens, skipped=skipped)
    next_lr = run.schedules.lr.at(progress.consumed_samples - progress.skipped_samples)
    return StepResult(
        loss=sums.loss,
        grad_norm=sums.grad_norm,
        lr=next_lr,  # of the next update, as Megatron-LM logs it
        batch_size=batch_size,
        tokens=tokens,
        labels=round(sums.labels),
        skipped=skipped,
        stop=sums.stop_requests > 0,
        data_s=data_s,
        step_s=time.perf_counter() - start,
        losses=sums.losses,
        layer_losses=sums.layer_losses,
        zeros=None if sums.zeros is None else round(sums.zeros),
        anomaly=anomaly,
        replica_mismatch=replica_mismatch,
        moe_metrics=run.expert_balancer.metrics(),
        noise_scale=None if noise_scale is None else noise_scale.labels,
    )


def _labels_per_token(run: Run, host_batches: Sequence[Batch]) -> float | torch.Tensor:
    """Return the ratio of labels that count to tokens that are not padding, in the global batch.

    The gradients of the losses of layers depend on it: without these losses it is 1.0, with them the call is collective
    over all ranks. The host does not wait for the device.
    """
    mesh = run.mesh
    if not run.loss_sums.layer_losses:
        return 1.0
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    if mesh.pp.is_last and mesh.tp.is_first:
        sums[0].fill_(float(sum(batch.num_targets for batch in host_batches)))
        sums[1].fill_(float(sum(batch.num_unpadded for batch in host_batches)))
    all_reduce_(sums, mesh.world)
    return sums[0] / sums[1].clamp(min=1)


def _validate_step(
    run: Run, batches: Sequence[Batch], ctx: ForwardContext, reduce_sums: Callable[[], StepSums]
) -> tuple[StepSums, Anomaly | None, str | None]:
    """Check a step's results and return (sums to use, anomaly, replica mismatch).

    Forward and backward are rerun if replicas of the weights were repaired, and if the sums are suspicious
    (`diagnose_step`). Collective over all ranks.

    `reduce_sums` reduces this rank's losses over all ranks, with everything else that a step sums.
    """
    sums = reduce_sums()
    replica_mismatch = None
    if sums.replicas_differ and run.replica_action:
        replica_mismatch = check_replicas(run, run.progress.step + 1, run.replica_action, checksums_differ=True)
        if run.replica_action == "repair":
            rerun_forward_backward(run, batches, ctx)
            sums = reduce_sums()
    anomaly = None
    if find_anomaly(run, sums) or run.rerun_mode in DETERMINISM_REPORTS:
        sums, anomaly = diagnose_step(run, batches, ctx, sums, reduce_sums)
    return sums, anomaly, replica_mismatch


def _invalid_result(run: Run, anomaly: Anomaly | None, batch_size: int) -> InvalidResultError:
    """Return the error for the current step's anomaly, which names its samples and the remedies."""
    assert anomaly is not None
    progress = run.progress
    samples = format_samples(run, range(progress.consumed_samples, progress.consumed_samples + batch_size))
    return InvalidResultError(
        f"step {progress.step + 1}: {anomaly.reason} at {samples}; nothing was updated; {anomaly.finding}. "
        "Look at these samples, lower --lr (and give --override-opt-param-scheduler), or skip such steps with "
        "--no-check-for-nan-in-loss-and-grad"
    )


def _reduce_step_sums(
    run: Run, host_batches: Sequence[Batch], want_stop: bool, count_zeros: bool, num_tokens: int
) -> StepSums:
    """Sum a step's results over the world, in float64; the step's only synchronization with the device.

    The sums are the squared gradient norm, labels, tokens and stop requests; zeros of the gradient, its noise and the
    checksums of replicas if enabled; the losses; and the load of the experts. Sums keep NaN and inf, whereas a maximum
    may drop a NaN.

    Args:
        num_tokens: The tokens of the global batch by which the pipeline divided the gradients.
    """
    mesh = run.mesh
    inject_fault("step.after_reduce", mesh.world.rank, run.progress.step + 1, lambda: run.sync.grad_buckets[0].owned)
    names = [*REDUCED_FIELDS]
    if count_zeros:
        names.append("zeros")
    if run.noise_scale is not None:
        names += NOISE_FIELDS
    if run.replica_action:
        names += REPLICA_FIELDS  # must be last
    local_losses = run.loss_sums.local_values(mesh)
    local_counts = run.expert_balancer.local_counts()
    sizes = [len(names), len(local_losses), len(local_counts)]
    packed = torch.zeros(sum(sizes), dtype=torch.float64, device=mesh.device)
    sums, losses, counts = packed.split(sizes)
    losses.copy_(local_losses)
    counts.copy_(local_counts)
    local_sums = dict(zip(names, sums.split(1), strict=True))  # views: writing to one does not wait for the device
    with mesh.phase_timer.span("optimizer", "gradient norm"):
        local_sums["norm_sq"].copy_(run.optimizer.local_norm_sq())
    if mesh.pp.is_last and mesh.tp.is_first:  # replicated values are counted once per data-parallel rank
        num_labels = float(sum(batch.num_targets for batch in host_batches))
        local_sums["labels"].fill_(num_labels)
        if run.noise_scale is not None:
            local_sums["noise_labels_sq"].fill_(num_labels**2)
        local_sums["tokens"].fill_(float(sum(batch.num_unpadded for batch in host_batches)))
    local_sums["stop_requests"].fill_(float(want_stop))
    if run.noise_scale is not None:
        local_norm_sq, norm_sq = run.noise_scale.local_sums().split(1)
        local_sums["noise_local_norm_sq"].copy_(local_norm_sq)
        local_sums["noise_norm_sq"].copy_(norm_sq)
    if count_zeros:
        local_sums["zeros"].copy_(run.optimizer.local_num_zeros())
    if run.replica_action:
        sums[-len(REPLICA_FIELDS) :] = replica_checksums(run)
    all_reduce_(packed, mesh.world)
    values = packed[: len(names) + len(local_losses)].tolist()  # together, to wait for the device only once
    global_sums = dict(zip(names, values[: len(names)], strict=True))
    loss_sums = values[len(names) :]
    run.expert_balancer.set_global_counts(counts)
    labels, tokens = global_sums["labels"], global_sums["tokens"]
    noise = None
    if run.noise_scale is not None:
        local_norm_sq, norm_sq, labels_sq = (global_sums[name] for name in NOISE_FIELDS)
        noise = NoiseSums(local_norm_sq, norm_sq, labels, labels_sq)
    return StepSums(
        **{name: global_sums[name] for name in REDUCED_FIELDS},
        losses=run.loss_sums.means(loss_sums, labels, tokens),
        layer_losses=run.loss_sums.layer_means(loss_sums, tokens),
        unscale=num_tokens / (labels * run.loss_scaler.scale) if labels else 0.0,
        zeros=global_sums.get("zeros"),
        replicas_differ=any(global_sums.get(name, 0.0) for name in REPLICA_FIELDS),
        noise=noise,
    )


def _update(run: Run, grad_norm: float, unscale: float, timers: Timers) -> None:
    """Clip the gradient, update the elements that this rank owns, and start the all-gather of the weights."""
    samples = run.progress.consumed_samples - run.progress.skipped_samples
    clip = min(1.0, run.clip_grad / (grad_norm + 1e-6)) if run.clip_grad > 0 else 1.0
    with run.mesh.phase_timer.span("checkpoint", "wait for the save"):
        run.before_update()
    schedules = run.schedules
    rates = dict(
        lr=schedules.lr.at(samples),
        decoupled_lr=(schedules.decoupled or schedules.lr).at(samples),
        weight_decay=schedules.weight_decay.at(samples),
    )
    with timers("optimizer", 1), run.mesh.phase_timer.span("optimizer", "optimizer"):
        with timers("optimizer-inner-step", 1):
            run.optimizer.step(scale=clip * unscale, **rates)
        with timers("params-all-gather", 1):
            run.sync.start_param_sync()
    run.expert_balancer.update_bias()
    inject_fault("step.after_update", run.mesh.world.rank, run.progress.step + 1, lambda: _first_weights(run))


def _first_weights(run: Run) -> Tensor:
    """Return the weights of the first bucket that are always allocated, for an injected fault."""
    run.sync.wait_param_sync()
    return run.sync.param_buckets[0].resident
