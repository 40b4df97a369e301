"""What can be drawn, and against what. Imports nothing heavy."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType

from edgefl.errors import MissingPackageError, install_line

KINDS = MappingProxyType(
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
CURVES = ("accuracy", "loss", "disagreement")
"""The kinds that have an x axis to choose."""
AXES = ("rounds", "time", "bytes")
ENDINGS = (".png", ".pdf", ".svg")


def check_matplotlib() -> None:
    """Returns where figures can be drawn; matplotlib is an extra that a board need not have.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        import_module("matplotlib")
    except ImportError as error:
        raise MissingPackageError(
            f"figures are drawn with matplotlib, which cannot be imported ({error}); "
            f"install it with: {install_line('matplotlib')}"
        ) from None
