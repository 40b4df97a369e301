"""The commands of `edgefl provision`, cards against a real coordinator that makes the tokens."""

import json
import os
import stat
import subprocess
import sys
import tarfile
from types import SimpleNamespace

import pytest
import yaml
from made_wheels import make_wheel
from requirements import PARTS, needs

from edgefl import DISTRIBUTION, __version__
from edgefl.cli.fleet.coordinator import grant_access
from edgefl.coordinator.directory import StartOptions, init_directory
from edgefl.coordinator.service import Coordinator
from edgefl.core.errors import NotAllowedError
from edgefl.core.protocol import JoinToken
from edgefl.device.enrolment.join_file import JoinFile
from edgefl.engine.assembly.build import build_run
from edgefl.provision import systemd_units as units
from edgefl.simulation.local_fleet import find_free_port
from edgefl.storage.store import Store

TOKEN = JoinToken(ca_fingerprint="a" * 64, token_id="t1", secret="s3cret", fleet="lab", addresses=("pc:8000",)).text()


@pytest.fixture
def wheels(tmp_path):
    return make_wheel(tmp_path / "wheels", DISTRIBUTION, __version__, {}).parent


@pytest.fixture
def provision(run, wheels):
    def call(*arguments):
        words = arguments if "--wheels" in arguments else (*arguments, "--wheels", wheels)
        return run("provision", "raspberry-pi", *words)

    return call


@pytest.fixture
def card(tmp_path):
    root = tmp_path / "bootfs"
    root.mkdir()
    (root / "config.txt").write_text("arm_64bit=1\n")
    (root / "cmdline.txt").write_text("root=x\n")
    (root / "user-data").write_text("#cloud-config\n")
    return root


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory):
    """A coordinator whose operator's home is `config`, and the tokens that it has made."""
    root = tmp_path_factory.mktemp("fleet")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CONFIG_HOME", str(root / "config"))
        directory = init_directory(root / "coordinator", hosts=["127.0.0.1"], fleet="lab", port=find_free_port())
        directory, _ = grant_access(directory)

    def tokens():
        with Store.open(directory.database, read_only=True) as store:
            return {each.token_id: each for each in store.list_tokens()}

    options = StartOptions(host="127.0.0.1", port=directory.port, broker_port=find_free_port())
    with Coordinator(directory, options, build_run):
        yield SimpleNamespace(config=root / "config", tokens=tokens)


