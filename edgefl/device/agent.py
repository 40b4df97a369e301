"""Device agent: a long-running process that waits for work, executes it, and always reconnects.

The main thread pulls work and trains. MQTT, the heartbeat and the upload of replies have threads of their own, so
that a board stays reachable while it trains.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from functools import partial

from edgefl import __version__
from edgefl.core.conditions import DOWNLOAD, Blocker, ConditionsEndedError, format_blocker
from edgefl.core.errors import ClonedError, NetworkError, StoreError
from edgefl.core.extensions import refuse_extensions
from edgefl.core.protocol import CONDITIONS_KEY, HEARTBEAT_S, POLL_S, Command, ProgressReport
from edgefl.core.types import derive_rng
from edgefl.device.commands import CapabilityReporter, CommandDispatcher, WakeUpSignal
from edgefl.device.conditions.gate import ConditionGate
from edgefl.device.coordinator_endpoint import CoordinatorEndpoint
from edgefl.device.diagnostics.json_log import LOG_FOLDER, JsonLogHandler
from edgefl.device.enrolment.certificates import CertificateRenewal
from edgefl.device.flower.supernode import RequestSigner, UnauthorisedError
from edgefl.device.flower.work_loop import PollBackoff, WorkLoop
from edgefl.device.hardware.capabilities import compute_board_hash, select_accelerator
from edgefl.device.hardware.health import HealthReader, HealthSampler, create_thermal_pacer
from edgefl.device.hardware.requirements import CONFINED_FOLDER
from edgefl.device.hardware.step_rate import StepRateCache
from edgefl.device.inference.deployments import DeployedModels
from edgefl.device.mqtt.connection import DeviceActivity, HeartbeatPublisher, MqttConnection
from edgefl.device.mqtt.session import MqttCallbacks, MqttIdentity
from edgefl.device.peers.transports import PeerTransportFactory
from edgefl.device.rollouts.bases import FOLDER as BASES_FOLDER
from edgefl.device.rollouts.client import HandlerT, RolloutClient
from edgefl.device.rollouts.download import DownloadSource
from edgefl.device.state_dir import DeviceStateDir, check_not_locked_out, parse_lockout, save_lockout
from edgefl.device.training.confined_trainer import ConfiningTrainer
from edgefl.device.training.gossip_worker import INSTRUCTION_FILE, load_node_instruction
from edgefl.device.training.site_trainer import SiteConnection, SiteTrainer
from edgefl.device.training.trainer import TrainingAbortedError
from edgefl.device.updates.installations import InstalledBundles
from edgefl.device.updates.protocol import HealthWriter
from edgefl.device.updates.slots import SoftwareUpdateConfig, get_install_facts, load_update_config
from edgefl.system.https_client import SignRequest, create_pinned_context
from edgefl.system.processes import LivenessMonitor, SystemdNotifier, on_stop_signal, run_watchdog
from edgefl.system.retries import Backoff

log = logging.getLogger(__name__)

INITIAL_BACKOFF_S = 0.25
MAX_BACKOFF_S = 30.0
EAGER_S, EAGER_MAX_BACKOFF_S = 30.0, 2.0
"""Where a fleet has several addresses another host may take over: for so long these are tried at least so often."""
UPLOAD_TIMEOUT_S = 3.0
"""Time that a stopping agent has to send the reply under way."""
SHUTDOWN_TIMEOUT_S = 5.0
"""Time after which a stopping agent has exited, even in an iteration that takes minutes."""


class Agent:
    """Agent of one device; `run` returns after `stop`.

    Args:
        state: of the device.
        heartbeat_s, poll_s: between two heartbeats, and two polls.
        update_config: of its software; None for the machine's.
        site: the boards that do its work, where it is a gateway.

    Attributes:
        liveness: records progress of the main loop.
        locked_out, lockout_reason: whether and why the coordinator has rejected this agent, over MQTT, as a clone.
    """

    def __init__(
        self,
        state: DeviceStateDir,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        poll_s: float = POLL_S,
        update_config: SoftwareUpdateConfig | None = None,
        site: SiteConnection | None = None,
    ) -> None:
        self._site = site
        self._state, self._poll_backoff = state, PollBackoff(poll_s)
        self.liveness = LivenessMonitor()
        self._stopping, self._has_stopped, self._wake_up = threading.Event(), threading.Event(), WakeUpSignal()
        self._boot_id = uuid.uuid4().hex
        self.lockout_reason: str | None = None
        self._away_since_s: float | None = None
        self.locked_out = threading.Event()
        rng = derive_rng("agent", state.device_id, time.time_ns())
        self._backoff = Backoff(
            initial_s=INITIAL_BACKOFF_S,
            max_s=MAX_BACKOFF_S,
            rng=rng,
            eager_s=EAGER_S if len(state.settings.addresses) > 1 else 0.0,
            eager_max_s=EAGER_MAX_BACKOFF_S,
        )
        self._tls_context = create_pinned_context(state.ca.read_bytes())
        self._confine, self._gate, self._was_blocked = state.settings.confine, ConditionGate(state.root), False
        self._reported_metered: bool | None = None
        self._accelerator = select_accelerator(state.settings.accelerator)
        self._renewal = CertificateRenewal(state, self._tls_context, make_signer=self._make_signer)
        self._connection = self._make_connection()
        self._transports = PeerTransportFactory(state, self._connection.peers)
        self._endpoint = CoordinatorEndpoint(
            state,
            self._tls_context,
            on_info=self._renewal.on_coordinator_info,
            activate=self._activate_node,
            on_attempt=self.liveness.record_progress,
        )
        self._trainer = self._make_trainer()
        bases_dir = state.root / BASES_FOLDER if self._site is None else self._site.bases_dir
        self._step_rates = StepRateCache(state.root, on_measured=self._wake_up.notify, compiled_dir=bases_dir)
        self._work_loop = WorkLoop(
            state,
            tls_context=self._tls_context,
            trainer=self._trainer,
            clock=self._endpoint.clock,
            instance=self._boot_id,
            gate=self._gate,
            on_work=self._step_rates.on_work,
            on_failure=self._wake_up.notify,
        )
        self._update_config = update_config or load_update_config()
        self._updater_health = HealthWriter(self._update_config.slots, state.root, self._boot_id)
        self._models = self._make_rollout_client(DeployedModels(state, self._update_config))
        self._installations = self._make_rollout_client(InstalledBundles(state, self._update_config))
        self._capability_reporter = self._make_capability_reporter()
        self._heartbeat = HeartbeatPublisher(
            self._connection.publish_heartbeat,
            HealthReader(state.root).read,
            self._get_activity,
            interval_s=heartbeat_s,
            seed=state.device_id,
        )
        self._commands = self._make_commands()

    def start_logging(self) -> None:
        """Adds a log in the state directory, which the coordinator can request."""
        try:
            handler = JsonLogHandler(
                self._state.root / LOG_FOLDER,
                get_current_work=self._work_loop.get_log_context,
                clock=self._endpoint.clock,
            )
        except OSError as error:
            log.warning("keeps no log of its own: %s", error)
            return
        logging.getLogger().addHandler(handler)

    def stop(self) -> None:
        """Stops the agent soon; training under way is abandoned."""
        self._stopping.set()
        self._trainer.abort()
        self._wake_up.notify()

    def wait_or_disconnect(self, timeout_s: float) -> bool:
        """Returns whether `run` ended in time after `stop`; if not, disconnects from the broker."""
        if self._has_stopped.wait(timeout_s):
            return True
        self._heartbeat.stop()
        self._connection.stop()
        return False

    def run(self) -> None:
        """Runs until `stop`; survives every loss of the coordinator and of the broker.

        Raises:
            ClonedError: another agent has the same identity, and the coordinator rejects this one.
        """
        if self._site is not None:  # what the boards have is told upstream
            self._site.site.subscribe(self._wake_up.notify)
        self._connection.start()
        self._heartbeat.start()
        self._models.start()
        self._updater_health.record()
        self._installations.start()
        if self._gate.check() is None and self._may_resume_node():
            with self.liveness.track_work():
                self._work_loop.run_yielding(self._trainer.resume)
        try:
            while not self._stopping.is_set():
                self.liveness.record_progress()
                try:
                    self._connect()
                    self._publish_capabilities()
                    self._run_work_loop()
                except TrainingAbortedError:
                    break
                except (NetworkError, StoreError) as error:
                    self._endpoint.disconnect()
                    if self._stopping.is_set():
                        break
                    log.warning("%s; trying again", error)
                    if self._work_offline():
                        continue
                    # A coordinator that is back sends wake-ups for waiting work by a broker that stayed up.
                    self._wake_up.wait(self._backoff.next_s())
        finally:
            self._models.stop()
            self._installations.stop()
            self._step_rates.close()
            self._work_loop.uploader.close(UPLOAD_TIMEOUT_S)
            self._trainer.close()
            self._heartbeat.stop()
            self._connection.stop()
            self._work_loop.supernode.close()
            self._has_stopped.set()
        if self.lockout_reason is not None:
            raise ClonedError(self.lockout_reason)

    def _work_offline(self) -> bool:
        """Works on without the coordinator, as far as the trainer does that and this board may; returns whether."""
        now_s = time.monotonic()
        self._away_since_s = now_s if self._away_since_s is None else self._away_since_s
        away_s = now_s - self._away_since_s
        if self._trainer.can_work_offline(away_s) and self._gate.check() is None:
            with self.liveness.track_work(), contextlib.suppress(TrainingAbortedError):
                return self._trainer.work_offline()
        return False

    def _may_resume_node(self) -> bool:
        """Admits the run of the node that this board was; returns whether its conditions hold. True for no node."""
        for folder in (self._state.root, self._state.root / CONFINED_FOLDER):
            header = load_node_instruction(folder / INSTRUCTION_FILE)
            if header is None:
                continue
            try:
                self._gate.admit(str(header.get("run")), header.get(CONDITIONS_KEY))
            except ConditionsEndedError as error:
                log.info("goes on as no node of run %s: %s", header.get("run"), error)
                return False
        return True

    def _connect(self) -> None:
        """Connects to the coordinator unless connected, and to the broker where that has moved."""
        if self._endpoint.address is not None:
            return
        self._pause_uploads()  # uploads under way use the connection that is closed now
        former_brokers = self._state.settings.brokers
        self._endpoint.connect()
        self._away_since_s = None
        self._gate.observe_skew(self._endpoint.skew_s)
        if set(self._state.settings.brokers) != set(former_brokers):
            self._connection.switch_broker(self._state.settings.brokers)
            self._capability_reporter.invalidate()
        self._updater_health.record(connected=True)
        self._wake_up.record_possible_loss()
        self._wake_up.notify()  # work may be waiting

    def _activate_node(self, address: str) -> None:
        """Activates the node in Flower; recovers by the certificate renewal where its key is rejected."""
        try:
            self._work_loop.supernode.connect(address)
        except UnauthorisedError:
            if not self._renewal.recover(address):
                raise
            self._apply_certificate()
            self._work_loop.supernode.connect(address)

    def _renew_if_due(self, address: str) -> bool:
        """Returns whether a due renewal replaced the certificate, so that it must reconnect."""
        self._renewal.poll(address, is_connected=self._connection.is_connected())
        if not self._renewal.is_due():
            return False
        self._pause_uploads()  # uploads under way are signed with the old key
        if not self._renewal.renew(address):
            self._work_loop.uploader.resume()
            return False
        self._apply_certificate()
        self._endpoint.disconnect()
        return True

    def _pause_uploads(self) -> None:
        with self.liveness.track_work():  # a reply on a slow link takes minutes
            self._work_loop.uploader.pause()

    def _apply_certificate(self) -> None:
        self._work_loop.supernode.update_key(self._state.key.read_bytes())
        self._connection.renew(self._state.tls_files)

    def _run_work_loop(self) -> None:
        """Runs the work loop until there is an error or the agent stops."""
        self._work_loop.uploader.resume()
        while not self._stopping.is_set():
            self._wake_up.wait(self._poll_backoff.compute_interval_s(is_connected=self._connection.is_connected()))
            self.liveness.record_progress()
            self._work_loop.uploader.check()
            self._trainer.remove_expired()
            if self._endpoint.address is not None and self._renew_if_due(self._endpoint.address):
                return
            if not self._stopping.is_set():
                self._poll_work()

    def _poll_work(self) -> None:
        may_have_lost_wake_up = self._wake_up.pop_possible_loss()
        with self.liveness.track_work():
            did_work = self._work_loop.run_once()
        # Not before: a coordinator may accept connections, have work, and then fail under too many boards.
        if self._work_loop.uploader.has_progressed():
            self._backoff.reset()
        if not did_work:
            self._publish_capabilities()
            if self._gate.check_often() is None:
                self._capability_reporter.measure_step_rates()
            return
        if self._gate.check_often() is not None or self._gate.read_metered() != self._reported_metered:
            self._heartbeat.publish_now()
        self._poll_backoff.on_work()
        if may_have_lost_wake_up:
            self._wake_up.record_possible_loss()
            self._wake_up.notify()  # more may be waiting, whose wake-ups were lost

    def _publish_capabilities(self) -> None:
        with self.liveness.track_work():  # shards are read completely
            self._capability_reporter.publish()

    def _on_update_status(self) -> None:
        """Publishes a heartbeat and wakes the main loop: the coordinator may have moved during a download."""
        self._heartbeat.publish_now()
        self._wake_up.notify()

    def _on_connection_change(self, is_connected: bool) -> None:
        """Wakes the main loop when the broker is lost: the coordinator may have moved with it."""
        self._heartbeat.publish_now()
        if is_connected:
            self._updater_health.record(linked=True)
            self._wake_up.record_possible_loss()  # the connection itself sends a wake-up
        else:
            self._wake_up.notify()

    def _get_download_source(self) -> DownloadSource:
        """Returns the present download source.

        Raises:
            NetworkError: the coordinator is unreachable.
        """
        address = self._endpoint.address
        if address is None:
            raise NetworkError("the coordinator is away")
        return DownloadSource(address=address, tls_context=self._tls_context, sign=self._work_loop.supernode.sign)

    def _get_activity(self) -> DeviceActivity:
        run, assignment, iteration = self._trainer.current or (None, None, None)
        blocker, self._reported_metered = self._check_conditions(), self._gate.read_metered()
        allowance = self._gate.find_allowance() if blocker is None else None
        return DeviceActivity(
            run=run,
            assignment=assignment or None,
            iteration=iteration,
            holding=list(self._work_loop.list_held_assignments()),
            clock_skew_s=round(self._endpoint.skew_s, 3),
            model=self._models.handler.model,
            deployment=self._models.report,
            installation=self._installations.report,
            blocked=blocker.to_json() if blocker is not None else None,
            allowance=allowance.to_json() if allowance is not None else None,
            metered=self._reported_metered,
        )

    def _check_conditions(self) -> Blocker | None:
        """Returns why this board may not train now; stops what trains, and wakes the main loop afterwards."""
        blocker, was_blocked = self._gate.check() or self._gate.find_run_blocker(), self._was_blocked
        self._was_blocked = blocker is not None
        if blocker is not None:
            if not was_blocked:
                log.info("trains nothing: %s", format_blocker(blocker))
            self._step_rates.on_work()
        elif blocker is None and was_blocked:
            log.info("trains again")
            self._wake_up.notify()
        # A node of one run goes on while another's conditions do not hold.
        run = self._trainer.node_run
        of_node = self._gate.find_run_blocker(run)  # DOWNLOAD ends no work under way
        is_own = blocker is not None and (not run or blocker.run in {"", run})
        if any(found is not None and found.kind != DOWNLOAD for found in (blocker if is_own else None, of_node)):
            self._trainer.pause()  # each time: a node of a graph may have started since
        return blocker

    def _make_signer(self, key_pem: bytes) -> SignRequest:
        return RequestSigner(key_pem, self._endpoint.clock, self._boot_id).sign

    def _on_lockout(self, payload: str) -> None:
        """Stops this agent if it is the rejected one: its clone receives the same topic."""
        try:
            reason = parse_lockout(payload, self._boot_id)
        except ValueError as error:
            log.warning("ignored: %s", error)
            return
        if reason is not None:
            self.lockout_reason = f"the coordinator refuses this agent, a copy: {reason}"
            self.stop()
            self.locked_out.set()

    def _on_command(self, command: Command) -> None:
        self._commands.dispatch(command)

    def _on_peer_message(self, sender: str, payload: bytes) -> None:
        self._transports.receive(sender, payload)

    def _publish_progress(self, assignment_id: str, iteration: int, seconds_per_iteration: float) -> bool:
        return self._connection.publish_progress(
            ProgressReport(assignment=assignment_id, iteration=iteration, seconds_per_iteration=seconds_per_iteration)
        )

    def _make_connection(self) -> MqttConnection:
        state = self._state
        return MqttConnection(
            state.settings.brokers,
            state.tls_files,
            MqttIdentity(
                fleet=state.settings.fleet,
                device_id=state.device_id,
                boot_id=self._boot_id,
                version=__version__,
                board=compute_board_hash() or "",
            ),
            MqttCallbacks(
                on_wake_up=self._wake_up.notify,
                on_command=self._on_command,
                on_connection=self._on_connection_change,
                on_peer_message=self._on_peer_message,
            ),
            next_session_no=state.next_session_no,
        )

    def _make_trainer(self) -> ConfiningTrainer:
        state, site = self._state, self._site
        make = ConfiningTrainer if site is None else partial(SiteTrainer, site.site, bases_dir=site.bases_dir)
        return make(
            get_policy=lambda: self._confine,
            next_incarnation=state.next_session_no,
            get_temperature_limit_c=lambda: state.settings.max_temperature_c,
            device_id=state.device_id,
            role=state.settings.role,
            shards=lambda: state.settings.shards,
            accelerator=self._accelerator,
            threads=state.settings.threads,
            state_dir=state.root,
            on_progress=self._publish_progress,
            make_transport=self._transports.make,
            health_sampler=HealthSampler(),
            thermal_pacer=create_thermal_pacer(lambda: state.settings.max_temperature_c),
            on_alive=self.liveness.record_progress,
            get_source=self._get_download_source,
            get_min_group=lambda: state.settings.min_group,
            get_drift_references=lambda: state.settings.drift_references,
            get_max_epsilon=lambda: state.settings.max_epsilon,
            get_only_masked=lambda: state.settings.only_masked,
            check_conditions=self._gate.require,
            get_yields=lambda: self._gate.conditions.yields,
            charge_traffic=self._gate.charge_file,
            check_base_link=self._gate.require_base,
            get_base_source=lambda: state.settings.base_source,
            charge_copy=self._gate.charge_copy,
        )

    def _make_rollout_client(self, handler: HandlerT) -> RolloutClient[HandlerT]:
        return RolloutClient(
            handler,
            get_source=self._get_download_source,
            on_change=self._on_update_status,
            rng=derive_rng(handler.artefact.rollout, self._state.device_id, time.time_ns()),
        )

    def _make_capability_reporter(self) -> CapabilityReporter:
        return CapabilityReporter(
            self._state,
            trainer=self._trainer,
            step_rates=self._step_rates,
            accelerator=self._accelerator,
            get_software_facts=partial(get_install_facts, self._update_config, self._state.root),
            get_address=lambda: self._endpoint.address,
            publish=self._connection.publish_capabilities,
        )

    def _make_commands(self) -> CommandDispatcher:
        return CommandDispatcher(
            state=self._state,
            trainer=self._trainer,
            gate=self._gate,
            models=self._models,
            installations=self._installations,
            renewal=self._renewal,
            capability_reporter=self._capability_reporter,
            heartbeat=self._heartbeat,
            wake_up=self._wake_up,
            connection=self._connection,
            on_lockout=self._on_lockout,
        )


def run_agent(
    state: DeviceStateDir,
    update_config: SoftwareUpdateConfig | None = None,
    *,
    site: SiteConnection | None = None,
) -> None:
    """Runs the agent of an enrolled device until SIGTERM or SIGINT.

    Args:
        state: of the device.
        update_config: of its software; None for the machine's.
        site: as `Agent`.

    Raises:
        ClonedError: this is the clone of an active device, also when detected before.
    """
    check_not_locked_out(state.root)
    agent = Agent(state, update_config=update_config, site=site)
    agent.start_logging()

    def stop() -> None:
        agent.stop()
        if not agent.wait_or_disconnect(SHUTDOWN_TIMEOUT_S):
            log.warning("what is under way takes too long; leaving without it")
            logging.shutdown()
            os._exit(0)  # files on disk are consistent at any time, and a computing thread cannot be interrupted

    def stop_when_locked_out() -> None:
        agent.locked_out.wait()
        if not agent.wait_or_disconnect(SHUTDOWN_TIMEOUT_S):  # in an iteration that takes minutes
            log.error("%s", agent.lockout_reason)
            save_lockout(state.root, agent.lockout_reason or "")
            logging.shutdown()
            os._exit(ClonedError.exit_code)

    threading.Thread(target=stop_when_locked_out, name="lockout", daemon=True).start()
    is_confining = state.settings.confine != "never"
    refusing = refuse_extensions() if is_confining else contextlib.nullcontext()
    with refusing, on_stop_signal(stop), run_watchdog(SystemdNotifier.from_environment(), agent.liveness):
        try:
            agent.run()
        except ClonedError as error:
            save_lockout(state.root, str(error))
            raise
    log.info("%s has left the fleet for now", state.device_id)
