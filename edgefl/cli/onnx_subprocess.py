"""ONNX export in a separate process, since it may need torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edgefl.core.types import Json, Scalar
from edgefl.storage.checkpoints import load_model_file
from edgefl.system.subprocesses import call_in_subprocess, serve_call


def export_for_devices(task: str, options: Mapping[str, Scalar], model: Path, out: Path) -> None:
    """Writes the ONNX file of a task's safetensors file.

    A coordinator runs for months: torch's hundreds of megabytes are freed with the child process.

    Raises:
        EdgeflError: the task cannot be exported here, or the model is not of this task.
    """
    request = {"task": task, "options": dict(options), "model": str(model), "out": str(out)}
    call_in_subprocess(__name__, request, description="exporting the model")


def _run_export(request: Json) -> Json:
    from edgefl.tasks.export.onnx_export import export_onnx  # noqa: PLC0415 only in the child process
    from edgefl.tasks.registry import make_task  # noqa: PLC0415 likewise

    model, options = Path(request["model"]), request["options"]
    tensors = load_model_file(model)
    task = make_task(request["task"], options)
    export_onnx(task, tensors, Path(request["out"]), options=options, model_sha256=model.stem)
    return {}


if __name__ == "__main__":
    serve_call(_run_export)
