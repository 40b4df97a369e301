"""`edgefl doctor`: looks at what of edgefl is on this machine, and says what is wrong and what to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgefl.cli.render import format_option, print_rows
from edgefl.errors import EdgeflError, NotJoinedError, UnsoundError

if TYPE_CHECKING:
    from edgefl.client import Operator, OperatorFile
    from edgefl.coordinator.directory import CoordinatorDirectory
    from edgefl.findings import Finding

COLUMNS = ("where", "level", "check", "text", "remedy")
Part = tuple[str, "Callable[[], list[Finding]]"]


@click.command("doctor")
@click.option(
    "--dir", "root", type=click.Path(path_type=Path, file_okay=False), help="A coordinator's directory to look at."
)
@click.option("--state", type=click.Path(path_type=Path, file_okay=False), help="A device's state directory.")
@click.option("--url", metavar="URL", help="A coordinator to look at as its operator.")
@format_option
def command(*, root: Path | None, state: Path | None, url: str | None, fmt: str) -> None:
    """Look for problems, with a remedy for each; changes nothing.

    Without options it looks at all that it finds here: a coordinator's directory, a device's, an operator file.
    """
    from edgefl.findings import Level, check_software  # noqa: PLC0415 fast start

    software = check_software()
    parts = _chosen(root, state, url) or _found_here()
    if not parts and all(finding.level is Level.OK for finding in software):
        from edgefl.device.slots.layout import PROVISIONED  # noqa: PLC0415 fast start

        raise NotJoinedError(
            "nothing of edgefl is set up here; give --dir DIR, --state DIR or --url URL; on a provisioned board: "
            + PROVISIONED.format("doctor")
        )
    parts = [("software", lambda: software), *parts]
    rows = [
        {"where": where, **{name: str(getattr(finding, name)) for name in COLUMNS[1:]}}
        for where, look in parts
        for finding in look()
    ]
    if fmt == "table":
        _print_lines(rows)
    else:
        print_rows(rows, COLUMNS, fmt, kind="findings")
    if num_problems := sum(row["level"] == Level.PROBLEM for row in rows):
        raise UnsoundError(f"{num_problems} problem{'s' if num_problems > 1 else ''} found")


def _chosen(root: Path | None, state: Path | None, url: str | None) -> list[Part]:
    parts: list[Part] = []
    if root is not None:
        parts.append(("coordinator", lambda: _coordinator(root)))
    if state is not None:
        parts.append(("device", lambda: _device(state)))
    if url is not None:
        parts.append(("operator", lambda: _operator(url)))
    return parts


def _found_here() -> list[Part]:
    from edgefl.client import operator_path  # noqa: PLC0415 fast start
    from edgefl.coordinator.directory import default_directory  # noqa: PLC0415 likewise
    from edgefl.device.state import default_state_dir  # noqa: PLC0415 likewise

    return _chosen(
        default_directory() if (default_directory() / "settings.toml").exists() else None,
        default_state_dir() if (default_state_dir() / "device.json").exists() else None,
        None,
    ) + ([("operator", lambda: _operator(None))] if operator_path().exists() else [])


def _device(state: Path) -> list[Finding]:
    from edgefl.device.checks import check_device  # noqa: PLC0415 fast start

    return check_device(state, now=time.time())


def _coordinator(root: Path) -> list[Finding]:
    from edgefl.coordinator.checks import check_directory  # noqa: PLC0415 fast start
    from edgefl.coordinator.directory import load_directory  # noqa: PLC0415 likewise
    from edgefl.findings import problem  # noqa: PLC0415 likewise

    try:
        directory = load_directory(root)
    except EdgeflError as error:
        return [problem("coordinator", str(error), "edgefl coordinator init, or restore a backup")]
    return [*check_directory(directory, now=time.time()), *_from_outside(directory)]


def _from_outside(directory: CoordinatorDirectory) -> list[Finding]:
    """Returns how a running coordinator and its broker look to a device on this machine."""
    from edgefl.coordinator.checks import witness  # noqa: PLC0415 fast start
    from edgefl.device.checks import BrokerSide, check_broker, check_coordinator  # noqa: PLC0415 likewise
    from edgefl.device.mqtt_session import LinkTls  # noqa: PLC0415 likewise
    from edgefl.files import is_held  # noqa: PLC0415 likewise
    from edgefl.protocol import host_and_port  # noqa: PLC0415 likewise

    if not is_held(directory.root / "lock"):
        return []
    addresses = [f"127.0.0.1:{directory.port}", *directory.addresses]
    hello, findings = check_coordinator(list(dict.fromkeys(addresses)), directory.ca_cert.read_bytes())
    if hello is None:
        return findings
    hosts = [hello.broker_host] if hello.broker_host else [host_and_port(address)[0] for address in addresses]
    with witness(directory) as guest:
        tls = LinkTls(ca=guest.tls.ca, cert=guest.tls.cert, key=guest.tls.key)
        side = BrokerSide(tls=tls, fleet=directory.fleet, identity=guest.identity, is_in_use=False)
        return [*findings, *check_broker(list(dict.fromkeys(hosts)), hello.broker_port, side)]


def _operator(url: str | None) -> list[Finding]:
    from edgefl.client import Operator, operator_path, read_operator_file  # noqa: PLC0415 fast start
    from edgefl.device.checks import check_coordinator  # noqa: PLC0415 likewise
    from edgefl.findings import check_private, problem  # noqa: PLC0415 likewise

    try:
        operator, known = Operator.from_options(url), read_operator_file(url)
    except EdgeflError as error:
        return [problem("operator", str(error), "copy operator.toml from the coordinator's machine")]
    files = check_private(operator_path().parent, [operator_path()]) if operator_path().exists() else []
    address = operator.url.removeprefix("https://")
    hello, findings = check_coordinator([address], operator.ca_pem.encode())
    return [*files, *findings, *(_token(operator, known) if hello else [])]


def _token(operator: Operator, known: OperatorFile) -> list[Finding]:
    from edgefl.findings import ok, problem, warning  # noqa: PLC0415 fast start

    try:
        rows = operator.get("/edgefl/v1/devices")["rows"]
    except EdgeflError as error:
        return [problem("operator", str(error), "get a new operator.toml: edgefl coordinator init")]
    findings = [ok("operator", f"fleet {known.fleet} at {operator.url} takes the token and has {len(rows)} devices")]
    gone = [row["device_id"] for row in rows if row["presence"] == "gone"]
    if gone:
        told = f"{len(gone)} of {len(rows)} devices are gone: {', '.join(gone[:5])}"
        findings.append(warning("devices", told, "on such a board: edgefl doctor"))
    return findings


def _print_lines(rows: list[dict[str, str]]) -> None:
    from edgefl.cli.render import human  # noqa: PLC0415 fast start

    where = None
    for row in rows:
        if row["where"] != where:
            where = row["where"]
            click.echo(where)
        click.echo(f"  {row['level']:<7}  {row['check']:<12}  {human('', row['text'])}")
        if row["remedy"]:
            click.echo(f"  {'':<7}  {'':<12}  remedy: {human('', row['remedy'])}")
