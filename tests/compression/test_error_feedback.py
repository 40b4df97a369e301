"""Error feedback: whatever a codec leaves out, or a network loses, is in the residual."""

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import pytest
from codec_examples import EXAMPLES

from edgefl.compression.codec import decode_body, make_codec
from edgefl.compression.error_feedback import (
    ErrorFeedback,
    has_error_feedback,
    is_stateful_training,
    require_stateless_training,
)
from edgefl.compression.sparsification.sparsifiers import Dense
from edgefl.compression.stages import StageKind, ValueStage
from edgefl.core.errors import CodecError, ConfigError
from edgefl.core.types import (
    Array,
    GossipConfig,
    ModelSpec,
    SparseTensor,
    Tensor,
    TensorKind,
    Tensors,
    TensorSpec,
    TrainConfig,
)

SHAPES: ModelSpec = (
    TensorSpec(name="weight", shape=(8, 25)),
    TensorSpec(name="head", shape=(4,), shared=False),
    TensorSpec(name="mean", shape=(3,), kind=TensorKind.BUFFER),
    TensorSpec(name="count", shape=(), dtype="int64", kind=TensorKind.BUFFER),
)


def with_feedback(spec: str) -> str:
    return spec if spec.startswith("ef|") else f"ef|{spec}"


def works_with_feedback(spec: str) -> bool:
    try:
        make_codec(with_feedback(spec), SHAPES)
    except CodecError:
        return False
    return True


LOSSY_SPECS = [
    *("ef|topk:0.05|int8", "ef|qsgd:8", "ef|qsgd:4:64", "ef|threshold:2"),
    *(with_feedback(spec) for spec in EXAMPLES if works_with_feedback(spec)),
]


def feedback(spec: str = "ef|topk:0.05") -> ErrorFeedback:
    return ErrorFeedback(make_codec(spec, SHAPES))


def rng(step: int = 0) -> np.random.Generator:
    return np.random.default_rng((3, step))


def displacement(step: int) -> dict[str, Array]:
    found = {
        "weight": rng(step).normal(size=(8, 25)).astype(np.float32),
        "head": np.zeros(4, dtype=np.float32),
        "mean": np.full(3, 0.1 * step, dtype=np.float32),
        "count": np.array(step),
    }
    for array in found.values():
        array.flags.writeable = False
    return found


def dense(tensor: Tensor) -> Array:
    return tensor.dense() if isinstance(tensor, SparseTensor) else tensor


def weight_in(body: bytes) -> Array:
    return dense(decode_body(body, SHAPES)["weight"]).astype(np.float64)


def residual(kept: ErrorFeedback) -> Array:
    return kept.state()["residual/weight"]


def left_at_the_end(kept: ErrorFeedback, used: Sequence[str]) -> Array:
    """Returns the residual and what was never used of the updates whose fate the device does not know."""
    pending = {name.split("/")[2]: body for name, body in kept.state().items() if name.startswith("pending/")}
    return residual(kept) + sum(weight_in(body.tobytes()) for name, body in pending.items() if name not in used)


def test_the_residual_is_what_the_codec_left_out() -> None:
    kept = feedback()
    body = kept.encode("a1", displacement(1), rng())
    kept.record_used(["a1"])
    # Exactly: an entry of topk travels as it is, so what is left of it is zero, and the others are untouched.
    expected = displacement(1)["weight"] - dense(decode_body(body, SHAPES)["weight"])
    assert residual(kept).tobytes() == expected.tobytes()
    assert kept.pending == ()


@pytest.mark.parametrize("num_under_way", [1, 2])
@pytest.mark.parametrize("spec", LOSSY_SPECS)
def test_nothing_is_lost_over_a_run_in_which_updates_are_lost_at_random(spec: str, num_under_way: int) -> None:
    kept, luck = feedback(spec), np.random.default_rng(9)
    arrived, total, used, under_way = np.zeros((8, 25)), np.zeros((8, 25)), list[str](), list[tuple[str, bytes]]()
    for step in range(20):
        if len(under_way) == num_under_way:
            assignment_id, body = under_way.pop(0)
            if luck.random() < 0.6:
                arrived += weight_in(body)
                used.append(assignment_id)
        kept.record_used(used[-2:])
        total += displacement(step)["weight"]
        under_way.append((f"a{step}", kept.encode(f"a{step}", displacement(step), rng(step))))
    np.testing.assert_allclose(arrived + left_at_the_end(kept, used), total, atol=1e-4)


