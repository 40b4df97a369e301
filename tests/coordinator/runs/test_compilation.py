"""Which runs get a compiled task, and what of it is in a run's record before its first round."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from edgefl.coordinator.execution.fleet_view import EligibilityFilter, RunSpec, find_training_blocker
from edgefl.coordinator.fleet.presence import PresenceTracker
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.runs import compilation
from edgefl.coordinator.runs.compilation import Compiler, expect_compiled, should_compile
from edgefl.core.config import RunConfig, parse_run
from edgefl.core.errors import StoreFullError, TaskError
from edgefl.core.protocol import COMPILED_KEY
from edgefl.core.types import Json
from edgefl.engine.assembly.build import build_run
from edgefl.engine.assembly.components import RunComponents
from edgefl.storage.queries.dashboard import list_events_after
from edgefl.storage.store import Store

SHA256 = "ab" * 32
SMALL, LARGE = ["numpy", "onnx"], ["numpy", "onnx", "torch"]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "edgefl.db") as opened:
        yield opened


@pytest.fixture(autouse=True)
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "NEEDED_PACKAGES", ("numpy",))


def make_registry(**boards: list[str] | None) -> DeviceRegistry:
    made = DeviceRegistry(PresenceTracker(), time.monotonic)
    for number, (name, backends) in enumerate(boards.items()):
        facts = {} if backends is None else {"backends": backends}
        made.add(name, node_id=number, role="trainer", groups=(), examples={"mnist": 5}, facts=facts)
    return made


def make_run(model: str = "cnn", adapt: Json | None = None, **run: Any) -> RunComponents:
    tables = {"task": {"model": model}, "strategy": {"batch_size": 10}, "adapt": adapt or {}}
    return build_run(parse_run({"run": {"task": "mnist", **run}, **tables}), "r")


def compile_for(
    run: RunComponents,
    registry: DeviceRegistry,
    store: Store,
    folder: Path,
    answer: Any,
    *,
    is_cached: bool = False,
    constant: Sequence[str] = (),
) -> RunConfig:
    """Returns the run file in the record after the compilation, which a stand-in answers."""
    store.add_run(
        run_id="r", name="n", task="mnist", strategy="fedavg", config=run.config.to_json(), seed=7, submitted_at=1.0
    )
    asked: list[Json] = []

    def call(_module: str, request: Json, **_options: Any) -> Json:
        asked.append(request)
        if isinstance(answer, Exception):
            raise answer
        return {"sha256": answer, "is_cached": is_cached}

    record = Compiler(folder, folder / "cache", registry, store, call=call).record_compiled(store.get_run("r"), run)
    assert store.get_run("r").config == record.config
    expected = {"batch_size": 10, "options": {"model": "cnn"}, "constant": [*constant]}
    assert all(expected.items() <= request.items() for request in asked)
    return RunConfig.from_json(record.config)


@pytest.mark.parametrize(
    ("boards", "run", "expected"),
    [
        ({"a": LARGE}, {}, False),
        ({"a": LARGE, "b": SMALL}, {}, True),
        ({"a": None, "b": ["numpy"]}, {}, False),
        ({"b": SMALL}, {"backend": "torch"}, False),
        ({"a": LARGE}, {"backend": "onnx"}, True),
        ({"b": SMALL}, {"model": "mlp"}, False),
    ],
)
def test_a_run_is_compiled_where_a_board_has_no_torch_or_all_are_to_train_so(
    boards: Any, run: Any, expected: bool
) -> None:
    registry, made = make_registry(**boards), make_run(**run)
    assert should_compile(made, registry) is expected
    assert (COMPILED_KEY in expect_compiled(made, registry).header) is expected


def test_a_board_that_the_run_cannot_choose_is_no_reason_to_compile() -> None:
    registry = make_registry(a=LARGE, b=SMALL)
    assert registry.get_schedulable("b") is None, "it is offline, and may come back"
    assert should_compile(make_run(), registry)
    poor = make_registry(a=LARGE)
    poor.add("c", node_id=9, role="trainer", groups=(), examples={"mnist": 5},
             facts={"backends": SMALL, "memory_bytes": 100_000_000})  # fmt: skip
    assert should_compile(make_run(), poor)
    needy = {"run": {"task": "mnist"}, "task": {"model": "cnn"}, "devices": {"min_memory_bytes": 10**9}}
    assert not should_compile(build_run(parse_run(needy), "r"), poor)
    registry.set_drained("b", drained=True)
    assert not should_compile(make_run(), registry)


CONVOLUTIONS = [f"conv{layer}.{part}" for layer in (1, 2) for part in ("bias", "weight")]


@pytest.mark.parametrize(
    ("adapt", "constant"),
    [
        ({"method": "head"}, [*CONVOLUTIONS, "fc1.bias", "fc1.weight"]),
        ({"method": "lora", "targets": ["fc1.*"], "shared": ["fc2.*"]}, [*CONVOLUTIONS, "fc1.bias"]),
    ],
)
def test_what_a_run_freezes_is_compiled_to_stay(
    store: Store, tmp_path: Path, adapt: Json, constant: list[str]
) -> None:
    compile_for(make_run(adapt=adapt), make_registry(b=SMALL), store, tmp_path, SHA256, constant=constant)


def test_without_onnx_and_torch_at_the_coordinator_all_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "NEEDED_PACKAGES", ("numpy", "no_such_package"))
    assert not should_compile(make_run(), make_registry(b=SMALL))


def test_the_record_names_the_file_before_the_run_begins(store: Store, tmp_path: Path) -> None:
    config = compile_for(make_run(), make_registry(a=LARGE, b=SMALL), store, tmp_path, SHA256)
    assert config.run.compiled == SHA256
    assert [event["kind"] for event in list_events_after(store, 0, limit=9)] == ["task-compiled"]


@pytest.mark.parametrize(("is_cached", "words"), [(True, "is that of an earlier run"), (False, "ababababab in ")])
def test_the_event_says_whether_an_earlier_run_had_it_compiled(
    store: Store, tmp_path: Path, is_cached: bool, words: str
) -> None:
    compile_for(make_run(), make_registry(b=SMALL), store, tmp_path, SHA256, is_cached=is_cached)
    (event,) = list_events_after(store, 0, limit=9)
    assert words in event["message"]


def test_what_cannot_be_compiled_is_trained_with_torch_or_ends_the_run_with_the_reason(
    store: Store, tmp_path: Path
) -> None:
    refusal, run = TaskError("operator Gru of layer gru has no form"), make_run()
    with pytest.raises(TaskError, match="task mnist cannot be compiled for boards without torch: operator Gru"):
        compile_for(run, make_registry(b=SMALL), store, tmp_path, refusal)


def test_a_full_card_is_no_fault_of_the_task(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreFullError):
        compile_for(make_run(), make_registry(a=LARGE, b=SMALL), store, tmp_path, StoreFullError("no room"))
    assert not list_events_after(store, 0, limit=9)


def test_where_some_have_torch_they_train_alone_and_the_history_says_why(store: Store, tmp_path: Path) -> None:
    config = compile_for(make_run(), make_registry(a=LARGE, b=SMALL), store, tmp_path, TaskError("no form"))
    assert config.run.compiled is None
    (event,) = list_events_after(store, 0, limit=9)
    assert (event["kind"], "no form" in event["message"]) == ("task-not-compiled", True)


@pytest.mark.parametrize(
    ("compiled", "accepted"),
    [
        (None, ["large", "old"]),
        ({"is_for_all": False}, ["small", "large", "old"]),
        ({"is_for_all": True}, ["small", "large", "old"]),
    ],
)
def test_boards_without_torch_take_part_where_the_task_is_compiled(compiled: Any, accepted: list[str]) -> None:
    fleet = make_registry(small=SMALL, large=LARGE, old=None, bare=["numpy"])
    run = RunSpec(
        run_id="r", task="mnist", header={} if compiled is None else {COMPILED_KEY: compiled}, groups=(), names=(),
        join_at_start=False, encode=lambda *_: b"", decode=lambda _: {}, needs_torch=True,
    )  # fmt: skip
    participants = EligibilityFilter(run)
    assert [info.device_id for info in fleet.list_devices() if participants.is_eligible(info)] == accepted
    bare = fleet.get_device("bare")
    assert bare is not None
    expected = "no onnxruntime" if compiled and compiled["is_for_all"] else "no torch"
    assert expected in find_training_blocker(bare, needs_torch=True, compiled=compiled)
