"""A bundle of Flower's own command is the app that it was built of, and one that was changed is refused."""

import hashlib
import struct
import tracemalloc
import zipfile

import pytest
from flower_apps import PROJECT, build_bundle, write_app

from edgefl.core.errors import ConfigError
from edgefl.flower import app_bundle
from edgefl.flower.app_bundle import CONTENT, open_app
from edgefl.flower.app_folder import read_app
from edgefl.flower.app_job import compute_fingerprint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    federations = (
        "[tool.flwr.federations]\ndefault = 'lab'\n[tool.flwr.federations.lab]\naddress = 'lab.example:9093'\n"
    )
    changes = {"pyproject.toml": PROJECT + federations, ".gitignore": "*.json\n", "key.json": "secret", "a.md": "ä"}
    return write_app(tmp_path_factory.mktemp("app"), changes)


@pytest.fixture(scope="module")
def bundle(folder, tmp_path_factory):
    """The bundle of the folder."""
    return build_bundle(folder, tmp_path_factory.mktemp("out"))


def read_files(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_bundle(path, files, *, is_listed=True, mode=0):
    """Writes a bundle of files; with their list of content where that is not to be an older one."""
    lines = [f"{name},{hashlib.sha256(body).hexdigest()},{8 * len(body)}" for name, body in files.items()
             if name != CONTENT]  # fmt: skip
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in {**files, **({CONTENT: "\n".join(lines)} if is_listed else {})}.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16 if name == "a.md" else 0
            archive.writestr(info, body, zipfile.ZIP_DEFLATED)
    return path


def test_a_bundle_of_flowers_own_command_is_the_app_of_its_folder(bundle, folder):
    with open_app(bundle) as app, open_app(folder) as unbundled:
        assert unbundled == read_app(folder)
        assert compute_fingerprint(app) == compute_fingerprint(unbundled)
        assert app.files == unbundled.files
        assert not app.has_federations
        root = app.root
        assert (root / "a.md").read_text() == "ä"
    assert not root.exists()


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"a.md": b"other"}, {"is_listed": False}, "'a.md' is not the file that its .info/CONTENT lists"),
        ({"b.py": b""}, {"is_listed": False}, "'b.py' is not the file"),
        ({"a.md": None}, {"is_listed": False}, "'a.md' is not the file"),
        ({CONTENT: None}, {"is_listed": False}, "is no bundle of a Flower app"),
        ({CONTENT: b"a.md,12"}, {"is_listed": False}, "is no bundle of a Flower app"),
        ({"../b.py": b""}, {}, "lies outside of where it is"),
        ({"/tmp/b.py": b""}, {}, "lies outside of where it is"),
        ({"a\\b.py": b""}, {}, "lies outside of where it is"),
        ({"./a.md": b""}, {}, "must be called 'a.md'"),
        ({"a.md": b"/etc/hostname"}, {"mode": 0o120777}, "is no plain file"),
        ({"a.md/b.py": b""}, {}, "cannot be written"),
        ({"a.md": bytes(11 * 1024 * 1024)}, {}, "would unpack to"),
        ({f"{number}.md": b"" for number in range(2001)}, {}, "would unpack to"),
        ({"pyproject.toml": b"[project]"}, {}, "changed.fab/pyproject.toml: there is no table"),
        ({"pyproject.toml": None}, {}, "changed.fab/pyproject.toml cannot be read"),
    ],
)  # fmt: skip
def test_a_bundle_that_is_not_what_it_lists_or_would_write_elsewhere_is_refused(
    bundle, tmp_path, changes, options, words
):
    files = {name: body for name, body in {**read_files(bundle), **changes}.items() if body is not None}
    path = write_bundle(tmp_path / "changed.fab", files, **options)
    with pytest.raises(ConfigError) as raised, open_app(path):
        pass
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "edgefl-fab" not in str(raised.value)


def test_what_is_no_bundle_and_one_that_is_too_long_are_refused(bundle, tmp_path, monkeypatch):
    (tmp_path / "text.fab").write_text("text")
    with pytest.raises(ConfigError, match="is no bundle of a Flower app"), open_app(tmp_path / "text.fab"):
        pass
    monkeypatch.setattr(app_bundle, "MAX_APP_BYTES", 100)
    with pytest.raises(ConfigError, match=r"has \d+ bytes, a bundle of Flower has at most 100"), open_app(bundle):
        pass


@pytest.mark.parametrize("way", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_bundle_that_unpacks_to_more_than_it_declares_is_refused_without_the_memory_for_it(tmp_path, way):
    path, size = tmp_path / "bomb.fab", 30_000_000
    with zipfile.ZipFile(path, "w", way) as archive:
        archive.writestr("a.md", bytes(size))
    data = path.read_bytes()
    path.write_bytes(data.replace(struct.pack("<I", size), struct.pack("<I", 10)))
    tracemalloc.start()
    words = "is no bundle of a Flower app: Bad CRC" if way == zipfile.ZIP_DEFLATED else "in a way other than deflate"
    with pytest.raises(ConfigError, match=words) as raised, open_app(path):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000
    assert "\n" not in str(raised.value)
