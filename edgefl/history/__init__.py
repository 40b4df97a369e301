"""The history of a store in words, as plots and as files; kinds and axes of plots.

`figures` draws, from the arrays of `series`. What stands here loads without NumPy and matplotlib.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType

from edgefl.core.errors import MissingPackageError, format_install_command

PLOT_KINDS = MappingProxyType(
    {
        "accuracy": "of the global model; where devices have models of their own, also their mean and the worst",
        "loss": "of evaluations, and of training",
        "disagreement": "consensus error of a decentralised run: how far the devices' models lie apart",
        "timeline": "what each device did: computing, sending, waiting",
        "throughput": "samples trained on in a second",
        "traffic": "bytes in a second, up and down",
        "computing-time": "share of the time that each device computes",
        "staleness": "how many versions old the applied updates were",
    }
)
"""Kinds of sheet. Without one, accuracy and loss share a sheet."""
CURVE_KINDS = ("accuracy", "loss", "disagreement")
"""Kinds with a selectable x axis."""
AXES = ("rounds", "time", "bytes")
FILE_SUFFIXES = (".png", ".pdf", ".svg")


def check_matplotlib() -> None:
    """Checks that matplotlib is installed; it is an optional extra.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        import_module("matplotlib")
    except ImportError as error:
        raise MissingPackageError(
            f"figures are drawn with matplotlib, which cannot be imported ({error}); "
            f"install it with: {format_install_command('matplotlib')}"
        ) from None
