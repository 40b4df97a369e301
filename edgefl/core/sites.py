"""Sites: what a gateway and the coordinator for which it is one device say of the boards behind it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from edgefl.core.claims import DEFAULT_WEIGHT_RATIO
from edgefl.core.metrics import MetricSet
from edgefl.core.protocol import finite_or_none
from edgefl.core.safe_text import escape_text
from edgefl.core.types import Json, ModelSpec

PARTIAL_SUMS_KEY = "partial_sums"
"""Key in the header of instructions, true: the mean of a site's updates may take the place of the updates."""
SITE_LIMITS_KEY = "site_limits"
"""Key beside it: the `SiteLimits` of the run."""
SITE_KEY = "site"
"""Key in the metrics of a gateway's answers: the boards that it is of; in a gateway's facts: how many it has."""
MAX_SITE_BOARDS = 256
"""Boards behind one gateway that get work in a round."""
MAX_NAME_CHARS, MAX_EXAMPLES, MAX_SECONDS = 63, 2**53, 1e9
"""Bounds of what a gateway says of one board."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteTask:
    """The model that the boards of a site train or evaluate.

    Attributes:
        spec: its tensors that travel.
        metrics: of its task, whose sums come with each evaluation.
        needs_torch: boards without torch take no part.
        has_local_tensors: the boards keep others, which do not travel.
    """

    spec: ModelSpec
    metrics: MetricSet
    needs_torch: bool = False
    has_local_tensors: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteLimits:
    """Limits of a run that hold within a site, too.

    Attributes:
        max_weight_ratio: of a board's examples to the median of the site's boards; 0 for no limit.
        deadline_s: in which an answer has to be there; None for none.
        has_plain_step: the coordinator adds the mean displacement to its model as it is.
    """

    max_weight_ratio: float = DEFAULT_WEIGHT_RATIO
    deadline_s: float | None = None
    has_plain_step: bool = False

    def to_json(self) -> Json:
        return asdict(self)

    @classmethod
    def parse(cls, value: object) -> SiteLimits:
        """Returns the limits in a header; the usual ones in place of what makes no sense, or is not there."""
        row = value if isinstance(value, dict) else {}
        ratio, deadline_s = finite_or_none(row.get("max_weight_ratio")), finite_or_none(row.get("deadline_s"))
        return cls(
            max_weight_ratio=DEFAULT_WEIGHT_RATIO if ratio is None or ratio < 0 else ratio,
            deadline_s=None if deadline_s is None or not 0 < deadline_s < MAX_SECONDS else deadline_s,
            has_plain_step=row.get("has_plain_step") is True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardShare:
    """What one board behind a gateway has given to its site's update; `compute_s` in seconds."""

    board: str
    num_examples: int
    loss: float | None
    compute_s: float

    def to_json(self) -> Json:
        return asdict(self)


def parse_board_shares(value: object) -> list[BoardShare]:
    """Returns the boards that a gateway names, at most `MAX_SITE_BOARDS`; what makes no sense is left out."""
    rows = value[:MAX_SITE_BOARDS] if isinstance(value, list) else []
    shares = [_parse_board_share(row) for row in rows if isinstance(row, dict)]
    return [share for share in shares if share is not None]


def _parse_board_share(row: Json) -> BoardShare | None:
    board, count, compute_s = row.get("board"), row.get("num_examples"), finite_or_none(row.get("compute_s"))
    if not isinstance(board, str) or not 0 < len(board) <= MAX_NAME_CHARS:
        return None
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < MAX_EXAMPLES:
        return None
    if compute_s is None or not 0 <= compute_s < MAX_SECONDS:
        return None
    loss = finite_or_none(row.get("loss"))
    return BoardShare(board=escape_text(board), num_examples=count, loss=loss, compute_s=compute_s)
