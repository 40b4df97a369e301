"""Private mosquitto: generated configuration, a child process, a thread that restarts it, and its log.

Mosquitto logs denied messages only at debug level, which has a line for every packet; so it writes into a pipe, and
most lines are discarded. The pipe never blocks mosquitto: lines that do not fit are lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection
from logging.handlers import RotatingFileHandler
from pathlib import Path

from edgefl.coordinator import pki
from edgefl.coordinator.brokers.broker import (
    MAX_MESSAGE_BYTES,
    MAX_QUEUED_BYTES,
    MISSING_CERTIFICATE,
    UNTRUSTED_CERTIFICATE,
    BrokerAddress,
    OnDenied,
    check_port_is_free,
    disconnect_client,
    get_connect_host,
    ignore_denied,
    render_acl_file,
)
from edgefl.core.errors import BrokerError, EdgeflError, StoreError, StoreFullError
from edgefl.system.atomic_files import ChildPath, TlsFiles, make_private_directory, write_atomic

log = logging.getLogger(__name__)

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
RESTART_DELAYS_S = (0.2, 1.0, 2.0, 5.0, 10.0)
HEALTHY_AFTER_S = 30.0
MAX_QUEUED_MESSAGES = 1_000_000
MEMORY_FRACTION = 0.5
"""Limit as a fraction of the machine's memory, 0 to 1: beyond it mosquitto drops messages and disconnects clients, so
that a device that retains too much does not make the kernel kill the coordinator."""

# Run by a Python of its own instead of preexec_fn, which is not safe in a process with threads. The signal comes
# when the *thread* that started the child ends; that is the supervisor, which runs as long as the broker should.
# The parent may have died before prctl: then the signal would never be sent.
_EXIT_WITH_PARENT = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
MAX_LOG_BYTES = 1_000_000
MAX_TAIL_LINES = 20
CLOSE_TIMEOUT_S = 5.0
LOG_TYPES = ("error", "warning", "notice", "debug")
_STAMP = rb"\A(?:\S+: )?"
_DENIED_LINE = re.compile(_STAMP + rb"Denied (\w+) from (\S+) \([^']*'(.*)', ")
_UNTRUSTED_LINE = re.compile(rb"certificate verify failed")
_NO_CERTIFICATE_LINE = re.compile(rb"did not return a certificate")
_TRACE_LINE = re.compile(_STAMP + rb"(?:Received |Sending |Denied |No will message|Will message|\t)")


def find_mosquitto() -> str | None:
    """Returns the mosquitto program, also from the folders of root's PATH."""
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")


