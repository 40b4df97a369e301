"""`edgefl signing`, and `edgefl device trust` on the board."""

import shutil

import pytest
from click.testing import CliRunner
from onnx_graphs import constant_model
from wheel_files import make_wheel

from edgefl.cli.main import edgefl
from edgefl.core.errors import ConfigError
from edgefl.system.bundles.archive import read_bundle


@pytest.fixture
def keys(run, tmp_path):
    assert run("signing", "init", "--keys", tmp_path / "keys", "--no-passphrase").code == 0
    return tmp_path / "keys"


@pytest.fixture
def wheel(tmp_path):
    return make_wheel(tmp_path / "w", "gulls", "1.0", {"gulls.py": ""})


@pytest.fixture
def sign(keys, tmp_path):
    """The words of a signing with these keys."""

    def words(*wheels, kind="pack", version="1.0", out="a.bundle"):
        return ["signing", "sign", *wheels, "--kind", kind, "--version", version, "--out", tmp_path / out,
                "--keys", keys]  # fmt: skip

    return words


@pytest.fixture
def signed(run, sign, wheel, tmp_path):
    assert run(*sign(wheel)).out.startswith("pack gulls 1.0, 1 wheels, signed by ")
    return tmp_path / "a.bundle"


def test_a_bundle_is_signed_trusted_and_shown_also_when_nobody_here_trusts_it(run, signed, keys, tmp_path):
    (tmp_path / "etc").mkdir()
    trusted = tmp_path / "etc" / "signers"
    told = run("device", "trust", keys / "signing.pub.pem", "--signers", trusted).out
    (row,) = run("signing", "show", signed, "--signers", trusted, "--format", "json").rows
    assert f"takes what key {row['key']} signs" in told
    assert (row["kind"], row["name"], row["version"], row["trusted"]) == ("pack", "gulls", "1.0", True)
    assert [wheel["file"] for wheel in row["wheels"]] == ["gulls-1.0-py3-none-any.whl"]
    for words in (("--signers", trusted), ("--keys", keys)):
        assert "gulls-1.0-py3-none-any.whl" in run("signing", "show", signed, *words).out
    stranger = run("signing", "show", signed, "--signers", tmp_path / "none")
    assert (stranger.code, "gulls" in stranger.out) == (51, True)


def test_a_passphrase_is_asked_for_and_needed(run, wheel, tmp_path, monkeypatch):
    def typed(*words, text):
        return CliRunner().invoke(edgefl, [str(word) for word in words], input=text)

    keys = ("--keys", tmp_path / "keys")
    sign = ("signing", "sign", wheel, "--kind", "pack", "--version", "1.0", "--out", tmp_path / "b", *keys)
    assert typed("signing", "init", *keys, text="battery\nbattery\n").exit_code == 0
    assert isinstance(typed(*sign, text="wrong\n").exception, ConfigError)
    assert not (tmp_path / "b").exists()
    monkeypatch.setenv("EDGEFL_SIGNING_PASSPHRASE", "battery")
    assert run(*sign).code == 0


def test_what_a_board_would_refuse_is_not_signed(refused, sign, wheel, tmp_path):
    evil = make_wheel(tmp_path / "e", "gulls", "1.0", {"../x": ""})
    for file, version, line in (
        (evil, "1.0", "lies outside"),
        (wheel, "2.0", "must hold a wheel of gulls in this version"),
        (shutil.copyfile(evil, tmp_path / "gulls-1.0.zip"), "1.0", "only wheels are signed"),
        (shutil.copyfile(wheel, wheel.with_name(f"gulls-1.0-py3-none-{'.'.join(['manylinux2014_x86_64'] * 5)}.whl")),
         "1.0", "has a name of 127 characters, at most 100 fit"),
    ):  # fmt: skip
        refused(sign(file, version=version), 51, line)
    assert not (tmp_path / "a.bundle").exists()


def test_a_removal_is_signed_without_wheels_and_needs_the_name_of_its_pack(run, refused, sign, keys, wheel, tmp_path):
    words = sign(kind="removal")
    assert run(*words, "--name", "gulls").out.startswith("removal gulls 1.0, 0 wheels, signed by ")
    assert "removal" in run("signing", "show", tmp_path / "a.bundle", "--keys", keys).out
    assert run(*words).code == 2
    assert run(*sign(wheel, kind="removal"), "--name", "gulls").code == 51


def test_a_private_key_is_not_trusted_by_mistake_and_a_board_without_slots_is_not_updated(refused, keys, tmp_path):
    refused(["device", "trust", keys / "signing.pem", "--signers", tmp_path / "s"], 3, "signing.pem")
    assert not (tmp_path / "s").exists()
    update = ["device", "apply-update", "--root", tmp_path, "--state", tmp_path, "true"]
    refused(update, 3, "a board that was installed by hand is updated by hand")


def test_signers_are_listed_replaced_and_sign_together(run, refused, sign, keys, tmp_path):
    other, trusted = tmp_path / "other", tmp_path / "etc" / "signers"
    trusted.parent.mkdir()
    run("signing", "init", "--keys", other, "--no-passphrase")
    run("device", "trust", keys / "signing.pub.pem", "--signers", trusted)
    refused(sign(kind="signers"), 2, "make one: edgefl signing signers")
    both = ("signing", "signers", keys / "signing.pub.pem", other / "signing.pub.pem", "--threshold", 2)
    assert "list 1, 2 of " in run(*both, "--keys", keys).out
    file = keys / "signers.json"
    assert "list 1 has your signature, too" in run("signing", "cosign", file, "--keys", other).out
    assert run(*sign(kind="signers")).out.startswith("signers edgefl-signers 1, 0 wheels, signed by ")
    show = ("signing", "show", tmp_path / "a.bundle", "--signers", trusted, "--format", "json")
    assert run(*show).code == 51
    assert run("signing", "cosign", tmp_path / "a.bundle", "--keys", other).code == 0
    (row,) = run(*show).rows
    assert (row["trusted"], len(row["signers"].split(", "))) == (True, 2)
    assert row["expires"] - row["serial"] == 365 * 86400
    assert "list 2, 2 of" in run("signing", "signers", "--days", 30, "--keys", keys).out, "renewed"
    run("signing", "init", "--keys", tmp_path / "third", "--no-passphrase")
    shutil.copyfile(file, tmp_path / "third" / "signers.json")
    refused(["signing", "signers", "--keys", tmp_path / "third"], 2, "is neither in the new list of signers nor in")
    told = run("device", "trust", file, "--signers", trusted).out
    assert "this board now takes what 2 of the keys" in told
    assert (trusted / "signers.json").read_bytes() == file.read_bytes()
    refused(
        ["device", "trust", keys / "signing.pub.pem", "--signers", trusted], 2, "counts here, and single keys do not"
    )


def test_a_models_file_is_signed_as_what_it_says_it_is_and_under_the_coordinators_name_too(
    run, refused, sign, tmp_path
):
    constant_model(tmp_path / "digits.onnx", 3, model="ab" * 32, task_options='{"model": "cnn"}')
    words = ["coordinator", *sign(tmp_path / "digits.onnx", kind="model")[1:]]
    assert run(*words).out.startswith("model model-digits 1.0, a model, signed by ")
    with (tmp_path / "a.bundle").open("rb") as file:
        facts = read_bundle(file).manifest.model
    assert (facts.sha256, facts.task, facts.options) == ("ab" * 32, "digits", {"model": "cnn"})
    constant_model(tmp_path / "odd.onnx", 3, model="")
    refused(sign(tmp_path / "odd.onnx", kind="model"), 2, "does not say what model it is")
