"""The agent's half of an update: fetches a bundle, verifies it, asks the updater for it, tells what became of it.

It has no right to change what runs here, and needs none: it leaves bundle and request in `STATE/updates`, and the
updater, which is root and believes nothing of it, does the rest (`slots.updater`). Usually that ends this very
process; what it was at is on disk, so the next one goes on.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from numpy.random import Generator

from edgefl.bundles.archive import MAX_FILE_BYTES, read_bundle
from edgefl.bundles.keys import Signers
from edgefl.device.errands import CalledOffError, Errands
from edgefl.device.file_fetch import TIMEOUT_S, Source, WantedFile, fetch_file, json_answer
from edgefl.device.install_facts import BY_HAND, Site, install_facts
from edgefl.device.slots.acceptance import accepted_wheels
from edgefl.device.slots.health import Health, begin_health, write_health
from edgefl.device.slots.inbox import FOLDER, REQUEST, SUFFIX, InstallRequest, write_request
from edgefl.device.slots.layout import LOCK
from edgefl.device.slots.status import read_status
from edgefl.device.state import DeviceState
from edgefl.device.trust import request
from edgefl.errors import BundleError, ConfigError, DataError, EdgeflError, NotFoundError, StoreError
from edgefl.files import is_held, make_private_directory, write_whole
from edgefl.types import Json
from edgefl.untrusted import parse_json

log = logging.getLogger(__name__)

NOTE = "note.json"
LOOK_S = 0.5

_ENDED = frozenset({"running", "refused", "failed", "rolled-back"})
_ID = re.compile(r"[A-Za-z0-9._-]{1,100}\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallReport:
    """What is told of the last installation; `state` is fetching, requested or one of those that end it."""

    id: str
    state: str
    reason: str | None = None


class Installations:
    """Orders come from any thread; one thread does one at a time, beside training.

    Args:
        state: the device's state directory.
        site: see `Site`.
        boot_id: of this life of the agent.
        source: where and as whom to fetch now; raises NetworkError while there is no connection.
        on_change: called when there is something new to tell.
        rng: spreads the attempts of a fleet.
    """

    def __init__(
        self,
        state: DeviceState,
        *,
        site: Site,
        boot_id: str,
        source: Callable[[], Source],
        on_change: Callable[[], None],
        rng: Generator,
    ) -> None:
        self._root, self._site, self._source, self._on_change = state.root, site, source, on_change
        self._folder = state.root / FOLDER
        self._note = self._read_note()
        self._health = _health(site, boot_id)
        self._told: Health | None = None
        self._telling = threading.Lock()
        under_way = [self._note.id] if self._note is not None and self._note.state not in _ENDED else []
        # Not called off: what comes second is as much wanted as what came first, and both would start over for ever.
        self._errands = Errands(
            "installations", self._install, on_failure=self._failed, rng=rng, orders=under_way, calls_off=False
        )

    def start(self) -> None:
        """Says that this version has come up, and goes on with what an earlier life was at."""
        self._tell_health()
        self._errands.start()

    def stop(self, within_s: float = 2.0) -> None:
        self._errands.stop(within_s)

    def connected(self) -> None:
        """Says that this version works: it has reached the coordinator, and the two understand each other."""
        self._tell_health(connected=True)

    def linked(self) -> None:
        """Says that it has reached the broker, too; called by any thread."""
        self._tell_health(linked=True)

    def install(self, installation: str) -> None:
        """Begins an installation; one that is done is only reported again."""
        self._errands.add(installation)

    @property
    def report(self) -> Json | None:
        """What heartbeats say of the last installation; None before the first."""
        note = self._note
        return None if note is None else {name: value for name, value in asdict(note).items() if value is not None}

    def facts(self) -> Json:
        """Returns what capabilities say; see `install_facts`."""
        return install_facts(self._site)

    def _failed(self, installation: str, error: Exception) -> None:
        self._note = InstallReport(id=installation, state="failed", reason=f"{type(error).__name__}: {error}")
        self._on_change()

    def _install(self, installation: str) -> None:
        note = self._note
        if note is not None and note.id == installation and note.state in _ENDED:
            self._on_change()
            return
        try:
            is_asked = note is not None and note.id == installation and note.state == "requested"
            # The note comes before the request, so a power cut may have left it without one.
            if not is_asked or not (self._folder / REQUEST).exists():
                self._ask(installation)
            self._await_outcome(installation)
        except BundleError as error:
            self._end(InstallReport(id=installation, state="refused", reason=str(error)))
        except (DataError, StoreError, NotFoundError, ConfigError) as error:
            self._end(InstallReport(id=installation, state="failed", reason=str(error)))

    def _ask(self, installation: str) -> None:
        """Fetches and verifies the bundle, and leaves the request."""
        slots = self._site.slots
        if slots is None or not _ID.match(installation):
            raise BundleError(BY_HAND if slots is None else "its id makes no sense")
        make_private_directory(self._folder)
        self._keep(InstallReport(id=installation, state="fetching"))
        path = self._fetched(installation)
        with path.open("rb") as file:
            accepted_wheels(read_bundle(file), Signers.load(self._site.signers), slots)
        self._keep(InstallReport(id=installation, state="requested"))
        write_request(self._root, InstallRequest(id=installation, sha256=path.stem))
        log.info("installation %s: verified; the updater takes over", installation)

    def _fetched(self, installation: str) -> Path:
        def attempt() -> Path:
            waiting = self._errands.num_waiting()

            # Whoever comes meanwhile may have taken this one's place; only the coordinator can tell, so ask it again.
            def is_wanted() -> bool:
                return self._errands.num_waiting() == waiting and not self._errands.is_called_off()

            try:
                wanted = fetch_bundle_offer(self._source(), installation)
                self._prune(keep=wanted.sha256)
                return fetch_file(self._source(), wanted, self._folder, is_wanted)
            except NotFoundError:  # one that a newer order has replaced is left without a word
                if self._errands.num_waiting():
                    raise CalledOffError from None
                raise

        return self._errands.until_done(attempt, what=f"installation {installation}", on_away=self._on_change)

    def _await_outcome(self, installation: str) -> None:
        slots = self._site.slots
        if slots is None:
            raise ConfigError(BY_HAND)
        patience_s = time.monotonic() + self._site.no_answer_s
        while True:
            self._errands.sleep(LOOK_S)
            status = read_status(slots)
            if status.outcome is not None and status.outcome.id == installation:
                self._end(InstallReport(id=installation, state=status.outcome.state, reason=status.outcome.reason))
                return
            if is_held(slots.work / LOCK):
                patience_s = time.monotonic() + self._site.no_answer_s
            elif time.monotonic() > patience_s:
                (self._folder / REQUEST).unlink(missing_ok=True)
                raise ConfigError(
                    f"no updater has been at work for {self._site.no_answer_s:g} s; on the board: "
                    "systemctl status edgefl-update.path edgefl-update.service"
                )

    def _end(self, report: InstallReport) -> None:
        if report.reason:
            log.warning("installation %s is %s: %s", report.id, report.state, report.reason)
        else:
            log.info("installation %s is %s", report.id, report.state)
        try:
            self._keep(report)
        except StoreError as error:  # it is said, and must not become a failure of what has ended otherwise
            log.warning("what became of installation %s cannot be kept: %s", report.id, error)
        if self._folder.is_dir():
            (self._folder / REQUEST).unlink(missing_ok=True)
            self._prune()

    def _keep(self, report: InstallReport) -> None:
        # Said first: a card without room must not keep the coordinator from learning so.
        self._note = report
        self._on_change()
        make_private_directory(self._folder)
        write_whole(self._folder / NOTE, json.dumps({"v": 1, **asdict(report)}).encode())

    def _read_note(self) -> InstallReport | None:
        try:
            value = parse_json((self._folder / NOTE).read_bytes())
            return InstallReport(id=str(value["id"]), state=str(value["state"]), reason=value.get("reason"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s is damaged and left aside: %s", self._folder / NOTE, error)
            return None

    def _prune(self, keep: str = "") -> None:
        for path in self._folder.iterdir():
            if path.suffix in {SUFFIX, ".part"} and path.stem != keep:
                path.unlink(missing_ok=True)

    def _tell_health(self, *, connected: bool = False, linked: bool = False) -> None:
        """Writes what has become known, if anything has."""
        with self._telling:
            if (known := self._health) is None:
                return
            told = replace(known, connected=known.connected or connected, linked=known.linked or linked)
            if told == self._told:
                return
            self._health = told
            try:
                write_health(self._root, told)
            except StoreError as error:
                log.warning("the updater cannot be told that this version works: %s", error)
                return
            self._told = told


def fetch_bundle_offer(source: Source, installation: str) -> WantedFile:
    """Returns what the coordinator offers of an installation.

    Raises:
        NotFoundError: it is not for this device (any more).
        DataError: the offer makes no sense, or the bundle is larger than a device takes.
        NetworkError: no answer.
    """
    path = f"/edgefl/v1/installations/{installation}"
    status, body = request(
        source.address, source.trust, "GET", f"{path}/offer", headers=source.headers, timeout_s=TIMEOUT_S
    )
    value = json_answer(source.address, status, body)
    sha256, num_bytes = value.get("sha256"), value.get("bytes")
    if not isinstance(sha256, str) or not _SHA256.match(sha256) or not isinstance(num_bytes, int) or num_bytes < 1:
        raise DataError(f"the coordinator's offer makes no sense: {str(value)[:200]}")
    if num_bytes > MAX_FILE_BYTES:
        raise DataError(f"the bundle has {num_bytes} bytes, a device takes {MAX_FILE_BYTES} at most")
    return WantedFile(what="the bundle", path=f"{path}/bundle", sha256=sha256, num_bytes=num_bytes, suffix=SUFFIX)


def _health(site: Site, boot_id: str) -> Health | None:
    try:
        return begin_health(site.slots, boot_id) if site.slots is not None else None
    except EdgeflError as error:
        log.warning("the updater cannot be told what runs here: %s", error)
        return None
