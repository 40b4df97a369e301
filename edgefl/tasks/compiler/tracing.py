"""A function of tensors as a graph of ATen operators, and the layers that run an operator.

`make_fx`, `TorchDispatchMode`, the constructor of `ExportedProgram` and the table of decompositions are the
interfaces here that torch does not document; no other file of edgefl knows them. A contract test holds what is
expected of them against the pinned torch.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_structure

from edgefl.core.errors import TaskError
from edgefl.core.types import Array
from edgefl.tasks.onnx_graph import get_first_line

aten = torch.ops.aten

_VALUE_OPERATOR = "_local_scalar_dense"
"""What torch calls where Python asks for the value of a tensor, such as in an `if`."""

_MORE_DECOMPOSED = (aten.squeeze.dims,)
"""Operators that an export decomposes besides those of `default_decompositions`: so it need not trace again."""

_OPERATOR = re.compile(r"aten\.(\w+?)(?:_backward)?\b")
_MAX_NAMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedGraph:
    """A pure graph, its example inputs by name in the order of its placeholders, and its outputs' names."""

    module: torch.fx.GraphModule
    inputs: Mapping[str, torch.Tensor]
    outputs: Sequence[str]


def trace(
    function: Callable[..., Mapping[str, torch.Tensor]],
    inputs: Mapping[str, torch.Tensor],
    *,
    kept: Collection[object],
) -> TracedGraph:
    """Returns the operators that a function of tensors by name runs; what they do not need is no input of the graph.

    Args:
        function: called with one mapping of the inputs; it may change tensors of its own in place.
        inputs: examples, of the shapes and types that the graph takes.
        kept: operators that stay whole, since they have a form in ONNX.

    Raises:
        TaskError: the function looks at a tensor's value, or draws random numbers.
    """
    outputs: list[str] = []

    def flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = function(dict(zip(inputs, tensors, strict=True)))
        outputs[:] = found
        return tuple(found.values())

    decompositions: dict[Any, Any] = dict(torch.export.default_decompositions().items())  # type: ignore[no-untyped-call]
    decompositions |= get_decompositions(_MORE_DECOMPOSED)
    for operator in kept:
        decompositions.pop(operator, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            # With oneDNN a recurrent layer would stay one opaque operator.
            with torch.backends.mkldnn.flags(enabled=False):
                # First the gradient, then without changes in place: `functionalize` knows no `autograd.Function`.
                differentiated = make_fx(flat)(*inputs.values())
                # On tensors without values, which an `ExportedProgram` has; the network's constants keep theirs.
                decompose = make_fx(
                    functionalize(differentiated),
                    decompositions,
                    tracing_mode="fake",
                    _allow_non_fake_inputs=True,
                )
                module = decompose(*inputs.values())
        except RuntimeError as error:
            if _VALUE_OPERATOR in str(error):
                raise TaskError(
                    "the network looks at the value of a tensor (an if, a loop, .item()), which a graph cannot"
                ) from None
            raise TaskError(f"torch cannot trace the training step: {get_first_line(error)}") from error
    _check_randomness(module.graph)
    return TracedGraph(module=module, inputs=_clean(module, inputs), outputs=outputs)


def make_program(graph: TracedGraph) -> ExportedProgram:
    """Returns a traced graph as `torch.onnx.export` takes it with no more traces, which take most of its time."""
    module: Any = graph.module
    nodes = module.graph
    first, *_ = arguments = nodes.find_nodes(op="placeholder")
    constants: dict[str, Any] = {}
    for node in nodes.find_nodes(op="get_attr"):
        name = str(node.target)
        if name not in constants:
            with nodes.inserting_before(first):
                constants[name] = nodes.placeholder(name)
            constants[name].meta["val"] = first.meta["val"].fake_mode.from_tensor(getattr(module, name))
        node.replace_all_uses_with(constants[name])
        nodes.erase_node(node)
    (results,) = nodes.output_node().args
    example: tuple[Any, dict[str, Any]] = (tuple(graph.inputs.values()), {})
    inputs: list[Any] = [TensorArgument(node.name) for node in arguments]
    outputs: list[Any] = [TensorArgument(node.name) for node in results]
    call = ModuleCallSignature(inputs, outputs, tree_structure(example), tree_structure(tuple(results)))
    signature = ExportGraphSignature(
        [
            *(
                InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(node.name), name)
                for name, node in constants.items()
            ),
            *(InputSpec(InputKind.USER_INPUT, argument, None) for argument in inputs),
        ],
        [OutputSpec(OutputKind.USER_OUTPUT, argument, None) for argument in outputs],
    )
    return _PureProgram(
        module,
        nodes,
        signature,
        state_dict={},
        range_constraints={},
        module_call_graph=[ModuleCallEntry("", call)],
        example_inputs=example,
        constants={name: getattr(module, name) for name in constants},
    )


