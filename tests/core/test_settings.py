import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from edgefl.core.errors import ConfigError
from edgefl.core.settings import REQUIRED, check_options, list_options

if TYPE_CHECKING:
    from nowhere import Nothing


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, kw_only=True)
class Settings:
    pace: float
    limit: int | None = None
    mode: Literal["fast", "slow"] = "fast"
    colour: Colour = Colour.RED
    is_on: bool = False
    either: int | str = 1
    anything: Any = None
    folder: Path = Path()
    sizes: tuple[int, ...] = ()


class Task:
    def __init__(self, model="mlp", count=3, *rest, hidden: "int" = 8, later: "Nothing | None" = None, **options): ...


def check(target, options):
    check_options("mine", options, list_options(target), table="task")


def test_values_of_the_annotated_types_pass():
    check(
        Settings,
        {"pace": 2, "limit": 5, "mode": "slow", "colour": "red", "is_on": True, "either": "x", "anything": 1},
    )
    check(Settings, {"pace": 0.5, "limit": None, "either": 2})
    check(Task, {"model": "cnn", "count": 4, "hidden": 2})
    assert {name: kind.default for name, kind in list_options(Task).items()} == {
        "model": "mlp", "count": 3, "hidden": 8, "later": None,
    }  # fmt: skip
    assert list_options(Settings)["pace"].default is REQUIRED


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (Settings, {"pase": 1}, r"task.pase: mine has no such setting \(did you mean pace\?\); known: pace, limit"),
        (Settings, {}, "task.pace is missing: mine cannot do without"),
        (Settings, {"pace": "fast"}, "task.pace must be a number, got 'fast'"),
        (Settings, {"pace": True}, "task.pace must be a number, got true"),
        (Settings, {"pace": math.nan}, "task.pace must be a number, got nan"),
        (Settings, {"pace": -math.inf}, "task.pace must be a number, got -inf"),
        (Settings, {"pace": 10**400}, "task.pace must be a number, got 1000"),
        (Settings, {"pace": 1, "limit": 2.0}, "task.limit must be a whole number, got 2.0"),
        (Settings, {"pace": 1, "limit": "2"}, "task.limit must be a whole number, got '2'"),
        (Settings, {"pace": 1, "mode": "slower"}, "task.mode must be one of 'fast', 'slow', got 'slower'"),
        (Settings, {"pace": 1, "colour": "blue"}, "task.colour must be one of 'red', got 'blue'"),
        (Settings, {"pace": 1, "is_on": 1}, "task.is_on must be true or false, got 1"),
        (Settings, {"pace": 1, "either": 1.5}, "task.either must be a whole number or a text, got 1.5"),
        (Settings, {"pace": 1, "anything": [1]}, r"task.anything must be a text, a number or true/false, got \[1\]"),
        (Settings, {"pace": 1, "folder": "x"}, "task.folder cannot be given in a run file: .*Path"),
        (Settings, {"pace": 1, "sizes": [1] * 10**5}, "task.sizes cannot be given in a run file"),
        (Settings, {"pace": [[[]]]}, "task.pace must be a number, got"),
        (Settings, {"pace": {"a": {"b": 1}}}, "task.pace must be a number, got"),
        (Settings, {"pace": "x" * 10**5}, "task.pace must be a number, got .*…"),
        (Settings, {"x" * 10**5: 1}, "…: mine has no such setting"),
        (Task, {"model": 3}, "task.model must be a text, got 3"),
        (Task, {"count": "3"}, "task.count must be a whole number, got '3'"),
        (Task, {"hidden": 1.5}, "task.hidden must be a whole number, got 1.5"),
        (Task, {"rest": 1}, "task.rest: mine has no such setting"),
        (Task, {"unknown": 1}, "task.unknown: mine has no such setting"),
    ],
)
def test_what_does_not_fit_is_named_with_what_would_be_right(target, options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        check(target, options)
    assert len(str(caught.value)) < 400


def test_a_class_that_wraps_itself_is_refused_and_not_followed_for_ever():
    class Circular:
        def __init__(self, size: int) -> None: ...

    Circular.__init__.__wrapped__ = Circular.__init__
    with pytest.raises(ConfigError, match="does not say what it takes"):
        list_options(Circular)
