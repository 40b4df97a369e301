"""Signatures and lists of signers: what enough trusted keys have signed, byte for byte and lately, is believed."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from wheel_files import FAR, Signer, make_wheel

from edgefl.core.errors import BundleError, ConfigError
from edgefl.system.bundles.archive import read_bundle, write_bundle
from edgefl.system.bundles.keys import (
    LIST_FILE,
    TrustedKeys,
    create_key_pair,
    is_encrypted,
    load_private_key,
    load_public_key,
    write_lists,
)
from edgefl.system.bundles.signatures import (
    MAX_LISTS,
    SIGNATURE_BYTES,
    Signatures,
    SignedList,
    SignerList,
    compute_key_id,
    make_next_list,
    sign_manifest,
)
from edgefl.system.bundles.wheels import add_signature


def pack(folder: Path) -> Path:
    return make_wheel(folder / "w", "gulls", "1.0", {"gulls.py": ""})


NOW_S = 1000.0


def verify(signers: TrustedKeys, path: Path, now_s: float = NOW_S) -> TrustedKeys:
    with path.open("rb") as file:
        return signers.verify(read_bundle(file), now_s)


def test_a_signed_bundle_is_verified_and_names_its_key(tmp_path: Path) -> None:
    signer = Signer(tmp_path)
    bundle = signer.bundle(tmp_path / "b", pack(tmp_path), kind="pack", version="1.0")
    assert list(verify(signer.signers, bundle).keys) == [signer.id]
    assert load_public_key(tmp_path / "keys" / "signing.pub.pem")


def test_a_bundle_with_another_signature_than_a_trusted_key_s_for_it_is_refused(tmp_path: Path) -> None:
    signer, wheel = Signer(tmp_path), pack(tmp_path)
    with signer.bundle(tmp_path / "b", wheel, kind="pack", version="1.0").open("rb") as file:
        text = read_bundle(file).manifest_bytes
    stranger = Ed25519PrivateKey.generate()
    for signature in (
        bytes(SIGNATURE_BYTES),
        load_private_key(signer.folder / "signing.pem").sign(text),  # without the prefix that says what it is for
        *sign_manifest(stranger, text).by_key.values(),
    ):
        signatures = Signatures(by_key={signer.id: signature})
        write_bundle(tmp_path / "c", manifest_bytes=text, signatures=signatures, wheels=[wheel])
        with pytest.raises(BundleError, match=r"its signature by key .* is wrong"):
            verify(signer.signers, tmp_path / "c")
    write_bundle(tmp_path / "c", manifest_bytes=text, signatures=Signatures(by_key={}), wheels=[wheel])
    with pytest.raises(BundleError, match="it is unsigned"):
        verify(signer.signers, tmp_path / "c")


def test_a_private_key_is_for_its_owner_encrypted_with_a_passphrase_and_never_replaced(tmp_path: Path) -> None:
    made = create_key_pair(tmp_path / "k", "correct horse")
    private = tmp_path / "k" / "signing.pem"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert is_encrypted(private)
    assert compute_key_id(load_private_key(private, "correct horse").public_key()) == made
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


class Fleet:
    """Four signers, a board that trusts the first, and one pack that they sign."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.signers = [Signer(folder / str(number)) for number in range(4)]
        self.keys = [load_private_key(signer.folder / "signing.pem") for signer in self.signers]
        self.base, self.memory = self.signers[0].trusted, folder / LIST_FILE
        self.wheel = pack(folder)

    def make_list(
        self,
        lists: tuple[SignedList, ...],
        members: Sequence[int],
        *,
        by: Sequence[int],
        threshold: int = 1,
        expires: int = FAR,
    ) -> tuple[SignedList, ...]:
        """The lists and one more, of these members, signed by those."""
        keys = {self.signers[one].id: self.keys[one].public_key() for one in members}
        version = lists[-1].content.version + 1 if lists else 1
        content = SignerList(version=version, issued=version * 100, expires=expires, threshold=threshold, keys=keys)
        made = make_next_list(lists, content)
        last = made[-1]
        for one in by:
            last = last.sign(self.keys[one])
        return (*made[:-1], last)

    def sign(self, *by: int, lists: tuple[SignedList, ...] = (), expires: int = FAR) -> Path:
        """A pack that these have signed."""
        out = self.folder / "signed.bundle"
        self.signers[by[0]].bundle(out, self.wheel, kind="pack", version="1.0", lists=lists, expires=expires)
        for one in by[1:]:
            add_signature(out, self.keys[one])
        return out

    def accept(self, path: Path, now_s: float = NOW_S) -> TrustedKeys:
        """What the board does with a bundle: it follows its lists for good, and verifies it."""
        former = TrustedKeys.load(self.base, self.memory)
        with path.open("rb") as file:
            bundle = read_bundle(file)
            trusted = former.follow(bundle.signatures.lists)
            trusted.save(self.memory, former)
            return trusted.verify(bundle, now_s)

    def refuse(self, path: Path, line: str, now_s: float = NOW_S) -> None:
        with pytest.raises(BundleError, match=line):
            self.accept(path, now_s)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def test_what_has_expired_is_refused_also_where_the_boards_clock_is_behind_the_signatures(fleet: Fleet) -> None:
    assert fleet.accept(fleet.sign(0, expires=1001), 1000.0)
    fleet.refuse(fleet.sign(0, expires=1001), "could be installed until 1970-01-01, it is", 1001.0)
    lists = fleet.make_list((), [0], by=[0])
    for _ in range(14):
        lists = fleet.make_list(lists, [0], by=[0])
    assert lists[-1].content.issued == 1500
    fleet.refuse(fleet.sign(0, lists=lists, expires=1400), "could be installed until", 0.0)
    assert fleet.accept(fleet.sign(0, expires=1501), 0.0)


