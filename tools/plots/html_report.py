"""The page of a run or of several: one HTML file with everything in it, no script, nothing loaded from anywhere.

Everything that comes from a run's files is escaped where it enters, and the page's own policy forbids scripts and
addresses besides. A section whose facts are damaged says so and leaves the others alone.
"""

import html
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from megalite.checkpoint.storage.location import CheckpointError, parse_location
from megalite.data.errors import DataError
from megalite.models.families import PRESETS
from megalite.training.logging.log_format import duration
from tools.plots import bars as shares
from tools.plots import curves, pipeline
from tools.plots.run_data import Run, differences, listed, number, table, whence
from tools.plots.style import COLOURS, NARROW, WIDE, Picture, clean, short, svg

DAMAGE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
GOOD, GOING = ("done",), ("running", "requeue", "interrupted", "unknown")
Parts = Iterable["str | Picture | None"]  # HTML, pictures, and pictures that there is nothing for


def escape(text: object, most: int = 400) -> str:
    return html.escape(clean(text, most))


def _style() -> str:
    """CSS; its colours are those of the pictures, as variables."""
    light, dark = ("".join(f"--{name}:{both[i]};" for name, both in COLOURS.items()) for i in (0, 1))
    colours = f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    return colours + Path(__file__).with_name("style.css").read_text("utf-8")


class Page:
    """`pictures`: those it shows, once `text` is asked for."""

    def __init__(self, runs: Sequence[Run]):
        self.runs, self.pictures = list(runs), list[Picture]()

    def text(self) -> str:
        body = "\n".join(filter(None, (self._section(*one) for one in self._sections())))
        title = escape(" and ".join(run.name for run in self.runs[:3]))
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{title}: report of a run</title><style>{_style()}</style></head><body><main>\n"
            f"{self._head()}\n{body}\n<footer>Made by <code>megalite report</code> from the files of "
            f"{', '.join(f'<code>{escape(run.folder)}</code>' for run in self.runs)}.</footer>\n</main></body></html>\n"
        )

    def _sections(self) -> list[tuple[str, Callable[[], Parts]]]:
        run, several = self.runs[0], len(self.runs) > 1
        of = f" of {escape(run.name)}" if several else ""
        return [
            ("Runs side by side", self._side_by_side),
            ("Loss", self._loss),
            ("Agreement", self._agreement),
            ("Step by step", self._steps),
            ("Where the time went", self._time),
            (f"Pipeline{of}", lambda: _timeline(run)),
            (f"Which rank holds which layers{of}", lambda: _layout(run)),
            (f"Memory{of}", lambda: [shares.memory(run)]),
            (f"Data{of}", lambda: _data(run)),
            (f"What happened{of}", lambda: _events(run)),
            (f"Options that differ from the defaults{of}", lambda: _options(run)),
            (f"Environment{of}", lambda: _environment(run)),
        ]

    def _section(self, title: str, parts: Callable[[], Parts]) -> str:
        """Empty where there is nothing to it."""
        made: list[str] = []
        try:
            for part in filter(None, parts()):
                made.append(self._figure(part, title) if isinstance(part, Picture) else part)
        except DAMAGE as error:
            made.append(f'<p class="bad">Cannot be shown: {escape(f"{type(error).__name__}: {error}")}</p>')
        return f"<section><h2>{title}</h2>{''.join(made)}</section>" if made else ""

    def _figure(self, picture: Picture, title: str) -> str:
        self.pictures.append(picture)
        widths = (("wide", WIDE), ("narrow", NARROW))
        shown = "".join(f'<div class="{name}">{svg(picture, width, title)}</div>' for name, width in widths)
        return f"<figure>{shown}<figcaption>{escape(picture.caption, 1000)}</figcaption></figure>"

    def _head(self) -> str:
        run = self.runs[0]
        title, status = f"{escape(run.name)}: {_outcome(run)}", run.status
        lead = [*(escape(status.get(name) or "") for name in ("reason", "host")), _when(status.get("time"))]
        one = '<div class="card"><b>{}</b><span>{}</span></div>'
        cards = "".join(one.format(value, name) for name, value in key_figures(run))
        lead, cards = " · ".join(filter(None, lead)), f'<div class="cards">{cards}</div>'
        if len(self.runs) > 1:
            lead = ", ".join(f"{escape(one.name)}: {_outcome(one)}" for one in self.runs)
            title, cards = f"{len(self.runs)} runs compared", ""
        problems = [f"{one.name}: {problem}" for one in self.runs for problem in one.problems]
        items = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
        bad = f'<section><h2 class="bad">Damaged files</h2><ul>{items}</ul></section>' if items else ""
        return f'<h1>{title}</h1><p class="lead">{lead}</p>{cards}{bad}'

    # ---- sections of all runs

    def _side_by_side(self) -> Iterator[str]:
        if len(self.runs) < 2:
            return
        figures = [{"outcome": _outcome(run)} | dict(key_figures(run)) for run in self.runs]
        names = list(dict.fromkeys(name for one in figures for name in one))
        rows = [[f"<th>{name}</th>", *(one.get(name, "") for one in figures)] for name in names]
        yield _table(rows, ["", *(escape(run.name) for run in self.runs)])

    def _loss(self) -> Parts:
        if any(run.curve("train/loss") or run.validation for run in self.runs):
            yield curves.loss(self.runs)
        else:
            yield "<p>No loss was logged yet.</p>"

    def _agreement(self) -> Parts:
        first, *others = self.runs
        common = [(other, points) for other in others if (points := differences(first, other))]
        for other, points in common:
            yield f'<p class="say">{escape(first.name)} and {escape(other.name)}: {curves.in_words(points)}.</p>'
        if common:
            yield curves.agreement([first, *(other for other, _ in common)])

    def _steps(self) -> Parts:
        if any(run.curve(key) for run in self.runs for key, _ in curves.STRIP):
            yield curves.strip(self.runs)
        yield curves.experts(self.runs)

    def _time(self) -> Parts:
        told = [run for run in self.runs if shares.phases(run)]
        for run in told:
            name = f"{escape(run.name)}: " if len(self.runs) > 1 else ""
            if run.report.get("bottleneck"):
                advice = escape(run.report.get("advice", ""))
                yield f'<p class="say">{name}<b>{escape(run.report["bottleneck"])}</b>: {advice}.</p>'
            elif reason := run.report.get("no_advice_reason"):
                yield f'<p class="say">{name}The bottleneck is unknown: {escape(reason)}.</p>'
        if told:
            yield shares.time_split(told)
        else:
            yield "<p>Not known before a process has ended in order: report.json is not there.</p>"


