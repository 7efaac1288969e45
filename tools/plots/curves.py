"""Curves of one run or several: losses, values of a step, and the differences between runs."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tools.plots.run_data import Point, RunData, differences, downsample, is_other_loss
from tools.plots.style import MARKERS, SERIES, WIDE, Picture, color, figure, format_number, legend, mark_zero_difference

if TYPE_CHECKING:
    from tools.verification.compare_ranks import QuantityDiff

SCORES = (
    ("acc", "accuracy"),
    ("acc_norm", "accuracy with log-likelihoods per byte"),
    ("bpb", "bits per byte of right answers"),
)
LINE_STYLES = ("-", "--", ":", "-.")  # for more runs than there are colors
MAX_MARKERS = 60  # points of a line that have markers
STEP_CURVES = (
    ("train/lr", "learning rate"),
    ("train/grad_norm", "gradient norm"),
    ("perf/tokens_per_s_per_gpu", "tokens/s"),
)


def _format_ticks(axis: Any, *names: str) -> None:
    """Format the ticks of the x or y axes with units such as k and M."""
    for name in names:
        getattr(axis, f"{name}axis").set_major_formatter(lambda value, _: format_number(value))


def _log_scale(axis: Any) -> None:
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}" if value < 0.01 else format_number(value))
    axis.yaxis.set_minor_formatter(lambda value, _: "")


def _line(axis: Any, points: Sequence[Point], x: int, index: int, **kwargs: Any) -> None:
    """Draw a line.

    Args:
        x: 0 for steps, 1 for tokens.
        index: The index of the run or of the set, which determines the color.
    """
    kwargs.setdefault("linewidth", 1.5)
    kwargs.setdefault("linestyle", LINE_STYLES[index // len(SERIES) % len(LINE_STYLES)])
    if len(points) == 1:
        kwargs.setdefault("marker", "o")
    line_color = color(SERIES[index % len(SERIES)])
    axis.plot([point[x] for point in points], [point[2] for point in points], color=line_color, **kwargs)


def _mark_events(axis: Any, run: RunData, x: int, color_name: str, prefix: str) -> None:
    """Mark a run's resumes and anomalies on the lower edge."""
    anomalies = [step for step, _ in run.anomalies]
    for steps, marker, name in ((run.resumed, "^", "resumed"), (anomalies, "X", "anomaly")):
        if not steps:
            continue
        positions = [step if x == 0 else run.tokens_at(step) for step in steps]
        label = f"{prefix}{name}"
        if len(steps) > 1:
            label += f", {len(steps)} times"
        axis.plot(
            positions,
            [0.03] * len(positions),
            marker,
            color=color(color_name),
            transform=axis.get_xaxis_transform(),
            markersize=6,
            label=label,
        )


def _max_loss(runs: Sequence[RunData]) -> float | None:
    """Return an upper limit for the axis of losses if the first steps or some spikes would flatten the rest."""
    curves = [run.curve("train/loss") for run in runs]
    for run in runs:
        curves += run.validation.values()
    sorted_losses = [sorted(y for *_, y in points) for points in curves if points]
    percentile_99 = max((losses[int(0.99 * (len(losses) - 1))] for losses in sorted_losses), default=0.0)
    min_loss = min((losses[0] for losses in sorted_losses), default=0.0)
    max_loss = max((losses[-1] for losses in sorted_losses), default=0.0)
    is_flattened = max_loss > percentile_99 + 0.3 * (percentile_99 - min_loss)
    return percentile_99 + 0.15 * (percentile_99 - min_loss) if is_flattened else None


def _tokens_per_step(runs: Sequence[RunData]) -> float | None:
    """Return the tokens per step if they are the same in all steps of all runs."""
    ratios = {round(tokens / step, 6) for run in runs for step, tokens, _ in run.curve("train/loss") if step > 0}
    return ratios.pop() if len(ratios) == 1 else None


