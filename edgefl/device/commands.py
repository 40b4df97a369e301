"""What the coordinator commands over MQTT, done by whom it concerns."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from edgefl.device.bell import Bell
from edgefl.device.heartbeat import Heart
from edgefl.device.inference.model_updates import ModelUpdates
from edgefl.device.installations import Installations
from edgefl.device.joining.renewal import Renewal
from edgefl.device.moving_link import MovingLink
from edgefl.device.self_report import SelfReport
from edgefl.device.state import DeviceState
from edgefl.device.telling import tell_logs
from edgefl.device.trainer import Trainer
from edgefl.protocol import Command, CommandKind

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """Whom commands concern."""

    state: DeviceState
    trainer: Trainer
    models: ModelUpdates
    installations: Installations
    renewal: Renewal
    report: SelfReport
    heart: Heart
    bell: Bell
    link: MovingLink
    on_refused: Callable[[str], None]

    def obey(self, command: Command) -> None:
        """Does one command, in the link's thread; one that is unknown here is logged."""
        of_something = {
            CommandKind.RECALL: self.trainer.recall,
            CommandKind.END: self.trainer.end_run,
            CommandKind.DEPLOY: self.models.deploy,
            CommandKind.ROLLBACK: self.models.roll_back,
            CommandKind.INSTALL: self.installations.install,
            CommandKind.REFUSED: self.on_refused,
        }
        match command.kind:
            case kind if kind in of_something and command.argument:
                of_something[CommandKind(kind)](command.argument)
            case CommandKind.DRAIN | CommandKind.RESUME:
                self.link.set_draining(draining=command.kind == CommandKind.DRAIN)
                if command.kind == CommandKind.DRAIN:
                    self.trainer.rest()
            case CommandKind.RENEW:
                self.renewal.ask()
                self.bell.ring()
            case CommandKind.BEAT:
                self.heart.beat_now()
            case CommandKind.LOGS:
                tell_logs(self.state.root, command, self.link.publish_answer)
            case CommandKind.RELOAD:
                self.report.forget()
                self.bell.ring()
            case CommandKind.LOG_LEVEL if command.argument in logging.getLevelNamesMapping():
                logging.getLogger().setLevel(command.argument)
            case _:
                log.warning("ignored an unknown command %r", command.kind)
