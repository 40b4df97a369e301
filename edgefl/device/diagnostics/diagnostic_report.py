"""Diagnostic report of a board: facts, health, findings, timings and logs in one file.

Every section has a time limit, and one that fails holds its error instead. Secrets are removed: see `json_log`.
"""

from __future__ import annotations

import io
import json
import logging
import platform
import re
import socket
import ssl
import tarfile
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgefl import __version__
from edgefl.core.errors import DataError, EdgeflError, VersionError
from edgefl.core.protocol import host_and_port
from edgefl.core.safe_parsing import parse_json
from edgefl.core.safe_text import dump_readable_json
from edgefl.core.types import Json, Role
from edgefl.device.diagnostics import timings
from edgefl.device.diagnostics.device_checks import check_board, check_device
from edgefl.device.diagnostics.json_log import LOG_FOLDER, Redactor, read_lines
from edgefl.device.hardware.board_reader import BoardReader, RunProgram, no_program, run_program, sanitise_text
from edgefl.device.hardware.capabilities import probe
from edgefl.device.hardware.health import HealthReader, read_available_memory_bytes, read_board_status
from edgefl.device.hardware.requirements import TORCH_BYTES, get_training_facts
from edgefl.device.hardware.step_rate import FILE_NAME as SPEEDS
from edgefl.device.hardware.step_rate import list_measurable_tasks
from edgefl.device.state_dir import DeviceStateDir
from edgefl.system.atomic_files import open_atomic
from edgefl.system.diagnostics import check_software

log = logging.getLogger(__name__)

VERSION = 1
HEALTH_INTERVAL_S = 1.0
MAX_HEALTH_SAMPLES = 120
MIN_HEALTH_SAMPLES = 4
MAX_LOG_LINES = 2000
MAX_KERNEL_LINES = 200
MAX_TASKS = 4
UNITS = ("edgefl-join", "edgefl-device", "edgefl-update", "edgefl-coordinator")
UNIT_PROPERTIES = (
    "LoadState", "ActiveState", "SubState", "Result", "NRestarts", "ExecMainStatus", "MemoryCurrent", "MemoryPeak",
    "CPUUsageNSec", "WatchdogUSec",
)  # fmt: skip
_KERNEL_PATTERN = re.compile(
    r"under-?voltage|throttl|thermal|out of memory|oom-kill|mmc\d.*(?:error|timeout)|I/O error|EXT4-fs error",
    re.IGNORECASE,
)

FOLDER = "edgefl-report"
REPORT_FILE = f"{FOLDER}/report.json"
MAX_REPORT_BYTES = 4 << 20
MAX_DEPTH = 6
MAX_ITEMS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosticReport:
    """Redacted report: `facts` is `report.json`, `texts` are the files beside it."""

    facts: Json
    texts: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportContext:
    """Input of a report; `state` None for a board that is not enrolled, `scratch` for the storage test."""

    state: DeviceStateDir | None
    scratch: Path
    root: Path = Path("/")
    run: RunProgram = run_program


def make_report(context: ReportContext, *, on_section: Callable[[str], None] = lambda _: None) -> DiagnosticReport:
    """Returns the report of this board; `on_section` is called with each section's name."""
    started_s, redactor = time.monotonic(), create_redactor(context.state)
    samples, stop = list[Json](), threading.Event()
    sampler = threading.Thread(target=_sample_health, args=(context, samples, stop), name="health", daemon=True)
    sampler.start()
    facts: Json = {"v": VERSION, "made_at": round(time.time()), "edgefl": __version__}
    for name, (limit_s, make_section) in _list_sections(context).items():
        on_section(name)
        facts[name] = _run_with_timeout(limit_s, make_section)
    while len(samples) < MIN_HEALTH_SAMPLES and sampler.is_alive():
        time.sleep(HEALTH_INTERVAL_S / 10)
    stop.set()
    facts["health"] = list(samples)
    facts["took_s"] = round(time.monotonic() - started_s, 1)
    texts = {"log.txt": _format_log(context.state), "kernel.txt": "\n".join(_to_lines(facts.pop("kernel")))}
    return DiagnosticReport(
        facts=json.loads(json.dumps(redactor.redact_json(facts), default=str)),
        texts={name: redactor.redact_text(text) for name, text in texts.items() if text},
    )


def create_redactor(state: DeviceStateDir | None) -> Redactor:
    """Returns the redactor of this board's secrets, host names and folders."""
    home = str(Path.home())
    folders = {home: "~"} if len(home) > 1 else {}
    hostname = socket.gethostname()
    if state is None:
        return Redactor(hosts=[hostname], folders=folders)
    device = state.settings
    hosts = [_parse_host(address) for address in device.addresses]
    hosts += [device.broker_host] if device.broker_host else []
    hosts += [hostname] if hostname != device.device_id else []
    return Redactor(
        secrets=_read_secrets(state), hosts=[host for host in hosts if host != "localhost"], folders=folders
    )