def loss(runs: Sequence[RunData]) -> Picture:
    """Return losses over steps with their tokens, or over steps and over tokens if batch sizes differ."""
    runs = [run for run in runs if run.curve("train/loss") or run.validation]
    tokens_per_step, max_loss = _tokens_per_step(runs), _max_loss(runs)
    diffs = [points for run in runs[1:] if (points := differences(runs[0], run))]
    curves_overlap = any(max(y for *_, y in points) < 0.02 for points in diffs)

    def draw(width: float) -> Any:
        fig, axes = figure(width, [3.4] if tokens_per_step is not None else [3.4, 2.8])
        for x, axis in enumerate(axes):
            for i in range(len(runs)):
                # the first run is drawn wider, so that it shows behind the others
                _draw_losses(axis, runs, i, x, linewidth=3.2 if curves_overlap and i == 0 else 1.4)
            axis.set_ylabel("loss, nats per token")
            axis.set_xlabel(("steps", "tokens")[x])
            axis.set_ylim(top=max_loss)
            _format_ticks(axis, "x")
            axis.margins(x=0.02)
        if tokens_per_step is not None:
            axes[0].xaxis.set_major_formatter(_step_and_tokens_format(tokens_per_step))
            axes[0].set_xlabel("steps, with tokens below")
        legend(fig, axes[0], width)
        return fig

    caption = ["Training loss (mean since the previous log line), and validation losses as dots."]
    if max_loss is not None:
        caption.append("Less than 1 % of the points lie above the upper edge.")
    if any(len(run.weighted_losses) < len(run.curve("train/loss")) for run in runs):
        caption.append("The first line after a resume, a mean of one step, is merged with the next.")
    if any(run.resumed for run in runs):
        caption.append("Triangle: resumed by another process.")
    if any(run.anomalies for run in runs):
        caption.append("Cross: a step with an anomaly (spike, non-finite value, transient error, rollback).")
    return Picture("loss", " ".join(caption), draw)


def _step_and_tokens_format(tokens_per_step: float) -> Callable[[float, int], str]:
    """Return a formatter of ticks that prints a step with its tokens below."""

    def format_tick(step: float, _: int) -> str:
        return f"{format_number(step)}\n{format_number(step * tokens_per_step)}" if step else "0"

    return format_tick


def _draw_losses(axis: Any, runs: Sequence[RunData], index: int, x: int, linewidth: float) -> None:
    """Draw the losses of a run, with one color per run, or per set if there is only one run."""
    run, is_single = runs[index], len(runs) == 1
    prefix = "" if is_single else f"{run.label}: "
    if points := run.visible_points("train/loss"):
        label = f"{prefix}training {run.last('train/loss'):.3f}"
        _line(axis, points, x, index, label=label, linewidth=linewidth)
    for i, (name, points) in enumerate(run.validation.items()):
        kwargs: dict[str, Any] = {"linewidth": 0.9}
        if len(points) <= MAX_MARKERS:
            marker = MARKERS[i % len(MARKERS)]
            kwargs.update(marker=marker, markersize=4.5, markeredgecolor=color("paper"))
        last_step, _, last_loss = points[-1]
        label = f"{prefix}{'validation' if name == 'valid' else name} {last_loss:.3f}"
        if last_step < (run.curve("train/loss") or points)[-1][0]:
            label += f" at step {last_step:,.0f}"
        _line(axis, downsample(points), x, i + 1 if is_single else index, label=label, zorder=3, **kwargs)
    _mark_events(axis, run, x, "ink" if is_single else SERIES[index % len(SERIES)], prefix)


