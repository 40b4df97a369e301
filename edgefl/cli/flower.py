"""`edgefl flower`: what of a Flower app runs on the boards of a fleet."""

from __future__ import annotations

import os
import zipfile
from dataclasses import asdict
from pathlib import Path

import click

from edgefl.cli.output import FullHelpGroup, echo, format_option, print_rows, select_known_columns
from edgefl.cli.sources import EXISTING_FILE_TYPE, FOLDER_TYPE, PATH_TYPE, make_client, make_path, url_option
from edgefl.core.errors import DataError, UnsoundError, UsageError

MAX_KEY_BYTES = 10_000
DEMO_OUT = Path("flower-demo")
ROUND_COLUMNS = ("round", "num_updates", "accuracy", "loss", "train_loss", "bytes_up", "bytes_down")
FINDING_COLUMNS = ("verdict", "where", "what")


@click.group("flower", cls=FullHelpGroup)
def command() -> None:
    """Bring a Flower app to the boards as it is."""


@command.command()
@click.argument("app", type=PATH_TYPE)
@format_option
def check(*, app: Path, fmt: str) -> None:
    """Say what of a Flower app works, a folder or a .fab, and run none of it; exit code 50 where it would not."""
    from edgefl.flower.app_bundle import open_app  # noqa: PLC0415 fast start
    from edgefl.flower.app_check import check_app  # noqa: PLC0415 likewise

    with open_app(app) as opened:
        findings = check_app(opened)
    print_rows([asdict(finding) for finding in findings], FINDING_COLUMNS, fmt, kind="findings")
    if faults := [finding for finding in findings if finding.verdict == "fails"]:
        raise UnsoundError(f"{app} would not run: {faults[0].where}: {faults[0].what}")


@command.command()
@click.argument("app", type=PATH_TYPE)
@click.option("--out", type=FOLDER_TYPE, default=Path("dist"), show_default=True, help="Folder for the wheel.")
def pack(*, app: Path, out: Path) -> None:
    """Make a wheel of a Flower app, a folder or a .fab, to sign as a pack and to install beside the coordinator."""
    from edgefl.flower.app_bundle import open_app  # noqa: PLC0415 likewise
    from edgefl.flower.app_job import get_job_name  # noqa: PLC0415 likewise
    from edgefl.flower.app_pack import write_app_wheel  # noqa: PLC0415 likewise

    with open_app(app) as opened:
        path = write_app_wheel(opened, out)
    echo(str(path))
    name, job = opened.name, get_job_name(opened.name)
    echo(
        f"sign it: edgefl signing sign {path} --kind pack --version {opened.version} --out {name}.bundle; "
        f"boards install it (edgefl devices install), and join in: edgefl device shard add {job} PATH",
        err=True,
    )


