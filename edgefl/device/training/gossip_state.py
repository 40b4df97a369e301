"""Gossip node of the current run: kept in memory, and on disk for a reboot."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from edgefl.compression.peer_codec import PeerCodec, select_peer_tensors
from edgefl.core.errors import ConfigError, StoreError
from edgefl.core.types import GossipConfig, Learner, ModelSpec, derive_rng
from edgefl.decentralised.gossip_node import GossipNode
from edgefl.decentralised.registry import make_configured_algorithm
from edgefl.device.training.client_state import SAVE_INTERVAL_S
from edgefl.device.training.run_arrays import load_arrays, save_arrays
from edgefl.tasks.local_algorithms.decentralised_training import start_node
from edgefl.tasks.local_algorithms.local_training import is_finite

log = logging.getLogger(__name__)

STATE_FOLDER = "nodes"


class GossipStateStore:
    """Store of one run's gossip node; used by the training thread.

    Args:
        device_id: of the node.
        state_dir: the device's state directory.
        incarnation: grows with every start of the device, 1 or more.
        clock: seconds, monotone.
    """

    def __init__(
        self, device_id: str, state_dir: Path, *, incarnation: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._device_id, self._folder, self._incarnation, self._clock = (
            device_id,
            state_dir / STATE_FOLDER,
            incarnation,
            clock,
        )
        self._run_id = ""
        self._node: GossipNode | None = None
        self._last_saved_s = clock()

    def load(self, run: str, plan: GossipConfig, learner: Learner, shapes: ModelSpec) -> GossipNode | None:
        """Returns the node of a run from memory or disk, or None, when a model is needed."""
        if self.has_diverged(run):
            log.warning("the node of run %s has diverged; it begins anew", run)
            return None
        if self._run_id == run and self._node is not None:
            return self._node
        saved = load_arrays(self._folder, run)
        if saved is None:
            return None
        node = self._make_node(plan, shapes)
        try:
            start_node(node, learner, shapes)
            node.restore(saved)
        except (ConfigError, KeyError, ValueError) as error:
            log.warning("what was kept of the node in run %s is of no use: %s", run, error)
            return None
        log.info("goes on as node of run %s after %d iterations", run, node.algorithm.iterations)
        return self._set_current(run, node)

    def has_diverged(self, run: str) -> bool:
        """Returns whether the node of a run has diverged and must restart."""
        return self._run_id == run and self._node is not None and not is_finite(self._node.algorithm.weights)

    def create(self, run: str, plan: GossipConfig, learner: Learner, shapes: ModelSpec) -> GossipNode:
        """Returns the node of a run, started from the learner's model; keeps step numbers of an existing one."""
        former_node = self._node if self._run_id == run else None
        node = former_node or self._make_node(plan, shapes)
        start_node(node, learner, shapes)
        return self._set_current(run, node)

    def save(self, *, only_when_due: bool = False) -> None:
        """Writes the node unless it has diverged; a full card does not stop the work.

        Args:
            only_when_due: writes nothing within five minutes of the last write, to limit card wear.
        """
        if self._node is None or (only_when_due and self._clock() - self._last_saved_s < SAVE_INTERVAL_S):
            return
        self._last_saved_s, state = self._clock(), self._node.state()
        if not is_finite(state):
            return
        try:
            save_arrays(self._folder, self._run_id, state)
        except (OSError, StoreError) as error:
            log.warning("cannot keep the node of run %s: %s", self._run_id, error)

    def _make_node(self, plan: GossipConfig, shapes: ModelSpec) -> GossipNode:
        node = make_configured_algorithm(plan, self._device_id, incarnation=self._incarnation)
        codec = PeerCodec(plan.codec, select_peer_tensors(shapes), epoch=self._incarnation)
        return GossipNode(node, codec, derive_rng("edges", self._device_id, self._incarnation))

    def _set_current(self, run: str, node: GossipNode) -> GossipNode:
        if node is not self._node:
            self.save()
        self._run_id, self._node = run, node
        # At once: after another reboot, the restored node must not be older than messages seen by neighbours.
        self.save()
        return node
