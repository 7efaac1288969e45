"""Bars of one run: where its time went, what its ranks hold, and which rank has which layers."""

from collections.abc import Mapping, Sequence
from typing import Any

from megalite.parallel.mesh import rank_grid
from megalite.training.monitoring import hang_diagnosis as diagnosis
from tools.plots.run_data import Run, listed, number, table
from tools.plots.style import SERIES, WIDE, Picture, as_rows, figure, ink, legend, short

WORKING = ("forward", "backward", "graph", "optimizer")  # what a device is for
MOST = 32  # pipeline ranks that a picture has room for
PARTS = ("weights", "gradients", "optimizer", "activations")


def phases(run: Run) -> list[tuple[str, float]]:
    """(phase, per cent), the longest first; without what is nothing."""
    found = [(name[:20], number(share) or 0.0) for name, share in table(run.report.get("percent")).items()]
    return sorted(((name, share) for name, share in found if share >= 0.05), key=lambda one: -one[1])[:12]


def time_split(runs: Sequence[Run]) -> Picture:
    """A bar per phase, side by side for several runs."""
    told = [dict(phases(run)) for run in runs]
    names = sorted(set().union(*told), key=lambda name: -max(one.get(name, 0.0) for one in told))
    thick = 0.8 / len(runs)

    def draw(width: float) -> Any:
        fig, (axis,) = figure(width, [max(1.2, 0.26 * len(names) * max(1.0, 0.7 * len(runs)) + 0.3)])
        for i, (run, one) in enumerate(zip(runs, told, strict=True)):
            rows = [row + (i - (len(runs) - 1) / 2) * thick for row in range(len(names))]
            shares = [one.get(name, 0.0) for name in names]
            waits = [ink("blue" if name in WORKING else "orange") for name in names]
            colours = waits if len(runs) == 1 else ink(SERIES[i % len(SERIES)])
            axis.barh(rows, shares, height=0.92 * thick, color=colours, label=run.label)
            for row, share in zip(rows, shares, strict=True):
                if share:
                    axis.text(share + 0.6, row, f"{share:.1f} %", va="center", color=ink("ink"), fontsize=8)
        axis.set_yticks(range(len(names)), names)
        axis.set_xlim(0, 1.16 * max(share for one in told for share in one.values()))
        axis.set_xticks([])
        axis.margins(y=0.01)
        axis.spines["bottom"].set_visible(False)
        as_rows(axis)
        if len(runs) > 1:
            legend(fig, axis, width)
        return fig

    colours = " Blue is work, orange what work waits for." if len(runs) == 1 else ""
    return Picture("time", f"Share of the last process's time, mean over all ranks.{colours}", draw)


def memory(run: Run) -> Picture | None:
    """Planned parts of a rank of each pipeline position, and what its ranks have taken at most."""
    planned = [table(one) for one in listed(run.about.get("memory"))]
    if not planned or len(planned) > MOST:
        return None
    on_cpu = run.about.get("device") == "cpu"
    owners = [position for position, ranks in enumerate(positions(run)) for _ in ranks]
    order = [rank for ranks in positions(run) for rank in ranks]
    peaks = run.peaks_gib if len(run.peaks_gib) == len(order) else []
    pairs = [(owner, peaks[rank]) for owner, rank in zip(owners, order, strict=True)] if peaks else []
    measured = [] if on_cpu else pairs

    def draw(width: float) -> Any:
        fig, (axis,) = figure(width, [0.34 * len(planned) + 1.0])
        end = [0.0] * len(planned)
        for part, colour in zip(PARTS, ("blue", "sky", "green", "orange"), strict=True):
            gib = [(number(one.get(part)) or 0.0) / 2**30 for one in planned]
            axis.barh(range(len(planned)), gib, left=end, height=0.62, color=ink(colour), label=part)
            end = [a + b for a, b in zip(end, gib, strict=True)]
        if measured:
            rows, at = zip(*measured, strict=True)
            axis.plot(at, rows, "|", color=ink("ink"), markersize=15, markeredgewidth=1.6, label="measured")
        axis.set_yticks(range(len(planned)), [_position(run, p) for p in range(len(planned))])
        axis.set_xlabel("GiB per rank")
        axis.locator_params(axis="x", nbins=4 if width < WIDE else 8)
        axis.xaxis.set_major_formatter(lambda value, _: short(value))
        as_rows(axis, values=True)
        axis.set_xlim(left=0)
        legend(fig, axis, width)
        return fig

    what = " Strokes are what the card's allocator had at most." if measured else ""
    if peaks and on_cpu:
        rank = max(range(len(peaks)), key=lambda r: peaks[r])
        whole = "the whole process, Python and torch included"
        what = f" Measured: rank {rank} had {peaks[rank]:.2f} GiB at most, {whole}."
    return Picture("memory", f"Bars are what the plan says that a rank holds.{what}", draw)


