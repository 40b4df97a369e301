"""`edgefl history plot`: sheets of figures, from the coordinator or straight from its store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl.cli.history_source import Source as Asked
from edgefl.cli.history_source import source_of
from edgefl.cli.whence import ask, open_store, source_options
from edgefl.errors import EdgeflError, UsageError
from edgefl.history.plots.names import AXES, ENDINGS, KINDS, check_matplotlib
from edgefl.types import Json

if TYPE_CHECKING:
    from edgefl.history.series import RunHead, Source

_HELP = "\b\n" + "\n".join(f"{name:15}{text}" for name, text in KINDS.items())


@click.command("plot", help=f"Draw KIND, or accuracy and loss on one sheet, into a PNG, PDF or SVG file.\n\n{_HELP}")
@click.argument("kind", required=False, metavar="[KIND]", type=click.Choice(tuple(KINDS)))
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
    if ending not in ENDINGS:
        raise UsageError(f"--out must end with {', '.join(ENDINGS)}, got {out}")
    if not out.parent.is_dir():
        raise UsageError(f"--out lies in {out.parent}, which is no directory; make it first")
    check_matplotlib()
    from edgefl.history.plots.sheets import Wish, draw  # noqa: PLC0415 matplotlib is slow to load
    from edgefl.history.plots.style import encoded  # noqa: PLC0415 likewise
    from edgefl.history.series import parse_range  # noqa: PLC0415 numpy is slow to load

    wish = Wish(
        kind=kind,
        runs=tuple(runs) or ("latest",),
        rounds=None if rounds is None else parse_range(rounds),
        axis=axis,
        title=title,
    )
    with _source(directory, url) as source:
        content = encoded(draw(source, wish), ending)
    try:
        out.write_bytes(content)
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror or error}") from None
    click.echo(f"{kind or 'accuracy and loss'} of {', '.join(wish.runs)}: {out}")


@contextlib.contextmanager
def _source(directory: Path | None, url: str | None) -> Iterator[Source]:
    found = source_of(directory, url)
    if found.directory is None:
        yield OperatorSource(found)
        return
    from edgefl.history.store_source import StoreSource  # noqa: PLC0415 SQLAlchemy is slow to load

    with open_store(found.directory) as store:
        yield StoreSource(store, lambda record: batch_size(record.task, record.strategy, record.config))


class OperatorSource:
    """A `Source` of the history that asks a coordinator over HTTPS."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def run(self, text: str) -> RunHead:
        from edgefl.client import named_path  # noqa: PLC0415 only commands that talk need it
        from edgefl.history.series import RunHead  # noqa: PLC0415 numpy is slow to load

        record = ask(self._asked.url, named_path("runs", text), what="store")
        known = batch_size(record["task"], record["strategy"], record.get("config") or {})
        return RunHead(run_id=record["run_id"], name=record["name"], strategy=record["strategy"], batch_size=known)

    def rows(
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
            return self._asked.newest(kind, filters)
        return [row for page in self._asked.pages(kind, filters) for row in page]


def batch_size(task: str, strategy: str, config: Mapping[str, Any]) -> int | None:
    """Returns how many examples an iteration of a run takes; None where its task or strategy is not of edgefl.

    A run file that does not say it has the task's default, else the strategy's. Others' tasks are not imported here:
    what a coordinator names would be run on the machine that asks it.
    """
    from edgefl.strategies.registry import BUILT_IN as STRATEGIES  # noqa: PLC0415 fast start
    from edgefl.strategies.registry import settings_of  # noqa: PLC0415 likewise
    from edgefl.tasks.registry import BUILT_IN as TASKS  # noqa: PLC0415 likewise
    from edgefl.tasks.registry import make_task  # noqa: PLC0415 likewise

    if (said := (config.get("strategy") or {}).get("batch_size")) is not None:
        return int(said)
    if task not in TASKS or strategy not in STRATEGIES:
        return None
    settings = settings_of(strategy)
    if "batch_size" not in settings:
        return None
    try:
        recommended = getattr(make_task(task, config.get("task") or {}), "defaults", {})
    except EdgeflError:
        return None
    return int(recommended.get("batch_size", settings["batch_size"]))
