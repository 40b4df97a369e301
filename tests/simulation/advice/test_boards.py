"""Boards by their history: step times, links, losses and power, by hand; and the proxy's shards."""

import numpy as np
import pytest

from edgefl.core.config import parse_run
from edgefl.core.errors import DataError
from edgefl.simulation.advice.boards import ASSUMED_LATENCY_S, format_profiles, measure_boards
from edgefl.simulation.advice.proxy import write_proxy_shards
from edgefl.simulation.profiles import load_catalogue


def device(name, *, examples=200, role="trainer"):
    return {"device_id": name, "role": role, "removed_at": None, "examples": {"digits": examples}}


def update(name, *, up=1000, down=1000, send_s=1.0, compute_s=2.0, iterations=10, **more):
    row = {
        "device_id": name, "run_id": "r", "round": 2, "outcome": "used", "iterations": iterations,
        "compute_s": compute_s, "send_s": send_s, "bytes_up": up, "bytes_down": down, "num_examples": 180,
        "energy_j": None, "max_temperature_c": None, "throttled": False, "link_bits_per_s": None,
    }  # fmt: skip
    return {**row, **more}


def measure(*updates, batch_sizes=None):
    return measure_boards([device("pi-1")], updates, "digits", batch_sizes or {"r": 32})[0]


def test_two_sizes_tell_latency_and_rate_apart():
    # 2,000 bytes in 1.2 s and 6,000 in 3.2 s: 2,000 bytes a second and 0.2 s.
    board = measure(*[update("pi-1", send_s=1.2)] * 3, *[update("pi-1", up=5000, send_s=3.2)] * 3)
    assert board.bytes_per_s == pytest.approx(2000)
    assert board.latency_s == pytest.approx(0.2)
    assert board.has_sizes


def test_with_one_size_a_little_is_latency_and_a_reported_link_is_believed():
    board = measure(*[update("pi-1", send_s=1.05)] * 3)
    assert (board.latency_s, board.has_sizes) == (ASSUMED_LATENCY_S, False)
    assert board.bytes_per_s == pytest.approx(2000)
    reported = measure(*[update("pi-1", send_s=1.05, link_bits_per_s=32_000)] * 3)
    assert (reported.latency_s, reported.bytes_per_s, reported.has_sizes) == (pytest.approx(0.55), 4000, True)


def test_the_first_round_of_a_run_is_not_counted_where_there_are_others():
    board = measure(update("pi-1", compute_s=90.0, round=1), *[update("pi-1", compute_s=2.0)] * 2)
    assert board.iteration_s == {32: pytest.approx(0.2)}
    assert measure(update("pi-1", compute_s=90.0, round=1)).iteration_s == {32: pytest.approx(9.0)}


def test_power_losses_and_heat_come_from_the_updates():
    board = measure(
        update("pi-1", energy_j=12.0, max_temperature_c=71.0),
        update("pi-1", energy_j=8.0, max_temperature_c=83.0, throttled=True),
        update("pi-1", outcome="lost", iterations=None, compute_s=None),
    )
    assert board.power_w == pytest.approx(5.0)
    assert board.mtbf_s == pytest.approx(6.0)  # 2 · (2 s of computing and 1 s on the way) until the one loss
    assert (board.max_temperature_c, board.throttled_fraction) == (83.0, 0.5)


def test_its_profile_is_one_that_the_simulator_reads(tmp_path):
    slow, large = update("pi-1", compute_s=2.0), update("pi-1", run_id="s", compute_s=3.2)
    board = measure(slow, large, batch_sizes={"r": 32, "s": 64})
    (path := tmp_path / "boards.toml").write_text(format_profiles([board], "digits/logistic"))
    profile = load_catalogue([path]).get("pi-1")
    cost = profile.iterations["digits/logistic"]
    assert cost.compute_seconds(32) == pytest.approx(0.2)
    assert cost.compute_seconds(64) == pytest.approx(0.32)
    assert 2 * profile.latency_s == pytest.approx(board.latency_s)
    assert profile.power_w is None


def test_boards_that_never_trained_it_are_left_out_and_a_fleet_of_them_is_refused():
    rows = [device("pi-1"), device("pi-2"), device("eval", role="evaluator")]
    assert [board.name for board in measure_boards(rows, [update("pi-2"), update("eval")], "digits", {})] == ["pi-2"]
    with pytest.raises(DataError, match=r"no board of this fleet has trained digits yet.*--profile"):
        measure_boards(rows, [], "digits", {})


def test_the_proxy_has_as_many_examples_as_each_board_and_is_written_once(tmp_path):
    config = parse_run({"run": {"task": "digits", "seed": 3}})
    counts = [50, 2000, 400]
    paths, test = write_proxy_shards(config, counts, tmp_path, data=None, scheme="iid")
    found = [np.load(path) for path in paths]
    assert [len(shard["labels"]) for shard in found] == counts
    assert len(np.unique(found[2]["inputs"], axis=0)) > 390  # drawn without replacement while they last
    for shard in found:
        shard.close()
    assert test.exists()
    times = [path.stat().st_mtime_ns for path in paths]
    assert write_proxy_shards(config, counts, tmp_path, data=None, scheme="iid")[0] == paths
    assert [path.stat().st_mtime_ns for path in paths] == times
    assert write_proxy_shards(config, [51, 2000, 400], tmp_path, data=None, scheme="iid")[0] != paths
