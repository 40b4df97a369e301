"""An arm64 board in full emulation: boots from a blank card, installs offline, joins, trains, boots again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from boards.card import Card
from boards.console import Console
from boards.qemu_board import COORDINATOR, CPU, MEMORY_MB, QemuBoard, stock_card, why_not
from boards.site import Site, eventually
from boards.time_line import TimeLine

from edgefl.provision.wheels import get_platform

pytestmark = [pytest.mark.board, pytest.mark.timeout(3600)]

FIRST_BOOT_S = 2400.0
BOOT_S = 1200.0
NAME = "field"
MODEL, SERIAL = "Raspberry Pi 4 Model B Rev 1.5", "10000000abcdef01"
TREE = {
    "model": MODEL,
    "compatible": "raspberrypi,4-model-b\0brcm,bcm2711\0linux,dummy-virt",
    "serial-number": SERIAL,
}


@dataclass(slots=True)
class Field:
    """A board that has joined and trained, with what it joined by."""

    site: Site
    board: QemuBoard
    token: str
    run: str


@pytest.fixture(scope="module")
def field(
    tmp_path_factory: pytest.TempPathFactory, shards: list[Path], time_lines: list[TimeLine]
) -> Iterator[Field]:
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("field")
    site = Site.on(folder / "site", [COORDINATOR])
    with site.fleet:
        token, image = site.token(), folder / "field.img"
        card = Card(
            name=NAME, token=token, coordinator=f"{COORDINATOR}:{site.fleet.port}", family=get_platform("pi-cp313")
        )
        card.write(site, "--image", str(stock_card(shards[0])), "--out", str(image))
        ports = (site.fleet.port, site.fleet.broker_port)
        board = QemuBoard(NAME, image, Console(folder / "field.console"), ports, TREE)
        line = TimeLine(f"An arm64 board in full emulation ({CPU}, {MEMORY_MB} MB), from a blank card:")
        time_lines.append(line)
        try:
            board.start()
            line.note("first heartbeat", site.wait_online(NAME, timeout_s=FIRST_BOOT_S))
            line.note_first_boot(board.console)
            run = site.train()
            line.note("took part in a round")
            yield Field(site, board, token, run)
        finally:
            board.cut_power()


def test_it_takes_part_in_a_round_as_the_board_that_its_device_tree_says(field: Field) -> None:
    [update] = field.site.updates(field.run)
    assert (update["device_id"], update["outcome"]) == (NAME, "used")
    shown = field.site.device(NAME)
    assert shown["capabilities"]["model"] == MODEL
    assert shown["capabilities"]["family"] == "raspberry-pi"
    assert SERIAL not in str(shown)
    assert field.site.heartbeats(NAME)


def test_nothing_failed_on_it_and_it_reaches_nothing_but_the_coordinator(field: Field) -> None:
    assert field.board.run("systemctl --failed --no-legend --plain").strip() == ""
    with pytest.raises(AssertionError, match=r"ConnectionRefusedError|TimeoutError|OSError"):
        field.board.run("python3 -c 'import socket; socket.create_connection((\"10.0.2.2\", 22), 5)'")


def test_the_kernel_knows_the_memory_limit_of_the_unit(field: Field) -> None:
    unit = "edgefl-device.service"
    limit = int(field.board.run(f"systemctl show {unit} --property=MemoryMax --value"))
    assert limit < MEMORY_MB << 20
    group = field.board.run(f"systemctl show {unit} --property=ControlGroup --value").strip()
    assert int(field.board.run(f"cat /sys/fs/cgroup{group}/memory.max")) == limit


def test_the_second_boot_comes_back_by_itself_and_no_token_is_left_on_the_card(
    field: Field, time_lines: list[TimeLine]
) -> None:
    field.board.stop()
    assert field.board.boot_file("edgefl/join.json") is None
    assert b"ready; edgefl-join.service joins the fleet" in (field.board.boot_file("edgefl/firstboot.log") or b"")
    assert field.board.root_file("/etc/edgefl/join.json") is None
    for name in ("user-data.txt", "user-data.txt.i", "cloud-config.txt", "obj.pkl"):
        assert field.token.encode() not in (field.board.root_file(f"/var/lib/cloud/instance/{name}") or b"")
    assert not field.board.has_bytes(field.token.encode())
    field.site.wait_away(NAME, timeout_s=60)
    said, line = len(field.board.console.lines), TimeLine("The same board, switched on again:")
    field.board.start()
    line.note("first heartbeat", field.site.wait_online(NAME, timeout_s=BOOT_S))
    time_lines.append(line)
    assert field.board.console.first("edgefl: installing", since=said) is None
    eventually(lambda: field.site.heartbeats(NAME), 30, "heartbeats")