class Mosquitto:
    """Runs `program` with a configuration in `directory`; see `edgefl.coordinator.brokers.broker.Broker`."""

    _acl_path = ChildPath("acl")
    _crl_path = ChildPath("crl.pem")
    _config_path = ChildPath("mosquitto.conf")

    def __init__(  # noqa: PLR0913 one keyword per fact
        self,
        program: str,
        *,
        directory: Path,
        fleet: str,
        tls: TlsFiles,
        host: str,
        port: int,
        authority: pki.KeyPair | None = None,
        on_denied: OnDenied = ignore_denied,
    ) -> None:
        self._program = program
        self._authority = authority
        self.root = directory
        self._fleet = fleet
        self._tls = tls
        self._host = host
        self._port = port
        self._revoked_names: frozenset[str] = frozenset()
        self._revoked_serials: frozenset[str] = frozenset()
        self._pending_disconnects: frozenset[str] = frozenset()
        self._log = MosquittoLog(directory / "mosquitto.log", on_denied)
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._has_started = threading.Event()
        self._failure: EdgeflError | None = None
        self._supervisor: threading.Thread | None = None

    def start(self) -> BrokerAddress:
        check_port_is_free(self._host, self._port)
        self._write_files()
        self._stopping.clear()
        self._has_started.clear()
        self._failure = None
        self._supervisor = threading.Thread(target=self._supervise, name="mosquitto-supervisor", daemon=True)
        self._supervisor.start()
        self._has_started.wait()
        if self._failure is not None:
            raise self._failure
        return BrokerAddress(host=get_connect_host(self._host), port=self._port)

    def stop(self) -> None:
        self._stopping.set()
        if self._supervisor is not None:
            self._supervisor.join()
            self._supervisor = None

    def is_alive(self) -> bool:
        process = self._process
        return process is not None and process.poll() is None

    def revoke(self, names: Collection[str], serials: Collection[str] = ()) -> None:
        revoked = frozenset(names)
        # Kept until done: writing the rules may fail on a full disk, and this is called again.
        self._pending_disconnects = (self._pending_disconnects | revoked - self._revoked_names) & revoked
        self._revoked_names, self._revoked_serials = revoked, frozenset(serials)
        if self._supervisor is None:
            return  # `start` writes the rules
        self._write_rules()
        self.reload()
        if self._authority is not None and self.is_alive():
            for name in sorted(self._pending_disconnects):
                if disconnect_client(
                    get_connect_host(self._host), self._port, name, authority=self._authority, ca=self._tls.ca
                ):
                    self._pending_disconnects -= {name}

    def reload(self) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGHUP)  # reloads the rules and the certificates

    @property
    def pid(self) -> int | None:
        """The process id of the running mosquitto, for tests that kill it."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def _write_files(self) -> None:
        try:
            make_private_directory(self.root)
            self._write_rules()
            write_atomic(self._config_path, self._render_config().encode())
        except StoreFullError:
            raise
        except (OSError, StoreError) as error:
            raise BrokerError(f"the broker's files cannot be written to {self.root}: {error}") from None

    def _write_rules(self) -> None:
        write_atomic(self._acl_path, render_acl_file(self._fleet, self._revoked_names).encode())
        if self._authority is not None:
            # mosquitto keeps every list that it ever read; the one of the highest number is used.
            previous_crl = self._crl_path.read_bytes() if self._crl_path.exists() else b""
            number = pki.parse_revocation_number(previous_crl) + 1
            write_atomic(
                self._crl_path, pki.make_revocation_list(self._authority, self._revoked_serials, number=number)
            )

    def _render_config(self) -> str:
        lines = [
            # As root, mosquitto would become the user `mosquitto`, who cannot read the 0700 state directory.
            *(["user root"] if os.geteuid() == 0 else []),
            "per_listener_settings false",
            "allow_anonymous false",
            "persistence false",
            "log_dest stderr",
            *(f"log_type {kind}" for kind in LOG_TYPES),
            "log_timestamp_format %Y-%m-%dT%H:%M:%S",
            f"message_size_limit {MAX_MESSAGE_BYTES}",
            # By default at most a thousand messages are queued for a client, whatever their size, the rest is lost:
            # 500 devices leave more for a restarted coordinator. Counted in bytes it is little. 0, for any number,
            # makes Mosquitto 2.0.11 disconnect a client that writes to a topic it must not.
            f"max_queued_messages {MAX_QUEUED_MESSAGES}",
            f"max_queued_bytes {MAX_QUEUED_BYTES}",
            f"acl_file {self._acl_path.resolve()}",
            # So that retained messages of a revoked device are not delivered; the default is lost when it reloads
            # the rules.
            "check_retain_source true",
            f"memory_limit {int(MEMORY_FRACTION * os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))}",
            "set_tcp_nodelay true",
            f"listener {self._port} {self._host}",
            f"cafile {self._tls.ca.resolve()}",
            f"certfile {self._tls.cert.resolve()}",
            f"keyfile {self._tls.key.resolve()}",
            *([f"crlfile {self._crl_path.resolve()}"] if self._authority is not None else []),
            "tls_version tlsv1.2",
            "require_certificate true",
            "use_identity_as_username true",
            # Otherwise any device could disconnect another one by taking its client id.
            "use_username_as_clientid true",
        ]
        return "\n".join(lines) + "\n"

    def _supervise(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            started_s = time.monotonic()
            try:
                self._run_once()
            except EdgeflError as error:
                self._failure = error
            except OSError as error:
                self._failure = BrokerError(f"mosquitto cannot be started: {error}")
            if not self._has_started.is_set():
                self._has_started.set()
                return
            if self._stopping.is_set():
                return
            failures = count_failures(failures, uptime_s=time.monotonic() - started_s)
            delay_s = compute_restart_delay_s(failures)
            status = self._process.returncode if self._process else None
            log.warning("mosquitto ended with status %s; starting it again in %.1f s", status, delay_s)
            self._stopping.wait(delay_s)

    def _run_once(self) -> None:
        """Starts mosquitto, signals that it is up, and returns when it ended or has to stop."""
        self._process = process = self._spawn()
        try:
            self._wait_until_up(process)
            self._has_started.set()
            while process.poll() is None and not self._stopping.wait(0.1):
                pass
        finally:
            _stop_process(process)

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [self._program, "-c", str(self._config_path.resolve())]
        wrapper = [sys.executable, "-I", "-S", "-c", _EXIT_WITH_PARENT, str(os.getpid())]
        output = self._log.open()
        # In a group of its own, so that Ctrl-C on the terminal reaches the coordinator alone: devices that are
        # stopped at the same time still need the broker.
        try:
            return subprocess.Popen(
                wrapper + command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )
        finally:
            os.close(output)

    def _wait_until_up(self, process: subprocess.Popen[bytes]) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._is_answering():
            if process.poll() is not None:
                raise BrokerError(f"mosquitto does not start: {self._last_log_line()}")
            if time.monotonic() > deadline_s:
                raise BrokerError(f"mosquitto does not answer after {START_TIMEOUT_S:.0f} s: {self._last_log_line()}")
            if self._stopping.wait(0.02):
                return

    def _is_answering(self) -> bool:
        """Returns whether it completes a TLS handshake: it listens before it has read its key, which may fail.

        Another program may have taken the port just before it; the server must send our certificate.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # nothing is sent; only its certificate is compared
        try:
            with socket.create_connection((get_connect_host(self._host), self._port), timeout=1.0) as raw_socket:
                self._log.expect_probe()
                with context.wrap_socket(raw_socket) as tls_socket:
                    server_certificate = tls_socket.getpeercert(binary_form=True)
            return server_certificate == ssl.PEM_cert_to_DER_cert(_read_first_certificate(self._tls.cert))
        except (OSError, ValueError):
            return False

    def _last_log_line(self) -> str:
        """Stops it and returns why it ended, or does not answer."""
        if self._process is not None:
            _stop_process(self._process)
        lines = self._log.read_tail()
        # OpenSSL's own lines follow the one that names the file.
        messages = [line for line in lines if re.search(r"\bError: ", line)] or lines or ["it left no message"]
        return messages[-1].strip()


