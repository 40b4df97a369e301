"""GRU and LSTM as operators of their own: the graph of a long sequence is no larger than that of a short one.

Forward they are ONNX's operators. When the backward pass begins, the gates of all steps are functions of known inputs
and states; what is left step by step is the gradient of one
state by the next, in a `Scan`.

Sources: Cho et al., EMNLP 2014, in the form of torch (reset gate after the product); Hochreiter and Schmidhuber,
Neural Computation 1997, with the forget gate of Gers et al., 2000.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from edgefl.core.errors import TaskError

Tensor = torch.Tensor


@torch.library.custom_op("edgefl::gru", mutates_args=())
def run_gru(x: Tensor, w_in: Tensor, w_state: Tensor, b_in: Tensor, b_state: Tensor, first: Tensor) -> Tensor:
    """Returns the states [steps, n, hidden] after each step of x [steps, n, inputs]; gates are in torch's order."""
    states = [first]
    for step in functional.linear(x, w_in, b_in):
        reset, update, new = step.chunk(3, -1)
        reset_state, update_state, new_state = functional.linear(states[-1], w_state, b_state).chunk(3, -1)
        update = torch.sigmoid(update + update_state)
        new = torch.tanh(new + torch.sigmoid(reset + reset_state) * new_state)
        states.append((1.0 - update) * new + update * states[-1])
    return torch.stack(states[1:])


@torch.library.custom_op("edgefl::gru_gradient", mutates_args=())
def run_gru_gradient(grad: Tensor, slopes: Tensor, update: Tensor, w_state: Tensor) -> Tensor:
    """Returns the gradients of all states, [steps, n, hidden].

    Args:
        grad: [steps, n, hidden] of each state by what comes after the layer.
        slopes: [steps, n, 3 · hidden] of the state by the three products with the state before.
        update: [steps, n, hidden], the values of the update gate.
        w_state: [3 · hidden, hidden].
    """
    carried, found = torch.zeros_like(grad[0]), []
    for step in reversed(range(len(grad))):
        found.append(grad[step] + carried)
        carried = found[-1] * update[step] + (found[-1].repeat(1, 3) * slopes[step]) @ w_state
    return torch.stack(found[::-1])


@torch.library.custom_op("edgefl::lstm", mutates_args=())
def run_lstm(
    x: Tensor, w_in: Tensor, w_state: Tensor, bias: Tensor, first: Tensor, first_cell: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the states of an LSTM as `run_gru`, and its last cell; the bias is the sum of torch's two."""
    states, cell = [first], first_cell
    for step in functional.linear(x, w_in, bias):
        entry, forget, new, exit_ = (step + states[-1] @ w_state.T).chunk(4, -1)
        cell = torch.sigmoid(forget) * cell + torch.sigmoid(entry) * torch.tanh(new)
        states.append(torch.sigmoid(exit_) * torch.tanh(cell))
    return torch.stack(states[1:]), cell.clone()


@torch.library.custom_op("edgefl::lstm_cells", mutates_args=())
def run_lstm_cells(forget: Tensor, added: Tensor, first_cell: Tensor) -> Tensor:
    """Returns the cells [steps, n, hidden]: each is forget times the one before, plus what is added."""
    cells = [first_cell]
    for factor, term in zip(forget, added, strict=True):
        cells.append(factor * cells[-1] + term)
    return torch.stack(cells[1:])


@torch.library.custom_op("edgefl::lstm_gradient", mutates_args=())
def run_lstm_gradient(
    grad: Tensor, through: Tensor, slopes: Tensor, outer: Tensor, w_state: Tensor, grad_cell: Tensor
) -> Tensor:
    """Returns the gradients of all states and cells, [steps, n, 2 · hidden].

    Args:
        grad: [steps, n, hidden] of each state by what comes after the layer.
        through: [steps, n, hidden], slope of the state by its cell.
        slopes: [steps, n, 3 · hidden] of the cell by the products of its three gates.
        outer: [steps, n, 2 · hidden], slope of the state by the product of the output gate, and the forget gate.
        w_state: [4 · hidden, hidden].
        grad_cell: [n, hidden], of the last cell by what comes after the layer.
    """
    carried, carried_cell, found = torch.zeros_like(grad[0]), grad_cell, []
    for step in reversed(range(len(grad))):
        by_exit, forget = outer[step].chunk(2, -1)
        state = grad[step] + carried
        cell = state * through[step] + carried_cell
        found.append(torch.cat([state, cell], -1))
        carried = torch.cat([cell.repeat(1, 3) * slopes[step], state * by_exit], -1) @ w_state
        carried_cell = cell * forget
    return torch.stack(found[::-1])


@run_gru.register_fake
def _(x: Tensor, w_in: Tensor, w_state: Tensor, b_in: Tensor, b_state: Tensor, first: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], *first.shape))


