"""Sources that are asked: a real HTTP server of this machine, and files."""

import contextlib
import math
import socket
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from edgefl.core.errors import ConfigError
from edgefl.device.collect.collector import make_source
from edgefl.device.collect.polled_source import PolledSource
from edgefl.device.collect.settings import FilesSection, HttpSection, SourceSettings


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.headers.append(self.headers["Authorization"])
        status, content = self.server.answers[self.path]
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/power")
        parts = content if isinstance(content, list) else [content]
        self.send_header("Content-Length", str(sum(map(len, parts))))
        self.end_headers()
        for part in content if isinstance(content, list) else [content]:
            self.wfile.write(part)
            time.sleep(0.1 if isinstance(content, list) else 0.0)

    def log_message(self, *_):
        pass


@contextmanager
def _server(**answers):
    with HTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.answers, server.headers = {f"/{path}": answer for path, answer in answers.items()}, []
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def _make(kind, section, counts=None, texts=()):
    return make_source(
        SourceSettings(name="meter", kind=kind, section=section), texts, Counter() if counts is None else counts
    )


def _poll(source):
    source.poll()
    return [dict(one.values) for one in source.read()]


def test_values_of_a_json_answer_or_a_plain_one_are_read_and_the_rest_is_counted():
    counts = Counter()
    with _server(power=(200, b'{"meters": [{"w": 5.5}], "door": "open", "bad": "x"}'), plain=(200, b"21.5\n")) as (
        _,
        url,
    ):
        columns = {"watt": "#/meters/0/w", "door": "#/door", "bad": "#/bad", "gone": "#/gone"}
        source = _make("http", HttpSection(url=f"{url}/power", columns=columns), counts, ("door",))
        assert source.columns == ("watt", "door", "bad", "gone")
        assert _poll(source) == [{"watt": 5.5, "door": "open"}]
        assert counts == {"meter.refused": 1, "meter.missing": 2}
        plain = _make("http", HttpSection(url=f"{url}/plain", columns={"room": "#"}))
        assert _poll(plain) == [{"room": 21.5}]


def test_a_login_is_sent_and_not_shown_nor_passed_on_by_a_redirection(tmp_path, caplog):
    login = tmp_path / "login"
    counts = Counter()
    with _server(power=(200, b"1"), other=(302, b"")) as (server, url):
        for text in ("me\nsecret\n", "t0k3n\n"):
            login.write_text(text)
            section = HttpSection(url=f"{url}/power", columns={"watt": "#"}, login_file=str(login))
            assert _poll(_make("http", section)) == [{"watt": 1.0}]
        assert server.headers == ["Basic bWU6c2VjcmV0", "Bearer t0k3n"]
        section = HttpSection(url=f"{url}/other", columns={"watt": "#"}, login_file=str(login))
        assert _poll(_make("http", section, counts)) == []
        assert len(server.headers) == 3
    assert counts == {"meter.errors": 1}
    assert "HTTP status 302" in caplog.text
    assert "t0k3n" not in caplog.text


def test_an_answer_that_is_too_long_too_slow_or_none_is_an_error_and_the_next_question_counts(caplog):
    counts = Counter()
    answers = {"long": (200, b"1" * 100), "slow": (200, [b"1"] * 20), "broken": (500, b""), "good": (200, b"3")}
    with _server(**answers) as (_, url):
        for path in ("long", "slow", "broken"):
            section = HttpSection(url=f"{url}/{path}", columns={"watt": "#"}, timeout_s=0.5, max_answer_bytes=64)
            started_s = time.monotonic()
            assert _poll(_make("http", section, counts)) == []
            assert time.monotonic() - started_s < 1.9
        assert counts == {"meter.errors": 3}
        source = _make("http", HttpSection(url=f"{url}/good", columns={"watt": "#"}, poll_s=0.1))
        source.start()
        end_s, found = time.monotonic() + 10, []
        while len(found) < 3 and time.monotonic() < end_s:
            found += [one.values["watt"] for one in source.read()]
            time.sleep(0.02)
        source.close()
        assert found[:3] == [3.0] * 3
        assert not source._thread.is_alive()
    assert _poll(_make("http", HttpSection(url=url, columns={"watt": "#"}), counts)) == []
    assert counts == {"meter.errors": 4}
    assert "longer than 64 bytes" in caplog.text


