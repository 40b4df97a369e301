"""`edgefl doctor` and `edgefl field-report`: problems of this machine with remedies, and a device's report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgefl.cli.output import echo, format_option, format_value, print_rows
from edgefl.cli.sources import EXISTING_FILE_TYPE, FILE_TYPE, FOLDER_TYPE, fleet_option, load_device_state
from edgefl.core.errors import EdgeflError, NotJoinedError, UnsoundError, UsageError

if TYPE_CHECKING:
    from edgefl.coordinator.directory import CoordinatorDirectory
    from edgefl.system.api_client import CoordinatorClient, OperatorFile
    from edgefl.system.diagnostics import Finding

COLUMNS = ("where", "level", "check", "text", "remedy")
CheckGroup = tuple[str, "Callable[[], list[Finding]]"]


@click.command("doctor")
@click.option("--dir", "root", type=FOLDER_TYPE, help="A coordinator's directory to look at.")
@click.option("--state", type=FOLDER_TYPE, help="A device's state directory.")
@click.option("--url", metavar="URL", help="A coordinator to look at as its operator.")
@fleet_option
@format_option
def command(*, root: Path | None, state: Path | None, url: str | None, fmt: str) -> None:
    """Look for problems, with a remedy for each; changes nothing.

    Without options it looks at all that it finds here: a coordinator's directory, a device's, an operator file.
    """
    from edgefl.system.diagnostics import check_software  # noqa: PLC0415 fast start

    software = check_software()
    parts = _select_checks(root, state, url) or _find_local_checks()
    if not parts and all(finding.level == "ok" for finding in software):
        from edgefl.device.updates.slots import PROVISIONED_COMMAND  # noqa: PLC0415 fast start

        raise NotJoinedError(
            "nothing of edgefl is set up here; give --dir DIR, --state DIR or --url URL; on a provisioned board: "
            + PROVISIONED_COMMAND.format("doctor")
        )
    parts = [("software", lambda: software), *parts]
    rows = [
        {"where": location, **{name: str(getattr(finding, name)) for name in COLUMNS[1:]}}
        for location, check in parts
        for finding in check()
    ]
    if fmt == "table":
        _print_findings(rows)
    else:
        print_rows(rows, COLUMNS, fmt, kind="findings")
    if num_problems := sum(row["level"] == "problem" for row in rows):
        raise UnsoundError(f"{num_problems} problem{'s' if num_problems > 1 else ''} found")


def _select_checks(root: Path | None, state: Path | None, url: str | None) -> list[CheckGroup]:
    parts: list[CheckGroup] = []
    if root is not None:
        parts.append(("coordinator", lambda: _check_coordinator(root)))
    if state is not None:
        parts.append(("device", lambda: _check_device(state)))
    if url is not None:
        parts.append(("operator", lambda: _check_operator(url)))
    return parts


def _find_local_checks() -> list[CheckGroup]:
    from edgefl.coordinator.directory import default_directory  # noqa: PLC0415 likewise
    from edgefl.device.state_dir import get_default_state_dir  # noqa: PLC0415 likewise
    from edgefl.system.api_client import is_coordinator_configured  # noqa: PLC0415 fast start

    return _select_checks(
        default_directory() if (default_directory() / "settings.toml").exists() else None,
        get_default_state_dir() if (get_default_state_dir() / "device.json").exists() else None,
        None,
    ) + ([("operator", lambda: _check_operator(None))] if is_coordinator_configured() else [])


def _check_device(state: Path) -> list[Finding]:
    from edgefl.device.diagnostics.device_checks import check_device  # noqa: PLC0415 fast start

    return check_device(state, now=time.time())


def _check_coordinator(root: Path) -> list[Finding]:
    from edgefl.coordinator.diagnostics import check_directory  # noqa: PLC0415 fast start
    from edgefl.coordinator.directory import load_directory  # noqa: PLC0415 likewise
    from edgefl.system.diagnostics import problem  # noqa: PLC0415 likewise

    try:
        directory = load_directory(root)
    except EdgeflError as error:
        return [problem("coordinator", str(error), "edgefl coordinator init, or restore a backup")]
    return [*check_directory(directory, now=time.time()), *_check_from_outside(directory)]


def _check_from_outside(directory: CoordinatorDirectory) -> list[Finding]:
    """Returns findings on a running coordinator and its broker, from the side of a device."""
    from edgefl.coordinator.diagnostics import issue_probe_identity  # noqa: PLC0415 fast start
    from edgefl.core.protocol import host_and_port  # noqa: PLC0415 likewise
    from edgefl.device.diagnostics.device_checks import check_broker, check_coordinator  # noqa: PLC0415 likewise
    from edgefl.system.atomic_files import is_locked  # noqa: PLC0415 likewise

    if not is_locked(directory.root / "lock"):
        return []
    addresses = [f"127.0.0.1:{directory.port}", *directory.addresses]
    hello, findings = check_coordinator(list(dict.fromkeys(addresses)), directory.ca_cert.read_bytes())
    if hello is None:
        return findings
    hosts = [hello.broker_host] if hello.broker_host else [host_and_port(address)[0] for address in addresses]
    with issue_probe_identity(directory) as (identity, tls):
        brokers = [(host, hello.broker_port) for host in dict.fromkeys(hosts)]
        return [*findings, *check_broker(brokers, tls, fleet=directory.fleet, identity=identity)]


def _check_operator(url: str | None) -> list[Finding]:
    from edgefl.device.diagnostics.device_checks import check_coordinator  # noqa: PLC0415 likewise
    from edgefl.system.api_client import CoordinatorClient, load_operator_file  # noqa: PLC0415 fast start
    from edgefl.system.diagnostics import check_private, problem  # noqa: PLC0415 likewise

    try:
        operator = CoordinatorClient.from_options(url)
        assert operator.file is not None
        operator_file = load_operator_file(operator.file)
    except EdgeflError as error:
        return [problem("operator", str(error), "copy operator.toml from the coordinator's machine")]
    files = check_private(operator.file.parent, [operator.file])
    address = operator.url.removeprefix("https://")
    hello, findings = check_coordinator([address], operator.ca_pem.encode())
    return [*files, *findings, *(_check_token(operator, operator_file) if hello else [])]


def _check_token(operator: CoordinatorClient, known: OperatorFile) -> list[Finding]:
    from edgefl.system.diagnostics import ok, problem, warning  # noqa: PLC0415 fast start

    try:
        rows = operator.get("/edgefl/v1/devices")["rows"]
    except EdgeflError as error:
        return [problem("operator", str(error), "get a new operator.toml: edgefl coordinator init")]
    findings = [ok("operator", f"fleet {known.fleet} at {operator.url} takes the token and has {len(rows)} devices")]
    gone_devices = [row["device_id"] for row in rows if row["presence"] == "gone"]
    if gone_devices:
        summary = f"{len(gone_devices)} of {len(rows)} devices are gone: {', '.join(gone_devices[:5])}"
        findings.append(warning("devices", summary, "on such a board: edgefl doctor"))
    return findings


def _print_findings(rows: list[dict[str, str]]) -> None:
    location = None
    for row in rows:
        if row["where"] != location:
            location = row["where"]
            click.echo(location)
        click.echo(f"  {row['level']:<7}  {row['check']:<12}  {format_value('', row['text'])}")
        if row["remedy"]:
            click.echo(f"  {'':<7}  {'':<12}  remedy: {format_value('', row['remedy'])}")


@click.command("field-report")
@click.option(
    "--out",
    type=FILE_TYPE,
    help="The file to write [default: edgefl-report-NAME-DATE.tar.gz].",
)
@click.option("--state", "root", type=FOLDER_TYPE, help="State directory of a joined board.")
@click.option("--print", "printed", type=EXISTING_FILE_TYPE, help="Print a report instead.")
@click.option("--json", "as_json", is_flag=True, help="With --print: as JSON.")
def field_report(*, out: Path | None, root: Path | None, printed: Path | None, as_json: bool) -> None:
    """Measure this board; bundle facts, findings, timings and logs in one file, without keys, tokens, addresses."""
    from edgefl.device.diagnostics.diagnostic_report import (  # noqa: PLC0415 fast start
        ReportContext,
        format_summary,
        make_report,
        read_report,
        write_report,
    )

    if printed is not None:
        facts = read_report(printed)
        echo(json.dumps(facts, indent=2) if as_json else format_summary(facts).removesuffix("\n"))
        return
    if as_json:
        raise UsageError("--json says how --print prints a report; give --print FILE")
    state = load_device_state(root)
    name = state.device_id if state else "board"
    path = out or Path(f"edgefl-report-{name}-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path.absolute().parent} is no folder; give another --out")
    context = ReportContext(state=state, scratch=state.root if state else path.absolute().parent)
    report = make_report(context, on_section=lambda part: click.echo(f"  {part}", err=True))
    write_report(path, report)
    failed = [name for name, part in report.facts.items() if isinstance(part, dict) and "error" in part]
    click.echo(
        f"wrote {path} in {report.facts['took_s']:.0f} s" + (f"; without {', '.join(failed)}" if failed else "")
    )
    click.echo(f"look at it before you send it: edgefl field-report --print {path}")
