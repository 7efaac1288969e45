"""One training step: get the batch, forward and backward, reduce, decide, update.

One all-reduce over the world carries everything that the ranks must agree on: the squared gradient norm, the loss, the
number of tokens that count, whether some rank wants to stop, and what routers counted. So all ranks decide alike at the
same step, and rank 0 knows the loss, which the last stage computes. Where routers have losses, two numbers are summed
before the forwards, too (`_labels_per_token`).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from megalite.common.fault_injection import inject_fault
from megalite.config.run_options import DETERMINISM_REPORTS
from megalite.nn.micro_batch import Batch
from megalite.parallel.comm import all_reduce_
from megalite.training.batch import to_device
from megalite.training.logging.timers import Timers
from megalite.training.monitoring.rerun import diagnose_step, find_anomaly, format_samples, rerun_forward_backward
from megalite.training.replica_check import check_replicas, replica_checksums
from megalite.training.state import Anomaly, InvalidResultError, Run, StepResult, StepSums

REDUCED_FIELDS = ("norm_sq", "loss_sum", "tokens", "unpadded", "stop_requests", "z_sum")  # fields of StepSums
NO_TIMERS = Timers()  # measures nothing
REPLICA_FIELDS = ("weights differ", "main weights differ")  # of training/replica_check.py: disagreement


def train_step(
    run: Run,
    want_stop: bool = False,
    *,
    count_zeros: bool = False,
    timers: Timers = NO_TIMERS,
    empty_cache_level: int = 0,
) -> StepResult:
    """Advance `run` by one step. Raises BadResult on all ranks for a loss or gradient that is not finite, and updates
    nothing, unless the loss scaler handles it. A step in which no label counts updates nothing either.

    `count_zeros`: elements of the gradient that are 0; one number more in the all-reduce. `empty_level`: whether the
    allocator gives memory back to CUDA before the update (1) and after it (2).
    """
    begin, mesh, state, step = time.perf_counter(), run.mesh, run.state, run.state.step + 1
    size = run.batch_sizes.at(state.consumed_samples)
    with timers("batch-generator", 2), mesh.clock.span("data", "wait for data"):
        inject_fault("data.get", mesh.world.rank, step)
        hosts, _ = run.train_loader.get(state.consumed_samples, size)
    data_s = time.perf_counter() - begin
    token_weight = _labels_per_token(run, hosts)
    batches = [replace(to_device(host, mesh.device, step), token_weight=token_weight) for host in hosts]
    nominal = size * run.seq_length  # tokens if none were masked: keeps gradients in the range of the dtype

    with timers("forward-backward", 1):
        run.expert_balancer.reset()
        losses = run.pipeline.step(batches, run.loss_scaler.scale / nominal)
    inject_fault("step.after_forward_backward", mesh.world.rank, step, losses)
    with timers("all-grads-sync", 1):
        run.buffer.finish_grad_sync()
    if empty_cache_level >= 1 and mesh.device.type == "cuda":
        torch.cuda.empty_cache()

    agree = lambda losses: _reduce_step_sums(run, losses, hosts, want_stop, count_zeros, nominal)  # noqa: E731
    numbers, doubt, copies = _validate_step(run, batches, losses, agree)
    if not numbers.finite and run.check_finite and not run.loss_scaler.dynamic:
        raise _invalid_result(run, doubt, size)
    stays = doubt is not None and not doubt.transient
    skipped = not numbers.finite or numbers.tokens == 0 or (stays and run.spikes.action != "log")
    if not skipped:
        _update(run, numbers.grad_norm, numbers.unscale, timers)
        if empty_cache_level >= 2 and mesh.device.type == "cuda":
            torch.cuda.empty_cache()
    run.loss_scaler.update(overflow=not numbers.finite)
    run.spikes.record(numbers.loss, numbers.grad_norm, skipped)
    tokens = round(numbers.unpadded)
    state.advance(size, tokens=tokens, skipped=skipped)
    return StepResult(
        loss=numbers.loss,
        grad_norm=numbers.grad_norm,
        lr=run.schedules.lr.at(
            state.consumed_samples - state.skipped_samples
        ),  # of the next update, as Megatron-LM logs
        batch_size=size,
        tokens=tokens,
        labels=round(numbers.tokens),
        skipped=skipped,
        stop=numbers.stop_requests > 0,
        data_s=data_s,
        step_s=time.perf_counter() - begin,
        z_loss=numbers.z_sum / numbers.tokens if numbers.tokens else 0.0,
        zeros=None if numbers.zeros is None else round(numbers.zeros),
        anomaly=doubt,
        replica_mismatch=copies,
        moe_metrics=run.expert_balancer.metrics(tokens),
    )


def _labels_per_token(run: Run, hosts: Sequence[Batch]) -> float | torch.Tensor:
    """Return the labels that count per token that is not padding, in the whole batch. Collective where routers have
    losses, whose gradients depend on it; nothing waits for the device."""
    mesh = run.mesh
    if not run.expert_balancer.has_losses:
        return 1.0
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    if mesh.pp.is_last and mesh.tp.is_first:
        sums[0].fill_(float(sum(host.num_targets for host in hosts)))
        sums[1].fill_(float(sum(host.unpadded for host in hosts)))
    all_reduce_(sums, mesh.world)
    return sums[0] / sums[1].clamp(min=1)


def _validate_step(
    run: Run, batches: Sequence[Batch], losses: torch.Tensor, agree: Callable[[torch.Tensor], StepSums]
) -> tuple[StepSums, Anomaly | None, str | None]:
    """(the numbers that count, the doubt, how replicas of the weights differed). The step is computed again where its
    weights were repaired, or its numbers are in doubt."""
    numbers, copies = agree(losses), None
    if numbers.replicas_differ and run.replica_action:
        copies = check_replicas(run, run.state.step + 1, run.replica_action, seen=True)
        if run.replica_action == "repair":
            losses, _ = rerun_forward_backward(run, batches)
            numbers = agree(losses)
    if find_anomaly(run, numbers) or run.rerun_mode in DETERMINISM_REPORTS:
        return *diagnose_step(run, batches, losses, numbers, agree), copies
    return numbers, None, copies


def _invalid_result(run: Run, doubt: Anomaly | None, size: int) -> InvalidResultError:
    assert doubt is not None
    state = run.state
    where = format_samples(run, range(state.consumed_samples, state.consumed_samples + size))
    return InvalidResultError(
        f"step {state.step + 1}: {doubt.reason} at {where}; nothing was updated; {doubt.finding}. "
        "Look at these samples, lower --lr (and give --override-opt-param-scheduler), or skip such steps with "
        "--no-check-for-nan-in-loss-and-grad"
    )


def _reduce_step_sums(
    run: Run, losses: torch.Tensor, hosts: Sequence[Batch], want_stop: bool, count_zeros: bool, nominal: int
) -> StepSums:
    """Sums over the world, in float64: squared gradient norm, loss, labels, tokens, ranks that want to stop, z-loss,
    and where asked zeros in the gradient and disagreement of replicas; the step's one sync with the device. Sums keep
    NaN and inf, where a maximum may drop a NaN."""
    mesh = run.mesh
    inject_fault("step.after_reduce", mesh.world.rank, run.state.step + 1, run.buffer.first_bucket_grad)
    names = [*REDUCED_FIELDS, *["zeros"] * count_zeros, *REPLICA_FIELDS * bool(run.replica_action)]
    counted = run.expert_balancer.local_sums()
    packed = torch.zeros(len(names) + len(counted), dtype=torch.float64, device=mesh.device)
    numbers, of_routers = packed.split([len(names), len(counted)])
    of_routers.copy_(counted)
    mine = dict(zip(names, numbers.split(1), strict=True))  # views: writing to one does not wait for the device
    with mesh.clock.span("optimizer", "gradient norm"):
        mine["norm_sq"].copy_(run.optimizer.local_norm_sq())
    if mesh.pp.is_last and mesh.tp.is_first:  # replicated values are counted once per data-parallel rank
        mine["loss_sum"].copy_(losses[0])
        mine["z_sum"].copy_(losses[1])
        mine["tokens"].fill_(float(sum(host.num_targets for host in hosts)))
        mine["unpadded"].fill_(float(sum(host.unpadded for host in hosts)))
    mine["stop_requests"].fill_(float(want_stop))
    if count_zeros:
        mine["zeros"].copy_(run.optimizer.local_num_zeros())
    if run.replica_action:
        numbers[-len(REPLICA_FIELDS) :] = replica_checksums(run)
    all_reduce_(packed, mesh.world)
    agreed = dict(zip(names, numbers.tolist(), strict=True))
    run.expert_balancer.set_global_sums(of_routers)
    return StepSums(
        **{name: agreed[name] for name in REDUCED_FIELDS},
        unscale=nominal / (agreed["tokens"] * run.loss_scaler.scale) if agreed["tokens"] else 0.0,
        zeros=agreed.get("zeros"),
        replicas_differ=any(agreed.get(name, 0.0) for name in REPLICA_FIELDS),
    )


def _update(run: Run, grad_norm: float, unscale: float, timers: Timers) -> None:
    """Clip, update this rank's shard, gather the weights."""
    n = run.state.consumed_samples - run.state.skipped_samples
    clip = min(1.0, run.clip_grad / (grad_norm + 1e-6)) if run.clip_grad > 0 else 1.0
    with run.mesh.clock.span("checkpoint", "wait for the save"):
        run.before_update()
    lr, decay = run.schedules.lr, run.schedules.weight_decay
    now = dict(lr=lr.at(n), decoupled_lr=(run.schedules.decoupled or lr).at(n), weight_decay=decay.at(n))
    with timers("optimizer", 1), run.mesh.clock.span("optimizer", "optimizer"):
        with timers("optimizer-inner-step", 1):
            run.optimizer.step(scale=clip * unscale, **now)
        with timers("params-all-gather", 1):
            run.buffer.start_param_sync()
    run.expert_balancer.update_bias()
    inject_fault("step.after_update", run.mesh.world.rank, run.state.step + 1, run.buffer.first_bucket_weight)


def parameter_norm(run: Run) -> float:
    """L2 norm of all parameters, the main weights, each counted once; collective: one number."""
    return float(all_reduce_(run.optimizer.local_weight_norm_sq(), run.mesh.world)) ** 0.5
