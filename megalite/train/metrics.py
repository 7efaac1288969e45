"""What a run tells: one log line per interval, metrics.jsonl, TensorBoard with Megatron-LM's tags, W&B.

Only rank 0 has a `Reporter`. MFU is model FLOPs (causal, no recompute) per second over the dense peak of all devices.
A figure that does not exist (the loss when every step was skipped, the MFU of an unknown card) is None: "n/a" in the
line, null in metrics.jsonl, absent from TensorBoard; never 0 or -1.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.data.named_sets import bits_per_byte


@dataclass(frozen=True)
class Interval:
    """Means and totals over the steps since the last line. Times in seconds; loss in nats per token.

    `loss` is the mean over the steps that updated; `skipped` counts those that did not, `nan` those whose loss was
    not finite. `lr`, `grad_norm`, `loss_scale`, `batch_size` are the last step's.
    """

    step: int
    last_step: int
    consumed_samples: int
    consumed_tokens: int
    batch_size: int
    loss: float | None
    lr: float
    grad_norm: float
    loss_scale: float
    skipped: int
    step_s: float
    data_s: float
    tokens_per_step: int
    memory_gib: float
    memory_limit_gib: float
    reserved_gib: float | None = None  # by the CUDA allocator
    z_loss: float | None = None  # what is added to the loss, which does not hold it
    nan: int = 0


@dataclass(frozen=True)
class Speed:
    """What turns seconds into rates: model FLOPs per token, devices, dense peak of one device (None: unknown)."""

    flops_per_token: float
    devices: int
    peak_tflops: float | None

    def tokens_per_s(self, i: Interval) -> float:
        """Per device."""
        return i.tokens_per_step / i.step_s / self.devices

    def tflops(self, i: Interval) -> float:
        """Per device."""
        return self.tokens_per_s(i) * self.flops_per_token / 1e12

    def mfu(self, i: Interval) -> float | None:
        return None if self.peak_tflops is None else self.tflops(i) / self.peak_tflops


def duration(seconds: float) -> str:
    """
    >>> duration(850), duration(200_000)
    ('00:14:10', '2d 07:33:20')
    """
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    return f"{days}d " * (days > 0) + f"{h:02d}:{m:02d}:{s:02d}"


def perplexity(loss: float) -> float:
    """Capped at exp(20), as in Megatron-LM, so that a diverged run does not overflow."""
    return math.exp(min(20.0, loss))


def megalite_line(i: Interval, speed: Speed, now: datetime.datetime) -> str:
    tokens, tflops, mfu = speed.tokens_per_s(i), speed.tflops(i), speed.mfu(i)
    loss = "n/a" if i.loss is None else f"{i.loss:.4f}"
    loss += "" if i.z_loss is None else f"  z-loss {i.z_loss:.2e}"
    scale = f"  scale {i.loss_scale:.0f}" if i.loss_scale != 1.0 else ""
    rate = f"{tokens / 1000:.1f}k" if tokens >= 1000 else f"{tokens:.0f}"
    share = "n/a" if mfu is None else f"{100 * mfu:.1f}%"
    skipped = f" | skipped {i.skipped}" if i.skipped else ""
    return (
        f"{now:%H:%M:%S}  step {i.step:5d}/{i.last_step}  loss {loss}  lr {i.lr:.1e}  gnorm {i.grad_norm:.2f}{scale} | "
        f"{rate} tok/s/gpu  {f'{tflops:.0f}' if tflops >= 100 else f'{tflops:.3g}'} TF/s  MFU {share} | "
        f"{i.memory_gib:.1f}/{i.memory_limit_gib:.0f} GiB | data {100 * i.data_s / i.step_s:.1f}% | "
        f"eta {duration((i.last_step - i.step) * i.step_s)}{skipped}"
    )


def megatron_line(i: Interval, speed: Speed, now: datetime.datetime, throughput: bool) -> str:
    """Field for field Megatron-LM's training log line, which users' scripts parse."""
    parts = [
        f" [{now:%Y-%m-%d %H:%M:%S.%f}] iteration {i.step:8d}/{i.last_step:8d} |",
        f" consumed samples: {i.consumed_samples:12d} |",
        f" elapsed time per iteration (ms): {i.step_s * 1000:.1f} |",
        f" throughput per GPU (TFLOP/s/GPU): {speed.tflops(i):.1f} |" if throughput else "",
        f" learning rate: {i.lr:.6E} |",
        f" global batch size: {i.batch_size:5d} |",
        "" if i.loss is None else f" lm loss: {i.loss:.6E} |",
        "" if i.z_loss is None else f" z_loss: {i.z_loss:.6E} |",
        f" loss scale: {i.loss_scale:.1f} |",
        f" grad norm: {i.grad_norm:.3f} |",
        f" number of skipped iterations: {i.skipped:3d} |",
        f" number of nan iterations: {i.nan:3d} |",
    ]
    return "".join(parts)


def megalite_validation_line(step: int, name: str, loss: float, bpb: float | None, now: datetime.datetime) -> str:
    per_byte = "" if bpb is None else f"  bits per byte {bpb:.4f}"
    return f"{now:%H:%M:%S}  step {step:5d}  {name} loss {loss:.4f}  ppl {perplexity(loss):.5g}{per_byte}"


def megatron_validation_lines(prefix: str, loss: float, name: str = "") -> str:
    """Megatron-LM's framed line; `prefix` as in "iteration 100" or "iteration 100 on test set"."""
    which = f"-{name}" if name else ""
    line = f" validation{which} loss at {prefix} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E} | "
    return f"{'-' * len(line)}\n{line}\n{'-' * len(line)}"


