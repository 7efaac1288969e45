"""How fast this machine runs a model's parts: a profile for megalite/planning/stage_time.py, in half a minute.

As many local ranks as will share the machine measure at once, so that memory and caches are shared as in a run:

    layer, embedding, head    forward, backward and weight gradients of stages (megalite/models/gpt.py): layers of the
                              first one's kind, and the model's ends, at its shapes and micro-batch, with gradients
                              added to the flat buffer as in a run; layers also with a split backward
    update, norm              the optimizer's, per byte
    messages, all-gather      a micro-batch's hidden states from rank to rank, and what is shared out over all ranks
    shares of the peaks       a matmul and attention at the model's shapes, and a copy: for other models, and for tp
"""

import dataclasses
import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megalite.config.options import Config
from megalite.data.datasets.batches import MicroBatch
from megalite.kernels.attention import attention
from megalite.kernels.dispatch import set_kernel_options
from megalite.launch.local_launcher import launch_local
from megalite.launch.rank_info import RankInfo, process_group
from megalite.models.gpt import Stage
from megalite.nn.parameter import ParamFactory
from megalite.nn.wgrad_store import WeightGradStore
from megalite.optim.buffer import ParamAndGradBuffer
from megalite.optim.distributed_optimizer import DistributedOptimizer
from megalite.parallel.mesh import Axis, Mesh, build_mesh
from megalite.parallel.streams import synchronize
from megalite.planning.cluster import DEVICES, DeviceProfile, Link, default_profile, make_cluster
from megalite.planning.layer_kinds import layer_kinds, layers_cost
from megalite.planning.run_plan import RunPlan
from megalite.planning.stage_time import calibration_key
from megalite.training.batch import to_device, to_host_batch
from megalite.training.job.preflight import choose_device
from megalite.training.logging.device_memory import keep_freed_heap
from megalite.training.setup import build_update_rules
from tools.bench import collectives

LAYERS = 2  # of the stage that is measured, of a model that has them
SMALL = 1 << 12  # bytes of a message that shows the latency
TIMES = 15  # of which the median counts


class CalibrationError(RuntimeError):
    """A rank could not measure."""


def calibrate(config: Config, vocab_size: int, ranks: int = 2, seconds: float = 20.0) -> DeviceProfile:
    """Measure this device for models of this configuration's shape without tp. Raises CalibrationError."""
    with tempfile.TemporaryDirectory(prefix="calibrate-") as folder:
        task = {"config": config, "vocab_size": vocab_size, "seconds": seconds, "folder": folder}
        if code := launch_local(ranks, measure, (task,)):
            raise CalibrationError(f"a rank ended with exit code {code}; what it said is above")
        results = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))]
    mean = lambda key: statistics.fmean(one[key] for one in results)  # noqa: E731
    columns = {name: zip(*(one["blocks"][name] for one in results), strict=True) for name in results[0]["blocks"]}
    blocks = {name: tuple(map(statistics.fmean, column)) for name, column in columns.items()}
    message, collective = (Link(*results[0][name]) if results[0][name] else None for name in ("message", "collective"))
    return dataclasses.replace(
        default_profile(results[0]["kind"]),
        source=f"measured {time.strftime('%Y-%m-%d')} by {ranks} ranks at once, {results[0]['device']}",
        matmul=mean("matmul"),
        head=mean("head"),
        attention=(mean("attention_forward"), mean("attention_backward")),
        attention_half=(0.0, 0.0),  # at this length
        memory=mean("memory"),
        shape=results[0]["shape"],
        device=results[0]["kind"],
        blocks=blocks,
        message=message,
        collective=collective,
    )


def measure(ranks: RankInfo, task: dict[str, Any]) -> None:
    """One rank's part: writes what it found into the task's folder."""
    wanted = choose_device(task["config"].parallel.device)
    if wanted == "cpu":
        keep_freed_heap()  # as pretrain() does
    with process_group(ranks, device=wanted, startup_timeout=datetime.timedelta(minutes=5)) as device:
        found = _Bench(task, ranks, device).run()
    (Path(task["folder"]) / f"rank{ranks.rank:05d}.json").write_text(json.dumps(found))


