"""Signatures: only what a trusted key has signed, byte for byte, is believed."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from wheel_files import Signer, make_wheel

from edgefl.core.errors import BundleError, ConfigError
from edgefl.system.bundles import keys
from edgefl.system.bundles.archive import SIGNATURE_BYTES, read_bundle, write_bundle
from edgefl.system.bundles.keys import TrustedKeys, create_key_pair, is_encrypted, load_private_key, load_public_key


def pack(folder: Path) -> Path:
    return make_wheel(folder / "w", "gulls", "1.0", {"gulls.py": ""})


def verify(signers: TrustedKeys, path: Path) -> str:
    with path.open("rb") as file:
        return signers.verify(read_bundle(file))


def test_a_signed_bundle_is_verified_and_names_its_key(tmp_path: Path) -> None:
    signer = Signer(tmp_path)
    bundle = signer.bundle(tmp_path / "b", pack(tmp_path), kind="pack", version="1.0")
    assert verify(signer.signers, bundle) == signer.id
    assert load_public_key(tmp_path / "keys" / "signing.pub.pem")


def test_a_bundle_with_another_signature_than_a_trusted_key_s_for_it_is_refused(tmp_path: Path) -> None:
    signer, wheel = Signer(tmp_path), pack(tmp_path)
    with signer.bundle(tmp_path / "b", wheel, kind="pack", version="1.0").open("rb") as file:
        text = read_bundle(file).manifest_bytes
    for signature in (
        bytes(SIGNATURE_BYTES),
        load_private_key(signer.folder / "signing.pem").sign(text),  # without the prefix that says what it is for
        keys.sign_manifest(Ed25519PrivateKey.generate(), text),
    ):
        write_bundle(tmp_path / "c", manifest_bytes=text, signature=signature, wheels=[wheel])
        with pytest.raises(BundleError, match=r"its signature by key .* is wrong"):
            verify(signer.signers, tmp_path / "c")


def test_a_private_key_is_for_its_owner_encrypted_with_a_passphrase_and_never_replaced(tmp_path: Path) -> None:
    made = create_key_pair(tmp_path / "k", "correct horse")
    private = tmp_path / "k" / "signing.pem"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert is_encrypted(private)
    assert keys.compute_key_id(load_private_key(private, "correct horse").public_key()) == made
    for wrong in ("battery staple", None):
        with pytest.raises(ConfigError, match="is the passphrase right"):
            load_private_key(private, wrong)
    with pytest.raises(ConfigError, match="is there already"):
        create_key_pair(tmp_path / "k", None)


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_keys_that_others_could_change_are_refused(tmp_path: Path, mode: int) -> None:
    signer = Signer(tmp_path)
    for path in (signer.trusted.parent, signer.trusted, signer.trusted / "operator.pem"):
        before = path.stat().st_mode
        path.chmod(mode)
        with pytest.raises(BundleError, match="could be changed by others"):
            TrustedKeys.load(signer.trusted)
        path.chmod(before)
    assert TrustedKeys.load(signer.trusted).keys
    assert not TrustedKeys.load(tmp_path / "none").keys


def test_a_file_that_is_no_ed25519_key_is_named(tmp_path: Path) -> None:
    signer = Signer(tmp_path)
    (signer.trusted / "x.pem").write_text("hello")
    with pytest.raises(ConfigError, match=r"x\.pem is no public key in PEM"):
        TrustedKeys.load(signer.trusted)
    shutil.copyfile(signer.folder / "signing.pem", signer.trusted / "x.pem")
    with pytest.raises(ConfigError, match="is no public key"):
        TrustedKeys.load(signer.trusted)
