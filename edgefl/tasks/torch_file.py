"""A model as a file for torch: a state dict that `torch.load(weights_only=True)` reads."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from edgefl.errors import TaskError
from edgefl.files import open_whole, store_error
from edgefl.tasks.accelerators import import_torch
from edgefl.types import Tensors

FILE_MODE = 0o644


def export_torch(model: Tensors, path: Path) -> int:
    """Writes the tensors by name and returns the bytes of the file; it appears only when it was read back.

    Raises:
        TaskError: torch is missing, or does not give back what was written.
        StoreError: the file cannot be written.
    """
    backend = import_torch()
    # torch takes writable arrays only, so each is copied.
    dense = {name: np.array(t if isinstance(t, np.ndarray) else t.dense()) for name, t in model.items()}
    content = io.BytesIO()
    backend.save({name: backend.from_numpy(array) for name, array in dense.items()}, content)
    content.seek(0)
    back = backend.load(content, weights_only=True)
    if list(back) != list(dense) or any(
        not np.array_equal(back[n].numpy(), a, equal_nan=True) for n, a in dense.items()
    ):
        raise TaskError("torch does not read back the tensors that it was given; nothing was written")
    try:
        with open_whole(path, mode=FILE_MODE) as file:
            file.write(content.getbuffer())
    except OSError as error:
        raise store_error(path, error) from None
    return content.getbuffer().nbytes
