"""`edgefl alerts`: whether alerts arrive."""

from __future__ import annotations

import time
import uuid
from functools import partial
from typing import TYPE_CHECKING

import click

from edgefl.cli.fleet.coordinator import alert_options, resolve_alert_settings
from edgefl.cli.output import FullHelpGroup
from edgefl.cli.sources import dir_option
from edgefl.core.errors import NetworkError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@click.group(cls=FullHelpGroup)
def command() -> None:
    """Try whether alerts arrive."""


@command.command()
@dir_option
@alert_options
def test(root: Path, webhook: str | None, secret: str | None) -> None:
    """Send a test alert to the webhook and to each service, to see that it arrives."""
    from edgefl.coordinator.directory import load_directory  # noqa: PLC0415 fast start
    from edgefl.coordinator.monitoring.alert_rules import COORDINATOR, Alert  # noqa: PLC0415 likewise
    from edgefl.coordinator.monitoring.alert_senders import TIMEOUT_S, WebhookConfig, send_alert  # noqa: PLC0415 likewise
    from edgefl.coordinator.monitoring.notifications import load_services, make_message  # noqa: PLC0415 likewise
    from edgefl.core.config import AlertKind  # noqa: PLC0415 likewise

    directory = load_directory(root)
    settings = resolve_alert_settings(directory, webhook, secret)
    now = time.time()
    alert = Alert(
        kind=AlertKind.TEST,
        subject=COORDINATOR,
        message="this is a test, nothing is wrong",
        alert_id=uuid.uuid4().hex,
        started_at=now,
        ended_at=now,
        is_notice=True,
    )
    sends: dict[str, Callable[[float], None]] = {}
    if settings.webhook is not None:
        hook = WebhookConfig(url=settings.webhook, secret=settings.secret)
        sends[hook.host] = partial(send_alert, hook, alert.to_json(directory.fleet))
    message = make_message(directory.fleet, [alert])
    sends |= {service.label: partial(service.send, message) for service in load_services(settings.notify)}
    if not sends:
        raise UsageError(
            f"nobody is told of alerts: give --alert-webhook URL, or webhook or notify under [alerts] in "
            f"{directory.settings}"
        )
    failures = []
    for name, send in sends.items():
        try:
            send(TIMEOUT_S)
        except NetworkError as error:
            failures.append(str(error))
        else:
            click.echo(f"{name} took the test alert")
    if failures:
        raise NetworkError("; ".join(failures))
