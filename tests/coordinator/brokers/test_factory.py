"""A broker that somebody else runs: its address, and that it may be down."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgefl.coordinator.brokers.broker import BrokerTls
from edgefl.coordinator.brokers.factory import parse_external_broker
from edgefl.core.errors import ConfigError


def test_an_external_address_carries_its_own_files():
    address = parse_external_broker("mqtts://mq.example:1234?ca=/a/ca.pem&cert=/a/c.pem&key=/a/k.pem").address
    assert (address.host, address.port) == ("mq.example", 1234)
    assert address.tls == BrokerTls(ca=Path("/a/ca.pem"), cert=Path("/a/c.pem"), key=Path("/a/k.pem"))


def test_an_external_address_has_the_usual_port():
    assert parse_external_broker("mqtts://mq.example").address.port == 8883


@pytest.mark.parametrize(
    "spec",
    [
        "mqtts://",
        "mqtts://host:no",
        "mqtts://host/path",
        "mqtts://me:secret@host",
        "mqtts://host?ca=x",
        "mqtts://h?a=b",
    ],
)
def test_an_external_address_that_makes_no_sense_is_refused(spec):
    with pytest.raises(ConfigError, match="broker address"):
        parse_external_broker(spec)


def test_an_external_broker_that_is_down_does_not_stop_the_start(free_port, caplog):
    broker = parse_external_broker(f"mqtts://127.0.0.1:{free_port}")
    assert broker.start().port == free_port
    assert "cannot be reached" in caplog.text
    assert not broker.is_alive()
