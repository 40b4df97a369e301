"""Boards with a real sshd, in mounts and processes of their own, joined to a real coordinator and trained."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from made_wheels import make_edgefl_wheels
from requirements import require

from edgefl import __version__
from edgefl.core.config import parse_run
from edgefl.simulation.local_fleet import LocalFleet, find_free_port
from edgefl.tasks.datasets.central import create_shards

HERE = Path(__file__).parent
SITE_PACKAGES = next(Path(path) for path in sys.path if path.endswith("site-packages"))
BASE_BIN = Path(sys.base_prefix) / "bin"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def eventually(condition: Callable[[], Any], timeout_s: float = 60.0, what: str = "") -> Any:
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"did not happen within {timeout_s} s: {what}"
        time.sleep(0.05)
    return value


@dataclass
class SshBoard:
    """A board of this machine; `folder` holds its keys, its data, and what is written on it."""

    folder: Path
    name: str
    port: int
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        command = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=KILL"]
        with (self.folder / "sshd.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, "sh", str(HERE / "board_namespace.sh"), str(self.folder)], stdout=log, stderr=log
            )
        self.processes.append(process)
        eventually(self._answers, what=(self.folder / "sshd.log").read_text())

    def stop(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
            process.wait(60)

    def _answers(self) -> bool:
        assert self.processes[-1].poll() is None, (self.folder / "sshd.log").read_text()
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return True
        except OSError:
            return False

    def files(self) -> dict[str, int]:
        """What was written on it, with times; logs, states and pycache apart."""
        upper = self.folder / "upper"
        return {
            str(path.relative_to(upper)): path.lstat().st_mtime_ns
            for path in sorted(upper.rglob("*"))
            if path.is_file() and "var-lib" not in path.parts and not path.is_relative_to(upper / "var")
        }


@dataclass
class Workshop:
    """The operator's side: a coordinator, boards, an ssh configuration that knows their keys."""

    root: Path
    boards: list[SshBoard]
    fleet: LocalFleet

    def hosts(self, *lines: str) -> Path:
        path = self.root / "hosts"
        path.write_text("\n".join(lines) + "\n")
        return path

    def line(self, number: int, rest: str = "digits=/srv/data/digits.npz", user: str = "root") -> str:
        board = self.boards[number]
        return f"{user}@127.0.0.1:{board.port} name={board.name} {rest}"

    def provision(self, hosts: Path, *words: str) -> tuple[int, list[dict[str, Any]], str]:
        """Exit code, rows and standard error of `edgefl provision ssh`."""
        config = self.root / "fleet" / "config"
        done = subprocess.run(
            [sys.executable, "-m", "edgefl", "provision", "ssh", "--hosts", str(hosts), "--format", "json",
             "--wheels", str(self.root / "wheels"), "--ssh-config", str(self.root / "ssh_config"), "--wait", "90",
             *words],
            env={**os.environ, "XDG_CONFIG_HOME": str(config)},
            capture_output=True,
            text=True,
            check=False,
            timeout=500,
        )  # fmt: skip
        rows = json.loads(done.stdout)["rows"] if done.stdout else []
        return done.returncode, rows, done.stderr


def _keys(root: Path) -> None:
    for name in ("user", "host"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(root / name)], check=True, timeout=30
        )


