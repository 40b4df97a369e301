"""Read-only diagnostics of a coordinator's directory."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

from edgefl import __version__
from edgefl.coordinator import pki
from edgefl.coordinator.brokers.broker import issue_temporary_identity
from edgefl.coordinator.brokers.mosquitto import find_mosquitto
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.core.errors import EdgeflError, JournalError, StoreError, StoreTooNewError, VersionError
from edgefl.core.protocol import check_version
from edgefl.storage.checkpoints import is_intact, list_checkpoint_files, list_checkpoints
from edgefl.storage.database import SCHEMA_REVISION, get_sqlite_path
from edgefl.storage.journal.file_format import list_journal_files, read_header, read_records
from edgefl.storage.sqlite_backup import check_database, get_device_versions, list_model_hashes
from edgefl.storage.store import Store
from edgefl.system.atomic_files import TlsFiles, compute_sha256, is_locked
from edgefl.system.diagnostics import (
    Finding,
    check_certificate,
    check_clock,
    check_disk,
    check_private,
    ok,
    problem,
    warning,
)

RESTORE_HINT = "restore a backup: edgefl coordinator restore FILE --dir DIR"
RESTART_HINT = "start the coordinator, which renews it: edgefl coordinator start"
_MAX_ATTEMPTS = 3


def check_directory(directory: CoordinatorDirectory, *, now: float) -> list[Finding]:
    """Returns the findings on a coordinator's directory and its store; `now` is in Unix seconds."""
    store = get_sqlite_path(directory.store_url)
    is_running = is_locked(directory.root / "lock")
    keys = [directory.ca_key, directory.server_key, directory.client_key, directory.settings]
    return [
        ok("coordinator", f"fleet {directory.fleet} in {directory.root}"),
        _check_process(directory, is_running=is_running),
        *check_private(directory.root, keys),
        *_check_certificates(directory, now),
        check_disk(directory.root),
        check_clock(now),
        _check_mosquitto(),
        *(_check_database(store) if store is not None else [_check_store_server(directory)]),
        *_check_runs(directory),
        *(_check_models(directory, store) if store is not None else []),
    ]


@contextlib.contextmanager
def issue_probe_identity(directory: CoordinatorDirectory) -> Iterator[tuple[str, TlsFiles]]:
    """Yields a name that no device has, and its temporary certificate: probing the broker disconnects no client."""
    name = f"doctor-{secrets.token_hex(6)}"
    with issue_temporary_identity(directory.load_authority(), name, ca=directory.ca_cert) as tls:
        yield name, tls


def _check_process(directory: CoordinatorDirectory, *, is_running: bool) -> Finding:
    if is_running:
        return ok("coordinator", "it runs")
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", directory.port), timeout=1.0):
        message = f"it does not run, and another program has its port {directory.port}"
        return problem("ports", message, "stop that program, or: edgefl coordinator readdress --port PORT")
    return warning("coordinator", "it does not run", f"edgefl coordinator start --dir {directory.root}")


def _check_certificates(directory: CoordinatorDirectory, now: float) -> list[Finding]:
    start, running = "a start of the coordinator", "a running coordinator"
    certificates = (
        ("the CA's certificate", directory.ca_cert, directory.ca_key, start),
        ("the server's certificate", directory.server_cert, directory.server_key, running),
        ("the coordinator's own certificate", directory.client_cert, directory.client_key, running),
    )
    findings = []
    for name, cert, key, renewed_by in certificates:
        try:
            ca_pem, cert_pem, key_pem = directory.ca_cert.read_bytes(), cert.read_bytes(), key.read_bytes()
        except OSError as error:
            findings.append(problem("certificates", f"{error.filename}: {error.strerror}", RESTORE_HINT))
            continue
        findings.append(
            check_certificate(
                name, cert_pem, ca_pem, key_pem=key_pem, now=now, remedy=RESTART_HINT, renewed_by=renewed_by
            )
        )
    return findings + _check_hosts(directory)


def _check_hosts(directory: CoordinatorDirectory) -> list[Finding]:
    try:
        certified_hosts = pki.get_server_hosts(directory.server_cert.read_bytes())
    except (OSError, EdgeflError):
        return []  # reported already
    if missing := [host for host in directory.hosts if host not in certified_hosts]:
        message = f"the server's certificate is not for {', '.join(missing)}, where boards look for it"
        return [problem("certificates", message, f"edgefl coordinator readdress {' '.join(directory.hosts)}")]
    return []


def _check_mosquitto() -> Finding:
    path = find_mosquitto()
    if path is None:
        message = "mosquitto is not installed; the embedded broker serves about a hundred devices"
        return warning("broker", message, "apt install mosquitto")
    return ok("broker", f"mosquitto is {path}")


