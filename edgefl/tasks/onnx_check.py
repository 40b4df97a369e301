"""Whether an ONNX file computes what its task computes; and the same file with int8 weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.errors import TaskError
from edgefl.tasks.onnx_steps import INPUTS, LOGITS, PREPARE, import_onnx, quiet
from edgefl.types import Array

TOLERANCE = 2e-5
"""Of the largest logit, or of 1 where all are smaller: float32 sums that are added up in another order."""
BATCH = 256


def open_session(content: bytes) -> Any:
    """Returns an onnxruntime session of a file's bytes, on the CPU.

    Raises:
        TaskError: onnxruntime is missing or cannot load the file.
    """
    runtime = _import_runtime()
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    try:
        return runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors have no class of their own in common
        raise TaskError(f"onnxruntime cannot load the exported model: {error}") from error


def checked_difference(session: Any, features: Array, expected: Array) -> tuple[float, float]:
    """Returns the largest difference of the file's logits from the expected ones, and how large it may be.

    Raises:
        TaskError: it is larger, or something is no number.
    """
    run = partial(_logits, session)
    found = np.concatenate([run(features[:1]), *in_batches(run, features[1:])])
    if found.shape != expected.shape:
        raise TaskError(f"the ONNX file gives logits {list(found.shape)}, the task {list(expected.shape)}")
    tolerance = TOLERANCE * max(1.0, float(np.abs(expected).max()))
    difference = float(np.abs(found - expected).max())
    if not difference <= tolerance:
        raise TaskError(
            f"the ONNX file does not compute what the task computes: logits differ by up to {difference:.2e} on "
            f"{len(features)} inputs, {tolerance:.2e} would be allowed; nothing was written"
        )
    return difference, tolerance


def accuracy_of(session: Any, features: Array, labels: Array | None) -> float | None:
    """Returns the fraction of the labels that the file finds, None without labels."""
    if labels is None or not len(labels):
        return None
    found = np.concatenate([logits.argmax(axis=1) for logits in in_batches(partial(_logits, session), features)])
    return float((found == labels).mean())


def quantised(content: bytes) -> Any:
    """Returns the model with int8 weights; activations are quantised as they come, so no data is needed.

    Raises:
        TaskError: onnxruntime cannot.
    """
    onnx = import_onnx()
    with quiet():
        try:
            from onnxruntime.quantization import QuantType, quantize_dynamic  # noqa: PLC0415 slow to load

            with tempfile.TemporaryDirectory(prefix="edgefl-") as folder:
                source, target = Path(folder) / "float32.onnx", Path(folder) / "int8.onnx"
                source.write_bytes(content)
                features = [node.name for node in onnx.load(source).graph.node if node.name.startswith(PREPARE)]
                # Unsigned weights: onnxruntime has no convolution of signed ones on the CPU.
                quantize_dynamic(source, target, weight_type=QuantType.QUInt8, nodes_to_exclude=features)
                return onnx.load(target)
        except Exception as error:  # as above
            raise TaskError(f"onnxruntime cannot quantise this model: {error}") from error


def in_batches(function: Callable[[Array], Array], inputs: Array) -> Iterator[Array]:
    """Gives the results of a function of a batch: a whole test set at once needs more memory than a laptop has."""
    for start in range(0, len(inputs), BATCH):
        yield function(inputs[start : start + BATCH])


def _logits(session: Any, features: Array) -> Array:
    (found,) = session.run([LOGITS], {INPUTS: features})
    return np.asarray(found)


def _import_runtime() -> Any:
    try:
        import onnxruntime  # noqa: PLC0415 slow to load
    except ImportError as error:
        raise TaskError(
            f"an exported model is checked with onnxruntime, which cannot be imported ({error}); "
            "install it with: pip install onnxruntime -c constraints.txt"
        ) from None
    return onnxruntime
