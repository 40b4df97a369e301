"""Checks of a compiled task that comes from elsewhere, before a runtime gets its graphs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from edgefl.core.errors import DataError, TaskError
from edgefl.core.types import ModelSpec, Scalar, TensorKind
from edgefl.tasks.compiled.artefact import (
    BUFFER,
    EVALUATE,
    GRADIENT,
    INPUTS,
    LOSS,
    MAX_ARTEFACT_BYTES,
    NEW,
    NOISE,
    OPSET,
    OUTPUTS,
    PARAMETER,
    PERMITTED_OPERATORS,
    TARGETS,
    TRAIN,
    WEIGHTS,
    CompiledManifest,
    CompiledTask,
    parse_artefact,
)
from edgefl.tasks.compiled.board.graph_reader import GraphFacts, GraphValue, read_graph

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Type and shape of an input or output by name."""


def load_compiled_task(path: Path) -> CompiledTask:
    """Returns the compiled task in a file, checked.

    Raises:
        DataError: it cannot be read, or `check_compiled_task` refuses it.
    """
    try:
        if path.stat().st_size > MAX_ARTEFACT_BYTES:
            raise DataError(f"{path} has {path.stat().st_size} bytes, a compiled task {MAX_ARTEFACT_BYTES} at most")
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    compiled = parse_artefact(content)
    check_compiled_task(compiled)
    return compiled


def check_compiled_task(compiled: CompiledTask) -> None:
    """Checks that both graphs ask for nothing but what a compiled task needs, and are those of the manifest.

    Raises:
        DataError: they are not.
    """
    manifest = compiled.manifest
    inputs, outputs = _list_inputs(manifest), _list_outputs(manifest)
    noise = {f"{NOISE}{index}": ("float32", shape) for index, shape in enumerate(manifest.noise)}
    _check_graph(TRAIN, compiled.train, {**inputs, **noise}, outputs, required=[LOSS, *_list_gradients(manifest)])
    ends = {LOSS: ("float32", ()), OUTPUTS: ("float32", (manifest.batch_size, *manifest.output_shape))}
    _check_graph(EVALUATE, compiled.evaluate, inputs, ends, required=[*ends])


def check_model(manifest: CompiledManifest, shapes: ModelSpec, task: str) -> None:
    """Checks that a compiled task has the tensors of a task on this machine.

    Raises:
        TaskError: it has others.
    """
    expected = {spec.name: (spec.shape, str(spec.dtype), spec.kind) for spec in shapes}
    found = {spec.name: (spec.shape, str(spec.dtype), spec.kind) for spec in manifest.model}
    for name in [*expected, *found]:
        if expected.get(name) != found.get(name):
            raise TaskError(
                f"the compiled task has another model than task {task} here: tensor {name!r} is "
                f"{_format_tensor(found.get(name))} there and {_format_tensor(expected.get(name))} here; compile it "
                "again"
            )


def check_origin(manifest: CompiledManifest, task: str, options: Mapping[str, Scalar]) -> None:
    """Checks that a compiled task was made of a run's task: another loss or network may have the same tensors.

    Args:
        manifest: of the file.
        task: by the name that the run file has.
        options: of the task, likewise.

    Raises:
        TaskError: it was made of another task, or with other options.
    """
    if (manifest.task, dict(manifest.options)) != (task, dict(options)):
        raise TaskError(
            f"the compiled task was made of task {manifest.task} with {_format_options(manifest.options)}, the run "
            f"is of task {task} with {_format_options(options)}; compile it again"
        )


def check_constant(manifest: CompiledManifest, names: Collection[str]) -> None:
    """Checks that the tensors that stay as they are in a run may do so by a compiled task.

    One that was compiled for these does what torch does. One that was compiled to change all tensors takes part where
    no statistic of batches is to stay, which its graph changes.

    Raises:
        TaskError: it was compiled for others, or changes such a statistic.
    """
    if {*manifest.constant} == {*names}:
        return
    if manifest.constant:
        other = min({*manifest.constant} ^ {*names})
        does, asks = ("freezes", "trains") if other in manifest.constant else ("trains", "freezes")
        raise TaskError(f"the compiled task {does} {other!r}, which the run {asks}; compile it for the run's [adapt]")
    for spec in manifest.model:
        if spec.name in names and spec.kind == TensorKind.BUFFER:
            raise TaskError(
                f"the compiled task changes {spec.name!r}, a statistic of batches that the run freezes; compile it "
                "for the run's [adapt]"
            )


def _format_options(options: Mapping[str, Scalar]) -> str:
    return ", ".join(f"{name} = {value!r:.80}" for name, value in sorted(options.items())) or "no options"


def _format_tensor(entry: tuple[tuple[int, ...], str, TensorKind] | None) -> str:
    return "absent" if entry is None else f"{entry[1]} {list(entry[0])}"


def _list_inputs(manifest: CompiledManifest) -> dict[str, tuple[str, tuple[int, ...]]]:
    size = manifest.batch_size
    prefixes = {TensorKind.PARAMETER: PARAMETER, TensorKind.BUFFER: BUFFER}
    return {
        **{f"{prefixes[spec.kind]}{spec.name}": (str(spec.dtype), spec.shape) for spec in manifest.model},
        INPUTS: ("float32", (size, *manifest.input_shape)),
        TARGETS: (manifest.target_dtype, (size, *manifest.target_shape)),
        WEIGHTS: ("float32", (size,)),
    }


def _list_changing(manifest: CompiledManifest) -> ModelSpec:
    constant = {*manifest.constant}
    return tuple(spec for spec in manifest.model if spec.name not in constant)


def _list_gradients(manifest: CompiledManifest) -> list[str]:
    return [f"{GRADIENT}{spec.name}" for spec in _list_changing(manifest) if spec.kind == TensorKind.PARAMETER]


def _list_outputs(manifest: CompiledManifest) -> dict[str, tuple[str, tuple[int, ...]]]:
    prefixes = {TensorKind.PARAMETER: GRADIENT, TensorKind.BUFFER: NEW}
    changing = _list_changing(manifest)
    tensors = {f"{prefixes[spec.kind]}{spec.name}": (str(spec.dtype), spec.shape) for spec in changing}
    return {LOSS: ("float32", ()), **tensors}


def _check_graph(name: str, content: bytes, inputs: Shapes, outputs: Shapes, *, required: Collection[str]) -> None:
    try:
        facts: GraphFacts = read_graph(content, frozenset(PERMITTED_OPERATORS), OPSET)
    except DataError as error:
        raise DataError(f"{name} of the compiled task is refused: {error}") from None
    for side, values, known in (("input", facts.inputs, inputs), ("output", facts.outputs, outputs)):
        for value in values:
            _check_value(name, side, value, known)
    if missing := sorted({*required} - {value.name for value in facts.outputs}):
        raise DataError(f"{name} of the compiled task is refused: it has no output {missing[0]!r}")


def _check_value(name: str, side: str, value: GraphValue, known: Shapes) -> None:
    expected = known.get(value.name)
    if expected is None:
        raise DataError(f"{name} of the compiled task is refused: its manifest knows no {side} {value.name!r}")
    if expected != (value.dtype, value.shape):
        raise DataError(
            f"{name} of the compiled task is refused: {side} {value.name!r} is {value.dtype} {list(value.shape)}, "
            f"by its manifest {expected[0]} {list(expected[1])}"
        )
