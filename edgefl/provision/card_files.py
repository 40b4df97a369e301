"""All that goes onto a Raspberry Pi's card: the payload, and what its kind of system looks for at the first boot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edgefl.provision import cloud_init, firstrun, preseed
from edgefl.provision.card import BACKUP, MARK, Files, Read, System, Wishes
from edgefl.provision.payload import FOLDER


def card_files(system: System, wishes: Wishes, payload: Mapping[str, bytes | Path], read: Read) -> Files:
    """Returns all that is written onto the card, the payload first.

    Raises:
        ConfigError: what lies on the card cannot be kept; see the messages.
    """
    render = {System.TRIXIE: cloud_init.files, System.BOOKWORM: firstrun.files, System.PRESEED: preseed.files}[system]
    files: Files = {f"{FOLDER}/{name}": content for name, content in payload.items()}
    made = render(wishes, lambda name: read(f"{name}{BACKUP}") or read(name))
    files |= {f"{name}{BACKUP}": old for name in made if (old := _to_keep(name, read)) is not None}
    return files | made


def _to_keep(name: str, read: Read) -> bytes | None:
    """Returns what is to be kept of a file beside its replacement: the user's own, once, and no tokens."""
    old = read(name)
    if old is None or read(f"{name}{BACKUP}") is not None or MARK.encode() in old or b"efl1." in old:
        return None
    return old
