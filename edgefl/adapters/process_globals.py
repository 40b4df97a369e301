"""What Flower strategies take from globals of the process: an identity to sign messages with, and `random`.

The only file here that knows a private module of Flower, and the only one of all that touches the global generators:
it hides them from the strategies, so that the same seed gives the same run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from flwr.supercore.task_identity import TaskIdentity

NOBODY = 1
"""Messages of a strategy in our own process never leave it; any number will do."""


def ensure_identity() -> None:
    """Lets `flwr.app.Message` be made in this process; the identity that a ServerApp or ClientApp has stays."""
    for name in ("run_id", "task_id", "node_id"):
        try:
            getattr(TaskIdentity, name)
        except RuntimeError:
            setattr(TaskIdentity, name, NOBODY)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Gives the block global generators that follow from `seed`; afterwards they are as they were."""
    # A thread that draws meanwhile gets numbers that can be told in advance: secrets never come from these.
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002 Flower's strategies use it
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 likewise
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002 likewise
