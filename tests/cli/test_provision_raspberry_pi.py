"""The command, against a real coordinator that makes the tokens."""

from __future__ import annotations

import json
import shutil
import sqlite3
import stat
import subprocess
import tarfile
from collections.abc import Callable

import pytest
import yaml
from made_wheels import make_wheel

from edgefl import __version__
from edgefl.assembly import assemble
from edgefl.cli.main import main
from edgefl.cli.operator import grant_access
from edgefl.coordinator.directory import init_directory
from edgefl.coordinator.service import Coordinator
from edgefl.coordinator.start_options import StartOptions
from edgefl.device.joining.join_file import JoinFile
from edgefl.local_fleet import free_port
from edgefl.protocol import JoinToken
from edgefl.storage.store import Store

TOKEN = JoinToken(ca_fingerprint="a" * 64, token_id="t1", secret="s3cret", fleet="lab", addresses=("pc:8000",)).text()
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("EDGEFL_JOIN_TOKEN", raising=False)

    wheels = make_wheel(tmp_path / "wheels", "edgefl", __version__, {}).parent

    def call(*arguments):
        capsys.readouterr()
        if "--wheels" not in arguments:
            arguments = (*arguments, "--wheels", wheels)
        with pytest.raises(SystemExit) as ended:
            main(["-q", "provision", "raspberry-pi", *map(str, arguments)])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


@pytest.fixture
def card(tmp_path):
    root = tmp_path / "bootfs"
    root.mkdir()
    (root / "config.txt").write_text("arm_64bit=1\n")
    (root / "cmdline.txt").write_text("root=x\n")
    (root / "user-data").write_text("#cloud-config\n")
    return root


