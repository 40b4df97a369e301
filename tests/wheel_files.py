"""Wheels made by hand, as small as they can be, and the bundles and boards that tests make of them."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import edgefl
from edgefl.system.bundles.archive import BundleKind, BundleManifest, ModelFacts, SignedManifest, read_bundle
from edgefl.system.bundles.keys import TrustedKeys, create_key_pair, load_private_key
from edgefl.system.bundles.signatures import SignedList, SignerList, make_next_list
from edgefl.system.bundles.wheels import make_bundle

FAR = 2**40
"""Long after any test."""
KINDS = {str(kind): kind for kind in BundleKind}


def make_wheel(
    folder: Path,
    name: str,
    version: str,
    files: Mapping[str, str | bytes],
    *,
    points: str = "",
    requires: Sequence[str] = (),
    tag: str = "py3-none-any",
) -> Path:
    """Returns the path of a wheel with these files and entry points."""
    folder.mkdir(parents=True, exist_ok=True)
    module = name.replace("-", "_")
    info, path = f"{module}-{version}.dist-info", folder / f"{module}-{version}-{tag}.whl"
    needs = "".join(f"Requires-Dist: {one}\n" for one in requires)
    content = {name: text.encode() if isinstance(text, str) else text for name, text in files.items()}
    content |= {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}".encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: {tag}\n".encode(),
    }
    if points:
        content[f"{info}/entry_points.txt"] = points.encode()
    record = "".join(f"{one},sha256={_digest(body)},{len(body)}\n" for one, body in content.items())
    content[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    with zipfile.ZipFile(path, "w") as wheel:
        for one, body in content.items():
            wheel.writestr(one, body)
    return path


def _digest(body: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(body).digest()).decode().rstrip("=")


class Signer:
    """A key pair, and the folder of a board that trusts it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.trusted = folder / "keys", folder / "etc" / "signers"
        self.id = create_key_pair(self.folder, None)
        self.trusted.mkdir(parents=True)
        shutil.copyfile(self.folder / "signing.pub.pem", self.trusted / "operator.pem")
        self._serial = 100

    @property
    def signers(self) -> TrustedKeys:
        return TrustedKeys.load(self.trusted)

    def bundle(
        self,
        out: Path,
        *wheels: Path,
        kind: str = "release",
        version: str,
        serial: int | None = None,
        lists: tuple[SignedList, ...] = (),
        **wish: object,
    ) -> Path:
        """Returns a signed bundle of these wheels."""
        self._serial += 1
        wish = {"name": "", "expires": FAR, **wish}
        asked = BundleManifest(kind=KINDS[kind], version=version, serial=serial or self._serial, **wish)  # type: ignore[arg-type]
        make_bundle(asked, wheels, load_private_key(self.folder / "signing.pem"), out, lists)
        return out

    def model_bundle(self, out: Path, file: Path, *, model: str, task: str = "digits", **wish: object) -> Path:
        """Returns a signed bundle of a model's file; `model` is the hash of its tensors."""
        facts = ModelFacts(sha256=model, task=task, options=wish.pop("options", {}))  # type: ignore[arg-type]
        return self.bundle(out, file, kind="model", version="0", model=facts, name=facts.bundle_name, **wish)  # type: ignore[arg-type]


def replace_signer(old: Signer, new: Signer, *, expires: int = FAR) -> tuple[SignedList, ...]:
    """Returns the first list of signers, by which a new one takes the place of the one that boards trust."""
    keys = [load_private_key(one.folder / "signing.pem") for one in (old, new)]
    content = SignerList(version=1, issued=1, expires=expires, threshold=1, keys={new.id: keys[1].public_key()})
    (made,) = make_next_list((), content)
    return (made.sign(keys[0]).sign(keys[1]),)


def read_signed(bundle: Path) -> str:
    """What an offer says of the signatures of a model's bundle."""
    with bundle.open("rb") as file:
        found = read_bundle(file)
    parts = {"manifest_bytes": found.manifest_bytes, "signatures": found.signatures, "manifest": found.manifest}
    return SignedManifest(**parts).encode()  # type: ignore[arg-type]


