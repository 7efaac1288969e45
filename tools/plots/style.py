"""The canvas of every picture: colours for light and dark, widths, SVG for a page, and files.

A picture is a function of its width that makes a figure of matplotlib; nothing else knows where it goes. In a page its
colours are CSS variables, by name, so that the reader's light or dark is the page's business, and its text is text in
the page's font. The series are Okabe and Ito's, which people with any colour vision tell apart.
"""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megalite.common.optional_packages import MissingPackageError, missing_package_message

WIDE, NARROW = 8.6, 3.7  # inches: of a page's text, and of a telephone
DPI = 150  # of a PNG
COLOURS = {  # name: (on white, on black)
    "paper": ("#fffffe", "#191c20"),
    "ink": ("#1c2127", "#e6e9ec"),
    "muted": ("#5a636e", "#a0a9b3"),
    "line": ("#dfe3e7", "#353b43"),
    "blue": ("#0072b2", "#4ea8de"),
    "vermilion": ("#d55e00", "#ff8240"),
    "green": ("#009e73", "#2fc79a"),
    "purple": ("#b5588f", "#e59ac6"),
    "orange": ("#e69f00", "#f2b63c"),
    "sky": ("#56b4e9", "#9bd4f7"),
}
SERIES = ("blue", "vermilion", "green", "purple", "orange", "sky")
MARKERS = ("o", "s", "^", "D", "v", "P")
TEXT = 90  # characters of a name that comes from outside


class Picture(NamedTuple):
    """`name`: of its file. `caption`: one sentence. `draw`: from the width in inches to a figure."""

    name: str
    caption: str
    draw: Callable[[float], Any]


def ink(name: str) -> str:
    """The colour as matplotlib takes it, which `svg` finds again."""
    return COLOURS[name][0]


def clean(text: object, most: int = TEXT) -> str:
    """A text from outside as one line that fonts and encodings can take."""
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text)[: most + 1])
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def figure(width: float, heights: Sequence[float], *, share_x: bool = False) -> tuple[Any, list[Any]]:
    """A figure and its axes, one above the other; heights in inches."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    fitted = ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03)
    fig = Figure((width, sum(heights)), layout=fitted, facecolor=ink("paper"))
    many = fig.subplots(len(heights), 1, squeeze=False, sharex=share_x, height_ratios=list(heights))
    for (axis,) in many:
        axis.set_facecolor(ink("paper"))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(True, axis="y", color=ink("line"), linewidth=0.7)
        axis.set_axisbelow(True)
    return fig, [row[0] for row in many]


def as_rows(axis: Any, values: bool = False) -> None:
    """Bars in rows, the first one above; `values`: with lines along which their lengths are read."""
    axis.grid(False)
    if values:
        axis.grid(True, axis="x", color=ink("line"), linewidth=0.7)
    axis.spines["left"].set_visible(False)
    axis.invert_yaxis()


def _style() -> Any:
    from matplotlib import rc_context

    muted = ink("muted")
    sizes = dict.fromkeys(("font.size", "axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 9)
    colours = {"text.color": ink("ink"), "axes.labelcolor": muted, "xtick.color": muted, "ytick.color": muted}
    others = {"axes.edgecolor": ink("line"), "xtick.major.size": 0, "ytick.major.size": 0, "legend.frameon": False}
    plain = {"text.parse_math": False, "axes.unicode_minus": True, "svg.fonttype": "none", "axes.titlesize": 9}
    every: Any = {**sizes, **colours, **others, **plain, "legend.handlelength": 1.4}
    return rc_context(every)


def save(picture: Picture, path: Path | str, width: float = WIDE) -> None:
    """As a file, in the format of its suffix. Raises OSError, ValueError where matplotlib does not know the format, and
    MissingPackage."""
    made = _drawn(picture, width)
    with _style(), _quiet():
        made.savefig(path, dpi=DPI)


def _drawn(picture: Picture, width: float) -> Any:
    try:
        with _style():
            return picture.draw(width)
    except ImportError:
        raise MissingPackageError(missing_package_message("a picture", "matplotlib")) from None


def _quiet() -> Any:
    """A glyph that matplotlib's font lacks is shown as a box; a page has the reader's fonts."""
    return warnings.catch_warnings(action="ignore")


def svg(picture: Picture, width: float, label: str) -> str:
    """For a page. `label`: what it shows, as HTML, to those who cannot see it."""
    made, text = _drawn(picture, width), io.StringIO()
    from matplotlib import rc_context

    with _style(), rc_context({"svg.hashsalt": f"{picture.name}{width}"}), _quiet():
        made.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    found = re.sub(r"^.*?<svg ", "<svg ", text.getvalue(), flags=re.DOTALL)
    named = lambda box: f'<svg viewBox="{box[1]}" role="img" aria-label="{label}">'  # noqa: E731
    found = re.sub(r'<svg .*?viewBox="([^"]*)".*?>', named, found, count=1)
    found = re.sub(r"<(metadata|style).*?</\1>|<!--.*?-->", "", found, flags=re.DOTALL)
    found = re.sub(r'<g id="[^"]*">', "<g>", found)
    found = re.sub(r' d="[^"]*"', lambda d: re.sub(r"(\.\d\d)\d+", r"\1", d[0].replace("\n", "")), found)
    sized = lambda font: f"font-size: {font[1]};" if font[1] else ""  # noqa: E731
    found = re.sub(r"font-family: [^;\"]*;?|font: (\S+) [^;\"]*;?", sized, found)
    names = {light: f"var(--{name})" for name, (light, _) in COLOURS.items()}
    return re.sub(r"(?<=: )#[0-9a-f]{6}", lambda c: names.get(c[0], c[0]), found)


def short(number: float) -> str:
    """
    >>> short(1536), short(2_000_000), short(3.25e12), short(12)
    ('1.54k', '2M', '3.25T', '12')
    """
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def equal_edge(axis: Any, floor: float) -> None:
    """The lower end of a logarithmic axis of distances is `floor`, and says that what lies there is equal."""
    usual = axis.yaxis.get_major_formatter()
    axis.yaxis.set_major_formatter(lambda value, n: "equal" if value <= 1.01 * floor else usual(value, n))
    axis.set_yticks([floor], ["equal"], minor=True)
    axis.set_ylim(floor, max(axis.get_ylim()[1], 10 * floor))


def legend(made: Any, axis: Any, width: float) -> None:
    """Above all axes of the figure, which grows for it: what `axis` shows."""
    handles, labels = axis.get_legend_handles_labels()
    longest = max(map(len, labels), default=1)
    columns = max(1, min(len(labels), 4, int(width / (0.45 + 0.075 * longest))))
    made.set_figheight(made.get_figheight() + 0.19 * -(-len(labels) // columns))
    made.legend(handles, labels, ncols=columns, loc="outside upper left", borderaxespad=0.2, columnspacing=1.4)
