"""Signal and rate on trees of files as boards have them."""

import pytest
from board_trees import plant

from edgefl.device.hardware.link_quality import LinkQuality, read_link_quality, read_wireless_bits_per_s


def routes(*interfaces, **metrics):
    """Default routes by these interfaces, and one to a network by usb0."""
    lines = ["Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask", route("usb0", 0, "0001A8C0")]
    lines += [route(name, metric) for name, metric in {**dict.fromkeys(interfaces, 0), **metrics}.items()]
    return {"proc/net/route": "\n".join(lines) + "\n"}


def route(interface, metric, destination="00000000"):
    return f"{interface}\t{destination}\t0101A8C0\t0003\t0\t0\t{metric}\t00000000\t0\t0\t0"


def wireless(line):
    head = "Inter-| sta-|   Quality        |   Discarded\n face | tus | link level noise |  nwid  crypt\n"
    return {"proc/net/wireless": f"{head}{line}\n"}


def speed(interface, said, state="up"):
    folder = f"sys/class/net/{interface}"
    return {f"{folder}/speed": f"{said}\n", f"{folder}/operstate": f"{state}\n"}


GOOD = wireless(" wlan0: 0000   58.  -52.  -256        0      0      0      0      6")
UNSIGNED = wireless(" wlan0: 0000   58.  204.  0.        0      0      0      0      6")
IS_WIRELESS = {"sys/class/net/wlan0/wireless/x": ""}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (routes("wlan0") | GOOD, LinkQuality(signal_dbm=-52.0, link_bits_per_s=65e6)),
        (routes("wlan0") | UNSIGNED, LinkQuality(signal_dbm=-52.0, link_bits_per_s=65e6)),
        (routes("eth0") | speed("eth0", "1000"), LinkQuality(link_bits_per_s=1e9)),
        (routes(wlan0=600, eth0=100) | GOOD | speed("eth0", "100"), LinkQuality(link_bits_per_s=1e8)),
        (speed("eth0", "", "down") | speed("lo", "1") | speed("eth1", "10"), LinkQuality(link_bits_per_s=1e7)),
        *[(routes("eth0") | speed("eth0", said), LinkQuality()) for said in ("-1", "", "much", "0")],
        *[(routes("wlan0") | wireless(line) | IS_WIRELESS, LinkQuality(link_bits_per_s=65e6))
          for line in (" wlan0: 0000", " wlan0: 0000 58. much 0", " wlan0: 0000 58. -256. 0", "wlan1: 0 1 -2")],
        ({}, LinkQuality()),
    ],
)  # fmt: skip
def test_a_link_tells_what_its_files_and_the_kernel_know(tmp_path, files, expected):
    assert read_link_quality(plant(tmp_path, files), {"wlan0": 65e6}.__getitem__) == expected


def test_the_kernel_knows_no_wi_fi_rate_of_what_is_no_wi_fi():
    assert read_wireless_bits_per_s("lo") is None
    assert read_wireless_bits_per_s("no-such-interface-at-all") is None