class _PureProgram(ExportedProgram):
    """A program of operators that have a form in ONNX already, unless torch asks for another form of one."""

    def run_decompositions(self, decomp_table: Any = None) -> ExportedProgram:
        if decomp_table is not None and not any(node.target in decomp_table for node in self.graph.nodes):
            return self
        program: ExportedProgram = super().run_decompositions(decomp_table)
        return program


@contextmanager
def name_layers(module: torch.nn.Module, inputs: Array) -> Iterator[None]:
    """Adds to a `TaskError` that names operators the layers that call them."""
    try:
        yield
    except TaskError as error:
        names = _find_layers(module, inputs, {*_OPERATOR.findall(str(error))})
        where = f" (in {', '.join(names[:_MAX_NAMES])})" if names else ""
        raise TaskError(f"the network cannot be compiled: {error}{where}") from error


def _check_randomness(graph: torch.fx.Graph) -> None:
    """Raises where an operator draws: ONNX's own random numbers could be neither checked nor repeated."""
    for node in graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise TaskError(
                f"operator {node.target} draws random numbers; only dropout of torch.nn may (as a layer, or called "
                "as torch.nn.functional.dropout), and Tensor.bernoulli_"
            )


def _clean(module: torch.fx.GraphModule, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Removes what has no meaning in ONNX, and returns the inputs that are left."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=aten.clone.default):
        node.replace_all_uses_with(node.args[0])  # nothing is changed in place any more
    for target in (aten.view.default, aten._unsafe_view.default):  # noqa: SLF001 torch's name of an operator
        for node in graph.find_nodes(op="call_function", target=target):
            node.target = aten.reshape.default  # there are no strides in ONNX, but an export checks those of views
    graph.eliminate_dead_code()
    left: dict[str, torch.Tensor] = {}
    for name, node in zip(inputs, graph.find_nodes(op="placeholder"), strict=True):
        if node.users:
            left[name] = inputs[name]
        else:
            graph.erase_node(node)
    module.recompile()
    return left


def _find_layers(module: torch.nn.Module, inputs: Array, operators: set[str]) -> list[str]:
    """Returns the layers in whose forward pass one of the operators runs."""
    recorder = _Recorder()
    handles = []
    for name, layer in module.named_modules():
        label = f"{name or 'the network itself'}, a {type(layer).__name__}"
        handles += [
            layer.register_forward_pre_hook(lambda *_, label=label: recorder.stack.append(label)),
            layer.register_forward_hook(lambda *_: recorder.stack.pop() and None),
        ]
    try:
        with torch.no_grad(), recorder:
            module.train()(torch.from_numpy(inputs))
    except Exception:  # noqa: BLE001 the layers only make a message better
        return []
    finally:
        for handle in handles:
            handle.remove()
    return [layer for operator in operators for layer in recorder.layers[operator]]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Layers by the name of the operators that run in them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stack: list[str] = []
        self.layers: dict[str, dict[str, None]] = defaultdict(dict)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.stack:
            self.layers[func.overloadpacket.__name__].setdefault(self.stack[-1])
        return func(*args, **(kwargs or {}))
