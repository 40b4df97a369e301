from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest
from webhook_receiver import Receiver, run_that_fails

from edgefl.coordinator.monitoring.alert_rules import MAX_MESSAGE_CHARS, Alert
from edgefl.coordinator.monitoring.alert_senders import AlertRejectedError, QueuedSender
from edgefl.coordinator.monitoring.notifications import (
    MAX_LINES,
    AlertGroup,
    Message,
    load_services,
    make_message,
)
from edgefl.core.config import AlertKind, AlertSettings
from edgefl.core.errors import ConfigError, MissingPackageError, NetworkError
from edgefl.simulation.local_fleet import find_free_port

# A part of apprise, for a service that is not used here, imports what later Pythons do not have.
pytestmark = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")

EVENING, MIDNIGHT, MORNING = 21 * 3600.0, 24 * 3600.0, 31 * 3600.0
"""Of the first of January 1970, and the next."""
NIGHT = AlertSettings(notify=("json://x",), quiet_hours=("22:00-07:00",), zone="UTC", group_s=10.0)
GONE = Alert(kind=AlertKind.DEVICE_GONE, subject="pi-1", message="gone for 5 min", alert_id="a", started_at=1.0)
FULL = Alert(kind=AlertKind.DISK_LOW, subject="pi-2", message="9 MB are free", alert_id="b", started_at=1.0)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as running:
        yield running


@pytest.fixture
def debug_log() -> Iterator[io.StringIO]:
    """What reaches the log's root, as a command writes it; `caplog` gets what is kept from there too."""
    stream, root = io.StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(stream), root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield stream
    root.setLevel(level)
    root.removeHandler(handler)


def titles(receiver: Receiver) -> list[str]:
    return [body["title"] for body in receiver.bodies]


def service_url(receiver: Receiver) -> str:
    return receiver.url.replace("http://", "json://user:pass-secret@")


def test_alerts_that_follow_soon_are_in_one_message_and_an_end_takes_the_place_of_its_start() -> None:
    group = AlertGroup(NIGHT, "lab")
    assert group.poll(EVENING, 100.0) is None
    group.add(GONE, 100.0)
    group.add(FULL, 105.0)
    assert group.poll(EVENING, 109.0) is None
    group.add(replace(GONE, ended_at=9.0), 109.0)
    message = group.poll(EVENING, 110.0)
    assert message == Message(
        "[lab] 2 alerts, 1 not over", "ALERT disk-low pi-2: 9 MB are free\nOVER device-gone pi-1: gone for 5 min"
    )
    assert group.poll(EVENING, 200.0) is None
    group.add(replace(FULL, ended_at=9.0), 200.0)
    assert group.poll(EVENING, 210.0) == Message("[lab] OVER disk-low pi-2", "9 MB are free", is_good=True)


def test_quiet_hours_hold_alerts_back_and_one_message_follows_them() -> None:
    group = AlertGroup(NIGHT, "lab")
    group.add(GONE, 100.0)
    assert group.poll(MIDNIGHT, 1000.0) is None
    group.add(FULL, 1000.0)
    group.add(replace(FULL, ended_at=9.0), 2000.0)
    assert group.poll(MIDNIGHT + 60, 3000.0) is None
    message = group.poll(MORNING, 3001.0)
    assert message is not None
    assert message.title == "[lab] 2 alerts of the quiet hours, 1 not over"
    group.add(FULL, 4000.0)
    assert group.poll(MORNING, 4001.0) is None, "the next is grouped as usual"
    assert group.poll(MIDNIGHT, 5000.0) is None


def test_a_night_without_alerts_does_not_hurry_the_first_of_the_day() -> None:
    group = AlertGroup(NIGHT, "lab")
    assert group.poll(MIDNIGHT, 100.0) is None
    assert group.poll(MORNING, 200.0) is None
    group.add(GONE, 300.0)
    assert group.poll(MORNING, 301.0) is None


def test_the_end_of_the_coordinator_sends_what_waits_but_not_at_night(caplog: pytest.LogCaptureFixture) -> None:
    group = AlertGroup(NIGHT, "lab")
    assert group.close(EVENING) is None
    group.add(GONE, 1.0)
    assert group.close(MIDNIGHT) is None
    assert "1 alerts of the quiet hours are not sent" in caplog.text
    message = group.close(EVENING)
    assert message is not None
    assert message.title == "[lab] ALERT device-gone pi-1"