def test_a_list_that_expired_stops_everything_until_a_newer_one_comes(fleet: Fleet) -> None:
    first = fleet.make_list((), [0], by=[0], expires=900)
    fleet.refuse(fleet.sign(0, lists=first), "list 1 of signers expired on 1970-01-01")
    fleet.refuse(fleet.sign(0), "list 1 of signers expired")
    renewed = fleet.make_list(first, [0], by=[0])
    assert fleet.accept(fleet.sign(0, lists=renewed)).current_list
    assert fleet.accept(fleet.sign(0)).current_list == renewed[-1].content


def test_signers_are_replaced_by_those_before_and_a_revoked_key_never_counts_again(fleet: Fleet) -> None:
    old = fleet.sign(0).rename(fleet.folder / "old.bundle")
    assert fleet.accept(old)
    lists = fleet.make_list(fleet.make_list((), [0, 1], by=[0]), [1], by=[0, 1])
    assert list(fleet.accept(fleet.sign(1, lists=lists)).keys) == [fleet.signers[1].id]
    fleet.refuse(old, f"signed by key {fleet.signers[0].id}, which this board does not trust")
    # Who still has the old key makes another history of lists; this board is past it.
    forged = fleet.make_list(fleet.make_list((), [0], by=[0]), [0, 3], by=[0, 3])
    fleet.refuse(fleet.sign(3, lists=forged), "which this board does not trust")
    fleet.refuse(
        fleet.sign(3, lists=fleet.make_list(forged, [3], by=[0, 3])), "has 0 of the 1 signatures of those bef"
    )
    assert fleet.accept(fleet.sign(1))


def test_a_board_that_was_off_follows_several_lists_and_needs_each_of_them(fleet: Fleet) -> None:
    lists = fleet.make_list((), [0], by=[0])
    for former, new in ((0, 1), (1, 2), (2, 3)):
        lists = fleet.make_list(lists, [new], by=[former, new])
    fleet.refuse(fleet.sign(3, lists=lists[1:]), "comes with list 2 of signers, this board knows list 0")
    assert list(fleet.accept(fleet.sign(3, lists=lists)).keys) == [fleet.signers[3].id]
    broken = fleet.make_list(fleet.make_list(lists, [2], by=[3, 2])[:-1], [1], by=[1])  # without list 4's signers
    fleet.refuse(fleet.sign(1, lists=broken), "has 0 of the 1 signatures of those before")


