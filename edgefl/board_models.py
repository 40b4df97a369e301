"""Makes the file that boards deploy, in a process of its own, since exporting may need torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edgefl.child_process import answer_once, ask_child
from edgefl.storage.checkpoints import load_model_file
from edgefl.types import Json, Scalar


def export_for_boards(task: str, options: Mapping[str, Scalar], model: Path, out: Path) -> None:
    """Writes the ONNX file of a safetensors file of this task.

    A coordinator stays for months: the hundreds of megabytes that torch takes go with the child.

    Raises:
        EdgeflError: the task cannot be exported here, or the model is not of this task.
    """
    question = {"task": task, "options": dict(options), "model": str(model), "out": str(out)}
    ask_child(__name__, question, what="exporting the model")


def _export(asked: Json) -> Json:
    from edgefl.tasks.onnx_export import export_onnx  # noqa: PLC0415 in the child alone
    from edgefl.tasks.registry import make_task  # noqa: PLC0415 likewise

    model, options = Path(asked["model"]), asked["options"]
    tensors = load_model_file(model)
    task = make_task(asked["task"], options)
    export_onnx(task, tensors, Path(asked["out"]), options=options, model_sha256=model.stem)
    return {}


if __name__ == "__main__":
    answer_once(_export)