# ---- sections of one run


def _timeline(run: Run) -> Parts:
    if run.timeline is not None:
        yield pipeline.timeline(run.timeline)
    elif run.mesh["pp"] > 1:
        yield "<p>No step was timed; <code>--profile-pipeline STEP</code> does it.</p>"


def _layout(run: Run) -> Parts:
    if picture := shares.layout(run):
        yield picture
    elif stages := shares.layers(run):
        yield f"<p>{len(stages):,} stages over {run.mesh['pp']:,} pipeline ranks: too many for a picture.</p>"


def _data(run: Run) -> Iterator[str]:
    if isinstance(told := run.about.get("data"), str):
        lines = told.splitlines()
        yield f'<p class="say">Asked for: {"<br>".join(escape(line) for line in lines[:50])}</p>'
    from tools.checkpoint import format_data_usage

    try:
        seen = format_data_usage(parse_location(str(run.folder))).splitlines() if any(run.folder.glob("iter_*")) else []
    except (CheckpointError, DataError) as error:
        seen = [str(error)]
    if seen:
        lines = "<br>".join(escape(line, 200) for line in seen[:60])
        yield f"<p>Taken, by the newest checkpoint:</p><pre>{lines}</pre>"


def _events(run: Run) -> Iterator[str]:
    rows = []
    for event in run.events:
        what, step = escape(event.get("event", ""), 30), number(event.get("step"))
        if what == "heartbeat":
            continue
        more = event.get("text") or event.get("cause") or event.get("reason") or event.get("outcome") or ""
        rows.append([_when(event.get("time")), f"{step:,.0f}" if step is not None else "", what, escape(more)])
    most = 40
    if rows:
        yield _table(rows[-most:], ["time", "step", "event", ""])
    if len(rows) > most:
        yield f"<p>The last {most} of {len(rows):,} events.</p>"


