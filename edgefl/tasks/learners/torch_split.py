"""Split learning with torch: a network cut after a module, and a learner for each side of the cut.

torch.fx follows the network from its input to the module's output and on from there; only the modules around that one
are looked into, all others are taken as they are. So a `Sequential`, a network of blocks and a `forward` with
functions between its modules can be cut. What cannot: a cut that a second value goes past (a skip connection), a
module that is called twice, weights that both sides use, and control flow that depends on data around the module.

Sources: Gupta and Raskar, Distributed learning of deep neural network over multiple agents, JNCA 2018, algorithms 1
and 2; Vepakomma et al., Split learning for health, 2018, section 2 (labels that stay on the device).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from edgefl.core.errors import ConfigError, TaskError
from edgefl.core.types import Array, Dataset, Learner
from edgefl.tasks.learners.torch_learner import TorchLearner, list_saved_buffers
from edgefl.tasks.losses.class_losses import CrossEntropy
from edgefl.tasks.losses.loss import to_classes
from edgefl.tasks.onnx_graph import get_first_line
from edgefl.tasks.registry import import_torch

if TYPE_CHECKING:
    import torch

MAX_LISTED_MODULES = 30


class Exchange(Protocol):
    """Sends a batch's activations to the rest of the network; implemented over HTTPS and within a process."""

    def __call__(self, activations: Array, labels: Array) -> tuple[float, Array]:
        """Returns the mean loss and its gradient by the activations, which has their shape."""


def _refuse_exchange(activations: Array, labels: Array) -> tuple[float, Array]:  # noqa: ARG001 as `Exchange`
    raise TaskError("the first layers of a split network train only with the rest of it, at a coordinator")


class FrontLearner(TorchLearner):
    """A `Learner` of the first layers: the gradient of their output comes from `exchange`.

    Attributes:
        exchange: set for each assignment.
    """

    exchange: Exchange = staticmethod(_refuse_exchange)

    def gradient(self, batch: Dataset) -> float:
        if batch.weights is not None:
            raise TaskError("a split network takes no weights of examples")
        self.start_training(len(batch))
        activations = self._logits(batch.inputs)
        loss, gradient = self.exchange(activations.detach().cpu().numpy(), batch.targets)
        _propagate(activations, self._torch.from_numpy(np.array(gradient, np.float32)).to(self._device))
        return loss


class RestLearner(TorchLearner):
    """A `Learner` of the layers after the cut; its inputs are activations.

    Attributes:
        input_gradient: of the mean loss by the activations of the last batch.
    """

    input_gradient: Array

    def __init__(self, module: torch.nn.Module, *, accelerator: str = "cpu", threads: int | None = None) -> None:
        super().__init__(module, accelerator=accelerator, threads=threads)
        self._inputs: torch.Tensor | None = None
        self._outputs: torch.Tensor | None = None

    def gradient(self, batch: Dataset) -> float:
        loss, gradient = compute_loss_gradient(self.forward(batch.inputs), batch.targets)
        self.backward(gradient)
        return loss

    def forward(self, activations: Array) -> Array:
        """Returns the network's outputs [n, classes], and keeps the batch for `backward`."""
        self.start_training(len(activations))
        self._inputs = self._torch.from_numpy(np.array(activations, np.float32)).to(self._device).requires_grad_()
        self._outputs = self._module(self._inputs)
        return np.array(self._outputs.detach().cpu().numpy())

    def backward(self, output_gradient: Array) -> None:
        """Fills `gradients` and `input_gradient` from the gradient of the loss by the outputs of `forward`."""
        if self._inputs is None or self._outputs is None:
            raise TaskError("a gradient of outputs came before their activations")
        _propagate(self._outputs, self._torch.from_numpy(np.array(output_gradient, np.float32)).to(self._device))
        assert self._inputs.grad is not None
        self.input_gradient = np.array(self._inputs.grad.cpu().numpy())
        self._inputs = self._outputs = None


def _propagate(outputs: torch.Tensor, gradient: torch.Tensor) -> None:
    """Adds to all gradients behind `outputs`, from their own."""
    # `outputs.backward(gradient)` does the same, and imports sympy for it: 30 MB on a board.
    total: Any = (outputs * gradient).sum()
    total.backward()


def compute_loss_gradient(outputs: Array, labels: Array) -> tuple[float, Array]:
    """Returns the mean cross-entropy of outputs [n, classes], and its gradient by them.

    Raises:
        TaskError: a label is no class of the outputs.
    """
    backend = import_torch()
    logits = backend.from_numpy(np.array(outputs, np.float32)).requires_grad_()
    loss = backend.nn.functional.cross_entropy(logits, backend.from_numpy(to_classes(labels, logits.shape[1])))
    loss.backward()
    return float(loss.item()), np.array(logits.grad.numpy())


def cut_learner(learner: Learner, after: str, *, threads: int | None = None) -> tuple[FrontLearner, RestLearner]:
    """Returns the learners of both sides of a cut; they share the weights of the given one.

    Args:
        learner: of the whole network.
        after: name of a module, such as `features.6`, whose output is sent.
        threads: torch threads of this whole process; None leaves torch's choice.

    Raises:
        ConfigError: the network is none of torch, or cannot be cut there; the message names where it can.
    """
    whole = _check_learner(learner, after)
    _, rest = cut_module(whole.module, after)
    front = cut_front(learner, after, threads=threads)
    return front, RestLearner(rest, accelerator=_get_accelerator(whole.module), threads=threads)


