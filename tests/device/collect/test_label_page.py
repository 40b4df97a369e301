"""The label page over real sockets, and by keyboard in a real browser of a phone's width."""

import hashlib
import http.client
import io
import shutil
import ssl
import time
from contextlib import contextmanager
from urllib.parse import urlencode

import numpy as np
import pytest
from requirements import PARTS, needs
from table_parts import read_table

from edgefl.core.errors import ConfigError, DataError
from edgefl.device.collect import label_server
from edgefl.device.collect.alignment import Row
from edgefl.device.collect.file_store import UNLABELLED, open_file_store
from edgefl.device.collect.label_page import LabelServer, TrainingControl
from edgefl.device.collect.label_queue import FileTarget, LabelQueue, RowTarget, open_target
from edgefl.device.collect.label_server import LOCK_S, MAX_WRONG, Gate, make_server_context
from edgefl.device.collect.row_store import StoreLimits, open_row_store
from edgefl.device.conditions.gate import ConditionGate
from edgefl.tasks.configured.table import table

pytestmark = pytest.mark.timeout(90)
LIMITS = StoreLimits(max_bytes=10**8)
PIN = "012345"


def _pictures(folder, count):
    from PIL import Image  # noqa: PLC0415 an extra

    with open_file_store(folder, LIMITS, "oldest") as store:
        for number in range(count):
            pixels = np.full((48, 64, 3), 40 + 8 * number, np.uint8)
            pixels[:, : 32 if number % 2 else 64] //= 2
            content = io.BytesIO()
            Image.fromarray(pixels).save(content, "PNG")
            store.add(content.getvalue(), UNLABELLED, ".png", 1000.0 + number)
        store.commit(store.state, 0.0)
    return folder


