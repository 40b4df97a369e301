"""`edgefl field-report`: what a real board has to tell, in one file to send back; or such a file, printed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgefl.errors import NotJoinedError, UsageError

if TYPE_CHECKING:
    from edgefl.device.state import DeviceState


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
    from edgefl.device.report.field_report import Site, make_report  # noqa: PLC0415 fast start
    from edgefl.device.report.report_archive import read_report, summary, write_report  # noqa: PLC0415 likewise

    if printed is not None:
        facts = read_report(printed)
        click.echo(json.dumps(facts, indent=2) if as_json else summary(facts), nl=as_json)
        return
    if as_json:
        raise UsageError("--json says how --print prints a report; give --print FILE")
    state = _joined(root)
    name = state.device_id if state else "board"
    path = out or Path(f"edgefl-report-{name}-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path.absolute().parent} is no folder; give another --out")
    site = Site(state=state, scratch=state.root if state else path.absolute().parent)
    report = make_report(site, on_part=lambda part: click.echo(f"  {part}", err=True))
    write_report(path, report)
    failed = [name for name, part in report.facts.items() if isinstance(part, dict) and "error" in part]
    click.echo(
        f"wrote {path} in {report.facts['took_s']:.0f} s" + (f"; without {', '.join(failed)}" if failed else "")
    )
    click.echo(f"look at it before you send it: edgefl field-report --print {path}")


def _joined(root: Path | None) -> DeviceState | None:
    from edgefl.device.state import DeviceState  # noqa: PLC0415 fast start

    try:
        return DeviceState.load(root)
    except NotJoinedError:
        if root is not None:
            raise
        return None