@run_gru_gradient.register_fake
def _(grad: Tensor, slopes: Tensor, update: Tensor, w_state: Tensor) -> Tensor:
    return torch.empty_like(grad)


@run_lstm.register_fake
def _(
    x: Tensor, w_in: Tensor, w_state: Tensor, bias: Tensor, first: Tensor, first_cell: Tensor
) -> tuple[Tensor, Tensor]:
    return x.new_empty((x.shape[0], *first.shape)), torch.empty_like(first_cell)


@run_lstm_cells.register_fake
def _(forget: Tensor, added: Tensor, first_cell: Tensor) -> Tensor:
    return torch.empty_like(forget)


@run_lstm_gradient.register_fake
def _(grad: Tensor, through: Tensor, slopes: Tensor, outer: Tensor, w_state: Tensor, grad_cell: Tensor) -> Tensor:
    return torch.empty_like(outer)


class GruStates(torch.autograd.Function):
    """`run_gru` with its gradient."""

    @staticmethod
    def forward(*inputs: Tensor) -> Tensor:
        states: Tensor = run_gru(*inputs)
        return states

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x, w_in, w_state, b_in, b_state, first, states = (value.detach() for value in ctx.saved_tensors)
        before = torch.cat([first[None], states[:-1]])
        reset, update, new = functional.linear(x, w_in, b_in).chunk(3, -1)
        reset_state, update_state, new_state = functional.linear(before, w_state, b_state).chunk(3, -1)
        reset, update = torch.sigmoid(reset + reset_state), torch.sigmoid(update + update_state)
        new = torch.tanh(new + reset * new_state)
        by_new = (1.0 - update) * (1.0 - new * new)
        both = [by_new * new_state * reset * (1.0 - reset), (before - new) * update * (1.0 - update)]
        slopes = torch.cat([*both, by_new * reset], -1)
        gradient = run_gru_gradient(grads[0].detach(), slopes, update, w_state)
        repeated = torch.cat([gradient] * 3, -1)
        inner, outer = repeated * slopes, repeated * torch.cat([*both, by_new], -1)
        by_first = gradient[0] * update[0] + inner[0] @ w_state
        return (
            outer @ w_in, _sum_products(outer, x), _sum_products(inner, before), outer.sum((0, 1)),
            inner.sum((0, 1)), by_first,
        )  # fmt: skip


