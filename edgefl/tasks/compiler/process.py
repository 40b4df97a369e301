"""The process in which a coordinator compiles the task of a run, so that torch's memory is given back."""

from __future__ import annotations

from pathlib import Path

from edgefl.core.config import BASE_SUFFIX
from edgefl.core.types import Json
from edgefl.system.atomic_files import write_atomic
from edgefl.system.processes import serve_call
from edgefl.tasks.compiled.artefact import compute_sha256, encode_artefact
from edgefl.tasks.export.onnx_graph import import_onnx
from edgefl.tasks.registry import import_extra, import_torch, make_task


def compile_for_run(request: Json) -> Json:
    """Compiles the task of a request into its folder, and returns the SHA-256 that names the file.

    Raises:
        EdgeflError: torch or onnx is missing, or the task cannot be compiled.
        OSError: the file cannot be written.
    """
    import_torch()
    import_onnx()
    import_extra("onnxscript", "a task is compiled with onnxscript")
    from edgefl.tasks.compiler.compilation import compile_task  # noqa: PLC0415 it imports these

    name, options = str(request["task"]), dict(request["options"])
    compiled, _ = compile_task(make_task(name, options), name=name, options=options, batch_size=request["batch_size"])
    content = encode_artefact(compiled)
    sha256 = compute_sha256(content)
    write_atomic(Path(request["folder"]) / f"{sha256}{BASE_SUFFIX}", content)
    return {"sha256": sha256}


if __name__ == "__main__":
    serve_call(compile_for_run)
