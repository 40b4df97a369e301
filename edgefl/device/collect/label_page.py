"""Label page: a small web page on the board on which a person labels examples, by tap or key.

It is off unless somebody starts it, asks for a PIN, and answers those who name its own address alone. The PIN opens a
session; wrong ones are counted for all together, and after `MAX_WRONG` of them none counts for a while. Every change
needs the token of the page's own form. The page loads nothing from elsewhere and works without its script, which adds
keys. The standard library is enough: five routes need no web framework. On a board of a fleet it says whether the
board may train, and pauses that.
"""

from __future__ import annotations

import hmac
import html
import logging
import math
import secrets
import shutil
import ssl
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from itertools import groupby
from urllib.parse import parse_qs, quote

from edgefl.core.conditions import Blocker, format_blocker
from edgefl.core.errors import ConfigError, EdgeflError, StoreError
from edgefl.device.collect.label_queue import Example, FileTarget, LabelQueue
from edgefl.device.collect.label_server import (
    MAX_BODY_BYTES,
    BoundedHandler,
    BoundedHttpServer,
    Gate,
    list_own_names,
)
from edgefl.system.processes import on_stop_signal

log = logging.getLogger(__name__)

COOKIE = "edgefl_label"
KEYS = "123456789abcdefghijklmnopqrtvwxyz"
"""Of labels in their order; s skips and u takes the last label back."""
PAUSES: Mapping[str, tuple[str, float | None]] = {
    "2h": ("Pause training 2 h", 7200.0),
    "always": ("Pause it until resumed", None),
}
"""By the value of its button, its text and the seconds of a pause."""
_STYLE = """
*{box-sizing:border-box}body{margin:0 auto;max-width:40rem;padding:.75rem;font:1rem/1.4 system-ui,sans-serif;
color:#16202a;background:#fff}h1{font-size:1rem;margin:0 0 .5rem}
img,svg,audio{display:block;width:100%;margin:.5rem 0}
button:disabled{opacity:.45}img{height:34vh;object-fit:contain;background:#eef1f4;image-rendering:auto}svg{height:4.5rem;background:#eef1f4}
progress{width:100%}.labels{display:grid;grid-template-columns:repeat(auto-fill,minmax(9rem,1fr));gap:.5rem}
button,input{font:inherit;min-height:3rem;padding:.5rem;border:1px solid #55626f;border-radius:.4rem;background:#fff;
color:inherit;width:100%;overflow-wrap:anywhere}button:focus-visible,input:focus-visible{outline:3px solid #0b62c4}
.labels button{background:#0b4f9e;border-color:#0b4f9e;color:#fff}
.labels .guess{outline:3px solid #b35c00;outline-offset:2px}kbd{opacity:.8;margin-right:.5rem}
.row{display:grid;grid-template-columns:1fr 1fr;gap:.5rem;margin:.5rem 0}.error{color:#a00000}
polyline{fill:none;stroke:#0b4f9e;stroke-width:1.5;stroke-linecap:round;vector-effect:non-scaling-stroke}
@media(prefers-color-scheme:dark){body,button,input{background:#12181f;color:#e8edf2}img,svg{background:#1d262f}
polyline{stroke:#7cb8ff}.error{color:#ff9c9c}}
"""
_SCRIPT = """
document.addEventListener('keydown', (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || event.target.matches('input')) return;
  const button = [...document.querySelectorAll('button[data-key]')].find((one) => one.dataset.key === event.key);
  if (button && !button.disabled) { event.preventDefault(); button.click(); }
});
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingControl:
    """Control of the board's training, which has its own room.

    Attributes:
        find_blocker: returns why the board may not train now; None where it may.
        pause: lets it train nothing for so many seconds; None is until `resume`.
        resume: ends a pause.
    """

    find_blocker: Callable[[], Blocker | None]
    pause: Callable[[float | None], None]
    resume: Callable[[], None]


class LabelServer:
    """Server of the page, active from `start` to `stop`.

    Args:
        queue: of what is labelled.
        target: of a shard of files, whose content is shown; None of rows.
        gate: PIN and sessions.
        address: to listen on; port 0 takes a free one.
        tls: of the server; None on loopback.
        training: of the board, which the page pauses; None where there is no fleet.
    """

    def __init__(
        self,
        queue: LabelQueue,
        target: FileTarget | None,
        gate: Gate,
        address: tuple[str, int],
        tls: ssl.SSLContext | None,
        training: TrainingControl | None = None,
    ) -> None:
        self._server = _HttpServer(address, _Handler, tls)
        self._server.training = training
        self._server.queue, self._server.target, self._server.gate = queue, target, gate

    @property
    def url(self) -> str:
        return self._server.url

    def run(self) -> None:
        """Serves until a stop signal."""
        with on_stop_signal(self._server.shutdown):
            self._server.serve_forever(0.2)
        self._server.server_close()

    def start(self) -> None:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="label-page", daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _HttpServer(BoundedHttpServer):
    queue: LabelQueue
    target: FileTarget | None
    gate: Gate
    training: TrainingControl | None

    def __init__(self, address: tuple[str, int], handler: type[BoundedHandler], tls: ssl.SSLContext | None) -> None:
        self.turn = threading.Lock()
        super().__init__(address, handler, tls)


class _Handler(BoundedHandler):
    server: _HttpServer
    is_answered = False

    def do_GET(self) -> None:  # noqa: N802 the library's name
        self._answer(self._show)

    def do_POST(self) -> None:  # noqa: N802 likewise
        self._answer(self._take_form)

    def _answer(self, act: Callable[[], None]) -> None:
        """Answers a request, in words where it fails."""
        try:
            act()
        except (ConnectionError, TimeoutError, ssl.SSLError):
            raise  # the browser has gone
        except Exception as error:  # a bug keeps its traceback in the log, and the page goes on
            if self.is_answered:
                raise
            status, text = HTTPStatus.INTERNAL_SERVER_ERROR, "This failed; the log says more."
            if isinstance(error, StoreError | OSError):
                status, text = HTTPStatus.SERVICE_UNAVAILABLE, str(error)
            elif isinstance(error, EdgeflError):
                status, text = HTTPStatus.BAD_REQUEST, str(error)
            is_bug = status is HTTPStatus.INTERNAL_SERVER_ERROR
            log.warning("%s %s failed: %s", self.command, self.path.partition("?")[0], error, exc_info=is_bug)
            self._send_page(status, f'<p class="error">{html.escape(text)}</p><p><a href="/">Go on</a></p>')

    def _show(self) -> None:
        self.server.end_deadline(self.connection)
        token, path = self._find_token(), self.path.partition("?")[0]
        if not self._is_own_host():
            self._send_page(HTTPStatus.MISDIRECTED_REQUEST, "<p>This is not the address of this page.</p>")
        elif path == "/" and token is None:
            self._send_login(HTTPStatus.OK)
        elif path == "/" and token is not None:
            with self.server.turn:
                page = _format_example(self.server.queue, token)
                self._send_page(HTTPStatus.OK, page + _format_training(self.server.training, token))
        elif path.startswith("/media/") and token is not None:
            self._send_media(path.removeprefix("/media/"))
        else:
            self._send_page(HTTPStatus.NOT_FOUND, "<p>There is no such page.</p>")

    def _take_form(self) -> None:
        form = self._read_form()
        self.server.end_deadline(self.connection)
        if form is None or not self._is_own_host() or not self._is_own_origin():
            self._send_page(HTTPStatus.FORBIDDEN, "<p>This came from another page.</p>")
        elif self.path == "/login":
            self._log_in(form.get("pin", ""))
        elif (token := self._find_token()) is None or not hmac.compare_digest(
            form.get("token", "").encode(), token.encode()
        ):
            self._send_page(HTTPStatus.FORBIDDEN, '<p>Your session has ended.</p><p><a href="/">Sign in</a></p>')
        else:
            self._change(form)

    def _change(self, form: Mapping[str, str]) -> None:
        queue = self.server.queue
        with self.server.turn:
            if "pause" in form or "resume" in form:
                self._pause_training(form.get("pause"))
            elif "undo" in form:
                queue.undo()
            elif "skip" in form:
                queue.skip(form.get("key", ""))
            else:
                queue.label(form.get("key", ""), form.get("new", "").strip() or form.get("label", ""))
        self._redirect()

    def _pause_training(self, pause: str | None) -> None:
        """Pauses the board's training, or ends a pause for None."""
        training = self.server.training
        if training is None or pause not in {None, *PAUSES}:
            raise ConfigError("there is no such pause here")
        if pause is None:
            training.resume()
        else:
            training.pause(PAUSES[pause][1])

    def _log_in(self, pin: str) -> None:
        session = self.server.gate.open(pin)
        if session is None:
            is_locked = self.server.gate.is_locked
            self._send_login(HTTPStatus.TOO_MANY_REQUESTS if is_locked else HTTPStatus.FORBIDDEN, is_wrong=True)
            return
        secure = "; Secure" if self.server.scheme == "https" else ""
        self._redirect({"Set-Cookie": f"{COOKIE}={session}; HttpOnly; SameSite=Strict; Path=/{secure}"})

    def _find_token(self) -> str | None:
        # The library's parser gives up at the first cookie of another program that it does not like.
        for cookie in self.headers.get("Cookie", "").split(";"):
            name, _, session = cookie.strip().partition("=")
            if name == COOKIE:
                return self.server.gate.find_token(session)
        return None

    def _is_own_host(self) -> bool:
        local, port = self.connection.getsockname()[:2]
        return self.headers.get("Host", "").lower() in list_own_names(local, port, self.server.scheme)

    def _is_own_origin(self) -> bool:
        origin = self.headers.get("Origin")
        return origin in {None, f"{self.server.scheme}://{self.headers.get('Host', '')}"}

    def _read_form(self) -> dict[str, str] | None:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or len(length) > 6 or int(length) > MAX_BODY_BYTES:
            return None
        content = self.rfile.read(int(length))
        if len(content) < int(length):
            return None
        try:
            fields = parse_qs(content.decode(), keep_blank_values=True, max_num_fields=8)
        except ValueError:
            return None
        return {name: values[0] for name, values in fields.items()}

    def _send_login(self, status: HTTPStatus, *, is_wrong: bool = False) -> None:
        text = "Too many wrong PINs: wait a minute." if self.server.gate.is_locked else "That was not the PIN."
        error = f'<p class="error" role="alert">{text}</p>' if is_wrong else ""
        self._send_page(
            status,
            f'{error}<form method="post" action="/login"><p><label for="pin">PIN, as the terminal says</label></p>'
            '<p><input id="pin" name="pin" inputmode="numeric" autocomplete="off" required autofocus></p>'
            "<p><button>Sign in</button></p></form>",
        )

    def _send_page(self, status: HTTPStatus, body: str) -> None:
        nonce = secrets.token_urlsafe(16)
        page = (
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Label</title>'
            '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
            f'<style nonce="{nonce}">{_STYLE}</style></head><body><main><h1>Label</h1>{body}</main>'
            f'<script nonce="{nonce}">{_SCRIPT}</script></body></html>'
        )
        policy = (
            f"default-src 'none'; img-src 'self' data:; media-src 'self'; style-src 'nonce-{nonce}'; "
            f"script-src 'nonce-{nonce}'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
        )
        headers = {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": policy}
        self._send(status, headers, page.encode())

    def _send_media(self, key: str) -> None:
        with self.server.turn:
            example = self.server.queue.current
        if example is None or self.server.target is None or example.key != key:
            self._send_page(HTTPStatus.NOT_FOUND, "<p>There is no such example.</p>")
            return
        file, kind = self.server.target.open(example)
        with file:
            size = file.seek(0, 2)
            file.seek(0)
            self._send(HTTPStatus.OK, {"Content-Type": kind, "Content-Length": str(size)})
            shutil.copyfileobj(file, self.wfile)

    def _redirect(self, headers: Mapping[str, str] | None = None) -> None:
        self._send(HTTPStatus.SEE_OTHER, {"Location": "/", **(headers or {})})

    def _send(self, status: HTTPStatus, headers: Mapping[str, str], content: bytes = b"") -> None:
        self.is_answered = True
        self.send_response(status)
        fixed = {
            "Content-Length": str(len(content)), "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "same-origin", "X-Frame-Options": "DENY",
        }  # fmt: skip
        for name, value in {**fixed, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def _format_example(queue: LabelQueue, token: str) -> str:
    example, undo = queue.current, "" if queue.can_undo else " disabled"
    total = queue.num_done + queue.num_left
    hidden = f'<input type="hidden" name="token" value="{token}">'
    parts = [
        f'<p role="status">{queue.num_done} of {total} labelled</p>',
        f'<progress aria-label="Labelled" max="{max(1, total)}" value="{queue.num_done}"></progress>',
    ]
    if queue.check.num:
        parts.append(f"<p>The model was right on {queue.check.num_right} of {queue.check.num} drawn at random</p>")
    if example is not None:
        hidden += f'<input type="hidden" name="key" value="{example.key}">'
        parts.append(_format_content(example))
        guess = queue.guess
        guessed = "" if guess is None else guess.label
        if guess is not None:
            parts.append(f"<p>The model says {html.escape(guessed)}, {guess.probability:.0%}</p>")
        buttons = (
            f'<button name="label" value="{html.escape(label)}"{" class=guess" if label == guessed else ""} '
            f"{_format_key(place)}</kbd>{html.escape(label)}</button>"
            for place, label in enumerate(queue.labels)
        )
        parts.append(f'<form method="post" action="/">{hidden}<div class="labels">{"".join(buttons)}</div></form>')
        parts.append(
            f'<form method="post" action="/" class="row">{hidden}<input name="new" aria-label="Another label" '
            'placeholder="another label" maxlength="80" autocomplete="off" required><button>Use it</button></form>'
        )
    else:
        parts.append("<p>Every example has a label.</p>")
    skip = "" if example is not None else " disabled"
    parts.append(
        f'<form method="post" action="/" class="row">{hidden}'
        f'<button name="skip" value="1" data-key="s" aria-keyshortcuts="s"{skip}><kbd>s</kbd>Later</button>'
        f'<button name="undo" value="1" data-key="u" aria-keyshortcuts="u"{undo}><kbd>u</kbd>Undo</button></form>'
    )
    return "".join(parts)


def _format_training(training: TrainingControl | None, token: str) -> str:
    """Returns whether the board may train, with what pauses that; nothing without a board of a fleet."""
    if training is None:
        return ""
    blocker = training.find_blocker()
    state = "This board may train" if blocker is None else f"This board does not train: {format_blocker(blocker)}"
    if blocker is not None and blocker.kind == "pause":
        buttons = '<button name="resume" value="1">Resume training</button>'
    else:
        buttons = "".join(f'<button name="pause" value="{key}">{text}</button>' for key, (text, _) in PAUSES.items())
    return (
        f'<p>{html.escape(state)}</p><form method="post" action="/" class="row">'
        f'<input type="hidden" name="token" value="{token}">{buttons}</form>'
    )


def _format_key(place: int) -> str:
    """Returns a button's key, up to the text of its label; none for those beyond the keys that there are."""
    key = KEYS[place] if place < len(KEYS) else ""
    return f'data-key="{key}" aria-keyshortcuts="{key}"><kbd aria-hidden="true">{key}' if key else "><kbd>"


def _format_content(example: Example) -> str:
    when = f"{datetime.fromtimestamp(example.since_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    if example.file is None:
        now = f", now {html.escape(example.label)}" if example.label else ""
        return f"<p>Rows from {when}, {example.until_s - example.since_s:.0f} s{now}</p>" + "".join(
            _format_curve(name, values) for name, values in example.curves
        )
    source = f"/media/{quote(example.key)}"
    if example.file.name.endswith(".wav"):
        return f'<p>{when}</p><audio controls autoplay aria-label="Sound of {when}" src="{source}"></audio>'
    return f'<p>{when}</p><img src="{source}" alt="Picture of {when}">'


def _format_curve(name: str, values: Sequence[float]) -> str:
    known = [value for value in values if not math.isnan(value)]
    low, high = min(known), max(known)
    height, last = (high - low) or 1.0, max(1, len(values) - 1)
    lines = ""
    for is_missing, run in groupby(enumerate(values), key=lambda point: math.isnan(point[1])):
        if not is_missing:
            points = (f"{300 * place / last:.1f},{58 - 56 * (value - low) / height:.1f}" for place, value in run)
            lines += f'<polyline points="{" ".join(points)}"/>'
    title = html.escape(f"{name}: {low:g} to {high:g}")
    return (
        f'<p>{title}</p><svg viewBox="0 0 300 60" preserveAspectRatio="none" role="img" aria-label="{title}">'
        f"{lines}</svg>"
    )


def print_address(server: LabelServer, pin: str, fingerprint: str = "") -> None:
    """Prints where the page is, its PIN and its certificate's fingerprint, on the terminal alone."""
    sys.stdout.write(f"label at {server.url} with the PIN {pin}; Ctrl-C ends it\n")
    if fingerprint:
        sys.stdout.write(f"the browser warns; the SHA-256 of its certificate must be\n{fingerprint}\n")
    sys.stdout.flush()
