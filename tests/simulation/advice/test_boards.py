"""Boards by their history: step times, links, losses and power, by hand; and the proxy's shards."""

from dataclasses import replace

import numpy as np
import pytest

from edgefl.core.config import parse_run
from edgefl.core.errors import ConfigError, DataError
from edgefl.simulation.advice.advice import describe_fleet
from edgefl.simulation.advice.boards import (
    ASSUMED_LATENCY_S,
    compute_bodies,
    format_profiles,
    measure_boards,
    select_boards,
)
from edgefl.simulation.advice.proxy import limit_counts, write_proxy_shards
from edgefl.simulation.profiles import load_catalogue

CSV = "a,b\n" + "".join(f"{number % 7},{number % 3}\n" for number in range(40))


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


def test_a_power_that_no_board_draws_is_dropped_and_long_updates_weigh_more():
    wrong = update("pi-1", energy_j=1e9)
    board = measure(
        wrong,
        update("pi-1", energy_j=-4.0),
        update("pi-1", energy_j=4.0, compute_s=1.0),
        update("pi-1", energy_j=18.0, compute_s=9.0),
    )
    assert board.power_w == pytest.approx(2.2)
    assert measure(wrong).power_w is None


def test_memory_and_accelerators_are_those_that_it_reported(tmp_path):
    facts = {
        "pi-1": {"memory_bytes": 512_000_000, "accelerators": [{"kind": "cuda", "name": "Orin"}, {"kind": 3}, "x"]}
    }
    board = measure_boards([device("pi-1")], [update("pi-1")], "digits", {}, capabilities=facts)[0]
    (path := tmp_path / "boards.toml").write_text(format_profiles([board], "digits"))
    profile = load_catalogue([path]).get("pi-1")
    assert (profile.memory_bytes, profile.accelerators) == (512_000_000, ("cuda",))
    wrong = {"pi-1": {"memory_bytes": "much", "accelerators": 7}}
    board = measure_boards([device("pi-1")], [update("pi-1")], "digits", {}, capabilities=wrong)[0]
    assert (board.memory_bytes, board.accelerators) == (None, ())


def test_only_boards_of_the_run_file_take_part():
    rows = [
        {**device(f"pi-{number}"), "groups": [group]} for number, group in ((1, "hall"), (2, "yard"), (3, "yard"))
    ]
    boards = measure_boards(rows, [update(f"pi-{number}") for number in (1, 2, 3)], "digits", {})

    def select(**devices):
        config = parse_run({"run": {"task": "digits"}, "devices": devices}).devices
        return [board.name for board in select_boards(boards, config)]

    assert select() == ["pi-1", "pi-2", "pi-3"]
    assert select(groups=["yard"]) == ["pi-2", "pi-3"]
    assert select(groups=["yard"], names=["pi-1", "pi-3"]) == ["pi-3"]
    assert select(groups=["yard"], exclude=["pi-3"]) == ["pi-2"]
    with pytest.raises(DataError, match=r"none of the 3 boards that have trained the task is among .* such as pi-9"):
        select(names=["pi-9"])


def test_measured_boards_of_a_fleet_are_filtered_and_their_proxy_says_what_it_leaves_out(tmp_path):
    rows = [{**device(f"pi-{number}", examples=60_000 * number), "groups": ["yard"]} for number in (1, 2)]
    boards = measure_boards(rows, [update("pi-1"), update("pi-2")], "digits", {})
    config = parse_run({"run": {"task": "digits"}, "devices": {"names": ["pi-2"], "groups": ["yard"]}})
    fleet = describe_fleet(config, tmp_path, measured=boards)
    assert (list(fleet.names), fleet.config.simulation.profiles) == (["pi-2"], ("pi-2",))
    assert "the boards reported 120,000 examples, and the proxy has 50,000" in fleet.limits[0]
    assert 44_000 < fleet.boards[0].num_examples < 46_000  # it keeps a tenth for testing
    files = set(tmp_path.glob("boards-*.toml"))
    describe_fleet(config, tmp_path, measured=boards)
    assert set(tmp_path.glob("boards-*.toml")) == files
    describe_fleet(config, tmp_path, measured=[replace(boards[1], latency_s=9.0)])
    assert len(set(tmp_path.glob("boards-*.toml"))) == 2


def test_the_examples_of_all_boards_are_bounded_together():
    assert limit_counts([10, 0, 30]) == ([10, 1, 30], "")
    counts, limit = limit_counts([50_000] * 8)
    assert counts == [25_000] * 8
    assert "reported 400,000 examples, and the proxy has 200,000" in limit


def test_the_test_data_of_the_run_file_is_used_with_measured_boards(tmp_path):
    (test := tmp_path / "test.csv").write_text("")
    config = parse_run({"run": {"task": "digits"}, "simulation": {"test": str(test)}})
    boards = measure_boards([device("pi-1")], [update("pi-1")], "digits", {})
    with pytest.raises(ConfigError, match="task 'digits' has test data of its own"):
        describe_fleet(config, tmp_path, measured=boards)


def test_other_data_at_the_same_path_makes_another_proxy(tmp_path):
    (data := tmp_path / "data.csv").write_text(CSV)
    config = parse_run(
        {"run": {"task": "table"}, "task": {"columns": "a", "target": "b"}, "simulation": {"data": str(data)}}
    )
    first, _ = write_proxy_shards(config, [3, 4], tmp_path, data=None, scheme="iid")
    assert write_proxy_shards(config, [3, 4], tmp_path, data=data, scheme="iid")[0] == first
    data.write_text(CSV.replace("4", "5"))
    assert write_proxy_shards(config, [3, 4], tmp_path, data=None, scheme="iid")[0] != first


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


def test_an_exchange_lasts_from_the_dispatch_to_the_arrival_without_work_and_pauses():
    times = {"dispatched_at": 100.0, "received_at": 104.0, "paced_s": 0.5}
    board = measure(*[update("pi-1", send_s=1.2, link_bits_per_s=32_000, **times)] * 3)
    assert board.latency_s == pytest.approx(1.5 - 0.5)  # 4 s less 2 of work and 0.5 of pauses; 2,000 bytes take 0.5
    early = measure(*[update("pi-1", send_s=1.2, link_bits_per_s=32_000, **{**times, "received_at": 101.0})] * 3)
    assert early.latency_s == pytest.approx(1.2 - 0.5)


def test_what_an_exchange_has_beside_update_and_model_is_headers_and_their_time_is_latency():
    rows = [*[update("pi-1", send_s=1.2)] * 3, *[update("pi-1", up=5000, send_s=3.2, run_id="s")] * 3]
    board = measure_boards(
        [device("pi-1")], rows, "digits", {"r": 32, "s": 32}, bodies={"r": (900, 700), "s": (4900, 700)}
    )[0]
    assert (board.header_bytes_up, board.header_bytes_down) == (100, 300)
    assert board.bytes_per_s == pytest.approx(2000)
    assert board.latency_s == pytest.approx(0.2 + 400 / 2000)
    assert measure(*rows[:3]).header_bytes_up == 0


def test_the_body_of_an_exchange_is_known_where_it_is_one_model_and_one_update():
    def compute(**tables):
        return compute_bodies(parse_run({"run": {"task": "digits"}, **tables}).to_json())

    up, down = compute()
    assert up == down > 4 * 4000  # float32
    assert compute(compression={"up": "int8"})[0] < up / 3
    for tables in (
        {"strategy": {"name": "scaffold"}},
        {"compression": {"up": "auto"}},
        {"compression": {"down": "int8"}},
        {"run": {"task": "nosuchmodule:Task"}},
    ):
        assert compute(**tables) is None
