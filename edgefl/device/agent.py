"""The agent: one warm process that waits for the bell, works, answers, and comes back for ever.

The main thread asks for work and trains. Answers leave in a thread of their own, so that the next work is trained
meanwhile; MQTT and the heartbeat have theirs, so that a board is heard while it trains. A finished update is kept
until the coordinator says that it was used, and a repeated assignment is answered from there.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections import OrderedDict
from typing import Any

from edgefl import __version__
from edgefl.device.bell import Bell
from edgefl.device.board.accelerator import chosen_accelerator
from edgefl.device.board.assignment_vitals import AssignmentVitals
from edgefl.device.board.capabilities import probe
from edgefl.device.board.pacing import board_pacer
from edgefl.device.board.speed_book import SpeedBook
from edgefl.device.board.training_facts import training_facts
from edgefl.device.board.vitals import Vitals
from edgefl.device.heartbeat import Activity, Heart
from edgefl.device.inference.model_fetch import Source
from edgefl.device.inference.model_updates import ModelUpdates
from edgefl.device.install_facts import Site, own_site
from edgefl.device.installations import Installations
from edgefl.device.joining.renewal import Renewal
from edgefl.device.link import Link, LinkCallbacks, LinkIdentity, LinkTls
from edgefl.device.logbook import Logbook
from edgefl.device.neighbours.broker_carrier import BrokerCarrier
from edgefl.device.neighbours.carrier import Carrier, OnPeerMessage
from edgefl.device.neighbours.direct import DirectCarrier
from edgefl.device.neighbours.node_runner import addresses_of
from edgefl.device.outbox import Outbox
from edgefl.device.state import DeviceState
from edgefl.device.supernode import Answer, RefusedError, SuperNode, UnauthorisedError, signed_headers
from edgefl.device.telling import LOGS, tell_logs
from edgefl.device.trainer import AbandonedError, Trainer
from edgefl.device.trust import Hello, pinned_context, say_hello
from edgefl.errors import EdgeflError, NetworkError, StoreError
from edgefl.processes import on_stop_signal
from edgefl.protocol import (
    HEARTBEAT_S,
    POLL_S,
    Capabilities,
    Command,
    CommandKind,
    Heartbeat,
    ProgressReport,
    check_version,
    host_and_port,
)
from edgefl.types import Json, NodePlan, Role, derived_rng
from edgefl.watchdog import LoopLife, Notifier, watched

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.25
MAX_BACKOFF_S = 30.0
SEND_WITHIN_S = 3.0
"""An agent that is told to stop still sends the answer that is under way, for so long."""
LEAVE_WITHIN_S = 5.0
"""An agent that is told to stop is gone after so long, also in the middle of an iteration that takes minutes."""
CONNECT_WITHIN_S = 5.0
KEPT_ANSWERS = 2
"""At most two assignments are outstanding per device, so no more finished updates can be asked for again."""


class Agent:
    """One device at work; `run` returns after `stop`."""

    def __init__(
        self,
        state: DeviceState,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        poll_s: float = POLL_S,
        site: Site | None = None,
    ) -> None:
        self._state, self._poll_s = state, poll_s
        self.life = LoopLife()
        self._skew_s = 0.0
        self._stopping, self._ended, self._bell = threading.Event(), threading.Event(), Bell()
        self._boot_id = uuid.uuid4().hex
        self._finished: OrderedDict[str, Answer] = OrderedDict()
        self._address: str | None = None
        self._reported: tuple[object, Json] | None = None
        self._answering: tuple[str, str] | None = None
        self._carrier: BrokerCarrier | None = None
        self._rng = derived_rng("agent", state.device_id, time.time_ns())
        self._trust = pinned_context(state.ca.read_bytes())
        self._accelerator = chosen_accelerator(state.device.accelerator)
        self._trainer = Trainer(
            device_id=state.device_id,
            role=state.device.role,
            shards=lambda: self._state.device.shards,
            accelerator=self._accelerator,
            threads=state.device.threads,
            state_dir=state.root,
            life=state.next_session_no(),
            on_progress=self._report_progress,
            make_carrier=self._make_carrier,
            board=AssignmentVitals(),
            pacer=board_pacer(lambda: self._state.device.max_temperature_c),
            on_life=self.life.beat,
        )
        self._supernode = SuperNode(
            private_key_pem=state.key.read_bytes(),
            trust=self._trust,
            clock=self._clock,
            train=self._remembering(self._trainer.train),
            evaluate=self._trainer.evaluate,
        )
        self._renewal = Renewal(state, self._trust, sign=lambda key: signed_headers(key, self._clock))
        self._outbox: Outbox[tuple[str, Any]] = Outbox(self._send, self._bell.ring)
        self._models = ModelUpdates(
            state,
            source=self._model_source,
            on_change=self._models_changed,
            rng=derived_rng("models", state.device_id, time.time_ns()),
        )
        self._installations = Installations(
            state,
            site=site or own_site(),
            boot_id=self._boot_id,
            source=self._model_source,
            on_change=self._models_changed,
            rng=derived_rng("installations", state.device_id, time.time_ns()),
        )
        self._link = self._new_link()
        self._speeds = SpeedBook(state.root, on_measured=self._bell.ring)
        self._heart = Heart(
            self._publish_heartbeat,
            Vitals(state.root).read,
            self._activity,
            interval_s=heartbeat_s,
            seed=state.device_id,
        )

    def keep_log(self) -> None:
        """Writes the log of this process into the state directory too, for the coordinator to ask for."""
        try:
            book = Logbook(self._state.root / LOGS, now=self._log_tag, clock=self._clock)
        except OSError as error:
            log.warning("keeps no log of its own: %s", error)
            return
        logging.getLogger().addHandler(book)

    def stop(self) -> None:
        """Ends the agent soon; what it is training is abandoned."""
        self._stopping.set()
        self._trainer.abandon()
        self._bell.ring()

    def leave(self, within_s: float) -> bool:
        """Returns whether `run` has ended in time after `stop`; if not, the goodbye has been said all the same."""
        if self._ended.wait(within_s):
            return True
        self._heart.stop()
        self._link.stop()
        return False

    def run(self) -> None:
        """Works until `stop`; survives every loss of the coordinator and of the broker."""
        self._link.start()
        self._heart.start()
        self._models.start()
        self._installations.start()
        with self.life.working():
            self._trainer.go_on()
        backoff_s = FIRST_BACKOFF_S
        try:
            while not self._stopping.is_set():
                self.life.beat()
                try:
                    self._connect()
                    self._report_capabilities()
                    backoff_s = FIRST_BACKOFF_S
                    self._serve()
                except AbandonedError:
                    break
                except (NetworkError, StoreError) as error:
                    self._address = None
                    if not self._stopping.is_set():
                        log.warning("%s; trying again", error)
                    self._stopping.wait(backoff_s * self._rng.uniform(0.5, 1.0))
                    backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        finally:
            self._models.stop()
            self._installations.stop()
            self._speeds.close()
            self._outbox.close(SEND_WITHIN_S)
            self._trainer.close()
            self._heart.stop()
            self._link.stop()
            self._supernode.close()
            self._ended.set()

    def _connect(self) -> None:
        """Finds the coordinator at one of its addresses, learns its clock and what has moved."""
        if self._address is not None:
            return
        self._outbox.pause()  # what is under way uses the connection that goes now
        failures = []
        for address in self._state.device.addresses:
            self.life.beat()
            try:
                hello = say_hello(address, self._trust)
                self._skew_s = hello.skew_s
                check_version(__version__, hello.version)
                self._renewal.heard(hello)
                self._activate(address)
            except EdgeflError as error:
                failures.append(f"{address}: {error}")
                continue
            self._address = address
            before = self._brokers()
            self._remember_addresses(address, hello)
            if set(self._brokers()) != set(before):
                self._follow_broker()
            log.info("connected to the coordinator at %s", address)
            self._installations.connected()
            self._bell.doubt()
            self._bell.ring()  # work may be waiting
            return
        raise NetworkError(f"no coordinator at {'; '.join(failures) or 'any known address'}")

    def _activate(self, address: str) -> None:
        """Takes its place in Flower; with the key of a renewal whose answer was lost, if the other counts no more."""
        try:
            self._supernode.connect(address)
        except UnauthorisedError:
            if not self._renewal.recover(address):
                raise
            self._take_certificate()
            self._supernode.connect(address)

    def _renew(self, address: str) -> bool:
        """Returns whether it has renewed its certificate, since that was time, and has to connect anew."""
        self._renewal.look(address, is_link_up=self._link.is_connected())
        if not self._renewal.is_due():
            return False
        self._outbox.pause()  # what is under way is signed with the old key
        if not self._renewal.renew(address):
            self._outbox.open()
            return False
        self._take_certificate()
        self._address = None
        return True

    def _take_certificate(self) -> None:
        self._supernode.use_key(self._state.key.read_bytes())
        self._link.renew(LinkTls(ca=self._state.ca, cert=self._state.cert, key=self._state.key))

    def _remember_addresses(self, address: str, hello: Hello) -> None:
        """Keeps what the coordinator says of itself; a card without room does not stop the work."""
        try:
            self._state.change(
                addresses=tuple(dict.fromkeys([address, *hello.addresses])),
                broker_port=hello.broker_port,
                broker_host=hello.broker_host,
            )
        except StoreError as error:
            log.warning("cannot keep the coordinator's addresses: %s", error)

    def _serve(self) -> None:
        """Pulls and works until there is an error or the agent stops."""
        self._outbox.open()
        while not self._stopping.is_set():
            self._bell.wait(self._poll_s)
            self.life.beat()
            self._outbox.check()
            self._trainer.tidy()
            if self._address is not None and self._renew(self._address):
                return
            if not self._stopping.is_set():
                self._look_for_work()

    def _look_for_work(self) -> None:
        is_doubted = self._bell.take_doubt()
        if not self._work_once():
            self._report_capabilities()
            self._measure_speeds()
        elif is_doubted:
            self._bell.doubt()
            self._bell.ring()  # more may be waiting, whose bells nobody heard

    def _measure_speeds(self) -> None:
        """Has the next speed measured that is not known yet, unless a node trains by itself meanwhile."""
        device = self._state.device
        if self._trainer.now is not None:
            self._speeds.busy()
        elif device.role == Role.TRAINER and self._reported is not None:
            facts = self._reported[1]
            self._speeds.idle(device.shards, facts=facts, accelerator=self._accelerator, threads=device.threads)

    def _work_once(self) -> bool:
        """Does the next piece of work; returns whether there was one."""
        with self.life.working():
            return self._pulled_and_answered()

    def _pulled_and_answered(self) -> bool:
        try:
            instruction = self._supernode.pull()
        except UnauthorisedError:
            self._address = None  # the clock may have jumped: learn it anew at the next connect
            raise
        if instruction is None:
            return False
        self._speeds.busy()
        self._state = DeviceState.load(self._state.root)  # a shard may have been added since
        assignment = str(instruction.header.get("assignment"))
        for used in instruction.header.get("settled", ()):
            self._finished.pop(used, None)
        self._answering = str(instruction.header.get("run")), assignment
        known = self._finished.get(assignment)
        if known is not None:
            reply = self._supernode.reply_to(instruction, known)
        else:
            reply = self._supernode.answer(instruction)
        self._answering = None
        del instruction  # the model in it need not wait until the answer is through
        self._outbox.put((assignment, reply))
        return True

    def _send(self, answer: tuple[str, Any]) -> None:
        """Sends one answer; one that nobody wants any more is let go."""
        assignment, reply = answer
        try:
            self._supernode.push(reply)
        except RefusedError as error:
            log.info("the answer to %s is not wanted: %s", assignment, error)

    def _remembering(self, train: Any) -> Any:
        def remembered(header: Json, body: bytes) -> Answer:
            answer: Answer = train(header, body)
            _log_work(answer[0])
            if "error" not in answer[0] and "phase" not in header:
                self._finished[str(header["assignment"])] = answer
                while len(self._finished) > KEPT_ANSWERS:
                    self._finished.popitem(last=False)
            return answer

        return remembered

    def _clock(self) -> float:
        """The coordinator's time: boards have no clock battery, and Flower accepts no signature of another time."""
        return time.time() + self._skew_s

    def _activity(self) -> Activity:
        now = self._trainer.now
        arriving = self._supernode.arriving  # a model that takes minutes to come is held, else it would be sent again
        working = [now[1]] if now and now[1] else []
        held = tuple(dict.fromkeys([*self._finished, *working, *([arriving] if arriving else [])]))
        run, assignment, iteration = now or (None, None, None)
        return Activity(
            run=run,
            assignment=assignment or None,
            iteration=iteration,
            holding=held,
            clock_skew_s=round(self._skew_s, 3),
            model=self._models.model,
            deployment=self._models.report,
            installation=self._installations.report,
        )

    def _log_tag(self) -> tuple[str, str] | None:
        now = self._trainer.now or self._answering
        return (now[0], now[1]) if now is not None else None

    def _publish_heartbeat(self, heartbeat: Heartbeat) -> bool:
        return self._link.publish_heartbeat(heartbeat)

    def _report_capabilities(self) -> None:
        """Publishes facts and example counts when the shards have changed; a new shard may have been added."""
        with self.life.working():  # shards are read from the beginning to the end
            self._report_what_changed()

    def _report_what_changed(self) -> None:
        self._state = DeviceState.load(self._state.root)
        stamp = self._trainer.shard_stamps(), self._speeds.version
        if self._reported is None or self._reported[0] != stamp:
            facts = self._reported[1] if self._reported else probe()
            self._reported = stamp, facts
            blocks = self._trainer.blocks()
            device = self._state.device
            trains = training_facts(device.role, device.shards, facts)
            own = {**trains, **self._peer_facts(), **self._installations.facts(), **self._speeds.told()}
            told = {**facts, **({"blocks": blocks} if blocks else {}), **own}
            self._link.publish_capabilities(Capabilities(facts=told, shards=self._trainer.examples()))

    def _models_changed(self) -> None:
        """Tells the fleet, and looks after the coordinator: it may have moved while a model was fetched."""
        self._heart.beat_now()
        self._bell.ring()

    def _model_source(self) -> Source:
        """Returns where models are fetched now, signed with the coordinator's time.

        Raises:
            NetworkError: the coordinator is away.
        """
        address = self._address
        if address is None:
            raise NetworkError("the coordinator is away")
        return Source(address=address, trust=self._trust, headers=self._supernode.signed_headers())

    def _peer_facts(self) -> Json:
        """Returns at which address neighbours can reach this board: the one that it reaches its coordinator from."""
        if self._address is None:
            return {}
        host, port = host_and_port(self._address)
        try:
            with socket.create_connection((host, port), timeout=CONNECT_WITHIN_S) as connection:
                own = str(connection.getsockname()[0])
        except OSError:
            return {}
        own = f"[{own}]" if ":" in own else own
        return {"peer_address": f"{own}:{self._state.device.peer_port}"}

    def _report_progress(self, assignment_id: str, iteration: int, seconds_per_iteration: float) -> None:
        self._link.publish_progress(
            ProgressReport(assignment=assignment_id, iteration=iteration, seconds_per_iteration=seconds_per_iteration)
        )

    def _brokers(self) -> list[tuple[str, int]]:
        device = self._state.device
        hosts = [device.broker_host] if device.broker_host else [_host(address) for address in device.addresses]
        return [(host, device.broker_port) for host in dict.fromkeys(hosts)]

    def _follow_broker(self) -> None:
        """Connects to where the coordinator says that its broker is now."""
        self._link.stop()
        self._link = self._new_link()
        self._link.start()
        self._reported = None
        if self._carrier is not None:
            self._carrier.moved()

    def _new_link(self) -> Link:
        return Link(
            self._brokers(),
            LinkTls(ca=self._state.ca, cert=self._state.cert, key=self._state.key),
            LinkIdentity(
                fleet=self._state.device.fleet,
                device_id=self._state.device_id,
                boot_id=self._boot_id,
                version=__version__,
            ),
            LinkCallbacks(
                on_bell=self._bell.ring,
                on_command=self._obey,
                on_connection=self._link_changed,
                on_peer=self._hear_peer,
            ),
            next_session_no=self._state.next_session_no,
        )

    def _make_carrier(self, plan: NodePlan, on_message: OnPeerMessage) -> Carrier:
        """Returns who carries the messages of the node that this device is.

        Raises:
            NetworkError: the plan's carrier is unknown here, or it lacks an address.
        """
        if plan.carrier == "peer":
            self._carrier = BrokerCarrier(lambda: self._link, on_message)
            return self._carrier
        if plan.carrier != "direct":
            raise NetworkError(
                f"this device cannot carry messages by {plan.carrier!r}, only by relay, peer or direct"
            )
        return DirectCarrier(
            device_id=self._state.device_id,
            tls=self._state,
            listen=_listening(plan.listen),
            hosts=addresses_of(plan),
            neighbours=[side.neighbour for side in plan.edges],
            on_message=on_message,
        )

    def _hear_peer(self, sender: str, payload: bytes) -> None:
        carrier = self._carrier
        if carrier is not None:
            carrier.deliver(sender, payload)

    def _link_changed(self, is_connected: bool) -> None:
        """Looks after the coordinator at once when the broker is lost: both may be gone, and come back elsewhere."""
        self._heart.beat_now()
        if is_connected:
            self._bell.doubt()  # the link itself rings
        else:
            self._bell.ring()

    def _obey(self, command: Command) -> None:
        of_something = {
            CommandKind.RECALL: self._trainer.recall,
            CommandKind.END: self._trainer.end_run,
            CommandKind.DEPLOY: self._models.deploy,
            CommandKind.ROLLBACK: self._models.roll_back,
            CommandKind.INSTALL: self._installations.install,
        }
        match command.kind:
            case kind if kind in of_something and command.argument:
                of_something[CommandKind(kind)](command.argument)
            case CommandKind.DRAIN | CommandKind.RESUME:
                self._link.set_draining(draining=command.kind == CommandKind.DRAIN)
                if command.kind == CommandKind.DRAIN:
                    self._trainer.rest()
            case CommandKind.RENEW:
                self._renewal.ask()
                self._bell.ring()
            case CommandKind.BEAT:
                self._heart.beat_now()
            case CommandKind.LOGS:
                tell_logs(self._state.root, command, self._link.publish_answer)
            case CommandKind.RELOAD:
                self._reported = None
                self._bell.ring()
            case CommandKind.LOG_LEVEL if command.argument in logging.getLevelNamesMapping():
                logging.getLogger().setLevel(command.argument)
            case _:
                log.warning("ignored an unknown command %r", command.kind)