@command.command("demo")
@click.argument("app", type=PATH_TYPE)
@click.option("--devices", type=click.IntRange(1, 64), default=3, show_default=True, help="How many boards.")
@click.option(
    "--run-config", default="", metavar="PAIRS", help="Other values of its run configuration: 'key=1 name=\"a\"'."
)
@click.option(
    "--data", type=FOLDER_TYPE, help="Folder whose entries, by name, are the boards' files [default: empty folders]."
)
@click.option(
    "--out", type=FOLDER_TYPE, default=DEMO_OUT, show_default=True, help="Folder for all of it; an earlier demo goes."
)
def run_demo(*, app: Path, devices: int, run_config: str, data: Path | None, out: Path) -> None:
    """Run a Flower app, a folder or a .fab, on a coordinator and boards that are started on this machine for it."""
    from edgefl.cli.experiments import clear_folder  # noqa: PLC0415 fast start
    from edgefl.cli.run import RunProgressBar  # noqa: PLC0415 likewise
    from edgefl.flower.app_bundle import open_app  # noqa: PLC0415 likewise
    from edgefl.flower.app_job import get_job_name, make_app_run  # noqa: PLC0415 likewise
    from edgefl.flower.app_pack import write_app_wheel  # noqa: PLC0415 likewise
    from edgefl.simulation.local_fleet import LocalDeviceSpec, LocalFleet  # noqa: PLC0415 likewise

    out = out.resolve()
    with open_app(app) as opened:
        config = make_app_run(opened, run_config, name=None, num_boards=devices, groups=())
        files = _list_board_files(data, devices)
        for what, place in (("the app", app), *(("--data", file) for file in files)):
            if place.resolve().is_relative_to(out):
                raise UsageError(f"{what} lies in {out}, which the demo empties; choose another --out")
        clear_folder(out)
        with zipfile.ZipFile(write_app_wheel(opened, out / "dist")) as wheel:
            wheel.extractall(out / "site")
        job = get_job_name(opened.name)
    for number in range(1, devices + 1) if not files else ():
        files.append(out / f"files-{number}")
        files[-1].mkdir()
    specs = [
        LocalDeviceSpec(name=f"device-{number}", shards={job: str(path.resolve())})
        for number, path in enumerate(files, 1)
    ]
    paths = [str(out / "site"), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "EDGEFL_CONFINE": "auto"}
    echo(f"starting a coordinator and {devices} boards; their logs are in {out}")
    with LocalFleet(root=out / "fleet", devices=specs, environment=environment) as fleet:
        run_id = fleet.submit(config)
        with RunProgressBar() as progress:
            fleet.wait_for_run(run_id, on_change=progress.update)
        rows = fleet.list_history("rounds", run=run_id)
        fleet.run_command("run", "result", run_id, "--out", str(out / "result.zip"))
    print_rows(rows, select_known_columns(rows, ROUND_COLUMNS, set(ROUND_COLUMNS)), title=f"run {run_id}")
    echo(f"files of its ServerApp, and what it logged: {out / 'result.zip'}")
    echo(f"query it: edgefl history events --dir {fleet.directory} --run {run_id}")


def _list_board_files(data: Path | None, num_boards: int) -> list[Path]:
    """Returns the entries of a folder for the first boards, by name; nothing without a folder."""
    if data is None:
        return []
    try:
        found = sorted(path for path in data.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"{data} cannot be read: {error.strerror}") from None
    if len(found) < num_boards:
        raise DataError(f"{data} must have an entry for each of {num_boards} boards, got {len(found)}")
    return found[:num_boards]


@command.command("add-node")
@click.argument("name")
@click.argument("key", type=EXISTING_FILE_TYPE)
@click.option("--app", "apps", multiple=True, required=True, help="A Flower app that it takes part in; repeatable.")
@click.option("--group", "groups", multiple=True, help="A group of the device; repeatable.")
@url_option
def add_node(*, name: str, key: Path, apps: tuple[str, ...], groups: tuple[str, ...], url: str | None) -> None:
    """Let a stock flower-supernode with the public KEY take part as device NAME."""
    from edgefl.coordinator.fleet.supernode_keys import parse_supernode_key  # noqa: PLC0415 fast start
    from edgefl.flower.app_job import get_job_name  # noqa: PLC0415 likewise

    try:
        with key.open("rb") as file:
            content = file.read(MAX_KEY_BYTES)
    except OSError as error:
        raise UsageError(f"{key} cannot be read: {error.strerror}") from None
    try:
        public_key = parse_supernode_key(content.decode(errors="replace")).decode()
    except UsageError as error:
        raise UsageError(f"{key}: {error}") from None
    jobs = [get_job_name(app) for app in apps]
    make_client(url).post(make_path("supernodes", name), {"key": public_key, "jobs": jobs, "groups": list(groups)})
    echo(name)
    echo(
        "start it: flower-supernode --superlink HOST:PORT --root-certificates ca.pem "
        f"--auth-supernode-private-key {key.with_suffix('')}; ca.pem lies in the coordinator's directory",
        err=True,
    )