def test_as_many_must_sign_as_the_threshold_says_and_one_key_counts_once(fleet: Fleet) -> None:
    unsigned_by_new = fleet.make_list((), [0, 1, 2], by=[0], threshold=2)
    fleet.refuse(fleet.sign(0, lists=unsigned_by_new), "list 1 of signers has 1 of the 2 signatures of its own")
    lists = fleet.make_list((), [0, 1, 2], by=[0, 1], threshold=2)
    fleet.refuse(fleet.sign(0, lists=lists), f"it is signed by {fleet.signers[0].id}, and 2 signers are needed")
    fleet.refuse(fleet.sign(0, 0, 3, lists=lists), "and 2 signers are needed")
    assert fleet.accept(fleet.sign(0, 2, lists=lists)).threshold == 2
    alone = fleet.make_list(lists, [1], by=[1])
    fleet.refuse(fleet.sign(1, lists=alone), "has 1 of the 2 signatures of those before")
    assert fleet.accept(fleet.sign(1, lists=fleet.make_list(lists, [1], by=[0, 1])))


def test_the_hand_of_root_counts_more_than_lists_that_were_followed(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    lists = fleet.make_list((), [1], by=[0, 1])
    fleet.accept(fleet.sign(1, lists=lists))
    assert list(TrustedKeys.load(fleet.base, fleet.memory).keys) == [fleet.signers[1].id]
    (fleet.base / "operator.pem").unlink()
    shutil.copyfile(fleet.signers[2].folder / "signing.pub.pem", fleet.base / "other.pem")
    assert list(TrustedKeys.load(fleet.base, fleet.memory).keys) == [fleet.signers[2].id]
    assert "is left aside" in caplog.text
    write_lists(fleet.base / LIST_FILE, fleet.make_list(lists, [3], by=[]))  # needs no signature where root put it
    assert list(TrustedKeys.load(fleet.base).keys) == [fleet.signers[3].id]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"keys": []}, "1 to 16 different keys and a threshold"),
        ({"keys": ["ab" * 32] * 2}, "1 to 16 different keys and a threshold"),
        ({"threshold": 0}, "threshold 0"),
        ({"threshold": 2}, "threshold 2"),
        ({"version": 0}, "a version from 1"),
        ({"expires": 1}, "expires before it was made"),
        ({"keys": ["ab"]}, "makes no sense"),
        ({"v": 2}, "not of format 1"),
        ({"issued": True}, "makes no sense"),
    ],
)
def test_a_list_that_makes_no_sense_is_refused(fleet: Fleet, changes: dict[str, Any], line: str) -> None:
    value = json.loads(fleet.make_list((), [0], by=[])[0].text)
    with pytest.raises(BundleError, match=line):
        SignerList.decode(json.dumps({**value, **changes}))


def test_lists_travel_in_order_and_no_more_than_are_read(fleet: Fleet) -> None:
    lists: tuple[SignedList, ...] = ()
    for _ in range(MAX_LISTS):
        lists = fleet.make_list(lists, [0], by=[0])
    assert Signatures.decode(Signatures(by_key={}, lists=lists).encode()).lists == lists
    assert len(fleet.accept(fleet.sign(0, lists=lists)).lists) == MAX_LISTS
    with pytest.raises(BundleError, match="100 lists of signers follow each other at most"):
        fleet.make_list(lists, [0], by=[0])
    for broken in ((lists[1], lists[0]), (lists[0], lists[2]), (lists[0], lists[0])):
        with pytest.raises(BundleError, match="must follow each other"):
            Signatures.decode(Signatures(by_key={}, lists=broken).encode())
    with pytest.raises(BundleError, match="at most 100 lists"):
        Signatures.decode(Signatures(by_key={}, lists=(*lists, lists[0])).encode())
    value = json.loads(Signatures(by_key={}, lists=lists[:1]).encode())
    value["signers"][0]["list"] = value["signers"][0]["list"].replace("{", '{"odd": "\ud800", ', 1)
    with pytest.raises(BundleError, match="its signatures make no sense"):
        Signatures.decode(json.dumps(value).encode())
