"""The page of one run or several: a single HTML file that has no scripts and loads nothing.

All text from a run's files is escaped, and the page's content security policy forbids scripts and addresses as well. A
section whose data is damaged shows the error; the other sections are not affected.
"""

import html
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from megalite.checkpoint.storage.location import CheckpointError, parse_location
from megalite.data.errors import DataError
from megalite.models.families import PRESETS
from megalite.training.logging.log_format import duration
from tools.plots import bars, curves, pipeline
from tools.plots.run_data import RunData, as_dict, as_list, differences, finite_number, option_sources
from tools.plots.style import COLORS, NARROW, WIDE, Picture, format_number, sanitize, svg

DAMAGE_ERRORS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError)
SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
GOOD_OUTCOMES = ("done",)
OPEN_OUTCOMES = ("running", "requeue", "interrupted", "unknown")
MAX_EVENTS = 40
MAX_HOSTS = 20

# HTML and pictures; None is a picture for which there is no data
Parts = Iterable["str | Picture | None"]


def escape(text: object, max_length: int = 400) -> str:
    """Return a text from a run's files as HTML."""
    return html.escape(sanitize(text, max_length))


def _style() -> str:
    """Return the CSS, with the colors of the pictures as variables."""
    light = "".join(f"--{name}:{on_white};" for name, (on_white, _) in COLORS.items())
    dark = "".join(f"--{name}:{on_black};" for name, (_, on_black) in COLORS.items())
    variables = f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    return variables + Path(__file__).with_name("style.css").read_text("utf-8")


class HtmlReport:
    """The page of one run or several.

    Attributes:
        pictures: The pictures of the page; filled by `text`.
    """

    def __init__(self, runs: Sequence[RunData]):
        self.runs = list(runs)
        self.pictures: list[Picture] = []

    def text(self) -> str:
        """Return the page as HTML."""
        sections = [self._section(title, parts) for title, parts in self._sections()]
        body = "\n".join(section for section in sections if section)
        title = escape(" and ".join(run.name for run in self.runs[:3]))
        directories = ", ".join(f"<code>{escape(run.directory)}</code>" for run in self.runs)
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{SECURITY_POLICY}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{title}: run report</title><style>{_style()}</style></head><body><main>\n"
            f"{self._header()}\n{body}\n<footer>Made by <code>megalite report</code> from the files of {directories}."
            "</footer>\n</main></body></html>\n"
        )

    def _sections(self) -> list[tuple[str, Callable[[], Parts]]]:
        """Return the title and the parts of each section; the later ones show the first run only."""
        run = self.runs[0]
        suffix = f" of {escape(run.name)}" if len(self.runs) > 1 else ""
        return [
            ("Comparison", self._comparison),
            ("Loss", self._loss),
            ("Scores", lambda: [curves.scores(self.runs)]),
            ("Agreement", self._agreement),
            ("Training curves", self._training_curves),
            ("Time breakdown", self._time),
            (f"Pipeline{suffix}", lambda: _timeline(run)),
            (f"Layers of each rank{suffix}", lambda: _layout(run)),
            (f"Memory{suffix}", lambda: [bars.memory(run)]),
            (f"Data{suffix}", lambda: _data(run)),
            (f"Events{suffix}", lambda: _events(run)),
            (f"Options that differ from the defaults{suffix}", lambda: _options(run)),
            (f"Environment{suffix}", lambda: _environment(run)),
        ]

    def _section(self, title: str, parts: Callable[[], Parts]) -> str:
        """Return a section as HTML; empty if it has no parts."""
        content: list[str] = []
        try:
            for part in parts():
                if part:
                    content.append(self._figure(part, title) if isinstance(part, Picture) else part)
        except DAMAGE_ERRORS as error:
            message = escape(f"{type(error).__name__}: {error}")
            content.append(f'<p class="bad">Cannot be shown: {message}</p>')
        return f"<section><h2>{title}</h2>{''.join(content)}</section>" if content else ""

    def _figure(self, picture: Picture, title: str) -> str:
        self.pictures.append(picture)
        wide, narrow = svg(picture, WIDE, title), svg(picture, NARROW, title)
        caption = escape(picture.caption, 1000)
        images = f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'
        return f"<figure>{images}<figcaption>{caption}</figcaption></figure>"

    def _header(self) -> str:
        if len(self.runs) > 1:
            title, tiles = f"{len(self.runs)} runs compared", ""
            lead = ", ".join(f"{escape(run.name)}: {_outcome(run)}" for run in self.runs)
        else:
            run = self.runs[0]
            title = f"{escape(run.name)}: {_outcome(run)}"
            facts = [escape(run.status.get(name) or "") for name in ("reason", "host")]
            lead = " · ".join(fact for fact in (*facts, _format_time(run.status.get("time"))) if fact)
            metrics = "".join(
                f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for name, value in key_metrics(run)
            )
            tiles = f'<div class="tiles">{metrics}</div>'
        problems = [f"{run.name}: {problem}" for run in self.runs for problem in run.problems]
        items = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
        damaged = f'<section><h2 class="bad">Damaged files</h2><ul>{items}</ul></section>' if items else ""
        return f'<h1>{title}</h1><p class="lead">{lead}</p>{tiles}{damaged}'

    # ---- sections of all runs

    def _comparison(self) -> Iterator[str]:
        if len(self.runs) < 2:
            return
        metrics_by_run = [{"outcome": _outcome(run), **dict(key_metrics(run))} for run in self.runs]
        names = dict.fromkeys(name for metrics in metrics_by_run for name in metrics)
        rows = [[f"<th>{name}</th>", *(metrics.get(name, "") for metrics in metrics_by_run)] for name in names]
        yield _table(rows, ["", *(escape(run.name) for run in self.runs)])

    def _loss(self) -> Parts:
        if any(run.curve("train/loss") or run.validation for run in self.runs):
            yield curves.loss(self.runs)
        else:
            yield "<p>No loss was logged yet.</p>"

    def _agreement(self) -> Parts:
        first, *others = self.runs
        comparable = []
        for other in others:
            if points := differences(first, other):
                comparable.append(other)
                text = curves.describe_agreement(points)
                yield f'<p class="statement">{escape(first.name)} and {escape(other.name)}: {text}.</p>'
        if comparable:
            yield curves.agreement([first, *comparable])

    def _training_curves(self) -> Parts:
        if any(run.curve(key) for run in self.runs for key, _ in curves.STEP_CURVES):
            yield curves.training_curves(self.runs)
        yield curves.other_losses(self.runs)
        yield curves.experts(self.runs)

    def _time(self) -> Parts:
        timed = [run for run in self.runs if bars.time_by_phase(run)]
        for run in timed:
            name = f"{escape(run.name)}: " if len(self.runs) > 1 else ""
            if run.report.get("bottleneck"):
                advice = escape(run.report.get("advice", ""))
                yield f'<p class="statement">{name}<b>{escape(run.report["bottleneck"])}</b>: {advice}.</p>'
            elif reason := run.report.get("no_advice_reason"):
                yield f'<p class="statement">{name}The bottleneck is unknown: {escape(reason)}.</p>'
        if timed:
            yield bars.time_bars(timed)
        else:
            yield "<p>Unknown, because report.json is not there; a run writes it at its end.</p>"


