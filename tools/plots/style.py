"""The style of all pictures: colors for light and dark, widths, SVG for a page, and image files.

A picture is a function from its width to a matplotlib figure, independent of where it is shown. In a page, its colors
are CSS variables, so that the page switches between light and dark, and its text is text in the page's font. The colors
of the series are those of Okabe and Ito, which can be told apart with any color vision.
"""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.common.optional_packages import MissingPackageError, missing_package_message

WIDE, NARROW = 8.6, 3.7  # inches: the text width of a page, and a phone
DPI = 150  # of a PNG
COLORS = {  # name: (on white, on black)
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
DARK_COLORS = ("blue", "green", "vermilion", "purple")  # colors on which text is white
MARKERS = ("o", "s", "^", "D", "v", "P")
MAX_TEXT = 90  # characters of a text from a run's files


@dataclass(frozen=True)
class Picture:
    """A picture that is not drawn yet.

    Attributes:
        name: The stem of its file.
        draw: Returns the figure for a width in inches.
    """

    name: str
    caption: str
    draw: Callable[[float], Any]


def color(name: str) -> str:
    """Return a color for matplotlib, which `svg` replaces by a CSS variable."""
    return COLORS[name][0]


def text_color(background: str) -> str:
    """Return the color of text on the color with this name."""
    return "white" if background in DARK_COLORS else "black"


def sanitize(text: object, max_length: int = MAX_TEXT) -> str:
    """Return a text from outside as one line that fonts and encodings can represent."""
    printable = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text)[: max_length + 1])
    return printable if len(printable) <= max_length else printable[: max_length - 1] + "…"


def figure(width: float, heights: Sequence[float], *, share_x: bool = False) -> tuple[Any, list[Any]]:
    """Return a figure and its axes, one above the other; sizes in inches."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03)
    fig = Figure((width, sum(heights)), layout=layout, facecolor=color("paper"))
    grid = fig.subplots(len(heights), 1, squeeze=False, sharex=share_x, height_ratios=list(heights))
    axes = [row[0] for row in grid]
    for axis in axes:
        axis.set_facecolor(color("paper"))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(True, axis="y", color=color("line"), linewidth=0.7)
        axis.set_axisbelow(True)
    return fig, axes


def horizontal_bars(axis: Any, value_grid: bool = False) -> None:
    """Prepare an axis for horizontal bars, the first at the top, with vertical grid lines if `value_grid`."""
    axis.grid(False)
    if value_grid:
        axis.grid(True, axis="x", color=color("line"), linewidth=0.7)
    axis.spines["left"].set_visible(False)
    axis.invert_yaxis()


def _rc_context() -> Any:
    from matplotlib import rc_context

    params: Any = {
        "font.size": 9,
        "axes.labelsize": 9,
        "axes.titlesize": 9,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        "legend.fontsize": 9,
        "text.color": color("ink"),
        "axes.labelcolor": color("muted"),
        "xtick.color": color("muted"),
        "ytick.color": color("muted"),
        "axes.edgecolor": color("line"),
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "legend.frameon": False,
        "legend.handlelength": 1.4,
        "text.parse_math": False,
        "axes.unicode_minus": True,
        "svg.fonttype": "none",
    }
    return rc_context(params)


def save(picture: Picture, path: Path | str, width: float = WIDE) -> None:
    """Write a picture in the format of the path's suffix.

    Raises:
        OSError: if the file cannot be written.
        ValueError: if matplotlib does not know the format.
        MissingPackageError: without matplotlib.
    """
    fig = _draw(picture, width)
    with _rc_context(), _ignore_warnings():
        fig.savefig(path, dpi=DPI)


def _draw(picture: Picture, width: float) -> Any:
    try:
        with _rc_context():
            return picture.draw(width)
    except ImportError:
        raise MissingPackageError(missing_package_message("a picture", "matplotlib")) from None


def _ignore_warnings() -> Any:
    """Ignore warnings, such as those of a glyph that matplotlib's font lacks; a page uses the reader's fonts."""
    return warnings.catch_warnings(action="ignore")


def svg(picture: Picture, width: float, label: str) -> str:
    """Return a picture as SVG for a page.

    Args:
        label: What the picture shows, as HTML, for screen readers.
    """
    fig, stream = _draw(picture, width), io.StringIO()
    from matplotlib import rc_context

    with _rc_context(), rc_context({"svg.hashsalt": f"{picture.name}{width}"}), _ignore_warnings():
        fig.savefig(stream, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = re.sub(r"^.*?<svg ", "<svg ", stream.getvalue(), flags=re.DOTALL)
    text = re.sub(
        r'<svg .*?viewBox="([^"]*)".*?>',
        lambda tag: f'<svg viewBox="{tag[1]}" role="img" aria-label="{label}">',
        text,
        count=1,
    )
    text = re.sub(r"<(metadata|style).*?</\1>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    text = re.sub(r' d="[^"]*"', lambda path: _shorten_path(path[0]), text)
    text = re.sub(
        r"font-family: [^;\"]*;?|font: (\S+) [^;\"]*;?", lambda font: f"font-size: {font[1]};" if font[1] else "", text
    )
    variables = {light: f"var(--{name})" for name, (light, _) in COLORS.items()}
    return re.sub(r"(?<=: )#[0-9a-f]{6}", lambda hex_color: variables.get(hex_color[0], hex_color[0]), text)


def _shorten_path(path: str) -> str:
    """Return the coordinates of an SVG path with two decimals."""
    return re.sub(r"(\.\d\d)\d+", r"\1", path.replace("\n", ""))


def format_number(number: float) -> str:
    """Return a number with three significant digits and a unit.

    >>> format_number(1536), format_number(2_000_000), format_number(3.25e12), format_number(12)
    ('1.54k', '2M', '3.25T', '12')
    """
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def mark_zero_difference(axis: Any, floor: float) -> None:
    """Label the lower end of a logarithmic axis of differences, `floor`, as "equal"."""
    default_format = axis.yaxis.get_major_formatter()
    axis.yaxis.set_major_formatter(lambda value, n: "equal" if value <= 1.01 * floor else default_format(value, n))
    axis.set_yticks([floor], ["equal"], minor=True)
    axis.set_ylim(floor, max(axis.get_ylim()[1], 10 * floor))


def legend(fig: Any, axis: Any, width: float) -> None:
    """Add the legend of `axis` above all axes of the figure, which grows for it."""
    handles, labels = axis.get_legend_handles_labels()
    max_length = max(map(len, labels), default=1)
    columns = max(1, min(len(labels), 4, int(width / (0.45 + 0.075 * max_length))))
    fig.set_figheight(fig.get_figheight() + 0.19 * -(-len(labels) // columns))
    fig.legend(handles, labels, ncols=columns, loc="outside upper left", borderaxespad=0.2, columnspacing=1.4)
