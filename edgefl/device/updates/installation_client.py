"""Installation client of the agent: downloads and verifies a bundle, requests its installation, reports the result.

It is unprivileged: it writes bundle and request to `STATE/updates`, and the updater, which is root and trusts none of
it, does the rest (`updates.updater`). Usually that ends this very process; its state is on disk, so the next one
resumes.
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

from edgefl.bundles.archive import MAX_BUNDLE_FILE_BYTES, read_bundle
from edgefl.bundles.keys import TrustedKeys
from edgefl.core.errors import BundleError, ConfigError, DataError, EdgeflError, NotFoundError, StoreError
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Json
from edgefl.device.background_tasks import BackgroundTaskQueue, TaskCancelledError
from edgefl.device.file_download import TIMEOUT_S, DownloadSource, RemoteFile, download_file, parse_json_response
from edgefl.device.state_dir import DeviceStateDir
from edgefl.device.updates.health import AgentHealth, create_health, write_health
from edgefl.device.updates.install_request import (
    BUNDLE_SUFFIX,
    REQUEST_FILE,
    REQUEST_FOLDER,
    InstallRequest,
    write_request,
)
from edgefl.device.updates.slots import LOCK_FILE
from edgefl.device.updates.status import read_status
from edgefl.device.updates.update_config import NO_SLOTS_REASON, SoftwareUpdateConfig, get_install_facts
from edgefl.device.updates.verify import verify_bundle
from edgefl.system.atomic_files import is_locked, make_private_directory, write_atomic
from edgefl.system.https_client import request

log = logging.getLogger(__name__)

REPORT_FILE = "note.json"
POLL_INTERVAL_S = 0.5

_FINAL_STATES = frozenset({"running", "refused", "failed", "rolled-back"})
_ID_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,100}\Z")
_SHA256_PATTERN = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallReport:
    """Report of the last installation; `state` is fetching, requested or a final one."""

    id: str
    state: str
    reason: str | None = None


class InstallationClient:
    """Installation client; requests come from any thread, one thread executes one at a time.

    Args:
        state: the device's state directory.
        config: see `SoftwareUpdateConfig`.
        boot_id: of this agent process.
        get_source: returns the present download source; raises NetworkError while there is no connection.
        on_change: called when the report has changed.
        rng: randomises the retries of a fleet.
    """

    def __init__(
        self,
        state: DeviceStateDir,
        *,
        config: SoftwareUpdateConfig,
        boot_id: str,
        get_source: Callable[[], DownloadSource],
        on_change: Callable[[], None],
        rng: Generator,
    ) -> None:
        self._root, self._config, self._get_source, self._on_change = state.root, config, get_source, on_change
        self._folder = state.root / REQUEST_FOLDER
        self._last_report = self._load_report()
        self._health = _create_health(config, boot_id)
        self._written_health: AgentHealth | None = None
        self._health_lock = threading.Lock()
        pending = (
            [self._last_report.id]
            if self._last_report is not None and self._last_report.state not in _FINAL_STATES
            else []
        )
        # Not cancelled: both installations are wanted, and each would restart the other for ever.
        self._task_queue = BackgroundTaskQueue(
            "installations",
            self._install,
            on_failure=self._on_failure,
            rng=rng,
            pending=pending,
            should_cancel_running=False,
        )

    def start(self) -> None:
        """Writes initial health, and resumes an installation of an earlier process."""
        self._update_health()
        self._task_queue.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        self._task_queue.stop(timeout_s)

    def record_coordinator_connected(self) -> None:
        """Records in the health file that this version has reached a compatible coordinator."""
        self._update_health(is_connected=True)

    def record_broker_connected(self) -> None:
        """Records in the health file that the broker was reached; called by any thread."""
        self._update_health(is_broker_connected=True)

    def install(self, installation: str) -> None:
        """Starts an installation; a finished one is only reported again."""
        self._task_queue.add(installation)

    @property
    def report(self) -> Json | None:
        """Returns the heartbeat's report of the last installation; None before the first."""
        report = self._last_report
        return (
            None if report is None else {name: value for name, value in asdict(report).items() if value is not None}
        )

    def get_facts(self) -> Json:
        """Returns the installation facts; see `get_install_facts`."""
        return get_install_facts(self._config)

    def _on_failure(self, installation: str, error: Exception) -> None:
        self._last_report = InstallReport(id=installation, state="failed", reason=f"{type(error).__name__}: {error}")
        self._on_change()

    def _install(self, installation: str) -> None:
        report = self._last_report
        if report is not None and report.id == installation and report.state in _FINAL_STATES:
            self._on_change()
            return
        try:
            is_requested = report is not None and report.id == installation and report.state == "requested"
            # The report is written before the request, so after a power cut there may be no request.
            if not is_requested or not (self._folder / REQUEST_FILE).exists():
                self._request_update(installation)
            self._wait_for_outcome(installation)
        except BundleError as error:
            self._complete(InstallReport(id=installation, state="refused", reason=str(error)))
        except (DataError, StoreError, NotFoundError, ConfigError) as error:
            self._complete(InstallReport(id=installation, state="failed", reason=str(error)))

    def _request_update(self, installation: str) -> None:
        """Downloads and verifies the bundle, and writes the request."""
        slots = self._config.slots
        if slots is None or not _ID_PATTERN.match(installation):
            raise BundleError(NO_SLOTS_REASON if slots is None else "its id makes no sense")
        make_private_directory(self._folder)
        self._save_report(InstallReport(id=installation, state="fetching"))
        path = self._download_bundle(installation)
        with path.open("rb") as file:
            verify_bundle(read_bundle(file), TrustedKeys.load(self._config.signers), slots)
        self._save_report(InstallReport(id=installation, state="requested"))
        write_request(self._root, InstallRequest(id=installation, sha256=path.stem))
        log.info("installation %s: verified; the updater takes over", installation)

    def _download_bundle(self, installation: str) -> Path:
        def attempt() -> Path:
            num_waiting = self._task_queue.num_waiting()

            # A newer request may have replaced this one; only the coordinator knows, so its offer is fetched again.
            def should_continue() -> bool:
                return self._task_queue.num_waiting() == num_waiting and not self._task_queue.is_cancelled()

            try:
                offer = fetch_bundle_offer(self._get_source(), installation)
                self._prune(keep=offer.sha256)
                return download_file(self._get_source(), offer, self._folder, should_continue)
            except NotFoundError:  # a replaced installation is dropped silently
                if self._task_queue.num_waiting():
                    raise TaskCancelledError from None
                raise

        return self._task_queue.retry(attempt, label=f"installation {installation}", on_disconnect=self._on_change)

    def _wait_for_outcome(self, installation: str) -> None:
        slots = self._config.slots
        if slots is None:
            raise ConfigError(NO_SLOTS_REASON)
        patience_s = time.monotonic() + self._config.updater_timeout_s
        while True:
            self._task_queue.sleep(POLL_INTERVAL_S)
            status = read_status(slots)
            if status.outcome is not None and status.outcome.id == installation:
                self._complete(
                    InstallReport(id=installation, state=status.outcome.state, reason=status.outcome.reason)
                )
                return
            if is_locked(slots.work_dir / LOCK_FILE):
                patience_s = time.monotonic() + self._config.updater_timeout_s
            elif time.monotonic() > patience_s:
                (self._folder / REQUEST_FILE).unlink(missing_ok=True)
                raise ConfigError(
                    f"no updater has been at work for {self._config.updater_timeout_s:g} s; on the board: "
                    "systemctl status edgefl-update.path edgefl-update.service"
                )

    def _complete(self, report: InstallReport) -> None:
        if report.reason:
            log.warning("installation %s is %s: %s", report.id, report.state, report.reason)
        else:
            log.info("installation %s is %s", report.id, report.state)
        try:
            self._save_report(report)
        except StoreError as error:  # it is reported, and must not turn a finished installation into a failure
            log.warning("what became of installation %s cannot be kept: %s", report.id, error)
        if self._folder.is_dir():
            (self._folder / REQUEST_FILE).unlink(missing_ok=True)
            self._prune()

    def _save_report(self, report: InstallReport) -> None:
        # Set first: with a full card the coordinator must still receive the report.
        self._last_report = report
        self._on_change()
        make_private_directory(self._folder)
        write_atomic(self._folder / REPORT_FILE, json.dumps({"v": 1, **asdict(report)}).encode())

    def _load_report(self) -> InstallReport | None:
        try:
            value = parse_json((self._folder / REPORT_FILE).read_bytes())
            return InstallReport(id=str(value["id"]), state=str(value["state"]), reason=value.get("reason"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s is damaged and left aside: %s", self._folder / REPORT_FILE, error)
            return None

    def _prune(self, keep: str = "") -> None:
        for path in self._folder.iterdir():
            if path.suffix in {BUNDLE_SUFFIX, ".part"} and path.stem != keep:
                path.unlink(missing_ok=True)

    def _update_health(self, *, is_connected: bool = False, is_broker_connected: bool = False) -> None:
        """Writes the health file if it has changed."""
        with self._health_lock:
            if (current := self._health) is None:
                return
            updated = replace(
                current, connected=current.connected or is_connected, linked=current.linked or is_broker_connected
            )
            if updated == self._written_health:
                return
            self._health = updated
            try:
                write_health(self._root, updated)
            except StoreError as error:
                log.warning("the updater cannot be told that this version works: %s", error)
                return
            self._written_health = updated


def fetch_bundle_offer(source: DownloadSource, installation: str) -> RemoteFile:
    """Returns the coordinator's offer of an installation.

    Raises:
        NotFoundError: it is not for this device (any more).
        DataError: the offer is malformed, or the bundle is larger than a device accepts.
        NetworkError: no answer.
    """
    path = f"/edgefl/v1/installations/{installation}"
    status, body = request(
        source.address, source.tls_context, "GET", f"{path}/offer", headers=source.headers, timeout_s=TIMEOUT_S
    )
    value = parse_json_response(source.address, status, body)
    sha256, num_bytes = value.get("sha256"), value.get("bytes")
    if (
        not isinstance(sha256, str)
        or not _SHA256_PATTERN.match(sha256)
        or not isinstance(num_bytes, int)
        or num_bytes < 1
    ):
        raise DataError(f"the coordinator's offer makes no sense: {str(value)[:200]}")
    if num_bytes > MAX_BUNDLE_FILE_BYTES:
        raise DataError(f"the bundle has {num_bytes} bytes, a device takes {MAX_BUNDLE_FILE_BYTES} at most")
    return RemoteFile(
        what="the bundle", path=f"{path}/bundle", sha256=sha256, num_bytes=num_bytes, suffix=BUNDLE_SUFFIX
    )


def _create_health(config: SoftwareUpdateConfig, boot_id: str) -> AgentHealth | None:
    try:
        return create_health(config.slots, boot_id) if config.slots is not None else None
    except EdgeflError as error:
        log.warning("the updater cannot be told what runs here: %s", error)
        return None