def training_curves(runs: Sequence[RunData]) -> Picture:
    """Return learning rate, gradient norm and speed over steps."""

    def draw(width: float) -> Any:
        fig, axes = figure(width, [1.35] * len(STEP_CURVES), share_x=True)
        for axis, (key, name) in zip(axes, STEP_CURVES, strict=True):
            min_value, max_value = math.inf, 0.0
            for index, run in enumerate(runs):
                scale = run.devices if key.startswith("perf") else 1
                points = [(step, tokens, scale * y) for step, tokens, y in run.visible_points(key)]
                label = run.label if axis is axes[0] and len(runs) > 1 else None
                _line(axis, points, 0, index, linewidth=1.2, label=label)
                min_value = min([min_value, *(y for *_, y in points if y > 0)])
                max_value = max([max_value, *(y for *_, y in points)])
            if key == "train/grad_norm" and max_value > 50 * min_value:
                _log_scale(axis)
                _format_ticks(axis, "x")
            else:
                axis.set_ylim(bottom=0)
                _format_ticks(axis, "x", "y")
            axis.set_title(name, loc="left", color=color("muted"))
            axis.margins(x=0.02)
        if len(runs) > 1:
            legend(fig, axes[0], width)
        axes[-1].set_xlabel("steps")
        return fig

    caption = "Learning rate, gradient norm before clipping, and tokens per second of all devices."
    return Picture("steps", caption, draw)


def other_losses(runs: Sequence[RunData]) -> Picture | None:
    """Return the losses besides that of the labels over steps; None if no run has one."""
    keys = list(dict.fromkeys(key for run in runs for key in run.curves if is_other_loss(key)))
    if not keys:
        return None

    def draw(width: float) -> Any:
        fig, axes = figure(width, [1.35] * len(keys), share_x=True)
        for axis, key in zip(axes, keys, strict=True):
            lowest = 0.0  # a loss of a plugin may be negative
            for index, run in enumerate(runs):
                label = run.label if axis is axes[0] and len(runs) > 1 else None
                _line(axis, run.visible_points(key), 0, index, linewidth=1.2, label=label)
                lowest = min([lowest, *(y for *_, y in run.visible_points(key))])
            if lowest == 0:
                axis.set_ylim(bottom=0)
            _format_ticks(axis, "x", "y")
            axis.set_title(key.partition("/")[2].replace("_", " "), loc="left", color=color("muted"))
            axis.margins(x=0.02)
        if len(runs) > 1:
            legend(fig, axes[0], width)
        axes[-1].set_xlabel("steps")
        return fig

    caption = (
        "Losses of routers and of plugins' mixers per token, without their coefficients, and the z-loss; means since "
        "the previous log line."
    )
    return Picture("other_losses", caption, draw)


def scores(runs: Sequence[RunData]) -> Picture | None:
    """Return the scores of requests over steps, one line per task; None if no run has them.

    Of more tasks than there are colors, all lines are gray, and a colored one is their mean.
    """
    shown = [(score, name) for score, name in SCORES if any(run.scores(score) for run in runs)]
    if not shown:
        return None
    num_tasks = max(len(run.scores(score)) for run in runs for score, _ in shown)

    def draw(width: float) -> Any:
        fig, axes = figure(width, [1.9] * len(shown), share_x=True)
        for axis, (score, name) in zip(axes, shown, strict=True):
            for index, run in enumerate(runs):
                _draw_scores(axis, runs, index, run.scores(score), with_labels=axis is axes[0])
            axis.set_title(name, loc="left", color=color("muted"))
            _format_ticks(axis, "x", "y")
            axis.margins(x=0.02)
        legend(fig, axes[0], width)
        axes[-1].set_xlabel("steps")
        return fig

    caption = "Scores of the requests of --eval-requests by task: accuracies are fractions of questions."
    if num_tasks > len(SERIES):
        caption += " Gray: each task."
    return Picture("scores", caption, draw)