# ---- sections of one run


def _timeline(run: RunData) -> Parts:
    if run.timeline is not None:
        yield pipeline.timeline(run.timeline)
    elif run.mesh["pp"] > 1:
        yield "<p>No step was timed; use <code>--profile-pipeline STEP</code>.</p>"


def _layout(run: RunData) -> Parts:
    if picture := bars.layout(run):
        yield picture
    elif stages := bars.stage_layers(run):
        yield f"<p>{len(stages):,} stages on {run.mesh['pp']:,} pipeline ranks are too many for a picture.</p>"


def _data(run: RunData) -> Iterator[str]:
    configured = run.run_info.get("data")
    if isinstance(configured, str):
        lines = "<br>".join(escape(line) for line in configured.splitlines()[:50])
        yield f'<p class="statement">Configured: {lines}</p>'
    from tools.checkpoint import format_data_usage

    usage: list[str] = []
    try:
        if any(run.directory.glob("iter_*")):
            usage = format_data_usage(parse_location(str(run.directory))).splitlines()
    except (CheckpointError, DataError) as error:
        usage = [str(error)]
    if usage:
        lines = "<br>".join(escape(line, 200) for line in usage[:60])
        yield f"<p>Used, according to the newest checkpoint:</p><pre>{lines}</pre>"


def _events(run: RunData) -> Iterator[str]:
    rows = []
    for event in run.events:
        name, step = escape(event.get("event", ""), 30), finite_number(event.get("step"))
        if name == "heartbeat":
            continue
        details = event.get("text") or event.get("cause") or event.get("reason") or event.get("outcome") or ""
        step_text = f"{step:,.0f}" if step is not None else ""
        rows.append([_format_time(event.get("time")), step_text, name, escape(details)])
    if rows:
        yield _table(rows[-MAX_EVENTS:], ["time", "step", "event", ""])
    if len(rows) > MAX_EVENTS:
        yield f"<p>The last {MAX_EVENTS} of {len(rows):,} events.</p>"


