"""The reference of the Python API, from signatures and docstrings; the modules are read, not imported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from markup import code, named, names_joined, prose, sections, table

ROOT = Path(__file__).resolve().parents[2]
# What users import, by the question that brings them here.
API = {
    "A fleet": (
        "edgefl.client.fleet.connect",
        "edgefl.client.fleet.Fleet",
        "edgefl.client.fleet.Run",
        "edgefl.client.fleet.SavedModel",
        "edgefl.history.tables.Table",
    ),
    "Run and simulate": (
        "edgefl.simulation.local_fleet.run",
        "edgefl.simulation.simulated_run.simulate",
        "edgefl.engine.run_summary.RunResult",
    ),
    "Tasks": (
        "edgefl.core.types.Task",
        "edgefl.core.types.Learner",
        "edgefl.core.types.Dataset",
        "edgefl.core.types.TensorSpec",
        "edgefl.core.types.TensorKind",
        "edgefl.tasks.losses.class_losses.CrossEntropy",
        "edgefl.tasks.learners.numpy_learner.DenseModel",
        "edgefl.tasks.learners.torch_learner.TorchModel",
        "edgefl.tasks.learners.torch_learner.TorchLearner",
        "edgefl.tasks.learners.torch_learner.module_shapes",
    ),
    "Jobs": (
        "edgefl.tasks.job.Job",
        "edgefl.tasks.job.JobContext",
    ),
    "Metrics": ("edgefl.core.metrics.Metric",),
    "Strategies": (
        "edgefl.strategies.round_strategy.RoundStrategy",
        "edgefl.core.types.Strategy",
        "edgefl.core.types.FleetView",
        "edgefl.core.types.Decision",
        "edgefl.core.types.TrainInstruction",
        "edgefl.core.types.TrainConfig",
        "edgefl.core.types.Update",
        "edgefl.core.types.UpdateMetrics",
        "edgefl.core.types.SparseTensor",
        "edgefl.core.types.derive_rng",
    ),
    "Codecs": (
        "edgefl.compression.stages.StageKind",
        "edgefl.compression.stages.TensorStage",
        "edgefl.compression.stages.ValueStage",
        "edgefl.compression.stages.LosslessStage",
    ),
}


def python_api() -> str:
    """Returns a part for each function and class of the public API."""
    package = griffe.load("edgefl", search_paths=[ROOT], docstring_parser="google")
    return sections(_parts(package))


def _parts(package: griffe.Object | griffe.Alias) -> Iterator[str]:
    for title, paths in API.items():
        yield f"## {title}"
        for path in paths:
            found = package[path.removeprefix("edgefl.")]
            yield f"### `{found.name}`"
            module = path.rpartition(".")[0] if found.name not in {"run", "simulate"} else "edgefl"
            yield f"```python\nfrom {module} import {found.name}\n```"
            yield from _class(found) if found.is_class else _function(found)


def _class(found: Any) -> Iterator[str]:
    yield from _docstring(found)
    told = {item.name for part in _parsed(found) if part.kind.value == "attributes" for item in part.value}
    attributes = [item for item in _public(found) if item.is_attribute and item.annotation is not None]
    if attributes and not told:
        rows = (
            (code(item.name), code(item.annotation), code(item.value) if item.value else "") for item in attributes
        )
        yield table(("attribute", "type", "default"), rows)
    for item in _public(found):
        if item.is_function:
            yield f"#### `{found.name}.{item.name}`"
            yield from _function(item)
        elif item.is_attribute and item.docstring:
            yield f"#### `{found.name}.{item.name}`"
            yield from _docstring(item)


def _function(found: Any) -> Iterator[str]:
    yield f"```python\n{_signature(found)}\n```"
    yield from _docstring(found)


def _signature(found: Any) -> str:
    line = f"def {found.signature()}"
    if len(line) < 100:
        return line
    head, _, rest = line.partition("(")
    inner, _, answer = rest.rpartition(") -> ")
    parameters, depth = [""], 0
    for letter in inner:
        depth += letter in "[(" and 1
        depth -= letter in "])" and 1
        if letter == "," and not depth:
            parameters.append("")
        else:
            parameters[-1] += letter
    return "\n".join([f"{head}(", *(f"    {item.strip()}," for item in parameters), f") -> {answer}"])


def _docstring(found: Any) -> Iterator[str]:
    for part in _parsed(found):
        if part.kind is griffe.DocstringSectionKind.text:
            yield prose(part.value)
        elif part.kind is griffe.DocstringSectionKind.admonition:
            yield f"**{part.title or part.value.kind}**: {prose(part.value.contents)}"
        elif part.kind in {griffe.DocstringSectionKind.returns, griffe.DocstringSectionKind.yields}:
            yield "**Returns**: " + prose(" ".join(item.description for item in part.value))
        elif part.kind is griffe.DocstringSectionKind.raises:
            rows = ((code(item.annotation), prose(item.description)) for item in part.value)
            yield table(("raises", "when"), rows)
        elif part.kind in {griffe.DocstringSectionKind.parameters, griffe.DocstringSectionKind.attributes}:
            rows = ((named(item.name), prose(item.description)) for item in part.value)
            yield table((str(part.kind.value)[:-1], "meaning"), rows)


def _parsed(found: Any) -> list[Any]:
    if not found.docstring:
        return []
    return griffe.Docstring(names_joined(found.docstring.value), parent=found, parser="google").parsed


def _public(found: Any) -> list[Any]:
    return [item for name, item in found.members.items() if not name.startswith("_")]
