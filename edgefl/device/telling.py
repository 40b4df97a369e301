"""Answers the coordinator's questions about this board, in a thread of its own: reading a card takes a moment."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from edgefl.device.logbook import page
from edgefl.errors import EdgeflError, NetworkError
from edgefl.protocol import Command, CommandAnswer
from edgefl.types import Json
from edgefl.untrusted import parse_json

log = logging.getLogger(__name__)

LOGS = "logs"
"""The folder of the log in a device's state directory."""


def tell_logs(state_dir: Path, command: Command, publish: Callable[[CommandAnswer], bool]) -> None:
    """Sends the page of the log that a command asks for; returns at once."""

    def tell() -> None:
        try:
            answer = CommandAnswer(id=command.id, content=page(state_dir / LOGS, _wanted(command)))
        except (EdgeflError, OSError) as error:
            answer = CommandAnswer(id=command.id, error=str(error))
        if not publish(answer):
            log.info("the link is down: nobody hears the answer to %s", command.id)

    threading.Thread(target=tell, name="logs", daemon=True).start()


def _wanted(command: Command) -> Json:
    try:
        wanted = parse_json(command.argument or "{}")
    except ValueError:
        wanted = None
    if not isinstance(wanted, dict):
        raise NetworkError("the question makes no sense: its argument is no JSON object")
    return wanted
