"""Runner of autonomous gossip nodes: session, message transport, and recovery after a reboot."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from edgefl.core.errors import EdgeflError, NetworkError, StoreError
from edgefl.core.protocol import host_and_port
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import GossipConfig, Json, PeerMessage, TrainConfig, derive_rng
from edgefl.decentralised.gossip_node import GossipNode
from edgefl.decentralised.message_bundle import decode_peer_message, encode_peer_message
from edgefl.device.peers.gossip_session import GossipReport, GossipSession, TrainLocally
from edgefl.device.peers.metrics import PeerMetrics
from edgefl.device.peers.transport import PeerTransport
from edgefl.system.atomic_files import write_atomic

log = logging.getLogger(__name__)

INSTRUCTION_FILE = "node.json"
MAX_COMPLETED_RUNS = 16
"""Number of completed runs that are stored: the command may come before the node has been resumed."""

MakePeerTransport = Callable[[GossipConfig, Callable[[str, bytes], None]], PeerTransport]
"""(plan, callback with sender and payload of each message) -> transport, not yet started."""


def get_peer_addresses(plan: GossipConfig) -> dict[str, tuple[str, int]]:
    """Returns the known listening addresses of a node's neighbours."""
    return {edge.neighbour: host_and_port(edge.address) for edge in plan.edges if edge.address}


class GossipRunner:
    """Owner of a device's only gossip session; used by the training thread, transports call `receive`.

    Args:
        device_id: of the node.
        state_dir: the device's state directory.
        make_transport: see `MakePeerTransport`; None on a device without transports.
    """

    def __init__(self, device_id: str, state_dir: Path, make_transport: MakePeerTransport | None) -> None:
        self._device_id, self._path, self._make_transport = device_id, state_dir / INSTRUCTION_FILE, make_transport
        self._run_id = ""
        self._session: GossipSession | None = None
        self._transport: PeerTransport | None = None
        self._paused_transport: PeerTransport | None = None
        self._lock = threading.RLock()
        self._completed_runs: deque[str] = deque(maxlen=MAX_COMPLETED_RUNS)
        self._metrics = PeerMetrics()

    @property
    def run_id(self) -> str:
        """Returns the run of the session, "" without one."""
        return self._run_id if self._session is not None else ""

    def start(
        self,
        run: str,
        node: GossipNode,
        plan: TrainConfig,
        *,
        train: TrainLocally,
        save: Callable[[GossipNode], None],
        instruction: Json,
    ) -> None:
        """Starts the session of a run, replacing any other; `instruction` is stored for a reboot.

        Raises:
            NetworkError: the transport is unavailable; there is no session then.
        """
        assert plan.node is not None
        with self._lock:
            self.discard_session()
            if run in self._completed_runs:
                raise NetworkError(f"run {run} is over")
            if self._make_transport is None:
                raise NetworkError(f"this device cannot carry messages by {plan.node.carrier!r}, only by relay")
            transport = self._make_transport(plan.node, self.receive)
            rng = derive_rng("firing", self._device_id, node.algorithm.incarnation, node.algorithm.iterations)
            session = GossipSession(
                node, plan, rng=rng, train=train, send=self._send_message, is_drained=transport.is_drained, save=save
            )
            self._transport = transport
            self._run_id, self._session = run, session
            transport.set_peers([edge.neighbour for edge in plan.node.edges])
            try:
                transport.start()
                session.start()
            except BaseException:
                self.pause()  # or the next assignment would wait for a session that never started
                raise
            self._save_instruction(instruction)

    def update_config(self, plan: TrainConfig, instruction: Json) -> None:
        """Updates the session to a newer plan of the same run."""
        assert plan.node is not None
        with self._lock:
            if self._session is None or self._transport is None:
                raise NetworkError("the node was stopped: its run is over")
            self._transport.set_addresses(get_peer_addresses(plan.node))
            self._transport.set_peers([edge.neighbour for edge in plan.node.edges])
            self._session.update_config(plan)
            self._save_instruction(instruction)

    def wait_for_report(self, min_iterations: int, should_finish_early: Callable[[], bool]) -> GossipReport:
        """Returns the node's report after `min_iterations`; see `GossipSession.wait_for_report`."""
        session = self._session
        if session is None:
            raise NetworkError("the node was stopped: its run is over")
        return session.wait_for_report(min_iterations, should_finish_early)

    def count_iterations(self) -> int:
        session = self._session
        return 0 if session is None else session.iterations

    def pause(self) -> None:
        """Stops the session; a later start of the device resumes it."""
        with self._lock:
            session, transport = self._session, self._transport
            self._session = self._transport = None
            if session is not None:
                session.stop()
            if transport is not None:
                transport.stop()
                self._paused_transport = transport

    def complete_run(self, run: str) -> None:
        """Ends the session of a completed run; later instructions of the run are rejected."""
        with self._lock:
            if run not in self._completed_runs:
                self._completed_runs.append(run)
            self.discard_session(run)

    def discard_session(self, run: str | None = None) -> None:
        """Ends the session of this run (any if None); a later instruction may start another."""
        with self._lock:
            session_run = (
                self._run_id if self._session is not None else str((self.load_instruction() or {}).get("run", ""))
            )
            if run is not None and run != session_run:
                return
            self.pause()
            if self._paused_transport is not None:
                self._paused_transport.set_peers([])  # clears their retained messages
                self._paused_transport = None
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def reopen_run(self, run: str) -> None:
        """Accepts instructions of a run that starts, or continues after completion."""
        with self._lock:
            if run in self._completed_runs:
                self._completed_runs.remove(run)

    def load_instruction(self) -> Json | None:
        """Returns the stored instruction of an earlier run of the agent, or None."""
        try:
            order = parse_json(self._path.read_text())
        except (OSError, ValueError):
            return None
        return order if isinstance(order, dict) else None

    def receive(self, sender: str, payload: bytes) -> None:
        """Processes a neighbour's message; drops those of other runs or senders."""
        try:
            run, message = decode_peer_message(payload)
        except NetworkError as error:
            self._metrics.log_warning(sender, "dropped a message of %s: %s", sender, error)
            return
        session = self._session
        if session is not None and run == self._run_id and message.edge == (sender, self._device_id):
            session.receive(message)

    def _send_message(self, message: PeerMessage) -> None:
        transport = self._transport
        if transport is None:
            return
        try:
            transport.send(message.edge[1], encode_peer_message(self._run_id, message), is_reply=message.is_reply)
        except EdgeflError as error:
            self._metrics.log_warning(message.edge[1], "a message to %s cannot be sent: %s", message.edge[1], error)

    def _save_instruction(self, instruction: Json) -> None:
        try:
            write_atomic(self._path, json.dumps(instruction).encode())
        except StoreError as error:
            log.warning("cannot keep what node this device is: %s", error)
