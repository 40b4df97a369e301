"""Common style and deterministic encoding of sheets: the same data gives the same bytes."""

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

from edgefl.core.errors import UsageError
from edgefl.core.safe_text import escape_text
from edgefl.history import FILE_SUFFIXES

# Okabe and Ito's colours suit the colour-blind; marks, lines and hatches distinguish them in print.
# Yellow is omitted: its thin lines are invisible on paper.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
HATCHES = ("", "///", "...", "\\\\\\", "xxx", "---", "+++", "ooo")
GREY = "#666666"
WIDTH_INCHES = 9.0
CHARS_PER_INCH = 10
"""Of a title."""
_RC_PARAMS: Mapping[Any, Any] = MappingProxyType(
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
# By default matplotlib writes its version and the time of day.
_METADATA: Mapping[str, dict[str, None]] = MappingProxyType(
    {
        "png": {"Software": None},
        "svg": {"Date": None, "Creator": None},
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    }
)
_TIME_UNITS = ((0.5, 1e-3, "ms"), (300, 1.0, "s"), (3 * 3600, 60.0, "min"), (72 * 3600, 3600.0, "h"))
_BYTE_UNITS = ((1e3, 1.0, "B"), (1e6, 1e3, "kB"), (1e9, 1e6, "MB"), (1e12, 1e9, "GB"))


def apply_style() -> AbstractContextManager[Any]:
    """Returns a context with this style for creating and writing figures."""
    return mpl.rc_context(dict(_RC_PARAMS))


def make_figure(height_inches: float, *, width_inches: float = WIDTH_INCHES, title: str = "") -> Figure:
    """Returns an empty figure without a screen."""
    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    if title:
        figure.suptitle(textwrap.fill(format_label(title, 200), int(CHARS_PER_INCH * width_inches)))
    return figure


def encode_figure(figure: Figure, suffix: str) -> bytes:
    """Returns the figure as a file's content.

    Args:
        figure: to encode.
        suffix: one of `FILE_SUFFIXES`.

    Raises:
        UsageError: an unknown suffix.
    """
    if suffix not in FILE_SUFFIXES:
        raise UsageError(f"a sheet's file must end with {', '.join(FILE_SUFFIXES)}, got {suffix or 'no ending'!r}")
    kind, target = suffix.removeprefix("."), BytesIO()
    with apply_style(), warnings.catch_warnings():
        # A name may hold letters missing in the font; they are drawn as boxes.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure.savefig(target, format=kind, metadata=dict(_METADATA[kind]))
    return target.getvalue()


def format_label(text: str, max_chars: int = 48) -> str:
    """Returns a user-chosen name as a plain label: no mathematics, one line, limited length."""
    label = escape_text(text).strip()
    label = label if len(label) <= max_chars else f"{label[: max_chars - 1]}…"
    # Matplotlib hides labels that begin with an underscore.
    return f"{' ' * label.startswith('_')}{label}".replace("$", r"\$")


def select_time_unit(longest_s: float) -> tuple[float, str]:
    """Returns divisor and name of a legible time unit."""
    return _select_unit(longest_s, _TIME_UNITS, (86_400.0, "days"))


def select_bytes_unit(max_bytes: float) -> tuple[float, str]:
    """Returns divisor and name of a legible unit of bytes."""
    return _select_unit(max_bytes, _BYTE_UNITS, (1e12, "TB"))


def _select_unit(
    most: float, units: Sequence[tuple[float, float, str]], largest: tuple[float, str]
) -> tuple[float, str]:
    return next(((divisor, name) for limit, divisor, name in units if most < limit), largest)


def format_number(value: float) -> str:
    """Returns a number for a label: three digits, with thousands separators."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def set_integer_axis(axes: Axes, max_ticks: int = 5) -> None:
    """Sets integer ticks on the x axis."""
    axes.xaxis.set_major_locator(MaxNLocator(max_ticks, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def set_log_axis(axes: Axes) -> None:
    """Makes the x axis logarithmic, with plain numbers."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(numticks=6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def add_legend_below(figure: Figure, *groups: Mapping[str, Any]) -> None:
    """Adds a legend under the panels, where it covers no data; each group starts its own line."""
    non_empty = [group for group in groups if group]
    width_chars = max(len(name) for group in non_empty for name in group) + 7
    columns = max(1, min(max(map(len, non_empty)), int(figure.get_figwidth() * 12.5 / width_chars)))
    cells: list[tuple[str, Any]] = []
    for group in non_empty:
        padding = -len(group) % columns if len(non_empty) > 1 else 0
        cells += [*group.items(), *[("", Line2D([], [], linestyle="none"))] * padding]
    # matplotlib fills by column; people read by line.
    ordered_cells = [cells[index] for column in range(columns) for index in range(column, len(cells), columns)]
    labels, handles = [label for label, _ in ordered_cells], [handle for _, handle in ordered_cells]
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