@pytest.fixture
def coordinator(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    directory = init_directory(tmp_path / "coordinator", hosts=["127.0.0.1"], fleet="lab", port=free_port())
    directory, _ = grant_access(directory)
    options = StartOptions(host="127.0.0.1", port=directory.port, broker_port=free_port(), broker="embedded")
    with Coordinator(directory, options, assemble) as running:
        yield running


def tree(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def num_tokens(root):
    with sqlite3.connect(f"file:{root}/coordinator/edgefl.db?mode=ro", uri=True) as database:
        return int(database.execute("SELECT count(*) FROM tokens").fetchone()[0])


def test_a_card_gets_its_files_and_the_token_only_in_the_join_file(run, card):
    code, out, err = run("--boot", card, "--name", "pi-01", "--token", TOKEN, "--shard", "digits=/srv/d.npz")
    assert code == 0, err
    assert "pi-01: trixie (it has cloud-init's files)" in out
    file = JoinFile.parse((card / "edgefl/join.json").read_text())
    assert (file.name, file.token, file.shards) == ("pi-01", TOKEN, {"digits": "/srv/d.npz"})
    assert [name for name, body in tree(card).items() if TOKEN.encode() in body] == ["edgefl/join.json"]
    assert TOKEN not in out + err
    assert {"user-data", "network-config", "meta-data", "edgefl/firstboot.sh"} <= set(tree(card))
    assert (card / "user-data.before-edgefl").read_text() == "#cloud-config\n"


def test_a_dry_run_shows_the_difference_and_writes_and_spends_nothing(run, card, coordinator, tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEFL_WIFI_PASSWORD", "topsecretpass")
    before, tokens = tree(card), num_tokens(tmp_path)
    code, out, err = run("--boot", card, "--name", "pi-01", "--wifi-ssid", "lab", "--wifi-country", "DE", "--dry-run")
    assert code == 0, err
    assert "+++ b/user-data" in out
    assert "+hostname: pi-01" in out
    assert "efl1.(secret)" in out
    assert "password: (secret)" in out
    assert "topsecretpass" not in out
    assert (tree(card), num_tokens(tmp_path)) == (before, tokens)


def test_a_token_is_made_by_the_coordinator_for_one_board(run, card, coordinator):
    code, out, err = run("--boot", card, "--name", "pi-01", "--ttl", "2h", "--group", "roof", "--role", "evaluator")
    assert code == 0, err
    assert "its token lets one board in until 20" in out
    token = JoinToken.parse(json.loads((card / "edgefl/join.json").read_text())["token"])
    assert token.fleet == "lab"


WIFI = ["--boot", "{card}", "--name", "pi-01", "--wifi-ssid", "lab"]


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        (["--boot", "{card}"], 2, "needs a name"),
        (["--boot", "{card}", "--name", "Two Words"], 2, "device name"),
        (["--name", "pi-01"], 2, "say where"),
        (["--boot", "{empty}", "--name", "pi-01"], 3, "no boot partition"),
        (["--boot", "{card}", "--name", "pi-01", "--shard", "digits"], 2, "TASK=PATH"),
        (["--boot", "{card}", "--name", "pi-01", "--shard", "digits=d.npz"], 2, "absolute path"),
        (["--boot", "{card}", "--name", "pi-01", "--shard", "a=/d", "--shard", "a=/e"], 2, "names a twice"),
        (["--boot", "{card}", "--name", "pi-01", "--ssh-key", "{binary}"], 3, "is no text"),
        (["--boot", "{card}", "--name", "pi-01", "--token-file", "{binary}"], 3, "is no text"),
        (["--boot", "{card}", "--name", "pi-01", "--token-file", "{new}"], 3, "cannot be read"),
        (["--boot", "{card}", "--name", "pi-01", "--wheels", "{empty}"], 3, "one wheel of edgefl"),
        ([*WIFI, "--wifi-country", "DE"], 2, "password is missing"),
        ([*WIFI, "--wifi-country", "DE", "--wifi-password", "x"], 2, "8 to 63"),
        ([*WIFI, "--wifi-open"], 2, "--wifi-country DE"),
        (["--boot", "{card}", "--name", "pi-01", "--wifi-country", "DE"], 2, "--wifi-ssid NAME"),
        (
            [
                *WIFI,
                "--wifi-country",
                "DE",
                "--wifi-open",
                "--ip",
                "10.0.0.7/24",
                "--gateway",
                "10.0.0.1",
                "--os",
                "preseed",
            ],
            2,
            "no fixed address of a Wi-Fi",
        ),
        (["--boot", "{card}", "--name", "pi-01", "--ip", "10.0.0.1"], 2, "prefix and a gateway"),
        (["--boot", "{card}", "--name", "pi-01", "--address", "a b"], 2, "HOST:PORT"),
        (["--boot", "{card}", "--name", "pi-01", "--token", "efl1.x"], 31, "damaged"),
        (["--count", "2", "--name", "pi-{{}}", "--boot", "{card}"], 2, "--out DIR"),
        (["--count", "2", "--name", "pi", "--out", "{new}"], 2, "one place for the number"),
        (["--count", "2", "--name", "pi-{{}}", "--out", "{new}", "--token", TOKEN], 2, "a token each"),
        (["--count", "2", "--name", "pi-{{}}", "--out", "{new}", "--os", "bookworm"], 2, "--image"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_writes_nothing(run, card, tmp_path, given, code, words):
    (tmp_path / "empty").mkdir()
    before = tree(card)
    places = {"card": card, "empty": tmp_path / "empty", "new": tmp_path / "new"}
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    places["binary"] = tmp_path / "binary"
    token = [] if {"--token", "--count", "--token-file"} & set(given) else ["--token", TOKEN]
    ended, out, err = run(*(word.format(**places) if "efl1" not in word else word for word in given), *token)
    assert (ended, out, err.count("\n")) == (code, "", 1), err
    assert words in err
    assert tree(card) == before


@pytest.mark.parametrize("keeps", [True, False])
def test_wheels_stay_on_a_card_only_when_that_is_said(run, card, keeps):
    words = ["--keep-wheels"] if keeps else []
    assert run("--boot", card, "--name", "pi-01", "--token", TOKEN, *words)[0] == 0
    assert (card / "edgefl/keep-wheels").exists() is keeps


def test_a_board_that_would_ask_an_index_for_edgefl_is_refused(card, capsys):
    before = tree(card)
    with pytest.raises(SystemExit) as ended:
        main(["-q", "provision", "raspberry-pi", "--boot", str(card), "--name", "pi-01", "--token", TOKEN])
    assert ended.value.code == 2
    assert "another package of this name: --wheels FOLDER" in capsys.readouterr().err
    assert tree(card) == before


def test_a_refusal_makes_no_token(run, card, coordinator, tmp_path):
    tokens = num_tokens(tmp_path)
    (card / "user-data").write_text("#!/bin/sh\nreboot\n")
    assert run("--boot", card, "--name", "pi-01")[0] == 3
    assert num_tokens(tmp_path) == tokens


def test_many_boards_get_a_folder_a_name_and_a_token_each_and_a_sheet(run, coordinator, tmp_path):
    out = tmp_path / "cards"
    code, _, err = run("--count", "3", "--name", "pi-{:02d}", "--out", out, "--first", "8")
    assert code == 0, err
    names = ["pi-08", "pi-09", "pi-10"]
    assert sorted(path.name for path in out.iterdir()) == [*names, "sheet.html"]
    files = [JoinFile.parse((out / name / "edgefl/join.json").read_text()) for name in names]
    assert [file.name for file in files] == names
    assert len({file.token for file in files}) == 3
    assert [yaml.safe_load((out / name / "user-data").read_text())["hostname"] for name in names] == names
    sheet = (out / "sheet.html").read_text()
    assert all(f"<h2>{name}</h2>" in sheet for name in names)
    assert not any(file.token in sheet for file in files)
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    assert run("--count", "3", "--name", "pi-{:02d}", "--out", out, "--first", "8")[0] == 2


def test_many_boards_get_no_folder_that_others_can_look_into(run, coordinator, tmp_path):
    out, tokens = tmp_path / "cards", num_tokens(tmp_path)
    out.mkdir()
    out.chmod(0o750)
    code, _, err = run("--count", "2", "--name", "pi-{}", "--out", out)
    assert (code, err.count("\n")) == (2, 1)
    assert f"(mode 750), and whoever has a card's files can join in its place: chmod 700 {out}" in err
    assert (list(out.iterdir()), num_tokens(tmp_path)) == ([], tokens)
    out.chmod(0o700)
    assert run("--count", "2", "--name", "pi-{}", "--out", out)[0] == 0


def test_an_image_s_copy_is_written_for_one_board_and_for_many(run, card, coordinator, tmp_path):
    if shutil.which("mcopy") is None or shutil.which("mkfs.vfat") is None:
        pytest.skip("mtools or dosfstools is not installed")
    image = tmp_path / "raspios.img"
    subprocess.run(["mkfs.vfat", "-C", image, "20480"], check=True, capture_output=True)
    subprocess.run(["mcopy", "-i", image, *card.iterdir(), "::"], check=True)
    before = image.read_bytes()
    code, _, err = run("--image", image, "--out", tmp_path / "pi-01.img", "--name", "pi-01", "--os", "bookworm")
    assert code == 0, err
    shown = subprocess.run(["mtype", "-i", tmp_path / "pi-01.img", "::cmdline.txt"], capture_output=True, check=True)
    assert b"systemd.run=/boot/firmware/firstrun.sh" in shown.stdout
    assert stat.S_IMODE((tmp_path / "pi-01.img").stat().st_mode) == 0o600
    code, _, err = run("--image", image, "--count", "2", "--name", "pi-{}", "--out", tmp_path / "images")
    assert code == 0, err
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == ["pi-1.img", "pi-2.img", "sheet.html"]
    assert image.read_bytes() == before
    code, told, err = run("--image", image, "--name", "pi-01", "--dry-run")
    assert (code, "+++ b/meta-data" in told) == (0, True), err


def test_a_jetson_s_overlay_holds_a_join_file(run, coordinator, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["-q", "provision", "jetson", "--name", "orin-1", "--out", str(tmp_path / "overlay.tar.gz"),
              "--wheels", str(tmp_path / "wheels")])  # fmt: skip
    assert not ended.value.code
    assert "numeric-owner" in capsys.readouterr().out
    with tarfile.open(tmp_path / "overlay.tar.gz") as tar:
        member = tar.extractfile("var/lib/edgefl-card/edgefl/join.json")
        assert member is not None
        assert JoinFile.parse(member.read().decode()).name == "orin-1"


def test_the_store_s_tokens_let_one_board_in(run, card, coordinator, tmp_path):
    run("--boot", card, "--name", "pi-01")
    with Store.open(tmp_path / "coordinator/edgefl.db") as store:
        token = JoinToken.parse(json.loads((card / "edgefl/join.json").read_text())["token"])
        assert any(each.token_id == token.token_id and each.uses_left == 1 for each in store.tokens())
