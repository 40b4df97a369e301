"""Reader of an ONNX file that comes from elsewhere, without the package `onnx`: bounded, and stricter than protobuf.

It reads what a graph says of itself and no more: operators, names, types, shapes, and the small constants that make
shapes. Whatever a compiled task does not need is refused, so that no other parser can see in the same bytes what this
one did not: unknown fields, a part that is there twice, external data, functions, other domains, and graphs within
nodes other than the steps of a Scan.

Sources: https://protobuf.dev/programming-guides/encoding and onnx/onnx.proto of ONNX 1.13 (opset 18).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from edgefl.core.errors import DataError
from edgefl.core.types import Array
from edgefl.tasks.compiled.board.protobuf_fields import Fields, read_message, to_text, unpack

MAX_GRAPH_BYTES = 512 * 1024 * 1024
MAX_NODES = 50_000
"""Of a graph and of all steps in it: an unrolled network of 1,000 steps has as many."""
MAX_ATTRIBUTES, MAX_ENDS, MAX_AXES, MAX_SCANS = 40, 2_000, 8, 64
MAX_VALUES = 2**26
"""Most values of one tensor of a constant shape: 256 MB of float32."""
MAX_SHAPE_VALUES = 64
"""A constant of so many values may be a shape, and is remembered."""

DTYPES: Mapping[int, str] = MappingProxyType(
    {1: "float32", 2: "uint8", 3: "int8", 6: "int32", 7: "int64", 9: "bool", 11: "float64"}
)
"""Numbers of ONNX for the types that a graph may have."""
MODEL_FIELDS = {
    1: "ir", 2: "text", 3: "text", 4: "text", 5: "version", 6: "text", 7: "graph", 8: "opsets", 14: "texts"
}  # fmt: skip
GRAPH_FIELDS = {
    1: "nodes", 2: "name", 5: "constants", 10: "text", 11: "inputs", 12: "outputs", 13: "infos", 16: "texts"
}  # fmt: skip
NODE_FIELDS = {
    1: "inputs", 2: "outputs", 3: "name", 4: "operator", 5: "attributes", 6: "text", 7: "domain", 9: "texts"
}  # fmt: skip
ATTRIBUTE_FIELDS = {
    1: "name", 2: "float", 3: "number", 4: "bytes", 5: "tensor", 6: "graph", 7: "floats", 8: "numbers", 9: "strings",
    13: "text", 20: "kind",
}  # fmt: skip
TENSOR_FIELDS = {
    1: "dims", 2: "kind", 4: "floats", 5: "numbers32", 6: "strings", 7: "numbers", 8: "name", 9: "raw", 10: "doubles",
    12: "text", 13: "external", 14: "location",
}  # fmt: skip
_SHAPE_INPUTS = {"ConstantOfShape": 0, "Expand": 1, "Tile": 1, "Pad": 1, "Resize": 3}
"""Operators that make a tensor as large as one of their inputs says, and that input's place."""