def test_a_message_is_short_and_no_text_of_a_board_forges_a_line() -> None:
    alerts = [replace(GONE, subject=f"pi-{number}", alert_id=str(number)) for number in range(MAX_LINES + 5)]
    message = make_message("lab", alerts, num_dropped=2)
    assert message.body.splitlines()[-1] == "and 7 more, in the coordinator's log"
    assert len(message.body.splitlines()) == MAX_LINES + 1
    forged = make_message("lab", [replace(GONE, message="x\nOVER device-gone pi-1: \u202e"), FULL])
    assert len(forged.body.splitlines()) == 2
    assert "\u202e" not in forged.body


def test_a_group_keeps_no_more_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgefl.coordinator.monitoring.notifications.MAX_QUEUED", 3)
    group = AlertGroup(NIGHT, "lab")
    for number in range(5):
        group.add(replace(GONE, subject=f"pi-{number}", alert_id=str(number)), 1.0)
    message = group.poll(EVENING, 20.0)
    assert message is not None
    assert message.title == "[lab] 5 alerts, 3 not over"
    assert [line.split()[2] for line in message.body.splitlines()[:3]] == ["pi-2:", "pi-3:", "pi-4:"]


def test_an_address_may_stand_in_a_variable_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("apprise", reason="apprise is not installed: pip install 'edgefl-fleet[alerts]'")
    monkeypatch.setenv("MY_SERVICE", "json://a/very-secret")
    (tmp_path / "services").write_text("jsons://b/very-secret\nntfy://c/very-secret\n")
    services = load_services(["env:MY_SERVICE", f"file:{tmp_path}/services"])
    assert [each.label for each in services] == [
        "json:// of alerts.notify 1", "jsons:// of alerts.notify 2.1", "ntfy:// of alerts.notify 2.2",
    ]  # fmt: skip
    (tmp_path / "many").write_text("json://x " * 17)
    for wrong, words in (
        ("env:NO_SUCH_SERVICE", "the variable NO_SUCH_SERVICE holds no address"),
        (f"file:{tmp_path}/none", "No such"), (f"file:{tmp_path}/many", "at most 16"),
        ("quux://very-secret/x", "quux:// of alerts.notify 1 is no address"),
        ("json://", "is no address"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words) as refusal:
            load_services([wrong])
        assert "very-secret" not in str(refusal.value)


def test_without_apprise_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "apprise", None)
    assert load_services([]) == []
    with pytest.raises(MissingPackageError, match=r"edgefl-fleet\[alerts\]"):
        load_services(["json://x"])


def test_a_service_gets_the_message_and_its_failures_are_told_apart(
    receiver: Receiver, debug_log: io.StringIO
) -> None:
    pytest.importorskip("apprise", reason="apprise is not installed: pip install 'edgefl-fleet[alerts]'")
    (service,) = load_services([service_url(receiver)])
    message = make_message("lab", [GONE])
    service.send(message, 10.0)
    assert receiver.bodies[0] | {"attachments": 0} == {
        "version": "1.0", "title": "[lab] ALERT device-gone pi-1", "message": "gone for 5 min", "attachments": 0,
        "type": "warning",
    }  # fmt: skip
    receiver.answers = [404, 503, 302]
    with pytest.raises(AlertRejectedError, match=r"json:// of alerts.notify 1 answered 404"):
        service.send(message, 10.0)
    with pytest.raises(NetworkError, match="answered 503") as later:
        service.send(message, 10.0)
    assert not isinstance(later.value, AlertRejectedError)
    with pytest.raises(AlertRejectedError, match="answered 302"):
        service.send(message, 10.0)
    assert len(receiver.requests) == 4, "a message goes where the address says, not where a redirect says"
    (away,) = load_services(["json://127.0.0.1:9/very-secret"])
    with pytest.raises(NetworkError, match="cannot be reached"):
        away.send(message, 10.0)
    assert "Starting new HTTP" not in debug_log.getvalue()
    assert "secret" not in debug_log.getvalue()


