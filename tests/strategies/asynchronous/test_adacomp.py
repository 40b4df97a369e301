"""`adacomp`: the spec's vectors A3 to A9, against a slow count of its own where numbers are too many for hands."""

import numpy as np
import pytest
from strategy_turns import moved, view_of

from edgefl.core.types import SparseTensor
from edgefl.strategies.aggregation import ServerOptimizer
from edgefl.strategies.asynchronous.adacomp import MAX_COUNT, AdaCompConfig
from edgefl.strategies.asynchronous.asgd import ASGDConfig
from edgefl.strategies.strategy_config import RoundRules


class Play:
    """A strategy and devices that are asked and answer on command; `history` keeps who touched what."""

    def __init__(self, settings, model, names, **rules):
        self.strategy = settings.build(RoundRules(**rules))
        self.state = self.strategy.init(model)
        self.names, self.out, self.history = tuple(names), {}, []

    def pull(self, name):
        """Gives work to one device that is idle."""
        busy = {other: [order.assignment_id] for other, order in self.out.items()}
        self.state, decision = self.strategy.assign(self.state, view_of(name, busy=busy, devices=self.names))
        (self.out[name],) = decision.instructions

    def push(self, name, *, again=True, **tensors):
        order = self.out.pop(name)
        self.state = moved(self.strategy, self.state, order, tensors)
        self.history.append(tensors)
        if again:
            self.pull(name)
        return order

    @property
    def w(self):
        return self.strategy.model(self.state)["w"]


def sparse(indices, values=None, size=4):
    values = -0.1 * np.ones(len(indices)) if values is None else values
    return SparseTensor(indices=np.array(indices, np.int64), values=np.asarray(values), shape=(size,))


def of_the_spec():
    """History H0 = {0, 2}, H1 = {1}, H2 = {0}; a pulled at 0, b at 2, c at 3. Zeros touch and do not move."""
    play = Play(AdaCompConfig(step_scale=1.0), {"w": np.ones(4)}, "abcd")
    for name in "ad":
        play.pull(name)
    for number, touched in enumerate(([0, 2], [1], [0])):
        if number == 2:
            play.pull("b")
        play.push("d", w=sparse(touched, np.zeros(len(touched))))
    play.pull("c")
    return play


def test_an_entry_takes_its_share_of_the_step():  # A4
    play = of_the_spec()
    play.push("a", w=sparse([0, 1, 2, 3]))
    assert play.w.tolist() == pytest.approx([0.95, 0.9, 0.9, 0.9])


@pytest.mark.parametrize("num_devices", [2, 7])
@pytest.mark.parametrize("staleness", ["parameter", "update"])
def test_devices_in_turn_that_send_all_are_divided_by_the_number_of_the_others(num_devices, staleness):  # A6
    names = "abcdefg"[:num_devices]
    play = Play(AdaCompConfig(step_scale=1.0, compression=1.0, staleness=staleness), {"w": np.zeros(3)}, names)
    for name in names:
        play.pull(name)
    for turn in range(5 * num_devices):
        before = play.w.copy()
        play.push(names[turn % num_devices], w=np.array([1.0, 0.5, 0.0]))  # a zero touches too
        if turn >= num_devices:
            assert (play.w - before).tolist() == pytest.approx([1 / (num_devices - 1), 0.5 / (num_devices - 1), 0.0])
    assert play.state.counts.tolist() == [5 * num_devices] * 3


@pytest.mark.parametrize("staleness", ["parameter", "update", "none"])
@pytest.mark.parametrize("seed", range(2))
def test_many_devices_in_any_order_agree_with_a_count_over_the_history(staleness, seed):
    rng, names = np.random.default_rng(seed), "abcdef"
    play = Play(AdaCompConfig(step_scale=1.0, staleness=staleness), {"w": np.zeros((5, 4)), "v": np.zeros(9)}, names)
    expected = {"w": np.zeros(20), "v": np.zeros(9)}
    for name in names:
        play.pull(name)
    for _ in range(60):
        tensors = {}
        for key, shape in (("w", (5, 4)), ("v", (9,))):
            size = int(np.prod(shape))
            if rng.random() < 0.3:
                tensors[key] = rng.standard_normal(shape)
            else:
                chosen = np.sort(rng.permutation(size)[: rng.integers(0, 6)])
                tensors[key] = SparseTensor(indices=chosen, values=rng.standard_normal(len(chosen)), shape=shape)
        version = play.state.version
        order = play.push(names[rng.integers(6)], **tensors)
        for key, target in expected.items():
            indices, values = entries(tensors[key])
            for index, value in zip(indices, values, strict=True):
                since = play.history[order.base_version : version]
                sigma = sum(index in entries(earlier[key])[0] for earlier in since)
                divisor = {"parameter": sigma, "update": len(since), "none": 1}[staleness]
                target[index] += value / max(1, divisor)
    assert all(np.allclose(play.strategy.model(play.state)[key].reshape(-1), expected[key]) for key in expected)


