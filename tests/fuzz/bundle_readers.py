"""Code that boards run: bundles, their manifests, wheels and signatures, and the keys that are believed."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fuzz.reader import MIB, Form, Reader, Seed
from fuzz.storage_readers import _tar_sealed
from made_wheels import make_wheel

from edgefl.system.bundles.archive import (
    BundleKind,
    BundleManifest,
    SignedManifest,
    WheelEntry,
    read_bundle,
    write_bundle,
)
from edgefl.system.bundles.keys import TrustedKeys, create_key_pair, load_public_key
from edgefl.system.bundles.signatures import (
    Signatures,
    SignedList,
    SignerList,
    compute_key_id,
    make_next_list,
    sign_manifest,
)
from edgefl.system.bundles.wheels import check_wheel, select_compatible_wheels


class Workshop:
    """A signer and a pack of one small wheel."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wheel = make_wheel(folder / "wheels", "mytask", "1.0", {"mytask.py": b"x = 1\n"})
        self.key = Ed25519PrivateKey.generate()
        self.signers = TrustedKeys(folder=folder, keys={compute_key_id(self.key.public_key()): self.key.public_key()})
        content = self.wheel.read_bytes()
        self.entry = WheelEntry(
            file=self.wheel.name, sha256=hashlib.sha256(content).hexdigest(), num_bytes=len(content)
        )
        self.manifest = BundleManifest(
            kind=BundleKind.PACK,
            name="mytask",
            version="1.0",
            serial=5,
            expires=2**40,
            key=compute_key_id(self.key.public_key()),
            wheels=(self.entry,),
        )

    def bundle(self, text: bytes | None = None) -> bytes:
        text = self.manifest.encode() if text is None else text
        out = self.folder / "made.bundle"
        write_bundle(out, manifest_bytes=text, signatures=sign_manifest(self.key, text), wheels=[self.wheel])
        return out.read_bytes()


def bundles(folder: Path) -> Reader:
    """A bundle as a board opens it: structure, signature, every wheel; a damaged one must never count as signed."""
    shop = Workshop(folder)
    path, whole = folder / "x.bundle", shop.bundle()

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        with path.open("rb") as file:
            opened = read_bundle(file)
            shop.signers.verify(opened, 6.0)
            for entry in opened.manifest.wheels:
                opened.extract_wheel(entry, folder / "unpacked.whl")
            assert opened.manifest_bytes == shop.manifest.encode(), "a text that was not signed"

    def with_header(place: int):
        return lambda found: whole[:place] + _tar_sealed(found[:512].ljust(512, b"\0")) + whole[place + 512 :]

    heads = [place for place in range(0, len(whole), 512) if whole[place + 257 : place + 262] == b"ustar"]
    seeds = [
        Seed(content=whole),
        *(Seed(content=whole[place : place + 512], close=with_header(place)) for place in heads),
    ]
    return Reader(feed=feed, seeds=tuple(seeds), most_bytes=4 * MIB)


def manifests(folder: Path) -> Reader:
    """A manifest, and which of its wheels would be taken."""
    shop = Workshop(folder)
    release = {
        "v": 2, "kind": "release", "name": "edgefl-fleet", "version": "1.2.0", "serial": 9,
        "expires": 2**40, "key": "ab" * 8, "allow_downgrade": True,
        "wheels": [
            {"file": "edgefl_fleet-1.2.0-py3-none-any.whl", "sha256": "ab" * 32, "bytes": 100},
            {"file": "numpy-2.1.0-cp311-cp311-manylinux_2_17_aarch64.whl", "sha256": "cd" * 32, "bytes": 200},
        ],
    }  # fmt: skip

    model = {
        "v": 2, "kind": "model", "name": "model-digits", "version": "0", "serial": 9, "key": "ab" * 8,
        "expires": 2**40, "wheels": [{"file": "digits.onnx", "sha256": "ab" * 32, "bytes": 100}],
        "model": {"sha256": "cd" * 32, "task": "digits", "options": {"model": "cnn"}},
    }  # fmt: skip

    def feed(data: bytes) -> None:
        manifest = BundleManifest.decode(data)
        assert BundleManifest.decode(manifest.encode()) == manifest
        if manifest.kind is not BundleKind.MODEL:
            select_compatible_wheels(manifest.wheels, [tag for wheel in manifest.wheels for tag in wheel.tags])

    seeds = [
        Seed(content=shop.manifest.encode(), form=Form.JSON),
        Seed(content=json.dumps(model).encode(), form=Form.JSON),
        Seed(content=json.dumps(release).encode(), form=Form.JSON),
    ]
    return Reader(feed=feed, seeds=tuple(seeds))


