"""What conditions ask of a board, read from trees of files."""

import pytest
from board_trees import plant, zones

from edgefl.core.conditions import BoardFacts, Conditions
from edgefl.device.conditions.facts import FactReader
from edgefl.device.hardware.board_reader import BoardReader

ROUTE = (
    "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n{}\t00000000\t0100A8C0\t3\t0\t0\t600\t00000000\n"
)
SUPPLIES = {
    "sys/class/power_supply/AC/type": "Mains\n",
    "sys/class/power_supply/AC/online": "0\n",
    "sys/class/power_supply/BAT0/type": "Battery\n",
    "sys/class/power_supply/BAT0/capacity": "42\n",
    "sys/class/power_supply/BAT0/status": "Discharging\n",
}


def make_reader(root, files, answer=None):
    return FactReader(BoardReader(plant(root, files), run=lambda _arguments, _timeout_s: answer))


def test_reads_only_what_is_asked(tmp_path):
    reader = make_reader(tmp_path, {**SUPPLIES, **zones({"cpu-thermal": 51.0})})
    assert reader.read(Conditions(hours=("22:00-06:00",))) == BoardFacts()
    assert reader.read(Conditions(min_battery=0.5)) == BoardFacts(
        on_mains=False, battery_fraction=0.42, battery_status="Discharging"
    )
    assert reader.read(Conditions(max_temperature_c=60)) == BoardFacts(temperature_c=51.0)


@pytest.mark.parametrize(
    ("interface", "answer", "expected"),
    [
        ("wlan0", "yes", True),
        ("wlan0", "yes (guessed)", True),
        ("wwan0", "no (guessed)", False),
        ("wlan0", "unknown", False),
        ("wwan0", None, True),
        ("usb0", None, True),
        ("eth0", None, False),
    ],
)
def test_networkmanager_says_what_is_metered_and_without_it_the_name_does(tmp_path, interface, answer, expected):
    reader = make_reader(tmp_path, {"proc/net/route": ROUTE.format(interface)}, answer)
    assert reader.read(Conditions(unmetered=True)) == BoardFacts(interface=interface, is_metered=expected)


def test_where_networkmanager_runs_and_does_not_answer_nothing_is_known_to_be_unmetered(tmp_path):
    files = {"proc/net/route": ROUTE.format("wlan0"), "run/NetworkManager/resolv.conf": ""}
    assert make_reader(tmp_path, files).read(Conditions(unmetered=True)).is_metered is None
    assert make_reader(tmp_path, files, "unknown").read(Conditions(unmetered=True)).is_metered is False


def test_without_a_route_nothing_is_known_to_be_unmetered(tmp_path):
    assert make_reader(tmp_path, {}).read(Conditions(unmetered=True)) == BoardFacts(interface="", is_metered=None)


def stat_files(busy, own, child):
    """Counters in ticks, of which there are 100 a second; idle is a half of all."""
    line = "S 0 0 0 0 0 0 0 0 0 0 {} 0 0 0 20 0 1"
    return {
        "proc/stat": f"cpu {busy} 0 0 {busy} 0 0 0 0 0 0\n",
        "proc/self/stat": f"7 (edge (fl) {line.format(own)}",
        "proc/self/task/7/children": "8 ",
        "proc/8/stat": f"8 (trainer) {line.format(child)}",
    }


def test_the_load_of_others_is_without_the_agent_and_what_it_started(tmp_path):
    conditions = Conditions(max_other_load=0.5)
    reader = make_reader(tmp_path, stat_files(1000, 100, 200))
    assert reader.read(conditions) == BoardFacts(other_load=None)
    plant(tmp_path, stat_files(1400, 200, 300))
    assert reader.read(conditions) == BoardFacts(other_load=0.25)
    plant(tmp_path, stat_files(1401, 200, 300))
    assert reader.read(conditions) == BoardFacts(other_load=0.25)  # too soon for a new value
    assert reader.read_processor_s() == 5.0