class LstmStates(torch.autograd.Function):
    """`run_lstm` with its gradient."""

    @staticmethod
    def forward(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        states, cell = run_lstm(*inputs)
        return states, cell

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, output[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x, w_in, w_state, bias, first, first_cell, states = (value.detach() for value in ctx.saved_tensors)
        before = torch.cat([first[None], states[:-1]])
        entry, forget, new, leave = (functional.linear(x, w_in, bias) + before @ w_state.T).chunk(4, -1)
        entry, forget, leave, new = torch.sigmoid(entry), torch.sigmoid(forget), torch.sigmoid(leave), torch.tanh(new)
        cells = run_lstm_cells(forget, entry * new, first_cell)
        cells_before, squashed = torch.cat([first_cell[None], cells[:-1]]), torch.tanh(cells)
        slopes = torch.cat(
            [new * entry * (1.0 - entry), cells_before * forget * (1.0 - forget), entry * (1.0 - new * new)], -1
        )
        by_leave = squashed * leave * (1.0 - leave)
        through, outer = leave * (1.0 - squashed * squashed), torch.cat([by_leave, forget], -1)
        gradient = run_lstm_gradient(grads[0].detach(), through, slopes, outer, w_state, grads[1].detach())
        by_state, by_cell = gradient.chunk(2, -1)
        gates = torch.cat([torch.cat([by_cell] * 3, -1) * slopes, by_state * by_leave], -1)
        return (
            gates @ w_in, _sum_products(gates, x), _sum_products(gates, before), gates.sum((0, 1)),
            gates[0] @ w_state, by_cell[0] * forget[0],
        )  # fmt: skip


def _sum_products(grad: Tensor, value: Tensor) -> Tensor:
    """Returns the gradient of a weight by those of all its products with a value."""
    return grad.flatten(0, 1).T @ value.flatten(0, 1)


def run_layer(layer: nn.RNNBase, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
    """Returns what a GRU or LSTM of torch returns for a batch, by the operators above.

    Raises:
        TaskError: the layer or its input is of a kind that has no form here.
    """
    if not torch.is_tensor(x) or x.ndim != 3 or layer.proj_size:
        raise TaskError(
            f"a {type(layer).__name__} of packed or single sequences, or with proj_size, has no form in ONNX yet"
        )
    x = _turn(layer, x)
    first = _make_first_states(layer, x.shape[1], x, state)
    last: list[list[Tensor]] = []
    for level in range(layer.num_layers):
        parts = []
        for direction in range(1 + layer.bidirectional):
            states, ends = _run_direction(layer, x, level, direction, [part[len(last)] for part in first])
            parts.append(states)
            last.append(ends)
        x = torch.cat(parts, -1)
        if level < layer.num_layers - 1:
            x = _turn(layer, functional.dropout(_turn(layer, x), layer.dropout, layer.training))
    ended = tuple(torch.stack(values) for values in zip(*last, strict=True))
    return _turn(layer, x), ended if len(ended) > 1 else ended[0]


def run_levels(layer: nn.RNNBase, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
    """Returns the same by torch's own operators, one level at a time, so that dropout is a function by itself."""
    num_directions = 1 + layer.bidirectional
    function: Any = torch.lstm if isinstance(layer, nn.LSTM) else torch.gru
    first = _make_first_states(layer, x.shape[0 if layer.batch_first else 1], x, state)
    last = []
    for level in range(layer.num_layers):
        start = level * num_directions
        starting = [part[start : start + num_directions] for part in first]
        names = [f"l{level}{'_reverse' * direction}" for direction in range(num_directions)]
        kinds = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if layer.bias else ()))
        weights = [getattr(layer, f"{kind}_{name}") for name in names for kind in kinds]
        x, *ends = function(
            x, starting if len(starting) > 1 else starting[0], weights, layer.bias, 1, 0.0, layer.training,
            layer.bidirectional, layer.batch_first,
        )  # fmt: skip
        last.append(ends)
        if level < layer.num_layers - 1:
            x = functional.dropout(x, layer.dropout, layer.training)
    ended = tuple(torch.cat(values) for values in zip(*last, strict=True))
    return x, ended if len(ended) > 1 else ended[0]


def _run_direction(
    layer: nn.RNNBase, x: Tensor, level: int, direction: int, first: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Returns the states in the order of time, and the last one, of an LSTM with its cell."""
    suffix = f"l{level}{'_reverse' * direction}"
    w_in, w_state = getattr(layer, f"weight_ih_{suffix}"), getattr(layer, f"weight_hh_{suffix}")
    zeros = w_in.new_zeros(w_in.shape[0])
    b_in, b_state = (getattr(layer, f"bias_{part}_{suffix}") if layer.bias else zeros for part in ("ih", "hh"))
    x = x.flip(0) if direction else x
    if isinstance(layer, nn.LSTM):
        states, cell = LstmStates.apply(x, w_in, w_state, b_in + b_state, *first)  # type: ignore[no-untyped-call]
        ends = [states[-1], cell]
    else:
        states = GruStates.apply(x, w_in, w_state, b_in, b_state, *first)  # type: ignore[no-untyped-call]
        ends = [states[-1]]
    return states.flip(0) if direction else states, ends


def _make_first_states(layer: nn.RNNBase, num_sequences: int, x: Tensor, state: Any) -> list[Tensor]:
    """Returns the first states, and of an LSTM the first cells, each [levels · directions, n, hidden]."""
    if state is not None:
        return [*state] if isinstance(layer, nn.LSTM) else [state]
    zeros = x.new_zeros((layer.num_layers * (1 + layer.bidirectional), num_sequences, layer.hidden_size))
    return [zeros, zeros] if isinstance(layer, nn.LSTM) else [zeros]


def _turn(layer: nn.RNNBase, x: Tensor) -> Tensor:
    """Returns a layer's sequences with steps first, or those with steps first as the layer has them."""
    return x.transpose(0, 1) if layer.batch_first else x
