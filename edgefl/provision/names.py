"""Names of many boards from one pattern."""

from __future__ import annotations

import re

from edgefl.errors import UsageError
from edgefl.protocol import checked_slug

MAX_COUNT = 10_000
_PLACE = re.compile(r"\{(?::(0?)([1-9])?d?)?\}")


def numbered(pattern: str, count: int, *, first: int = 1) -> list[str]:
    """Returns the names of `count` boards, such as pi-01, pi-02 for `pi-{:02d}`.

    Raises:
        UsageError: the pattern has no place for a number, or makes no device names.
    """
    if not 1 <= count <= MAX_COUNT:
        raise UsageError(f"--count must be from 1 to {MAX_COUNT}, got {count}")
    places = _PLACE.findall(pattern)
    if len(places) != 1:
        raise UsageError(f"a name for many boards has one place for the number, as in pi-{{:02d}}, got {pattern!r}")
    zero, width = places[0]
    numbers = [f"{number:{zero}{width}d}" if width else str(number) for number in range(first, first + count)]
    return [checked_slug(_PLACE.sub(number, pattern)) for number in numbers]
