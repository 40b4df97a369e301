"""Dispatch of the coordinator's MQTT commands to the components that execute them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from edgefl.core.protocol import Command, CommandKind
from edgefl.device.capability_report import CapabilityReporter
from edgefl.device.diagnostics.log_requests import publish_logs
from edgefl.device.enrolment.renewal import CertificateRenewal
from edgefl.device.inference.deployments import DeploymentClient
from edgefl.device.mqtt.heartbeat import HeartbeatPublisher
from edgefl.device.mqtt.relocatable_connection import RelocatableConnection
from edgefl.device.mqtt.wake_up import WakeUpSignal
from edgefl.device.state_dir import DeviceStateDir
from edgefl.device.training.trainer import DeviceTrainer
from edgefl.device.updates.installation_client import InstallationClient

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandDispatcher:
    """Dispatcher of commands to the agent's components."""

    state: DeviceStateDir
    trainer: DeviceTrainer
    models: DeploymentClient
    installations: InstallationClient
    renewal: CertificateRenewal
    capability_reporter: CapabilityReporter
    heartbeat: HeartbeatPublisher
    wake_up: WakeUpSignal
    connection: RelocatableConnection
    on_lockout: Callable[[str], None]

    def dispatch(self, command: Command) -> None:
        """Executes one command, in the MQTT thread; unknown ones are logged."""
        argument_handlers = {
            CommandKind.RECALL: self.trainer.finish_early,
            CommandKind.END: self.trainer.complete_run,
            CommandKind.DEPLOY: self.models.deploy,
            CommandKind.ROLLBACK: self.models.roll_back,
            CommandKind.INSTALL: self.installations.install,
            CommandKind.REFUSED: self.on_lockout,
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
            case CommandKind.BEAT:
                self.heartbeat.publish_now()
            case CommandKind.LOGS:
                publish_logs(self.state.root, command, self.connection.publish_reply)
            case CommandKind.RELOAD:
                self.capability_reporter.invalidate()
                self.wake_up.notify()
            case CommandKind.LOG_LEVEL if command.argument in logging.getLevelNamesMapping():
                logging.getLogger().setLevel(command.argument)
            case _:
                log.warning("ignored an unknown command %r", command.kind)
