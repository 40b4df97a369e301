"""The process in which a coordinator compiles the task of a run, so that torch's memory is given back."""

from __future__ import annotations

from pathlib import Path

from edgefl.core.types import BASE_SUFFIX, Json
from edgefl.system.atomic_files import write_atomic
from edgefl.system.processes import serve_call
from edgefl.tasks.compiled.artefact import compute_sha256
from edgefl.tasks.compiler.cache import CompileCache, find_or_compile
from edgefl.tasks.registry import make_task


def compile_for_run(request: Json) -> Json:
    """Compiles the task of a request into its folder, or takes it from the cache.

    Returns the SHA-256 that names the file, and whether it was there before.

    Raises:
        EdgeflError: torch or onnx is missing, or the task cannot be compiled.
        OSError: the file cannot be written.
    """
    name, options = str(request["task"]), dict(request["options"])
    entry, is_cached = find_or_compile(
        CompileCache(Path(request["cache"])),
        make_task(name, options),
        name=name,
        options=options,
        batch_size=request["batch_size"],
        since_s=request["since_s"],
        constant=request["constant"],
    )
    sha256 = compute_sha256(entry.content)
    write_atomic(Path(request["folder"]) / f"{sha256}{BASE_SUFFIX}", entry.content)
    return {"sha256": sha256, "is_cached": is_cached}


if __name__ == "__main__":
    serve_call(compile_for_run)
