import json

import pytest

FACTS = {"size_bytes": 1_000_000, "num_turns": 2, "num_rounds": 4, "num_stock_rounds": 4}


@pytest.fixture(scope="module")
def report(harness):
    return harness("round_report")


@pytest.fixture(scope="module")
def turn(report):
    def make(round_s, peak_mib):
        names = ("update_compute_s", "update_there_and_back_s", "update_bytes_up", "update_bytes_down")
        return report.Turn(
            round_s=round_s, first_round_s=1.0, mean_round_s=0.5, device_peak_bytes=peak_mib * 2**20,
            device_median_bytes=1.0, coordinator_peak_bytes=1.0, device_cpu_s=0.1, coordinator_cpu_s=0.1,
            other_cores=0.0, num_devices=2, extra={"broker": "Mosquitto", **dict.fromkeys(names, 0.001)},
            requests={"/v1/fleet/pull-messages": 1.5, "/v1/runtime/push-messages": 0.5},
        )  # fmt: skip

    return make


@pytest.fixture(scope="module")
def sides(turn):
    return {
        "edgefl": [turn((0.03, 0.01, 0.02), 60.0), turn((0.04, 0.04, 0.04), 80.0)],
        "stock Flower": [turn((6.0, 6.0), 210.0), turn((3.0, 3.0), 210.0)],
    }


def test_the_ratio_is_that_of_the_medians_over_turns_and_costs_are_those_of_a_round_and_a_device(report, sides):
    shown = report.as_json(sides, FACTS)
    assert json.loads(json.dumps(shown)) == shown
    assert shown["ratios"]["stock Flower"]["round_s"] == pytest.approx(4.5 / 0.03)
    found = shown["sides"]["edgefl"]
    assert found["round_s"] == pytest.approx({"median": 0.03, "min": 0.02, "max": 0.04})
    medians = {"coordinator_cpu_s": 0.05, "device_cpu_s": 0.1, "device_requests": 1.5, "requests": 2.0}
    assert {name: found[name]["median"] for name in medians} == pytest.approx(medians)


def test_the_table_says_which_aims_are_missed(report, sides):
    table = report.as_table(sides, 2)
    assert "memory of a device: 3 (aim 4: missed) times less at peak" in table
    assert all(row.title in table for row in report.ROWS)


def test_the_summary_holds_each_number_of_devices_against_its_own_aim(report, sides, turn):
    awake = {**sides, report.AWAKE: [turn((1.5, 1.5), 210.0)]}
    lines = report.as_summary({1: sides, 2: awake, 5: sides}).splitlines()[2:]
    assert [line for line in lines if "met" in line or "missed" in line] == [lines[1], lines[3]]
    assert "150 (aim 300: missed)" in lines[1]
    assert "150 (aim 150: met)" in lines[3]
    assert lines[4].split()[:8] == ["2", "the", "same,", "polls", "at", "10", "ms", "1,500"]
