"""Collector: reads the sources of a collect file, makes rows of them and keeps those, until it is stopped.

Whatever a source does, the others go on: its errors are counted and logged. A full card stops no collecting either:
rows wait, up to `MAX_PENDING`, and then the sources are not read, which those of files make up for later.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgefl.core.errors import ConfigError, StoreBusyError, StoreError
from edgefl.core.extensions import ExtensionKind, find_extension, inherits_from
from edgefl.device.collect.alignment import JumpDetector, Row, RowMaker, SimilarRows
from edgefl.device.collect.answer_publisher import AnswerPublisher, withdraw_entities
from edgefl.device.collect.answers import Answerer, InferenceClient
from edgefl.device.collect.event_labels import MAX_FILE_BYTES, EventLabeller
from edgefl.device.collect.file_store import FileStore, open_file_store
from edgefl.device.collect.folder_collector import FolderCollector
from edgefl.device.collect.forgetting import (
    forget_rows,
    has_forget_request,
    read_forget_request,
    remove_forget_request,
)
from edgefl.device.collect.line_source import LinesSource
from edgefl.device.collect.mqtt_source import MqttSource
from edgefl.device.collect.newest_input import NewestFile, NewestInput, NewestRows, NewItem_contra
from edgefl.device.collect.polled_source import PolledSource, make_files_fetch, make_http_fetch
from edgefl.device.collect.readings import (
    Counts,
    Reading,
    ReadingSource,
    ResumableSource,
    Source,
    Value,
    parse_value,
    read_source,
)
from edgefl.device.collect.recorder import Recorder
from edgefl.device.collect.row_store import RowStore, StoreLimits, open_row_store, round_time
from edgefl.device.collect.serial_source import SerialSource
from edgefl.device.collect.settings import (
    CameraSection,
    CollectFile,
    FileSection,
    FilesSection,
    FolderSection,
    HttpSection,
    LinesSection,
    MicrophoneSection,
    MqttSection,
    OwnSection,
    SerialSection,
    SourceSettings,
    check_columns,
    check_label_columns,
    load_collect_file,
)
from edgefl.device.collect.store_state import lock_folder
from edgefl.system.atomic_files import make_store_error
from edgefl.system.processes import LivenessMonitor, SystemdNotifier, on_stop_signal, run_watchdog
from edgefl.system.retries import RateLimitedLog

if TYPE_CHECKING:
    from edgefl.device.collect.similar_pictures import SimilarPictures

log = logging.getLogger(__name__)

POLL_S, BUSY_POLL_S = 0.5, 0.01
NUM_BUSY = 500
"""Readings of a turn after which there are probably more."""
COMMIT_ROWS, MAX_PENDING = 1000, 10_000
MAX_OWN_READINGS = 10_000
RETRY_S = 10.0
REPORT_S = 3600.0

KIND = ExtensionKind(
    noun="source",
    group="edgefl.sources",
    is_declared=inherits_from(Source),
    declaration="it must inherit from edgefl.device.collect.readings.Source",
    error=ConfigError,
)


class Collector:
    """Collector of one folder.

    Args:
        settings: of the collect file.
        sources: by name, open.
        store: for the rows.
        counts: to which the sources add what they leave out.
        labeller: makes labels of events; None where there are none.
        answerer: gets the new rows; None where there is none.
        clock: seconds since 1970; it may jump.
        monotonic: seconds; it does not.
    """

    def __init__(  # noqa: PLR0913 one keyword for each collaborator
        self,
        settings: CollectFile,
        sources: Mapping[str, ReadingSource],
        store: RowStore,
        counts: Counts,
        *,
        labeller: EventLabeller | None = None,
        answerer: Answerer[Sequence[Row]] | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._labeller, self._answerer = labeller, answerer
        self._settings, self._sources, self._store, self._counts = settings.collect, sources, store, counts
        self._clock, self._monotonic = clock, monotonic
        self._maker = RowMaker(
            store.state.columns,
            every_s=self._settings.every_s,
            hold_s=self._settings.hold_s,
            drops_missing=self._settings.missing == "drop",
            first_span=store.state.span + 1,
            last_row_s=store.state.last_row_s,
        )
        tolerances = {name: float(tolerance) for name, tolerance in self._settings.similar.items()}
        self._similar = SimilarRows(store.state.columns, tolerances) if tolerances else None
        self._pending: list[Row] = []
        self._jumps = JumpDetector(clock, monotonic)
        self._committed_s = self._reported_s = self._forget_s = monotonic()
        self._pause_s = 0.0
        self._log = RateLimitedLog(log)
        self._resumable = {name: one for name, one in sources.items() if isinstance(one, ResumableSource)}
        for name, source in self._resumable.items():
            source.resume(store.state.positions.get(name, ""))

    def run(self, stopping: threading.Event, on_turn: Callable[[], None] = lambda: None) -> None:
        """Collects until `stopping` is set, and keeps what is pending then."""
        pause_s = 0.0
        while not stopping.wait(pause_s):
            pause_s = self.step()
            on_turn()
        self.flush()

    def step(self) -> float:
        """Reads every source once and keeps what is due; returns the seconds until the next call."""
        self._forget()
        now_s, num_readings = self._check_clock(), 0
        if len(self._pending) >= MAX_PENDING:
            self._maker.restart()
        else:
            names = () if self._maker.has_backlog else self._sources
            readings = [
                one for name in names for one in read_source(name, self._sources[name], self._counts, self._log)
            ]
            if self._labeller is not None and not self._maker.has_backlog:
                readings = self._labeller.take_events(readings, now_s)
            end_s = min((source.end_s for source in self._resumable.values()), default=math.inf)
            rows = self._maker.update(readings, now_s, end_s)
            self._add(rows)
            if self._answerer is not None and rows:
                self._answerer.add(rows)
            num_readings = NUM_BUSY if self._maker.has_backlog else len(readings)
        since_s = self._monotonic() - self._committed_s
        if since_s >= max(self._settings.flush_s, self._pause_s) or (
            len(self._pending) >= COMMIT_ROWS and since_s >= self._pause_s
        ):
            self.flush()
        if self._monotonic() - self._reported_s >= REPORT_S:
            self._reported_s = self._monotonic()
            log.info("%s", self.format_report())
            if not self._pending:
                self._store.trim_labels(MAX_FILE_BYTES)
            if self._answerer is not None:
                oldest_s = round_time(self._store.oldest_s)
                self._answerer.trim(lambda time: time.until_s >= oldest_s)
        if num_readings >= NUM_BUSY:
            return BUSY_POLL_S
        return min(POLL_S, self._settings.every_s or POLL_S)

    def _add(self, rows: Sequence[Row]) -> None:
        """Adds rows to what is pending, without those in which nothing has moved."""
        kept = rows if self._similar is None else self._similar.keep(rows)
        self._counts["similar"] += len(rows) - len(kept)
        self._pending += kept

    def flush(self) -> bool:
        """Writes what is pending; returns whether that was possible. Nothing is written where nothing is new or due.

        While readings wait, positions stay: after a crash they are read again, and no row is made twice.
        """
        self._committed_s, now_s = self._monotonic(), self._clock()
        if not self._flush_labels():
            self._evict(now_s)
            return False
        positions = dict(self._store.state.positions)
        if not self._maker.has_waiting:
            positions = {name: source.position for name, source in self._resumable.items()}
        is_known = not self._pending and positions == dict(self._store.state.positions)
        if is_known and not self._store.has_excess(now_s):
            return True
        self._counts["dropped_rows"] += self._maker.num_dropped
        self._maker.num_dropped = 0
        counts = {name: count for name, count in dict(self._counts).items() if count}
        try:
            self._store.commit(self._pending, positions, counts, now_s)
        except StoreError as error:
            self._pause_s = RETRY_S
            self._log.warning("store", "%d rows wait: %s", len(self._pending), error)
            return False
        self._pause_s = 0.0
        self._pending = []
        return True

    def _evict(self, now_s: float) -> None:
        """Removes rows that are too old, which makes room for labels; positions stay as they are."""
        state = self._store.state
        if self._store.has_excess(now_s):
            with contextlib.suppress(StoreError):
                self._store.commit((), state.positions, state.counts, now_s)

    def _flush_labels(self) -> bool:
        """Writes labels, which come before the positions of their events; returns whether that was possible."""
        try:
            if self._labeller is not None:
                self._labeller.flush()
        except StoreError as error:
            self._pause_s = RETRY_S
            self._log.warning("labels", "labels wait: %s", error)
            return False
        return True

    def format_report(self) -> str:
        """Returns one line of what is kept, and what was left out."""
        state = self._store.state
        today = max(state.written.items(), default=("today", 0))
        left_out = ", ".join(f"{name} {count}" for name, count in sorted(self._counts.items()) if count) or "nothing"
        return (
            f"{state.num_rows} rows in {state.num_bytes / 1e6:.1f} MB kept, {today[1] / 1e6:.1f} MB written on "
            f"{today[0]}; left out: {left_out}"
        )

    def _forget(self) -> None:
        """Removes the rows that somebody asked to forget; those that are pending are written first."""
        if not has_forget_request(self._store.folder) or self._monotonic() < self._forget_s:
            return
        try:
            request = read_forget_request(self._store.folder)
            if request is None or not self.flush() or self._pending:
                return
            if self._answerer is not None:
                self._answerer.forget()
            self._store.state = forget_rows(self._store.folder, self._store.state, request, self._maker.span)
            remove_forget_request(self._store.folder)
        except StoreError as error:
            self._forget_s = self._monotonic() + RETRY_S
            self._log.warning("forget", "rows that are to go stay, and it is tried again: %s", error)
            with contextlib.suppress(StoreError):  # else the next commit does it
                self._store.reload()
            if self._store.state.span > self._maker.span:
                self._maker.restart(self._store.state.span)
            return
        self._maker.restart(self._store.state.span)
        log.info("forgot what was asked for; %d rows are left", self._store.state.num_rows)

    def _check_clock(self) -> float:
        """Returns the time; after a jump of the clock the values from before it do not count."""
        now_s, jump_s = self._jumps.read()
        if jump_s:
            log.warning("the clock jumped by %.1f s; rows begin a new span", jump_s)
            self._counts["clock_jumps"] += 1
            self._maker.restart()
            if self._labeller is not None:
                self._labeller.restart(now_s)
        return now_s


class OwnSource:
    """Source of another author, whose values are checked like those of a stranger."""

    def __init__(
        self, name: str, source: Any, texts: tuple[str, ...], counts: Counts, clock: Callable[[], float] = time.time
    ) -> None:
        self._name, self._source, self._texts, self._counts, self._clock = name, source, set(texts), counts, clock
        self.columns = tuple(map(str, source.columns))

    def read(self) -> list[Reading]:
        readings, now_s = list[Reading](), self._clock()
        for found, _ in zip(self._source.read(), range(MAX_OWN_READINGS), strict=False):
            values = {}
            for column, value in found.items():
                with self._count_refused():
                    values[column] = self._parse(column, value)
            if values:
                readings.append(Reading(values=values, time_s=now_s))
        return readings

    def close(self) -> None:
        self._source.close()

    def _parse(self, column: str, value: object) -> Value:
        if column not in self.columns:
            raise ValueError("it is no column of this source")
        return parse_value(value, is_text=column in self._texts)

    @contextlib.contextmanager
    def _count_refused(self) -> Iterator[None]:
        try:
            yield
        except ValueError:
            self._counts[f"{self._name}.refused"] += 1


def make_source(settings: SourceSettings, texts: tuple[str, ...], counts: Counts) -> ReadingSource:
    """Returns a source, connected or about to be.

    Raises:
        ConfigError: its settings make no sense, or it is of a module that is not allowed.
    """
    match settings.section:
        case MqttSection():
            return MqttSource(settings.name, settings.section, texts, counts)
        case LinesSection():
            return LinesSource(settings.name, settings.section, texts, counts)
        case HttpSection(columns=columns, poll_s=poll_s):
            fetch = make_http_fetch(settings.name, settings.section, texts, counts)
            return PolledSource(settings.name, tuple(columns), fetch, poll_s=poll_s, counts=counts)
        case FilesSection(columns=columns, poll_s=poll_s):
            fetch = make_files_fetch(settings.name, settings.section, texts, counts)
            return PolledSource(settings.name, tuple(columns), fetch, poll_s=poll_s, counts=counts)
        case SerialSection():
            return SerialSource(settings.name, settings.section, texts, counts)
        case FolderSection() | CameraSection() | MicrophoneSection():
            raise ConfigError(f"sources.{settings.name} makes files, and is no source of rows")
        case OwnSection(options=options):
            kind: Any = find_extension(KIND, settings.kind, ("mqtt", "lines", "http", "files", "serial"))
            try:
                return OwnSource(settings.name, kind(**options), texts, counts)
            except Exception as error:  # noqa: BLE001 another author's constructor may raise anything
                raise ConfigError(
                    f"sources.{settings.name}: {settings.kind} cannot be made: {type(error).__name__}: {error}"
                ) from None


def run_collector(path: Path) -> None:
    """Collects as a collect file says until SIGTERM or Ctrl-C.

    Raises:
        ConfigError: the file makes no sense.
        StoreError: the folder cannot be used.
    """
    settings = load_collect_file(path)
    limits = StoreLimits(max_bytes=int(settings.collect.max_mb * 1e6), max_age_s=settings.collect.max_days * 86_400)
    if settings.file_sources:
        _collect_files(settings, limits)
    else:
        _collect_rows(settings, limits)


def _collect_files(settings: CollectFile, limits: StoreLimits) -> None:
    section = settings.collect
    counts: Counts = Counter()
    texts = (settings.labels.column,) if settings.labels is not None else ()
    sources = {
        one.name: make_source(one, texts, counts) for one in settings.sources if one.name not in settings.file_sources
    }
    recorders = {
        name: _make_recorder(name, section, counts)
        for name, section in settings.file_sources.items()
        if not isinstance(section, FolderSection)
    }
    check_label_columns(settings, {name: source.columns for name, source in sources.items()})
    with open_file_store(Path(section.folder), limits, section.evict) as store:
        counts.update(store.state.counts)
        labeller = _make_labeller(settings, sources, counts)
        folders = settings.file_sources.items()
        every_s = max(map(_get_delay, settings.file_sources.values()))
        answerer = _make_answerer(settings, NewestFile(), every_s, counts)
        collector = FolderCollector(
            {name: section for name, section in folders if isinstance(section, FolderSection)},
            store,
            counts,
            flush_s=section.flush_s,
            recorders=recorders,
            events=sources,
            labeller=labeller,
            similar=_make_similar(store, section.similar_levels),
            answerer=answerer,
        )
        log.info("collecting files into %s", section.folder)
        with _started([*sources.values(), *recorders.values()]), _answering(answerer):
            _run(collector)


def _get_delay(section: FileSection) -> float:
    """Returns the seconds that a file of a source usually comes behind the one before, or behind its own time."""
    match section:
        case FolderSection(settle_s=settle_s):
            return settle_s
        case CameraSection(every_s=every_s):
            return every_s
        case MicrophoneSection(seconds=seconds, step_s=step_s):
            return max(seconds, step_s)


def _make_recorder(name: str, section: CameraSection | MicrophoneSection, counts: Counts) -> Recorder:
    """Returns what records files from a device.

    Raises:
        ConfigError: the program that records is not installed.
        TaskError: nor is OpenCV.
    """
    if isinstance(section, MicrophoneSection):
        from edgefl.device.collect import microphone  # noqa: PLC0415 NumPy, which few need

        if shutil.which(microphone.PROGRAM) is None:
            raise ConfigError(
                f"sources.{name}: a microphone is recorded by {microphone.PROGRAM}, which is not installed: "
                "sudo apt-get install alsa-utils"
            )
        length_s = max(section.seconds, section.step_s)
        return Recorder(name, ".wav", lambda: microphone.Microphone(section), counts, length_s=length_s)
    from edgefl.device.collect.camera import Camera, import_opencv  # noqa: PLC0415 NumPy, which few need

    opencv = import_opencv()
    return Recorder(name, section.suffix, lambda: Camera(section, opencv), counts)


def _make_similar(store: FileStore, max_levels: float) -> SimilarPictures | None:
    """Returns what finds near-duplicates; None where the file asks for none."""
    if not max_levels:
        return None
    from edgefl.device.collect.similar_pictures import SimilarPictures  # noqa: PLC0415 NumPy, which few need

    return SimilarPictures(store, max_levels)


def _collect_rows(settings: CollectFile, limits: StoreLimits) -> None:
    counts: Counts = Counter()
    event_column = settings.labels.column if settings.labels is not None else None
    texts = (*settings.collect.texts, *([event_column] if event_column is not None else []))
    sources = {one.name: make_source(one, texts, counts) for one in settings.sources}
    columns = [str(name) for source in sources.values() for name in source.columns]
    check_label_columns(settings, {name: source.columns for name, source in sources.items()})
    check_columns(columns, texts, settings.collect.similar)
    columns = [name for name in columns if name != event_column]
    with open_row_store(Path(settings.collect.folder), columns, limits) as store:
        counts.update(store.state.counts)
        labeller = _make_labeller(settings, sources, counts)
        answerer = _make_answerer(settings, NewestRows(columns), settings.collect.every_s, counts)
        collector = Collector(settings, sources, store, counts, labeller=labeller, answerer=answerer)
        log.info("collecting %s into %s", ", ".join(columns)[:400], settings.collect.folder)
        with _started(list(sources.values())), _answering(answerer):
            _run(collector)


@contextlib.contextmanager
def _answering(answerer: Answerer[Any] | None) -> Iterator[None]:
    """Runs the thread that asks, where there is one."""
    with contextlib.ExitStack() as stack:
        if answerer is not None:
            answerer.start()
            stack.callback(answerer.close)
        yield


@contextlib.contextmanager
def _started(sources: Sequence[ReadingSource | Recorder]) -> Iterator[None]:
    """Starts sources that connect, and closes all of them."""
    try:
        for source in sources:
            if isinstance(source, MqttSource | PolledSource | SerialSource | Recorder):
                source.start()
        yield
    finally:
        for source in sources:
            source.close()


def _make_labeller(
    settings: CollectFile, sources: Mapping[str, ReadingSource], counts: Counts
) -> EventLabeller | None:
    """Returns what makes labels of the events of a source; None where the file asks for none."""
    section = settings.labels
    if section is None:
        return None
    ((name, source),) = ((name, one) for name, one in sources.items() if section.column in one.columns)
    folder, flush_s = Path(settings.collect.folder), settings.collect.flush_s
    try:
        return EventLabeller(section, folder, name, source, counts, flush_s=flush_s, now_s=time.time())
    except OSError as error:
        raise make_store_error(folder, error) from None


def _make_answerer(
    settings: CollectFile, newest: NewestInput[NewItem_contra], every_s: float, counts: Counts
) -> Answerer[NewItem_contra] | None:
    """Returns what asks the deployed model about what comes; None where the file asks for none."""
    section = settings.answer
    if section is None:
        return None
    return Answerer(
        section,
        Path(settings.collect.folder),
        newest,
        every_s=every_s,
        client=InferenceClient(section.server_port),
        publisher=AnswerPublisher(section),
        counts=counts,
    )


def withdraw_answers(path: Path) -> None:
    """Takes back what `[answer]` of a collect file has announced at its broker.

    Raises:
        ConfigError: the file makes no sense, or has no such table.
        NetworkError: the broker cannot be reached, or refuses it.
        StoreBusyError: the collector runs.
    """
    settings = load_collect_file(path)
    if settings.answer is None:
        raise ConfigError(f"{path} has no table [answer], so that nothing was announced")
    folder = Path(settings.collect.folder)
    try:
        with lock_folder(folder) if folder.is_dir() else contextlib.nullcontext():
            withdraw_entities(settings.answer)
    except StoreBusyError:
        raise StoreBusyError(f"the collector of {folder} runs and would announce it again; stop it first") from None


def _run(collector: Collector | FolderCollector) -> None:
    """Runs a collector until SIGTERM or Ctrl-C, watched by systemd where that started it."""
    stopping, liveness = threading.Event(), LivenessMonitor()
    with on_stop_signal(stopping.set), run_watchdog(SystemdNotifier.from_environment(), liveness):
        collector.run(stopping, liveness.record_progress)
    log.info("%s", collector.format_report())
