"""`edgefl flower`."""

import re
import subprocess
import sys
import zipfile

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from flower_apps import PROJECT, build_bundle, write_app

from edgefl.cli.flower import _list_board_files
from edgefl.tasks.registry import find_task_factory


def test_a_check_lists_its_findings_and_its_exit_code_says_whether_the_app_would_run(run, tmp_path):
    fine = run("flower", "check", write_app(tmp_path / "fine"), "--format", "json")
    assert fine.code == 0
    assert {row["verdict"] for row in fine.rows} == {"works"}
    old = {"pyproject.toml": PROJECT.replace("flwr[simulation]>=1.30", "flwr<1.20")}
    failed = run("flower", "check", write_app(tmp_path / "old", old))
    assert failed.code == 50
    assert "fails    dependencies" in failed.out
    assert failed.err.count("\n") == 1
    assert "would not run: dependencies: flwr<1.20" in failed.err
    missing = run("flower", "check", tmp_path / "none")
    assert (missing.code, missing.is_one_line) == (3, True)


def test_what_is_no_public_key_is_not_sent_to_the_coordinator(run, tmp_path):
    key = ec.generate_private_key(ec.SECP384R1())
    for kind in (PrivateFormat.OpenSSH, PrivateFormat.PKCS8):
        (tmp_path / "node").write_bytes(key.private_bytes(Encoding.PEM, kind, NoEncryption()))
        refused = run("flower", "add-node", "node", tmp_path / "node", "--app", "mean-app", "--url", "https://c:1")
        assert (refused.code, refused.is_one_line) == (2, True)
        assert "node: this is the private key" in refused.err
    (tmp_path / "node.pub").write_bytes(b"\xff" * 20_000)
    refused = run("flower", "add-node", "node", tmp_path / "node.pub", "--app", "mean-app", "--url", "https://c:1")
    assert (refused.code, refused.is_one_line) == (2, True)


def test_a_public_key_is_sent_without_its_comment_to_the_job_of_the_app(run, monkeypatch, tmp_path):
    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    public = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    (tmp_path / "node.pub").write_bytes(public + " jürgen@büro\n".encode())
    sent = []

    class Client:
        def post(self, *request):
            sent.append(request)

    monkeypatch.setattr("edgefl.cli.flower.make_client", lambda _url: Client())
    assert run("flower", "add-node", "server-room", tmp_path / "node.pub", "--app", "Mean-App").code == 0
    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    ((path, body),) = sent
    assert path.endswith("supernodes/server-room")
    assert body == {"key": pem, "jobs": ["flower-mean-app"], "groups": []}


def test_a_packed_app_can_be_signed_for_boards_and_its_class_is_found_by_name(run, monkeypatch, tmp_path):
    app = write_app(tmp_path / "app", {"data.npz": "not sent"})
    packed = run("flower", "pack", app, "--out", tmp_path / "dist")
    assert packed.code == 0, packed.err
    wheel = tmp_path / "dist" / "edgefl_app_mean_app-1.2.0-py3-none-any.whl"
    assert packed.out.strip() == str(wheel)
    first = wheel.read_bytes()
    run("flower", "pack", app, "--out", tmp_path / "dist")
    assert wheel.read_bytes() == first
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith("data.npz")]
        metadata = archive.read("edgefl_app_mean_app-1.2.0.dist-info/METADATA").decode()
    assert "Requires-Dist: flwr>=1.30\n" in metadata
    assert run("signing", "init", "--keys", tmp_path / "keys", "--no-passphrase").code == 0
    options = ("--kind", "pack", "--version", "1.2.0", "--keys", tmp_path / "keys", "--out", tmp_path / "app.bundle")
    signed = run("signing", "sign", wheel, *options)
    assert signed.code == 0, signed.err
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setitem(sys.modules, "edgefl_app_mean_app", None)  # so that what is imported here is gone afterwards
    del sys.modules["edgefl_app_mean_app"]
    job = find_task_factory("flower-mean-app")()
    assert job.run_config["num-server-rounds"] == 3
    assert job.app.server == "mean_app.server_app:app"


def test_a_bundle_is_checked_and_packed_as_its_folder(run, tmp_path):
    folder = write_app(tmp_path / "app")
    bundle = build_bundle(folder, tmp_path / "bundle")
    (of_folder, of_bundle) = (run("flower", "check", app, "--format", "json") for app in (folder, bundle))
    assert (of_bundle.code, of_bundle.rows[1:]) == (0, of_folder.rows[1:])
    wheels = []
    for app in (folder, bundle):
        packed = run("flower", "pack", app, "--out", tmp_path / app.name.replace(".", "-"))
        assert packed.code == 0, packed.err
        with zipfile.ZipFile(packed.out.strip()) as archive:
            wheels.append({name: archive.read(name) for name in archive.namelist()})
    assert wheels[0] == wheels[1]
    (tmp_path / "text.fab").write_text("text")
    refused = run("run", "flower-app", tmp_path / "text.fab")
    assert (refused.code, refused.is_one_line) == (3, True)
    assert "text.fab is no bundle of a Flower app" in refused.err


def test_a_run_of_an_app_that_does_not_have_such_a_value_is_refused_before_it_is_sent(refused, tmp_path):
    app = write_app(tmp_path / "app")
    refused(
        ["run", "flower-app", app, "--run-config", "rounds=3"],
        3,
        "the app mean-app has no 'rounds'; it has model.size",
    )


def test_a_demo_says_what_is_missing_before_it_starts_anything(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    app, data = write_app(tmp_path / "app"), tmp_path / "data"
    data.mkdir()
    for name in ("b", ".hidden", "a"):
        (data / name).mkdir()
    for words, code, told in (
        (["--data", data], 4, "must have an entry for each of 3 boards, got 2"),
        (["--data", tmp_path / "none"], 4, "none cannot be read: No such file"),
        (["--run-config", "nothing=1"], 3, "has no 'nothing'"),
        (["--out", data], 2, "is not of an earlier demo"),
        (["--devices", "2", "--data", data, "--out", data], 2, "--data lies in"),
        (["--out", tmp_path], 2, "the app lies in"),
    ):
        refused = run("flower", "demo", app, *words)
        assert (refused.code, refused.is_one_line) == (code, True), refused.err
        assert told in refused.err
    assert not (tmp_path / "flower-demo").exists()
    assert [path.name for path in _list_board_files(data, 2)] == ["a", "b"]


@pytest.mark.extended
@pytest.mark.timeout(300)
def test_a_demo_runs_an_app_in_one_command(tmp_path):
    app = write_app(tmp_path / "app")
    for name in "ab":
        (tmp_path / "data" / name).mkdir(parents=True)
    words = [sys.executable, "-m", "edgefl.cli.main", "flower", "demo", str(app), "--devices", "2"]
    words += ["--data", str(tmp_path / "data"), "--run-config", "num-server-rounds=2"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"^ +2 +4 ", done.stdout, re.MULTILINE), done.stdout
    with zipfile.ZipFile(tmp_path / "flower-demo" / "result.zip") as result:
        assert {"server-app.log", "final_model.npz"} <= {*result.namelist()}