def edgefl_wheel(folder: Path, version: str, changes: Mapping[str, tuple[str, str]] | None = None) -> Path:
    """Returns a wheel of this edgefl under another version; `changes` replaces one text in each of these files."""
    top = Path(edgefl.__file__).parent
    files: dict[str, str | bytes] = {
        f"edgefl/{path.relative_to(top)}": path.read_bytes()
        for path in top.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    wanted = {"edgefl/__init__.py": (f'__version__ = "{edgefl.__version__}"', f'__version__ = "{version}"')}
    for name, (old, new) in {**wanted, **(changes or {})}.items():
        text = bytes(files[name]).decode()  # type: ignore[arg-type]
        assert old in text, f"{name} does not hold {old!r}"
        files[name] = text.replace(old, new)
    needs = [one for one in importlib.metadata.requires(edgefl.DISTRIBUTION) or () if "extra ==" not in one]
    return make_wheel(folder, edgefl.DISTRIBUTION, version, files, requires=needs)


STAND_IN = """
import fcntl, json, os, pathlib, sys, time, uuid
__version__ = "{version}"
MODE = "{mode}"

def main():
    if sys.argv[1:] == ["--version"]:
        print("edgefl, version", "9.9" if MODE == "lies" else __version__)
        return
    state = pathlib.Path(sys.argv[sys.argv.index("--state") + 1])
    if "status" in sys.argv:
        broker = None if (state / "no-broker").exists() else "there"
        print(json.dumps({{"coordinator": None if (state / "away").exists() else "here", "broker": broker}}))
        return
    if MODE == "crashes":
        sys.exit("this version does not start")
    root = pathlib.Path(sys.prefix).parent
    status = root / "update" / "status.json"
    trial = json.loads(status.read_bytes())["trial"] if status.exists() else None
    slot = os.readlink(root / "current")
    record = root / slot / "edgefl-slot.json"
    packs = json.loads(record.read_bytes())["packs"] if record.exists() else {{}}
    lock = (state / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    said = {{"v": 1, "boot_id": uuid.uuid4().hex, "version": __version__, "slot": slot, "connected": False,
            "token": trial["token"] if trial else "", "packs": {{n: one["version"] for n, one in packs.items()}}}}
    while True:
        said["connected"] = MODE != "deaf" and not (state / "away").exists()
        said["linked"] = said["connected"] and MODE != "unlinked"
        fresh = state / "health.new"
        fresh.write_text(json.dumps(said))
        fresh.replace(state / "health.json")
        if MODE == "dies" and said["connected"]:
            time.sleep(0.3)
            sys.exit("this version dies")
        time.sleep(0.05)
"""


def stand_in(folder: Path, version: str, mode: str = "works", **options: object) -> Path:
    """Returns a wheel that stands in for edgefl: it says its version, and its agent does what `mode` says."""
    files = {
        "edgefl/__init__.py": STAND_IN.format(version=version, mode=mode),
        "edgefl/__main__.py": "from edgefl import main\nmain()\n",
    }
    return make_wheel(folder / mode, edgefl.DISTRIBUTION, version, files, **options)  # type: ignore[arg-type]


def link_slots(made: Path, root: Path) -> Path:
    """Returns the root of slots that are those of `made`, file by file the same: an updater changes none, it adds."""
    shutil.copytree(made, root, symlinks=True, copy_function=os.link)
    return root


def make_slots(root: Path, wheel: Path, *, borrow: bool = False) -> Path:
    """Returns the root of a board's slots: slot `a`, with pip and one wheel, is in use.

    Args:
        root: made.
        wheel: of edgefl.
        borrow: the slot also sees the packages of this test's own environment.
    """
    slot = root / "a"
    venv.EnvBuilder(with_pip=False, symlinks=True).create(slot)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(slot), "platbase": str(slot)}))
    own = Path(next(path for path in site.getsitepackages() if (Path(path) / "pip").is_dir()))
    for source in (own / "pip", *own.glob("pip-*.dist-info")):
        shutil.copytree(source, packages / source.name, copy_function=os.link)
    if borrow:
        (packages / "borrowed.pth").write_text(f"{own}\n")
    python = str(slot / "bin" / "python")
    install = (python, "-I", "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-warn-script-location")
    subprocess.run([*install, "--disable-pip-version-check", "--root-user-action", "ignore", str(wheel)], check=True)
    (root / "current").symlink_to("a")
    assert sys.version_info[:2] == (int(packages.parent.name[6]), int(packages.parent.name[8:]))
    return root
