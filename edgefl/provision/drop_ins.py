"""Drop-ins for the units of a board: the sandbox hides homes and temporary folders, and data may lie there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from edgefl.device.joining.shard_access import is_hidden, shown_folder
from edgefl.errors import UsageError

UNITS = ("edgefl-device.service", "edgefl-join.service")
NAME = "20-shards.conf"
_PLAIN = re.compile(r"/[\w./+@,=-]+\Z")


def shard_drop_ins(shards: Mapping[str, str]) -> dict[str, bytes | Path]:
    """Returns the drop-ins that show hidden shards' folders to the units, read-only; none where all are visible.

    Raises:
        UsageError: a path on the board is not absolute, or has characters that units take for something else.
    """
    for task, path in shards.items():
        if not _PLAIN.match(path) or "/../" in f"{path}/":
            raise UsageError(
                f"the shard of {task} must be an absolute path on the board without spaces, got {path!r}; "
                "such as /srv/edgefl/data.npz"
            )
    hidden = sorted({shown_folder(path) for path in shards.values() if is_hidden(path)})
    if not hidden:
        return {}
    # A minus: data may come later, and the unit starts without.
    text = "[Service]\n" + "".join(f"BindReadOnlyPaths=-{path}\n" for path in hidden)
    return {f"units/{unit}.d/{NAME}": text.encode() for unit in UNITS}