def signatures(folder: Path) -> Reader:
    """Signatures with lists of signers, as they travel: only what was signed is ever followed."""
    shop = Workshop(folder)
    others = [Ed25519PrivateKey.generate() for _ in range(2)]
    lists: tuple[SignedList, ...] = ()
    for version, signers in enumerate(([shop.key, others[0]], others), start=1):
        keys = {compute_key_id(key.public_key()): key.public_key() for key in signers}
        content = SignerList(version=version, issued=version, expires=2**40, threshold=version, keys=keys)
        lists = make_next_list(lists, content)
        last = lists[-1]
        for key in (shop.key, *others):
            last = last.sign(key)
        lists = (*lists[:-1], last)
    first = {key_id: signature.hex() for key_id, signature in lists[0].by_key.items()}
    known = {one.text for one in lists}
    whole = replace(sign_manifest(shop.key, shop.manifest.encode()), lists=lists)

    def feed(data: bytes) -> None:
        found = Signatures.decode(data)
        assert Signatures.decode(found.encode()) == found
        followed = shop.signers.follow(found.lists)
        assert {one.text for one in followed.lists} <= known, "a list that nobody signed"

    seeds = [
        Seed(content=whole.encode(), form=Form.JSON),
        Seed(content=whole.encode()),
        Seed(
            content=lists[0].text.encode(),
            form=Form.JSON,
            close=lambda found: json.dumps(
                {"v": 1, "signatures": {}, "signers": [{"list": found.decode("latin-1"), "signatures": first}]}
            ).encode(),
        ),
    ]
    return Reader(feed=feed, seeds=tuple(seeds))


def signed_manifests(folder: Path) -> Reader:
    """Manifest and signatures beside a deployed model, as an offer and the board's own note have them."""
    shop = Workshop(folder)
    whole = SignedManifest(
        manifest_bytes=shop.manifest.encode(),
        signatures=sign_manifest(shop.key, shop.manifest.encode()),
        manifest=shop.manifest,
    )

    def feed(data: bytes) -> None:
        found = SignedManifest.decode(data.decode("latin-1"))
        shop.signers.verify(found, 6.0)
        assert found.manifest == shop.manifest, "a manifest that nobody signed"

    content = whole.encode().encode()
    return Reader(feed=feed, seeds=(Seed(content=content, form=Form.JSON), Seed(content=content)))


def wheels(folder: Path) -> Reader:
    """A wheel before anybody installs it."""
    shop = Workshop(folder)
    path = folder / shop.wheel.name

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        check_wheel(path, shop.entry, BundleKind.PACK)

    def with_metadata(found: bytes) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(shop.wheel) as old, zipfile.ZipFile(out, "w") as new:
            for info in old.infolist():
                new.writestr(info, found if info.filename.endswith("METADATA") else old.read(info))
        return out.getvalue()

    with zipfile.ZipFile(shop.wheel) as old:
        metadata = old.read("mytask-1.0.dist-info/METADATA")
    seeds = (Seed(content=shop.wheel.read_bytes()), Seed(content=metadata, form=Form.TEXT, close=with_metadata))
    return Reader(
        feed=feed, seeds=seeds, words=(b"../", b"Name: mytask", b"Version: 1.0", b".pth", b"edgefl/", b"\x01\x00")
    )


def signing_keys(folder: Path) -> Reader:
    """The public keys in a board's folder."""
    create_key_pair(folder / "keys", None)
    public = (folder / "keys" / "signing.pub.pem").read_bytes()
    path = folder / "trusted.pem"

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        load_public_key(path)

    return Reader(feed=feed, seeds=tuple(pem_seeds(public)))


def pem_seeds(pem: bytes) -> list[Seed]:
    """A PEM text, and the DER in it."""
    import base64  # noqa: PLC0415 beside its use

    first, *lines, last = pem.strip().splitlines()
    der = base64.b64decode(b"".join(lines))

    def close(found: bytes) -> bytes:
        text = base64.b64encode(found)
        return b"\n".join([first, *(text[at : at + 64] for at in range(0, len(text), 64)), last, b""])

    return [Seed(content=pem), Seed(content=der, close=close)]
