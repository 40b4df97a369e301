"""`edgefl history plot`: figures of the history, from the coordinator or straight from its store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl.cli.history_source import HistorySource as Asked
from edgefl.cli.history_source import find_history_source
from edgefl.cli.source_options import get_from_coordinator, open_store, source_options
from edgefl.core.errors import EdgeflError, UsageError
from edgefl.core.types import Json
from edgefl.history.plots.options import AXES, FILE_SUFFIXES, PLOT_KINDS, check_matplotlib

if TYPE_CHECKING:
    from edgefl.history.series import HistoryReader, RunInfo

_KINDS_HELP = "\b\n" + "\n".join(f"{name:15}{text}" for name, text in PLOT_KINDS.items())


@click.command(
    "plot", help=f"Draw KIND, or accuracy and loss on one sheet, into a PNG, PDF or SVG file.\n\n{_KINDS_HELP}"
)
@click.argument("kind", required=False, metavar="[KIND]", type=click.Choice(tuple(PLOT_KINDS)))
@click.option(
    "--run",
    "runs",
    multiple=True,
    metavar="RUN",
    help="A run's id or the beginning of it, its name, or `latest`; several share a sheet [default: latest].",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="FILE", help="FILE.png, .pdf or .svg.")
@click.option("--x", "axis", type=click.Choice(AXES), help="One axis for a curve [default: all, beside each other].")
@click.option(
    "--rounds",
    metavar="FIRST:LAST",
    help="These rounds alone, such as 10:40 or 90: [default: all; timeline: the newest 20].",
)
@click.option("--title", default="", help="Above the sheet.")
@source_options
def plot(  # noqa: PLR0913 the options of one command
    *,
    kind: str | None,
    runs: tuple[str, ...],
    out: Path,
    axis: str | None,
    rounds: str | None,
    title: str,
    directory: Path | None,
    url: str | None,
) -> None:
    ending = out.suffix.lower()
    if ending not in FILE_SUFFIXES:
        raise UsageError(f"--out must end with {', '.join(FILE_SUFFIXES)}, got {out}")
    if not out.parent.is_dir():
        raise UsageError(f"--out lies in {out.parent}, which is no directory; make it first")
    check_matplotlib()
    from edgefl.history.plots.figures import PlotRequest, render_figure  # noqa: PLC0415 matplotlib is slow to load
    from edgefl.history.plots.style import encode_figure  # noqa: PLC0415 likewise
    from edgefl.history.series import parse_round_range  # noqa: PLC0415 numpy is slow to load

    request = PlotRequest(
        kind=kind,
        runs=tuple(runs) or ("latest",),
        rounds=None if rounds is None else parse_round_range(rounds),
        axis=axis,
        title=title,
    )
    with _open_source(directory, url) as source:
        content = encode_figure(render_figure(source, request), ending)
    try:
        out.write_bytes(content)
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror or error}") from None
    click.echo(f"{kind or 'accuracy and loss'} of {', '.join(request.runs)}: {out}")


@contextlib.contextmanager
def _open_source(directory: Path | None, url: str | None) -> Iterator[HistoryReader]:
    history = find_history_source(directory, url)
    if history.directory is None:
        yield ApiHistoryReader(history)
        return
    from edgefl.history.store_reader import StoreHistoryReader  # noqa: PLC0415 SQLAlchemy is slow to load

    with open_store(history.directory) as store:
        yield StoreHistoryReader(store, lambda record: find_batch_size(record.task, record.strategy, record.config))


class ApiHistoryReader:
    """A `Source` of the history that queries a coordinator over HTTPS."""

    def __init__(self, api_source: Asked) -> None:
        self._api_source = api_source

    def find_run(self, text: str) -> RunInfo:
        from edgefl.history.series import RunInfo  # noqa: PLC0415 numpy is slow to load
        from edgefl.system.api_client import format_resource_path  # noqa: PLC0415 only commands that use the API need it

        record = get_from_coordinator(
            self._api_source.url, format_resource_path("runs", text), directory_content="store"
        )
        batch_size = find_batch_size(record["task"], record["strategy"], record.get("config") or {})
        return RunInfo(
            run_id=record["run_id"], name=record["name"], strategy=record["strategy"], batch_size=batch_size
        )

    def read_rows(
        self,
        kind: str,
        *,
        run: str,
        since: float | None = None,
        until: float | None = None,
        limit: int | None = None,
    ) -> list[Json]:
        filters = {"run": run, "since": since, "until": until, "limit": limit}
        if limit is not None:
            return self._api_source.read_newest(kind, filters)
        return [row for page in self._api_source.read_pages(kind, filters) for row in page]


def find_batch_size(task: str, strategy: str, config: Mapping[str, Any]) -> int | None:
    """Returns a run's examples per iteration; None where its task or strategy is not of edgefl.

    Defaults are the task's, else the strategy's. Tasks of other packages are not imported here: a name given by the
    coordinator would run code on the client's machine.
    """
    from edgefl.strategies.registry import BUILT_IN_STRATEGIES as STRATEGIES  # noqa: PLC0415 fast start
    from edgefl.strategies.registry import get_settings  # noqa: PLC0415 likewise
    from edgefl.tasks.registry import BUILT_IN as TASKS  # noqa: PLC0415 likewise
    from edgefl.tasks.registry import make_task  # noqa: PLC0415 likewise

    if (setting := (config.get("strategy") or {}).get("batch_size")) is not None:
        return int(setting)
    if task not in TASKS or strategy not in STRATEGIES:
        return None
    settings = get_settings(strategy)
    if "batch_size" not in settings:
        return None
    try:
        recommended = getattr(make_task(task, config.get("task") or {}), "defaults", {})
    except EdgeflError:
        return None
    return int(recommended.get("batch_size", settings["batch_size"]))
