"""What edgefl uses of Flower that its authors do not document, in this file alone: a newer release may have another.

A file of its own, since boards and processes of ServerApps use it, which have no need of `strategy`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING

from edgefl.core.errors import TaskError

if TYPE_CHECKING:
    from flwr.app import Error, Message, Metadata, RecordDict

PLACEHOLDER_ID = 1
"""Messages of a strategy in this process never leave it; any number will do."""


def make_message(metadata: Metadata, *, content: RecordDict | None = None, error: Error | None = None) -> Message:
    """Returns a message with all of its metadata given.

    Raises:
        TaskError: the installed Flower cannot do it.
    """
    with _name_releases():
        from flwr.app.message import make_message as make  # noqa: PLC0415 only where Flower runs
    return make(metadata=metadata, content=content, error=error)


def ensure_identity() -> None:
    """Makes `flwr.app.Message` usable in this process; an existing ServerApp or ClientApp identity stays.

    Raises:
        TaskError: the installed Flower cannot do it.
    """
    with _name_releases():
        from flwr.supercore.task_identity import TaskIdentity  # noqa: PLC0415 only where Flower runs

        for name in ("run_id", "task_id", "node_id"):
            try:
                getattr(TaskIdentity, name)
            except RuntimeError:
                setattr(TaskIdentity, name, PLACEHOLDER_ID)


@contextmanager
def _name_releases() -> Iterator[None]:
    """Turns what a name that is missing raises into an error that names the releases that have it."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        from edgefl.system.diagnostics import FLOWER_RELEASES  # noqa: PLC0415 only where it is needed

        tested = " and ".join(FLOWER_RELEASES)
        raise TaskError(
            f"edgefl is tested with Flower {tested}, found {version('flwr')}, which lacks what it uses ({error}): "
            f"pip install 'flwr=={FLOWER_RELEASES[-1]}.*'"
        ) from None
