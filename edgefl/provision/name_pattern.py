"""Names of many devices from one pattern."""

from __future__ import annotations

import re

from edgefl.core.errors import UsageError
from edgefl.core.protocol import validate_slug

MAX_NAMES = 10_000
_PLACEHOLDER = re.compile(r"\{(?::(0?)([1-9])?d?)?\}")


def expand_name_pattern(pattern: str, count: int, *, first: int = 1) -> list[str]:
    """Returns the names of `count` boards, such as pi-01, pi-02 for `pi-{:02d}`.

    Raises:
        UsageError: the pattern has no place for a number, or makes no device names.
    """
    if not 1 <= count <= MAX_NAMES:
        raise UsageError(f"--count must be from 1 to {MAX_NAMES}, got {count}")
    placeholders = _PLACEHOLDER.findall(pattern)
    if len(placeholders) != 1:
        raise UsageError(f"a name for many boards has one place for the number, as in pi-{{:02d}}, got {pattern!r}")
    zero, width = placeholders[0]
    numbers = [f"{number:{zero}{width}d}" if width else str(number) for number in range(first, first + count)]
    return [validate_slug(_PLACEHOLDER.sub(number, pattern)) for number in numbers]
