"""Nodes that go on by themselves: their sessions, who carries their messages, and what a reboot finds of them."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from edgefl.decentralised.engine import Engine
from edgefl.decentralised.mailbag import pack_peer, unpack_peer
from edgefl.device.neighbours.carrier import Carrier
from edgefl.device.neighbours.peer_watch import PeerWatch
from edgefl.device.neighbours.session import NodeSession, Report, TrainBurst
from edgefl.errors import EdgeflError, NetworkError, StoreError
from edgefl.files import write_whole
from edgefl.protocol import host_and_port
from edgefl.types import EdgeMessage, Json, LocalPlan, NodePlan, derived_rng
from edgefl.untrusted import parse_json

log = logging.getLogger(__name__)

ORDER_FILE = "node.json"
KEPT_ENDED = 16
"""So many runs that are over are remembered: the word may come before the node has been taken up again."""

MakeCarrier = Callable[[NodePlan, Callable[[str, bytes], None]], Carrier]
"""(plan, told the sender and the payload of what comes) -> who carries messages; not yet started."""


def addresses_of(plan: NodePlan) -> dict[str, tuple[str, int]]:
    """Returns where a node's neighbours listen, as far as somebody said so."""
    return {side.neighbour: host_and_port(side.address) for side in plan.edges if side.address}


class NodeRunner:
    """Keeps the one session of a device. Used by the thread that trains; carriers call `deliver` from theirs.

    Args:
        device_id: whose node it is.
        state_dir: the device's state directory.
        make_carrier: see `MakeCarrier`; None on a device that has none.
    """

    def __init__(self, device_id: str, state_dir: Path, make_carrier: MakeCarrier | None) -> None:
        self._device_id, self._path, self._make_carrier = device_id, state_dir / ORDER_FILE, make_carrier
        self._run = ""
        self._session: NodeSession | None = None
        self._carrier: Carrier | None = None
        self._rested: Carrier | None = None
        self._lock = threading.RLock()
        self._ended: deque[str] = deque(maxlen=KEPT_ENDED)
        self._watch = PeerWatch()

    @property
    def run(self) -> str:
        """Returns the run of the session, "" when there is none."""
        return self._run if self._session is not None else ""

    def begin(
        self,
        run: str,
        engine: Engine,
        plan: LocalPlan,
        *,
        train: TrainBurst,
        save: Callable[[Engine], None],
        order: Json,
    ) -> None:
        """Starts the session of a run, in the place of any other; `order` is what a reboot goes on with.

        Raises:
            NetworkError: this device cannot carry messages in this way, or not now; there is no session then.
        """
        assert plan.node is not None
        with self._lock:
            self.give_up()
            if run in self._ended:
                raise NetworkError(f"run {run} is over")
            if self._make_carrier is None:
                raise NetworkError(f"this device cannot carry messages by {plan.node.carrier!r}, only by relay")
            carrier = self._make_carrier(plan.node, self.deliver)
            rng = derived_rng("firing", self._device_id, engine.node.life, engine.node.iterations)
            session = NodeSession(
                engine, plan, rng=rng, train=train, send=self._send, is_clear=carrier.is_clear, save=save
            )
            self._carrier = carrier
            self._run, self._session = run, session
            carrier.set_neighbours([side.neighbour for side in plan.node.edges])
            try:
                carrier.start()
                session.start()
            except BaseException:
                self.pause()  # or the next assignment would wait for a session that never began
                raise
            self._keep(order)

    def follow(self, plan: LocalPlan, order: Json) -> None:
        """Goes on with a newer plan of the same run."""
        assert plan.node is not None
        with self._lock:
            if self._session is None or self._carrier is None:
                raise NetworkError("the node was stopped: its run is over")
            self._carrier.set_hosts(addresses_of(plan.node))
            self._carrier.set_neighbours([side.neighbour for side in plan.node.edges])
            self._session.follow(plan)
            self._keep(order)

    def report(self, after: int, is_recalled: Callable[[], bool]) -> Report:
        """Returns what the node tells after so many local iterations; see `NodeSession.report`."""
        session = self._session
        if session is None:
            raise NetworkError("the node was stopped: its run is over")
        return session.report(after, is_recalled)

    def iterations(self) -> int:
        session = self._session
        return 0 if session is None else session.iterations

    def pause(self) -> None:
        """Ends the session for now: a later start of the device finds it and goes on."""
        with self._lock:
            session, carrier = self._session, self._carrier
            self._session = self._carrier = None
            if session is not None:
                session.stop()
            if carrier is not None:
                carrier.stop()
                self._rested = carrier

    def end(self, run: str) -> None:
        """Ends the session for good if it is of this run, which is over: its orders do not count any more."""
        with self._lock:
            if run not in self._ended:
                self._ended.append(run)
            self.give_up(run)

    def give_up(self, run: str | None = None) -> None:
        """Ends the session if it is of this run, of any when None; another order of the run begins one again."""
        with self._lock:
            known = self._run if self._session is not None else str((self.kept_order() or {}).get("run", ""))
            if run is not None and run != known:
                return
            self.pause()
            if self._rested is not None:
                self._rested.set_neighbours([])  # what was left for them somewhere goes
                self._rested = None
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def expect(self, run: str) -> None:
        """Says that a run begins, or goes on after it was over: its orders count again."""
        with self._lock:
            if run in self._ended:
                self._ended.remove(run)

    def kept_order(self) -> Json | None:
        """Returns the order that an earlier life of this device was at work on, None when there is none."""
        try:
            order = parse_json(self._path.read_text())
        except (OSError, ValueError):
            return None
        return order if isinstance(order, dict) else None

    def deliver(self, sender: str, payload: bytes) -> None:
        """Takes what a neighbour sent; what is of another run, or no message of its own, is dropped."""
        try:
            run, message = unpack_peer(payload)
        except NetworkError as error:
            self._watch.warn(sender, "dropped a message of %s: %s", sender, error)
            return
        session = self._session
        if session is not None and run == self._run and message.edge == (sender, self._device_id):
            session.deliver(message)

    def _send(self, message: EdgeMessage) -> None:
        carrier = self._carrier
        if carrier is None:
            return
        try:
            carrier.send(message.edge[1], pack_peer(self._run, message), keep_all=message.is_reply)
        except EdgeflError as error:
            self._watch.warn(message.edge[1], "a message to %s cannot be sent: %s", message.edge[1], error)

    def _keep(self, order: Json) -> None:
        try:
            write_whole(self._path, json.dumps(order).encode())
        except StoreError as error:
            log.warning("cannot keep what node this device is: %s", error)