def run_agent(state: DeviceState, site: Site | None = None) -> None:
    """Runs the agent of a joined device until SIGTERM or SIGINT."""
    agent = Agent(state, site=site)
    agent.keep_log()

    def stop() -> None:
        agent.stop()
        if not agent.leave(LEAVE_WITHIN_S):
            log.warning("what is under way takes too long; leaving without it")
            logging.shutdown()
            os._exit(0)  # what lies on disk is whole at any time, and nothing can end a thread that computes

    with on_stop_signal(stop), watched(Notifier.from_environment(), agent.life):
        agent.run()
    log.info("%s has left the fleet for now", state.device_id)


def _log_work(told: Json) -> None:
    """Leaves one line about what was done; a failure has its own already."""
    if isinstance(metrics := told.get("metrics"), dict):
        log.info(
            "%s: %s iterations, loss %.4g, %.3g s",
            told.get("assignment"), metrics.get("iterations"), _number(metrics.get("loss")),
            _number(metrics.get("compute_s")),
        )  # fmt: skip
    elif told.get("ready") is True:
        log.info("%s: ready", told.get("assignment"))


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else float("nan")


def _listening(address: str) -> tuple[str, int]:
    """Returns where to listen for neighbours: at the port that they are told, on all of this board's addresses."""
    return "::", host_and_port(address)[1]


def _host(address: str) -> str:
    return host_and_port(address)[0]
