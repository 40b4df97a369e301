"""A board with an init of its own boots from a blank card: real systemd, cloud-init, units, tokens and power cuts."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from boards import cache
from boards.card import SHARD_ON_BOARD, Card, put_shard, put_stock
from boards.nspawn_board import NspawnBoard, why_not
from boards.releases import BREAKS, later, release, update
from boards.site import Site, eventually
from boards.time_line import TimeLine
from wheel_files import Signer

from edgefl.provision.wheels import get_platform
from edgefl.system.bundles.keys import PUBLIC_KEY_FILE

pytestmark = [pytest.mark.board, pytest.mark.timeout(900)]

FAMILY = get_platform("pc-cp313")
FIRST_BOOT_S = 300.0
BOOT_S = 90.0
NUM_BOARDS = 4
QUICK_UPDATES = """[Service]
ExecStart=
ExecStart=/opt/edgefl/current/bin/python -I -m edgefl device apply-update --health-s 60 --settle-s {settle_s} -- \
    systemctl restart --no-block edgefl-device.service
"""


class Bench:
    """One coordinator and the wires of the boards that tests plug in."""

    def __init__(self, folder: Path, shard: Path) -> None:
        self.folder, self.shard = folder, shard
        self._numbers = [NspawnBoard.number_of(place) for place in range(NUM_BOARDS)]
        self.signer = Signer(folder / "operator")
        self.site = Site.on(folder / "site", [NspawnBoard.host_address_of(number) for number in self._numbers])
        self.boards: list[NspawnBoard] = []

    def new_board(self, name: str, *, token: str | None = None) -> tuple[NspawnBoard, str]:
        """Returns a board that was never switched on, and the token on its card."""
        board = NspawnBoard.new(cache.image("amd64"), self.folder, name, number=self._numbers.pop())
        self.boards.append(board)
        put_shard(self.shard, board.root)
        put_stock(board.boot)
        card = Card(
            name=name,
            token=token or self.site.token(),
            coordinator=f"{board.host_address}:{self.site.fleet.port}",
            family=FAMILY,
            static=(board.address, board.host_address),
            signer=self.signer.folder / PUBLIC_KEY_FILE,
        )
        card.write(self.site, "--boot", str(board.boot))
        return board, card.token


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, shards: list[Path]) -> Iterator[Bench]:
    if reason := why_not() or cache.why_no_image("amd64"):
        pytest.skip(reason)
    made = Bench(tmp_path_factory.mktemp("bench"), shards[0])
    with made.site.fleet:
        yield made
        for board in made.boards:
            board.stop()


@pytest.fixture(scope="module")
def kitchen(bench: Bench, time_lines: list[TimeLine]) -> tuple[NspawnBoard, str]:
    """A board that has joined, and the token that it joined with."""
    board, token = bench.new_board("kitchen")
    line = TimeLine("A container board of this machine's kind, from a blank card:")
    time_lines.append(line)
    board.start()
    line.note("first heartbeat", bench.site.wait_online("kitchen", timeout_s=FIRST_BOOT_S))
    line.note_first_boot(board.console)
    bench.site.train()
    line.note("took part in a round")
    return board, token


def test_a_blank_card_becomes_a_device_that_trains(bench: Bench, kitchen: tuple[NspawnBoard, str]) -> None:
    shown = bench.site.device("kitchen")
    assert (shown["presence"], shown["role"]) == ("online", "trainer")
    assert bench.site.heartbeats("kitchen")
    [update] = bench.site.updates(bench.site.train())
    assert (update["device_id"], update["outcome"]) == ("kitchen", "used")
    assert update["num_examples"] > 500


def test_the_token_is_nowhere_on_the_board_after_the_join(kitchen: tuple[NspawnBoard, str]) -> None:
    board, token = kitchen
    eventually(lambda: not board.files_with(token), 30, f"the token to go from {board.files_with(token)}")
    assert not (board.boot / "edgefl" / "join.json").exists()
    assert not (board.root / "etc" / "edgefl" / "join.json").exists()
    assert token not in board.run("journalctl", "--no-pager")
    assert "ready; edgefl-join.service joins the fleet" in (board.boot / "edgefl" / "firstboot.log").read_text()


def test_nothing_failed_on_the_board(kitchen: tuple[NspawnBoard, str]) -> None:
    board, _ = kitchen
    assert board.run("systemctl", "--failed", "--no-legend", "--plain").strip() == ""


def test_the_device_runs_shut_in(kitchen: tuple[NspawnBoard, str]) -> None:
    board, _ = kitchen
    pid = board.shows("edgefl-device.service", "MainPID")["MainPID"]
    status = dict(re.findall(r"^(\w+):\s*(.*)$", board.run("cat", f"/proc/{pid}/status"), re.MULTILINE))
    assert status["Uid"].split()[0] == board.run("id", "-u", "edgefl").strip() != "0"
    assert (int(status["CapEff"], 16), int(status["CapBnd"], 16)) == (0, 0)
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    mounts = [line.split() for line in board.run("cat", f"/proc/{pid}/mountinfo").splitlines()]
    options = {words[4]: words[5].split(",") for words in mounts}
    assert "ro" in options["/"]
    assert "rw" in options["/var/lib/edgefl"]
    assert "/home" in options


def test_other_users_of_the_board_cannot_read_its_key(kitchen: tuple[NspawnBoard, str]) -> None:
    board, _ = kitchen
    words = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
    assert board.run(*words, "cat", SHARD_ON_BOARD.replace(".npz", ".json"))
    with pytest.raises(AssertionError, match="Permission denied"):
        board.run(*words, "ls", "/var/lib/edgefl")


def test_a_device_that_hangs_is_found_and_started_anew(bench: Bench, kitchen: tuple[NspawnBoard, str]) -> None:
    board, _ = kitchen
    drop_in = "/run/systemd/system/edgefl-device.service.d/short.conf"
    board.run("sh", "-ec", f"mkdir -p $(dirname {drop_in}); printf '[Service]\\nWatchdogSec=10\\n' > {drop_in}; "
                           "systemctl daemon-reload; systemctl restart edgefl-device")  # fmt: skip
    bench.site.wait_online("kitchen", timeout_s=BOOT_S)
    before = board.shows("edgefl-device.service", "MainPID", "NRestarts")
    time.sleep(12)  # longer than the watchdog's time: a device that is well is left alone
    assert board.shows("edgefl-device.service", "MainPID", "NRestarts") == before
    board.run("kill", "-STOP", before["MainPID"])
    eventually(
        lambda: (
            board.shows("edgefl-device.service", "NRestarts", "ActiveState")
            == {"NRestarts": str(int(before["NRestarts"]) + 1), "ActiveState": "active"}
        ),
        60,
        "the watchdog to start the device anew",
    )
    assert "Watchdog timeout" in board.run("journalctl", "--no-pager", "--unit=edgefl-device")
    board.run("rm", drop_in)
    board.run("systemctl", "daemon-reload")
    bench.site.wait_online("kitchen", timeout_s=BOOT_S)


def test_the_second_boot_comes_back_by_itself(
    bench: Bench, kitchen: tuple[NspawnBoard, str], time_lines: list[TimeLine]
) -> None:
    board, _ = kitchen
    board.stop()
    bench.site.wait_away("kitchen", timeout_s=60)
    said, line = len(board.console.lines), TimeLine("The same board, switched on again:")
    board.start()
    line.note("first heartbeat", bench.site.wait_online("kitchen", timeout_s=BOOT_S))
    time_lines.append(line)
    assert board.console.first("edgefl: installing", since=said) is None
    assert bench.site.updates(bench.site.train())[0]["outcome"] == "used"


def test_a_board_waits_for_its_coordinator_and_joins_once_it_is_there(bench: Bench) -> None:
    board, token = bench.new_board("cellar")
    bench.site.fleet.terminate("coordinator")
    board.start()
    board.console.wait_for("not joined yet: ", timeout_s=FIRST_BOOT_S)
    assert all(path.startswith("/etc/edgefl/") for path in board.files_with(token))
    assert board.run("stat", "--format=%a %U", "/etc/edgefl/join.json").split() == ["600", "root"]
    bench.site.fleet.start_coordinator()
    bench.site.wait_online("cellar", timeout_s=120)
    eventually(lambda: not board.files_with(token), 30, "the token to go")


@pytest.mark.parametrize("moment", ["installing edgefl ", "joined fleet"])
def test_a_power_cut_at_the_first_boot_does_no_harm(bench: Bench, moment: str) -> None:
    board, token = bench.new_board("attic" if "installing" in moment else "barn")
    board.start()
    board.console.wait_for(moment, timeout_s=FIRST_BOOT_S)
    board.cut_power()
    board.start()
    bench.site.wait_online(board.name, timeout_s=FIRST_BOOT_S)
    eventually(lambda: not board.files_with(token), 60, "the token to go")
    assert bench.site.device(board.name)["examples"]


def hasten(board: NspawnBoard, settle_s: int) -> None:
    """Lets the board's updater wait a minute for a new agent, not five."""
    folder = board.root / "etc/systemd/system/edgefl-update.service.d"
    folder.mkdir(exist_ok=True)
    (folder / "quick.conf").write_text(QUICK_UPDATES.format(settle_s=settle_s))
    board.run("systemctl", "daemon-reload")


