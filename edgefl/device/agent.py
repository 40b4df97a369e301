"""The agent: one warm process that waits for the bell, works, answers, and comes back for ever.

The main thread asks for work and trains. MQTT and the heartbeat have threads of their own, so that a board is heard
while it trains, and so have its answers.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid

from edgefl.device.bell import Bell
from edgefl.device.board.accelerator import chosen_accelerator
from edgefl.device.board.assignment_vitals import AssignmentVitals
from edgefl.device.board.pacing import board_pacer
from edgefl.device.board.speed_book import SpeedBook
from edgefl.device.board.vitals import Vitals
from edgefl.device.commands import Commands
from edgefl.device.coordinator_line import CoordinatorLine
from edgefl.device.heartbeat import Activity, Heart
from edgefl.device.inference.model_fetch import Source
from edgefl.device.inference.model_updates import ModelUpdates
from edgefl.device.install_facts import Site, own_site
from edgefl.device.installations import Installations
from edgefl.device.joining.renewal import Renewal
from edgefl.device.link import LinkCallbacks
from edgefl.device.logbook import Logbook
from edgefl.device.moving_link import MovingLink
from edgefl.device.neighbours.carriers import Carriers
from edgefl.device.polling import PollPace
from edgefl.device.refusal import check_welcome, keep_refusal, refusal_in
from edgefl.device.self_report import SelfReport
from edgefl.device.state import DeviceState
from edgefl.device.supernode import UnauthorisedError, signed_headers
from edgefl.device.telling import LOGS
from edgefl.device.trainer import AbandonedError, Trainer
from edgefl.device.trust import pinned_context
from edgefl.device.workbench import Workbench
from edgefl.errors import ClonedError, NetworkError, StoreError
from edgefl.processes import on_stop_signal
from edgefl.protocol import HEARTBEAT_S, POLL_S, Command, ProgressReport
from edgefl.types import derived_rng
from edgefl.watchdog import LoopLife, Notifier, watched

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.25
MAX_BACKOFF_S = 30.0
SEND_WITHIN_S = 3.0
"""An agent that is told to stop still sends the answer that is under way, for so long."""
LEAVE_WITHIN_S = 5.0
"""An agent that is told to stop is gone after so long, also in the middle of an iteration that takes minutes."""


class Agent:
    """One device at work; `run` returns after `stop`.

    Attributes:
        life: beats while the main loop goes on.
        refused, refusal: whether and why the coordinator has told this agent, over MQTT, that it is a copy.
    """

    def __init__(
        self,
        state: DeviceState,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        poll_s: float = POLL_S,
        site: Site | None = None,
    ) -> None:
        self._state, self._pace = state, PollPace(poll_s)
        self.life = LoopLife()
        self._stopping, self._ended, self._bell = threading.Event(), threading.Event(), Bell()
        self._backoff_s = FIRST_BACKOFF_S
        self._boot_id = uuid.uuid4().hex
        self.refusal: str | None = None
        self.refused = threading.Event()
        self._rng = derived_rng("agent", state.device_id, time.time_ns())
        self._trust = pinned_context(state.ca.read_bytes())
        self._accelerator = chosen_accelerator(state.device.accelerator)
        self._carriers = Carriers(state, lambda: self._link.now)
        self._renewal = Renewal(state, self._trust, sign=self._signed)
        self._link = MovingLink(
            state,
            self._boot_id,
            LinkCallbacks(
                on_bell=self._bell.ring,
                on_command=self._obey,
                on_connection=self._link_changed,
                on_peer=self._carriers.hear,
            ),
        )
        self._line = CoordinatorLine(
            state,
            self._trust,
            on_hello=self._renewal.heard,
            enter=self._activate,
            on_try=self.life.beat,
        )
        self._trainer = self._make_trainer()
        self._speeds = SpeedBook(state.root, on_measured=self._bell.ring)
        self._bench = Workbench(
            state,
            trust=self._trust,
            trainer=self._trainer,
            clock=self._line.clock,
            instance=self._boot_id,
            on_work=self._speeds.busy,
            on_failure=self._bell.ring,
        )
        self._models, self._installations = self._make_updates(site or own_site())
        self._report = self._make_report()
        self._heart = Heart(
            self._link.publish_heartbeat,
            Vitals(state.root).read,
            self._activity,
            interval_s=heartbeat_s,
            seed=state.device_id,
        )
        self._commands = self._make_commands()

    def keep_log(self) -> None:
        """Writes the log of this process into the state directory too, for the coordinator to ask for."""
        try:
            book = Logbook(self._state.root / LOGS, now=self._bench.log_tag, clock=self._line.clock)
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
        """Works until `stop`; survives every loss of the coordinator and of the broker.

        Raises:
            ClonedError: another agent of the same identity was there before, and the coordinator refuses this one.
        """
        self._link.start()
        self._heart.start()
        self._models.start()
        self._installations.start()
        with self.life.working():
            self._trainer.go_on()
        try:
            while not self._stopping.is_set():
                self.life.beat()
                try:
                    self._connect()
                    self._tell()
                    self._serve()
                except AbandonedError:
                    break
                except (NetworkError, StoreError) as error:
                    self._line.drop()
                    if not self._stopping.is_set():
                        log.warning("%s; trying again", error)
                    # A coordinator that is back rings for work that waits, by a broker that was never away.
                    self._bell.wait(self._backoff_s * self._rng.uniform(0.5, 1.0))
                    self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
        finally:
            self._models.stop()
            self._installations.stop()
            self._speeds.close()
            self._bench.outbox.close(SEND_WITHIN_S)
            self._trainer.close()
            self._heart.stop()
            self._link.stop()
            self._bench.supernode.close()
            self._ended.set()
        if self.refusal is not None:
            raise ClonedError(self.refusal)

    def _connect(self) -> None:
        """Finds the coordinator, unless it is at hand, and follows the broker where that has moved with it."""
        if self._line.address is not None:
            return
        self._pause_outbox()  # what is under way uses the connection that goes now
        before = set(self._link.brokers())
        self._line.connect()
        if set(self._link.brokers()) != before:
            self._link.follow()
            self._report.forget()
            self._carriers.moved()
        self._installations.connected()
        self._bell.doubt()
        self._bell.ring()  # work may be waiting

    def _activate(self, address: str) -> None:
        """Takes its place in Flower; where its key does not count, by what the renewal can do about that."""
        try:
            self._bench.supernode.connect(address)
        except UnauthorisedError:
            if not self._renewal.recover(address):
                raise
            self._take_certificate()
            self._bench.supernode.connect(address)

    def _renew(self, address: str) -> bool:
        """Returns whether it has renewed its certificate, since that was time, and has to connect anew."""
        self._renewal.look(address, is_link_up=self._link.now.is_connected())
        if not self._renewal.is_due():
            return False
        self._pause_outbox()  # what is under way is signed with the old key
        if not self._renewal.renew(address):
            self._bench.outbox.open()
            return False
        self._take_certificate()
        self._line.drop()
        return True

    def _pause_outbox(self) -> None:
        with self.life.working():  # an answer on a slow link takes minutes
            self._bench.outbox.pause()

    def _take_certificate(self) -> None:
        self._bench.supernode.use_key(self._state.key.read_bytes())
        self._link.renew()

    def _serve(self) -> None:
        """Pulls and works until there is an error or the agent stops."""
        self._bench.outbox.open()
        while not self._stopping.is_set():
            self._bell.wait(self._pace.next_s(hears_bells=self._link.now.is_connected()))
            self.life.beat()
            self._bench.outbox.check()
            self._trainer.tidy()
            if self._line.address is not None and self._renew(self._line.address):
                return
            if not self._stopping.is_set():
                self._look_for_work()

    def _look_for_work(self) -> None:
        is_doubted = self._bell.take_doubt()
        with self.life.working():
            had_work = self._bench.work_once()
        if self._bench.outbox.is_flowing():  # a coordinator may greet, have work, and then fail, of too many boards
            self._backoff_s = FIRST_BACKOFF_S
        if not had_work:
            self._tell()
            self._report.measure_speeds()
            return
        self._pace.had_work()
        if is_doubted:
            self._bell.doubt()
            self._bell.ring()  # more may be waiting, whose bells nobody heard

    def _tell(self) -> None:
        with self.life.working():  # shards are read from the beginning to the end
            self._report.tell()

    def _news(self) -> None:
        """Tells the fleet, and looks after the coordinator: it may have moved while a model was fetched."""
        self._heart.beat_now()
        self._bell.ring()

    def _link_changed(self, is_connected: bool) -> None:
        """Looks after the coordinator at once when the broker is lost: both may be gone, and come back elsewhere."""
        self._heart.beat_now()
        if is_connected:
            self._installations.linked()
            self._bell.doubt()  # the link itself rings
        else:
            self._bell.ring()

    def _source(self) -> Source:
        """Returns where files are fetched now, signed with the coordinator's time.

        Raises:
            NetworkError: the coordinator is away.
        """
        address = self._line.address
        if address is None:
            raise NetworkError("the coordinator is away")
        return Source(address=address, trust=self._trust, headers=self._bench.supernode.signed_headers())

    def _activity(self) -> Activity:
        run, assignment, iteration = self._trainer.now or (None, None, None)
        return Activity(
            run=run,
            assignment=assignment or None,
            iteration=iteration,
            holding=self._bench.holding(),
            clock_skew_s=round(self._line.skew_s, 3),
            model=self._models.model,
            deployment=self._models.report,
            installation=self._installations.report,
        )

    def _signed(self, key_pem: bytes) -> dict[str, str]:
        return signed_headers(key_pem, self._line.clock, self._boot_id)

    def _refused(self, told: str) -> None:
        """Ends this agent if it is the one that is refused: its twin hears the same topic."""
        try:
            reason = refusal_in(told, self._boot_id)
        except ValueError as error:
            log.warning("ignored: %s", error)
            return
        if reason is not None:
            self.refusal = f"the coordinator refuses this agent, a copy: {reason}"
            self.stop()
            self.refused.set()

    def _obey(self, command: Command) -> None:
        self._commands.obey(command)

    def _report_progress(self, assignment_id: str, iteration: int, seconds_per_iteration: float) -> None:
        self._link.publish_progress(
            ProgressReport(assignment=assignment_id, iteration=iteration, seconds_per_iteration=seconds_per_iteration)
        )

    def _make_trainer(self) -> Trainer:
        state = self._state
        return Trainer(
            device_id=state.device_id,
            role=state.device.role,
            shards=lambda: state.device.shards,
            accelerator=self._accelerator,
            threads=state.device.threads,
            state_dir=state.root,
            life=state.next_session_no(),
            on_progress=self._report_progress,
            make_carrier=self._carriers.make,
            board=AssignmentVitals(),
            pacer=board_pacer(lambda: state.device.max_temperature_c),
            on_life=self.life.beat,
        )

    def _make_updates(self, site: Site) -> tuple[ModelUpdates, Installations]:
        state = self._state
        models = ModelUpdates(
            state,
            source=self._source,
            on_change=self._news,
            rng=derived_rng("models", state.device_id, time.time_ns()),
        )
        installations = Installations(
            state,
            site=site,
            boot_id=self._boot_id,
            source=self._source,
            on_change=self._news,
            rng=derived_rng("installations", state.device_id, time.time_ns()),
        )
        return models, installations

    def _make_report(self) -> SelfReport:
        return SelfReport(
            self._state,
            trainer=self._trainer,
            speeds=self._speeds,
            accelerator=self._accelerator,
            software=self._installations.facts,
            address=lambda: self._line.address,
            publish=self._link.publish_capabilities,
        )

    def _make_commands(self) -> Commands:
        return Commands(
            state=self._state,
            trainer=self._trainer,
            models=self._models,
            installations=self._installations,
            renewal=self._renewal,
            report=self._report,
            heart=self._heart,
            bell=self._bell,
            link=self._link,
            on_refused=self._refused,
        )


def run_agent(state: DeviceState, site: Site | None = None) -> None:
    """Runs the agent of a joined device until SIGTERM or SIGINT.

    Raises:
        ClonedError: this is the copy of a device that is at work, also when that was found out before.
    """
    check_welcome(state.root)
    agent = Agent(state, site=site)
    agent.keep_log()

    def stop() -> None:
        agent.stop()
        if not agent.leave(LEAVE_WITHIN_S):
            log.warning("what is under way takes too long; leaving without it")
            logging.shutdown()
            os._exit(0)  # what lies on disk is whole at any time, and nothing can end a thread that computes

    def stop_when_refused() -> None:
        agent.refused.wait()
        if not agent.leave(LEAVE_WITHIN_S):  # in the middle of an iteration that takes minutes
            log.error("%s", agent.refusal)
            keep_refusal(state.root, agent.refusal or "")
            logging.shutdown()
            os._exit(ClonedError.exit_code)

    threading.Thread(target=stop_when_refused, name="refused", daemon=True).start()
    with on_stop_signal(stop), watched(Notifier.from_environment(), agent.life):
        try:
            agent.run()
        except ClonedError as error:
            keep_refusal(state.root, str(error))
            raise
    log.info("%s has left the fleet for now", state.device_id)
