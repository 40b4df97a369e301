"""The images' files: linted, and whatever they name is there."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

from edgefl.cli.main import edgefl
from edgefl.provision.provisioning_files import find_path as source

ROOT = Path(__file__).parents[2]
FOLDER = source("container")
DOCKERFILES = [FOLDER / "Dockerfile", FOLDER / "Dockerfile.l4t"]
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SCRIPTS = sorted(FOLDER.glob("*.sh"))


def steps(dockerfile):
    """The instructions of a Dockerfile, each on one line."""
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_is_there_in_the_context_and_what_is_called_was_copied(dockerfile):
    lines = (FOLDER / f"{dockerfile.name}.dockerignore").read_text().splitlines()
    let_in = {line.removeprefix("!") for line in lines if line.startswith("!")}
    places = set()
    for kind, rest in steps(dockerfile):
        if kind == "COPY":
            *words, target = rest.split()
            places |= {f"{target}{Path(word).name}" for word in words}
            for word in words if "--from" not in rest else ():
                assert (ROOT / word).exists(), word
                assert word.split("/")[0] in let_in, f"{word} is not in the context"
    called = set(re.findall(r"/usr/local/lib/edgefl/\w+\.\w+", dockerfile.read_text()))
    assert called
    assert called <= places
    program = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if program is not None:
        done = subprocess.run([program, str(dockerfile)], capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_has_a_pinned_base_no_root_a_health_check_and_an_init(dockerfile):
    told = steps(dockerfile)
    (base,) = [rest.partition("=")[2] for kind, rest in told if kind == "ARG" and rest.startswith("BASE=")]
    assert re.search(r":[^:]*\d[^:]*$", base), f"{base} names no release"
    assert ("ARG", "BASE") in told, "a stage must ask for BASE again to name it"
    assert ("LABEL", 'org.opencontainers.image.base.name="${BASE}"') in told
    users = [rest for kind, rest in told if kind == "USER"]
    checks = [rest for kind, rest in told if kind == "HEALTHCHECK"]
    assert users
    assert len(users) == len(checks)
    assert not {"root", "0"} & set(users)
    assert [rest for kind, rest in told if kind == "ENTRYPOINT"] == ['["tini", "--"]']
    assert all(rest.startswith("[") for kind, rest in told if kind in {"CMD", "ENTRYPOINT"})


def test_compose_builds_targets_that_there_are_with_files_that_there_are():
    stages = {rest.split()[-1] for kind, rest in steps(FOLDER / "Dockerfile") if kind == "FROM"}
    (base,) = [rest for kind, rest in steps(FOLDER / "Dockerfile") if kind == "ARG" and rest.startswith("BASE=")]
    for name, service in COMPOSE["services"].items():
        build = service["build"]
        assert build["args"]["BASE"] == f"${{EDGEFL_BASE:-{base.removeprefix('BASE=')}}}"
        assert build["target"] in stages, name
        assert ((FOLDER / build["context"]).resolve() / build["dockerfile"]) == FOLDER / "Dockerfile"
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        for volume in service["volumes"]:
            place = volume.split(":")[0]
            assert place in COMPOSE["volumes"] or place.startswith("${EDGEFL_DATA"), volume
        for secret in service.get("secrets", []):
            assert secret in COMPOSE["secrets"]


@pytest.mark.parametrize(
    ("machine", "cpython", "extras", "lock", "rest"),
    [
        ("aarch64", "313", "", "pi-cp313-light", "--no-deps ."),
        ("aarch64", "313", "[train]", "pi-cp313", "--no-deps ."),
        ("aarch64", "312", "", "jetson-cp312-light", "--no-deps ."),
        ("aarch64", "313", "[coordinator]", "pi-cp313-coordinator", "--no-deps ."),
        ("x86_64", "313", "", "pc-cp313-light", "--no-deps ."),
        ("x86_64", "313", "[train]", "pc-cp313-light", "--constraint constraints.txt .[train]"),
    ],
)
def test_an_image_installs_by_the_hashes_of_its_machine_s_lock(tmp_path, machine, cpython, extras, lock, rest):
    done, told = _packages(tmp_path, machine, cpython, extras)
    assert done.returncode == 0, done.stderr
    common = "-m pip install --no-cache-dir --quiet"
    assert told == [
        f"{common} --no-deps --require-hashes --requirement provisioning/locks/{lock}.txt",
        f"{common} {rest}",
    ]
    assert (ROOT / f"provisioning/locks/{lock}.txt").is_file()
    for unknown in (("armv7l", "313"), ("x86_64", "314")):
        done, told = _packages(tmp_path, *unknown, "")
        assert (done.returncode, told, "there is no lock" in done.stderr) == (1, [], True)


def _packages(folder, machine, cpython, extras):
    """Runs packages.sh where python3 only notes what pip would do; returns that too."""
    calls = folder / "calls"
    calls.write_text("")
    programs = {
        "uname": f"echo {machine}",
        "python3": f'mkdir -p "$3/bin" && cp {folder}/pip "$3/bin/python"',
        "pip": f'case "$*" in *version_info*) echo cp{cpython};; *) echo "$*" >>{calls};; esac',
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    done = subprocess.run(
        ["sh", str(FOLDER / "packages.sh"), str(folder / "venv"), extras],
        cwd=ROOT,
        env={"PATH": f"{folder}:/usr/bin:/bin", "PIP_FLAGS": "--quiet"},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    return done, calls.read_text().splitlines()


def test_compose_puts_the_coordinator_where_the_broker_is():
    services = COMPOSE["services"]
    assert services["coordinator"]["network_mode"] == "service:broker"
    assert "ports" not in services["coordinator"], "the network is the broker's"
    exposed = {port for kind, rest in steps(FOLDER / "Dockerfile") if kind == "EXPOSE" for port in rest.split()}
    assert {port.split(":")[1] for port in services["broker"]["ports"]} == exposed
    assert services["coordinator"]["environment"]["EDGEFL_BROKER"] == "mqtts://127.0.0.1:8883"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_scripts_are_plain_shell_and_call_edgefl_with_options_that_it_has(script):
    if shutil.which("shellcheck") is not None:
        done = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stdout) == (0, "")
    if script.name == "packages.sh":
        return  # it makes what has edgefl
    calls = re.findall(r"^\s*(?:exec )?edgefl (.+)$", script.read_text().replace("\\\n", " "), re.MULTILINE)
    assert calls
    for call in calls:
        words = call.split()
        command: click.Command = edgefl
        while isinstance(command, click.Group):
            found = command.get_command(click.Context(command), words.pop(0))
            assert found is not None, call
            command = found
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, call


def test_a_device_without_a_join_file_says_what_it_wants():
    done = subprocess.run(
        ["sh", str(FOLDER / "device.sh")],
        env={"PATH": "/usr/bin:/bin", "EDGEFL_JOIN_FILE": "/none"},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    if Path("/var/lib/edgefl/device.json").exists():
        pytest.skip("this machine is a device itself: run it on another one")
    assert done.returncode == 36
    assert "no join file at /none" in done.stderr


@pytest.mark.extended
def test_health_follows_a_real_coordinator_and_its_broker(tmp_path):
    from edgefl.simulation.local_fleet import LocalFleet  # noqa: PLC0415 of this test alone

    def status(what, **ports):
        command = [sys.executable, str(FOLDER / "health.py"), what, str(fleet.directory)]
        environment = {name: str(port) for name, port in ports.items()}
        done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=60)
        return done.returncode

    with LocalFleet(root=tmp_path, devices=[]) as fleet:
        assert status("coordinator", EDGEFL_PORT=fleet.port) == 0
        assert status("broker", EDGEFL_BROKER_PORT=fleet.broker_port) == 0
    assert status("coordinator", EDGEFL_PORT=fleet.port) == 1
    assert status("broker", EDGEFL_BROKER_PORT=fleet.broker_port) == 1
