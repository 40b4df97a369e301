"""A checked graph without the outputs that nobody needs, and without the nodes that only those need.

onnxruntime computes every node of a graph, whatever outputs are asked for: a frozen tensor spares time only where its
gradient has left the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from edgefl.tasks.compiled.board.graph_reader import (
    ATTRIBUTE_FIELDS,
    GRAPH_FIELDS,
    MODEL_FIELDS,
    NODE_FIELDS,
    TENSOR_FIELDS,
)
from edgefl.tasks.compiled.board.protobuf_fields import Fields, encode_field, read_message, to_text

_WRITTEN_GRAPH = ("name", "nodes", "constants", "inputs", "outputs")
_WRITTEN_MODEL = ("ir", "opsets", "graph")
"""Fields that are written; the others are texts, and types of what is computed."""


def remove_outputs(content: bytes, names: Collection[str]) -> bytes:
    """Returns an ONNX file that computes the other outputs, to the same values.

    Args:
        content: of a file that `read_graph` takes.
        names: of the outputs to remove.

    Raises:
        DataError: it is no such file.
    """
    model = read_message(memoryview(content), MODEL_FIELDS, "model")
    graph = read_message(model.get("graph", memoryview(b"")), GRAPH_FIELDS, "graph")
    graph["outputs"] = [entry for entry in graph["outputs"] if _read_value_name(entry) not in names]
    needed = set(map(_read_value_name, graph["outputs"]))
    nodes: list[memoryview] = []
    for entry in reversed(graph["nodes"]):  # each comes after those that it reads
        node = read_message(entry, NODE_FIELDS, "node")
        if not needed.isdisjoint(map(to_text, node["outputs"])):
            needed.update(_list_read(node))
            needed.discard("")  # an input that is left out; nodes have such outputs as well
            nodes.append(entry)
    graph["nodes"] = nodes[::-1]
    graph["constants"] = [entry for entry in graph["constants"] if _read_tensor_name(entry) in needed]
    model["graph"] = _encode(graph, GRAPH_FIELDS, _WRITTEN_GRAPH)
    return _encode(model, MODEL_FIELDS, _WRITTEN_MODEL)


def _encode(fields: Fields, known: dict[int, str], written: Iterable[str]) -> bytes:
    numbers = {name: number for number, name in known.items()}
    found = ((numbers[name], fields[name]) for name in written if name in fields)
    return b"".join(
        encode_field(number, value)
        for number, values in found
        for value in (values if isinstance(values, list) else [values])
    )


def _list_read(node: Fields) -> Iterator[str]:
    """Yields the names that a node reads; the steps of a Scan read those around it as well."""
    yield from map(to_text, node["inputs"])
    for entry in node["attributes"]:
        attribute = read_message(entry, ATTRIBUTE_FIELDS, "attribute")
        if "graph" in attribute:
            steps = read_message(attribute["graph"], GRAPH_FIELDS, "graph")
            yield from map(_read_value_name, steps["outputs"])
            for inner in steps["nodes"]:
                yield from _list_read(read_message(inner, NODE_FIELDS, "node"))


def _read_value_name(entry: memoryview) -> str:
    return to_text(read_message(entry, {1: "name", 2: "type", 3: "text", 4: "texts"}, "value").get("name", b""))


def _read_tensor_name(entry: memoryview) -> str:
    return to_text(read_message(entry, TENSOR_FIELDS, "tensor").get("name", b""))
