"""Recurrent layers in ONNX: its own operators forward, and backward a `Scan` over the steps from the last one.

torch's exporter has no form for a `Scan` that a translation could return. So the translation leaves an Einsum of the
same inputs and the same shape, and `expand_scans` puts the Scan in its place when the file is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
from onnx import helper
from onnxscript import opset18 as op

from edgefl.tasks.compiler.translations.nodes import Value, concat, cut, get_shape, ints, numbers, reshape

GRU_GRADIENT = "tbh, tbs, tbh, sh -> tbh"
LSTM_GRADIENT = "tbh, tbh, tbs, tbd, gh, bh -> tbd"
LSTM_CELLS = "tbh, tbh, bh -> tbh"
_FLOAT = onnx.TensorProto.FLOAT


def gru(x: Value, w_in: Value, w_state: Value, b_in: Value, b_state: Value, first: Value) -> Value:
    """Gates of torch are reset, update and new; of ONNX update, reset and new."""
    hidden = get_shape(first)[1]
    order = (1, 0, 2)
    bias = concat([_order_gates(b_in, hidden, order), _order_gates(b_state, hidden, order)], axis=0)
    states, _ = op.GRU(
        x,
        _add_axis(_order_gates(w_in, hidden, order)),
        _add_axis(_order_gates(w_state, hidden, order)),
        _add_axis(bias),
        None,
        _add_axis(first),
        hidden_size=hidden,
        linear_before_reset=1,
    )
    return reshape(states, *get_shape(x)[:2], hidden)


def lstm(x: Value, w_in: Value, w_state: Value, bias: Value, first: Value, first_cell: Value) -> tuple[Value, Value]:
    """Gates of torch are input, forget, cell and output; of ONNX input, output, forget and cell."""
    hidden = get_shape(first)[1]
    order = (0, 3, 1, 2)
    zeros = numbers([0.0] * (4 * hidden))
    states, _, cell = op.LSTM(
        x,
        _add_axis(_order_gates(w_in, hidden, order)),
        _add_axis(_order_gates(w_state, hidden, order)),
        _add_axis(concat([_order_gates(bias, hidden, order), zeros], axis=0)),
        None,
        _add_axis(first),
        _add_axis(first_cell),
        hidden_size=hidden,
    )
    return reshape(states, *get_shape(x)[:2], hidden), reshape(cell, *get_shape(first_cell))


def gru_gradient(grad: Value, slopes: Value, update: Value, w_state: Value) -> Value:
    return op.Einsum(grad, slopes, update, w_state, equation=GRU_GRADIENT)


def lstm_gradient(
    grad: Value, through: Value, slopes: Value, outer: Value, w_state: Value, grad_cell: Value
) -> Value:
    return op.Einsum(grad, through, slopes, outer, w_state, grad_cell, equation=LSTM_GRADIENT)


def lstm_cells(forget: Value, added: Value, first_cell: Value) -> Value:
    return op.Einsum(forget, added, first_cell, equation=LSTM_CELLS)


def expand_scans(model: onnx.ModelProto) -> None:
    """Puts the Scans in the places of their marks."""
    shapes = {
        value.name: [size.dim_value for size in value.type.tensor_type.shape.dim]
        for value in onnx.shape_inference.infer_shapes(model).graph.value_info
    }
    nodes = []
    for node in model.graph.node:
        equation = next((item.s.decode() for item in node.attribute if item.name == "equation"), "")
        build = _SCANS.get(equation)
        nodes += [node] if build is None else build(node, shapes[node.output[0]])
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _order_gates(value: Value, hidden: int, order: Sequence[int]) -> Value:
    return concat([cut(value, [gate * hidden], [(gate + 1) * hidden], [0], [1]) for gate in order], axis=0)


def _add_axis(value: Value) -> Value:
    return op.Unsqueeze(value, ints(0))


def _scan_gru_gradient(mark: Any, shape: Sequence[int]) -> list[Any]:
    _, size, hidden = shape
    grad, slopes, update, w_state = mark.input
    scan = _Scan(mark=mark, size=size, result=("state", hidden))
    scan.steps = {"grad": (grad, hidden), "slopes": (slopes, 3 * hidden), "update": (update, hidden)}
    scan.states = {"carried": ("", hidden)}
    scan.add("Add", ["grad", "carried"], "state")
    scan.add("Concat", ["state"] * 3, "repeated", axis=-1)
    scan.add("Mul", ["repeated", "slopes"], "gates")
    scan.add("MatMul", ["gates", w_state], "product")
    scan.add("Mul", ["state", "update"], "kept")
    scan.add("Add", ["product", "kept"], "carried_on")
    return scan.build(is_reverse=True)


def _scan_lstm_gradient(mark: Any, shape: Sequence[int]) -> list[Any]:
    _, size, double = shape
    hidden = double // 2
    grad, through, slopes, outer, w_state, grad_cell = mark.input
    scan = _Scan(mark=mark, size=size, result=("both", double))
    scan.steps = {
        "grad": (grad, hidden), "through": (through, hidden), "slopes": (slopes, 3 * hidden), "outer": (outer, double)
    }  # fmt: skip
    scan.states = {"carried": ("", hidden), "carried_cell": (grad_cell, hidden)}
    scan.add("Split", ["outer"], "by_exit", "forget", axis=-1, num_outputs=2)
    scan.add("Add", ["grad", "carried"], "state")
    scan.add("Mul", ["state", "through"], "by_squashed")
    scan.add("Add", ["by_squashed", "carried_cell"], "cell")
    scan.add("Concat", ["cell"] * 3, "repeated", axis=-1)
    scan.add("Mul", ["repeated", "slopes"], "inner")
    scan.add("Mul", ["state", "by_exit"], "last")
    scan.add("Concat", ["inner", "last"], "gates", axis=-1)
    scan.add("MatMul", ["gates", w_state], "carried_on")
    scan.add("Mul", ["cell", "forget"], "carried_cell_on")
    scan.add("Concat", ["state", "cell"], "both", axis=-1)
    return scan.build(is_reverse=True)


def _scan_lstm_cells(mark: Any, shape: Sequence[int]) -> list[Any]:
    _, size, hidden = shape
    forget, added, first = mark.input
    scan = _Scan(mark=mark, size=size, result=("result", hidden))
    scan.steps = {"forget": (forget, hidden), "added": (added, hidden)}
    scan.states = {"cell": (first, hidden)}
    scan.add("Mul", ["forget", "cell"], "kept")
    scan.add("Add", ["kept", "added"], "cell_on")
    scan.add("Identity", ["cell_on"], "result")
    return scan.build(is_reverse=False)


@dataclass(slots=True, kw_only=True)
class _Scan:
    """A Scan in the place of a mark, while it is built.

    Attributes:
        mark: the node; its output is what the Scan shows of each step.
        size: of the first axis of all that a step has.
        result: name in the body, and last size, of what it returns of each step.
        steps: by name in the body, the value of which it gets one step at a time, and its last size.
        states: likewise, what it hands on as `<name>_on`; without a value it begins with zeros.
        nodes: of the body.
    """

    mark: Any
    size: int
    result: tuple[str, int]
    steps: dict[str, tuple[str, int]] = field(default_factory=dict)
    states: dict[str, tuple[str, int]] = field(default_factory=dict)
    nodes: list[tuple[str, list[str], tuple[str, ...], dict[str, Any]]] = field(default_factory=list)

    def add(self, operator: str, inputs: list[str], *outputs: str, **settings: Any) -> None:
        self.nodes.append((operator, inputs, outputs, settings))

    def build(self, *, is_reverse: bool) -> list[Any]:
        """Returns the nodes; in reverse the last step comes first."""
        beginnings = [self._begin(name, value, width) for name, (value, width) in self.states.items()]
        scan = helper.make_node(
            "Scan",
            [*(name for name, _ in beginnings), *(value for value, _ in self.steps.values())],
            [*(f"{self.mark.output[0]}_{name}_end" for name in self.states), self.mark.output[0]],
            body=self._build_body(),
            num_scan_inputs=len(self.steps),
            scan_input_directions=[int(is_reverse)] * len(self.steps),
            scan_output_directions=[int(is_reverse)],
        )
        return [*(node for _, nodes in beginnings for node in nodes), scan]

    def _build_body(self) -> Any:
        own = {*self.steps, *self.states, *(name for _, _, outputs, _ in self.nodes for name in outputs)}

        def rename(names: Iterable[str]) -> list[str]:
            return [f"{self.mark.output[0]}_{name}" if name in own else name for name in names]

        def describe(name: str, width: int) -> Any:
            return helper.make_tensor_value_info(rename([name])[0], _FLOAT, [self.size, width])

        inputs = {**self.states, **self.steps}
        return helper.make_graph(
            [
                helper.make_node(operator, rename(names), rename(outputs), **settings)
                for operator, names, outputs, settings in self.nodes
            ],
            f"{self.mark.output[0]}_step",
            [describe(name, width) for name, (_, width) in inputs.items()],
            [*(describe(f"{name}_on", width) for name, (_, width) in self.states.items()), describe(*self.result)],
        )

    def _begin(self, name: str, value: str, width: int) -> tuple[str, list[Any]]:
        """Returns a state's first value, and the nodes that make it."""
        if value:
            return value, []
        target = f"{self.mark.output[0]}_{name}_first"
        zeros = helper.make_tensor(target, _FLOAT, [self.size, width], [0.0] * (self.size * width))
        return target, [helper.make_node("Constant", [], [target], value=zeros)]


_SCANS: Mapping[str, Callable[[Any, Sequence[int]], list[Any]]] = {
    GRU_GRADIENT: _scan_gru_gradient,
    LSTM_CELLS: _scan_lstm_cells,
    LSTM_GRADIENT: _scan_lstm_gradient,
}