def test_files_of_the_kernel_hold_a_value_each_and_one_that_is_away_stops_no_other(tmp_path, caplog):
    (tmp_path / "temp").write_bytes(b"21437\n")
    (tmp_path / "long").write_bytes(b"1" + b" " * 63 + b"9")
    counts = Counter()
    columns = {"temp": str(tmp_path / "temp"), "long": str(tmp_path / "long"), "away": str(tmp_path / "away")}
    source = _make("files", FilesSection(columns=columns), counts)
    assert _poll(source) == [{"temp": 21437.0}]
    assert counts == {"meter.refused": 1, "meter.missing": 2}
    assert "no value of long, away" in caplog.text
    (tmp_path / "temp").unlink()
    assert _poll(source) == []
    assert counts == {"meter.refused": 2, "meter.missing": 2, "meter.errors": 1}
    assert "No such file" in caplog.text


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n\r\n2", "it is no HTTP, or cut"),
        (b"HTTP/1.0 200 OK\r\n\r\n12", "it is no HTTP, or cut"),
        (b"nonsense\r\n", "it is no HTTP, or cut"),
        (None, "it takes more than 0.5 s"),
    ],
)
def test_half_an_answer_is_none_and_a_server_that_drips_headers_is_cut_off(answer, text, caplog):
    def serve():
        peer, _ = listener.accept()
        with peer, contextlib.suppress(OSError):
            peer.recv(1000)
            if answer is not None:
                peer.sendall(answer)
            else:
                peer.sendall(b"HTTP/1.0 200 OK\r\n")
                for _ in range(100):
                    peer.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                    time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        url, started_s = f"http://127.0.0.1:{listener.getsockname()[1]}/", time.monotonic()
        assert _poll(_make("http", HttpSection(url=url, columns={"a": "#"}, timeout_s=0.5))) == []
        assert time.monotonic() - started_s < 3
    assert text in caplog.text


def test_an_answer_without_a_length_is_whole_where_json_shows_its_end():
    def serve():
        peer, _ = listener.accept()
        with peer:
            peer.recv(1000)
            peer.sendall(b'HTTP/1.0 200 OK\r\n\r\n{"a": 12}\n')

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        assert _poll(_make("http", HttpSection(url=url, columns={"a": "#/a"}))) == [{"a": 12.0}]


def test_questions_count_as_received_from_the_first_whole_answer_to_the_last_one():
    answers, now = [{"a": 1.0}, OSError("away"), {"b": 1.0}, {"a": 1.0}, {"a": None}], [100.0]

    def fetch():
        now[0] += 10.0
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    def make(columns):
        clock = lambda: now[0]  # noqa: E731
        return PolledSource("m", columns, fetch, poll_s=1.0, counts=Counter(), clock=clock, monotonic=clock)

    source, seen = make(("a",)), []
    for _ in range(5):
        source.poll()
        seen.append((source.received_since_s, source.received_until_s))
    away = (math.inf, -math.inf)
    assert seen == [(100.0, 100.0), away, away, (130.0, 130.0), (130.0, 140.0)]


@pytest.mark.parametrize(
    ("kind", "section", "text"),
    [
        ("http", HttpSection(url="file:///etc/passwd", columns={"a": "#"}), "must begin with http:// or https://"),
        ("http", HttpSection(url="http://x", columns={"a": "b"}), "a JSON pointer begins with a slash"),
        ("http", HttpSection(url="https://x", columns={"a": "#"}, ca_file="/none"), "ca_file /none cannot be used"),
        ("http", HttpSection(url="http://x", columns={"a": "#"}, login_file="/none"), "login file /none"),
        ("http", HttpSection(url="http://[x", columns={"a": "#"}), "sources.meter.url"),
        ("http", HttpSection(url="http://h:abc/", columns={"a": "#"}), "sources.meter.url"),
        ("http", HttpSection(url="http://", columns={"a": "#"}), "and a host, got"),
        ("http", HttpSection(url="http://h/a b", columns={"a": "#"}), "must be ASCII without blanks"),
        ("http", HttpSection(url="http://me:pw@h/", columns={"a": "#"}), "must hold no login"),
        ("files", FilesSection(columns={"a": "temp"}), "must be an absolute path, got 'temp'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(kind, section, text):
    with pytest.raises(ConfigError, match=text.replace("/", r"\/").replace("[", r"\[")):
        _make(kind, section)
