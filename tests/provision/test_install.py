"""install.sh and setup.sh, run for real: a real virtual environment, real wheels, a systemctl that only notes."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import platform
import shutil
import site
import stat
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from made_wheels import make_wheel

from edgefl.coordinator.enrolment.tokens import format_setup_command
from edgefl.device.enrolment.join_file import JoinFile
from edgefl.device.updates.protocol import (
    InstallAttempt,
    InstallPhase,
    InstallResult,
    UpdaterStatus,
    read_status,
    write_status,
)
from edgefl.device.updates.slots import InstalledPack, SlotRecord, Slots
from edgefl.provision.payload import make_payload, render_shard_drop_ins, write_setup
from edgefl.provision.provisioning_files import find_path as source
from edgefl.provision.ssh_host import CommandResult
from edgefl.system.atomic_files import is_locked

SCRIPT = source("board/install.sh")
JOIN_FILE = '{"token": "efl1.x"}'
MAIN = b"import dep\nprint('edgefl, version', dep.NAME)\n"


@dataclass
class Board:
    """A folder that stands for a board's root, with a payload and a PATH of its own."""

    root: Path
    folder: Path
    programs: Path
    environment: dict[str, str] = field(default_factory=dict)

    def install(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.programs}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "EDGEFL_ROOT": str(self.root), **self.environment}
        environment.pop("PYTHONPATH", None)
        return subprocess.run(
            ["sh", str(SCRIPT), str(self.folder), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )

    def program(self, name: str, text: str) -> None:
        (self.programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.programs / name).chmod(0o755)

    def systemctl_calls(self) -> list[str]:
        calls = self.programs / "calls"
        told = calls.read_text().splitlines() if calls.exists() else []
        calls.unlink(missing_ok=True)
        return told

    def release(self, version: str) -> None:
        """Brings edgefl of this version, and what it needs, as wheels."""
        wheels = self.folder / "wheels"
        shutil.rmtree(wheels, ignore_errors=True)
        files: dict[str, bytes | Path] = {"edgefl/__init__.py": b"", "edgefl/__main__.py": MAIN}
        make_wheel(wheels, "edgefl-fleet", version, files, requires=["dep"])
        make_wheel(wheels, "dep", "1.0", {"dep.py": f"NAME = {version!r}\n".encode()})

    def index(self, *wheels: Path) -> None:
        """Makes these wheels all that the board's index holds."""
        simple = self.root.parent / "simple"
        simple.mkdir(exist_ok=True)
        for wheel in wheels:
            page = simple / wheel.name.split("-")[0].replace("_", "-") / "index.html"
            page.parent.mkdir(parents=True, exist_ok=True)
            with page.open("a") as links:
                digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
                links.write(f'<a href="{wheel.as_uri()}#sha256={digest}">{wheel.name}</a>\n')
        self.environment |= {"PIP_INDEX_URL": simple.as_uri(), "PIP_CONFIG_FILE": os.devnull}

    def board_lock(self, *lines: str) -> None:
        """Puts this into the lock of the kind of board that this machine is, and takes the others away."""
        shutil.rmtree(self.folder / "locks")
        (self.folder / "locks").mkdir()
        name = f"{platform.machine()}-cp{sys.version_info[0]}{sys.version_info[1]}.txt"
        (self.folder / "locks" / name).write_text("".join(f"{line}\n" for line in lines))

    def runs(self) -> str:
        """What the edgefl in use says."""
        python = self.root / "opt/edgefl/current/bin/python"
        return subprocess.run(
            [python, "-I", "-m", "edgefl"], capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()

    def slot(self) -> str:
        return str((self.root / "opt/edgefl/current").readlink())


@pytest.fixture(scope="module")
def made_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `python -m venv` makes in five seconds, with the pip of these tests where they have one."""
    path = tmp_path_factory.mktemp("made") / "venv"
    own = next((Path(place) for place in site.getsitepackages() if (Path(place) / "pip").is_dir()), None)
    venv.EnvBuilder(with_pip=own is None, symlinks=True).create(path)
    if own is not None:
        packages = sysconfig.get_path("purelib", "venv", {"base": str(path), "platbase": str(path)})
        for source in (own / "pip", *own.glob("pip-*.dist-info")):
            shutil.copytree(source, Path(packages) / source.name)
    return path


@pytest.fixture
def bare_board(tmp_path: Path) -> Board:
    made = Board(tmp_path / "root", tmp_path / "payload", tmp_path / "bin")
    for folder in (made.root, made.folder, made.programs):
        folder.mkdir()
    made.program("systemctl", f'echo "$@" >> {made.programs}/calls')
    made.program("sync", ":")  # the real one waits for all disks of this machine
    made.program("python3", f'exec {sys.executable} "$@"')
    for name, content in make_payload(JOIN_FILE).items():
        (made.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (made.folder / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    made.release("1.0")
    return made


@pytest.fixture
def board(bare_board: Board, made_venv: Path) -> Board:
    """One whose Python copies a virtual environment instead of making it."""
    copies = f'[ "$1 $2" != "-m venv" ] || exec cp -a {made_venv} "$3"'
    bare_board.program("python3", f'{copies}\nexec {sys.executable} "$@"')
    return bare_board


@pytest.mark.extended
def test_a_bare_board_gets_a_slot_its_units_its_signers_and_the_join_file_once(bare_board: Board) -> None:
    board = bare_board
    for name in ("signers/lab.pem", "units/edgefl-device.service.d/20-shards.conf"):
        (board.folder / name).parent.mkdir(exist_ok=True)
        (board.folder / name).write_text("content\n")
    done = board.install()
    assert done.returncode == 0, done.stderr
    assert (board.slot(), board.runs()) == ("a", "edgefl, version 1.0")
    join = board.root / "etc/edgefl/join.json"
    assert join.read_text() == JOIN_FILE
    assert stat.S_IMODE(join.stat().st_mode) == 0o600
    installed = {path.name for path in (board.root / "etc/systemd/system").glob("*.service")}
    assert {"edgefl-join.service", "edgefl-device.service"} <= installed
    assert not {name for name in installed if "coordinator" in name or "broker" in name}
    assert (board.root / "etc/edgefl/signers/lab.pem").read_text() == "content\n"
    assert (board.root / "etc/systemd/system/edgefl-device.service.d/20-shards.conf").read_text() == "content\n"
    calls = board.systemctl_calls()
    assert calls[:3] == [
        "daemon-reload",
        "--quiet enable edgefl-join.service",
        "--quiet enable edgefl-device.service",
    ]
    assert calls[-1] == "start --no-block edgefl-join.service"
    (board.folder / "join.json").unlink()
    before = _files(board.root)
    done = board.install()
    assert done.returncode == 0, done.stderr
    assert "edgefl 1.0 is installed already" in done.stdout
    assert "daemon-reload" not in board.systemctl_calls()
    assert _files(board.root) == before


def test_a_device_that_joined_is_restarted_for_another_version_and_keeps_its_fleet_and_a_good_join_file(
    board: Board,
) -> None:
    state, join = board.root / "var/lib/edgefl", board.root / "etc/edgefl/join.json"
    state.mkdir(parents=True)
    (state / "device.json").write_text("{}")
    done = board.install()
    assert done.returncode == 0, done.stderr
    assert "has joined a fleet already and stays in it; the join file is not used" in done.stdout
    assert f"sudo rm -r {state}; then install it again" in done.stdout
    assert not join.exists()
    assert (board.slot(), board.runs()) == ("a", "edgefl, version 1.0")
    assert board.systemctl_calls()[-1] == "restart --no-block edgefl-device.service"
    join.parent.mkdir(parents=True, exist_ok=True)
    join.write_text(JOIN_FILE)
    (board.folder / "join.json").write_bytes(bytes(len(JOIN_FILE)))
    assert "holds no token and is not used" in board.install().stdout
    assert join.read_text() == JOIN_FILE
    assert board.systemctl_calls()[-1] == "start --no-block edgefl-device.service"


@pytest.mark.extended
def test_another_version_goes_into_the_other_slot_and_keeps_what_bundles_must_not_lose(board: Board) -> None:
    def installed(*arguments: str) -> str:
        done = board.install(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    installed()
    slots = Slots(board.root / "opt/edgefl")
    serials = {"edgefl": 1_700_000_200, "gulls": 1_700_000_300}
    slots.write_record(
        "a", SlotRecord(packs={"gulls": InstalledPack(version="0.3", projects=("gulls",))}, serials=serials)
    )
    write_status(
        slots,
        UpdaterStatus(trial=InstallAttempt(id="i1", sha256="0" * 64, step=InstallPhase.BUILDING, old="a", new="b")),
    )
    slots.path("b").mkdir()
    (slots.path("b") / "half-built").touch()
    board.release("1.1")
    board.environment["EDGEFL_WAIT_S"] = "1"
    with (slots.work_dir / "lock").open("w") as lock:  # an updater works in it
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = board.install()
    assert done.returncode == 1
    assert "the update under way did not end within 1 s" in done.stderr
    assert (board.slot(), (slots.path("b") / "half-built").exists()) == ("a", True)

    told = installed()
    assert (board.slot(), board.runs()) == ("b", "edgefl, version 1.1")
    assert slots.load_record("b") == SlotRecord(serials=serials)
    assert "its task packs are not in this installation: gulls; bring them with edgefl devices install" in told
    assert CommandResult(status=0, output=told, errors="").values["packs"] == ["gulls"]
    reason = "another edgefl was installed on the board meanwhile"
    assert read_status(slots) == UpdaterStatus(outcome=InstallResult(id="i1", state="failed", reason=reason))
    assert not is_locked(slots.work_dir / "lock")

    board.release("1.2")
    board.index()
    dep = (board.folder / "wheels" / "dep-1.0-py3-none-any.whl").rename(board.root.parent / "dep")
    assert board.install().returncode == 1
    assert (board.slot(), board.runs()) == ("b", "edgefl, version 1.1"), "one that fails leaves the slot in use alone"

    dep.rename(board.folder / "wheels" / "dep-1.0-py3-none-any.whl")
    (slots.path("b") / "edgefl-slot.json").write_text('{"v": 1, "packs": {}, "seri')
    board.systemctl_calls()
    assert "takes signed bundles of any age again" in installed("--no-start")
    assert (board.slot(), board.runs(), slots.load_record("a")) == ("a", "edgefl, version 1.2", SlotRecord())
    assert not [call for call in board.systemctl_calls() if call.startswith(("start", "restart"))]

    (slots.path("a") / ".complete").unlink()  # it was cut off, and is made anew
    installed()
    assert (board.slot(), board.runs()) == ("b", "edgefl, version 1.2")


def _hashed(wheel: Path) -> str:
    name, version = wheel.name.split("-")[:2]
    return f"{name.replace('_', '-')}=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"


def _strangers(folder: Path, dep: str = "1.0") -> list[Path]:
    """Somebody else's edgefl, of versions that pip would prefer to ours, and what ours needs."""
    evil: dict[str, bytes | Path] = {"edgefl/__init__.py": b"", "edgefl/__main__.py": b"print('evil')\n"}
    return [
        *(
            make_wheel(folder, name, version, evil)
            for name in ("edgefl", "edgefl-fleet")
            for version in ("1.0+zz", "99.0")
        ),
        make_wheel(folder, "dep", dep, {"dep.py": b"NAME = 'of the index'\n"}),
    ]


def test_what_the_index_gives_must_have_the_hash_of_the_lock_and_its_edgefl_is_not_taken_for_ours(
    board: Board,
) -> None:
    found = _strangers(board.root.parent / "strangers")
    board.index(*found)
    (board.folder / "wheels" / "dep-1.0-py3-none-any.whl").unlink()
    board.board_lock(f"dep==1.0 --hash=sha256:{'0' * 64}")
    done = board.install()
    assert done.returncode == 1
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert not (board.root / "opt/edgefl/current").exists()
    board.board_lock(_hashed(found[-1]))
    done = board.install()
    assert done.returncode == 0, done.stderr
    assert board.runs() == "edgefl, version of the index"
    assert "there is no lock for this board" not in done.stdout


@pytest.mark.extended
def test_without_a_lock_the_index_gives_what_ours_needs_and_without_our_wheel_only_a_hash_says_which_edgefl_it_is(
    board: Board,
) -> None:
    ours = shutil.copytree(board.folder / "wheels", board.root.parent / "ours")
    board.index(*_strangers(board.root.parent / "strangers", dep="0.9"))
    shutil.rmtree(board.folder / "locks")
    (board.folder / "wheels" / "dep-1.0-py3-none-any.whl").unlink()
    done = board.install()
    assert done.returncode == 0, done.stderr
    assert board.runs() == "edgefl, version of the index"
    assert "there is no lock for this board" in done.stdout
    board.index(*sorted(ours.iterdir()))
    shutil.rmtree(board.root / "opt")
    shutil.rmtree(board.folder / "wheels")
    done = board.install()
    assert done.returncode == 1
    assert "neither edgefl's wheel nor a lock with its hash" in done.stderr
    assert not (board.root / "opt").exists()
    lock = board.folder / "requirements.txt"
    lines = "".join(f"{_hashed(wheel)}\n" for wheel in ours.iterdir())
    (board.folder / "version").write_text("1.0\n")
    for text, code in ((lines.replace("sha256:", "sha256:0000")[:-4], 1), (lines, 0)):
        lock.write_text(text)
        done = board.install()
        assert done.returncode == code, done.stderr
        assert (board.root / "opt/edgefl/current").exists() is not bool(code)
    assert board.runs() == "edgefl, version 1.0"


def test_what_stands_in_the_way_is_told_before_anything_is_installed(bare_board: Board) -> None:
    board = bare_board
    for arguments, told in (
        (["--now"], "may only be --no-start, got --now"),
        (["--no-start", "x"], "usage: sh install.sh FOLDER"),
    ):
        assert told in board.install(*arguments).stderr
    make_wheel(board.folder / "wheels", "edgefl-fleet", "2.0", {})
    assert "several wheels of edgefl" in board.install().stderr
    board.release("1.0")
    board.program("df", 'echo "Filesystem 1024-blocks Used Available"; echo "x 1 1 102400 1% /"')
    assert "has 100 MB free, edgefl needs 400" in board.install().stderr
    (board.folder / "requirements.txt").write_text("torch==2.9.1\n")
    done = board.install()
    assert (done.returncode, "edgefl needs 1500" in done.stderr) == (1, True)
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        board.program(name, 'case "$*" in *sys.exit*) exit 1;; *) echo 3.10.12;; esac')
    done = board.install()
    assert "needs Python 3.11 or newer, this board has 3.10.12" in done.stderr
    assert "container (JetPack 6)" in done.stderr
    assert not list((board.root / "opt/edgefl").iterdir())
    shutil.rmtree(board.folder / "units")
    assert "is no payload: it has no folder units" in board.install().stderr


@pytest.mark.slow
def test_without_ensurepip_pips_own_wheel_makes_the_environment(bare_board: Board) -> None:
    board = bare_board
    board.program("python3", f'case "$*" in *"import ensurepip"*) exit 1;; esac\nexec {sys.executable} "$@"')
    board.program("apt-get", "exit 1")
    done = board.install()
    assert done.returncode == 1
    assert "cannot make virtual environments: apt-get install python3-venv" in done.stderr
    shutil.copy(_bundled_pip(), board.folder / "wheels")
    done = board.install()
    assert done.returncode == 0, done.stderr
    assert board.runs() == "edgefl, version 1.0"


def _bundled_pip() -> Path:
    import ensurepip  # noqa: PLC0415 of this test alone

    return next((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))


def _files(root: Path) -> dict[str, int]:
    return {
        str(path.relative_to(root)): path.lstat().st_mtime_ns
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


PLACES = ["/home/pi/data.npz", "/srv/rows.csv", "/home/pi/pictures", "/tmp/x/y.d/z.npz"]
NEEDS_CURL = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl: apt-get install curl")


def _offer(board: Board, door: Any) -> None:
    """Makes what the board would install what it downloads from this coordinator."""
    (board.root / "var/tmp").mkdir(parents=True)
    board.program("sudo", 'shift\nexec "$@"')
    wheels = {f"wheels/{path.name}": path for path in (board.folder / "wheels").iterdir()}
    write_setup(door.directory.setup_script, door.directory.setup_payload, wheels)


def _paste(board: Board, line: str) -> subprocess.CompletedProcess[str]:
    path = f"{board.programs}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "EDGEFL_ROOT": str(board.root)}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        ["sh", "-c", line], env=environment, capture_output=True, text=True, check=False, timeout=100
    )


@NEEDS_CURL
def test_one_pasted_line_downloads_edgefl_installs_it_and_hands_the_token_over(board: Board, front_door: Any) -> None:
    assert format_setup_command(front_door.token(), front_door.directory) is None, "nothing to download yet"
    _offer(board, front_door)
    token = front_door.token()
    line = format_setup_command(token, front_door.directory)
    assert line is not None
    data = {f"task{number}:Own": path for number, path in enumerate(PLACES)}
    done = _paste(board, line.replace("TASK=PATH", " ".join(f"{task}={path}" for task, path in data.items())))
    assert done.returncode == 0, done.stderr
    assert board.runs() == "edgefl, version 1.0"
    assert board.systemctl_calls()[-1] == "start --no-block edgefl-join.service"
    file = JoinFile.parse((board.root / "etc/edgefl/join.json").read_text())
    assert file == JoinFile(token=token.text(), shards=data, addresses=(front_door.address,))
    for name, drop_in in render_shard_drop_ins(data).items():
        units = board.root / "etc/systemd/system"
        assert (units / name.removeprefix("units/")).read_bytes() == drop_in
    assert list((board.root / "var/tmp").iterdir()) == [], "the token lies in one place only"
    assert token.secret not in done.stdout + done.stderr
    assert front_door.requests == ["GET /edgefl/v1/setup/setup.sh", "GET /edgefl/v1/setup/payload.tar"]


@NEEDS_CURL
def test_a_pasted_line_that_is_wrong_installs_nothing_and_says_why(board: Board, front_door: Any) -> None:
    _offer(board, front_door)
    line = format_setup_command(front_door.token(), front_door.directory)
    assert line is not None
    over = format_setup_command(front_door.token(ttl_s=-1.0), front_door.directory)
    foreign = replace(front_door.token(), secret="x" * 32)
    stranger = format_setup_command(foreign, front_door.directory)
    pin = line.split()[line.split().index("--pinnedpubkey") + 1]
    other_pin = f"sha256//{base64.b64encode(bytes(32)).decode()}"
    for wrong, reason in {
        line: "data is TASK=PATH",
        line.replace("TASK=PATH", "digits=data.npz"): "data is TASK=PATH with an absolute path",
        line.replace("TASK=PATH", "digits='/srv/a\"b'"): "a word may have letters",
        line.replace("TASK=PATH", "digits=/srv/../etc"): "a path of data may have no",
        line.replace("TASK=PATH", "digits=/srv/.."): "a path of data may have no",
        line.replace("TASK=PATH", "digits=/srv/a:b"): "a path of data may have no",
        line.replace(" TASK=PATH", " --name"): "--name needs a word",
        line.replace(" TASK=PATH", "").replace("efl1.", "", 1): "holds no token",
        over and over.replace(" TASK=PATH", ""): "the token expired",
        stranger and stranger.replace(" TASK=PATH", ""): "knows no such token",
        line.replace(" TASK=PATH", "").replace(f"sh -s -- https://{front_door.address} {pin}",
            f"sh -s -- https://{front_door.address} {other_pin}"): "has another key than this line says",
        line.replace(" TASK=PATH", "").replace(pin, other_pin, 1): "public key",
    }.items():  # fmt: skip
        done = _paste(board, str(wrong))
        assert reason in done.stderr, (wrong, done.stderr)
        assert "Traceback" not in done.stderr
        assert list((board.root / "var/tmp").iterdir()) == []
    assert not (board.root / "opt").exists()
    assert not (board.root / "etc").exists()


@NEEDS_CURL
def test_a_pasted_line_updates_a_board_that_has_joined_and_leaves_it_in_its_fleet(
    board: Board, front_door: Any
) -> None:
    _offer(board, front_door)
    state, units = board.root / "var/lib/edgefl", board.root / "etc/systemd/system/edgefl-device.service.d"
    state.mkdir(parents=True)
    (state / "device.json").write_text("{}")
    units.mkdir(parents=True)
    (units / "20-shards.conf").write_text("its data")
    line = format_setup_command(front_door.token(), front_door.directory)
    assert line is not None
    refused = _paste(board, line.replace("TASK=PATH", "digits=/home/pi/other/data.npz"))
    assert (refused.returncode, "has joined a fleet already" in refused.stderr) == (1, True)
    assert not (board.root / "opt").exists()
    done = _paste(board, line.replace(" TASK=PATH", ""))
    assert done.returncode == 0, done.stderr
    assert "stays in it; edgefl is up to date" in done.stdout
    assert board.runs() == "edgefl, version 1.0"
    assert (units / "20-shards.conf").read_text() == "its data"
    assert not (board.root / "etc/edgefl/join.json").exists()


@NEEDS_CURL
def test_a_setup_that_is_interrupted_leaves_no_token_behind(board: Board, front_door: Any) -> None:
    _offer(board, front_door)
    board.program("curl", f'case "$*" in *payload.tar*) kill -INT "$PPID" ;; esac\nexec {shutil.which("curl")} "$@"')
    line = format_setup_command(front_door.token(), front_door.directory)
    assert line is not None
    _paste(board, line.replace(" TASK=PATH", ""))
    assert list((board.root / "var/tmp").iterdir()) == []
    assert not (board.root / "opt").exists()


@NEEDS_CURL
def test_half_of_a_setup_script_does_nothing(board: Board) -> None:
    script = source("board/setup.sh").read_text()
    half = script[: script.index("write_join_file() {")]
    done = subprocess.run(
        ["sh", "-s", "--", "https://x:1", "sha256//x"], input=half, capture_output=True, text=True, check=False,
        env={**os.environ, "EDGEFL_ROOT": str(board.root)},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