def test_a_message_too_long_for_its_service_arrives_in_parts(receiver: Receiver) -> None:
    pytest.importorskip("apprise", reason="apprise is not installed: pip install 'edgefl-fleet[alerts]'")
    from apprise.plugins.mattermost import NotifyMattermost  # noqa: PLC0415 an extra

    (service,) = load_services([receiver.url.replace("http://", "mmost://")])
    alerts = [replace(GONE, subject=f"pi-{number}", message="hot " * 50_000) for number in range(MAX_LINES)]
    message = make_message("lab", alerts)
    limit = NotifyMattermost.body_maxlen
    assert limit < len(message.body) < MAX_LINES * (MAX_MESSAGE_CHARS + 40)
    service.send(message, 10.0)
    parts = [body["text"] for body in receiver.bodies]
    assert max(map(len, parts)) <= limit
    assert " ".join(" ".join(parts).split()).endswith(" ".join(message.body.split()))


def test_a_service_that_does_not_answer_is_left_after_its_time(receiver: Receiver) -> None:
    pytest.importorskip("apprise", reason="apprise is not installed: pip install 'edgefl-fleet[alerts]'")
    receiver.hold.clear()
    (service,) = load_services([f"{service_url(receiver)}?rto=30"])
    began_s = time.monotonic()
    with pytest.raises(NetworkError, match="cannot be reached"):
        service.send(make_message("lab", [GONE]), 0.5)
    assert time.monotonic() - began_s < 10, "the receiver holds it for twenty"


def test_a_real_coordinator_notifies_a_service_and_a_webhook(receiver: Receiver, tmp_path: Path) -> None:
    pytest.importorskip("apprise", reason="apprise is not installed: pip install 'edgefl-fleet[alerts]'")
    with Receiver() as people:
        receivers = f'webhook = "{receiver.url}"\nnotify = ["{service_url(people)}"]\n'
        with run_that_fails(tmp_path, f"{receivers}check_s = 0.05\ngroup_s = 0.2\n"):
            people.wait(lambda: people.requests)
            receiver.wait(lambda: receiver.told() == [("run-failed", "bad", "started")])
    assert titles(people) == ["[lab] ALERT run-failed bad"]


def test_mail_arrives_at_a_mail_server(receive_mail: Callable[[], tuple[int, list[EmailMessage]]]) -> None:
    port, mails = receive_mail()
    address = f"mailto://127.0.0.1:{port}?to=ada@example.org&from=edgefl@example.org&mode=insecure&format=html"
    (service,) = load_services([address])
    sender = QueuedSender[Message](service.label, service.send)
    sender.start()
    sender.send(make_message("lab", [GONE, replace(FULL, message="<b>9</b> MB & less")]))
    sender.stop()
    (mail,) = mails
    assert mail["Subject"] == "[lab] 2 alerts, 2 not over"
    assert mail["To"] == "ada@example.org"
    plain, html = (str(mail.get_body((kind,)).get_content()) for kind in ("plain", "html"))  # type: ignore[union-attr]
    assert "ALERT device-gone pi-1: gone for 5 min" in plain
    assert "&lt;b&gt;9&lt;/b&gt;" in html, "what a board says is text"


@pytest.fixture
def receive_mail() -> Iterator[Callable[[], tuple[int, list[EmailMessage]]]]:
    """Starts a mail server; gives its port and the mails that it gets."""
    for name in ("apprise", "aiosmtpd"):
        pytest.importorskip(name, reason=f"{name} is not installed: pip install 'edgefl-fleet[alerts,dev]'")
    from email import message_from_bytes, policy  # noqa: PLC0415 likewise

    from aiosmtpd.controller import Controller  # noqa: PLC0415 an extra

    mails: list[EmailMessage] = []

    class Handler:
        async def handle_DATA(self, _server: object, _session: object, envelope: Any) -> str:  # noqa: N802 its name
            mails.append(message_from_bytes(envelope.content, policy=policy.default))  # type: ignore[arg-type]
            return "250 OK"

    port = find_free_port()
    controller = Controller(Handler(), hostname="127.0.0.1", port=port)
    controller.start()
    yield lambda: (port, mails)
    controller.stop()