def _read_first_certificate(path: Path) -> str:
    """Returns the first certificate of a PEM file, whatever follows it."""
    body, mark, _ = path.read_text("ascii").partition(ssl.PEM_FOOTER)
    return body[body.find(ssl.PEM_HEADER) :] + mark


def count_failures(previous: int, *, uptime_s: float) -> int:
    """Returns the number of failures in a row, this one included; reset after `HEALTHY_AFTER_S`."""
    return 1 if uptime_s > HEALTHY_AFTER_S else previous + 1


def compute_restart_delay_s(failures: int) -> float:
    """Returns the delay before the next start after `failures` in a row."""
    return RESTART_DELAYS_S[min(failures, len(RESTART_DELAYS_S)) - 1]


def _stop_process(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class MosquittoLog:
    """Reads mosquitto's lines from a pipe, in a thread, until mosquitto ends."""

    def __init__(self, path: Path, on_denied: OnDenied) -> None:
        self._path, self._on_denied = path, on_denied
        self._tail: deque[str] = deque(maxlen=MAX_TAIL_LINES)
        self._thread: threading.Thread | None = None
        self._num_probes = 0

    def expect_probe(self) -> None:
        """Announces a probe of the coordinator itself, which connects without a certificate."""
        self._num_probes += 1

    def open(self) -> int:
        """Returns the write end of a new pipe; close it once mosquitto has it."""
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        self._tail.clear()
        self._thread = threading.Thread(target=self._read, args=(read_end,), name="mosquitto-log", daemon=True)
        self._thread.start()
        return write_end

    def read_tail(self) -> list[str]:
        """Returns the last lines; call it after mosquitto has ended."""
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        return list(self._tail)

    def _read(self, read_end: int) -> None:
        file = _LogFile(self._path, maxBytes=MAX_LOG_BYTES, backupCount=1, encoding="utf-8", delay=True)
        with os.fdopen(read_end, "rb") as pipe:
            for line in pipe:
                self._report_denied(line)
                if not _TRACE_LINE.search(line):
                    text = line.decode(errors="replace").strip()
                    self._tail.append(text)
                    file.emit(logging.makeLogRecord({"msg": text}))
        with contextlib.suppress(OSError):  # the last lines are lost on a full disk
            file.close()

    def _report_denied(self, line: bytes) -> None:
        if match := _DENIED_LINE.search(line):
            kind, identity, topic = (part.decode(errors="replace") for part in match.groups())
            self._on_denied(identity, f"{kind} to {topic!r}")
        elif _UNTRUSTED_LINE.search(line):
            self._on_denied("", UNTRUSTED_CERTIFICATE)
        elif _NO_CERTIFICATE_LINE.search(line) and self._num_probes:
            self._num_probes -= 1
        elif _NO_CERTIFICATE_LINE.search(line):
            self._on_denied("", MISSING_CERTIFICATE)


class _LogFile(RotatingFileHandler):
    """A rotating log file; lines that cannot be written are lost."""

    def handleError(self, _record: logging.LogRecord) -> None:  # noqa: N802 the name in the standard library
        log.debug("a line of the broker is not kept: %s", sys.exception())
