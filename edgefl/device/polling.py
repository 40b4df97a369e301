"""How often a device asks for work that nobody has told it of."""

from __future__ import annotations

from dataclasses import dataclass

from edgefl.protocol import POLL_S

DEAF_FIRST_S = 0.5
DEAF_MOST_S = POLL_S / 2
"""Both questions that come before a run are to be answered within 30 s."""


@dataclass(slots=True)
class PollPace:
    """Says when to ask next: seldom while bells can be heard, else soon after there was work, then ever more seldom.

    A device without a broker finds the next work after at most as long again as it has waited for it so far, and asks
    a handful of times for it. So rounds cost it little, however long they are, and a fleet that rests asks little.

    Attributes:
        poll_s: between two requests while bells can be heard.
    """

    poll_s: float = POLL_S
    _deaf_s: float = DEAF_FIRST_S

    def next_s(self, *, hears_bells: bool) -> float:
        """Returns how long to wait for a bell before asking."""
        if hears_bells:
            self._deaf_s = DEAF_FIRST_S
            return self.poll_s
        wait_s, self._deaf_s = self._deaf_s, min(2 * self._deaf_s, DEAF_MOST_S)
        return min(wait_s, self.poll_s)

    def had_work(self) -> None:
        """Says that there was work: more may come soon."""
        self._deaf_s = DEAF_FIRST_S
