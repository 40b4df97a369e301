"""Identity lockout: persistent rejection of a cloned device, which prevents reconnect loops.

Supervisors restart an agent that has ended, and each time it would disconnect the other one from the broker for a
moment. So the rejection is stored, and holds until the board is rebooted: then the cause may be fixed, and one more
attempt costs little. An enrolment under a name of its own ends it at once.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from edgefl.core.errors import ClonedError, StoreError
from edgefl.core.safe_parsing import parse_json, parse_message
from edgefl.device.hardware.sysfs import read_text
from edgefl.device.state_dir import LOCKOUT_FILE
from edgefl.system.atomic_files import write_atomic

log = logging.getLogger(__name__)

MAX_REASON_CHARS = 500
KERNEL_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def save_lockout(root: Path, reason: str, *, kernel_boot_id: Path = KERNEL_BOOT_ID) -> None:
    """Stores in a state directory that the coordinator rejects its agent; ignores a full card."""
    try:
        write_atomic(root / LOCKOUT_FILE, json.dumps({"reason": reason, "boot": read_text(kernel_boot_id)}).encode())
    except StoreError as error:
        log.warning("cannot keep that this agent was refused: %s", error)


def parse_lockout(payload: str, boot_id: str) -> str | None:
    """Returns the reason in a command that rejects the agent of `boot_id`; None if it rejects the clone.

    Raises:
        ValueError: it is malformed.
    """
    try:
        value = parse_message(payload.encode())
        refused, reason = str(value["boot_id"]), str(value["reason"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"a refusal must have boot_id and reason, got {payload[:80]}") from error
    return reason[:MAX_REASON_CHARS] if refused == boot_id else None


def check_not_locked_out(root: Path, *, kernel_boot_id: Path = KERNEL_BOOT_ID) -> None:
    """Raises if the agent of a state directory was rejected since the last boot.

    Raises:
        ClonedError: it was; the message says what to do.
    """
    try:
        lockout = parse_json((root / LOCKOUT_FILE).read_bytes())
        reason, boot_id = str(lockout["reason"]), lockout["boot"]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError):
        reason, boot_id = "the note of it is damaged", read_text(kernel_boot_id)
    if boot_id != read_text(kernel_boot_id):
        return
    raise ClonedError(
        f"{reason}; on the copy run `edgefl device join` with a new token and another --name. If this is the right "
        f"one, switch the other off, and this one off and on again or delete {root / LOCKOUT_FILE}"
    )
