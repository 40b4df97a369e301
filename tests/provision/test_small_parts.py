"""Names, Wi-Fi keys, accounts, wheels, signers, drop-ins: what a payload and a card are made of."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from edgefl.core.errors import ConfigError, NotFoundError, UsageError
from edgefl.provision import payload, sd_card
from edgefl.provision import sd_card as wifi
from edgefl.provision.boot_partition import redact_secrets, render_diff
from edgefl.provision.label_sheet import expand_name_pattern
from edgefl.provision.payload import render_shard_drop_ins


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("pi-{:02d}", ["pi-09", "pi-10"]),
        ("pi-{}", ["pi-9", "pi-10"]),
        ("pi-{:d}-roof", ["pi-9-roof", "pi-10-roof"]),
        ("{:3d}x".replace("3", "03"), ["009x", "010x"]),
    ],
)
def test_names_are_numbered_as_the_pattern_says(pattern: str, names: list[str]) -> None:
    assert expand_name_pattern(pattern, 2, first=9) == names


@pytest.mark.parametrize(
    ("pattern", "count"),
    [*((pattern, 2) for pattern in ("pi", "", "pi-{}-{}", "pi-{0.__class__}", "pi-{:x}", "Pi-{}", "pi {}")),
     *(("pi-{}", count) for count in (0, -1, 10_001))],
)  # fmt: skip
def test_a_pattern_or_count_that_makes_no_names_is_refused(pattern: str, count: int) -> None:
    with pytest.raises(UsageError):
        expand_name_pattern(pattern, count)


def test_the_key_of_a_wi_fi_is_the_one_of_the_standard() -> None:
    # IEEE 802.11i, annex H.4.3.
    key = "f42c6fc52df0ebef9ebb4b90b38a5f902e83fe1b135a70e23aed762e9710a12e"
    assert wifi.compute_pre_shared_key("IEEE", "password") == key
    assert wifi.compute_pre_shared_key("IEEE", key.upper()) == key


@pytest.mark.parametrize("passphrase", ["short", "x" * 64, "süßes wasser", ""])
def test_a_wi_fi_password_that_is_none_is_refused_without_being_shown(passphrase: str) -> None:
    with pytest.raises(UsageError) as told:
        wifi.compute_pre_shared_key("lab", passphrase)
    assert not passphrase or passphrase not in str(told.value)


@pytest.mark.parametrize(
    ("check", "wrong"),
    [
        (wifi.validate_ssid, ""), (wifi.validate_ssid, "x" * 33), (wifi.validate_ssid, "a\nb"),
        (wifi.validate_country, "DEU"), (wifi.validate_country, "1"),
        (sd_card.validate_hostname, "-a"), (sd_card.validate_hostname, "a.b"), (sd_card.validate_hostname, "a b"),
        (sd_card.validate_user, "root"), (sd_card.validate_user, "Eva"), (sd_card.validate_user, "a;b"),
        (sd_card.validate_interface, "eth 0"), (sd_card.validate_interface, "x" * 16),
    ],
)  # fmt: skip
def test_a_name_that_is_none_is_refused(check: object, wrong: str) -> None:
    with pytest.raises(UsageError):
        check(wrong)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("address", "gateway", "dns"),
    [
        ("10.0.0.7", "10.0.0.1", ()),
        ("10.0.0.7/24", None, ()),
        ("10.0.0.7/24", "10.0.1.1", ()),
        ("10.0.0.7/24", "10.0.0.1", ("dns",)),
        ("10.0.0.777/24", "10.0.0.1", ()),
    ],
)
def test_a_static_address_that_cannot_work_is_refused(
    address: str, gateway: str | None, dns: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError):
        sd_card.validate_static_address(address, gateway, dns)
    # Where nobody else is named, the gateway answers for names.
    assert sd_card.validate_static_address("10.0.0.7/24", "10.0.0.1", ()) == (
        "10.0.0.7/24",
        "10.0.0.1",
        ("10.0.0.1",),
    )


def test_public_keys_are_taken_and_private_ones_never(tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    public = (tmp_path / "key.pub").read_text()
    assert sd_card.parse_ssh_keys(f"# mine\n{public}\n", "key.pub") == (public.strip(),)
    with pytest.raises(UsageError, match="private"):
        sd_card.parse_ssh_keys((tmp_path / "key").read_text(), "key")
    for text in ("", "hello", f"{public}\nnonsense", 'ssh-ed25519 AAAA "x\n- y'):
        with pytest.raises(UsageError):
            sd_card.parse_ssh_keys(text, "file")


def test_a_wheel_folder_has_one_edgefl_and_wheels_only(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        payload.list_wheels(tmp_path / "none")
    with pytest.raises(ConfigError, match="one wheel of edgefl-fleet, has none"):
        payload.list_wheels(tmp_path)
    (tmp_path / "edgefl_fleet-0.1-py3-none-any.whl").touch()
    (tmp_path / "numpy-2.whl").touch()
    assert set(payload.list_wheels(tmp_path)) == {
        "wheels/edgefl_fleet-0.1-py3-none-any.whl",
        "wheels/numpy-2.whl",
    }
    (tmp_path / "edgefl_fleet-0.2-py3-none-any.whl").touch()
    with pytest.raises(ConfigError, match="one wheel"):
        payload.list_wheels(tmp_path)
    (tmp_path / "edgefl_fleet-0.2-py3-none-any.whl").rename(tmp_path / "edgefl-0.1.0-py3-none-any.whl")
    with pytest.raises(ConfigError, match=r"holds edgefl-0\.1\.0-.*another project"):
        payload.list_wheels(tmp_path)
    (tmp_path / "edgefl-0.1.0-py3-none-any.whl").unlink()
    (tmp_path / "flwr-1.tar.gz").touch()
    with pytest.raises(ConfigError, match=r"no wheel: flwr-1\.tar\.gz"):
        payload.list_wheels(tmp_path)
    # Names that a shell or the manifest would misread.
    for number, name in enumerate(
        (
            'edgefl_fleet-1-"-py3.whl',
            "edgefl_fleet-1 -py3.whl",
            "edgefl_fleet-1\n-py3.whl",
            "edgefl_fleet-1-$(x).whl",
        )
    ):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / name).touch()
        with pytest.raises(ConfigError, match="rename it"):
            payload.list_wheels(tmp_path / str(number))


def test_a_lock_pins_by_hash(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("numpy==2.0\n")
    with pytest.raises(ConfigError, match="no hashes"):
        payload.load_lock(tmp_path / "lock")
    (tmp_path / "lock").write_text("numpy==2.0 --hash=sha256:00\n")
    assert payload.load_lock(tmp_path / "lock") == {"requirements.txt": tmp_path / "lock"}
    with pytest.raises(NotFoundError):
        payload.load_lock(tmp_path / "none")
    (tmp_path / "lock").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is no text"):
        payload.load_lock(tmp_path / "lock")


def test_a_payload_says_which_edgefl_it_brings_and_one_that_would_ask_an_index_for_it_is_refused(
    tmp_path: Path,
) -> None:
    wheel = {"wheels/edgefl_fleet-1.2-py3-none-any.whl": b""}
    lock = tmp_path / "lock"
    lock.write_text("numpy==2.0 --hash=sha256:00\n")
    assert payload.find_edgefl_version(wheel) == "1.2"
    assert payload.find_edgefl_version({**wheel, **payload.load_lock(lock)}) == "1.2"
    for files in ({}, {"wheels/numpy-2-py3-none-any.whl": b""}, payload.load_lock(lock)):
        with pytest.raises(UsageError, match="another package of this name"):
            payload.find_edgefl_version(files)
    lock.write_text("edgefl-fleet==1.3 --hash=sha256:00\n")
    assert payload.find_edgefl_version(payload.load_lock(lock)) == "1.3"
    with pytest.raises(ConfigError, match="says no version"):
        payload.find_edgefl_version({"wheels/edgefl_fleet-": b""})


def test_signers_are_public_ed25519_keys(tmp_path: Path) -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    (tmp_path / "team.pub.pem").write_bytes(
        key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    (tmp_path / "private.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    other = ec.generate_private_key(ec.SECP256R1()).public_key()
    (tmp_path / "ec.pem").write_bytes(other.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    (tmp_path / "text.pem").write_text("hello")
    assert list(payload.load_signers([tmp_path / "team.pub.pem"])) == ["signers/team.pub.pem"]
    for name, words in (("private.pem", "private key"), ("ec.pem", "no public Ed25519"), ("text.pem", "no public")):
        with pytest.raises(ConfigError, match=words):
            payload.load_signers([tmp_path / name])
    with pytest.raises(NotFoundError):
        payload.load_signers([tmp_path / "none.pem"])
    (tmp_path / "team.json").write_text('{"v": 1, "signatures": {}, "signers": [{}]}')
    assert list(payload.load_signers([tmp_path / "team.json"])) == ["signers/signers.json"]
    for text in ("{", "[]", '{"signers": []}'):
        (tmp_path / "odd.json").write_text(text)
        with pytest.raises(ConfigError, match="is no list of signers"):
            payload.load_signers([tmp_path / "odd.json"])
    (tmp_path / "other").mkdir()
    other = shutil.copy(tmp_path / "team.pub.pem", tmp_path / "other")
    with pytest.raises(ConfigError, match="two signers' keys are called team"):
        payload.load_signers([tmp_path / "team.pub.pem", Path(other)])


def test_a_shard_in_a_home_is_shown_to_the_units_and_others_need_nothing() -> None:
    assert render_shard_drop_ins({"digits": "/srv/d.npz"}) == {}
    made = render_shard_drop_ins({"digits": "/home/pi/d.npz", "mnist": "/srv/m"})
    assert set(made.values()) == {b"[Service]\nBindReadOnlyPaths=-/home/pi\n"}
    assert {name.split("/")[1] for name in made} == {"edgefl-device.service.d", "edgefl-join.service.d"}
    for path in ("d.npz", "/home/pi/a b", "/home/pi/a:b", "/home/../etc/shadow", "/x\nExecStart=y"):
        with pytest.raises(UsageError):  # a unit would take it for something else
            render_shard_drop_ins({"digits": path})


def test_a_difference_shows_lines_and_no_secret() -> None:
    old = {"user-data": b"hostname: a\npasswd: $5$secret\n", "same": b"same"}
    new = {
        "user-data": b"hostname: b\npasswd: $5$secret\n",
        "network-config": b'  password: "hunter22"\n',
        "edgefl/join.json": b'{"token": "efl1.abcDEF_-="}\n',
        "edgefl/wheels/a.whl": b"PK\0",
        "same": b"same",
    }
    told = "\n".join(render_diff(new, old.get))
    assert "-hostname: a\n+hostname: b" in told
    assert "--- /dev/null\n+++ b/network-config" in told
    assert "new file edgefl/wheels/a.whl, 3 bytes" in told
    assert "same" not in told
    for secret in ("hunter22", "abcDEF", "$5$secret"):
        assert secret not in told
    assert redact_secrets("psk=abcdef\nPASSWORD: x y") == "psk=(secret)\nPASSWORD: (secret)"
