"""How all pictures look: told apart without colour, and in colours that colour-blind people tell apart."""

import io
import math
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's eight colours less the yellow, which fades on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)))
HATCHES = ("", "///", "...", "xx", "\\\\\\", "++", "oo")

WIDTH = 7.2  # inches: the width of a page's text
LETTERS = 110  # of a legend, that fit into that width
RC: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "svg.hashsalt": "duoexp",  # the same figures make the same file
    "hatch.linewidth": 0.6,
}


def look(number: int) -> dict[str, Any]:
    """Colour, marker and dashes of the series of a number; 70 series go by before one comes again."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": DASHES[number % len(DASHES)],
    }


def canvas(height: float) -> tuple[Figure, Axes]:
    """An empty picture, height in inches."""
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        return figure, figure.add_subplot()


def image(figure: Figure, form: str) -> bytes:
    """The bytes of an svg or png file."""
    stream = io.BytesIO()
    with matplotlib.rc_context(RC):
        figure.savefig(stream, format=form, dpi=200, metadata={"Date": None} if form == "svg" else None)
    return stream.getvalue()


def legend(figure: Figure, axes: Axes) -> None:
    """Above the plot, where it hides no point; the picture grows by as much as it takes."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, int(LETTERS / (max(map(len, labels)) + 7)))
    figure.set_figheight(figure.get_figheight() + 0.19 * math.ceil(len(labels) / columns))
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, fontsize=8, frameon=False)
