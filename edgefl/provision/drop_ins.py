"""Drop-ins for a device's units: they expose shards in homes and temporary folders to the sandbox."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from edgefl.core.errors import UsageError
from edgefl.device.enrolment.shard_permissions import get_visible_folder, is_hidden

SHARD_UNITS = ("edgefl-device.service", "edgefl-join.service")
DROP_IN_NAME = "20-shards.conf"
_UNIT_PATH = re.compile(r"/[\w./+@,=-]+\Z")


def render_shard_drop_ins(shards: Mapping[str, str]) -> dict[str, bytes | Path]:
    """Returns drop-ins that bind hidden shards' folders read-only; none where all are visible.

    Raises:
        UsageError: a path on the device is not absolute, or has characters with a meaning in units.
    """
    for task, path in shards.items():
        if not _UNIT_PATH.match(path) or "/../" in f"{path}/":
            raise UsageError(
                f"the shard of {task} must be an absolute path on the board without spaces, got {path!r}; "
                "such as /srv/edgefl/data.npz"
            )
    hidden = sorted({get_visible_folder(path) for path in shards.values() if is_hidden(path)})
    if not hidden:
        return {}
    # A minus: data may come later, and the unit starts without it.
    text = "[Service]\n" + "".join(f"BindReadOnlyPaths=-{path}\n" for path in hidden)
    return {f"units/{unit}.d/{DROP_IN_NAME}": text.encode() for unit in SHARD_UNITS}