def version_of(bench: Bench, name: str) -> str:
    """Returns the version that the device's heartbeats say, once it is online."""
    bench.site.wait_online(name, timeout_s=BOOT_S)
    return str(bench.site.device(name)["version"])


def test_a_signed_release_runs_on_the_board_and_a_broken_one_goes_back_by_itself(
    bench: Bench, kitchen: tuple[NspawnBoard, str], time_lines: list[TimeLine]
) -> None:
    board, _ = kitchen
    hasten(board, settle_s=5)
    bench.site.wait_online("kitchen", timeout_s=BOOT_S)
    line = TimeLine("The same board takes a signed release, then one whose agent does not start:")
    time_lines.append(line)
    good = release(bench.signer, bench.folder / "good", later(1))
    code, said = update(bench.site, "kitchen", good, later(1))
    assert code == 0, said + board.run("journalctl", "--no-pager", "--unit=edgefl-update")
    line.note("the release runs, its agent has settled")
    eventually(lambda: version_of(bench, "kitchen") == later(1), BOOT_S, "heartbeats of the new version")
    assert board.run("readlink", "/opt/edgefl/current").strip() == "b"
    assert bench.site.updates(bench.site.train())[0]["outcome"] == "used"

    broken = release(bench.signer, bench.folder / "broken", later(2), BREAKS)
    code, said = update(bench.site, "kitchen", broken, later(2))
    assert code == 41, said
    assert "kitchen rolled-back: its agent did not come up within 60 s" in said
    line.note("the broken one was tried and left again")
    eventually(lambda: version_of(bench, "kitchen") == later(1), BOOT_S, "heartbeats of the version before")
    assert board.run("readlink", "/opt/edgefl/current").strip() == "b"
    assert bench.site.updates(bench.site.train())[0]["outcome"] == "used"
    assert board.run("systemctl", "--failed", "--no-legend", "--plain").strip() == ""