def _list_sections(context: ReportContext) -> dict[str, tuple[float, Callable[[], Any]]]:
    return {
        "device": (5.0, lambda: _make_device_section(context.state)),
        "board": (20.0, lambda: _make_board_section(context)),
        "condition": (10.0, lambda: _make_status_section(context)),
        "versions": (10.0, _make_versions_section),
        "findings": (30.0, lambda: _make_findings_section(context)),
        "units": (15.0, lambda: _read_units(context.run)),
        "kernel": (10.0, lambda: _read_kernel_log(context.run)),
        "keys": (20.0, timings.measure_key_times),
        "checksums": (20.0, timings.measure_checksum_rates),
        "card": (60.0, lambda: timings.measure_storage(context.scratch)),
        "latency": (30.0, lambda: timings.measure_coordinator_latency(context.state) if context.state else {}),
        "imports": (4 * timings.IMPORT_TIMEOUT_S, lambda: _measure_imports(context)),
        "training": (MAX_TASKS * timings.TRAINING_TIMEOUT_S, lambda: _measure_training(context)),
    }


def _run_with_timeout(timeout_s: float, run: Callable[[], Any]) -> Any:
    """Returns the section, or `error` with the reason; a hanging thread is abandoned."""
    results: list[Any] = []

    def run_section() -> None:
        try:
            results.append(run())
        except Exception as error:  # the boundary of one section: the others are useful without it
            is_known = isinstance(error, EdgeflError | OSError)
            log.debug("a part of the report failed", exc_info=True)
            results.append({"error": str(error) if is_known else f"{type(error).__name__}: {error}"})

    worker = threading.Thread(target=run_section, name="part of a report", daemon=True)
    worker.start()
    worker.join(timeout_s)
    return results[0] if results else {"error": f"took more than {timeout_s:g} s"}


def _sample_health(context: ReportContext, samples: list[Json], stop: threading.Event) -> None:
    reader = HealthReader(context.scratch, root=context.root)
    while len(samples) < MAX_HEALTH_SAMPLES and not stop.wait(HEALTH_INTERVAL_S):
        values = {name: value for name, value in reader.read().items() if value is not None}
        samples.append({"at_s": len(samples) * HEALTH_INTERVAL_S, **values})


def _make_device_section(state: DeviceStateDir | None) -> Json:
    if state is None:
        return {"joined": False}
    device = state.settings
    names = ("device_id", "role", "accelerator", "threads", "max_temperature_c")
    section: Json = {
        "joined": True,
        **{name: getattr(device, name) for name in names},
        "tasks": sorted(device.shards),
    }
    try:
        section["speeds"] = parse_json((state.root / SPEEDS).read_bytes())["speeds"]
    except (OSError, ValueError, KeyError, TypeError):
        section["speeds"] = {}
    return section


def _make_board_section(context: ReportContext) -> Json:
    facts = probe(context.root, run=context.run)
    device = context.state.settings if context.state else None
    return {
        **facts,
        **get_training_facts(device.role if device else Role.TRAINER, device.shards if device else (), facts),
    }


def _make_status_section(context: ReportContext) -> Json:
    return read_board_status(
        BoardReader(context.root, run=context.run),
        is_jetson=probe(context.root, run=no_program)["family"] == "jetson",
    )


def _make_versions_section() -> Json:
    return {"edgefl": __version__, "python": platform.python_version(), "openssl": ssl.OPENSSL_VERSION,
            "libc": " ".join(platform.libc_ver()), "platform": platform.platform()}  # fmt: skip


def _make_findings_section(context: ReportContext) -> list[Json]:
    if context.state is not None:
        findings = check_device(context.state.root, now=time.time())
    else:
        findings = check_board(Role.TRAINER, (), context.root)
    return [
        {name: str(value) for name, value in asdict(finding).items()} for finding in [*check_software(), *findings]
    ]


def _read_units(run: RunProgram) -> Json:
    """Returns systemd's properties of our units; empty without systemd or units."""
    units: Json = {}
    for unit in UNITS:
        output = run(
            ["systemctl", "show", f"{unit}.service", "--no-pager", f"--property={','.join(UNIT_PROPERTIES)}"], 3.0
        )
        values = dict(line.split("=", 1) for line in (output or "").splitlines() if "=" in line)
        if values.get("LoadState") == "loaded":
            units[unit] = {name: values[name] for name in UNIT_PROPERTIES if name in values}
    return units


def _read_kernel_log(run: RunProgram) -> list[str]:
    """Returns kernel messages about power, heat, memory and storage, where readable."""
    output = run(["dmesg"], 5.0) or ""
    return [line for line in output.splitlines() if _KERNEL_PATTERN.search(line)][-MAX_KERNEL_LINES:]