def _board(root: Path, name: str, shard: Path) -> SshBoard:
    folder = root / name
    for place in ("data", "programs"):
        (folder / place).mkdir(parents=True)
    shutil.copy(shard, folder / "data" / "digits.npz")
    shutil.copy(shard.with_suffix(".json"), folder / "data" / "digits.json")
    systemctl = HERE / "board_systemctl.py"
    shutil.copy(root / "user.pub", folder / "authorized")
    (folder / "programs" / "systemctl").write_text(f"#!{sys.executable}\n" + systemctl.read_text())
    port = find_free_port()
    # Debian's own Python cannot make virtual environments everywhere; the one of these tests can.
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {root / 'host'}\nAuthorizedKeysFile /etc/ssh/authorized\n"
        f"PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin yes\nUsePAM no\n"
        f"StrictModes no\nPidFile none\n"
        f"SetEnv PATH=/usr/local/bin:{BASE_BIN}:/usr/sbin:/usr/bin:/sbin:/bin\n"
    )
    return SshBoard(folder, name, port)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    require("root", "openssh")  # boards are made of mounts
    root = tmp_path_factory.mktemp("workshop")
    _keys(root)
    shards = create_shards("digits", "iid", 3, root / "shards")
    boards = [_board(root, f"shelf-{number + 1}", Path(shard)) for number, shard in enumerate(shards[:3])]
    key = " ".join((root / "host.pub").read_text().split()[:2])
    (root / "known_hosts").write_text("".join(f"[127.0.0.1]:{board.port} {key}\n" for board in boards))
    (root / "ssh_config").write_text(
        f"Host *\n  IdentityFile {root / 'user'}\n  IdentitiesOnly yes\n  UserKnownHostsFile {root / 'known_hosts'}\n"
    )
    make_edgefl_wheels(root / "wheels", __version__, SITE_PACKAGES)
    with LocalFleet(root=root / "fleet", devices=[], environment={"PYTHONPATH": str(HERE.parents[1])}) as fleet:
        try:
            for board in boards:
                board.start()
            yield Workshop(root, boards, fleet)
        finally:
            for board in boards:
                board.stop()


