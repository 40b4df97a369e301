"""Signal and rate on trees of files as boards have them."""

import pytest

from edgefl.device.board.link_quality import LinkQuality, link_quality, wireless_bits_per_s

ROUTE = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
WIRELESS = (
    "Inter-| sta-|   Quality        |   Discarded packets\n"
    " face | tus | link level noise |  nwid  crypt   frag  retry   misc\n"
)


@pytest.fixture
def board(tmp_path):
    def make(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


def route(interface, metric=0, destination="00000000"):
    return f"{interface}\t{destination}\t0101A8C0\t0003\t0\t0\t{metric}\t00000000\t0\t0\t0\n"


def never(interface):
    raise AssertionError(f"{interface} is no Wi-Fi")


def test_wi_fi_tells_its_signal_and_the_kernel_its_rate(board):
    root = board(
        {
            "proc/net/route": ROUTE + route("wlan0"),
            "proc/net/wireless": WIRELESS + " wlan0: 0000   58.  -52.  -256        0      0      0      0      6\n",
        }
    )
    found = link_quality(root, {"wlan0": 65e6}.get)
    assert found == LinkQuality(signal_dbm=-52.0, link_bits_per_s=65e6)


def test_an_old_driver_s_unsigned_signal_is_understood(board):
    root = board(
        {
            "proc/net/route": ROUTE + route("wlan0"),
            "proc/net/wireless": WIRELESS + " wlan0: 0000   58.  204.  0.        0      0      0      0      6\n",
        }
    )
    assert link_quality(root, lambda _: None).signal_dbm == -52.0


def test_a_cable_tells_its_speed(board):
    root = board({"proc/net/route": ROUTE + route("eth0"), "sys/class/net/eth0/speed": "1000\n"})
    assert link_quality(root, never) == LinkQuality(link_bits_per_s=1e9)


def test_the_route_with_the_lowest_metric_counts(board):
    root = board(
        {
            "proc/net/route": ROUTE + route("wlan0", 600) + route("eth0", 100) + route("usb0", 0, "0001A8C0"),
            "proc/net/wireless": WIRELESS + " wlan0: 0000   58.  -52.  -256        0      0      0      0      6\n",
            "sys/class/net/eth0/speed": "100\n",
        }
    )
    assert link_quality(root, never) == LinkQuality(link_bits_per_s=1e8)


def test_without_a_default_route_the_first_that_is_up_counts(board):
    root = board(
        {
            "sys/class/net/eth0/operstate": "down\n", "sys/class/net/lo/operstate": "up\n",
            "sys/class/net/eth1/operstate": "up\n", "sys/class/net/eth1/speed": "10\n",
        }
    )  # fmt: skip
    assert link_quality(root, never) == LinkQuality(link_bits_per_s=1e7)


@pytest.mark.parametrize("speed", ["-1\n", "", "much\n", "0\n"])
def test_a_speed_that_is_none_is_not_known(board, speed):
    root = board({"proc/net/route": ROUTE + route("eth0"), "sys/class/net/eth0/speed": speed})
    assert link_quality(root, never) == LinkQuality()


@pytest.mark.parametrize(
    "line", [" wlan0: 0000", " wlan0: 0000 58. much 0", " wlan0: 0000 58. -256. 0", "wlan1: 0 1 -2"]
)
def test_a_signal_that_is_none_is_not_known(board, line):
    root = board(
        {
            "proc/net/route": ROUTE + route("wlan0"),
            "sys/class/net/wlan0/wireless/x": "",
            "proc/net/wireless": WIRELESS + line,
        }
    )
    assert link_quality(root, lambda _: None) == LinkQuality()


def test_a_board_that_says_nothing_gives_nothing(tmp_path):
    assert link_quality(tmp_path, never) == LinkQuality()


def test_the_kernel_knows_no_wi_fi_rate_of_what_is_no_wi_fi():
    assert wireless_bits_per_s("lo") is None
    assert wireless_bits_per_s("no-such-interface-at-all") is None