def _options(run: RunData) -> Iterator[str]:
    rows = []
    for _, name, value, source in option_sources(run, PRESETS):
        rows.append([f"<th>{html.escape(name)}</th>", f"<code>{html.escape(value)}</code>", html.escape(source)])
    if rows:
        yield _table(rows, ["option", "value", "set by"])
    if command := as_list(run.run_info.get("command")):
        text = escape(" ".join(map(str, command)), 5000)
        yield f"<details><summary>Command line</summary><pre>{text}</pre></details>"


def _environment(run: RunData) -> Iterator[str]:
    machine = as_dict(run.run_info.get("machine"))
    hosts = as_list(run.run_info.get("hosts"))
    host_names = ", ".join(map(str, hosts[:MAX_HOSTS]))
    if len(hosts) > MAX_HOSTS:
        host_names += f" and {len(hosts) - MAX_HOSTS} more"
    facts = {"hosts": host_names, "device": run.run_info.get("device", ""), **machine}
    rows = []
    for name, value in facts.items():
        if value and name != "environment":
            rows.append([f"<th>{escape('GPU' if name == 'gpu' else name)}</th>", escape(value)])
    if rows:
        yield _table(rows)
    if variables := str(machine.get("environment") or ""):
        lines = "<br>".join(escape(line) for line in variables.splitlines()[:200])
        yield f"<details><summary>Environment variables</summary><pre>{lines}</pre></details>"


# ---- parts of sections


def _table(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Return a table. Cells are HTML; one that is a <th> already is used as it is."""
    head = f"<thead><tr>{''.join(f'<th>{name}</th>' for name in header)}</tr></thead>" if header else ""
    body = ""
    for row in rows:
        cells = "".join(cell if cell.startswith("<th>") else f"<td>{cell}</td>" for cell in row)
        body += f"<tr>{cells}</tr>"
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _outcome(run: RunData) -> str:
    css_class = "bad"
    if run.outcome in GOOD_OUTCOMES:
        css_class = "good"
    elif run.outcome in OPEN_OUTCOMES:
        css_class = ""
    return f'<span class="{css_class}">{escape(run.outcome)}</span>'


def _format_time(time: object) -> str:
    """Return a time of a file, to the second."""
    return escape(str(time or "")[:19].replace("T", " "))


def key_metrics(run: RunData) -> Iterator[tuple[str, str]]:
    """Yield the known (name, value) of a run's most important metrics, as HTML."""
    report, history = run.report, as_dict(run.report.get("run"))
    step, tokens = _progress(run)
    if (training_loss := run.last("train/loss")) is not None:
        yield "training loss", f"{training_loss:.4f}"
    for name, points in list(run.validation.items())[:3]:
        last_step, _, validation_loss = points[-1]
        suffix = f", step {last_step:,.0f}" if last_step != step else ""
        yield f"{'validation' if name == 'valid' else html.escape(name)} loss{suffix}", f"{validation_loss:.4f}"
    if step is not None:
        total = finite_number(run.run_info.get("steps"))
        yield "steps", f"{step:,.0f} of {total:,.0f}" if total else f"{step:,.0f}"
    if tokens is not None:
        yield "tokens", format_number(tokens)
    if (parameters := finite_number(run.run_info.get("parameters"))) is not None:
        yield "parameters", format_number(parameters)
    if (speed := run.last("perf/tokens_per_s_per_gpu")) is not None:
        yield "tokens/s", format_number(speed * run.devices)
    if (mfu := run.last("perf/mfu")) is not None:
        yield "MFU", f"{100 * mfu:.1f} %"
    if (hfu := run.last("perf/hfu")) is not None:
        yield "HFU", f"{100 * hfu:.1f} %"
    if (noise_scale := run.last("train/noise_scale")) is not None:
        yield "batch size by noise scale", f"{format_number(noise_scale)} tokens"
    if (wall_s := finite_number(history.get("wall_s") or report.get("wall_s"))) is not None:
        yield "wall time", duration(wall_s)
    if (goodput := finite_number(history.get("goodput"))) is not None:
        yield "goodput", f"{100 * goodput:.1f} %"
    if (peak_gib := run.last("mem/max_allocated_gib")) is not None:
        yield "peak memory", f"{peak_gib:.2f} GiB"
    if (cost := finite_number(history.get("cost"))) is not None:
        yield "cost", f"{cost:,.2f}"


def _progress(run: RunData) -> tuple[float | None, float | None]:
    """Return the last step and its tokens, from metrics or from status.json, which is written less often."""
    steps, tokens = [finite_number(run.status.get("step"))], [finite_number(run.status.get("tokens"))]
    if losses := run.curve("train/loss"):
        steps.append(losses[-1][0])
        tokens.append(losses[-1][1])
    last_step = max((value for value in steps if value is not None), default=None)
    last_tokens = max((value for value in tokens if value is not None), default=None)
    return last_step, last_tokens
