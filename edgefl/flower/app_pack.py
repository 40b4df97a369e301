"""Wheel of a Flower app, for a signed pack: its files beside a class that inherits from `FlowerApp`.

The app's files lie in a folder of the wheel's own package, so two apps may have modules of the same name.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import zipfile
from pathlib import Path

import tomli_w
from packaging.utils import canonicalize_name

from edgefl.core.errors import ConfigError
from edgefl.flower.app_folder import CONFIG_FILE, MAX_APP_BYTES, AppFolder
from edgefl.flower.app_job import get_job_name
from edgefl.system.atomic_files import make_store_error, write_atomic

APP_FOLDER = "app"
_DATE = (2024, 1, 1, 0, 0, 0)
_EXTRAS = re.compile(r"\[[^\]]*\]")
_MODULE = '''"""The Flower app {name}."""

from pathlib import Path

from edgefl.flower.app_job import FlowerApp


class App(FlowerApp):
    """The Flower app {name}, as it was packed."""

    root = Path(__file__).parent / "{folder}"
'''


def write_app_wheel(app: AppFolder, out: Path) -> Path:
    """Returns the wheel of an app in a folder; equal files give equal bytes.

    Raises:
        ConfigError: the app is too large.
        StoreError: the wheel cannot be written.
    """
    if app.num_bytes > MAX_APP_BYTES:
        raise ConfigError(f"{app.root}: its files have {app.num_bytes} bytes, at most {MAX_APP_BYTES} are sent")
    project = canonicalize_name(f"edgefl-app-{app.name}").replace("-", "_")
    info = f"{project}-{app.version}.dist-info"
    requires = "".join(f"Requires-Dist: {_EXTRAS.sub('', line)}\n" for line in app.dependencies)
    metadata = f"Metadata-Version: 2.1\nName: {project.replace('_', '-')}\nVersion: {app.version}\n{requires}"
    try:
        sent = {f"{project}/{APP_FOLDER}/{file}": (app.root / file).read_bytes() for file in app.files}
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read ({error.strerror}), and belongs to the app") from None
    files = {
        f"{project}/__init__.py": _MODULE.format(name=app.name, folder=APP_FOLDER).encode(),
        **sent,
        f"{project}/{APP_FOLDER}/{CONFIG_FILE}": tomli_w.dumps(app.content).encode(),
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: edgefl\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[edgefl.tasks]\n{get_job_name(app.name)} = {project}:App\n".encode(),
    }
    record = io.StringIO()
    rows = [(name, f"sha256={_compute_digest(content)}", len(content)) for name, content in files.items()]
    csv.writer(record, lineterminator="\n").writerows([*rows, (f"{info}/RECORD", "", "")])
    files[f"{info}/RECORD"] = record.getvalue().encode()
    path = out / f"{project}-{app.version}-py3-none-any.whl"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise make_store_error(path, error) from None
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(zipfile.ZipInfo(name, _DATE), content, zipfile.ZIP_DEFLATED)
    write_atomic(path, packed.getvalue())
    return path


def _compute_digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