def test_what_a_stranger_signed_is_refused_by_the_board(bench: Bench, kitchen: tuple[NspawnBoard, str]) -> None:
    slot = kitchen[0].run("readlink", "/opt/edgefl/current")
    stranger = Signer(bench.folder / "stranger")
    code, said = update(bench.site, "kitchen", release(stranger, bench.folder / "foreign", later(3)), later(3))
    assert code == 41, said
    assert f"signed by key {stranger.id}, which this board does not trust" in said
    assert kitchen[0].run("readlink", "/opt/edgefl/current") == slot


def test_a_power_cut_after_a_new_agent_has_come_up_loses_nothing(
    bench: Bench, kitchen: tuple[NspawnBoard, str]
) -> None:
    board, _ = kitchen
    hasten(board, settle_s=20)
    status, health = board.root / "opt/edgefl/update/status.json", board.root / "var/lib/edgefl/health.json"
    version = later(4)
    bundle = release(bench.signer, bench.folder / "cut", version)
    bench.site.fleet.run_command("devices", "update", "kitchen", "--to", version, "--bundle", str(bundle))

    def is_proven() -> bool:
        trial, said = json.loads(status.read_bytes()).get("trial") or {}, json.loads(health.read_bytes())
        return trial.get("step") == "trial" and said["version"] == version and said["connected"] is True

    eventually(is_proven, 300, "the new agent to reach the coordinator")
    board.cut_power()
    board.start()
    eventually(
        lambda: json.loads(status.read_bytes()).get("trial") is None, 180, "the updater to finish what it was at"
    )
    assert json.loads(status.read_bytes())["outcome"]["state"] == "running", board.console.tail()
    assert version_of(bench, "kitchen") == version