class _Bench:
    """All ranks go through the same sections, each of which ends at one time by the clock: so they stay together."""

    def __init__(self, task: dict[str, Any], ranks: RankInfo, device: torch.device):
        config = task["config"]
        sizes = dict.fromkeys(("tensor", "pipeline", "expert"), 1)
        alone = dataclasses.replace(config.parallel, **{f"{name}_model_parallel_size": n for name, n in sizes.items()})
        self.made: RunPlan = RunPlan(dataclasses.replace(config, parallel=alone), 1, task["vocab_size"])
        self.mesh = dataclasses.replace(Mesh.single_process(), device=device)
        self.ranks, self.device, self.layers = ranks, device, min(LAYERS, config.model.num_layers)
        self.section_s, self.until = task["seconds"] / 9, 0.0

    def run(self) -> dict[str, Any]:
        message, collective = self.links()
        self.until = time.perf_counter()  # all are here: the links were used together
        blocks: dict[str, tuple[float, float, float]] = {}
        stages, buffer, optimizer = self.build()
        for name, stage, number in zip(("embedding", "layer", "head"), stages, range(3), strict=True):
            times = self.stage(stage, number, split=False)
            blocks[name] = tuple(t / (self.layers if name == "layer" else 1) for t in times)  # type: ignore[assignment]
        blocks["layer, split"] = tuple(t / self.layers for t in self.stage(stages[1], 1, split=True))  # type: ignore[assignment]
        step = lambda: optimizer.step(lr=0.0, weight_decay=0.0, scale=1.0)  # noqa: E731
        kept = sum(t.nbytes for state in optimizer.state for t in state.values())
        kept += 0 if optimizer.main_is_model else sum(t.nbytes for t in optimizer.main)
        moved = buffer.grads.nbytes + 2 * kept + buffer.weights.nbytes
        update, norm = self.median(step) / moved, self.median(optimizer.local_norm_sq) / buffer.grads.nbytes
        blocks["update"] = (update, norm, 0.0)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        return {
            **{"blocks": blocks, "message": message, "collective": collective, "device": name, "kind": self.kind},
            **{"shape": calibration_key(self.made), **self.shares(blocks)},
        }

    def now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()

    def median(self, work: Callable[[], Any]) -> float:
        """Seconds of `work`, which runs until the section's end, and three times at least."""
        return self.medians(lambda: (self.timed(work),))[0]

    def medians(self, times: Callable[[], tuple[float, ...]]) -> list[float]:
        times()  # the first call makes what the others use
        self.until += self.section_s
        rows = [times() for _ in range(3)]
        while time.perf_counter() < self.until:
            rows.append(times())
        self.until = max(self.until, time.perf_counter())
        return [statistics.median(column) for column in zip(*rows, strict=True)]

    def timed(self, work: Callable[[], Any]) -> float:
        start = self.now()
        work()
        return self.now() - start

    def build(self) -> tuple[list[Stage], Any, Any]:
        """Three stages: embedding, layers, head; their buffer and optimizer."""
        config = self.made.config
        set_kernel_options(config.parallel.kernels, config.parallel.attention_kernel)
        make = ParamFactory(self.mesh, self.made.dtype, config.train.seed)
        layers = [range(0), range(self.layers), range(self.layers, self.layers)]
        one_kind, stages = dataclasses.replace(layer_kinds(config.model)[0], num_layers=self.layers), []
        for number, model in enumerate((config.model, one_kind, config.model)):
            apart = dataclasses.replace(model, untie_embeddings_and_output_weights=True)  # tied weights need two ends
            made = dataclasses.replace(self.made, config=dataclasses.replace(config, model=apart))
            stages.append(made.build_stage(make, layers, number))
        buffer = ParamAndGradBuffer(stages, self.mesh)
        return stages, buffer, DistributedOptimizer(buffer, *build_update_rules(config))

    def stage(self, stage: Stage, number: int, split: bool) -> list[float]:
        """Seconds of F, B and W (0 where backward is not split)."""
        made = self.made
        S, B, D = made.config.model.seq_length, made.config.train.micro_batch_size, made.config.model.hidden_size
        drawn = np.random.default_rng(0).integers(0, made.vocab_size, (B, S + 1))
        micro = MicroBatch(drawn, np.arange(B, dtype=np.int64), None, None)
        host = to_host_batch(micro, pin=False, positions=False, documents=False, cp=self.mesh.cp, windows=())
        batch = to_device(host, self.device, step=1)
        x_SBD = torch.randn(S, B, D, device=self.device).to(made.dtype)
        weight = 1.0 / made.tokens_per_microbatch

        def once() -> tuple[float, float, float]:
            x = None if number == 0 else x_SBD.detach().requires_grad_()
            later = WeightGradStore() if split else None
            start = self.now()
            y = stage(x, dataclasses.replace(batch, loss_grad=weight, wgrad_store=later))
            forward = self.now()
            torch.autograd.backward(y, torch.full_like(y, weight) if number == 2 else x_SBD)
            backward = self.now()
            if later is not None:
                later.compute_all()
            return forward - start, backward - forward, self.now() - backward if split else 0.0

        return self.medians(once)

    def shares(self, blocks: dict[str, tuple[float, float, float]]) -> dict[str, float]:
        """The shares of the device's peaks that a matmul, attention and a copy reach."""
        made, m, name = self.made, self.made.config.model, self.kind
        device = make_cluster(name, self.ranks.world_size).device if name == "cpu" else DEVICES[name][0]
        peak, tokens = device.peak_tflops(made.dtype) * 1e12, made.tokens_per_microbatch
        draw = lambda *shape: torch.randn(*shape, device=self.device).to(made.dtype)  # noqa: E731
        a_ND, w_FD = draw(tokens, m.hidden_size), draw(m.ffn_size, m.hidden_size)
        matmul = self.median(lambda: a_ND @ w_FD.T)
        S, B, K = m.seq_length, made.config.train.micro_batch_size, m.head_size
        q = draw(S, B, m.num_attention_heads, K).requires_grad_()
        k, v = (draw(S, B, m.num_kv_groups, K).requires_grad_() for _ in range(2))

        def attend() -> tuple[float, float]:
            start = self.now()
            o = attention(q, k, v, scale=K**-0.5)
            middle = self.now()
            torch.autograd.grad(o, (q, k, v), o.detach())
            return middle - start, self.now() - middle

        forward, backward = self.medians(attend)
        kind = dataclasses.replace(layer_kinds(m)[0], window_size=None)
        setting = dataclasses.replace(made.stage_costs.setting, tp=1, split_backward=False, recompute_modules=())
        alone = layers_cost((kind,), setting)
        scores = sum(event.values[0] for event in alone.of_phase("F") if event.kind == "scores")
        source = torch.empty(1 << 26, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        copied = self.median(lambda: target.copy_(source))
        return {
            "matmul": 2.0 * tokens * m.hidden_size * m.ffn_size / matmul / peak,
            "head": sum(made.stage_costs.head.flops) * made.tp / blocks["head"][0] / peak,
            "attention_forward": scores / forward / peak,
            "attention_backward": 2.5 * scores / backward / peak,
            "memory": 2 * source.nbytes / copied / device.memory_bytes_per_s,
        }

    @property
    def kind(self) -> str:
        """Its name in the table of devices."""
        if self.device.type == "cpu":
            return "cpu"
        name = torch.cuda.get_device_name(self.device).lower()
        if (kind := next((kind for kind in DEVICES if kind in name), None)) is None:
            raise CalibrationError(f"the table of devices has no {name}; give its peaks in a cluster's file")
        return kind

    def links(self) -> tuple[list[float] | None, list[float] | None]:
        """(latency, bytes per second) of messages and of all-gathers; None: there is one rank."""
        world, device = self.ranks.world_size, self.device
        if world == 1:
            return None, None
        large = self.made.tokens_per_microbatch * self.made.config.model.hidden_size * self.made.dtype.itemsize

        def link(kind: str, axis: Axis, large: int, turns: int) -> list[float]:
            """By a small and a large one. `turns`: messages that follow each other in a call."""
            calls = (collectives.call_of(kind, axis, size, device) for size in (SMALL, large))
            latency, whole = (collectives.timed(call, device, TIMES) for call in calls)
            rate = collectives.FACTORS[kind](world) * (large - SMALL) / max(whole - latency, 1e-9)
            return [latency / turns, rate]

        message = link("message", build_mesh(device=device, pp=world).pp, large, 2)
        return message, link("all_gather", build_mesh(device=device).dp_cp, 4 * large, 1)
