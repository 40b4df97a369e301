"""Collect file: the TOML file that says what a board collects, where it keeps it, and how much of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from edgefl.core.config import check_topic
from edgefl.core.errors import ConfigError
from edgefl.core.safe_parsing import MAX_TOML_CHARS, parse_toml
from edgefl.core.safe_text import is_safe_text
from edgefl.core.settings import REST, BrokerSection, Faults, from_mapping, suggest_name
from edgefl.core.types import Scalar
from edgefl.system.row_labels import LABEL_COLUMN

MAX_SOURCES, MAX_COLUMNS = 100, 1000
MAX_POLLED = 32
"""Sources that are asked or read by a thread each."""
MAX_TOLERANCE = 1e30
MAX_SIDE = 8192
"""Pixels of a frame."""
MAX_HOLD_S = 366 * 86_400
MAX_LABEL_CHARS = 80
MAX_LABEL_BYTES = 255
"""Of a folder's name."""
OWN_COLUMNS = ("time", "span", "check")
"""That the collector adds to each row."""
_COLUMN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
MAX_UNCERTAIN = 1000
_SOURCE_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectSection:
    """`[collect]`: what rows are, and how many of them stay.

    Attributes:
        folder: of the shard: absolute, made where there is none.
        every_s: seconds between rows; 0 for a row for each reading of a single source.
        hold_s: a column keeps its last value for so long; later it is missing.
        missing: a row with a missing value is left out, or kept with an empty cell.
        texts: columns of texts, such as of labels; the others hold numbers.
        max_mb: megabytes of rows or files with their labels; the oldest go first.
        evict: of files, the oldest go first, or with `balanced` the oldest of the class that has most.
        similar_levels: of 255; a picture of whose 16 x 16 cells none differs by more from one that is kept already is
            left out. 0 keeps all but copies.
        similar: tolerances by column; a row in which no column has moved by more since the last that was kept is left
            out. Columns that are not named have none. Not beside `[labels]`, whose events would label no row.
        max_days: older rows and files go; 0 for no limit.
        flush_s: rows are written so often; a crash loses no more of those of MQTT.
    """

    folder: str
    every_s: float = field(default=10.0, metadata={"at_least": 0, "at_most": 86_400})
    hold_s: float = field(default=60.0, metadata={"above": 0, "at_most": MAX_HOLD_S})
    missing: Literal["drop", "keep"] = "drop"
    texts: tuple[str, ...] = ()
    max_mb: float = field(default=100.0, metadata={"at_least": 0.1, "at_most": 2000})
    evict: Literal["oldest", "balanced"] = "oldest"
    similar_levels: float = field(default=0.0, metadata={"at_least": 0, "at_most": 64})
    similar: Mapping[str, Scalar] = field(default_factory=dict)
    max_days: float = field(default=0.0, metadata={"at_least": 0, "at_most": 36_600})
    flush_s: float = field(default=30.0, metadata={"at_least": 0, "at_most": 3600})

    def __post_init__(self) -> None:
        if not Path(self.folder).is_absolute():
            raise ConfigError(f"collect.folder must be an absolute path, got {self.folder!r:.80}")
        if 0 < self.every_s < 0.01:
            raise ConfigError(f"collect.every_s must be 0 or at least 0.01, got {self.every_s:g}")
        for name, tolerance in self.similar.items():
            if isinstance(tolerance, bool | str) or not 0 <= tolerance <= MAX_TOLERANCE:
                raise ConfigError(f"collect.similar.{name:.40} must be a number from 0, got {tolerance!r:.80}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MqttSection(BrokerSection):
    """Source `mqtt`: topics of a broker.

    Attributes:
        columns: by name, TOPIC for plain payloads or TOPIC#/KEY/KEY for a value of a JSON object.
        retained: whether values count that the broker has kept, of any age.
        max_message_bytes: larger messages are left out.
        max_per_s: messages of a second; more are left out.
    """

    columns: Mapping[str, Scalar]
    retained: bool = False
    max_message_bytes: int = field(default=65_536, metadata={"at_least": 64, "at_most": 1_048_576})
    max_per_s: int = field(default=1000, metadata={"at_least": 1, "at_most": 10_000})


@dataclass(frozen=True, slots=True, kw_only=True)
class LinesSection:
    """Source `lines`: lines that are appended to a CSV file with a line of names, or to a file of JSON lines.

    Attributes:
        path: of the file, which need not be there yet; `.jsonl` and `.ndjson` are JSON lines.
        columns: by name, the name of a CSV column, or for JSON lines a pointer such as #/battery/volt.
        time: column or pointer of the time, in seconds since 1970 or ISO 8601; that of the reading at first.
    """

    path: str
    columns: Mapping[str, Scalar]
    time: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSection:
    """Source `folder`: pictures or sounds that something else puts into a folder, or into class folders in it.

    Attributes:
        path: of the folder.
        remove: whether a file is removed once it is copied.
        settle_s: a file is taken when it has not changed for so long.
        max_file_mb: larger files are left out.
    """

    path: str
    remove: bool = False
    settle_s: float = field(default=2.0, metadata={"at_least": 0.1, "at_most": 3600})
    max_file_mb: float = field(default=16.0, metadata={"above": 0, "at_most": 256})

    def __post_init__(self) -> None:
        if not Path(self.path).is_absolute():
            raise ConfigError(f"a folder's path must be absolute, got {self.path!r:.80}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CameraSection:
    """Source `camera`: frames of a camera as pictures.

    Attributes:
        path: of the camera below /dev, else of a video file or image sequence, which begins anew at its end.
        every_s: seconds from one frame to the next.
        motion_levels: of 255; a frame is kept where one of its 16 x 16 cells differs by more from the last that was
            kept. 0 keeps all.
        capture_size: width and height that the camera is asked for; its own at first.
        crop: left, top, width and height of what is kept, as parts of the frame.
        size: width and height to which that is scaled.
        colour: whether pictures have colours.
        format: of the files.
        quality: of JPEG files.
    """

    path: str
    every_s: float = field(default=1.0, metadata={"at_least": 0.03, "at_most": 86_400})
    motion_levels: float = field(default=0.0, metadata={"at_least": 0, "at_most": 64})
    capture_size: tuple[float, ...] = ()
    crop: tuple[float, ...] = ()
    size: tuple[float, ...] = ()
    colour: bool = True
    format: Literal["jpeg", "png"] = "jpeg"
    quality: int = field(default=90, metadata={"at_least": 1, "at_most": 100})

    def __post_init__(self) -> None:
        """Checks path, sizes and crop.

        Raises:
            ConfigError: one is none.
        """
        if not Path(self.path).is_absolute():
            raise ConfigError(f"a camera's path must be absolute, got {self.path!r:.80}")
        for name, size in (("capture_size", self.capture_size), ("size", self.size)):
            if size and not (len(size) == 2 and all(part in range(1, MAX_SIDE + 1) for part in size)):
                raise ConfigError(f"a camera's {name} must be width and height of 1 to {MAX_SIDE}, got {size}")
        if self.crop and not (
            len(self.crop) == 4
            and min(self.crop) >= 0
            and min(self.crop[2:]) > 0
            and max(self.crop[0] + self.crop[2], self.crop[1] + self.crop[3]) <= 1 + 1e-9
        ):
            raise ConfigError(
                f"a camera's crop must be left, top, width and height as parts of the frame, got {self.crop}"
            )

    @property
    def suffix(self) -> str:
        return ".jpg" if self.format == "jpeg" else ".png"


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrophoneSection:
    """Source `microphone`: sounds of a microphone.

    Attributes:
        device: ALSA's name of it, as `arecord -L` lists them.
        rate: samples a second.
        channels: 1 or 2.
        seconds: length of a sound.
        step_s: seconds from the start of one to that of the next; 0 for that length.
        least_dbfs: quieter ones are left out; 0 is the loudest, -120 keeps silence.
    """

    device: str = "default"
    rate: int = field(default=16_000, metadata={"at_least": 4000, "at_most": 48_000})
    channels: int = field(default=1, metadata={"at_least": 1, "at_most": 2})
    seconds: float = field(default=1.0, metadata={"at_least": 0.1, "at_most": 60})
    step_s: float = field(default=0.0, metadata={"at_least": 0, "at_most": 60})
    least_dbfs: float = field(default=-120.0, metadata={"at_least": -120, "at_most": 0})

    def __post_init__(self) -> None:
        """Checks name and step.

        Raises:
            ConfigError: one is none.
        """
        if not self.device or not is_safe_text(self.device):
            raise ConfigError(f"a microphone's device must be a name of ALSA, got {self.device!r:.80}")
        if 0 < self.step_s < 0.1:
            raise ConfigError(f"a microphone's step_s must be 0 or at least 0.1, got {self.step_s:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSection:
    """Source `http`: a URL that is asked again and again.

    Attributes:
        url: http or https.
        columns: by name, `#/KEY/KEY` for a value of a JSON answer, or `#` for an answer that is the value.
        poll_s: seconds from one question to the next.
        login_file: a file whose first line is the user and whose second is the password, or one line, a token.
        ca_file: authority of the server's certificate; none for those of the system.
        timeout_s: a question without an answer fails after so long.
        max_answer_bytes: a longer answer fails.
    """

    url: str
    columns: Mapping[str, Scalar]
    poll_s: float = field(default=10.0, metadata={"at_least": 0.1, "at_most": 86_400})
    login_file: str = ""
    ca_file: str = ""
    timeout_s: float = field(default=5.0, metadata={"above": 0, "at_most": 300})
    max_answer_bytes: int = field(default=65_536, metadata={"at_least": 64, "at_most": 1_048_576})


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesSection:
    """Source `files`: files of one value each, as the kernel has them of IIO, 1-wire and hwmon sensors.

    Attributes:
        columns: by name, the absolute path of its file.
        poll_s: seconds from one look to the next.
    """

    columns: Mapping[str, Scalar]
    poll_s: float = field(default=10.0, metadata={"at_least": 0.01, "at_most": 86_400})


@dataclass(frozen=True, slots=True, kw_only=True)
class SerialSection:
    """Source `serial`: lines that a microcontroller sends over a serial port.

    Attributes:
        path: of the port, which need not be there yet.
        columns: by name, `#/KEY` for a value of a JSON object, `#/0` for the first cell of a line.
        baud: bits a second.
    """

    path: str
    columns: Mapping[str, Scalar]
    baud: int = field(default=115_200, metadata={"at_least": 50, "at_most": 4_000_000})

    def __post_init__(self) -> None:
        if not Path(self.path).is_absolute():
            raise ConfigError(f"a serial port's path must be absolute, got {self.path!r:.80}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSection:
    """A source of another author: `kind` is `module:Class`.

    Attributes:
        options: keywords of its constructor.
    """

    options: Mapping[str, Scalar] = field(default_factory=dict, metadata={REST: True})


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelsSection:
    """`[labels]`: labels of rows or files from events that come later.

    Attributes:
        column: of a source, whose values are the events' labels; it is no column of rows.
        before_s: rows of so many seconds before an event get its label.
        after_s: likewise after it.
        default: label of what no event has labelled; empty for none.
        late_s: an event with a time of its own may come so much later.
    """

    column: str
    before_s: float = field(default=60.0, metadata={"at_least": 0, "at_most": MAX_HOLD_S})
    after_s: float = field(default=0.0, metadata={"at_least": 0, "at_most": MAX_HOLD_S})
    default: str = ""
    late_s: float = field(default=0.0, metadata={"at_least": 0, "at_most": MAX_HOLD_S})

    def __post_init__(self) -> None:
        """Checks the label and the window.

        Raises:
            ConfigError: the default is no label, or no row is near enough to an event.
        """
        if self.default and not is_label(self.default):
            raise ConfigError(f"labels.default must be a visible text without a slash, got {self.default!r:.80}")
        if not self.before_s + self.after_s:
            raise ConfigError("labels.before_s and labels.after_s must not both be 0: no row would get a label")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSection(BrokerSection):
    """`[answer]`: what the deployed model says of the newest rows or file, published to a broker.

    Attributes:
        topic: below which answers are published.
        name: of the device in Home Assistant; the topic at first.
        discovery: prefix of Home Assistant's discovery; empty for none.
        every_s: seconds from one answer to the next, at least.
        server_port: of `edgefl device serve` on this board.
        uncertain_below: times whose answer has a smaller margin are noted for labelling; 0 notes none.
        max_uncertain: times that are noted: the least certain ones.
    """

    topic: str
    name: str = ""
    discovery: str = "homeassistant"
    every_s: float = field(default=10.0, metadata={"at_least": 0.1, "at_most": 86_400})
    server_port: int = field(default=8080, metadata={"at_least": 1, "at_most": 65_535})
    uncertain_below: float = field(default=0.0, metadata={"at_least": 0, "at_most": 1})
    max_uncertain: int = field(default=500, metadata={"at_least": 1, "at_most": MAX_UNCERTAIN})

    def __post_init__(self) -> None:
        """Checks the topics and the name.

        Raises:
            ConfigError: one is none.
        """
        check_topic("answer.topic", self.topic)
        check_topic("answer.discovery", self.discovery or "none")
        if not is_safe_text(self.name) or len(self.name) > MAX_LABEL_CHARS:
            raise ConfigError(
                f"answer.name must be up to {MAX_LABEL_CHARS} visible characters, got {self.name!r:.80}"
            )


def is_label(text: str) -> bool:
    """Returns whether a text can be a label, which is a folder's name where examples are files."""
    is_name = 0 < len(text) <= MAX_LABEL_CHARS and not text.startswith(".") and "/" not in text
    return is_name and is_safe_text(text) and len(text.encode()) <= MAX_LABEL_BYTES


FileSection = FolderSection | CameraSection | MicrophoneSection
"""Of sources whose examples are files."""
RowSection = MqttSection | LinesSection | HttpSection | FilesSection | SerialSection
SourceSection = RowSection | FileSection | OwnSection
_TABLES = ("collect", "sources", "labels", "answer")
_SECTIONS: Mapping[str, type[Any]] = {
    "mqtt": MqttSection,
    "lines": LinesSection,
    "http": HttpSection,
    "files": FilesSection,
    "serial": SerialSection,
    "folder": FolderSection,
    "camera": CameraSection,
    "microphone": MicrophoneSection,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """Name, kind and settings of a source."""

    name: str
    kind: str
    section: SourceSection


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectFile:
    """A whole collect file; its sources of examples make files, or none of them does."""

    collect: CollectSection
    sources: tuple[SourceSettings, ...]
    labels: LabelsSection | None = None
    answer: AnswerSection | None = None

    @property
    def file_sources(self) -> dict[str, FileSection]:
        """Returns the sources whose examples are files, by name."""
        return {source.name: source.section for source in self.sources if isinstance(source.section, FileSection)}

    @property
    def event_sources(self) -> frozenset[str]:
        """Returns the names of sources that have no column but that of the events."""
        column = self.labels.column if self.labels is not None else None
        return frozenset(
            source.name
            for source in self.sources
            if isinstance(source.section, RowSection) and set(source.section.columns) == {column}
        )


def load_collect_file(path: Path) -> CollectFile:
    """Returns the settings in a collect file.

    Raises:
        ConfigError: it cannot be read, or settings make no sense: all of them.
    """
    try:
        with path.open(encoding="utf-8") as file:
            table = parse_toml(file.read(MAX_TOML_CHARS + 1))
    except OSError as error:
        raise ConfigError(f"the collect file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"the collect file {path} is no TOML: {error}") from None
    faults, collect, labels, answer, sources = Faults(), None, None, None, list[SourceSettings]()
    for key in set(table) - set(_TABLES):
        faults.messages.append(f"unknown table [{key:.80}]: {suggest_name(key, _TABLES)}")
    with faults:
        labels = from_mapping(LabelsSection, table["labels"], "labels") if "labels" in table else None
    with faults:
        answer = from_mapping(AnswerSection, table["answer"], "answer") if "answer" in table else None
    with faults:
        collect = from_mapping(CollectSection, table.get("collect", {}), "collect")
    with faults:
        tables = table.get("sources", {})
        if not isinstance(tables, Mapping) or not 1 <= len(tables) <= MAX_SOURCES:
            raise ConfigError(f"a collect file must have 1 to {MAX_SOURCES} tables [sources.NAME]")
        for name, section in tables.items():
            with faults:
                sources.append(_parse_source(name, section))
    faults.check()
    assert collect is not None
    _check_polled(collect, sources)
    found = CollectFile(collect=collect, sources=tuple(sources), labels=labels, answer=answer)
    # An own source says what columns it has once it is made: `check_label_columns` looks again.
    own = [one for one in sources if labels is not None and isinstance(one.section, OwnSection)]
    num_sources = len(sources) - len(found.event_sources) - bool(own and not found.event_sources)
    if not collect.every_s and num_sources > 1:
        raise ConfigError(f"collect.every_s = 0, a row for each reading, is for one source, got {num_sources}")
    if collect.similar and labels is not None:
        raise ConfigError("collect.similar leaves out rows that events of [labels] label later: take one of the two")
    _check_files(found, num_sources)
    return found


def _check_files(found: CollectFile, num_sources: int) -> None:
    kinds = {type(section) for section in found.file_sources.values()}
    if kinds and len(found.file_sources) < num_sources:
        raise ConfigError(
            "sources of kind folder, camera and microphone make a shard of files, others one of rows: "
            "take two collect files"
        )
    if kinds >= {CameraSection, MicrophoneSection}:
        raise ConfigError("a task reads pictures or sounds: take two collect files for a camera and a microphone")
    if found.collect.similar_levels and not kinds & {FolderSection, CameraSection}:
        raise ConfigError(
            "collect.similar_levels is for pictures of sources of kind folder and camera, and none is here"
        )
    if kinds and found.collect.similar:
        raise ConfigError("collect.similar is for rows; pictures have collect.similar_levels")


def _check_polled(collect: CollectSection, sources: Sequence[SourceSettings]) -> None:
    polled = {one.name: one.section.poll_s for one in sources if isinstance(one.section, HttpSection | FilesSection)}
    threads = SerialSection | CameraSection | MicrophoneSection
    num_threads = len(polled) + sum(isinstance(one.section, threads) for one in sources)
    if num_threads > MAX_POLLED:
        raise ConfigError(
            f"at most {MAX_POLLED} sources may be of kind http, files, serial, camera and microphone, "
            f"got {num_threads}"
        )
    for name, poll_s in polled.items():
        if poll_s >= collect.hold_s:
            raise ConfigError(
                f"sources.{name}.poll_s must be below collect.hold_s, or rows between two answers lack its values; "
                f"got {poll_s:g} and {collect.hold_s:g}"
            )


def check_columns(names: list[str], texts: tuple[str, ...], similar: Mapping[str, Scalar] | None = None) -> None:
    """Checks the columns of all sources together.

    Raises:
        ConfigError: none or too many, a name that cannot be one or is there twice, a text that is no column, or a
            tolerance of what is no column of numbers.
    """
    faults = Faults()
    if not 1 <= len(names) <= MAX_COLUMNS:
        faults.messages.append(f"sources must have 1 to {MAX_COLUMNS} columns in all, got {len(names)}")
    for name in dict.fromkeys(names):
        if not _COLUMN_NAME.fullmatch(name) or name in OWN_COLUMNS:
            faults.messages.append(
                f"a column's name must be a letter and up to 63 letters, digits or ._- and none of "
                f"{', '.join(OWN_COLUMNS)}, got {name!r:.80}"
            )
        if (count := names.count(name)) > 1:
            faults.messages.append(f"column {name!r:.80} must be of one source, it is of {count}")
    for text in texts:
        if text not in names:
            faults.messages.append(f"collect.texts: {text!r:.80} is no column; {suggest_name(text, names)}")
    numbers = [name for name in names if name not in texts]
    for name in similar or ():
        if name not in numbers:
            faults.messages.append(
                f"collect.similar: {name!r:.80} is no column of numbers; {suggest_name(name, numbers)}"
            )
    faults.check()


def check_label_columns(settings: CollectFile, by_source: Mapping[str, Sequence[str]]) -> None:
    """Checks the columns of all sources that make no files for labels from events.

    Raises:
        ConfigError: no source or several have the events, no column is left for rows, too many sources are, or a
            column has the name of the labels'.
    """
    if settings.labels is None:
        return
    event_column, columns = settings.labels.column, [str(name) for names in by_source.values() for name in names]
    if (count := columns.count(event_column)) > 1:
        raise ConfigError(f"labels.column: {event_column!r:.80} must be of one source, it is of {count}")
    num_others = sum(set(names) != {event_column} for names in by_source.values())
    if num_others and settings.file_sources:
        raise ConfigError("the source of events must be the only one that makes no files, and have no other column")
    if num_others > 1 and not settings.collect.every_s:
        raise ConfigError(f"collect.every_s = 0, a row for each reading, is for one source, got {num_others}")
    if event_column not in columns:
        raise ConfigError(f"labels.column: {event_column!r:.80} is no column; {suggest_name(event_column, columns)}")
    if columns == [event_column] and not settings.file_sources:
        raise ConfigError("labels.column is the only column of the sources; rows need another one")
    if LABEL_COLUMN in columns:
        raise ConfigError(f"a column must not be called {LABEL_COLUMN!r} beside [labels], which makes it")


def _parse_source(name: str, table: object) -> SourceSettings:
    path = f"sources.{name:.40}"
    if not _SOURCE_NAME.fullmatch(name):
        raise ConfigError(f"a source's name must be up to 32 letters, digits, _ or -, got {name!r:.80}")
    if not isinstance(table, Mapping) or not isinstance(kind := table.get("kind"), str):
        raise ConfigError(f"{path}.kind is missing: one of {', '.join(_SECTIONS)}, or module:Class")
    if kind not in _SECTIONS and ":" not in kind:
        raise ConfigError(f"{path}.kind must be one of {', '.join(_SECTIONS)}, or module:Class, got {kind!r:.80}")
    rest = {key: value for key, value in table.items() if key != "kind"}
    return SourceSettings(name=name, kind=kind, section=from_mapping(_SECTIONS.get(kind, OwnSection), rest, path))
