"""How a benchmark reads its options: `--quick` runs all of it at sizes that take seconds."""

from __future__ import annotations

import argparse
from typing import Any


def parse(parser: argparse.ArgumentParser, **quick: Any) -> argparse.Namespace:
    """Returns the options; with `--quick` those that are not given are as `quick` says, by their names."""
    told = "small sizes, to see that it runs; the figures mean nothing"
    parser.add_argument("--quick", action="store_true", help=told)
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**quick)
    return parser.parse_args()