def _draw_scores(
    axis: Any, runs: Sequence[RunData], index: int, points_by_task: dict[str, list[Point]], with_labels: bool
) -> None:
    """Draw a score of a run: with one color per task, or per run if there are several runs."""
    is_single = len(runs) == 1
    prefix = "" if is_single else f"{runs[index].label}: "
    if len(points_by_task) > len(SERIES):
        for points in points_by_task.values():
            axis.plot([step for step, *_ in points], [y for *_, y in points], color=color("line"), linewidth=1.0)
        points_by_task = {f"mean of {len(points_by_task)} tasks": _mean_curve([*points_by_task.values()])}
    for i, (task, points) in enumerate(points_by_task.items()):
        kwargs: dict[str, Any] = {"linewidth": 1.4, "label": f"{prefix}{task}" if with_labels else None}
        if len(points) <= MAX_MARKERS:
            kwargs.update(marker=MARKERS[i % len(MARKERS)], markersize=4.5, markeredgecolor=color("paper"))
        if not is_single:
            kwargs["linestyle"] = LINE_STYLES[i % len(LINE_STYLES)]
        _line(axis, downsample(points), 0, i if is_single else index, **kwargs)


def _mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """Return the mean of several curves, at the steps that all of them have."""
    values: dict[tuple[float, float], list[float]] = {}
    for points in curves:
        for step, tokens, y in points:
            values.setdefault((step, tokens), []).append(y)
    return [(*position, sum(ys) / len(ys)) for position, ys in sorted(values.items()) if len(ys) == len(curves)]


def experts(runs: Sequence[RunData]) -> Picture | None:
    """Return the load of every expert of the first run over steps; None if the model has no experts."""
    if not runs[0].expert_loads:
        return None
    steps, loads = zip(*runs[0].expert_loads, strict=True)

    def draw(width: float) -> Any:
        fig, (axis,) = figure(width, [2.4])
        by_expert = []
        for values in zip(*loads, strict=True):
            by_expert.append(downsample([(step, step, y) for step, y in zip(steps, values, strict=True)]))
        order = sorted(range(len(by_expert)), key=lambda expert: by_expert[expert][-1][2])
        for expert in order:
            xs, _, ys = zip(*by_expert[expert], strict=True)
            axis.plot(xs, ys, color=color("line"), linewidth=1.0)
        for index, (name, expert) in enumerate((("lowest", order[0]), ("highest", order[-1]))):
            _line(axis, by_expert[expert], 0, index, label=f"expert {expert}, {name} load at the end")
        axis.set_ylim(bottom=0)
        axis.set_xlabel("steps")
        axis.set_ylabel("load / mean load")
        _format_ticks(axis, "x")
        axis.margins(x=0.02)
        legend(fig, axis, width)
        return fig

    caption = (
        "Tokens routed to each expert in the step of each log line, in all layers, relative to the mean; 1 is even."
    )
    return Picture("experts", caption, draw)


def agreement(runs: Sequence[RunData]) -> Picture:
    """Return the difference between the training loss of every run and that of the first run."""
    first, *others = runs
    diffs = [(other.label, points) for other in others if (points := differences(first, other))]
    curves = [(label, downsample(points)) for label, points in diffs]
    values = [y for _, points in diffs for *_, y in points]
    has_equal = any(y == 0 for y in values)
    min_difference = min((max(y, 1e-30) for y in values if y > 0), default=1e-8)

    def draw(width: float) -> Any:
        fig, (axis,) = figure(width, [2.6])
        floor = 10.0 ** math.floor(math.log10(min_difference) - 0.3)
        for index, (label, points) in enumerate(curves):
            shown = [(step, tokens, max(y, floor)) for step, tokens, y in points]
            extra_width = 0.7 * (len(curves) - 1 - index)  # earlier curves show behind later ones that are equal
            _line(
                axis,
                shown,
                0,
                index + 1,
                label=label,
                linewidth=1.1 + extra_width,
                marker="o",
                markersize=3 + extra_width,
                clip_on=False,
            )
        _log_scale(axis)
        axis.set_ylim(bottom=floor)
        if has_equal:
            mark_zero_difference(axis, floor)
        axis.set_xlabel("steps")
        axis.set_ylabel(f"difference from {first.label},\nnats per token")
        _format_ticks(axis, "x")
        legend(fig, axis, width)
        return fig

    equal = " Points on the lower edge are equal." if has_equal else ""
    caption = f"Difference between the training loss of each run and that of {first.name}.{equal}"
    return Picture("agreement", caption, draw)


