"""All files of a Raspberry Pi's card: the payload, and those its system reads at the first boot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edgefl.provision import cloud_init, firstrun, preseed
from edgefl.provision.payload import PAYLOAD_FOLDER
from edgefl.provision.sd_card import BACKUP_SUFFIX, GENERATED_MARK, CardOptions, FileContents, OsFlavour, ReadFile

_OUR_CMDLINE_WORDS = frozenset(word.encode() for word in firstrun.FIRSTRUN_CMDLINE_WORDS)


def render_card_files(
    system: OsFlavour, options: CardOptions, payload: Mapping[str, bytes | Path], read: ReadFile
) -> FileContents:
    """Returns all files of the card, the payload first.

    Raises:
        ConfigError: existing files of the card cannot be kept; see the messages.
    """
    render = {
        OsFlavour.TRIXIE: cloud_init.render_files,
        OsFlavour.BOOKWORM: firstrun.render_files,
        OsFlavour.PRESEED: preseed.render_files,
    }[system]
    files: FileContents = {f"{PAYLOAD_FOLDER}/{name}": content for name, content in payload.items()}
    system_files = render(options, lambda name: _read_original(name, read))
    files |= {
        f"{name}{BACKUP_SUFFIX}": old
        for name in system_files
        if (old := _read_backup_content(name, read)) is not None
    }
    return files | system_files


def _read_original(name: str, read: ReadFile) -> bytes | None:
    """Returns a file as it was before edgefl; two of them as they are now.

    These are the network, which an earlier call may have set, and the kernel's command line, without our words.
    """
    present, backup = read(name), read(f"{name}{BACKUP_SUFFIX}")
    if name == "network-config":
        return present
    if name != "cmdline.txt":
        return backup or present
    if present is None or backup is None:
        return present
    # The first boot gives the disk another id, used by root=: with the earlier line the device no longer boots.
    backup_words = backup.split()
    return b" ".join(word for word in present.split() if word in backup_words or word not in _OUR_CMDLINE_WORDS)


def _read_backup_content(name: str, read: ReadFile) -> bytes | None:
    """Returns a file's backup to keep beside its replacement: the user's own, once, without tokens."""
    old = read(name)
    if old is None or read(f"{name}{BACKUP_SUFFIX}") is not None or GENERATED_MARK.encode() in old or b"efl1." in old:
        return None
    return old