def _rows(folder, count=100):
    with open_row_store(folder, ("power", "room"), LIMITS) as store:
        rows = [Row(1000.0 + number, (number % 7 / 2, "hall"), 1 + number // 50) for number in range(count)]
        store.commit(rows, {}, {}, 0.0)
    return folder


class Browser:
    """A visitor with one cookie, who reads tokens off the page."""

    def __init__(self, port, tls=None):
        self.port, self.tls, self.cookie, self.text = port, tls, "", ""

    def ask(self, method, path, fields=None, **headers):
        kind = http.client.HTTPConnection if self.tls is None else http.client.HTTPSConnection
        options = {} if self.tls is None else {"context": self.tls}
        connection = kind("127.0.0.1", self.port, timeout=10, **options)
        sent = {"Cookie": self.cookie} if self.cookie else {}
        if fields is not None:
            sent["Content-Type"] = "application/x-www-form-urlencoded"
        connection.request(method, path, None if fields is None else urlencode(fields), {**sent, **headers})
        answer = connection.getresponse()
        content = answer.read()
        self.headers = answer.headers
        if cookie := answer.headers["Set-Cookie"]:
            self.cookie = cookie.partition(";")[0]
        connection.close()
        if answer.headers["Content-Type"] == "text/html; charset=utf-8":
            self.text = content.decode()
        return answer.status

    def enter(self):
        assert self.ask("POST", "/login", {"pin": PIN}) == 303
        return self.ask("GET", "/")

    def find(self, name):
        return self.text.partition(f'name="{name}" value="')[2].partition('"')[0]

    def press(self, **fields):
        status = self.ask("POST", "/", {"token": self.find("token"), "key": self.find("key"), **fields})
        self.ask("GET", "/") if status == 303 else None
        return status


def _training(state):
    state.mkdir()
    gate = ConditionGate(state, is_agent=False)
    return TrainingControl(find_blocker=gate.find_owner_blocker, pause=gate.pause, resume=gate.resume)


@contextmanager
def _page(folder, *labels, clock=time.monotonic, tls=None, training=None):
    target = open_target(folder, 10.0)
    files = target if isinstance(target, FileTarget) else None
    server = LabelServer(LabelQueue(target, labels), files, Gate(PIN, clock), ("127.0.0.1", 0), tls, training)
    server.start()
    try:
        yield Browser(server._server.server_address[1])
    finally:
        server.stop()


def _classes(folder):
    return {path.name: len(list(path.iterdir())) for path in sorted(folder.iterdir()) if path.is_dir()}


def test_files_move_to_the_class_that_is_chosen_and_back_and_may_wait(tmp_path):
    folder = _pictures(tmp_path, 3)
    first = min(path.name for path in folder.glob(".unlabelled/*"))
    with _page(folder, "left", "whole") as browser:
        assert browser.enter() == 200
        assert "0 of 3 labelled" in browser.text
        key = browser.find("key")
        assert browser.ask("GET", f"/media/{key}") == 200
        assert browser.headers["Content-Type"] == "image/png"
        assert browser.ask("GET", "/media/..%2f..%2f.collect.json") == 404
        assert browser.ask("GET", "/") == 200
        assert browser.press(label="whole") == 303
        assert (folder / "whole" / first).is_file()
        assert browser.ask("POST", "/", {"token": browser.find("token"), "key": key, "label": "left"}) == 303
        assert _classes(folder) == {UNLABELLED: 2, "whole": 1}  # the second tap was for the former picture
        browser.press(undo=1)
        assert (browser.find("key"), _classes(folder)) == (key, {UNLABELLED: 3})
        browser.press(skip=1)
        assert browser.find("key") != key
        for label in ("left", "left"):
            browser.press(label=label)
        assert browser.find("key") == key
        browser.press(new="a <b>")
        assert "Every example has a label" in browser.text
        assert _classes(folder) == {UNLABELLED: 0, "a <b>": 1, "left": 2}
        assert browser.press(label="../x", key=key) == 400


def test_who_stands_beside_the_board_pauses_its_training_and_resumes_it_and_labels_nothing_by_that(tmp_path):
    training, agent = _training(tmp_path / "state"), ConditionGate(tmp_path / "state")
    with _page(_pictures(tmp_path / "shard", 1), "whole", training=training) as browser:
        browser.enter()
        assert "This board may train" in browser.text
        assert browser.press(pause="2h") == 303
        assert "This board does not train: paused on the board, free at " in browser.text
        assert 7100 < agent.check().free_at_s - time.time() <= 7200
        assert browser.press(resume=1) == 303
        assert agent.check() is None
        assert browser.press(pause="always") == 303
        assert "This board does not train: paused on the board<" in browser.text
        assert agent.check().free_at_s is None
        assert browser.press(pause="3 years") == 400
        assert browser.ask("POST", "/", {"resume": 1, "token": "of nobody"}) == 403
        assert agent.check() is not None
    assert _classes(tmp_path / "shard") == {UNLABELLED: 1}


def test_a_board_without_a_fleet_has_no_training_to_pause(tmp_path):
    with _page(_pictures(tmp_path, 1), "whole") as browser:
        browser.enter()
        assert "train" not in browser.text
        assert browser.press(pause="2h") == 400


def test_rows_of_a_time_get_a_label_in_the_file_of_labels_and_lose_it_again(tmp_path):
    folder = _rows(tmp_path)
    with _page(folder, "on", "off") as browser:
        browser.enter()
        assert "0 of 10 labelled" in browser.text
        assert "power: 0 to 3" in browser.text
        assert browser.text.count("<polyline") == 1  # of texts there is no curve
        for label in ("on", "off", "on"):
            browser.press(label=label)
        browser.press(undo=1)
    (part, *_) = read_table(folder, "table", ("power",), ("label",))
    assert part.texts[0] == ("on",) * 10 + ("off",) * 10
    assert len(table(columns=["power"], target="label", labels=["on", "off"]).read(str(folder))) == 20
    with pytest.raises(DataError, match="without a slash"):
        LabelQueue(open_target(folder, 10.0), ()).label("x", "a/b")


def test_a_list_that_takes_longer_than_a_request_may_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(label_server, "REQUEST_S", 0.3)
    listed = FileTarget.list_examples
    with _page(_pictures(tmp_path, 1), "left") as browser:
        browser.enter()
        monkeypatch.setattr(FileTarget, "list_examples", lambda *words: (time.sleep(1.5), listed(*words))[1])
        assert browser.press(label="left") == 303
        assert "Every example has a label" in browser.text


def test_wrong_pins_are_throttled_for_all_and_the_right_one_waits_too(tmp_path):
    now = [0.0]
    with _page(_rows(tmp_path), clock=lambda: now[0]) as browser:
        codes = [browser.ask("POST", "/login", {"pin": f"{number:06d}"}) for number in range(MAX_WRONG)]
        assert codes == [403] * (MAX_WRONG - 1) + [429]
        assert browser.ask("POST", "/login", {"pin": PIN}) == 429
        assert "wait a minute" in browser.text
        now[0] = LOCK_S + 1
        assert browser.enter() == 200
        assert "labelled" in browser.text


def test_nothing_is_shown_or_changed_without_a_session_its_token_and_the_own_address(tmp_path):
    folder = _pictures(tmp_path, 2)
    with _page(folder, "left") as browser:
        assert browser.ask("GET", "/") == 200
        assert "PIN" in browser.text
        assert "labelled" not in browser.text
        browser.enter()
        own, key, token = f"127.0.0.1:{browser.port}", browser.find("key"), browser.find("token")
        fields = {"token": token, "key": key, "label": "left"}
        assert browser.ask("GET", "/", Host=f"evil.example:{browser.port}") == 421
        assert browser.ask("POST", "/", fields, Origin="http://evil.example") == 403
        assert browser.ask("POST", "/", fields, Host="evil.example", Origin="http://evil.example") == 403
        assert browser.ask("POST", "/", {**fields, "token": "x"}) == 403
        assert browser.ask("POST", "/", {"filler": "x" * 5000, **fields}) == 403
        stranger = Browser(browser.port)
        assert stranger.ask("POST", "/", fields) == 403
        assert stranger.ask("GET", f"/media/{key}") == 404
        assert _classes(folder) == {UNLABELLED: 2}
        assert browser.ask("POST", "/", fields, Origin=f"http://{own}") == 303
        assert _classes(folder) == {UNLABELLED: 1, "left": 1}
        assert "default-src 'none'" in stranger.headers["Content-Security-Policy"]


def test_a_cookie_of_another_program_at_the_same_address_does_not_end_the_session(tmp_path):
    with _page(_rows(tmp_path)) as browser:
        browser.enter()
        browser.cookie = f'a={{"x":1}}; {browser.cookie}'
        assert browser.ask("GET", "/") == 200
        assert "labelled" in browser.text


def test_what_fails_is_answered_in_words_and_a_bug_is_logged(tmp_path, monkeypatch, caplog):
    folder = _rows(tmp_path / "rows")
    with _page(folder, "on") as browser:
        browser.enter()
        form = {"token": browser.find("token"), "key": browser.find("key"), "label": "on"}
        shutil.rmtree(folder)
        assert browser.ask("POST", "/", form) == 503
        assert "cannot be" in browser.text
        (folder / "sub").mkdir(parents=True)
        monkeypatch.setattr(RowTarget, "list_labels", lambda self: 1 / 0)
        assert browser.ask("GET", "/") == 500
        assert "the log says more" in browser.text
    assert "ZeroDivisionError" in caplog.text
    folder = _pictures(tmp_path / "pictures", 1)
    with _page(folder, "on") as browser:
        browser.enter()
        shutil.rmtree(folder)
        assert browser.ask("GET", "/") == 503
        assert "No such file" in browser.text


@pytest.mark.extended
@needs("chromium")
def test_twenty_pictures_are_labelled_by_keyboard_on_a_phone_in_half_a_minute_without_a_request_elsewhere(tmp_path):
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 only where there is a browser

    folder, elsewhere = _pictures(tmp_path / "shard", 20), []
    training = _training(tmp_path / "state")
    with _page(folder, "left", "whole", training=training) as visitor, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PARTS["chromium"].path(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 360, "height": 640})
        own, errors = f"http://127.0.0.1:{visitor.port}/", []
        page.on("request", lambda request: elsewhere.append(request.url))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(own)
        page.locator("#pin").press_sequentially(PIN)
        page.keyboard.press("Enter")
        page.wait_for_selector("text=0 of 20 labelled")
        begun_s = time.monotonic()
        for number in range(20):
            page.wait_for_function("document.querySelector('img').naturalWidth > 0")
            page.keyboard.press("1" if number % 2 else "2")
            page.wait_for_selector(f"text={number + 1} of 20 labelled")
        seconds = time.monotonic() - begun_s
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        unnamed = page.evaluate("[...document.querySelectorAll('button,img,audio,progress')].filter("
                                "(e) => !(e.innerText || e.ariaLabel || e.alt)).length")  # fmt: skip
        page.keyboard.press("u")
        page.wait_for_selector("text=19 of 20 labelled")
        page.click("text=Pause training 2 h")
        page.wait_for_selector("text=paused on the board, free at")
        page.click("text=Resume training")
        page.wait_for_selector("text=This board may train")
        browser.close()
    assert [url for url in elsewhere if not url.startswith((own, "data:"))] == []
    assert len(elsewhere) > 40
    assert (errors, unnamed) == ([], 0)
    assert seconds <= 30
    assert _classes(folder) == {UNLABELLED: 1, "left": 9, "whole": 10}


def test_the_page_in_a_lan_is_encrypted_with_a_certificate_whose_fingerprint_is_printed(tmp_path):
    context, fingerprint = make_server_context("127.0.0.1")
    with _page(_rows(tmp_path / "shard"), tls=context) as browser:
        pem = ssl.get_server_certificate(("127.0.0.1", browser.port))
        digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest().upper()
        assert digest == fingerprint.replace(":", "")
        browser.tls = ssl.create_default_context(cadata=pem)
        assert browser.ask("POST", "/login", {"pin": PIN}) == 303
        assert browser.headers["Set-Cookie"].endswith("; Secure")
        assert browser.ask("GET", "/") == 200
        assert "0 of 10 labelled" in browser.text
    with pytest.raises(ConfigError, match="must be an IP address"):
        make_server_context("board.local")
