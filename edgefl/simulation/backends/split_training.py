"""Split learning in the simulator: a device's first layers and the coordinator's rest of the network, in one process.

Batches go through the run's codecs as live, and their bytes are counted.
"""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from edgefl.compression.split_bodies import BatchCodec, join_displacements
from edgefl.core.config import SplitSection
from edgefl.core.protocol import SPLIT_LABEL_BYTES, SPLIT_LOSS_BYTES
from edgefl.core.types import Array, Learner, ModelSpec, Task, TrainInstruction, derive_rng
from edgefl.tasks.learners.torch_split import compute_loss_gradient, cut_learner
from edgefl.tasks.local_algorithms.rest_training import RestTraining
from edgefl.tasks.network_cut import get_input_shape


class SimulatedSplit:
    """Both sides of a cut network, which share their weights with the whole one.

    Args:
        task: that is trained.
        learner: of the whole network.
        section: of the run file, with a cut.
        seed: of the run.
    """

    def __init__(self, task: Task, learner: Learner, section: SplitSection, seed: int) -> None:
        assert section.after is not None
        self._section, self._seed = section, seed
        self.front, self._rest = cut_learner(learner, section.after, threads=1)
        self._rest_names = frozenset(self._rest.read())
        self._model_spec = task.shapes()
        self.front_spec: ModelSpec = tuple(spec for spec in self._model_spec if spec.name not in self._rest_names)
        inputs = np.zeros((1, *get_input_shape(task)), np.float32)
        activations = self.front.logits(inputs)
        self._num_outputs = self._rest.logits(activations).shape[1]
        self._up = BatchCodec(section.up, activations.shape[1:])
        self._down = BatchCodec(section.down, activations.shape[1:])

    def start(self, instruction: TrainInstruction, source: tuple[int | str, ...]) -> SimulatedExchange:
        """Starts an assignment from the loaded weights; from now on `front` exchanges its batches with the rest."""
        exchange = SimulatedExchange(
            RestTraining(self._rest, instruction.plan, self._rest.read()),
            self._up,
            self._down,
            BatchCodec("dense", (self._num_outputs,)) if self._section.labels == "device" else None,
            derive_rng(self._seed, instruction.base_version, *source, "activations"),
            derive_rng(self._seed, instruction.base_version, *source, "gradients"),
        )
        self.front.exchange = exchange
        return exchange

    def join(self, front_body: bytes, exchange: SimulatedExchange) -> bytes:
        """Returns the displacement of the whole network as one dense body, as the coordinator makes it live."""
        return join_displacements(front_body, exchange.training.finish(), self.front_spec, self._model_spec)


class SimulatedExchange:
    """Implements `Exchange` within a process; `bytes_up` and `bytes_down` are the bodies so far."""

    def __init__(
        self,
        training: RestTraining,
        up: BatchCodec,
        down: BatchCodec,
        outputs: BatchCodec | None,
        up_rng: Generator,
        down_rng: Generator,
    ) -> None:
        self.training = training
        self._up, self._down, self._outputs = up, down, outputs
        self._up_rng, self._down_rng = up_rng, down_rng
        self.bytes_up = self.bytes_down = 0

    def __call__(self, activations: Array, labels: Array) -> tuple[float, Array]:
        received = self._send_up(self._up, activations)
        if self._outputs is None:
            self.bytes_up += SPLIT_LABEL_BYTES * len(labels)
            self.bytes_down += SPLIT_LOSS_BYTES
            loss, gradient = self.training.step(received, labels)
        else:
            outputs = self._send_down(self._outputs, self.training.forward(received))
            loss, output_gradient = compute_loss_gradient(outputs, labels)
            gradient = self.training.backward(self._send_up(self._outputs, output_gradient))
        return loss, self._send_down(self._down, gradient)

    def _send_up(self, codec: BatchCodec, batch: Array) -> Array:
        body = codec.encode(batch, self._up_rng)
        self.bytes_up += len(body)
        return codec.decode(body, len(batch))

    def _send_down(self, codec: BatchCodec, batch: Array) -> Array:
        body = codec.encode(batch, self._down_rng)
        self.bytes_down += len(body)
        return codec.decode(body, len(batch))
