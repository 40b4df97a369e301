"""Alerts for people: one message for several, quiet hours, and its delivery to services by apprise.

Addresses of services hold secrets, also in place of the host: only the service's scheme is ever shown.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl.coordinator.monitoring.alert_rules import Alert
from edgefl.coordinator.monitoring.alert_senders import MAX_QUEUED, TRANSIENT_STATUSES, AlertRejectedError
from edgefl.core.conditions import RunConditions, is_open
from edgefl.core.config import MAX_NOTIFY, NOTIFY_FORM, AlertSettings
from edgefl.core.errors import ConfigError, MissingPackageError, NetworkError, format_install_command
from edgefl.core.safe_text import escape_text

log = logging.getLogger(__name__)

MAX_LINES = 30
"""Of one message; it goes out in parts where a service takes only shorter ones."""
MAX_FILE_BYTES = 65_536
_SCHEME = re.compile(r"([a-z0-9+.-]{1,20})://", re.ASCII | re.IGNORECASE)
_STATUS = re.compile(r"error=(\d{3})\b", re.ASCII)


@dataclass(frozen=True, slots=True)
class Message:
    """What people are sent; `is_good` where nothing in it is wrong any more."""

    title: str
    body: str
    is_good: bool = False


class AlertGroup:
    """Alerts that wait to be sent as one message: for those that follow soon, or for the end of quiet hours."""

    def __init__(self, settings: AlertSettings, fleet: str) -> None:
        self._group_s, self._fleet = settings.group_s, fleet
        self._quiet = RunConditions(hours=settings.quiet_hours, zone=settings.zone)
        self._alerts: dict[str, Alert] = {}
        self._num_dropped, self._first_s, self._was_quiet = 0, 0.0, False

    def add(self, alert: Alert, now_s: float) -> None:
        """Adds an alert; its end takes the place of its start, and the oldest is dropped beyond `MAX_QUEUED`."""
        if not self._alerts:
            self._first_s = now_s
        self._alerts.pop(alert.alert_id, None)
        self._alerts[alert.alert_id] = alert
        if len(self._alerts) > MAX_QUEUED:
            del self._alerts[next(iter(self._alerts))]
            self._num_dropped += 1

    def poll(self, now: float, now_s: float) -> Message | None:
        """Returns the message that is due.

        Args:
            now: Unix seconds, for the quiet hours.
            now_s: seconds of a clock that does not jump.
        """
        if self._is_quiet(now):
            self._was_quiet = True
            return None
        if not self._alerts:
            self._was_quiet = False
            return None
        return self._take() if self._was_quiet or now_s - self._first_s >= self._group_s else None

    def close(self, now: float) -> Message | None:
        """Returns the last message; in quiet hours there is none."""
        if self._alerts and self._is_quiet(now):
            log.warning("%d alerts of the quiet hours are not sent; they stand in this log", len(self._alerts))
            return None
        return self._take() if self._alerts else None

    def _is_quiet(self, now: float) -> bool:
        return bool(self._quiet.hours) and is_open(self._quiet, now)

    def _take(self) -> Message:
        alerts, num_dropped, was_quiet = [*self._alerts.values()], self._num_dropped, self._was_quiet
        self._alerts, self._num_dropped, self._was_quiet = {}, 0, False
        return make_message(self._fleet, alerts, num_dropped=num_dropped, was_quiet=was_quiet)


def make_message(fleet: str, alerts: Sequence[Alert], *, num_dropped: int = 0, was_quiet: bool = False) -> Message:
    """Returns the message of some alerts: what is wrong now stands first.

    Args:
        fleet: its name.
        alerts: one or more.
        num_dropped: alerts before them that are not among them.
        was_quiet: they were held back in quiet hours.
    """
    is_good = all(alert.state != "started" for alert in alerts)
    quiet = " of the quiet hours" if was_quiet else ""
    if len(alerts) == 1 and not num_dropped:
        return Message(escape_text(f"[{fleet}] {alerts[0].headline}{quiet}"), escape_text(alerts[0].message), is_good)
    ordered = sorted(alerts, key=lambda alert: alert.state != "started")
    lines = [escape_text(f"{alert.headline}: {alert.message}") for alert in ordered[:MAX_LINES]]
    if num_more := len(alerts) - len(lines) + num_dropped:
        lines.append(f"and {num_more} more, in the coordinator's log")
    num_wrong = sum(alert.state == "started" for alert in alerts)
    title = escape_text(f"[{fleet}] {len(alerts) + num_dropped} alerts{quiet}, {num_wrong} not over")
    return Message(title, "\n".join(lines), is_good)


class NotificationService:
    """A service by apprise; `label` is what may be shown of its address."""

    def __init__(self, label: str, service: Any) -> None:
        self.label, self._service = label, service

    def send(self, message: Message, timeout_s: float) -> None:
        """Sends one message.

        Raises:
            AlertRejectedError: the service answered with a permanent error, such as 404.
            NetworkError: no answer, or a temporary error.
        """
        import apprise  # noqa: PLC0415 an extra

        receiver = apprise.Apprise()
        receiver.add(self._service)
        kind = apprise.NotifyType.SUCCESS if message.is_good else apprise.NotifyType.WARNING
        result = receiver.notify(
            title=message.title,
            body=message.body,
            notify_type=kind,
            body_format=apprise.NotifyFormat.TEXT,
            timeout=timeout_s,
        )
        if result:
            return
        # What apprise says may hold parts of the address; a status does not.
        status = next((int(found[1]) for entry in result.logs() if (found := _STATUS.search(entry.message))), None)
        if status is None:
            raise NetworkError(f"{self.label} cannot be reached, or refuses the message")
        is_temporary = status >= 500 or status in TRANSIENT_STATUSES
        raise (NetworkError if is_temporary else AlertRejectedError)(f"{self.label} answered {status}")


def load_services(notify: Sequence[str]) -> list[NotificationService]:
    """Returns the services at these addresses, as `AlertSettings.notify` has them.

    Raises:
        ConfigError: an address is none of apprise's, or its variable or file cannot be read.
        MissingPackageError: there are addresses, and no apprise.
    """
    if not notify:
        return []
    try:
        import apprise  # noqa: PLC0415 an extra
    except ModuleNotFoundError:
        raise MissingPackageError(f"alerts.notify needs apprise: {format_install_command('apprise')}") from None
    # It logs addresses, shortened; and what it calls logs paths, which are topics and tokens.
    logging.getLogger("apprise").propagate = False
    logging.getLogger("urllib3").setLevel(logging.INFO)
    asset = apprise.AppriseAsset(
        app_id="edgefl",
        app_desc="edgefl alerts",
        app_url="",
        async_mode=False,
        http_redirects=False,
        storage_mode=apprise.PersistentStoreMode.MEMORY,
    )
    addresses = [each for number, address in enumerate(notify, 1) for each in _resolve(number, address)]
    if len(addresses) > MAX_NOTIFY:
        raise ConfigError(f"alerts.notify must be at most {MAX_NOTIFY} addresses, got {len(addresses)}")
    services = []
    for source, address in addresses:
        scheme = _SCHEME.match(address)
        label = f"{scheme[1].lower()}:// of {source}" if scheme else source
        if (service := apprise.Apprise.instantiate(address, asset=asset)) is None:
            raise ConfigError(f"{label} is no address that apprise knows; it must be one {NOTIFY_FORM}")
        if service.overflow_mode == apprise.OverflowMode.UPSTREAM:  # most services refuse what is too long
            service.overflow_mode = apprise.OverflowMode.SPLIT
        services.append(NotificationService(label, service))
    return services


def _resolve(number: int, address: str) -> list[tuple[str, str]]:
    """Returns the addresses that an entry of `notify` is or names, with what to call each."""
    source = f"alerts.notify {number}"
    kind, _, rest = address.partition(":")
    if kind not in {"env", "file"}:
        return [(source, address)]
    if kind == "env":
        text, place = os.environ.get(rest, ""), f"the variable {rest:.60}"
    else:
        text, place = _read_file(Path(rest), source), rest
    if not (found := text.split()):
        raise ConfigError(f"{source}: {place} holds no address; it must hold one {NOTIFY_FORM.partition(',')[0]}")
    return [
        (f"{source}.{place_number}" if len(found) > 1 else source, each) for place_number, each in enumerate(found, 1)
    ]


def _read_file(path: Path, source: str) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"{source}: {path} must be at most {MAX_FILE_BYTES} bytes")
        return content.decode()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{source}: {path} cannot be read: {reason}") from None
