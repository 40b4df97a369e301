"""All that goes onto a Raspberry Pi's card: the payload, and what its kind of system looks for at the first boot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edgefl.provision import cloud_init, firstrun, preseed
from edgefl.provision.card import BACKUP, MARK, Files, Read, System, Wishes
from edgefl.provision.payload import FOLDER

_OUR_START = frozenset(word.encode() for word in firstrun.RUN)


def card_files(system: System, wishes: Wishes, payload: Mapping[str, bytes | Path], read: Read) -> Files:
    """Returns all that is written onto the card, the payload first.

    Raises:
        ConfigError: what lies on the card cannot be kept; see the messages.
    """
    render = {System.TRIXIE: cloud_init.files, System.BOOKWORM: firstrun.files, System.PRESEED: preseed.files}[system]
    files: Files = {f"{FOLDER}/{name}": content for name, content in payload.items()}
    made = render(wishes, lambda name: _known(name, read))
    files |= {f"{name}{BACKUP}": old for name in made if (old := _to_keep(name, read)) is not None}
    return files | made


def _known(name: str, read: Read) -> bytes | None:
    """Returns a file as it was before edgefl; but two as they are now.

    These are the network, which an earlier call may have said, and the kernel's command line, without our words.
    """
    present, kept = read(name), read(f"{name}{BACKUP}")
    if name == "network-config":
        return present
    if name != "cmdline.txt":
        return kept or present
    if present is None or kept is None:
        return present
    # The first boot gives the disk another id, which root= names: with the line of before the board boots no more.
    theirs = kept.split()
    return b" ".join(word for word in present.split() if word in theirs or word not in _OUR_START)


def _to_keep(name: str, read: Read) -> bytes | None:
    """Returns what is to be kept of a file beside its replacement: the user's own, once, and no tokens."""
    old = read(name)
    if old is None or read(f"{name}{BACKUP}") is not None or MARK.encode() in old or b"efl1." in old:
        return None
    return old
