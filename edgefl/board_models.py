"""Makes the file that boards deploy, in a process of its own, since exporting may need torch."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from edgefl.types import Scalar


def export_for_boards(task: str, options: Mapping[str, Scalar], model: Path, out: Path) -> None:
    """Writes the ONNX file of a safetensors file of this task.

    A coordinator stays for months: the hundreds of megabytes that torch takes go with the child.

    Raises:
        EdgeflError: the task cannot be exported here, or the model is not of this task.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as child:
        child.submit(_export, task, dict(options), model, out).result()


def _export(task: str, options: Mapping[str, Scalar], model: Path, out: Path) -> None:
    from edgefl.storage.checkpoints import load_model_file  # noqa: PLC0415 in the child alone
    from edgefl.tasks.onnx_export import export_onnx  # noqa: PLC0415 likewise
    from edgefl.tasks.registry import make_task  # noqa: PLC0415 likewise

    tensors = load_model_file(model)
    export_onnx(make_task(task, options), tensors, out, options=options, model_sha256=model.stem)
