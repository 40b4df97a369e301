"""The wheel folder, filled by the real pip from a folder that stands for the index."""

import base64
import hashlib
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from edgefl.cli.provision import command
from edgefl.core.errors import ConfigError, NetworkError
from edgefl.provision.wheel_locks import PinnedWheel, get_platform
from edgefl.provision.wheelhouse import fill_wheelhouse

PI = get_platform("pi-cp313")
OLD = 315532800  # 1980, where zip begins


def make_wheel(folder: Path, name: str, tag: str = "py3-none-any", *, word: str = "one") -> PinnedWheel:
    """Writes a wheel that pip takes, and returns its line of a lock."""
    folder.mkdir(exist_ok=True)
    module = name.replace("-", "_")
    file = folder / f"{module}-1.0-{tag}.whl"
    parts = {
        f"{module}.py": f"word = {word!r}\n",
        f"{module}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{module}-1.0.dist-info/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    record = [f"{path},sha256={_record_hash(text)},{len(text)}" for path, text in parts.items()]
    parts[f"{module}-1.0.dist-info/RECORD"] = "\n".join([*record, f"{module}-1.0.dist-info/RECORD,,", ""])
    with zipfile.ZipFile(file, "w") as wheel:
        for path, text in parts.items():
            wheel.writestr(zipfile.ZipInfo(path), text)
    return PinnedWheel(name=name, version="1.0", sha256=hashlib.sha256(file.read_bytes()).hexdigest(), file=file.name)


def _record_hash(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all that pip finds."""
    folder = tmp_path / "index"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def own_wheel(tmp_path: Path) -> Path:
    made = make_wheel(tmp_path / "own", "edgefl-fleet")
    return tmp_path / "own" / made.file


def test_gets_the_wheels_of_the_board_keeps_good_ones_and_replaces_damaged_and_older_ones(
    index: Path, own_wheel: Path, tmp_path: Path
) -> None:
    lock = [make_wheel(index, "fast", "cp313-cp313-manylinux_2_28_aarch64"), make_wheel(index, "pure")]
    make_wheel(index, "fast", "cp313-cp313-manylinux_2_28_x86_64")
    folder = tmp_path / "wheels"
    folder.mkdir()
    for older in ("edgefl-0.1.0", "edgefl_fleet-0.0.9"):
        (folder / f"{older}-py3-none-any.whl").touch()
    found = fill_wheelhouse(folder, PI, lock, own_wheel=own_wheel)
    assert [path.name for path in found] == [lock[0].file, lock[1].file, own_wheel.name]
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in found)
    (index / lock[0].file).unlink()
    (folder / lock[1].file).write_bytes(b"cut off")
    fill_wheelhouse(folder, PI, lock, own_wheel=folder / own_wheel.name)
    for wheel in lock:
        assert hashlib.sha256((folder / wheel.file).read_bytes()).hexdigest() == wheel.sha256
    assert (folder / own_wheel.name).read_bytes() == own_wheel.read_bytes()


@pytest.mark.parametrize(
    ("absent", "told"),
    [("elsewhere", r"No matching distribution found for pure==1\.0"),
     ("index", r"pip could not get the wheels for pi-cp313: THESE PACKAGES DO NOT MATCH THE HASHES.* pure==1\.0")],
    ids=["lacking", "changed"],
)  # fmt: skip
def test_a_package_that_the_index_lacks_or_that_was_changed_there_is_named(
    index: Path, own_wheel: Path, tmp_path: Path, absent: str, told: str
) -> None:
    lock = [make_wheel(tmp_path / absent, "pure")]
    make_wheel(index, "pure" if absent == "index" else "other", word="another")
    with pytest.raises(NetworkError, match=told):
        fill_wheelhouse(tmp_path / "wheels", PI, lock, own_wheel=own_wheel)
    assert not list((tmp_path / "wheels").iterdir())


def test_another_package_does_not_pass_for_edgefl(index: Path, tmp_path: Path) -> None:
    other = index / make_wheel(index, "pure").file
    with pytest.raises(ConfigError, match=r"edgefl's wheel must be a file edgefl_fleet-VERSION-py3-none-any\.whl"):
        fill_wheelhouse(tmp_path / "wheels", PI, [], own_wheel=other)


def test_the_command_ends_with_one_line_when_there_is_no_index(index: Path, own_wheel: Path, tmp_path: Path) -> None:
    index.mkdir()
    words = ["--board", "pi-cp311", "--out", str(tmp_path / "wheels"), "--edgefl-wheel", str(own_wheel)]
    done = CliRunner().invoke(command, ["wheels", *words])
    assert isinstance(done.exception, NetworkError)
    assert "pip could not get the wheels for pi-cp311" in str(done.exception)


@pytest.mark.slow
def test_a_checkout_s_own_wheel_is_built_with_all_that_a_board_needs(tmp_path: Path) -> None:
    try:
        [wheel] = fill_wheelhouse(tmp_path, PI, [])
    except NetworkError as error:
        pytest.skip(f"the tools that build a wheel cannot be had, {error}: give pip an index")
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
    data = "edgefl/provision/data"
    assert {f"{data}/board/firstboot.sh", f"{data}/units/edgefl-device.service"} <= names
    assert f"{data}/locks/{PI.name}-light.txt" in names
