"""How every sheet looks, and how it is written: the same data gives the same bytes."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from io import BytesIO
from types import MappingProxyType
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from edgefl.errors import UsageError
from edgefl.history.plots.names import ENDINGS

# Okabe and Ito's colours, told apart by the colour-blind too; marks, lines and hatches tell them apart in print.
# Yellow is left out: thin lines of it are lost on paper.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
LINES = ("-", "--", "-.", ":")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
HATCHES = ("", "///", "...", "\\\\\\", "xxx", "---", "+++", "ooo")
GREY = "#666666"
WIDTH_INCHES = 9.0
LETTERS_PER_INCH = 10
"""Of a title."""
_RULES: Mapping[Any, Any] = MappingProxyType(
    {
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "axes.titlesize": 10,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.linewidth": 0.4,
        "grid.color": "#CCCCCC",
        "hatch.linewidth": 0.6,
        "legend.frameon": False,
        "lines.linewidth": 1.4,
        "lines.markersize": 5,
        "figure.dpi": 100,
        "savefig.dpi": 200,
        "pdf.fonttype": 42,
        "svg.hashsalt": "edgefl",
    }
)
# Left to itself matplotlib writes its version and the time of day.
_METADATA: Mapping[str, dict[str, None]] = MappingProxyType(
    {
        "png": {"Software": None},
        "svg": {"Date": None, "Creator": None},
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    }
)
_SECONDS = ((0.5, 1e-3, "ms"), (300, 1.0, "s"), (3 * 3600, 60.0, "min"), (72 * 3600, 3600.0, "h"))
_BYTES = ((1e3, 1.0, "B"), (1e6, 1e3, "kB"), (1e9, 1e6, "MB"), (1e12, 1e9, "GB"))


def styled() -> AbstractContextManager[Any]:
    """Returns a context in which figures are made and written as here."""
    return mpl.rc_context(dict(_RULES))


def new_figure(height_inches: float, *, width_inches: float = WIDTH_INCHES, title: str = "") -> Figure:
    """Returns an empty sheet that belongs to no screen."""
    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    if title:
        figure.suptitle(textwrap.fill(literal(title, 200), int(LETTERS_PER_INCH * width_inches)))
    return figure


def encoded(figure: Figure, ending: str) -> bytes:
    """Returns the sheet as a file's content.

    Args:
        figure: what to draw.
        ending: one of `ENDINGS`.

    Raises:
        UsageError: it is none of them.
    """
    if ending not in ENDINGS:
        raise UsageError(f"a sheet's file must end with {', '.join(ENDINGS)}, got {ending or 'no ending'!r}")
    kind, target = ending.removeprefix("."), BytesIO()
    with styled(), warnings.catch_warnings():
        # A name may hold letters that the font has not; they are drawn as boxes.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure.savefig(target, format=kind, metadata=dict(_METADATA[kind]))
    return target.getvalue()


def literal(text: str, most: int = 48) -> str:
    """Returns a name that a person chose so that it is shown as it stands: no mathematics, one line, not too long."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text).strip()
    shown = shown if len(shown) <= most else f"{shown[: most - 1]}…"
    # A label that begins with an underscore is hidden.
    return f"{' ' * shown.startswith('_')}{shown}".replace("$", r"\$")


def time_unit(longest_s: float) -> tuple[float, str]:
    """Returns by what seconds are divided to be legible, and what they are then."""
    return _unit(longest_s, _SECONDS, (86_400.0, "days"))


def bytes_unit(most: float) -> tuple[float, str]:
    """Returns by what a number of bytes is divided to be legible, and what they are then."""
    return _unit(most, _BYTES, (1e12, "TB"))


def _unit(most: float, units: Sequence[tuple[float, float, str]], largest: tuple[float, str]) -> tuple[float, str]:
    return next(((divisor, name) for limit, divisor, name in units if most < limit), largest)


def number(value: float) -> str:
    """Returns a number for a label: three digits, thousands apart."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def count_axis(axes: Axes, most_ticks: int = 5) -> None:
    """Makes the x axis count whole things."""
    axes.xaxis.set_major_locator(MaxNLocator(most_ticks, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def logarithmic_axis(axes: Axes) -> None:
    """Makes the x axis logarithmic, with plain numbers."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(numticks=6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def legend_below(figure: Figure, *groups: Mapping[str, Any]) -> None:
    """Puts a legend under the panels, where it covers no data; each group of entries begins a line of its own."""
    filled = [group for group in groups if group]
    letters = max(len(name) for group in filled for name in group) + 7
    columns = max(1, min(max(map(len, filled)), int(figure.get_figwidth() * 12.5 / letters)))
    cells: list[tuple[str, Any]] = []
    for group in filled:
        blanks = -len(group) % columns if len(filled) > 1 else 0
        cells += [*group.items(), *[("", Line2D([], [], linestyle="none"))] * blanks]
    # matplotlib fills column after column; people read line after line.
    ordered = [cells[place] for column in range(columns) for place in range(column, len(cells), columns)]
    labels, handles = [label for label, _ in ordered], [handle for _, handle in ordered]
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
