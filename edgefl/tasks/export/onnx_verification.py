"""Verification of an ONNX file against its task, and its quantisation to int8 weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.core.errors import TaskError
from edgefl.core.types import Array
from edgefl.tasks.export.onnx_graph import INPUTS, LOGITS, PREPARE, import_onnx, suppress_export_logs

TOLERANCE = 2e-5
"""Relative to the largest logit, at least 1: float32 sums are added in another order."""
BATCH_SIZE = 256


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
    except Exception as error:  # its errors have no common base class
        raise TaskError(f"onnxruntime cannot load the exported model: {error}") from error


def verify_logits(session: Any, features: Array, expected: Array) -> tuple[float, float]:
    """Returns the largest difference of the file's logits from the expected ones, and its tolerance.

    Raises:
        TaskError: it is larger, or a value is NaN.
    """
    run = partial(_compute_logits, session)
    logits = np.concatenate([run(features[:1]), *run_in_batches(run, features[1:])])
    if logits.shape != expected.shape:
        raise TaskError(f"the ONNX file gives logits {list(logits.shape)}, the task {list(expected.shape)}")
    tolerance = TOLERANCE * max(1.0, float(np.abs(expected).max()))
    difference = float(np.abs(logits - expected).max())
    if not difference <= tolerance:
        raise TaskError(
            f"the ONNX file does not compute what the task computes: logits differ by up to {difference:.2e} on "
            f"{len(features)} inputs, {tolerance:.2e} would be allowed; nothing was written"
        )
    return difference, tolerance


def compute_accuracy(session: Any, features: Array, labels: Array | None) -> float | None:
    """Returns the fraction of correct predictions of the file; None without labels."""
    if labels is None or not len(labels):
        return None
    predictions = np.concatenate(
        [logits.argmax(axis=1) for logits in run_in_batches(partial(_compute_logits, session), features)]
    )
    return float((predictions == labels).mean())


def quantise_model(content: bytes) -> Any:
    """Returns the model with int8 weights; activations are quantised dynamically, so no data is needed.

    Raises:
        TaskError: onnxruntime fails.
    """
    onnx = import_onnx()
    with suppress_export_logs():
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


def run_in_batches(function: Callable[[Array], Array], inputs: Array) -> Iterator[Array]:
    """Yields a function's results by batch: a whole test set at once needs too much memory."""
    for start in range(0, len(inputs), BATCH_SIZE):
        yield function(inputs[start : start + BATCH_SIZE])


def _compute_logits(session: Any, features: Array) -> Array:
    (logits,) = session.run([LOGITS], {INPUTS: features})
    return np.asarray(logits)


def _import_runtime() -> Any:
    try:
        import onnxruntime  # noqa: PLC0415 slow to load
    except ImportError as error:
        raise TaskError(
            f"an exported model is checked with onnxruntime, which cannot be imported ({error}); "
            "install it with: pip install onnxruntime -c constraints.txt"
        ) from None
    return onnxruntime
