"""Measure how fast this machine runs the parts of a model, as a profile for megalite/planning/stage_time.py.

Several local ranks measure at the same time, so that they share memory and caches as in a run:

    layer, embedding, head    forward, backward and weight gradients of stages (megalite/models/gpt.py) with the model's
                              shapes and micro-batch: layers of the first layer's kind, also with a split backward, and
                              the ends of the model; gradients are added to buckets as in a run
    update, norm              seconds of the optimizer per byte
    messages, all-gather      hidden states of a micro-batch from rank to rank, and a tensor sharded over all ranks
    fractions of the peaks    a matmul and attention with the model's shapes, and a copy: for other models and for tp
"""

import dataclasses
import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalite.config.layer_spec import LayerSpec
from megalite.config.options import Config, ModelConfig
from megalite.data.datasets.batches import MicroBatch
from megalite.kernels.attention import attention
from megalite.kernels.dispatch import set_kernel_options
from megalite.launch.local_launcher import launch_local
from megalite.launch.process_group import process_group
from megalite.launch.rank_info import RankInfo
from megalite.models.gpt import Stage
from megalite.nn.micro_batch import ForwardContext
from megalite.nn.parameter import ParamFactory
from megalite.nn.wgrad_store import WeightGradStore
from megalite.optim.distributed_optimizer import DistributedOptimizer
from megalite.optim.zero.sync import BucketSync
from megalite.parallel.mesh import Axis, Mesh, build_mesh
from megalite.parallel.streams import synchronize
from megalite.planning.cluster import DEVICES, DeviceProfile, Link, default_profile, make_cluster
from megalite.planning.layer_cost import AttentionKernel
from megalite.planning.layer_kinds import layer_kinds, layers_cost
from megalite.planning.run_plan import RunPlan
from megalite.planning.run_shape import RunShape
from megalite.planning.stage_balance import StageBalance
from megalite.planning.stage_time import calibration_key
from megalite.training.batch import to_device, to_host_batch
from megalite.training.job.preflight import choose_device
from megalite.training.logging.device_memory import keep_freed_heap
from megalite.training.setup import build_update_rules
from tools.bench import collectives

MAX_LAYERS = 2  # layers of the stage that is measured
SMALL_BYTES = 1 << 12  # size of a message that takes as long as the latency
LINK_REPEATS = 15
NUM_SECTIONS = 9  # measurements that share the time of a calibration
COPY_BYTES = 1 << 26
ATTENTION_BACKWARD_FLOPS = 2.5  # relative to forward

StageSeconds = tuple[float, float, float]  # forward, backward, weight gradients


class CalibrationError(RuntimeError):
    """A rank could not measure."""


def measured_layer(model: ModelConfig) -> LayerSpec:
    """Return the layer that is measured: the first with attention and an MLP.

    Raises:
        CalibrationError: if there is none.
    """
    for layer in model.layers:
        if layer.has_attention and layer.mlp is not None:
            return layer
    raise CalibrationError("no layer of the pattern has attention and an MLP, which are measured together")


def calibrate(config: Config, vocab_size: int, ranks: int = 2, seconds: float = 20.0) -> DeviceProfile:
    """Measure this device for models with the shapes of `config` and without tp.

    Raises:
        CalibrationError: if a rank could not measure.
    """
    measured_layer(config.model)
    with tempfile.TemporaryDirectory(prefix="calibrate-") as result_dir:
        task = {"config": config, "vocab_size": vocab_size, "seconds": seconds, "result_dir": result_dir}
        if exit_code := launch_local(ranks, measure, (task,)):
            raise CalibrationError(f"a rank ended with exit code {exit_code}; its messages are above")
        results = [json.loads(path.read_text()) for path in sorted(Path(result_dir).glob("rank*.json"))]
    first = results[0]

    def mean(key: str) -> float:
        return statistics.fmean(result[key] for result in results)

    def link(name: str) -> Link | None:
        return Link(*first[name]) if first[name] else None

    blocks = {}
    for name in first["blocks"]:
        columns = zip(*(result["blocks"][name] for result in results), strict=True)
        blocks[name] = tuple(statistics.fmean(column) for column in columns)
    return dataclasses.replace(
        default_profile(first["kind"]),
        source=f"measured {time.strftime('%Y-%m-%d')} by {ranks} ranks at once, {first['device']}",
        matmul=mean("matmul"),
        head=mean("head"),
        attention=(mean("attention_forward"), mean("attention_backward")),
        attention_half=(0.0, 0.0),  # the fractions above hold at this length
        memory=mean("memory"),
        shape=first["shape"],
        device=first["kind"],
        blocks=blocks,
        message=link("message"),
        collective=link("collective"),
    )


