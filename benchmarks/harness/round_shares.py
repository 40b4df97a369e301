"""The round benchmark where a round is not overhead alone: over links, and around a minute of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.links import Link
from harness.round_report import EDGEFL, STOCK, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The least that a round could take: what the link allows, or how long is trained; and what each side took."""

    title: str
    least_s: float
    turns: Mapping[str, Turn]

    def as_json(self) -> dict[str, Any]:
        """Returns seconds of a round by side, and the part of it that is more than the least."""
        return {
            "title": self.title,
            "least_s": self.least_s,
            "round_s": {side: turn.median_round_s for side, turn in self.turns.items()},
            "rounds_s": {side: list(turn.round_s) for side, turn in self.turns.items()},
            "overhead_s": {side: turn.median_round_s - self.least_s for side, turn in self.turns.items()},
            "overhead_share": {side: self.share(side) for side in self.turns},
        }

    def share(self, side: str) -> float:
        """Returns which part of a side's round is more than the least, 0 to 1."""
        return 1 - self.least_s / self.turns[side].median_round_s


def over_link(link: Link, size_bytes: int, turns: Mapping[str, Turn]) -> Floor:
    """Returns what rounds took over a link, beside what the model down and its update up take alone."""
    return Floor(title=link.title, least_s=link.least_round_s(size_bytes, size_bytes), turns=turns)


def links_table(floors: Sequence[Floor], num_devices: int) -> str:
    """Returns a line for each link."""
    lines = [
        f"over links, {num_devices} devices, a link for each; the delay is one way, a round trip takes twice that.",
        "bound: 2 x delay + (model down + update up) / rate; in brackets what a round takes beyond it.",
        f"{'link':22}{'bound, s':>12}{EDGEFL + ', s':>22}{STOCK + ', s':>24}{'times less':>12}",
    ]
    for floor in floors:
        cells = "".join(f"{_beyond(floor, side):>{width}}" for side, width in ((EDGEFL, 22), (STOCK, 24)))
        times = floor.turns[STOCK].median_round_s / floor.turns[EDGEFL].median_round_s
        lines.append(f"{floor.title:22}{floor.least_s:>12.2f}{cells}{times:>12.3g}")
    return "\n".join(lines)


def training_table(floor: Floor, num_devices: int) -> str:
    """Returns whose overhead is which share of a round."""
    shares = "; ".join(
        f"{side} {turn.median_round_s:.2f} s, of which {100 * floor.share(side):.2g} % is overhead"
        for side, turn in floor.turns.items()
    )
    return f"a real round of {num_devices} devices that each train {floor.least_s:g} s (they sleep): {shares}"


def _beyond(floor: Floor, side: str) -> str:
    took_s = floor.turns[side].median_round_s
    return f"{took_s:.2f} (+ {took_s - floor.least_s:.2f})"
