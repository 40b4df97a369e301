"""Flower's bundle of an app (`.fab`), a ZIP archive that lists the hashes of its files; none of its code is run."""

from __future__ import annotations

import hashlib
import io
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgefl.core.errors import ConfigError
from edgefl.core.types import Scalar
from edgefl.flower.app_folder import MAX_APP_BYTES, MAX_FILES, AppFolder, read_app
from edgefl.system.zip_members import ZIP_ERRORS, find_member_fault, read_member

CONTENT = ".info/CONTENT"
"""A line for each other file: path, SHA-256, length in bits."""
NO_PUBLISHER = (
    "stock SuperNodes take no part: tool.flwr.app.publisher must be 1 to 80 letters, digits, blanks, '.', '_' and '-'"
)
_PUBLISHER = re.compile(r"[\w. -]{1,80}\Z", re.ASCII)
_DATE = (2024, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppBundle:
    """A Flower app as stock SuperNodes fetch it.

    Attributes:
        app_id: publisher and name, with a slash between.
        version: of the app.
        content: the archive.
        config: run configuration, with the changes of the run.
    """

    app_id: str
    version: str
    content: bytes
    config: Mapping[str, Scalar]


def get_publisher(app: AppFolder) -> str | None:
    """Returns who publishes an app; None where it does not say, and a stock SuperNode would end over its bundle."""
    publisher = app.content["tool"]["flwr"]["app"].get("publisher")
    return publisher if isinstance(publisher, str) and _PUBLISHER.match(publisher) else None


def make_bundle(app: AppFolder, config: Mapping[str, Scalar]) -> AppBundle:
    """Returns the bundle of an app from a pack; equal files give equal bytes.

    Raises:
        ConfigError: the app names no publisher, a file cannot be read, or they are too large.
    """
    if (publisher := get_publisher(app)) is None:
        raise ConfigError(f"{app.name}: {NO_PUBLISHER}")
    try:
        files = {str(file): (app.root / file).read_bytes() for file in app.files}
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read ({error.strerror}), and belongs to the app") from None
    if (num_bytes := sum(map(len, files.values()))) > MAX_APP_BYTES:
        raise ConfigError(f"{app.root}: its files have {num_bytes} bytes, at most {MAX_APP_BYTES} are sent")
    lines = [f"{name},{hashlib.sha256(body).hexdigest()},{8 * len(body)}" for name, body in files.items()]
    files[CONTENT] = "\n".join(lines).encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, body in files.items():
            archive.writestr(zipfile.ZipInfo(name, _DATE), body, zipfile.ZIP_DEFLATED)
    return AppBundle(
        app_id=f"{publisher}/{app.name}", version=app.version, content=packed.getvalue(), config=dict(config)
    )


@contextmanager
def open_app(path: Path) -> Iterator[AppFolder]:
    """Yields the app in a folder, or in a bundle, whose files then lie in a temporary folder.

    Raises:
        ConfigError: there is none, or a file of the bundle is not the one that it lists.
    """
    if not path.is_file():
        yield read_app(path)
        return
    files = _read_bundle(path)
    with tempfile.TemporaryDirectory(prefix="edgefl-fab-") as name:
        root = Path(name)
        try:
            _write_files(files, root, path)
            app = read_app(root, is_packed=True)
        except ConfigError as error:
            raise ConfigError(str(error).replace(name, str(path))) from None
        yield app


def _read_bundle(path: Path) -> dict[str, bytes]:
    """Returns the files of a bundle by their paths, as many and as long as an app may have."""
    if path.stat().st_size > MAX_APP_BYTES:
        raise ConfigError(f"{path} has {path.stat().st_size} bytes, a bundle of Flower has at most {MAX_APP_BYTES}")
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
            total = sum(info.file_size for info in infos)
            if len(infos) > MAX_FILES or total > MAX_APP_BYTES:
                raise ConfigError(
                    f"{path} would unpack to {len(infos)} files and {total} bytes; at most {MAX_FILES} files and "
                    f"{MAX_APP_BYTES} bytes are taken"
                )
            for info in infos:
                if fault := find_member_fault(info):
                    raise ConfigError(f"{path} {fault}")
            files = {info.filename: read_member(archive, info, MAX_APP_BYTES) for info in infos}
        if len(files) != len(infos):
            raise ConfigError(f"{path} holds a file twice")
        if CONTENT not in files:
            raise ConfigError(f"{path} is no bundle of a Flower app: it has no {CONTENT}")
        _check_content(files, files.pop(CONTENT).decode(), path)
    except ZIP_ERRORS as error:
        raise ConfigError(f"{path} is no bundle of a Flower app: {error}") from None
    return files


def _check_content(files: Mapping[str, bytes], content: str, path: Path) -> None:
    """Raises `ConfigError` unless a bundle lists each of its files, as it is, and no others."""
    listed = {}
    for line in content.splitlines():
        name, digest, num_bits = line.rsplit(",", 2)
        listed[name] = digest, int(num_bits)
    found = {name: (hashlib.sha256(body).hexdigest(), 8 * len(body)) for name, body in files.items()}
    if wrong := sorted(name for name in {*listed, *found} if listed.get(name) != found.get(name)):
        raise ConfigError(f"{path}: {wrong[0]!r:.120} is not the file that its {CONTENT} lists; build it again")


def _write_files(files: Mapping[str, bytes], root: Path, path: Path) -> None:
    for name, body in files.items():
        try:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(body)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} holds {name!r:.120}, which cannot be written: {error}") from None
