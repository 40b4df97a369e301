"""Installations on the device: a fetched bundle is verified and left for the updater, whose result is reported.

The agent is unprivileged: it writes bundle and request to `STATE/updates`, and the updater, which is root and trusts
none of it, does the rest (`updates.updater`). Usually that ends this very process; its report is on disk, so the next
one resumes.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from edgefl.core.errors import BundleError, ConfigError
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Json
from edgefl.device.rollouts.client import RolloutClient, RolloutReport
from edgefl.device.rollouts.download import Artefact
from edgefl.device.state_dir import DeviceStateDir
from edgefl.device.updates.protocol import (
    BUNDLE_SUFFIX,
    ID_PATTERN,
    REQUEST_FILE,
    REQUEST_FOLDER,
    InstallRequest,
    read_status,
    write_request,
)
from edgefl.device.updates.slots import LOCK_FILE, NO_SLOTS_REASON, Slots, SoftwareUpdateConfig, verify_bundle
from edgefl.system.atomic_files import is_locked, make_private_directory, write_atomic
from edgefl.system.bundles.archive import MAX_BUNDLE_FILE_BYTES, read_bundle

log = logging.getLogger(__name__)

REPORT_FILE = "note.json"
POLL_INTERVAL_S = 0.5


class InstalledBundles:
    """Handler of rollouts that bring a release or task pack."""

    artefact = Artefact(rollout="installation", name="bundle", suffix=BUNDLE_SUFFIX, max_bytes=MAX_BUNDLE_FILE_BYTES)
    # Both installations are wanted, and each would restart the other for ever.
    cancels_running = False

    def __init__(self, state: DeviceStateDir, config: SoftwareUpdateConfig) -> None:
        self._root, self._config, self.folder = state.root, config, state.root / REQUEST_FOLDER
        self._report = load_report(self.folder)

    @property
    def report(self) -> RolloutReport | None:
        return self._report

    def encode_report(self) -> Json | None:
        return self._report.to_json() if self._report is not None else None

    def set_report(self, report: RolloutReport) -> None:
        self._report = report

    def save(self) -> None:
        make_private_directory(self.folder)
        try:
            write_atomic(self.folder / REPORT_FILE, json.dumps({"v": 1, **(self.encode_report() or {})}).encode())
        finally:
            if self._report is None or self._report.is_final:
                (self.folder / REQUEST_FILE).unlink(missing_ok=True)

    def list_used(self) -> Collection[str]:
        return ()

    def find_result(self, rollout_id: str) -> RolloutReport | None:
        report = self._report
        return report if report is not None and report.id == rollout_id and report.is_final else None

    def apply(self, rollout_id: str, client: RolloutClient[Any]) -> RolloutReport:
        slots, report = self._config.slots, self._report
        if slots is None or not ID_PATTERN.match(rollout_id):
            raise BundleError(NO_SLOTS_REASON if slots is None else "its id makes no sense")
        is_requested = report is not None and report.id == rollout_id and report.state == "requested"
        # The report is written before the request, so after a power cut there may be no request.
        if not is_requested or not (self.folder / REQUEST_FILE).exists():
            client.save(RolloutReport(id=rollout_id, state="fetching"))
            _, path = client.fetch(rollout_id, lambda offer: offer)
            with path.open("rb") as file:
                verify_bundle(read_bundle(file), self._config.load_keys(self._root), slots)
            client.save(RolloutReport(id=rollout_id, state="requested"))
            write_request(self._root, InstallRequest(id=rollout_id, sha256=path.stem))
            log.info("installation %s: verified; the updater takes over", rollout_id)
        return self._wait_for_result(rollout_id, slots, client)

    def roll_back(self, rollout_id: str) -> RolloutReport:
        raise ConfigError(f"installation {rollout_id} is rolled back by the updater alone")

    def _wait_for_result(self, rollout_id: str, slots: Slots, client: RolloutClient[Any]) -> RolloutReport:
        timeout_s = self._config.updater_timeout_s
        until_s = time.monotonic() + timeout_s
        while True:
            client.queue.sleep(POLL_INTERVAL_S)
            result = read_status(slots).outcome
            if result is not None and result.id == rollout_id:
                return RolloutReport(id=rollout_id, state=result.state, reason=result.reason)
            if is_locked(slots.work_dir / LOCK_FILE):
                until_s = time.monotonic() + timeout_s
            elif time.monotonic() > until_s:
                (self.folder / REQUEST_FILE).unlink(missing_ok=True)
                raise ConfigError(
                    f"no updater has been at work for {timeout_s:g} s; on the board: "
                    "systemctl status edgefl-update.path edgefl-update.service"
                )


def load_report(folder: Path) -> RolloutReport | None:
    """Returns the saved report; None without one, or if it is damaged."""
    path = folder / REPORT_FILE
    try:
        value = parse_json(path.read_bytes())
        return RolloutReport(id=str(value["id"]), state=str(value["state"]), reason=value.get("reason"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is damaged and left aside: %s", path, error)
        return None