def _measure_imports(context: ReportContext) -> Json:
    free_bytes = read_available_memory_bytes(context.root)
    has_memory = free_bytes is None or free_bytes >= TORCH_BYTES
    import_times = timings.measure_import_times(
        [name for name in timings.IMPORT_NAMES if has_memory or name != "torch"], context.run
    )
    return (
        import_times
        if has_memory
        else {**import_times, "torch": {"error": f"not tried: {free_bytes} bytes of memory are free"}}
    )


def _measure_training(context: ReportContext) -> Json:
    if context.state is None:
        return timings.measure_training({"digits": None}, accelerator="cpu", threads=None)
    device = context.state.settings
    tasks: dict[str, str | None] = dict(
        list_measurable_tasks(device.shards, probe(context.root, run=no_program))[:MAX_TASKS]
    )
    tasks = tasks or {"digits": None}
    accelerator = "cpu" if device.accelerator == "auto" else device.accelerator
    return timings.measure_training(tasks, accelerator=accelerator, threads=device.threads)


def _format_log(state: DeviceStateDir | None) -> str:
    if state is None:
        return ""
    lines = list(read_lines(state.root / LOG_FOLDER))[-MAX_LOG_LINES:]
    return "\n".join(
        f"{line.get('at')} {line.get('level')} {line.get('logger')}: {line.get('message')}" for line in lines
    )


def _to_lines(value: Any) -> list[str]:
    return value if isinstance(value, list) else []


def _read_secrets(state: DeviceStateDir) -> list[str]:
    """Returns every line of the secret files."""
    lines: list[str] = []
    for path in (state.key, state.cert, state.ca, state.root / ".pending"):
        try:
            lines += path.read_text(errors="replace").splitlines()
        except OSError:
            continue
    return [line.strip() for line in lines if not line.startswith("-----")]


def _parse_host(address: str) -> str:
    try:
        return host_and_port(address)[0]
    except (EdgeflError, ValueError):
        return address


def write_report(path: Path, report: DiagnosticReport) -> None:
    """Writes the archive with owner-only access; `report.json` comes first.

    Raises:
        DataError: it cannot be written.
    """
    files = {REPORT_FILE: dump_readable_json(report.facts, indent=2)}
    files |= {
        f"{FOLDER}/{name}": text
        for name, text in {**report.texts, "summary.txt": format_summary(report.facts)}.items()
    }
    try:
        with open_atomic(path) as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, text in files.items():
                content = text.encode(errors="replace")
                member = tarfile.TarInfo(name)
                member.size, member.mtime, member.mode = len(content), int(report.facts["made_at"]), 0o600
                archive.addfile(member, io.BytesIO(content))
    except OSError as error:
        raise DataError(f"report {path} cannot be written: {error.strerror}") from None


def read_report(path: Path) -> Json:
    """Returns the `report.json` of an archive; unpacks nothing to disk, trusts no length.

    Raises:
        DataError: it is no diagnostic report.
        VersionError: a newer edgefl made it.
    """
    try:
        with tarfile.open(path, mode="r|gz") as archive:
            first = archive.next()
            file = archive.extractfile(first) if first is not None and first.name == REPORT_FILE else None
            raw = file.read(MAX_REPORT_BYTES + 1) if file is not None else b""
        facts: Any = parse_json(raw) if 0 < len(raw) <= MAX_REPORT_BYTES else None
    # TypeError: raised by tarfile for a file that ends within gzip's header.
    except (OSError, tarfile.TarError, zlib.error, EOFError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is no field report: {error}") from None
    if not isinstance(facts, dict) or not isinstance(facts.get("v"), int):
        raise DataError(f"{path} is no field report: its first file must be {REPORT_FILE} of at most 4 MB")
    if facts["v"] > VERSION:
        raise VersionError(f"{path} is a report of version {facts['v']}, this edgefl reads {VERSION}: update it")
    return facts


def format_summary(facts: Mapping[str, Any]) -> str:
    """Returns the report as text: one fact a line, without terminal control characters."""
    return "\n".join(_format_lines(facts, ())) + "\n"


def _format_lines(value: Any, path: Sequence[str]) -> list[str]:
    if isinstance(value, Mapping) and len(path) < MAX_DEPTH:
        return [line for key, item in value.items() for line in _format_lines(item, (*path, str(key)))]
    if isinstance(value, list) and len(path) < MAX_DEPTH and any(isinstance(item, Mapping) for item in value):
        rows = [
            line
            for number, item in enumerate(value[:MAX_ITEMS])
            for line in _format_lines(item, (*path, str(number)))
        ]
        return [*rows, *([f"{'.'.join(path)}: {len(value)} in all"] if len(value) > MAX_ITEMS else [])]
    line = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return [f"{sanitise_text('.'.join(path)) or '-'}: {sanitise_text(line) or '-'}"]