def measure(ranks: RankInfo, task: dict[str, Any]) -> None:
    """Measure on one rank, and write the results to a file in the task's `result_dir`."""
    device_type = choose_device(task["config"].parallel.device)
    if device_type == "cpu":
        keep_freed_heap()  # as pretrain() does
    with process_group(ranks, device=device_type, startup_timeout=datetime.timedelta(minutes=5)) as device:
        results = _Calibrator(task, ranks, device).run()
    (Path(task["result_dir"]) / f"rank{ranks.rank:05d}.json").write_text(json.dumps(results))


class _Calibrator:
    """The measurements of one rank.

    All ranks run the same sections, and each section ends at the same time by the clock, so the ranks stay in step.
    """

    def __init__(self, task: dict[str, Any], ranks: RankInfo, device: torch.device):
        config = task["config"]
        single_rank = dataclasses.replace(
            config.parallel, tensor_model_parallel_size=1, pipeline_model_parallel_size=1, expert_model_parallel_size=1
        )
        # a depth of multi-token prediction takes the time of a layer, an embedding and a head
        model = config.model.for_any_pipeline().without_mtp()
        config = dataclasses.replace(config, parallel=single_rank, model=model)
        self.plan = RunPlan(RunShape(config, 1, task["vocab_size"]))
        self.mesh = dataclasses.replace(Mesh.single_process(), device=device)
        self.ranks, self.device = ranks, device
        self.kind = layer_kinds(config.model)[config.model.layers.index(measured_layer(config.model))]
        self.num_layers = min(MAX_LAYERS, config.model.num_layers)
        self.section_s = task["seconds"] / NUM_SECTIONS
        self.section_end = 0.0

    def run(self) -> dict[str, Any]:
        """Run all sections and return the results as JSON."""
        message, collective = self.links()
        self.section_end = time.perf_counter()  # the same on all ranks, because they measured the links together
        stages, sync, optimizer = self.build()
        embedding, layers, head = stages
        per_layer = 1 / self.num_layers
        blocks: dict[str, StageSeconds] = {
            "embedding": self.stage_seconds(embedding, 0, split=False),
            "layer": _scaled(self.stage_seconds(layers, 1, split=False), per_layer),
            "head": self.stage_seconds(head, 2, split=False),
            "layer, split": _scaled(self.stage_seconds(layers, 1, split=True), per_layer),
        }
        state_bytes = sum(t.nbytes for bucket in optimizer.buckets for t in bucket.state.values())
        state_bytes += sum(bucket.main.nbytes for bucket in optimizer.buckets if bucket.rounds_main)
        grad_bytes = sum(bucket.nbytes for bucket in sync.grad_buckets)
        update_bytes = grad_bytes + 2 * state_bytes + sum(bucket.nbytes for bucket in sync.param_buckets)
        sync.finish_grad_sync()  # the optimizer reads only complete gradients
        update_s = self.median_s(lambda: optimizer.step(lr=0.0, weight_decay=0.0, scale=1.0))
        norm_s = self.median_s(optimizer.local_norm_sq)
        blocks["update"] = (update_s / update_bytes, norm_s / grad_bytes, 0.0)
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        return {
            "blocks": blocks,
            "message": message,
            "collective": collective,
            "device": device,
            "kind": self.device_kind,
            "shape": calibration_key(self.plan, self.kind),
            **self.peak_fractions(head_forward_s=blocks["head"][0]),
        }

    def synced_time(self) -> float:
        synchronize(self.device)
        return time.perf_counter()

    def median_s(self, work: Callable[[], Any]) -> float:
        """Return the median seconds of `work`, which is repeated until the section ends, at least three times."""

        def timed() -> tuple[float]:
            start = self.synced_time()
            work()
            return (self.synced_time() - start,)

        return self.medians_s(timed)[0]

    def medians_s(self, timed: Callable[[], tuple[float, ...]]) -> list[float]:
        """Return the medians of the times that `timed` returns."""
        timed()  # warmup
        self.section_end += self.section_s
        samples = [timed() for _ in range(3)]
        while time.perf_counter() < self.section_end:
            samples.append(timed())
        self.section_end = max(self.section_end, time.perf_counter())
        return [statistics.median(column) for column in zip(*samples, strict=True)]

    def build(self) -> tuple[list[Stage], BucketSync, DistributedOptimizer]:
        """Build three stages (embedding, layers, head), their buckets and their optimizer."""
        config = self.plan.config
        set_kernel_options(config.parallel.kernels, config.parallel.attention_kernel)
        make_param = ParamFactory(self.mesh, self.plan.shape.dtype, config.train.seed)
        layer_ranges = [range(0), range(self.num_layers), range(self.num_layers, self.num_layers)]
        layers = [self.kind.spec] * self.num_layers
        untied = dataclasses.replace(config.model, untie_embeddings_and_output_weights=True)  # tying needs both ends
        shape = dataclasses.replace(self.plan.shape, config=dataclasses.replace(config, model=untied))
        balance = StageBalance(shape)
        stages = [balance.build_stage(make_param, layer_ranges, index, layers) for index in range(3)]
        sync = BucketSync(stages, self.mesh)
        return stages, sync, DistributedOptimizer(sync, *build_update_rules(config))

    def stage_seconds(self, stage: Stage, index: int, split: bool) -> StageSeconds:
        """Return the seconds of forward, backward and weight gradients (0 if backward is not split)."""
        plan = self.plan
        S, B, D = plan.config.model.seq_length, plan.config.train.micro_batch_size, plan.config.model.hidden_size
        is_first, is_last = index == 0, index == 2
        tokens = np.random.default_rng(0).integers(0, plan.shape.vocab_size, (B, S + 1))
        micro_batch = MicroBatch(tokens, np.arange(B, dtype=np.int64), None, None)
        host_batch = to_host_batch(
            micro_batch, pin=False, positions=False, documents=False, cp=self.mesh.cp, windows=()
        )
        batch = to_device(host_batch, self.device)
        x_SBD = torch.randn(S, B, D, device=self.device).to(plan.shape.dtype)
        loss_grad = 1.0 / plan.shape.tokens_per_microbatch

        def timed() -> StageSeconds:
            x = None if is_first else x_SBD.detach().requires_grad_()
            wgrad_store = WeightGradStore() if split else None
            start = self.synced_time()
            y = stage(x, batch, ForwardContext(1, loss_grad, wgrad_store=wgrad_store))
            forward_end = self.synced_time()
            torch.autograd.backward(y, torch.full_like(y, loss_grad) if is_last else x_SBD)
            backward_end = self.synced_time()
            wgrad_s = 0.0
            if wgrad_store is not None:
                wgrad_store.compute_all()
                wgrad_s = self.synced_time() - backward_end
            return forward_end - start, backward_end - forward_end, wgrad_s

        forward_s, backward_s, wgrad_s = self.medians_s(timed)
        return forward_s, backward_s, wgrad_s

    def peak_fractions(self, head_forward_s: float) -> dict[str, float]:
        """Return the fractions of the device's peaks that a matmul, the head, attention and a copy reach."""
        plan, model = self.plan, self.plan.config.model
        if self.device_kind == "cpu":
            device = make_cluster("cpu", self.ranks.world_size).device
        else:
            device = DEVICES[self.device_kind].device
        peak_flops = device.peak_tflops(plan.shape.dtype) * 1e12
        tokens = plan.shape.tokens_per_microbatch

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=self.device).to(plan.shape.dtype)

        a_ND, w_FD = random(tokens, model.hidden_size), random(model.ffn_size, model.hidden_size)
        matmul_s = self.median_s(lambda: a_ND @ w_FD.T)

        S, B, H, G = (
            model.seq_length,
            plan.config.train.micro_batch_size,
            model.num_attention_heads,
            model.num_kv_groups,
        )
        K = V = model.head_size
        shared: dict[str, Any] = {}
        if model.multi_latent_attention:
            K, V, R = model.qk_head_dim, model.v_head_dim, model.qk_pos_emb_head_dim
            if R:
                shared = {"q_pe_SBHR": random(S, B, H, R), "k_pe_TBR": random(S, B, R)}
        q, k, v = random(S, B, H, K), random(S, B, G, K), random(S, B, G, V)
        inputs = [x.requires_grad_() for x in (q, k, v, *shared.values())]

        def timed_attention() -> tuple[float, float]:
            start = self.synced_time()
            o = attention(q, k, v, scale=model.attention_scale, **shared)
            forward_end = self.synced_time()
            torch.autograd.grad(o, inputs, o.detach())
            return forward_end - start, self.synced_time() - forward_end

        forward_s, backward_s = self.medians_s(timed_attention)
        kind = dataclasses.replace(self.kind, spec=dataclasses.replace(self.kind.spec, window=None))
        setting = dataclasses.replace(
            plan.balance.stage_costs.setting, tp=1, split_backward=False, recompute_modules=()
        )
        cost = layers_cost((kind,), setting)
        attention_flops = sum(event.flops for event in cost.of_phase("F") if isinstance(event, AttentionKernel))

        source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        copy_s = self.median_s(lambda: target.copy_(source))
        return {
            "matmul": 2.0 * tokens * model.hidden_size * model.ffn_size / matmul_s / peak_flops,
            "head": sum(plan.balance.stage_costs.head.flops) * plan.shape.tp / head_forward_s / peak_flops,
            "attention_forward": attention_flops / forward_s / peak_flops,
            "attention_backward": ATTENTION_BACKWARD_FLOPS * attention_flops / backward_s / peak_flops,
            "memory": 2 * source.nbytes / copy_s / device.memory_bytes_per_s,
        }

    @property
    def device_kind(self) -> str:
        """The name of the device in the table of devices."""
        if self.device.type == "cpu":
            return "cpu"
        name = torch.cuda.get_device_name(self.device).lower()
        for kind in DEVICES:
            if kind in name:
                return kind
        raise CalibrationError(f"the table of devices has no {name}; give its peaks in a cluster's file")

    def links(self) -> tuple[list[float] | None, list[float] | None]:
        """Return (latency, bytes per second) of messages and of all-gathers; None if there is one rank."""
        world = self.ranks.world_size
        if world == 1:
            return None, None
        plan = self.plan
        hidden_bytes = plan.shape.tokens_per_microbatch * plan.config.model.hidden_size * plan.shape.dtype.itemsize
        pp_axis = build_mesh(device=self.device, pp=world).pp
        message = self.link("message", pp_axis, hidden_bytes, 2)
        dp_axis = build_mesh(device=self.device).dp_cp
        return message, self.link("all_gather", dp_axis, 4 * hidden_bytes, 1)

    def link(self, kind: str, axis: Axis, large_bytes: int, steps_per_call: int) -> list[float]:
        """Return (latency, bytes per second) from a small and a large call.

        Args:
            steps_per_call: The number of messages that follow each other in a call.
        """
        latency_s, large_s = (
            collectives.time_call(collectives.collective_fn(kind, axis, size, self.device), self.device, LINK_REPEATS)
            for size in (SMALL_BYTES, large_bytes)
        )
        moved_bytes = collectives.FACTORS[kind](self.ranks.world_size) * (large_bytes - SMALL_BYTES)
        return [latency_s / steps_per_call, moved_bytes / max(large_s - latency_s, 1e-9)]


def _scaled(seconds: Sequence[float], factor: float) -> StageSeconds:
    forward_s, backward_s, wgrad_s = seconds
    return forward_s * factor, backward_s * factor, wgrad_s * factor
