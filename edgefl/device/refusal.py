"""What a device remembers of being refused as the copy of another: it must not come back by itself over and over.

Supervisors start an agent again that has ended, and each time it would throw the other one off the broker for a
moment. So the refusal is kept, and holds until the board is switched off and on: then somebody may have put things
right, and one more try costs little. A join under a name of its own ends it at once.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from edgefl.device.board.board_files import text
from edgefl.device.state import REFUSED
from edgefl.errors import ClonedError, StoreError
from edgefl.files import write_whole
from edgefl.untrusted import parse_json, parse_message

log = logging.getLogger(__name__)

MAX_REASON_CHARS = 500
KERNEL_BOOT = Path("/proc/sys/kernel/random/boot_id")


def keep_refusal(root: Path, reason: str, *, kernel_boot: Path = KERNEL_BOOT) -> None:
    """Notes in a state directory that the coordinator refuses its agent; a card without room is no obstacle."""
    try:
        write_whole(root / REFUSED, json.dumps({"reason": reason, "boot": text(kernel_boot)}).encode())
    except StoreError as error:
        log.warning("cannot keep that this agent was refused: %s", error)


def refusal_in(told: str, boot_id: str) -> str | None:
    """Returns why the agent of a boot id is refused, of the command that says so; None if that is its twin.

    Raises:
        ValueError: it makes no sense.
    """
    try:
        value = parse_message(told.encode())
        refused, reason = str(value["boot_id"]), str(value["reason"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"a refusal must have boot_id and reason, got {told[:80]}") from error
    return reason[:MAX_REASON_CHARS] if refused == boot_id else None


def check_welcome(root: Path, *, kernel_boot: Path = KERNEL_BOOT) -> None:
    """Makes sure that the agent of a state directory has not been refused since the board was switched on.

    Raises:
        ClonedError: it has; the message says what to do.
    """
    try:
        note = parse_json((root / REFUSED).read_bytes())
        reason, boot = str(note["reason"]), note["boot"]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError):
        reason, boot = "the note of it is damaged", text(kernel_boot)
    if boot != text(kernel_boot):
        return
    raise ClonedError(
        f"{reason}; on the copy run `edgefl device join` with a new token and another --name. If this is the right "
        f"one, switch the other off, and this one off and on again or delete {root / REFUSED}"
    )
