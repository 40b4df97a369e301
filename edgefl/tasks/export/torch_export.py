"""Export of a model for torch: a state dict that `torch.load(weights_only=True)` reads."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from edgefl.core.errors import TaskError
from edgefl.core.types import Tensors
from edgefl.system.atomic_files import make_store_error, open_atomic
from edgefl.tasks.learners.accelerators import import_torch

FILE_MODE = 0o644


def export_torch(model: Tensors, path: Path) -> int:
    """Writes the tensors by name and returns the file's bytes; it appears only after being read back.

    Raises:
        TaskError: torch is missing, or reads back other tensors.
        StoreError: the file cannot be written.
    """
    backend = import_torch()
    # torch takes writable arrays only, so each is copied.
    dense = {name: np.array(t if isinstance(t, np.ndarray) else t.dense()) for name, t in model.items()}
    content = io.BytesIO()
    backend.save({name: backend.from_numpy(array) for name, array in dense.items()}, content)
    content.seek(0)
    read_back = backend.load(content, weights_only=True)
    if list(read_back) != list(dense) or any(
        not np.array_equal(read_back[n].numpy(), a, equal_nan=True) for n, a in dense.items()
    ):
        raise TaskError("torch does not read back the tensors that it was given; nothing was written")
    try:
        with open_atomic(path, mode=FILE_MODE) as file:
            file.write(content.getbuffer())
    except OSError as error:
        raise make_store_error(path, error) from None
    return content.getbuffer().nbytes
