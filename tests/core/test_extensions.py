import importlib
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from edgefl.core.errors import TaskError, UsageError
from edgefl.core.extensions import (
    ALLOW_VARIABLE,
    ExtensionKind,
    allow_modules,
    inherits_from,
    list_allowed_modules,
    list_entry_points,
    load_extension,
)


class Bell:
    """The base of the kind that these tests have."""


KIND = ExtensionKind(
    noun="bell",
    group="edgefl.bells",
    is_declared=inherits_from(Bell),
    declaration="inherits from Bell",
    error=TaskError,
)
OWN = """
import functools, os, subprocess
from abc import ABC, abstractmethod
from subprocess import Popen
from test_extensions import Bell

def noted(*args, **kwargs):
    raise AssertionError("something was called")

class Mine(Bell):
    def __init__(self):
        noted()

class Duck:
    __init__ = ring = noted

class Meta(type):
    __call__ = noted

class Odd(metaclass=Meta):
    pass

class Half(Bell, ABC):
    @abstractmethod
    def ring(self): ...

instance, partial, module = Duck.__new__(Duck), functools.partial(noted), os
"""


@pytest.fixture
def own(installed, monkeypatch):
    monkeypatch.setitem(sys.modules, "test_extensions", sys.modules[__name__])
    installed(
        {"own_bells": OWN, "unlisted_bells": "raise AssertionError('imported')"},
        {"edgefl.bells": {"good": "own_bells:Mine", "popen": "subprocess:Popen", "noted": "own_bells:noted"}},
    )
    monkeypatch.setenv(ALLOW_VARIABLE, "own_bells")


def test_a_class_of_an_allowed_module_or_of_an_entry_point_is_found_and_not_called(own):
    found = load_extension(KIND, "own_bells:Mine")
    assert (found.__name__, load_extension(KIND, "good"), load_extension(KIND, "bad")) == ("Mine", found, None)
    assert list_entry_points(KIND) == ["good", "noted", "popen"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_bells:noted", "is a function; it must be a class that inherits from Bell"),
        ("own_bells:instance", "is a Duck; it must be a class"),
        ("own_bells:partial", "is a partial; it must be a class"),
        ("own_bells:module", "is a module; it must be a class"),
        ("own_bells:Duck", "is the class Duck of own_bells; it must be a class of own_bells that inherits from Bell"),
        ("own_bells:Odd", "is the class Odd"),
        ("own_bells:Popen", "is the class Popen of subprocess; it must be a class of own_bells"),
        ("own_bells:Bell", "is the class Bell of"),
        ("own_bells:Half", "is abstract: it has no ring"),
        ("own_bells:Missing", "cannot be imported: AttributeError"),
        ("popen", "subprocess is of Python's own library"),
        ("noted", "is a function"),
        ("subprocess:Popen", "subprocess is of Python's own library, and holds no bell"),
        ("os.path:join", "is of Python's own library"),
        ("numpy:load", "the module numpy is not allowed here. .*--allow-module numpy .*EDGEFL_ALLOW_MODULES=numpy"),
        ("own_bells.inner:Mine", "the module own_bells.inner is not allowed here"),
        ("unlisted_bells:Mine", "the module unlisted_bells is not allowed here"),
        (":Mine", "it must be module:Class"),
        ("own_bells:", "it must be module:Class"),
        ("own_bells:Mine.ring", "it must be module:Class"),
        (".own_bells:Mine", "it must be module:Class"),
        ("own_bells:" + "M" * 10_000, "…' cannot be loaded"),
    ],
)
def test_whatever_else_a_name_leads_to_is_refused_and_never_called(own, name, message):
    with pytest.raises(TaskError, match=message) as caught:
        load_extension(KIND, name)
    assert len(str(caught.value)) < 600
    assert "unlisted_bells" not in sys.modules


def test_modules_are_allowed_for_a_block_and_the_processes_that_it_starts(monkeypatch):
    monkeypatch.delenv(ALLOW_VARIABLE, raising=False)
    with allow_modules(["mine", "mine.tasks"]):
        assert (os.environ[ALLOW_VARIABLE], list_allowed_modules()) == ("mine,mine.tasks", ("mine", "mine.tasks"))
        with allow_modules(["other"]):
            assert list_allowed_modules() == ("mine", "mine.tasks", "other")
        assert list_allowed_modules() == ("mine", "mine.tasks")
    assert (list_allowed_modules(), ALLOW_VARIABLE in os.environ) == ((), False)


def test_blocks_of_two_threads_that_overlap_take_nothing_from_each_other(monkeypatch):
    monkeypatch.setenv(ALLOW_VARIABLE, "always")
    first, second = ExitStack(), ExitStack()
    first.enter_context(allow_modules(["mine", "shared", "always"]))
    second.enter_context(allow_modules(["other", "shared"]))
    first.close()
    assert set(list_allowed_modules()) == {"always", "other", "shared"}
    second.close()
    assert os.environ[ALLOW_VARIABLE] == "always"

    def use(number):
        with allow_modules([f"own{number}", "shared"]):
            turn.wait(10)
            assert {f"own{number}", "shared", "always"} <= set(list_allowed_modules())

    turn = threading.Barrier(8)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(64)))
    assert os.environ[ALLOW_VARIABLE] == "always"


@pytest.mark.parametrize("module", ["subprocess", "os.path", "a-b", "", "a:b", ".a", "a..b", "x" * 300])
def test_what_is_no_module_of_ones_own_cannot_be_allowed(module, monkeypatch):
    monkeypatch.delenv(ALLOW_VARIABLE, raising=False)
    with pytest.raises(UsageError, match="--allow-module"), allow_modules([module]):
        pass
    assert ALLOW_VARIABLE not in os.environ


def test_no_kind_of_edgefl_declares_a_class_of_a_dependency_or_of_python():
    kinds = [
        importlib.import_module(f"edgefl.{room}.registry").KIND
        for room in ("strategies", "tasks", "tasks.local_algorithms", "compression")
    ]
    items = [item for module in list(sys.modules.values()) for item in list(vars(module).values())]
    found = [item for item in items if issubclass(type(item), type)]
    # In a whole test run modules of other tests are loaded too, and theirs are declared.
    known = {*sys.stdlib_module_names, "numpy", "click", "pytest", "_pytest"}
    foreign = [item for item in found if str(item.__module__).partition(".")[0] in known]
    assert len(foreign) > 500
    assert not [item for item in foreign if any(kind.is_declared(item) for kind in kinds)]
