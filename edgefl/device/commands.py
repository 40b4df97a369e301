"""Wake-ups and commands of the coordinator, and the board's report of its capabilities."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from edgefl.core.protocol import (
    APP_CODING_KEY,
    CONDITIONS_KEY,
    QUERIES_KEY,
    SLICES_KEY,
    SPARSE_KEY,
    Capabilities,
    Command,
    CommandKind,
    host_and_port,
)
from edgefl.core.types import Json, Role
from edgefl.device.conditions.gate import ConditionGate
from edgefl.device.conditions.run_conditions import publish_answer
from edgefl.device.diagnostics.json_log import publish_logs
from edgefl.device.enrolment.certificates import CertificateRenewal
from edgefl.device.hardware.capabilities import probe
from edgefl.device.hardware.requirements import get_training_facts
from edgefl.device.hardware.step_rate import StepRateCache
from edgefl.device.inference.deployments import DeployedModels
from edgefl.device.mqtt.connection import HeartbeatPublisher, MqttConnection
from edgefl.device.rollouts.client import RolloutClient
from edgefl.device.state_dir import DeviceStateDir
from edgefl.device.training.confined_trainer import ConfiningTrainer
from edgefl.device.updates.installations import InstalledBundles

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0


class WakeUpSignal:
    """Counting signal with one waiter; each wake-up is one instruction, a lost one costs a poll interval."""

    def __init__(self) -> None:
        self._notifications: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_loss_possible = threading.Event()

    def notify(self) -> None:
        self._notifications.put(None)

    def record_possible_loss(self) -> None:
        """Records that wake-ups may be lost: after the next one, the device polls until no work is left."""
        self._is_loss_possible.set()

    def pop_possible_loss(self) -> bool:
        """Returns and resets whether wake-ups may have been lost."""
        may_have_lost = self._is_loss_possible.is_set()
        self._is_loss_possible.clear()
        return may_have_lost

    def wait(self, timeout_s: float) -> None:
        """Returns after one unconsumed wake-up, or after the timeout."""
        with contextlib.suppress(queue.Empty):
            self._notifications.get(timeout=timeout_s)


class CapabilityReporter:
    """Publisher of capabilities; used by the main thread, only `invalidate` from others.

    Args:
        state: has the shards.
        trainer: counts the examples, and has the running work.
        step_rates: measured training speeds.
        accelerator: that it trains on.
        get_software_facts: returns the facts of installed releases and packs.
        get_address: returns the coordinator's address, None while disconnected.
        publish: sends the capabilities to the fleet.
    """

    def __init__(  # noqa: PLR0913 a composition root hands over its parts by name
        self,
        state: DeviceStateDir,
        *,
        trainer: ConfiningTrainer,
        step_rates: StepRateCache,
        accelerator: str,
        get_software_facts: Callable[[], Json],
        get_address: Callable[[], str | None],
        publish: Callable[[Capabilities], None],
    ) -> None:
        self._state, self._trainer, self._step_rates, self._accelerator = state, trainer, step_rates, accelerator
        self._get_software_facts, self._get_address, self._publish = get_software_facts, get_address, publish
        self._published: tuple[object, Json] | None = None

    def invalidate(self) -> None:
        """Makes the next `publish` probe and send everything again."""
        self._published = None

    def publish(self) -> None:
        """Publishes facts and example counts when shards were changed or added."""
        self._state.reload()
        label_page = self._state.read_label_page()
        fingerprint = self._trainer.compute_shard_fingerprint(), self._step_rates.version, label_page
        published = self._published
        if published is None or published[0] != fingerprint:
            facts = published[1] if published else probe()
            self._published = fingerprint, facts
            blocks = self._trainer.list_blocks()
            device = self._state.settings
            training_facts = get_training_facts(device.role, device.shards, facts, self._trainer.read_task_traits)
            device_facts = {
                **training_facts,
                **self._get_peer_facts(),
                **self._get_software_facts(),
                **self._step_rates.get_facts(),
                **self._trainer.site_facts,
                CONDITIONS_KEY: True,
                SLICES_KEY: True,
                SPARSE_KEY: True,
                APP_CODING_KEY: True,
                QUERIES_KEY: True,
                "confinement": {"policy": device.confine, "gaps": self._trainer.confinement_gaps},
            }
            examples, shard_errors = self._trainer.count_examples(), self._trainer.get_shard_errors()
            drift = self._trainer.measure_drift()
            shard_facts = {
                **({"blocks": blocks} if blocks else {}),
                **({"drift": drift} if drift else {}),
                **({"shard_errors": shard_errors} if shard_errors else {}),
                **({"label_page": label_page} if label_page else {}),
            }
            self._publish(Capabilities(facts={**facts, **shard_facts, **device_facts}, shards=examples))

    def measure_step_rates(self) -> None:
        """Starts to measure the next unknown speed, unless a gossip node is training."""
        device, reported = self._state.settings, self._published
        if self._trainer.current is not None:
            self._step_rates.on_work()
        elif device.role == Role.TRAINER and reported is not None:
            self._step_rates.on_idle(
                device.shards, facts=reported[1], accelerator=self._accelerator, threads=device.threads,
                read_traits=self._trainer.read_task_traits, is_confined=device.confine != "never",
            )  # fmt: skip

    def _get_peer_facts(self) -> Json:
        """Returns the peer address: the local address of the connection to the coordinator."""
        address = self._get_address()
        if address is None:
            return {}
        host, port = host_and_port(address)
        try:
            with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S) as connection:
                local_address = str(connection.getsockname()[0])
        except OSError:
            return {}
        local_address = f"[{local_address}]" if ":" in local_address else local_address
        return {"peer_address": f"{local_address}:{self._state.settings.peer_port}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandDispatcher:
    """Dispatcher of commands to the agent's components."""

    state: DeviceStateDir
    trainer: ConfiningTrainer
    gate: ConditionGate
    models: RolloutClient[DeployedModels]
    installations: RolloutClient[InstalledBundles]
    renewal: CertificateRenewal
    capability_reporter: CapabilityReporter
    heartbeat: HeartbeatPublisher
    wake_up: WakeUpSignal
    connection: MqttConnection
    on_lockout: Callable[[str], None]

    def dispatch(self, command: Command) -> None:
        """Executes one command, in the MQTT thread; unknown ones are logged."""
        argument_handlers = {
            CommandKind.FINISH_EARLY: self.trainer.finish_early,
            CommandKind.CONTINUE: self.trainer.continue_training,
            CommandKind.END: self._complete_run,
            CommandKind.DEPLOY: self.models.apply,
            CommandKind.ROLLBACK: self.models.roll_back,
            CommandKind.INSTALL: self.installations.apply,
            CommandKind.LOCKOUT: self.on_lockout,
        }
        match command.kind:
            case kind if kind in argument_handlers and command.argument:
                argument_handlers[CommandKind(kind)](command.argument)
            case CommandKind.DRAIN | CommandKind.RESUME:
                self.connection.set_draining(draining=command.kind == CommandKind.DRAIN)
                if command.kind == CommandKind.DRAIN:
                    self.trainer.pause()
            case CommandKind.RENEW:
                self.renewal.request()
                self.wake_up.notify()
            case CommandKind.HEARTBEAT:
                self.heartbeat.publish_now()
            case CommandKind.LOGS:
                publish_logs(self.state.root, command, self.connection.publish_reply)
            case CommandKind.CONDITIONS:
                publish_answer(
                    command, find_owner_blocker=self.gate.find_owner_blocker, publish=self.connection.publish_reply
                )
            case CommandKind.RELOAD:
                self.capability_reporter.invalidate()
                self.wake_up.notify()
            case CommandKind.LOG_LEVEL if command.argument in logging.getLevelNamesMapping():
                logging.getLogger().setLevel(command.argument)
            case _:
                log.warning("ignored an unknown command %r", command.kind)

    def _complete_run(self, run: str) -> None:
        self.gate.complete_run(run)
        self.trainer.complete_run(run)