def _inside(board: SshBoard, workshop: Workshop, *words: str) -> str:
    command = ["ssh", "-F", str(workshop.root / "ssh_config"), "-p", str(board.port), "root@127.0.0.1", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout


def test_two_boards_join_train_and_a_third_that_is_down_is_told(workshop: Workshop) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        down = f"pi@127.0.0.1:{nobody.getsockname()[1]} name=down"
        hosts = workshop.hosts(workshop.line(0), workshop.line(1), down)
        code, rows, said = workshop.provision(hosts)
    assert [(row["name"], row["result"], row["step"]) for row in rows] == [
        ("shelf-1", "joined", "join"),
        ("shelf-2", "joined", "join"),
        ("down", "failed", "reach"),
    ], (rows, said)
    assert "Connection refused" in rows[2]["note"]
    assert code == 30
    assert "1 of 3 boards did not get through: down" in said
    workshop.fleet.wait_for_devices(2)
    run = parse_run({"run": {"task": "digits", "rounds": 1, "evaluate_on": "none"}, "devices": {"min": 2}})
    done = workshop.fleet.wait_for_run(workshop.fleet.submit(run))
    assert done["status"] == "finished", done
    used = [row["device_id"] for row in workshop.fleet.list_history("updates") if row["outcome"] == "used"]
    assert sorted(used) == ["shelf-1", "shelf-2"]
    for board in workshop.boards[:2]:
        assert not _inside(board, workshop, "ls /etc/edgefl/join.json /var/tmp | grep -v ':'").strip()
        assert "efl1." not in _inside(board, workshop, "cat /run/board/*.log /run/board/calls")
    assert "efl1." not in said

    before = [board.files() for board in workshop.boards[:2]]
    starts = [_inside(board, workshop, "cat /run/board/edgefl-device.service") for board in workshop.boards[:2]]
    code, rows, said = workshop.provision(workshop.hosts(workshop.line(0), workshop.line(1)))
    assert [(row["result"], row["note"]) for row in rows] == [("already joined", "")] * 2
    assert code == 0
    assert [board.files() for board in workshop.boards[:2]] == before
    assert [
        _inside(board, workshop, "cat /run/board/edgefl-device.service") for board in workshop.boards[:2]
    ] == starts

    shutil.rmtree(workshop.root / "wheels")
    make_edgefl_wheels(workshop.root / "wheels", f"{__version__}.post1", SITE_PACKAGES)
    code, rows, said = workshop.provision(workshop.hosts(workshop.line(0)))
    assert [(row["result"], row["note"]) for row in rows] == [("updated", "")], said
    assert _inside(workshop.boards[0], workshop, "readlink /opt/edgefl/current").strip() == "b"
    workshop.fleet.wait_for_devices(2)


def _program(board: SshBoard, workshop: Workshop, name: str, text: str) -> None:
    script = f"#!/bin/sh\n{text}\n"
    command = ["ssh", "-F", str(workshop.root / "ssh_config"), "-p", str(board.port), "root@127.0.0.1",
               f"cat >/usr/local/bin/{name} && chmod 755 /usr/local/bin/{name}"]  # fmt: skip
    subprocess.run(command, input=script, text=True, check=True, timeout=30)


def test_what_stands_in_the_way_is_told_with_what_to_do_and_nothing_is_changed(workshop: Workshop) -> None:
    board = workshop.boards[2]

    def told(line: str, *words: str) -> tuple[str, str, str]:
        _, (row,), _ = workshop.provision(workshop.hosts(line), *words)
        return row["result"], row["step"], row["note"]

    untouched = board.files()
    result, step, note = told(workshop.line(2, user="pi"))
    assert (result, step) == ("failed", "reach")
    assert "may not become root without a password" in note

    known = workshop.root / "known_hosts"
    keys = known.read_text()
    known.write_text("")
    assert (
        f"look at its key and accept it once by hand: ssh -p {board.port} root@127.0.0.1" in told(workshop.line(2))[2]
    )
    known.write_text(keys)

    assert told(workshop.line(2), "--dry-run") == ("would join", "reach", "")
    assert board.files() == untouched

    hindrances = {
        "df": ('printf "a b c d\\nx 1 1 102400 1%% /\\n"', "/opt has 100 MB free, edgefl needs 400"),
        "python3": ("echo 3.10.12", "it has Python 3.10.12, edgefl needs 3.11 or newer"),
    }
    for name, (text, expected) in hindrances.items():
        names = ["python3", "python3.11", "python3.12", "python3.13"] if name == "python3" else [name]
        for each in names:
            _program(board, workshop, each, text)
        result, step, note = told(workshop.line(2))
        assert (result, step) == ("failed", "reach")
        assert expected in note
        _inside(board, workshop, "rm", *(f"/usr/local/bin/{each}" for each in names))
    _program(board, workshop, "date", "echo 86400")
    result, _, note = told(workshop.line(2), "--dry-run")
    assert result == "would join", "wheels need no date"
    assert "days behind: sudo timedatectl set-ntp true" in note
    _inside(board, workshop, "rm /usr/local/bin/date")


def test_data_that_the_device_may_not_read_is_told_before_a_token_is_made(workshop: Workshop) -> None:
    board = workshop.boards[2]
    _inside(board, workshop, "cp -r /srv/data /home/pi/data && chown -R pi:pi /home/pi && chmod -R go= /home/pi")
    line = workshop.line(2, "digits=/home/pi/data/digits.npz")
    code, (row,), _ = workshop.provision(workshop.hosts(line))
    assert (code, row["result"], row["step"]) == (30, "failed", "data"), row
    assert "edgefl may not read it" in row["note"]
    assert "sudo chgrp -R edgefl /home/pi/data &&" in row["note"]
    assert _inside(board, workshop, "stat -c %a /home/pi/data/digits.npz").strip() == "600"
    assert not _inside(board, workshop, "ls /etc/edgefl/join.json").strip()
    drop_in = _inside(board, workshop, "cat /etc/systemd/system/edgefl-device.service.d/20-shards.conf")
    assert "BindReadOnlyPaths=-/home/pi/data" in drop_in

    # The folder alone is opened: the home around it stays closed, and the units do not need it.
    _inside(board, workshop, "chgrp -R edgefl /home/pi/data && chmod -R g+rX /home/pi/data")
    code, (row,), said = workshop.provision(workshop.hosts(line))
    assert (code, row["result"]) == (0, "joined"), (row, said)
    eventually(lambda: workshop.fleet.get_presence()["shelf-3"] == "online", what="shelf-3 is there")