def missing_packages(tensorboard_dir: str | None, wandb_project: str | None) -> list[str]:
    """One line for each option whose optional package is not installed; imports nothing."""
    wanted = (
        ("tensorboard_dir", tensorboard_dir, "tensorboard"),
        ("wandb_project", wandb_project, "wandb"),
    )
    return [
        f"{option}={value!r} needs the package {package}; pip install {package}"
        for option, value, package in wanted
        if value is not None and importlib.util.find_spec(package) is None
    ]


class Reporter:
    """Writes to the console, RUN_DIR/log.txt and metrics.jsonl always; to TensorBoard and W&B when asked.

    Raises RuntimeError, before training, when a package that was asked for is missing.
    """

    def __init__(
        self,
        folder: Path,
        speed: Speed,
        *,
        style: str = "megalite",
        throughput: bool = False,
        tensorboard_dir: str | None = None,
        wandb_project: str | None = None,
        wandb_name: str | None = None,
        wandb_config: dict[str, Any] | None = None,
    ):
        self.speed, self.style, self.throughput = speed, style, throughput
        self._console = True
        self._board: Any = None
        self._wandb: Any = None
        missing = missing_packages(tensorboard_dir, wandb_project)
        if missing:
            raise RuntimeError("\n".join(missing))
        if tensorboard_dir is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(tensorboard_dir)
        if wandb_project is not None:
            import wandb  # type: ignore[import-not-found]

            self._wandb = wandb.init(project=wandb_project, name=wandb_name, config=wandb_config)
        folder.mkdir(parents=True, exist_ok=True)
        self._log = open(folder / "log.txt", "a", encoding="utf-8")  # noqa: SIM115 (closed in close)
        self._rows = open(folder / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115

    def say(self, text: str) -> None:
        if self._console:
            try:
                print(text, flush=True)
            except BrokenPipeError:  # whoever read the console is gone; log.txt is still there
                self._console = False
        self._log.write(text + "\n")
        self._log.flush()

    def train(self, i: Interval) -> None:
        speed, now = self.speed, datetime.datetime.now()
        if self.style == "megatron":
            self.say(megatron_line(i, speed, now, self.throughput))
        else:
            self.say(megalite_line(i, speed, now))
        row = {
            "train/loss": i.loss,
            "train/lr": i.lr,
            "train/grad_norm": i.grad_norm,
            "train/tokens": i.consumed_tokens,
            "train/batch_size": i.batch_size,
            "train/loss_scale": i.loss_scale,
            "train/skipped": i.skipped,
            "perf/tokens_per_s_per_gpu": speed.tokens_per_s(i),
            "perf/tflops_per_gpu": speed.tflops(i),
            "perf/mfu": speed.mfu(i),
            "perf/step_s": i.step_s,
            "perf/data_s": i.data_s,
            "mem/max_allocated_gib": i.memory_gib,
        }
        if i.reserved_gib is not None:
            row["mem/max_reserved_gib"] = i.reserved_gib
        if i.z_loss is not None:
            row["train/z_loss"] = i.z_loss
        self._row(i.step, i.consumed_tokens, row)
        tags = {
            "learning-rate": i.lr,
            "batch-size": i.batch_size,
            "lm loss": i.loss,
            "z_loss": i.z_loss,
            "loss-scale": i.loss_scale,
            "grad-norm": i.grad_norm,
        }
        self._tags(tags, i.step, i.consumed_samples)
        if self._board is not None:
            self._board.add_scalar("iteration-time", i.step_s, i.step)
            self._board.add_scalar("throughput", speed.tflops(i), i.step)

    def validation(
        self,
        step: int,
        samples: int,
        tokens: int,
        loss: float,
        what: str = "",
        *,
        name: str = "",
        bytes_per_token: float | None = None,
    ) -> None:
        """`what`: "" during training, " on validation set" or " on test set" at the end. `name`: of one of several
        sets. bytes_per_token: of the set's text, where it is known."""
        test = "test" in what
        bpb = None if bytes_per_token is None else bits_per_byte(loss, bytes_per_token)
        if self.style == "megatron":
            self.say(megatron_validation_lines(f"iteration {step}{what}", loss, name))
        else:
            which = ("test" if test else "validation") + (f" {name}" if name else "")
            self.say(megalite_validation_line(step, which, loss, bpb, datetime.datetime.now()))
        key = f"val/{name or ('test' if test else 'valid')}"
        row = {f"{key}/loss": loss, f"{key}/ppl": perplexity(loss)}
        self._row(step, tokens, row if bpb is None else {**row, f"{key}/bpb": bpb})
        if not test:
            tag = f"lm loss validation{'-' + name if name else ''}"
            self._tags({tag: loss, f"{tag} ppl": perplexity(loss)}, step, samples)

    def _tags(self, tags: dict[str, float | None], step: int, samples: int) -> None:
        if self._board is not None:
            for tag, value in tags.items():
                if value is not None:
                    self._board.add_scalar(tag, value, step)
                    self._board.add_scalar(f"{tag} vs samples", value, samples)

    def _row(self, step: int, tokens: int, values: dict[str, Any]) -> None:
        finite = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()
        }  # JSON has no nan
        self._rows.write(json.dumps({"step": step, "tokens": tokens, **finite}) + "\n")
        self._rows.flush()
        if self._wandb is not None:
            self._wandb.log({"tokens": tokens, **{k: v for k, v in finite.items() if v is not None}}, step=step)

    def close(self) -> None:
        self._log.close()
        self._rows.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()