def positions(run: Run) -> list[list[int]]:
    """The ranks of each pipeline position."""
    m = run.mesh
    if m["world"] % (m["pp"] * m["tp"] * m["cp"]) or m["world"] > 1 << 20:
        return []
    grid = rank_grid(m["world"], m["tp"], m["pp"], m["cp"], dp_outermost=bool(run.about.get("dp_outermost"))).tolist()
    return [sorted(rank for copies in of for parts in copies for rank in parts) for of in grid]


def _position(run: Run, position: int) -> str:
    held = positions(run)
    if position >= len(held):
        return f"stage {position}"
    word, _, text = diagnosis.format_ranks(held[position]).partition(" ")
    return f"{word} {text if len(text) <= 16 else text[:10].rpartition(',')[0] + ', …'}"


def layers(run: Run) -> list[tuple[int, int]]:
    """From and to, of every stage; [] where they are not known."""
    pairs = [one for one in listed(run.about.get("layers")) if isinstance(one, list) and len(one) == 2]
    found = [(int(number(a) or 0), int(number(b) or 0)) for a, b in pairs]
    return found if all(0 <= a <= b <= 100_000 for a, b in found) else []


def layout(run: Run) -> Picture | None:
    return layout_of(layers(run), run.mesh, [_position(run, p) for p in range(run.mesh["pp"])])


def layout_of(stages: Sequence[tuple[int, int]], m: Mapping[str, int], names: Sequence[str]) -> Picture | None:
    """A row per pipeline rank, the depth of the model to the right. `stages`: their layers, from and to. `m`: world and
    axis -> size. `names`: of the rows."""
    pp = m["pp"]
    if not stages or pp > MOST or len(stages) % pp:
        return None
    depth = stages[-1][1]
    end = max(1.0, depth * 0.07)  # width of what is no layer: embedding, head

    def draw(width: float) -> Any:
        fig, (axis,) = figure(width, [0.4 * pp + 0.75])
        for stage, (begin, stop) in enumerate(stages):
            row, chunk = stage % pp, stage // pp
            colour = ink(("blue", "sky")[chunk % 2])
            if stop > begin:
                _box(axis, row, begin, stop, colour, _span(begin, stop, depth, width))
            if stage == 0:
                _box(axis, row, -end, 0, ink("green"), "E")
            if stage == len(stages) - 1:
                _box(axis, row, depth, depth + end, ink("vermilion"), "H")
        axis.set_yticks(range(pp), names)
        axis.set_xlim(-end, depth + end)
        axis.set_ylim(-0.6, pp - 0.4)
        axis.set_xlabel("layers")
        axis.set_xticks(range(0, depth + 1, max(1, depth // 8)))
        as_rows(axis)
        return fig

    sizes = " × ".join(f"{axis} {m[axis]}" for axis in ("pp", "dp", "cp", "tp"))
    ranks = f"{m['world']:,} rank{'s' if m['world'] > 1 else ''}"
    shared = " Ranks of a row share its layers (tp, cp) or hold copies (dp)." if m["world"] > pp else ""
    return Picture("layout", f"{sizes} = {ranks}: who holds what, E the embedding, H the head.{shared}", draw)


def _box(axis: Any, row: int, begin: float, end: float, colour: str, text: str) -> None:
    axis.barh(row, end - begin, left=begin, height=0.7, color=colour, edgecolor=ink("paper"), linewidth=1.5)
    dark = colour in (ink("blue"), ink("green"), ink("vermilion"))
    axis.text((begin + end) / 2, row, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")


def _span(begin: int, stop: int, depth: int, width: float) -> str:
    """As much as fits."""
    text = str(begin) if stop == begin + 1 else f"{begin}-{stop - 1}"
    room = (stop - begin) / depth * (width - 1.2)
    return text if room > 0.075 * len(text) else ""
