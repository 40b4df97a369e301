"""Log requests of the coordinator, answered in a separate thread because cards are slow."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from edgefl.core.errors import EdgeflError, NetworkError
from edgefl.core.protocol import Command, CommandReply
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Json
from edgefl.device.diagnostics.json_log import read_page

log = logging.getLogger(__name__)

LOG_FOLDER = "logs"
"""The folder of the log in a device's state directory."""


def publish_logs(state_dir: Path, command: Command, publish: Callable[[CommandReply], bool]) -> None:
    """Sends the log page that a command requests; returns at once."""

    def send() -> None:
        try:
            reply = CommandReply(id=command.id, content=read_page(state_dir / LOG_FOLDER, _parse_query(command)))
        except (EdgeflError, OSError) as error:
            reply = CommandReply(id=command.id, error=str(error))
        if not publish(reply):
            log.info("the link is down: nobody hears the answer to %s", command.id)

    threading.Thread(target=send, name="logs", daemon=True).start()


def _parse_query(command: Command) -> Json:
    try:
        query = parse_json(command.argument or "{}")
    except ValueError:
        query = None
    if not isinstance(query, dict):
        raise NetworkError("the question makes no sense: its argument is no JSON object")
    return query
