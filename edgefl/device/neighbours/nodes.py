"""The node of a graph that a device is in the run at hand: made once, kept warm, and on disk against a reboot."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from edgefl.compression.edges import EdgeCodec, edge_shapes
from edgefl.decentralised.engine import Engine
from edgefl.decentralised.methods import node_of
from edgefl.device.run_files import load_arrays, save_arrays
from edgefl.device.run_memory import SAVE_EVERY_S
from edgefl.errors import ConfigError, StoreError
from edgefl.tasks.local_training import is_finite
from edgefl.tasks.node_training import begin_node
from edgefl.types import Learner, NodePlan, Shapes, derived_rng

log = logging.getLogger(__name__)

FOLDER = "nodes"


class Nodes:
    """Used by the thread that trains. One run at a time.

    Args:
        device_id: whose node it is.
        state_dir: the device's state directory.
        life: grows with every start of the device, 1 or more.
        clock: seconds, monotone.
    """

    def __init__(
        self, device_id: str, state_dir: Path, *, life: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._device_id, self._folder, self._life, self._clock = device_id, state_dir / FOLDER, life, clock
        self._run = ""
        self._engine: Engine | None = None
        self._saved_s = clock()

    def engine(self, run: str, plan: NodePlan, learner: Learner, shapes: Shapes) -> Engine | None:
        """Returns the node of a run, from memory or from disk; None when there is none, and a model is needed."""
        if self.has_diverged(run):
            log.warning("the node of run %s has diverged; it begins anew", run)
            return None
        if self._run == run and self._engine is not None:
            return self._engine
        saved = load_arrays(self._folder, run)
        if saved is None:
            return None
        engine = self._made(plan, shapes)
        try:
            begin_node(engine, learner, shapes)
            engine.restore(saved)
        except (ConfigError, KeyError, ValueError) as error:
            log.warning("what was kept of the node in run %s is of no use: %s", run, error)
            return None
        log.info("goes on as node of run %s after %d iterations", run, engine.node.iterations)
        return self._entered(run, engine)

    def has_diverged(self, run: str) -> bool:
        """Says whether the node of a run is of no use any more, and is to begin anew."""
        return self._run == run and self._engine is not None and not is_finite(self._engine.node.weights)

    def begin(self, run: str, plan: NodePlan, learner: Learner, shapes: Shapes) -> Engine:
        """Returns the node of a run, which starts from the learner's model; one that there was numbers on."""
        known = self._engine if self._run == run else None
        engine = known or self._made(plan, shapes)
        begin_node(engine, learner, shapes)
        return self._entered(run, engine)

    def save(self, *, only_when_due: bool = False) -> None:
        """Writes the node; one whose training diverged is not kept, and a card without room stops no work.

        Args:
            only_when_due: writes nothing within five minutes of the last time, since cards wear out.
        """
        if self._engine is None or (only_when_due and self._clock() - self._saved_s < SAVE_EVERY_S):
            return
        self._saved_s, state = self._clock(), self._engine.state()
        if not is_finite(state):
            return
        try:
            save_arrays(self._folder, self._run, state)
        except (OSError, StoreError) as error:
            log.warning("cannot keep the node of run %s: %s", self._run, error)

    def _made(self, plan: NodePlan, shapes: Shapes) -> Engine:
        node = node_of(plan, self._device_id, life=self._life)
        codec = EdgeCodec(plan.codec, edge_shapes(shapes), epoch=self._life)
        return Engine(node, codec, derived_rng("edges", self._device_id, self._life))

    def _entered(self, run: str, engine: Engine) -> Engine:
        if engine is not self._engine:
            self.save()
        self._run, self._engine = run, engine
        # At once: after a second reboot the life is another again, but what neighbours have seen must not be newer.
        self.save()
        return engine