def entries(tensor):
    if isinstance(tensor, SparseTensor):
        return tensor.indices.tolist(), tensor.values.tolist()
    return list(range(tensor.size)), tensor.reshape(-1).tolist()


def test_without_staleness_it_is_asgd_to_the_last_bit():
    rng, models = np.random.default_rng(2), []
    moves = [rng.standard_normal(8).astype(np.float32) for _ in range(12)]
    for settings in (ASGDConfig(), AdaCompConfig(compression=1.0, staleness="none")):
        play = Play(settings, {"w": np.ones(8, np.float32)}, "abc")
        for name in "abc":
            play.pull(name)
        for number, move in enumerate(moves):
            play.push("abc"[number % 3], w=move)
        models.append(play.w.tobytes())
    assert models[0] == models[1]


def test_counts_that_wrap_still_give_the_difference():
    play = Play(AdaCompConfig(step_scale=1.0), {"w": np.zeros(4)}, "ab")
    play.state.counts[:] = MAX_COUNT
    for name in "ab":
        play.pull(name)
    for _ in range(3):
        play.push("b", w=sparse([0], [0.0]))
    assert play.state.counts.tolist() == [2, MAX_COUNT, MAX_COUNT, MAX_COUNT]
    play.push("a", w=sparse([0], [1.0]))
    assert play.w[0] == pytest.approx(1 / 3)


def test_a_delay_beyond_what_the_counts_hold_divides_by_the_delay():
    play = Play(AdaCompConfig(step_scale=1.0), {"w": np.zeros(4)}, "a")
    play.pull("a")
    play.state.version = MAX_COUNT + 5
    play.push("a", w=sparse([0], [1.0]))
    assert play.w[0] == pytest.approx(1 / (MAX_COUNT + 5))


@pytest.mark.parametrize("staleness", ["parameter", "update", "none"])
def test_changed_is_exactly_what_was_touched_since_a_version(staleness):
    play = Play(AdaCompConfig(step_scale=1.0, staleness=staleness), {"w": np.zeros(6), "n": np.array(3)}, "ab")
    for name in "ab":
        play.pull(name)
    for number, touched in enumerate([[0, 2], [1], [2, 5]]):
        play.push("ab"[number % 2], w=sparse(touched, size=6), n=np.array(1))
    changed = {since: play.strategy.changed(play.state, since) for since in range(5)}
    assert [changed[since]["w"].tolist() for since in range(4)] == [[0, 1, 2, 5], [1, 2, 5], [2, 5], []]
    assert changed[0]["n"].tolist() == [0]
    assert changed[4] is None  # a version that is yet to come
    play.push("a", w=np.zeros(6), n=np.array(1))
    assert play.strategy.changed(play.state, 3)["w"].tolist() == [0, 1, 2, 3, 4, 5]


def test_what_is_kept_for_a_version_goes_when_nobody_works_on_it():
    play = Play(AdaCompConfig(step_scale=1.0), {"w": np.zeros(4)}, "abc")
    for name in "abc":
        play.pull(name)
    for number in range(20):
        play.push("ab"[number % 2], w=sparse([0]))
        assert len(play.state.snapshots) <= 3
    assert set(play.state.snapshots) == {0, 19, 20}


@pytest.mark.parametrize(
    ("settings", "codec", "expected"),
    [
        (AdaCompConfig(improved=False), "dense", "topk:0.01"),
        (AdaCompConfig(improved=False), None, "topk:0.01"),
        (AdaCompConfig(compression=0.005, improved=False), "dense", "topk:0.005"),
        (AdaCompConfig(compression=1.0, improved=False), "dense", "dense"),
        (AdaCompConfig(), "dense", "ef|topk:0.01|int8|rice"),
        (AdaCompConfig(improved=False), "topk:0.01|fp16", "topk:0.01|fp16"),
    ],
)
def test_devices_compress_as_the_strategy_says_unless_the_run_file_does(settings, codec, expected):  # A8: no residual
    play = Play(settings, {"w": np.zeros(4)}, "a", codec=codec)
    play.pull("a")
    assert play.out["a"].codec == expected


def test_the_servers_learning_rate_scales_every_step():
    play = Play(AdaCompConfig(step_scale=1.0), {"w": np.zeros(4)}, "a", server=ServerOptimizer(learning_rate=0.5))
    play.pull("a")
    play.push("a", w=sparse([2], [1.0]))
    assert play.w.tolist() == [0, 0, 0.5, 0]


def test_a_snapshot_has_half_the_bytes_of_the_model():
    assert AdaCompConfig().build(RoundRules()).bytes_per_device(1_686_568) == 843_284
    assert AdaCompConfig(staleness="none").build(RoundRules()).bytes_per_device(1_686_568) == 0