def _options(run: Run) -> Iterator[str]:
    said = (map(html.escape, one[1:]) for one in whence(run, PRESETS))
    rows = [[f"<th>{name}</th>", f"<code>{value}</code>", source] for name, value, source in said]
    if rows:
        yield _table(rows, ["option", "value", "said by"])
    if command := listed(run.about.get("command")):
        words = escape(" ".join(map(str, command)), 5000)
        yield f"<details><summary>Command line</summary><pre>{words}</pre></details>"


def _environment(run: Run) -> Iterator[str]:
    machine, about = table(run.about.get("machine")), run.about
    hosts = listed(about.get("hosts"))
    facts = {"hosts": ", ".join(map(str, hosts[:20])) + (f" and {len(hosts) - 20} more" if len(hosts) > 20 else "")}
    facts |= {"device": about.get("device", ""), **machine}
    facts = {name: value for name, value in facts.items() if value and name != "environment"}
    if facts:
        yield _table([[f"<th>{escape(name)}</th>", escape(value)] for name, value in facts.items()])
    if variables := str(machine.get("environment") or ""):
        lines = "<br>".join(escape(line) for line in variables.splitlines()[:200])
        yield f"<details><summary>Environment variables</summary><pre>{lines}</pre></details>"


# ---- pieces


def _table(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Cells are HTML; one that brings its own <th> is taken as it is."""
    top = f"<thead><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr></thead>" if head else ""
    cells = ("".join(cell if cell.startswith("<th>") else f"<td>{cell}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def _outcome(run: Run) -> str:
    kind = "good" if run.outcome in GOOD else "" if run.outcome in GOING else "bad"
    return f'<span class="{kind}">{escape(run.outcome)}</span>'


def _when(time: object) -> str:
    """As it is written in files, to the second."""
    return escape(str(time or "")[:19].replace("T", " "))


def key_figures(run: Run) -> Iterator[tuple[str, str]]:
    """(name, value) as HTML, of what is known."""
    most, report = number(run.about.get("steps")), run.report
    last = (run.curve("train/loss") or [(None, None, None)])[-1]  # status.json is written now and then
    known = [(number(run.status.get(name)), last[i]) for i, name in enumerate(("step", "tokens"))]
    step, tokens = (max((n for n in pair if n is not None), default=None) for pair in known)
    past = table(report.get("run"))

    def of(name: str, value: float | None, shown: Callable[[float], str]) -> Iterator[tuple[str, str]]:
        if value is not None:
            yield name, shown(value)

    yield from of("training loss", run.last("train/loss"), lambda v: f"{v:.4f}")
    for name, points in list(run.validation.items())[:3]:
        at = f", step {points[-1][0]:,.0f}" if points[-1][0] != step else ""
        yield f"{'validation' if name == 'valid' else html.escape(name)} loss{at}", f"{points[-1][2]:.4f}"
    yield from of("steps", step, lambda v: f"{v:,.0f}" + (f" of {most:,.0f}" if most else ""))
    yield from of("tokens", tokens, short)
    yield from of("parameters", number(run.about.get("parameters")), short)
    speed = run.last("perf/tokens_per_s_per_gpu")
    yield from of("tokens/s", None if speed is None else speed * run.devices, short)
    yield from of("MFU", run.last("perf/mfu"), lambda v: f"{100 * v:.1f} %")
    yield from of("time of the run", number(past.get("wall_s") or report.get("wall_s")), duration)
    yield from of("goodput", number(past.get("goodput")), lambda v: f"{100 * v:.1f} %")
    yield from of("peak memory", run.last("mem/max_allocated_gib"), lambda v: f"{v:.2f} GiB")
    yield from of("cost", number(past.get("cost")), lambda v: f"{v:,.2f}")
