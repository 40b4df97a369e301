"""The locks agree with pyproject.toml and constraints.txt, and each holds one wheel that fits its boards.

The wheel folder is filled by the real pip from a folder that stands for the index.
"""

import base64
import hashlib
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from edgefl.cli.provision.commands import command
from edgefl.core.errors import ConfigError, NetworkError, NotFoundError
from edgefl.provision.wheels import (
    LOCK_SUFFIXES,
    WHEEL_PLATFORMS,
    PinnedWheel,
    fill_wheelhouse,
    get_lock_name,
    get_platform,
    load_lock_text,
    parse_lock,
)

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "provisioning" / "locks"
LEFT_OUT = "not-on-boards.txt"
LOCKS = [
    (family, extra)
    for family in WHEEL_PLATFORMS.values()
    for extra in LOCK_SUFFIXES
    if family.has_torch or extra != "train"
]
NAMES = [get_lock_name(family, extra) for family, extra in LOCKS]
each_lock = pytest.mark.parametrize(("family", "extra"), LOCKS, ids=NAMES)


def wheels_of(family, extra):
    return {wheel.name: wheel for wheel in parse_lock(load_lock_text(family, extra))}


def environment_of(family):
    own = {"python_version": family.python_version, "platform_machine": family.machine, "sys_platform": "linux"}
    return {**default_environment(), **own, "extra": ""}


def constrained(family):
    """Returns the version of each package of constraints.txt on these boards."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    asked = [Requirement(line) for line in lines if line and not line.startswith("#")]
    environment = environment_of(family)
    fitting = [each for each in asked if each.marker is None or each.marker.evaluate(environment)]
    return {canonicalize_name(each.name): str(each.specifier).removeprefix("==") for each in fitting}


@each_lock
def test_a_lock_pins_every_dependency_at_the_version_of_the_constraints_as_a_wheel_that_fits(family, extra):
    wheels, known, environment = wheels_of(family, extra), constrained(family), environment_of(family)
    assert {name: wheel.version for name, wheel in wheels.items()} == {name: known.get(name) for name in wheels}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(project["optional-dependencies"][extra] if extra else ())]
    for each in map(Requirement, asked):
        if each.marker is None or each.marker.evaluate(environment):
            assert wheels[canonicalize_name(each.name)].version in each.specifier, each
    platforms = family.list_platform_tags()
    fitting = {
        *cpython_tags(python_version=family.python, abis=[family.abi], platforms=platforms),
        *compatible_tags(python_version=family.python, interpreter=family.abi, platforms=platforms),
    }
    for wheel in wheels.values():
        name, version, _, tags = parse_wheel_filename(wheel.file)
        assert (name, str(version)) == (wheel.name, wheel.version)
        assert tags & fitting, wheel.file
    # The last torch that is small and runs on old cores, and nothing of CUDA.
    assert ("torch" in wheels) == (extra == "train")
    assert not [name for name in wheels if name.startswith(("nvidia-", "cuda-"))]
    if extra == "train":
        assert (family.machine, wheels["torch"].version) == ("aarch64", "2.9.1")
    text = load_lock_text(family, extra)
    assert "--only-binary :all:" in text.splitlines()
    assert not re.search(r"https?:|--(extra-)?index-url|--find-links", text)


def test_a_device_gets_no_broker_web_server_database_or_grpc_and_a_coordinator_all_that_it_serves_with():
    lines = [line for line in (FOLDER / LEFT_OUT).read_text().splitlines() if not line.startswith("#")]
    left_out = {canonicalize_name(line) for line in lines}
    for family, extra in LOCKS:
        wheels = set(wheels_of(family, extra))
        if extra == "coordinator":
            assert {"alembic", "fastapi", "sqlalchemy", "uvicorn"} <= wheels
        else:
            assert not wheels & (left_out | {"amqtt", "mako", "pydantic", "prometheus-client"})


def test_locks_are_those_of_the_boards_and_others_are_told_what_there_is():
    assert sorted(path.name for path in FOLDER.glob("*.txt")) == sorted([*NAMES, LEFT_OUT])
    with pytest.raises(NotFoundError, match="gigabytes of CUDA"):
        load_lock_text(get_platform("pc-cp313"), "train")
    with pytest.raises(NotFoundError, match="no lock for boards 'pi-cp39'; there are pi-cp311, pi-cp313"):
        get_platform("pi-cp39")
    line = f"numpy==2.4.6 --hash=sha256:{64 * 'a'} # numpy-2.4.6-py3-none-any.whl"
    assert len(parse_lock(f"# first\n{line}\n")) == 1
    for damaged in (
        "numpy==2.4.6", line.replace("==", ">=", 1), line.replace(64 * "a", 63 * "a"),
        line.replace("-py3-none-any.whl", ".tar.gz"), "--extra-index-url https://elsewhere.example/simple",
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="line 2 of the lock is"):
            parse_lock(f"# first\n{damaged}\n")


@pytest.mark.slow
def test_the_index_still_gives_what_the_locks_name():
    words = [sys.executable, str(FOLDER / "make_locks.py"), "--check"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if "error sending request" in done.stderr or "dns error" in done.stderr:
        pytest.skip("the package index cannot be reached: set UV_INDEX_URL")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


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