def cut_front(learner: Learner, after: str, *, threads: int | None = None) -> FrontLearner:
    """Returns the learner before a cut alone; as `cut_learner`."""
    whole = _check_learner(learner, after)
    front, _ = cut_module(whole.module, after)
    return FrontLearner(front, prepare=whole.prepare, accelerator=_get_accelerator(whole.module), threads=threads)


def cut_rest(learner: Learner, after: str, *, threads: int | None = None) -> RestLearner:
    """Returns the learner after a cut alone, on the CPU; as `cut_learner`."""
    _, rest = cut_module(_check_learner(learner, after).module, after)
    return RestLearner(rest.cpu(), threads=threads)


def _get_accelerator(module: torch.nn.Module) -> str:
    return str(next(module.parameters()).device)


def _check_learner(learner: Learner, after: str) -> TorchLearner:
    if not isinstance(learner, TorchLearner):
        raise ConfigError(
            f"split.after = {after!r} needs a network of torch, this task's model trains with "
            f"{type(learner).__name__}; choose another model in [task]"
        )
    if learner.loss != CrossEntropy():
        raise ConfigError(
            f"split.after = {after!r}: a split network trains with cross-entropy, got {learner.loss.name}"
        )
    return learner


def cut_module(module: torch.nn.Module, after: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Returns the parts of a network up to a module, and from its output on, with the parameters' own names.

    Raises:
        ConfigError: there is no such module, or no cut after it; the message names those that have one.
    """
    try:
        return _cut(module, after)
    except _NoCutError as error:
        names = list_cuts(module)
        listed = ", ".join(names[:MAX_LISTED_MODULES]) or "none"
        suffix = f" and {len(names) - MAX_LISTED_MODULES} more" if len(names) > MAX_LISTED_MODULES else ""
        raise ConfigError(
            f"split.after must be a module of the network after which it can be cut ({listed}{suffix}), "
            f"got {after!r}: {error}"
        ) from None


def list_cuts(module: torch.nn.Module) -> list[str]:
    """Returns the names of the modules after which the network can be cut."""
    return [name for name, _ in module.named_modules() if name and _can_cut(module, name)]


def _can_cut(module: torch.nn.Module, after: str) -> bool:
    try:
        _cut(module, after)
    except _NoCutError:
        return False
    return True


class _NoCutError(Exception):
    """The network cannot be cut there; the text says why."""


def _cut(module: torch.nn.Module, after: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    from torch import fx  # noqa: PLC0415 torch is imported when first used

    if not after or after not in dict(module.named_modules()):
        raise _NoCutError("there is no such module")
    graph = _trace(module, after)
    nodes = list(graph.nodes)
    calls = [index for index, node in enumerate(nodes) if node.op == "call_module" and node.target == after]
    if len(calls) != 1:
        raise _NoCutError(f"it is called {len(calls)} times")
    boundary = nodes[calls[0]]
    first, last = nodes[: calls[0] + 1], nodes[calls[0] + 1 :]
    for node in first[:-1]:
        if any(user in last for user in node.users):
            raise _NoCutError(f"another value ({node.name}) goes past it")
    front, rest = fx.Graph(), fx.Graph()
    copied: dict[Any, Any] = {}
    for node in first:
        copied[node] = front.node_copy(node, copied.__getitem__)
    front.output(copied[boundary])
    copied = {boundary: rest.placeholder("activations")}
    for node in last:
        copied[node] = rest.node_copy(node, copied.__getitem__)
    parts = fx.GraphModule(module, front), fx.GraphModule(module, rest)
    _check_parameters(module, *parts)
    return parts


def _trace(module: torch.nn.Module, after: str) -> Any:
    from torch import fx  # noqa: PLC0415 as above

    class Tracer(fx.Tracer):
        def is_leaf_module(self, _module: torch.nn.Module, name: str) -> bool:
            return not after.startswith(f"{name}.")

    try:
        graph = Tracer().trace(module.train())
    except Exception as error:  # noqa: BLE001 a network's own code may raise anything when it is followed
        raise _NoCutError(f"torch.fx cannot follow the network: {get_first_line(error)}") from None
    if sum(node.op == "placeholder" for node in graph.nodes) != 1:
        raise _NoCutError("the network takes more than one input")
    return graph


def _check_parameters(whole: torch.nn.Module, front: torch.nn.Module, rest: torch.nn.Module) -> None:
    """Checks that every saved tensor is in exactly one part, and that both parts have something to train."""
    names = [list_tensor_names(part) for part in (whole, front, rest)]
    for side, part in (("before", front), ("after", rest)):
        if not any(True for _ in part.parameters()):
            raise _NoCutError(f"nothing is to be trained {side} the cut")
    addresses = [{id(parameter) for parameter in part.parameters()} for part in (front, rest)]
    if (names[1] & names[2]) or (addresses[0] & addresses[1]):
        raise _NoCutError("both sides of the cut use the same weights")
    if unused := names[0] - names[1] - names[2]:
        raise _NoCutError(f"the network does not use its tensor {min(unused)}")


def list_tensor_names(module: torch.nn.Module) -> set[str]:
    """Returns the names of a module's parameters and saved buffers."""
    return {name for name, _ in [*module.named_parameters(), *list_saved_buffers(module)]}
