"""Process globals that Flower strategies depend on: a signing identity, and the random generators.

The only module here that uses a private module of Flower, and the only one that seeds the global generators, so that
the same seed gives the same run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from flwr.supercore.task_identity import TaskIdentity

PLACEHOLDER_ID = 1
"""Messages of a strategy in this process never leave it; any number will do."""


def ensure_identity() -> None:
    """Makes `flwr.app.Message` usable in this process; an existing ServerApp or ClientApp identity stays."""
    for name in ("run_id", "task_id", "node_id"):
        try:
            getattr(TaskIdentity, name)
        except RuntimeError:
            setattr(TaskIdentity, name, PLACEHOLDER_ID)


@contextmanager
def seed_global_generators(seed: int) -> Iterator[None]:
    """Seeds the global generators for the block and restores them afterwards."""
    # A thread that draws meanwhile gets predictable numbers: secrets never come from these generators.
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002 Flower's strategies use it
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 likewise
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002 likewise
