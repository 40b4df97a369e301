"""Nothing secret and no address leaves a board in a report."""

import pytest

from edgefl.device.diagnostics.redaction import Redactor


@pytest.fixture
def redactor():
    return Redactor(
        secrets=["MIGHAgEAMBMGByqGSM49", "short"], hosts=["coordinator.lan", "10.0.0.7", "pi"],
        folders={"/home/alice": "~"}, salt=b"salt",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("dial tcp 192.168.178.21:8000 refused", "192.168.178.21"),
        ("[fe80::1ff:fe23:4567:890a%eth0]:8000", "4567"),
        ("at 2001:db8::8a2e:370:7334, port 8883", "2001:db8"),
        ("no coordinator at coordinator.lan:8000", "coordinator.lan"),
        ("COORDINATOR.LAN", "COORDINATOR"),
        ("link/ether dc:a6:32:01:02:03 brd", "dc:a6:32"),
        ("token efl1.eyJhIjoxfQ_x-y", "eyJhIjoxfQ"),
        ("Authorization: Bearer abcdefgh", "abcdefgh"),
        ("key MIGHAgEAMBMGByqGSM49 end", "MIGHAgEAMBMG"),
        ("-----BEGIN CERTIFICATE-----\nMIIBxTCCAWugAwIBAgI\n-----END CERTIFICATE-----", "MIIBxTCC"),
        ("-----BEGIN EC PRIVATE KEY-----\nMHcCAQEEIO torn off", "MHcCAQ"),
        ("mail to alice@example.org", "alice"),
        ("/home/alice/.local/share", "alice"),
        ("CA " + "ab12" * 16, "ab12ab12"),
    ],
)
def test_what_a_stranger_must_not_read_is_gone(redactor, text, hidden):
    assert hidden not in redactor.redact_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "edgefl 0.1.0 on 3.11.7, numpy 2.4.6, kernel 6.12.47+rpt-rpi-2712", "driver 570.86.15", "at 10:00:00 it was",
        "connected to 127.0.0.1:8000 and ::1", "round 7: loss 0.25", "pip is no pi-7", "2026-11-22T10:00:00.123",
        "class::method", "version 36.4.3.1.9",
    ],
)  # fmt: skip
def test_what_only_looks_like_an_address_stays(redactor, text):
    assert redactor.redact_text(text) == text


def test_the_same_host_has_the_same_mark_within_a_report_and_another_in_the_next(redactor):
    first, second = redactor.redact_text("10.0.0.7 asks 10.0.0.8").split(" asks ")
    assert first == redactor.redact_text("10.0.0.7") != second
    assert Redactor().redact_text("10.0.0.7") != Redactor().redact_text("10.0.0.7")


def test_keys_and_depths_of_json_are_looked_at_too(redactor):
    told = redactor.redact_json({"10.0.0.7:8000": {"error": ["coordinator.lan is away", 3, None, 0.5]}})
    ((key, value),) = told.items()
    assert "10.0.0.7" not in key
    assert "coordinator.lan" not in value["error"][0]
    assert value["error"][1:] == [3, None, 0.5]
