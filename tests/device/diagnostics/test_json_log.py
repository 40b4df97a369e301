"""The device's own log: what is in it, what never is, and how it is read."""

import json
import logging

import pytest

from edgefl.core.errors import UsageError
from edgefl.device.diagnostics import json_log
from edgefl.device.diagnostics.json_log import FILE_NAME, JsonLogHandler, Redactor, read_page, remove_secrets

LOG = logging.getLogger("tests.logbook")


@pytest.fixture
def at():
    return [None]


@pytest.fixture
def book(tmp_path, at):
    made = JsonLogHandler(tmp_path / "logs", get_current_work=lambda: at[0], clock=lambda: 1000.5)
    LOG.addHandler(made)
    LOG.setLevel(logging.DEBUG)
    yield made
    LOG.removeHandler(made)
    made.close()


def test_a_line_says_when_what_and_which_assignment_it_is_about_and_damaged_ones_are_left_out(
    book, at, tmp_path, monkeypatch
):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    LOG.info("hello %s", "there")
    at[0] = "run-1", "run-1/a"
    LOG.info("%d", "no number")
    try:
        int("no such thing")
    except ValueError:
        LOG.exception("it failed")
    with (tmp_path / "logs" / FILE_NAME).open("a") as file:
        file.write('{"n": 2, "mess')
    first, last = read_page(tmp_path / "logs", {})["lines"]
    assert first == {"n": 1, "at": 1000.5, "level": "INFO", "logger": "tests.logbook", "message": "hello there"}
    assert (last["run"], last["assignment"]) == ("run-1", "run-1/a")
    assert last["message"].startswith("it failed\nTraceback")
    assert "ValueError: invalid literal" in last["message"]


def test_a_full_card_is_one_warning_and_no_traceback_per_line(book, tmp_path, full_card, caplog, capsys):
    LOG.propagate = False
    try:
        with full_card():
            for number in range(3):
                LOG.info("line %d, which finds no room", number)
    finally:
        LOG.propagate = True
    assert [record.getMessage() for record in caplog.records] == [
        "the log of this device cannot be written: File too large"
    ]
    assert "Traceback" not in capsys.readouterr().err


def test_what_gives_a_right_is_crossed_out_before_it_is_written(book, tmp_path):
    for text in (
        "joined with efl1.SECRET_of-a-token now",
        "Authorization: Bearer SECRET",
        "-----BEGIN EC PRIVATE KEY-----\nSECRET\n-----END EC PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nSECRET",
        '{"secret": "SECRET"}',
        "secret=SECRET",
    ):
        LOG.info("%s", text)
        assert "SECRET" not in remove_secrets(text)
    written = (tmp_path / "logs" / FILE_NAME).read_text()
    assert "SECRET" not in written
    assert written.count("[crossed out]") == 6


def test_a_page_has_what_is_asked_for_and_nothing_else(book, at, tmp_path):
    for number in range(6):
        at[0] = (f"run-{number % 2}", "a")
        LOG.info("%d", number)
    folder = tmp_path / "logs"
    assert [line["message"] for line in read_page(folder, {"run": "run-1"})["lines"]] == ["1", "3", "5"]
    assert [line["message"] for line in read_page(folder, {"after": 4})["lines"]] == ["4", "5"]
    assert read_page(folder, {"since": 2000})["lines"] == []
    with pytest.raises(UsageError, match="after must be a number, got 'x'"):
        read_page(folder, {"after": "x"})


def test_all_pages_together_are_the_log_and_each_fits_into_a_message(book, tmp_path):
    for number in range(100):
        LOG.info("%d %s", number, "ä" * 1000)
    found, after = [], 0
    while True:
        part = read_page(tmp_path / "logs", {"after": after})
        assert len(json.dumps(part).encode()) < 64 * 1024
        found += part["lines"]
        after = found[-1]["n"]
        if not part["has_more"]:
            break
    assert [int(line["message"].split()[0]) for line in found] == list(range(100))


def test_the_log_is_bounded_and_its_numbers_go_on_after_a_restart(book, tmp_path, monkeypatch):
    folder = tmp_path / "logs"
    for _ in range(700):
        LOG.info("%s", "x" * 3900)
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert size <= (1 + json_log.MAX_OLD_FILES) * json_log.MAX_FILE_BYTES
    last = max(line["n"] for line in json_log.read_lines(folder))
    assert last == 700
    again = JsonLogHandler(folder)
    LOG.removeHandler(book)
    LOG.addHandler(again)
    LOG.info("after")
    LOG.removeHandler(again)
    again.close()
    assert [line["message"] for line in read_page(folder, {"after": last})["lines"]] == ["after"]


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