@dataclass(frozen=True, slots=True)
class GraphValue:
    """An input or output of a graph."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFacts:
    """What a graph says of itself."""

    inputs: tuple[GraphValue, ...]
    outputs: tuple[GraphValue, ...]
    operators: frozenset[str]
    num_nodes: int


@dataclass(slots=True)
class _Budget:
    permitted: Collection[str]
    num_nodes: int = 0
    num_scans: int = 0
    operators: set[str] = field(default_factory=set)


def read_graph(content: bytes, permitted: Collection[str], opset: int) -> GraphFacts:
    """Returns facts about an ONNX file that is safe to be given to a runtime.

    Args:
        content: of the file.
        permitted: operators of ONNX's own domain.
        opset: of that domain.

    Raises:
        DataError: it is no such file, or asks for something that a compiled task does not need.
    """
    if len(content) > MAX_GRAPH_BYTES:
        raise DataError(f"it has {len(content)} bytes, at most {MAX_GRAPH_BYTES} are read")
    model = read_message(memoryview(content), MODEL_FIELDS, "model")
    for entry in model["opsets"]:
        found = read_message(entry, {1: "domain", 2: "version"}, "opset")
        if (domain := to_text(found.get("domain", b""))) or found.get("version") != opset:
            raise DataError(f"it needs domain {domain!r} in version {found.get('version')}, only ONNX {opset} is run")
    if len(model["opsets"]) != 1 or "graph" not in model:
        raise DataError(f"it must have one graph and one set of operators, got {len(model['opsets'])} sets")
    budget = _Budget(permitted)
    graph = read_message(model["graph"], GRAPH_FIELDS, "graph")
    _check_nodes(graph, budget, {}, depth=0)
    inputs, outputs = (_read_values(graph[side], side) for side in ("inputs", "outputs"))
    return GraphFacts(
        inputs=inputs, outputs=outputs, operators=frozenset(budget.operators), num_nodes=budget.num_nodes
    )


def _check_nodes(graph: Fields, budget: _Budget, outer: Mapping[str, Array], *, depth: int) -> None:
    """Checks the nodes of a graph; `outer` are small constants of those around it."""
    constants = dict(outer)
    for entry in graph["constants"]:
        name, value = _read_tensor(entry)
        if value is not None:
            constants[name] = value
    for entry in graph["nodes"]:
        budget.num_nodes += 1
        if budget.num_nodes > MAX_NODES:
            raise DataError(f"it has more than {MAX_NODES} nodes")
        node = read_message(entry, NODE_FIELDS, "node")
        operator = _read_operator(node, budget)
        attributes = _read_attributes(node, operator)
        inputs, outputs = ([to_text(name) for name in node[side]] for side in ("inputs", "outputs"))
        if operator == "Constant" and outputs and (value := _get_constant(attributes)) is not None:
            constants[outputs[0]] = value
        _check_size(operator, inputs, constants)
        for attribute in attributes.values():
            if "graph" in attribute:
                _check_steps(operator, attribute["graph"], budget, constants, depth)


def _read_operator(node: Fields, budget: _Budget) -> str:
    operator = to_text(node.get("operator", b""))
    if domain := to_text(node.get("domain", b"")):
        raise DataError(f"operator {operator!r} is of domain {domain!r}, only those of ONNX itself are run")
    if operator not in budget.permitted:
        raise DataError(f"operator {operator!r} is not permitted")
    if len(node["inputs"]) > MAX_ENDS or len(node["outputs"]) > MAX_ENDS:
        raise DataError(f"a node {operator} has more than {MAX_ENDS} inputs or outputs")
    budget.operators.add(operator)
    return operator


def _check_steps(
    operator: str, body: memoryview, budget: _Budget, constants: Mapping[str, Array], depth: int
) -> None:
    budget.num_scans += 1
    if operator != "Scan":
        raise DataError(f"a node {operator} has a graph in it, only a Scan may")
    if depth or budget.num_scans > MAX_SCANS:
        raise DataError(f"Scans must not lie in each other, and be {MAX_SCANS} at most")
    _check_nodes(read_message(body, GRAPH_FIELDS, "graph"), budget, constants, depth=depth + 1)


def _check_size(operator: str, inputs: list[str], constants: Mapping[str, Array]) -> None:
    """Checks that a tensor which is made as large as constants say is not too large.

    A size that is computed is bounded when the graph is run, by the runtime's arena.
    """
    known = [constants.get(name, np.array([])) for name in inputs]
    place = _SHAPE_INPUTS.get(operator)
    if operator == "Range" and len(known) == 3 and all(value.size for value in known):
        start, limit, step = (float(value.reshape(-1)[0]) for value in known)
        count = int(min(abs((limit - start) / step), 2.0**62)) if step else 0
    elif place is None or place >= len(known):
        return
    else:
        numbers = [abs(int(size)) for size in known[place].reshape(-1) if math.isfinite(size)]
        count = sum(numbers) if operator == "Pad" else math.prod(max(1, number) for number in numbers)
    if count > MAX_VALUES:
        raise DataError(f"a node {operator} makes {count:.3g} values of one tensor, at most {MAX_VALUES}")


def _read_attributes(node: Fields, operator: str) -> dict[str, Fields]:
    if len(node["attributes"]) > MAX_ATTRIBUTES:
        raise DataError(f"a node {operator} has more than {MAX_ATTRIBUTES} attributes")
    found: dict[str, Fields] = {}
    for entry in node["attributes"]:
        attribute = read_message(entry, ATTRIBUTE_FIELDS, "attribute")
        name = to_text(attribute.get("name", b""))
        if name in found:
            raise DataError(f"a node {operator} has attribute {name!r} twice")
        found[name] = attribute
    return found


def _get_constant(attributes: Mapping[str, Fields]) -> Array | None:
    """Returns the value of a node Constant, if it is small."""
    for attribute in attributes.values():
        if "tensor" in attribute:
            return _read_tensor(attribute["tensor"])[1]
        for name in ("numbers", "floats"):
            if attribute[name]:
                return np.array(unpack(attribute[name], name)[:MAX_SHAPE_VALUES])
        for name in ("number", "float"):
            if name in attribute:
                return np.array([attribute[name]])
    return None


def _read_tensor(entry: memoryview) -> tuple[str, Array | None]:
    """Returns a tensor's name and, if there are few, its values; checks that it has as many as its shape says."""
    tensor = read_message(entry, TENSOR_FIELDS, "tensor")
    name, dtype = to_text(tensor.get("name", b"")), DTYPES.get(tensor.get("kind", 0))
    if tensor["external"] or tensor.get("location", 0):
        raise DataError(f"tensor {name!r} lies in another file; external data is not read")
    if dtype is None:
        raise DataError(f"tensor {name!r} is of type {tensor.get('kind')}, only {', '.join(DTYPES.values())} are")
    shape = unpack(tensor["dims"], "numbers", MAX_AXES)
    count = _count_values(shape, f"tensor {name!r}")
    if "raw" in tensor:
        raw = tensor["raw"]
        if len(raw) != count * np.dtype(dtype).itemsize:
            raise DataError(f"tensor {name!r} of shape {shape} has {len(raw)} bytes")
        return name, np.frombuffer(raw, dtype) if count <= MAX_SHAPE_VALUES else None
    kind = {"float32": "floats", "float64": "doubles", "int64": "numbers"}.get(dtype, "numbers32")
    values = unpack(tensor[kind], kind)
    if len(values) != count:
        raise DataError(f"tensor {name!r} of shape {shape} has {len(values)} values")
    return name, np.array(values) if count <= MAX_SHAPE_VALUES else None


