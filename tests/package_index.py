"""A package index of this machine's own packages, and of other projects that should never be asked for.

What is installed here is packed into wheels when somebody asks for it, so that a fresh environment is made offline.
"""

from __future__ import annotations

import importlib.metadata
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from packaging.utils import canonicalize_name


class PackageIndex:
    """Serves `folder` under `url`, which is what `UV_DEFAULT_INDEX` and `PIP_INDEX_URL` name; ends with `close`.

    Attributes:
        asked: the names that were asked for, in their canonical spelling.
    """

    def __init__(self, folder: Path, *foreign: Path) -> None:
        self.asked: set[str] = set()
        self._folder, self._foreign, self._lock = folder, foreign, threading.Lock()
        folder.mkdir()
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page, _, name = self.path.strip("/").partition("/")
                found = index.page(name) if page == "simple" else index.file(name)
                self.send_response(404 if found is None else 200)
                self.send_header("Content-Type", "text/html" if page == "simple" else "application/octet-stream")
                self.send_header("Content-Length", str(len(found or b"")))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(found or b"")

            do_HEAD = do_GET  # noqa: N815 the name that http.server calls

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/simple"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def page(self, name: str) -> bytes | None:
        """Returns the links to a project's wheels; a foreign project's are all that there is of its name."""
        name = str(canonicalize_name(name))
        with self._lock:
            self.asked.add(name)
            wheels = [path for path in self._foreign if canonicalize_name(path.name.partition("-")[0]) == name]
            wheels = wheels or self._own(name)
        links = "".join(
            f'<a href="/files/{path.name}" data-core-metadata="true">{path.name}</a>\n' for path in wheels
        )
        return links.encode() if links else None

    def file(self, name: str) -> bytes | None:
        """Returns a wheel, or what it says of itself, so that nobody fetches a large one only to read that."""
        for path in (*self._foreign, self._folder / name.removesuffix(".metadata")):
            if path.name == name and path.is_file():
                return path.read_bytes()
            if f"{path.name}.metadata" == name and path.is_file():
                with zipfile.ZipFile(path) as wheel:
                    return wheel.read(f"{'-'.join(name.split('-')[:2])}.dist-info/METADATA")
        return None

    def _own(self, name: str) -> list[Path]:
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            return []
        made = next(self._folder.glob(f"{canonicalize_name(name).replace('-', '_')}-*.whl"), None)
        return [made or pack_installed(found, self._folder)]


def pack_installed(found: importlib.metadata.Distribution, folder: Path) -> Path:
    """Returns the wheel that an installed package came from, without its hashes."""
    stem = f"{canonicalize_name(found.name).replace('-', '_')}-{found.version}"
    tags = [
        line.split()[1].split("-") for line in (found.read_text("WHEEL") or "").splitlines() if line[:4] == "Tag:"
    ]
    tag = "-".join(".".join(dict.fromkeys(column)) for column in zip(*tags, strict=True))
    made_anew = {point.name for point in found.entry_points} | {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}
    unfinished, record = folder / f"{stem}.part", f"{stem}.dist-info/RECORD"
    with zipfile.ZipFile(unfinished, "w") as wheel:
        for file in found.files or ():
            if (
                file.name in made_anew
                or "__pycache__" in file.parts
                or (file.parts[0] == ".." and "bin" not in file.parts)
            ):
                continue
            info = next((part for part in file.parts[:1] if part.endswith(".dist-info")), None)
            place = str(file) if info is None else f"{stem}.dist-info/{'/'.join(file.parts[1:])}"
            wheel.write(file.locate(), f"{stem}.data/scripts/{file.name}" if file.parts[0] == ".." else place)
        wheel.writestr(record, "".join(f"{name},,\n" for name in (*wheel.namelist(), record)))
    return unfinished.rename(folder / f"{stem}-{tag}.whl")
