"""The locks agree with pyproject.toml and constraints.txt; and each of them holds one wheel that fits its boards."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from edgefl.core.errors import ConfigError, NotFoundError
from edgefl.provision.wheel_locks import (
    LOCK_SUFFIXES,
    WHEEL_PLATFORMS,
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