@pytest.fixture
def operator(provision, coordinator, monkeypatch):
    """Provisions as the coordinator's operator."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(coordinator.config))
    return provision


def tree(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def join_file(folder):
    return JoinFile.parse((folder / "edgefl/join.json").read_text())


def test_a_card_gets_its_files_and_the_token_only_in_the_join_file(provision, card):
    ran = provision("--boot", card, "--name", "pi-01", "--token", TOKEN, "--shard", "digits=/srv/d.npz")
    assert ran.code == 0, ran.err
    assert "trixie" in ran.out
    file = join_file(card)
    assert (file.name, file.token, file.shards) == ("pi-01", TOKEN, {"digits": "/srv/d.npz"})
    assert [name for name, body in tree(card).items() if TOKEN.encode() in body] == ["edgefl/join.json"]
    assert TOKEN not in ran.out + ran.err
    assert {"user-data", "network-config", "meta-data", "edgefl/firstboot.sh"} <= set(tree(card))
    assert (card / "user-data.before-edgefl").read_text() == "#cloud-config\n"
    assert not (card / "edgefl/keep-wheels").exists()


def test_wheels_stay_on_a_card_when_that_is_said(provision, card):
    assert provision("--boot", card, "--name", "pi-01", "--token", TOKEN, "--keep-wheels").code == 0
    assert (card / "edgefl/keep-wheels").exists()


def test_a_dry_run_shows_the_difference_and_writes_and_spends_nothing(operator, card, coordinator, monkeypatch):
    monkeypatch.setenv("EDGEFL_WIFI_PASSWORD", "topsecretpass")
    before = tree(card), coordinator.tokens()
    ran = operator("--boot", card, "--name", "pi-01", "--wifi-ssid", "lab", "--wifi-country", "DE", "--dry-run")
    assert ran.code == 0, ran.err
    for line in ("+++ b/user-data", "+hostname: pi-01", "efl1.(secret)", "password: (secret)"):
        assert line in ran.out
    assert "topsecretpass" not in ran.out
    assert (tree(card), coordinator.tokens()) == before


def test_a_token_is_made_by_the_coordinator_for_one_board_and_none_for_a_card_that_is_refused(
    operator, card, coordinator
):
    before, plain = coordinator.tokens(), (card / "user-data").read_text()
    (card / "user-data").write_text("#!/bin/sh\nreboot\n")
    assert operator("--boot", card, "--name", "pi-01").code == 3
    assert coordinator.tokens() == before
    (card / "user-data").write_text(plain)
    ran = operator("--boot", card, "--name", "pi-01", "--ttl", "2h", "--group", "roof", "--role", "evaluator")
    assert ran.code == 0, ran.err
    record = coordinator.tokens()[JoinToken.parse(join_file(card).token).token_id]
    assert (record.uses_left, record.groups, record.expires_at - record.created_at) == (1, ("roof",), 7200)


CARD = "--boot {card} --name pi-01"
WIFI = f"{CARD} --wifi-ssid lab"
MANY = "--count 2 --out {new}"


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        ("--boot {card}", 2, "needs a name"),
        ("--name pi-01", 2, "say where"),
        ("--boot {empty} --name pi-01", 3, "no boot partition"),
        (f"{CARD} --shard digits", 2, "TASK=PATH"),
        (f"{CARD} --shard digits=d.npz", 2, "absolute path"),
        (f"{CARD} --shard a=/d --shard a=/e", 2, "names a twice"),
        (f"{CARD} --ssh-key {{binary}}", 3, "is no text"),
        (f"{CARD} --token-file {{binary}}", 3, "is no text"),
        (f"{CARD} --token-file {{new}}", 3, "cannot be read"),
        (f"{CARD} --wheels {{empty}}", 3, "one wheel of edgefl-fleet"),
        (f"{WIFI} --wifi-country DE", 2, "password is missing"),
        (f"{WIFI} --wifi-country DE --wifi-password x", 2, "8 to 63"),
        (f"{WIFI} --wifi-open", 2, "--wifi-country DE"),
        (f"{CARD} --wifi-country DE", 2, "--wifi-ssid NAME"),
        (
            f"{WIFI} --wifi-country DE --wifi-open --ip 10.0.0.7/24 --gateway 10.0.0.1 --os preseed", 2,
            "no fixed address of a Wi-Fi",
        ),
        (f"{CARD} --ip 10.0.0.1", 2, "prefix and a gateway"),
        (f"{CARD} --token efl1.x", 31, "damaged"),
        ("--count 2 --name pi-{{}} --boot {card}", 2, "--out DIR"),
        (f"{MANY} --name pi", 2, "one place for the number"),
        (f"{MANY} --name pi-{{{{}}}} --token {TOKEN}", 2, "a token each"),
        (f"{MANY} --name pi-{{{{}}}} --os bookworm", 2, "--image"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_one_line_and_writes_nothing(provision, card, tmp_path, given, code, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    before, places = tree(card), {name: tmp_path / name for name in ("empty", "binary", "new")}
    arguments = given.format(card=card, **places).split()
    token = [] if {"--token", "--count", "--token-file"} & set(arguments) else ["--token", TOKEN]
    ran = provision(*arguments, *token)
    assert (ran.code, ran.is_one_line, words in ran.err) == (code, True, True), ran.err
    assert tree(card) == before


def test_a_name_or_address_of_two_words_and_a_board_that_would_ask_an_index_are_refused(refused, card, wheels):
    before, words = tree(card), ["provision", "raspberry-pi", "--boot", card, "--token", TOKEN]
    refused([*words, "--name", "Two Words", "--wheels", wheels], 2, "device name")
    refused([*words, "--name", "pi-01", "--address", "a b", "--wheels", wheels], 2, "HOST:PORT")
    refused([*words, "--name", "pi-01"], 2, "--wheels FOLDER")
    assert tree(card) == before


def test_many_boards_get_a_private_folder_a_name_and_a_token_each_and_a_sheet(operator, coordinator, tmp_path):
    out, before = tmp_path / "cards", coordinator.tokens()
    words = ("--count", "3", "--name", "pi-{:02d}", "--out", out, "--first", "8")
    out.mkdir()
    out.chmod(0o750)
    ran = operator(*words)
    assert (ran.code, ran.is_one_line, f"chmod 700 {out}" in ran.err) == (2, True, True)
    assert (list(out.iterdir()), coordinator.tokens()) == ([], before)
    out.rmdir()
    assert operator(*words).code == 0
    names = ["pi-08", "pi-09", "pi-10"]
    assert sorted(path.name for path in out.iterdir()) == [*names, "sheet.html"]
    files = [join_file(out / name) for name in names]
    assert [file.name for file in files] == names
    assert len({file.token for file in files}) == 3
    assert [yaml.safe_load((out / name / "user-data").read_text())["hostname"] for name in names] == names
    sheet = (out / "sheet.html").read_text()
    assert all(f"<h2>{name}</h2>" in sheet for name in names)
    assert not any(file.token in sheet for file in files)
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    assert operator(*words).code == 2


@needs("mtools", "dosfstools")
def test_an_image_s_copy_is_written_for_one_board_and_for_many(operator, card, tmp_path):
    image = tmp_path / "raspios.img"
    subprocess.run([PARTS["dosfstools"].path(), "-C", image, "20480"], check=True, capture_output=True)
    subprocess.run(["mcopy", "-i", image, *card.iterdir(), "::"], check=True)
    before = image.read_bytes()
    assert (
        operator("--image", image, "--out", tmp_path / "pi-01.img", "--name", "pi-01", "--os", "bookworm").code == 0
    )
    shown = subprocess.run(["mtype", "-i", tmp_path / "pi-01.img", "::cmdline.txt"], capture_output=True, check=True)
    assert b"systemd.run=/boot/firmware/firstrun.sh" in shown.stdout
    assert stat.S_IMODE((tmp_path / "pi-01.img").stat().st_mode) == 0o600
    assert operator("--image", image, "--count", "2", "--name", "pi-{}", "--out", tmp_path / "images").code == 0
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == ["pi-1.img", "pi-2.img", "sheet.html"]
    assert image.read_bytes() == before
    assert "+++ b/meta-data" in operator("--image", image, "--name", "pi-01", "--dry-run").out


def test_a_jetson_s_overlay_holds_a_join_file(operator, run, wheels, tmp_path):
    overlay = tmp_path / "overlay.tar.gz"
    assert run("provision", "jetson", "--name", "orin-1", "--out", overlay, "--wheels", wheels).code == 0
    with tarfile.open(overlay) as tar:
        file = tar.extractfile("var/lib/edgefl-card/edgefl/join.json").read().decode()
    assert json.loads(file)["name"] == "orin-1"


@pytest.fixture
def systemd(run):
    def call(*words):
        ran = run("provision", "systemd", "--python", units.DEFAULT_PYTHON, *words)
        assert ran.code == 0, ran.err
        return ran.out

    return call


def test_a_devices_units_have_the_paths_of_this_installation_and_show_its_data(systemd, tmp_path):
    told = systemd("--out", tmp_path, "--python", "/opt/mine/bin/python", "--shard", "digits=/home/pi/digits.npz")
    device = (tmp_path / "edgefl-device.service").read_text()
    assert "ExecStart=/opt/mine/bin/python -m edgefl device start" in device
    assert units.DEFAULT_PYTHON not in "".join(path.read_text() for path in tmp_path.rglob("*.*") if path.is_file())
    assert "BindReadOnlyPaths=-/home/pi\n" in (tmp_path / "edgefl-join.service.d" / "20-shards.conf").read_text()
    assert "systemctl enable --now edgefl-join.service edgefl-device.service" in told
    assert "join.json" in told
    assert systemd("--gpu").count("# /etc/systemd/system/") == 3, "without --out the units are printed"


def test_a_collector_has_a_unit_beside_those_of_its_device(systemd, run, tmp_path):
    told = systemd("--collect", "--out", tmp_path, "--python", "/opt/mine/bin/python")
    unit = (tmp_path / "edgefl-collect.service").read_text()
    assert "ExecStart=/opt/mine/bin/python -m edgefl device collect /etc/edgefl/collect.toml" in unit
    assert "InaccessiblePaths=-/var/lib/edgefl\n" in unit, "the board's key"
    assert "enable --now edgefl-join.service edgefl-device.service edgefl-collect.service" in told
    assert "are for devices" in run("provision", "systemd", "--coordinator", "--collect").err


def test_a_server_of_the_deployed_model_has_a_unit_that_reaches_loopback_alone(systemd, run, tmp_path):
    told = systemd("--serve", "--out", tmp_path, "--python", "/opt/mine/bin/python")
    unit = (tmp_path / "edgefl-serve.service").read_text()
    assert "ExecStart=/opt/mine/bin/python -m edgefl device serve --state %S/edgefl\n" in unit
    assert "IPAddressDeny=any\nIPAddressAllow=localhost\n" in unit
    assert "enable --now edgefl-join.service edgefl-device.service edgefl-serve.service" in told
    assert "are for devices" in run("provision", "systemd", "--coordinator", "--serve").err


def test_a_coordinator_with_its_broker_apart_is_written_once(systemd, tmp_path):
    words = ("--coordinator", "--broker", "--out", tmp_path)
    assert "wrote" in systemd(*words)
    names = {"edgefl-broker.service", "edgefl-coordinator.service", "edgefl-coordinator.service.d/10-broker.conf"}
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == names
    conf = tmp_path / "edgefl-coordinator.service.d" / "10-broker.conf"
    assert "--broker mqtts://127.0.0.1:8883" in conf.read_text()
    assert "wrote" not in systemd(*words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--coordinator --gpu", "are for devices"),
        ("--broker", "is for a coordinator"),
        ("--python /home/pi/venv/bin/python", "where the units' sandbox hides it"),
        ("--python python3", "must be absolute"),
        ("--shard digits", "must be TASK=PATH, got 'digits'"),
    ],
)
def test_what_makes_no_sense_is_told(refused, words, told):
    refused(["provision", "systemd", "--python", units.DEFAULT_PYTHON, *words.split()], 2, told)


@needs("root")  # it puts another folder over /etc for a while
def test_install_puts_units_and_user_in_place_and_enables_them(tmp_path):
    for name in ("upper", "work", "bin"):
        (tmp_path / name).mkdir()
    calls = tmp_path / "calls"
    (tmp_path / "bin" / "systemctl").write_text(f'#!/bin/sh\necho "$@" >>{calls}\n')
    (tmp_path / "bin" / "systemctl").chmod(0o755)
    overlay = f"lowerdir=/etc,upperdir={tmp_path / 'upper'},workdir={tmp_path / 'work'}"
    script = (
        f"mount -t overlay overlay -o {overlay} /etc && for i in 1 2; do "
        f"{sys.executable} -m edgefl provision systemd --python {units.DEFAULT_PYTHON} --coordinator --install "
        "|| exit; done; id edgefl-coordinator"
    )
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    command = ["unshare", "--mount", "sh", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "uid=" in done.stdout
    assert done.stdout.count("wrote ") == 1
    assert calls.read_text().splitlines() == ["daemon-reload", "enable --now edgefl-coordinator.service"] * 2
    assert (tmp_path / "upper" / "systemd" / "system" / "edgefl-coordinator.service").exists()


def test_install_needs_root(monkeypatch):
    monkeypatch.setattr(units.os, "geteuid", lambda: 1000)
    with pytest.raises(NotAllowedError, match="by root"):
        units.install_units(units.SystemdInstallation())