def test_settling_twice_something_unknown_or_an_older_one_changes_nothing() -> None:
    kept = feedback()
    kept.encode("a1", displacement(1), rng())
    kept.record_used(["a1"])
    before = residual(kept).tobytes()
    kept.encode("a2", displacement(2), rng())
    for used in (["a1", "other"], [], ["a1"]):
        kept.record_used(used)
        assert kept.pending == ("a2",)
    kept.record_used(["a2"])
    again = feedback()
    again.restore({})
    again.encode("a1", displacement(1), rng())
    again.record_used(["a1"])
    assert residual(again).tobytes() == before


def test_a_third_update_under_way_says_that_the_first_is_lost() -> None:
    kept = feedback("ef|topk:1")
    for step in (1, 2, 3):
        kept.encode(f"a{step}", displacement(step), rng())
    assert kept.pending == ("a2", "a3")
    kept.record_used(["a2"])
    kept.record_used(["a3"])
    # topk:1 leaves nothing out, so a3 carried all of a1, and nothing is left.
    np.testing.assert_array_equal(residual(kept), np.zeros((8, 25)))


def test_work_that_is_done_again_gets_the_update_that_it_made_before_and_counts_once() -> None:
    kept, again = feedback(), feedback()
    kept.encode("a1", displacement(1), rng())
    body = kept.encode("a2", displacement(2), rng())
    again.restore(kept.state())  # the answer was lost with the process
    assert again.encode("a2", displacement(2), rng()) == body
    assert again.pending == ("a1", "a2")
    assert np.array_equal(residual(again), residual(kept))


def test_buffers_and_integers_travel_exactly_and_leave_nothing_behind() -> None:
    kept = feedback()
    for step in (1, 2):
        decoded = decode_body(kept.encode(f"a{step}", displacement(step), rng()), SHAPES)
        assert dense(decoded["mean"]).tobytes() == displacement(step)["mean"].tobytes()
        assert dense(decoded["count"]) == step
    assert {name for name in kept.state() if name.startswith("residual/")} == {"residual/weight"}


@pytest.mark.parametrize(
    ("spec", "value", "message"),
    [
        ("ef|dense", np.nan, "tensor 'weight': error feedback carries finite numbers"),
        ("ef|topk:0.05", np.inf, "tensor 'weight': error feedback carries finite numbers"),
        ("ef|fp16", 1e6, "fp16 carries magnitudes"),
    ],
)
def test_a_displacement_that_is_refused_changes_nothing(spec: str, value: float, message: str) -> None:
    kept = feedback(spec)
    for step in (1, 2):
        kept.encode(f"a{step}", displacement(step), rng())
    before = {name: array.tobytes() for name, array in kept.state().items()}
    bad = displacement(3) | {"weight": displacement(3)["weight"].copy()}
    bad["weight"][3, 3] = value
    with pytest.raises(CodecError, match=message):
        kept.encode("a3", bad, rng())
    assert {name: array.tobytes() for name, array in kept.state().items()} == before


@pytest.mark.parametrize("spec", LOSSY_SPECS)
def test_what_was_kept_on_disk_goes_on_where_it_stopped(spec: str) -> None:
    kept, again = feedback(spec), feedback(spec)
    for step in (1, 2, 3):
        kept.encode(f"a{step}", displacement(step), rng(step))
    again.restore({name: array.copy() for name, array in kept.state().items()})
    assert again.pending == kept.pending == ("a2", "a3")
    for one in (kept, again):
        one.record_used(["a3"])
    assert kept.encode("a4", displacement(4), rng()) == again.encode("a4", displacement(4), rng())


@pytest.mark.parametrize(
    "damage",
    [
        {"residual/weight": np.zeros((25, 8), dtype=np.float32)},
        {"residual/weight": np.full((8, 25), np.nan, dtype=np.float32)},
        {"residual/other": np.zeros(3, dtype=np.float32)},
        {"pending/0/a2": np.zeros(30, dtype=np.uint8)},
        {"pending/0/a2": np.array(b"E")},
    ],
)
def test_what_was_kept_for_another_task_or_is_damaged_is_refused(damage: dict[str, Array]) -> None:
    kept = feedback()
    kept.encode("a2", displacement(2), rng())
    state = kept.state()
    with pytest.raises(CodecError):
        kept.restore(state | damage)
    assert kept.state().keys() == state.keys()


def test_what_is_older_than_the_coordinator_puts_nothing_back_and_sends_nothing_twice() -> None:
    kept, again = feedback(), feedback()
    kept.encode("a1", displacement(1), rng())
    again.restore(kept.state())  # and a2 and a3 were done and used after that was written
    again.record_used([])
    again.record_used(["a2", "a3"])
    assert again.pending == ()
    assert again.encode("a4", displacement(4), rng()) == feedback().encode("a4", displacement(4), rng())


