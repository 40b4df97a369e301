"""The commands, against a real coordinator that makes the tokens."""

import json
import stat
import subprocess
import tarfile
from types import SimpleNamespace

import pytest
import yaml
from made_wheels import make_wheel
from requirements import PARTS, needs

from edgefl import DISTRIBUTION, __version__
from edgefl.cli.operator_file import grant_access
from edgefl.coordinator.directory import init_directory
from edgefl.coordinator.service import Coordinator
from edgefl.coordinator.start_options import StartOptions
from edgefl.core.protocol import JoinToken
from edgefl.device.enrolment.join_file import JoinFile
from edgefl.engine.build import build_run
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