def describe_agreement(points: Sequence[Point]) -> str:
    """Describe the differences of two runs."""
    step, _, max_difference = max(points, key=lambda point: point[2])
    lines = f"over {len(points):,} common log line{'s' if len(points) > 1 else ''}"
    if max_difference == 0:
        return f"equal to the last bit {lines}"
    return f"at most {max_difference:.2e}, at step {step:,.0f}, {lines}"


# ---- the differences between a layout and a single process, by step, and the tolerance (tools/verify.py)

QUANTITIES = {
    "forward": "hidden states",
    "loss": "loss",
    "gradient": "gradients",
    "norm": "gradient norm",
    "weight": "weights",
}
MAX_FLOOR = 1e-17  # points that are equal to the last bit are drawn below this
MAX_DIFFERENCE = 1e3


def verification_plot(rows: "Sequence[QuantityDiff]", layout: str, dtype: str) -> Picture:
    """Return the largest difference of each quantity and step: filled if it fails, open within the tolerance."""
    steps = sorted({row.step for row in rows})
    has_equal = any(row.distance == 0 for row in rows if row.kind in QUANTITIES)

    def draw(width: float) -> Any:
        fig, (axis,) = figure(width, [3.0])
        distances = [row.distance for row in rows if row.distance > 0 and math.isfinite(row.distance)]
        floor = 10.0 ** math.floor(math.log10(min([*distances, MAX_FLOOR * 10])) - 0.3)
        for index, (kind, name) in enumerate(QUANTITIES.items()):
            _draw_quantity(axis, [row for row in rows if row.kind == kind], steps, index, name, floor)
        tolerances = {row.step: row.tolerance for row in rows if row.kind == "gradient" or row.step == 0}
        edges = [(step + side, tolerances[step]) for step in sorted(tolerances) for side in (-0.3, 0.3)]
        xs, ys = [x for x, _ in edges], [y for _, y in edges]
        axis.plot(xs, ys, label="tolerance for gradients", color=color("ink"), linewidth=1.4, linestyle="--")
        _log_scale(axis)
        axis.set_ylim(bottom=floor)
        if has_equal:
            mark_zero_difference(axis, floor)
        axis.set_xticks(steps, ["start" if not step else "eval" if step % 1 else f"{step:g}" for step in steps])
        is_wide = width >= WIDE
        axis.set_xlabel(
            "training step (start: before the first; eval: the evaluation after a step)" if is_wide else "training step"
        )
        axis.set_ylabel("relative difference")
        title = "Largest difference from a single process"
        axis.set_title(f"{title}, by quantity" if is_wide else title, loc="left", color=color("ink"))
        legend(fig, axis, width)
        return fig

    equal = " On the lower edge: equal to the last bit." if has_equal else ""
    caption = f"{layout} compared with a single process in {dtype}, largest difference of each quantity"
    return Picture("verify", f"{caption}; filled: it differs.{equal}", draw)


def _draw_quantity(
    axis: Any, rows: "Sequence[QuantityDiff]", steps: Sequence[float], index: int, name: str, floor: float
) -> None:
    """Draw the largest difference of one quantity at each step."""
    worst = []
    for step in steps:
        at_step = [row for row in rows if row.step == step]
        if at_step:
            worst.append(max(at_step, key=lambda row: (row.differs, row.distance)))
    if not worst:
        return
    xs = [row.step + 0.05 * (index - 2) for row in worst]  # side by side
    ys = [min(max(row.distance, floor), MAX_DIFFERENCE) for row in worst]
    line_color, marker = color(SERIES[index]), MARKERS[index]
    axis.plot(
        xs,
        ys,
        color=line_color,
        marker=marker,
        markersize=5,
        markerfacecolor=color("paper"),
        linewidth=1.0,
        label=name,
        clip_on=False,
    )
    failed = [(x, y) for x, y, row in zip(xs, ys, worst, strict=True) if row.differs]
    axis.plot([x for x, _ in failed], [y for _, y in failed], marker, color=line_color, markersize=7)