def test_only_a_prefix_asks_for_feedback() -> None:
    assert has_error_feedback("ef|topk:0.01|int8")
    assert has_error_feedback(" ef | sign")
    assert not has_error_feedback("topk:0.01|int8")
    assert not has_error_feedback("delta|fp16")


@dataclass(frozen=True)
class Counting:
    """A stage that sends everything and remembers how often it did."""

    kind: ClassVar[StageKind] = StageKind.TENSORS
    is_unbiased: ClassVar[bool] = False
    is_contraction: ClassVar[bool] = True
    remembers: ClassVar[bool] = True

    @classmethod
    def parse(cls, argument: str) -> Self:
        return cls()

    def encode(
        self,
        tensors: Tensors,
        shapes: ModelSpec,
        values: ValueStage,
        rng: np.random.Generator,
        *,
        memory: MutableMapping[str, Array] | None = None,
    ) -> Iterator[Array]:
        if memory is not None:
            memory["counting/encoded"] = memory.get("counting/encoded", np.zeros(1)) + 1
        yield from Dense().encode(tensors, shapes, values, rng)

    decode = staticmethod(Dense.decode)


def counting_feedback() -> ErrorFeedback:
    return ErrorFeedback(replace(make_codec("ef|dense", SHAPES), tensor_stage=Counting()))


def num_encoded(kept: ErrorFeedback) -> float | None:
    found = kept.state().get("memory/counting/encoded")
    return None if found is None else float(found[0])


def test_what_a_stage_remembers_lives_through_a_lost_update_and_a_reboot() -> None:
    kept = counting_feedback()
    assert num_encoded(kept) is None
    for step in (1, 2):
        kept.encode(f"a{step}", displacement(step), rng())
    kept.record_used(["a2"])  # so that the first was lost
    assert num_encoded(kept) == 2
    again = counting_feedback()
    again.restore({name: array.copy() for name, array in kept.state().items()})
    again.encode("a3", displacement(3), rng())
    assert (num_encoded(kept), num_encoded(again)) == (2, 3)


def test_a_state_without_memory_or_with_a_damaged_one_is_a_fresh_start_for_the_stage() -> None:
    kept = counting_feedback()
    kept.encode("a1", displacement(1), rng())
    state = kept.state()
    old = {name: array for name, array in state.items() if not name.startswith("memory/")}
    for stored in (old, state | {"memory/counting/encoded": np.array([np.nan])}):
        again = counting_feedback()
        again.restore(stored)
        assert num_encoded(again) is None
        assert again.pending == ("a1",)


def test_a_stage_forgets_what_it_learnt_of_an_update_that_was_refused() -> None:
    kept = ErrorFeedback(replace(make_codec("ef|fp16", SHAPES), tensor_stage=Counting()))
    kept.encode("a1", displacement(1), rng())
    with pytest.raises(CodecError, match="fp16 carries magnitudes"):
        kept.encode("a2", displacement(2) | {"weight": np.full((8, 25), 1e6, dtype=np.float32)}, rng())
    assert num_encoded(kept) == 1


OF_ALL = (TensorSpec(name="weight", shape=(4, 3)), TensorSpec(name="count", shape=(), dtype="int64"))
WITH_ONE_OF_ITS_OWN = (*OF_ALL, TensorSpec(name="mean", shape=(3,), shared=False))
PLAIN = TrainConfig(iterations=3)
NODE = GossipConfig(method="dsgd", edges=(), learning_rate=0.1, period=1)


@pytest.mark.parametrize(
    ("plan", "codec", "shapes", "leaves"),
    [
        (PLAIN, "dense", OF_ALL, False),
        (PLAIN, "topk:0.1|int8", OF_ALL, False),
        (PLAIN, "ef|topk:0.1|int8", OF_ALL, True),
        (TrainConfig(iterations=3, keeps_state=True), "dense", OF_ALL, True),
        (TrainConfig(iterations=3, node=NODE), "dense", OF_ALL, True),
        (PLAIN, "dense", WITH_ONE_OF_ITS_OWN, True),
    ],
)
def test_what_stays_is_state_residuals_and_tensors_of_its_own(plan, codec, shapes, leaves):
    assert is_stateful_training(plan, codec, shapes) is leaves
    if leaves:
        with pytest.raises(ConfigError, match="redundant shard must give the same result on all"):
            require_stateless_training(plan, codec, shapes)
    else:
        require_stateless_training(plan, codec, shapes)
