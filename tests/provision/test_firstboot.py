"""firstboot.sh is really run, on a tree of its own; only install.sh of the payload is a short one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from made_wheels import make_wheel
from requirements import require

from edgefl.core.protocol import JoinToken
from edgefl.device.enrolment.join_file import JoinFile
from edgefl.provision import provisioning_files
from edgefl.provision.payload import MANIFEST_NAME, make_payload, render_manifest

TOKEN = JoinToken(ca_fingerprint="a" * 64, token_id="t1", secret="s3cret", fleet="lab", addresses=("pc:8000",)).text()
JOIN_FILE = JoinFile(token=TOKEN, name="pi-01").to_text()
# Counts its runs, shows the token as a careless program would, and fails as long as a file asks for it.
INSTALL = b"""#!/bin/sh
set -eu
echo run >>"$EDGEFL_ROOT/runs"
echo "installing from $1 with $(grep -o 'efl1[^"]*' "$1/join.json" || true)"
test ! -e "$EDGEFL_ROOT/no-network" || { echo "no index can be reached"; exit 4; }
"""


class Board:
    """A tree with a card's boot partition, on which cloud-init has left its copies."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.boot = root / "boot/firmware"
        self.card = self.boot / "edgefl"
        self.joined = root / "etc/edgefl/join.json"
        self.done = root / "var/lib/edgefl-firstboot.done"
        self.kept = root / "var/lib/edgefl-firstboot"

    def write_card(self, *, install: bytes = INSTALL, extra: dict[str, bytes | Path] | None = None) -> None:
        files = {**make_payload(JOIN_FILE, extra), "install.sh": install}
        del files[MANIFEST_NAME]
        files[MANIFEST_NAME] = render_manifest({name: body for name, body in files.items() if name != "join.json"})
        for name, body in files.items():
            path = self.card / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body if isinstance(body, bytes) else body.read_bytes())

    def firstboot(self, *arguments: str, script: Path | None = None) -> subprocess.CompletedProcess[str]:
        path = f"{self.root.parent / 'programs'}:{os.environ['PATH']}"
        environment = {"EDGEFL_ROOT": str(self.root), "EDGEFL_TIME_WAIT_S": "1", "PATH": path}
        command = ["dash", str(script or self.card / "firstboot.sh"), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    def work(self) -> subprocess.CompletedProcess[str]:
        return self.firstboot("--run", script=self.kept / "firstboot.sh")

    def holders(self) -> list[str]:
        """Every file of the tree in which the token can be read."""
        files = [path for path in self.root.rglob("*") if path.is_file()]
        return [str(path.relative_to(self.root)) for path in files if TOKEN.encode() in path.read_bytes()]


@pytest.fixture
def board(tmp_path: Path) -> Board:
    require("dash")
    board = Board(tmp_path / "board")
    (board.root / "run/systemd/timesync").mkdir(parents=True)
    (board.root / "run/systemd/timesync/synchronized").touch()
    board.write_card()
    # None of this machine's units is touched.
    calls, program = tmp_path / "calls", tmp_path / "programs" / "systemctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >>{calls}\n')
    program.chmod(0o755)
    # The real one waits for all disks of this machine, and so do all tests beside these.
    program.with_name("sync").write_text("#!/bin/sh\n")
    program.with_name("sync").chmod(0o755)
    return board


WHEELS: dict[str, bytes | Path] = {
    "wheels/edgefl_fleet-1-py3-none-any.whl": b"PK",
    "wheels/dep-1-py3-none-any.whl": b"PK",
}


def test_the_wheels_leave_the_card_when_the_installation_has_worked_and_not_before(board: Board) -> None:
    board.write_card(extra=WHEELS)
    board.firstboot("--no-start")
    (board.root / "no-network").touch()
    assert board.work().returncode != 0
    assert len(list((board.card / "wheels").iterdir())) == 2
    (board.root / "no-network").unlink()
    ran = board.work()
    assert ran.returncode == 0, ran.stdout
    assert not (board.card / "wheels").exists()
    assert {"firstboot.log", "install.sh", MANIFEST_NAME} <= {path.name for path in board.card.iterdir()}
    assert board.done.exists()
    board.write_card(extra={**WHEELS, "keep-wheels": b""})
    board.firstboot("--no-start")
    assert board.work().returncode == 0
    assert len(list((board.card / "wheels").iterdir())) == 2, "they are to stay"


def test_a_board_is_installed_once_for_each_card_and_the_token_is_left_in_the_join_file_alone(board: Board) -> None:
    ran = board.firstboot("--no-start")
    assert ran.returncode == 0, ran.stderr
    units = board.root / "etc/systemd/system"
    unit = units / "edgefl-firstboot.service"
    assert unit.read_text() == provisioning_files.load_text("board/edgefl-firstboot.service")
    assert unit.stat().st_mode & 0o777 == 0o644
    assert (units / "multi-user.target.wants/edgefl-firstboot.service").is_symlink(), "every boot starts it"
    assert not (board.root / "runs").exists(), "the first call only keeps the script"
    ran = board.work()
    assert ran.returncode == 0, ran.stdout
    assert board.joined.read_text() == JOIN_FILE
    assert board.joined.stat().st_mode & 0o777 == 0o600
    assert board.holders() == ["etc/edgefl/join.json"]
    assert board.done.exists()
    assert not board.kept.exists()
    assert not unit.exists()
    log = (board.card / "firstboot.log").read_text()
    assert all(word in log for word in ("installing from", "efl1.(secret)", "ready"))
    assert TOKEN not in log + ran.stdout + ran.stderr
    ready = (0, "edgefl: this board is ready already\n")
    again = board.firstboot("--no-start")
    assert (again.returncode, again.stdout) == ready
    (board.card / "join.json").write_bytes(bytes(100))  # a power cut while it was overwritten
    again = board.firstboot("--no-start")
    assert (again.returncode, again.stdout) == ready
    assert (board.root / "runs").read_text().count("run") == 1
    board.write_card()
    board.firstboot("--no-start")
    assert board.work().returncode == 0
    assert (board.root / "runs").read_text().count("run") == 2
    assert board.holders() == ["etc/edgefl/join.json"]


def test_a_failed_installation_keeps_the_token_from_all_but_root_and_is_tried_again(board: Board) -> None:
    (board.root / "no-network").touch()
    board.firstboot("--no-start")
    failed = board.work()
    assert failed.returncode == 1
    assert "no index can be reached" in (board.card / "firstboot.log").read_text()
    assert board.holders() == ["var/lib/edgefl-firstboot/edgefl/join.json"]
    assert board.kept.stat().st_mode & 0o777 == 0o700
    assert not board.done.exists()
    (board.card / "firstboot.log").write_text("x" * 200_000)
    board.work()
    assert (board.card / "firstboot.log").stat().st_size < 70_000, "the log grows with every failure"
    (board.root / "no-network").unlink()
    assert board.work().returncode == 0
    assert board.holders() == ["etc/edgefl/join.json"]
    assert (board.root / "runs").read_text().count("run") == 3


def test_a_board_that_has_joined_keeps_its_place_and_the_card_s_token_is_destroyed(board: Board) -> None:
    state = board.root / "var/lib/edgefl"
    state.mkdir(parents=True)
    (state / "device.json").write_text("{}")
    board.firstboot("--no-start")
    assert "has joined already" in board.work().stdout
    assert board.holders() == []


@pytest.mark.parametrize("damage", ["changed", "cut", "missing", "no-manifest", "empty-manifest", "no-join-file"])
def test_a_damaged_card_is_named_and_nothing_is_installed(board: Board, damage: str) -> None:
    unit = board.card / "units/edgefl-device.service"
    if damage == "changed":
        unit.write_bytes(unit.read_bytes().replace(b"e", b"3", 1))
    elif damage == "cut":
        unit.write_bytes(unit.read_bytes()[:-10])
    elif damage == "missing":
        unit.unlink()
    elif damage == "no-manifest":
        (board.card / MANIFEST_NAME).unlink()
    elif damage == "empty-manifest":
        (board.card / MANIFEST_NAME).write_text('{\n  "v": 1,\n  "files": {}\n}\n')
    else:
        (board.card / "join.json").unlink()
    board.firstboot("--no-start")
    ran = board.work()
    assert ran.returncode == 1
    assert "write" in ran.stdout
    assert "again" in ran.stdout
    if damage in ("changed", "cut"):
        assert "units/edgefl-device.service" in ran.stdout
    assert not (board.root / "runs").exists()
    assert not board.joined.exists()


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_zeros_do_not_take_the_place_of_the_token_that_was_copied_or_handed_over(
    board: Board, is_handed_over: bool
) -> None:
    board.firstboot("--no-start")
    shutil.copytree(board.card, board.kept / "edgefl")
    if is_handed_over:
        (board.card / "join.json").unlink()
        board.joined.parent.mkdir(parents=True)
        board.joined.write_text(JOIN_FILE)
    _overwrite((board.kept / "edgefl" if is_handed_over else board.card) / "join.json")
    ran = board.work()
    assert ran.returncode == 0, ran.stdout
    assert board.joined.read_text() == JOIN_FILE
    assert not (board.card / "join.json").exists()


def test_a_card_whose_token_is_zeros_is_to_be_written_again(board: Board) -> None:
    for num_bytes in (1, 20, 10_000):
        board.write_card()
        _overwrite(board.card / "join.json", num_bytes)
        board.firstboot("--no-start")
        ran = board.work()
        assert ran.returncode == 1
        assert "holds no join.json with a token" in ran.stdout
        assert not board.done.exists()


def test_a_board_cut_off_while_it_clears_away_is_ready_and_clears_the_rest_at_its_next_boot(board: Board) -> None:
    payload, rm = board.kept / "edgefl", board.root.parent / "programs/rm"
    is_other = f'[ "$*" != "-rf {payload}" ] || [ ! -e {board.joined} ]'
    rm.write_text(f'#!/bin/sh\n/bin/rm "$@"\n{is_other} || kill -9 $PPID\n')
    rm.chmod(0o755)
    board.firstboot("--no-start")
    board.work()
    rm.unlink()
    unit = board.root / "etc/systemd/system/edgefl-firstboot.service"
    assert unit.exists()
    assert "ConditionPathExists" not in unit.read_text(), "the unit must run once more"
    ran = board.work()
    assert (ran.returncode, ran.stdout) == (0, "edgefl: this board is ready already\n")
    assert board.joined.read_text() == JOIN_FILE
    assert not unit.exists()
    assert not board.kept.exists()


def test_cloud_init_s_copies_go_and_a_token_pasted_into_user_data_goes_with_them(board: Board) -> None:
    instance = board.root / "var/lib/cloud/instances/i-1"
    instance.mkdir(parents=True)
    (board.root / "var/lib/cloud/instance").symlink_to(instance)
    for name in ("user-data.txt", "user-data.txt.i", "cloud-config.txt", "obj.pkl"):
        (instance / name).write_text(f"#cloud-config\nruncmd: [[edgefl, device, join, --token, {TOKEN}]]\n")
    (instance / "boot-finished").touch()
    (board.boot / "user-data").write_text(f"#cloud-config\nruncmd: [[edgefl, device, join, --token, {TOKEN}]]\n")
    (board.boot / "edgefl.new").mkdir()
    (board.boot / "edgefl.new/join.json").write_text(JOIN_FILE)
    board.firstboot("--no-start")
    assert board.work().returncode == 0
    assert board.holders() == ["etc/edgefl/join.json"]
    assert (board.boot / "user-data").read_text().startswith("#cloud-config\n")
    assert sorted(path.name for path in instance.iterdir()) == ["boot-finished"]
    (board.boot / "user-data").write_text("#cloud-config\nhostname: pi-01\n")
    board.write_card()
    board.firstboot("--no-start")
    board.work()
    assert (board.boot / "user-data").read_text() == "#cloud-config\nhostname: pi-01\n"


@pytest.mark.parametrize(
    ("wheels", "waits"),
    [((), True), (("edgefl_fleet-1.whl",), True), (("edgefl_fleet-1.whl", "numpy-2.whl"), False)],
    ids=["none", "edgefl's own alone", "all that it needs"],
)
def test_a_clock_is_waited_for_where_an_index_is_needed_but_not_for_ever(
    board: Board, wheels: tuple[str, ...], waits: bool
) -> None:
    (board.root / "run/systemd/timesync/synchronized").unlink()
    board.write_card(extra={f"wheels/{name}": b"wheel" for name in wheels})
    board.firstboot("--no-start")
    ran = board.work()
    assert (ran.returncode, "the clock is not set after 1 s" in ran.stdout) == (0, waits)


@pytest.mark.slow
def test_with_the_real_installation_a_card_becomes_a_board_that_will_join(board: Board, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    main = b"print('edgefl, version 1.0')\n"
    make_wheel(
        wheels, "edgefl-fleet", "1.0", {"edgefl/__init__.py": b"", "edgefl/__main__.py": main}, requires=["dep"]
    )
    make_wheel(wheels, "dep", "1.0", {"dep.py": b""})
    install = provisioning_files.find_path("board/install.sh").read_bytes()
    board.write_card(install=install, extra={f"wheels/{wheel.name}": wheel for wheel in wheels.iterdir()})
    assert board.firstboot().returncode == 0
    ran = board.work()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    python = board.root / "opt/edgefl/current/bin/python"
    told = subprocess.run([python, "-I", "-m", "edgefl"], capture_output=True, text=True, check=True)
    assert told.stdout == "edgefl, version 1.0\n"
    assert board.holders() == ["etc/edgefl/join.json"]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[:2] == ["daemon-reload", "start --no-block edgefl-firstboot.service"]
    assert calls.index("--quiet enable edgefl-join.service") < calls.index("start --no-block edgefl-join.service")


@pytest.mark.parametrize(
    "script", sorted(provisioning_files.find_path("board").glob("*.sh")), ids=lambda path: path.name
)
def test_the_scripts_are_posix_and_without_fault(script: Path) -> None:
    require("shellcheck", "dash")
    assert subprocess.run(["dash", "-n", script], check=False).returncode == 0
    told = subprocess.run(["shellcheck", "--shell=sh", script], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout


def test_systemd_has_nothing_to_say_against_the_unit() -> None:
    require("systemd")
    unit = provisioning_files.find_path("board/edgefl-firstboot.service")
    told = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stderr) == (0, "")


def _overwrite(path: Path, num_bytes: int = 10_000) -> None:
    """Leaves what a power cut does while a file is overwritten."""
    body = path.read_bytes()
    path.write_bytes(bytes(min(num_bytes, len(body))) + body[num_bytes:])
