"""Drop-ins for the units of a board: the sandbox hides homes and temporary folders, and data may lie there."""

from __future__ import annotations

import re
from collections.abc import Mapping

from edgefl.errors import UsageError
from edgefl.provision.card import Files

UNITS = ("edgefl-device.service", "edgefl-join.service")
NAME = "20-shards.conf"
HIDDEN = ("/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/")  # noqa: S108 places of a board, not ours
_PLAIN = re.compile(r"/[\w./+@,=-]+\Z")


def shard_drop_ins(shards: Mapping[str, str]) -> Files:
    """Returns the drop-ins that show hidden shards to the units, read-only; none where all are visible.

    Raises:
        UsageError: a path on the board is not absolute, or has characters that units take for something else.
    """
    for task, path in shards.items():
        if not _PLAIN.match(path) or "/../" in f"{path}/":
            raise UsageError(
                f"the shard of {task} must be an absolute path on the board without spaces, got {path!r}; "
                "such as /srv/edgefl/data.npz"
            )
    hidden = sorted({path for path in shards.values() if path.startswith(HIDDEN)})
    if not hidden:
        return {}
    # A minus: data may come later, and the unit starts without.
    text = "[Service]\n" + "".join(f"BindReadOnlyPaths=-{path}\n" for path in hidden)
    return {f"units/{unit}.d/{NAME}": text.encode() for unit in UNITS}
