"""What a real board can tell those who have none: facts, vitals, findings, timings, logs, in one file to send.

Every part is made within a limit, and one that cannot be made says why in its place. Nothing leaves the board that is
secret: see `redaction`.
"""

from __future__ import annotations

import json
import logging
import platform
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgefl import __version__
from edgefl.device.board import timings
from edgefl.device.board.board import Board
from edgefl.device.board.capabilities import probe
from edgefl.device.board.condition import condition
from edgefl.device.board.fits import TORCH_BYTES
from edgefl.device.board.programs import RunProgram, no_program, run_program
from edgefl.device.board.speed_book import FILE_NAME as SPEEDS
from edgefl.device.board.speed_book import measurable
from edgefl.device.board.training_facts import training_facts
from edgefl.device.board.vitals import Vitals, memory_available_bytes
from edgefl.device.checks import check_board, check_device
from edgefl.device.logbook import read_lines
from edgefl.device.report.redaction import Redactor
from edgefl.device.state import DeviceState
from edgefl.device.telling import LOGS
from edgefl.errors import EdgeflError
from edgefl.findings import check_software
from edgefl.protocol import host_and_port
from edgefl.types import Json, Role
from edgefl.untrusted import parse_json

log = logging.getLogger(__name__)

VERSION = 1
VITALS_EVERY_S = 1.0
MAX_VITALS = 120
LEAST_VITALS = 4
MAX_LOG_LINES = 2000
MAX_KERNEL_LINES = 200
MAX_TASKS = 4
UNITS = ("edgefl-join", "edgefl-device", "edgefl-update", "edgefl-coordinator")
UNIT_FACTS = (
    "LoadState", "ActiveState", "SubState", "Result", "NRestarts", "ExecMainStatus", "MemoryCurrent", "MemoryPeak",
    "CPUUsageNSec", "WatchdogUSec",
)  # fmt: skip
_KERNEL = re.compile(
    r"under-?voltage|throttl|thermal|out of memory|oom-kill|mmc\d.*(?:error|timeout)|I/O error|EXT4-fs error",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldReport:
    """`facts` is `report.json`, `texts` are the files beside it; both hold nothing secret any more."""

    facts: Json
    texts: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What is looked at: `state` None for a board that has not joined, `scratch` is where its card is tried."""

    state: DeviceState | None
    scratch: Path
    root: Path = Path("/")
    run: RunProgram = run_program


def make_report(site: Site, *, on_part: Callable[[str], None] = lambda _: None) -> FieldReport:
    """Returns the report of this board; `on_part` is told the name of each part that is begun."""
    begun_s, redactor = time.monotonic(), redactor_for(site.state)
    samples, stop = list[Json](), threading.Event()
    sampler = threading.Thread(target=_sample, args=(site, samples, stop), name="vitals", daemon=True)
    sampler.start()
    facts: Json = {"v": VERSION, "made_at": round(time.time()), "edgefl": __version__}
    for name, (limit_s, make) in _parts(site).items():
        on_part(name)
        facts[name] = _within(limit_s, make)
    while len(samples) < LEAST_VITALS and sampler.is_alive():
        time.sleep(VITALS_EVERY_S / 10)
    stop.set()
    facts["vitals"] = list(samples)
    facts["took_s"] = round(time.monotonic() - begun_s, 1)
    texts = {"log.txt": _log(site.state), "kernel.txt": "\n".join(_lines(facts.pop("kernel")))}
    return FieldReport(
        facts=json.loads(json.dumps(redactor.json(facts), default=str)),
        texts={name: redactor.text(text) for name, text in texts.items() if text},
    )


def redactor_for(state: DeviceState | None) -> Redactor:
    """Returns what knows the secrets of this board, and the names of its coordinator and of itself."""
    home = str(Path.home())
    folders = {home: "~"} if len(home) > 1 else {}
    own = socket.gethostname()
    if state is None:
        return Redactor(hosts=[own], folders=folders)
    device = state.device
    hosts = [_host(address) for address in device.addresses]
    hosts += [device.broker_host] if device.broker_host else []
    hosts += [own] if own != device.device_id else []
    return Redactor(secrets=_secrets(state), hosts=[host for host in hosts if host != "localhost"], folders=folders)


def _parts(site: Site) -> dict[str, tuple[float, Callable[[], Any]]]:
    return {
        "device": (5.0, lambda: _device(site.state)),
        "board": (20.0, lambda: _board(site)),
        "condition": (10.0, lambda: _condition(site)),
        "versions": (10.0, _versions),
        "findings": (30.0, lambda: _findings(site)),
        "units": (15.0, lambda: _units(site.run)),
        "kernel": (10.0, lambda: _kernel(site.run)),
        "keys": (20.0, timings.key_times),
        "checksums": (20.0, timings.checksum_speeds),
        "card": (60.0, lambda: timings.card_times(site.scratch)),
        "way": (30.0, lambda: timings.way_to(site.state) if site.state else {}),
        "imports": (4 * timings.IMPORT_S, lambda: _imports(site)),
        "training": (MAX_TASKS * timings.TRAINING_S, lambda: _training(site)),
    }


def _within(limit_s: float, make: Callable[[], Any]) -> Any:
    """Returns what is made, or `error` with the reason; what hangs is left to itself."""
    made: list[Any] = []

    def work() -> None:
        try:
            made.append(make())
        except Exception as error:  # the boundary of one part: the others are worth sending without it
            ours = isinstance(error, EdgeflError | OSError)
            log.debug("a part of the report failed", exc_info=True)
            made.append({"error": str(error) if ours else f"{type(error).__name__}: {error}"})

    worker = threading.Thread(target=work, name="part of a report", daemon=True)
    worker.start()
    worker.join(limit_s)
    return made[0] if made else {"error": f"took more than {limit_s:g} s"}


def _sample(site: Site, samples: list[Json], stop: threading.Event) -> None:
    vitals = Vitals(site.scratch, root=site.root)
    while len(samples) < MAX_VITALS and not stop.wait(VITALS_EVERY_S):
        signs = {name: value for name, value in asdict(vitals.read()).items() if value is not None}
        samples.append({"at_s": len(samples) * VITALS_EVERY_S, **signs})


def _device(state: DeviceState | None) -> Json:
    if state is None:
        return {"joined": False}
    device = state.device
    kept = ("device_id", "role", "accelerator", "threads", "max_temperature_c")
    told: Json = {"joined": True, **{name: getattr(device, name) for name in kept}, "tasks": sorted(device.shards)}
    try:
        told["speeds"] = parse_json((state.root / SPEEDS).read_bytes())["speeds"]
    except (OSError, ValueError, KeyError, TypeError):
        told["speeds"] = {}
    return told


def _board(site: Site) -> Json:
    facts = probe(site.root, run=site.run)
    device = site.state.device if site.state else None
    return {
        **facts,
        **training_facts(device.role if device else Role.TRAINER, device.shards if device else (), facts),
    }


def _condition(site: Site) -> Json:
    return condition(Board(site.root, run=site.run), is_jetson=probe(site.root, run=no_program)["family"] == "jetson")


def _versions() -> Json:
    return {"edgefl": __version__, "python": platform.python_version(), "openssl": ssl.OPENSSL_VERSION,
            "libc": " ".join(platform.libc_ver()), "platform": platform.platform()}  # fmt: skip


def _findings(site: Site) -> list[Json]:
    if site.state is not None:
        found = check_device(site.state.root, now=time.time())
    else:
        found = check_board(Role.TRAINER, (), site.root)
    return [{name: str(value) for name, value in asdict(each).items()} for each in [*check_software(), *found]]


def _units(run: RunProgram) -> Json:
    """Returns what systemd says of our units; nothing where it does not run or has none of them."""
    found: Json = {}
    for unit in UNITS:
        told = run(["systemctl", "show", f"{unit}.service", "--no-pager", f"--property={','.join(UNIT_FACTS)}"], 3.0)
        values = dict(line.split("=", 1) for line in (told or "").splitlines() if "=" in line)
        if values.get("LoadState") == "loaded":
            found[unit] = {name: values[name] for name in UNIT_FACTS if name in values}
    return found


def _kernel(run: RunProgram) -> list[str]:
    """Returns what the kernel said of its power, heat, memory and card, where it may be read."""
    told = run(["dmesg"], 5.0) or ""
    return [line for line in told.splitlines() if _KERNEL.search(line)][-MAX_KERNEL_LINES:]


def _imports(site: Site) -> Json:
    free = memory_available_bytes(site.root)
    fits = free is None or free >= TORCH_BYTES
    told = timings.import_times([name for name in timings.IMPORTS if fits or name != "torch"], site.run)
    return told if fits else {**told, "torch": {"error": f"not tried: {free} bytes of memory are free"}}


def _training(site: Site) -> Json:
    if site.state is None:
        return timings.training_speeds({"digits": None}, accelerator="cpu", threads=None)
    device = site.state.device
    tasks: dict[str, str | None] = dict(measurable(device.shards, probe(site.root, run=no_program))[:MAX_TASKS])
    tasks = tasks or {"digits": None}
    accelerator = "cpu" if device.accelerator == "auto" else device.accelerator
    return timings.training_speeds(tasks, accelerator=accelerator, threads=device.threads)


def _log(state: DeviceState | None) -> str:
    if state is None:
        return ""
    lines = list(read_lines(state.root / LOGS))[-MAX_LOG_LINES:]
    return "\n".join(
        f"{line.get('at')} {line.get('level')} {line.get('logger')}: {line.get('message')}" for line in lines
    )


def _lines(value: Any) -> list[str]:
    return value if isinstance(value, list) else []


def _secrets(state: DeviceState) -> list[str]:
    """Returns every line of the files that are nobody else's business."""
    found: list[str] = []
    for path in (state.key, state.cert, state.ca, state.root / ".pending"):
        try:
            found += path.read_text(errors="replace").splitlines()
        except OSError:
            continue
    return [line.strip() for line in found if not line.startswith("-----")]


def _host(address: str) -> str:
    try:
        return host_and_port(address)[0]
    except (EdgeflError, ValueError):
        return address
