from __future__ import annotations

import hashlib
import hmac
import logging
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
from webhook_receiver import Receiver

from edgefl.coordinator.monitoring.alert_senders import (
    FLUSH_TIMEOUT_S,
    MAX_QUEUED,
    AlertRejectedError,
    QueuedSender,
    WebhookConfig,
    send_alert,
)
from edgefl.core.errors import NetworkError
from edgefl.simulation.local_fleet import find_free_port


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as running:
        yield running


def message(number: int) -> dict[str, object]:
    return {"alert": "test", "subject": str(number), "state": "started"}


@pytest.fixture
def sender(receiver: Receiver) -> Iterator[QueuedSender]:
    made = QueuedSender("hook", partial(send_alert, WebhookConfig(url=receiver.url)), initial_backoff_s=0.02)
    made.start()
    yield made
    made.stop()


def test_a_body_is_signed_with_the_secret_and_only_then(receiver: Receiver) -> None:
    send_alert(WebhookConfig(url=receiver.url, secret="key"), {"text": "grüße"})
    send_alert(WebhookConfig(url=receiver.url), {"text": "x"})
    (signed, body), (plain, _) = receiver.requests
    assert signed["X-Edgefl-Signature"] == "sha256=" + hmac.new(b"key", body, hashlib.sha256).hexdigest()
    assert (signed["Content-Type"], "grüße" in body.decode()) == ("application/json", True)
    assert "X-Edgefl-Signature" not in plain


def test_what_fails_is_tried_again_in_order_until_it_arrives(receiver: Receiver, sender: QueuedSender) -> None:
    receiver.answers = [503, 429, 500, 200, 200]
    sender.send(message(1))
    sender.send(message(2))
    receiver.wait(lambda: sender.num_queued == 0)
    assert [body["subject"] for body in receiver.bodies] == ["1", "1", "1", "1", "2"]


def test_a_receiver_that_comes_up_later_gets_what_waited() -> None:
    port = find_free_port()
    sender = QueuedSender(
        "hook", partial(send_alert, WebhookConfig(url=f"http://127.0.0.1:{port}/")), initial_backoff_s=0.02
    )
    sender.start()
    sender.send(message(1))
    with socket.create_server(("127.0.0.1", port)) as server:
        server.settimeout(10)
        connection, _ = server.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    sender.stop()
    assert sender.num_queued == 0


@pytest.mark.parametrize("status", [400, 404, 302])
def test_an_answer_that_will_not_change_is_not_asked_for_again(
    receiver: Receiver, sender: QueuedSender, status: int
) -> None:
    receiver.answers = [status]
    sender.send(message(1))
    sender.send(message(2))
    receiver.wait(lambda: sender.num_queued == 0)
    assert [body["subject"] for body in receiver.bodies] == ["1", "2"]


def test_the_kinds_of_failure_are_told_apart(receiver: Receiver) -> None:
    receiver.answers = [404, 503]
    with pytest.raises(AlertRejectedError, match="answered 404"):
        send_alert(WebhookConfig(url=receiver.url), {})
    with pytest.raises(NetworkError, match="answered 503") as later:
        send_alert(WebhookConfig(url=receiver.url), {})
    assert not isinstance(later.value, AlertRejectedError)
    with pytest.raises(NetworkError, match="cannot be reached"):
        send_alert(WebhookConfig(url="http://127.0.0.1:9/secret"), {})


def test_nobody_waits_for_a_receiver_that_does_not_answer(receiver: Receiver) -> None:
    receiver.hold.clear()
    sender = QueuedSender("hook", partial(send_alert, WebhookConfig(url=receiver.url)))
    sender.start()
    began_s = time.monotonic()
    for number in range(MAX_QUEUED + 5):
        sender.send(message(number))
    assert time.monotonic() - began_s < 10, "the receiver holds the first one for twenty"
    assert sender.num_queued == MAX_QUEUED
    receiver.hold.set()
    sender.stop()
    assert time.monotonic() - began_s < FLUSH_TIMEOUT_S + 15


def test_what_waits_at_the_end_is_tried_once_more(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    receiver.answers = [503]
    sender = QueuedSender("hook", partial(send_alert, WebhookConfig(url=receiver.url)), initial_backoff_s=60)
    sender.start()
    sender.send(message(1))
    receiver.wait(lambda: "an alert is tried again" in caplog.text)
    sender.stop()
    assert (len(receiver.requests), sender.num_queued) == (2, 0)
    assert "alerts to hook" not in {thread.name for thread in threading.enumerate()}


def test_what_no_time_is_left_for_at_the_end_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgefl.coordinator.monitoring.alert_senders.FLUSH_TIMEOUT_S", -1.0)
    is_asked, may_end = threading.Event(), threading.Event()

    def deliver(_message: object, _timeout_s: float) -> None:
        is_asked.set()
        may_end.wait(20)

    sender = QueuedSender("hook", deliver)
    sender.start()
    for number in range(3):
        sender.send(message(number))
    assert is_asked.wait(20)
    sender.request_stop()
    may_end.set()
    sender.stop()
    assert sender.num_queued == 2
    assert "2 alerts never reached hook" in caplog.text


def test_a_receiver_that_is_away_fills_no_log_and_its_return_is_told(
    receiver: Receiver, sender: QueuedSender, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    receiver.answers = [503, 404, 503, 503]
    for number in range(3):
        sender.send(message(number))
    receiver.wait(lambda: sender.num_queued == 0)
    receiver.answers = [404]
    sender.send(message(3))
    receiver.wait(lambda: sender.num_queued == 0)
    sender.send(message(4))
    receiver.wait(lambda: sender.num_queued == 0)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING", "INFO"]


def test_the_url_and_the_secret_are_never_logged(
    receiver: Receiver, sender: QueuedSender, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    receiver.answers = [503, 404]
    sender.send(message(1))
    receiver.wait(lambda: sender.num_queued == 0)
    assert "answered 503" in caplog.text
    assert "very-secret" not in caplog.text
    assert "very-secret" not in repr(WebhookConfig(url=receiver.url, secret="very-secret"))
