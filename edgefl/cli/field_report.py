"""`edgefl field-report`: writes a device's measurements, findings and logs to one file, or prints such a file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgefl.core.errors import NotJoinedError, UsageError

if TYPE_CHECKING:
    from edgefl.device.state_dir import DeviceStateDir


@click.command("field-report")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write [default: edgefl-report-NAME-DATE.tar.gz].",
)
@click.option(
    "--state", "root", type=click.Path(path_type=Path, file_okay=False), help="State directory of a joined board."
)
@click.option(
    "--print", "printed", type=click.Path(path_type=Path, dir_okay=False, exists=True), help="Print a report instead."
)
@click.option("--json", "as_json", is_flag=True, help="With --print: as JSON.")
def command(*, out: Path | None, root: Path | None, printed: Path | None, as_json: bool) -> None:
    """Measure this board; bundle facts, findings, timings and logs in one file, without keys, tokens, addresses."""
    from edgefl.device.diagnostics.diagnostic_report import ReportContext, make_report  # noqa: PLC0415 fast start
    from edgefl.device.diagnostics.report_archive import format_summary, read_report, write_report  # noqa: PLC0415 likewise

    if printed is not None:
        facts = read_report(printed)
        click.echo(json.dumps(facts, indent=2) if as_json else format_summary(facts), nl=as_json)
        return
    if as_json:
        raise UsageError("--json says how --print prints a report; give --print FILE")
    state = _load_device_state(root)
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


def _load_device_state(root: Path | None) -> DeviceStateDir | None:
    from edgefl.device.state_dir import DeviceStateDir  # noqa: PLC0415 fast start

    try:
        return DeviceStateDir.load(root)
    except NotJoinedError:
        if root is not None:
            raise
        return None