def _check_store_server(directory: CoordinatorDirectory) -> Finding:
    """Checks that the database server answers, and has an edgefl store; its own tools check the rest."""
    try:
        with Store.open(directory.store_url, read_only=True) as store:
            return ok("database", f"the store at {store.database.location} answers, revision {SCHEMA_REVISION}")
    except StoreError as error:
        return problem(
            "database", str(error), "start that server, or name another store: edgefl coordinator start --store URL"
        )


def _check_database(store: Path) -> list[Finding]:
    try:
        revision, problems = check_database(store)
    except StoreError as error:
        if not store.exists():
            return [warning("database", f"there is no store at {store} yet", "edgefl coordinator start makes it")]
        return [
            problem(
                "database", str(error), RESTORE_HINT if error.exit_code == StoreError.exit_code else "update edgefl"
            )
        ]
    findings = [problem("database", f"{store} is damaged: {message}", RESTORE_HINT) for message in problems]
    if revision != SCHEMA_REVISION:
        message = f"its schema is of revision {revision}, this program's of {SCHEMA_REVISION}"
        findings.append(warning("database", message, "make a backup; the next start upgrades it"))
    return [*(findings or [ok("database", f"{store} is sound, revision {revision}")]), *_check_versions(store)]


def _check_versions(store: Path) -> list[Finding]:
    findings = []
    for device_id, version in get_device_versions(store).items():
        try:
            check_version(version, __version__)
        except VersionError as error:
            findings.append(warning("versions", f"{device_id}: {error}", "update edgefl on that board"))
    return findings


def _check_runs(directory: CoordinatorDirectory) -> list[Finding]:
    """Returns the findings on unreadable journals and checkpoints."""
    runs = sorted(path for path in directory.runs.iterdir() if path.is_dir()) if directory.runs.is_dir() else []
    findings = [finding for run in runs for finding in _check_run(run)]
    return findings or [ok("journals", f"journals and checkpoints can be read; runs: {len(runs)}")]


def _check_run(run: Path) -> list[Finding]:
    for attempt in range(_MAX_ATTEMPTS):
        try:
            return _check_run_files(run)
        except StoreTooNewError as error:
            return [problem("journals", f"run {run.name}: {error}", "start a newer edgefl")]
        except (JournalError, OSError) as error:
            # A running coordinator may have pruned a file just listed.
            if attempt == _MAX_ATTEMPTS - 1:
                return [problem("journals", f"run {run.name}: {error}", RESTORE_HINT)]
    return []


def _check_run_files(run: Path) -> list[Finding]:
    folder, findings = run / "checkpoints", []
    checkpoints = list_checkpoints(folder)
    num_manifests = len(list(folder.glob("*.checkpoint.json"))) if folder.is_dir() else 0
    if num_manifests > len(checkpoints):
        findings.append(problem("journals", f"run {run.name}: a checkpoint's note is damaged", RESTORE_HINT))
    damaged = [
        path
        for checkpoint in checkpoints
        for path in list_checkpoint_files(folder, checkpoint)
        if not is_intact(path)
    ]
    findings += [
        problem("journals", f"run {run.name}: checkpoint {path.name[:12]}… is damaged", RESTORE_HINT)
        for path in damaged
    ]
    _read_journal(run / "journal", last_known_record=checkpoints[0].last_record if checkpoints else 0)
    return findings


def _read_journal(journal: Path, *, last_known_record: int) -> None:
    """Reads a journal; records before the newest checkpoint's own one may be pruned."""
    files = list_journal_files(journal)
    header = read_header(files[0]) if files else None
    first = header.first_record if header else 1
    if first > last_known_record + 2:
        raise JournalError(f"journal {journal}: records {last_known_record + 1} to {first - 1} are missing")
    for _ in read_records(journal, after=first - 1):
        pass


def _check_models(directory: CoordinatorDirectory, store: Path) -> list[Finding]:
    try:
        known_sha256s = list_model_hashes(store)
    except StoreError:
        return []  # reported already
    findings, num_bytes = [], 0
    for sha256 in sorted(known_sha256s):
        path = directory.models / f"{sha256}.safetensors"
        if not path.is_file():
            message = f"the model {sha256[:12]}…, which the store names, is missing"
            findings.append(warning("models", message, "it was left out of a backup, or removed"))
        elif compute_sha256(path) != sha256:
            findings.append(problem("models", f"the model {sha256[:12]}… is damaged", RESTORE_HINT))
        else:
            num_bytes += path.stat().st_size
    return findings or [
        ok("models", f"{len(known_sha256s)} models, {num_bytes / 1e6:.1f} MB, are as they were written")
    ]
