"""`edgefl signing`, and `edgefl device trust` on the board."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from wheel_files import make_wheel

from edgefl.cli.main import edgefl
from edgefl.errors import BundleError, ConfigError, UsageError


def run(*arguments, check=True, **options):
    result = CliRunner().invoke(edgefl, [str(one) for one in arguments], **options)
    if check:
        assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def signed(tmp_path):
    run("signing", "init", "--keys", tmp_path / "keys", "--no-passphrase")
    wheel = make_wheel(tmp_path / "w", "gulls", "1.0", {"gulls.py": ""})
    out = tmp_path / "gulls.bundle"
    told = run("signing", "sign", wheel, "--kind", "pack", "--version", "1.0", "--out", out,
               "--keys", tmp_path / "keys").output  # fmt: skip
    assert told.startswith("pack gulls 1.0, 1 wheels, signed by ")
    return out


def test_a_bundle_is_signed_trusted_and_shown(signed, tmp_path):
    (tmp_path / "etc").mkdir()
    trusted = tmp_path / "etc" / "signers"
    told = run("device", "trust", tmp_path / "keys" / "signing.pub.pem", "--signers", trusted).output
    (row,) = json.loads(run("signing", "show", signed, "--signers", trusted, "--format", "json").output)["rows"]
    assert f"takes what key {row['key']} signs" in told
    assert (row["kind"], row["name"], row["version"], row["trusted"]) == ("pack", "gulls", "1.0", True)
    assert [wheel["file"] for wheel in row["wheels"]] == ["gulls-1.0-py3-none-any.whl"]
    assert "gulls-1.0-py3-none-any.whl" in run("signing", "show", signed, "--signers", trusted).output
    assert "gulls-1.0-py3-none-any.whl" in run("signing", "show", signed, "--keys", tmp_path / "keys").output


def test_show_tells_what_a_bundle_is_also_when_nobody_here_trusts_it(signed, tmp_path):
    result = run("signing", "show", signed, "--signers", tmp_path / "none", check=False)
    assert isinstance(result.exception, BundleError)
    assert "gulls" in result.output


def test_a_passphrase_is_asked_for_and_needed(tmp_path, monkeypatch):
    keys, wheel = tmp_path / "keys", make_wheel(tmp_path, "gulls", "1.0", {"gulls.py": ""})
    run("signing", "init", "--keys", keys, input="battery\nbattery\n")
    sign = ("signing", "sign", wheel, "--kind", "pack", "--version", "1.0", "--out", tmp_path / "b", "--keys", keys)
    assert isinstance(run(*sign, check=False, input="wrong\n").exception, ConfigError)
    assert not (tmp_path / "b").exists()
    monkeypatch.setenv("EDGEFL_SIGNING_PASSPHRASE", "battery")
    run(*sign)


def test_what_a_board_would_refuse_is_not_signed(signed, tmp_path):
    evil = make_wheel(tmp_path / "e", "gulls", "1.0", {"../x": ""})
    for wheel, version, line in (
        (evil, "1.0", "lies outside"),
        (tmp_path / "w" / "gulls-1.0-py3-none-any.whl", "2.0", "must hold a wheel of gulls in this version"),
        (Path(shutil.copyfile(evil, tmp_path / "gulls-1.0.zip")), "1.0", "only wheels are signed"),
    ):
        result = run("signing", "sign", wheel, "--kind", "pack", "--version", version, "--out", tmp_path / "no",
                     "--keys", tmp_path / "keys", check=False)  # fmt: skip
        assert line in str(result.exception)
    assert not (tmp_path / "no").exists()


def test_a_private_key_is_not_trusted_by_mistake(signed, tmp_path):
    result = run("device", "trust", tmp_path / "keys" / "signing.pem", "--signers", tmp_path / "s", check=False)
    assert isinstance(result.exception, ConfigError)
    assert not (tmp_path / "s").exists()


def test_apply_update_says_where_there_are_no_slots(tmp_path):
    result = run("device", "apply-update", "--root", tmp_path, "--state", tmp_path, "true", check=False)
    assert isinstance(result.exception, ConfigError)
    assert "a board that was installed by hand is updated by hand" in str(result.exception)


def test_a_removal_is_signed_without_wheels_and_needs_the_name_of_its_pack(signed, tmp_path):
    out = tmp_path / "no-gulls.bundle"
    sign = ("signing", "sign", "--kind", "removal", "--version", "1.0", "--out", out, "--keys", tmp_path / "keys")
    told = run(*sign, "--name", "gulls").output
    assert told.startswith("removal gulls 1.0, 0 wheels, signed by ")
    assert "removal" in run("signing", "show", out, "--keys", tmp_path / "keys").output
    assert isinstance(run(*sign, check=False).exception, UsageError)
    wheel = next((tmp_path / "w").glob("*.whl"))
    assert isinstance(run(*sign, wheel, "--name", "gulls", check=False).exception, BundleError)


def test_a_wheel_whose_name_fits_no_bundle_is_said_before_anything_is_written(signed, tmp_path):
    wheel = next((tmp_path / "w").glob("*.whl"))
    long = wheel.rename(wheel.with_name(f"gulls-1.0-py3-none-{'.'.join(['manylinux2014_x86_64'] * 5)}.whl"))
    result = run("signing", "sign", long, "--kind", "pack", "--version", "1.0", "--out", tmp_path / "x", "--keys",
                 tmp_path / "keys", check=False)  # fmt: skip
    assert isinstance(result.exception, BundleError)
    assert "has a name of 127 characters, at most 100 fit" in str(result.exception)
    assert not (tmp_path / "x").exists()