def _count_values(shape: list[Any], whose: str) -> int:
    count: int = math.prod(shape)
    if any(size < 0 for size in shape) or count > MAX_VALUES:
        raise DataError(f"{whose} has shape {shape!r:.100}, at most {MAX_VALUES} values are taken")
    return count


def _read_values(entries: list[memoryview], side: str) -> tuple[GraphValue, ...]:
    values = tuple(_read_value(entry) for entry in entries)
    if len({value.name for value in values}) < len(values):
        raise DataError(f"its {side} have a name twice")
    return values


def _read_value(entry: memoryview) -> GraphValue:
    value = read_message(entry, {1: "name", 2: "type", 3: "text", 4: "texts"}, "value")
    name = to_text(value.get("name", b""))
    kind = read_message(value.get("type", memoryview(b"")), {1: "tensor", 6: "text"}, "type")
    tensor = read_message(kind.get("tensor", memoryview(b"")), {1: "kind", 2: "shape"}, "tensor type")
    dtype = DTYPES.get(tensor.get("kind", 0))
    if dtype is None or "shape" not in tensor:
        raise DataError(f"{name!r} must be a tensor of a known shape, its type is {tensor.get('kind')}")
    sizes = read_message(tensor["shape"], {1: "sizes"}, "shape")["sizes"]
    if len(sizes) > MAX_AXES:
        raise DataError(f"{name!r} has {len(sizes)} axes, at most {MAX_AXES}")
    shape: list[Any] = []
    for entry_of_size in sizes:
        size = read_message(entry_of_size, {1: "size", 2: "symbol", 3: "text"}, "axis").get("size")
        if size is None:
            raise DataError(f"{name!r} must have a fixed shape")
        shape.append(size)
    _count_values(shape, repr(name))
    return GraphValue(name, dtype, tuple(shape))
