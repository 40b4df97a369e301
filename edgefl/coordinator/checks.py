"""The doctor's look at a coordinator's directory: what can be seen on this machine, without changing a byte."""

from __future__ import annotations

import contextlib
import secrets
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgefl import __version__
from edgefl.coordinator import pki
from edgefl.coordinator.brokers.broker import BrokerTls
from edgefl.coordinator.brokers.choice import mosquitto_path
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.errors import EdgeflError, JournalError, StoreError, StoreTooNewError, VersionError
from edgefl.files import is_held, sha256_of_file
from edgefl.findings import Finding, check_certificate, check_clock, check_disk, check_private, ok, problem, warning
from edgefl.protocol import check_version
from edgefl.storage.checkpoints import checkpoint_files, checkpoints, is_whole
from edgefl.storage.database import SCHEMA_REVISION, sqlite_file
from edgefl.storage.journal_reader import read_journal
from edgefl.storage.snapshot import check_database, device_versions, named_models
from edgefl.storage.store import Store
from edgefl.storage.wal import journal_files, read_header

BACKUP = "restore a backup: edgefl coordinator restore FILE --dir DIR"
WITNESS_DAYS = 1 / 24
RESTART = "start the coordinator, which renews it: edgefl coordinator start"
_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """A certificate for one look at the broker, under a name that no device has."""

    identity: str
    tls: BrokerTls


def check_directory(directory: CoordinatorDirectory, *, now: float) -> list[Finding]:
    """Returns what is found in a coordinator's directory, and of its store; `now` is unix time."""
    store = sqlite_file(directory.store_url)
    is_running = is_held(directory.root / "lock")
    keys = [directory.ca_key, directory.server_key, directory.client_key, directory.settings]
    return [
        ok("coordinator", f"fleet {directory.fleet} in {directory.root}"),
        _running(directory, is_running=is_running),
        *check_private(directory.root, keys),
        *_certificates(directory, now),
        check_disk(directory.root),
        check_clock(now),
        _program(),
        *(_database(store) if store is not None else [_server_store(directory)]),
        *_runs(directory),
        *(_models(directory, store) if store is not None else []),
    ]


@contextlib.contextmanager
def witness(directory: CoordinatorDirectory) -> Iterator[Witness]:
    """Gives a certificate of the fleet for a moment; nothing of it stays, and no running connection is pushed off."""
    name = f"doctor-{secrets.token_hex(6)}"
    pair = pki.issue_client(directory.authority(), name, days=WITNESS_DAYS)
    with tempfile.TemporaryDirectory() as folder:
        paths = {kind: Path(folder) / f"{kind}.pem" for kind in ("cert", "key")}
        for kind, content in (("cert", pair.cert_pem), ("key", pair.key_pem)):
            paths[kind].touch(mode=0o600)
            paths[kind].write_bytes(content)
        yield Witness(identity=name, tls=BrokerTls(ca=directory.ca_cert, cert=paths["cert"], key=paths["key"]))


def _running(directory: CoordinatorDirectory, *, is_running: bool) -> Finding:
    if is_running:
        return ok("coordinator", "it runs")
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", directory.port), timeout=1.0):
        told = f"it does not run, and another program has its port {directory.port}"
        return problem("ports", told, "stop that program, or: edgefl coordinator readdress --port PORT")
    return warning("coordinator", "it does not run", f"edgefl coordinator start --dir {directory.root}")


def _certificates(directory: CoordinatorDirectory, now: float) -> list[Finding]:
    known = (
        ("the CA's certificate", directory.ca_cert, directory.ca_key, RESTART, "a start of the coordinator"),
        ("the server's certificate", directory.server_cert, directory.server_key, RESTART, "a running coordinator"),
        (
            "the coordinator's own certificate", directory.client_cert, directory.client_key, RESTART,
            "a running coordinator",
        ),
    )  # fmt: skip
    findings = []
    for name, cert, key, remedy, renewed_by in known:
        try:
            ca_pem, cert_pem, key_pem = directory.ca_cert.read_bytes(), cert.read_bytes(), key.read_bytes()
        except OSError as error:
            findings.append(problem("certificates", f"{error.filename}: {error.strerror}", BACKUP))
            continue
        findings.append(
            check_certificate(name, cert_pem, ca_pem, key_pem=key_pem, now=now, remedy=remedy, renewed_by=renewed_by)
        )
    return findings + _names(directory)


def _names(directory: CoordinatorDirectory) -> list[Finding]:
    try:
        good_for = pki.server_hosts(directory.server_cert.read_bytes())
    except (OSError, EdgeflError):
        return []  # said already
    if missing := [host for host in directory.hosts if host not in good_for]:
        told = f"the server's certificate is not for {', '.join(missing)}, where boards look for it"
        return [problem("certificates", told, f"edgefl coordinator readdress {' '.join(directory.hosts)}")]
    return []


def _program() -> Finding:
    path = mosquitto_path()
    if path is None:
        told = "mosquitto is not installed; the embedded broker serves about a hundred devices"
        return warning("broker", told, "apt install mosquitto")
    return ok("broker", f"mosquitto is {path}")


def _server_store(directory: CoordinatorDirectory) -> Finding:
    """Returns whether the database server answers, and has a store of ours; its own tools check the rest."""
    try:
        with Store.open(directory.store_url, read_only=True) as store:
            return ok("database", f"the store at {store.database.where} answers, revision {SCHEMA_REVISION}")
    except StoreError as error:
        return problem(
            "database", str(error), "start that server, or name another store: edgefl coordinator start --store URL"
        )


def _database(store: Path) -> list[Finding]:
    try:
        report = check_database(store)
    except StoreError as error:
        if not store.exists():
            return [warning("database", f"there is no store at {store} yet", "edgefl coordinator start makes it")]
        return [
            problem("database", str(error), BACKUP if error.exit_code == StoreError.exit_code else "update edgefl")
        ]
    findings = [problem("database", f"{store} is damaged: {told}", BACKUP) for told in report.problems]
    if report.revision != SCHEMA_REVISION:
        told = f"its schema is of revision {report.revision}, this program's of {SCHEMA_REVISION}"
        findings.append(warning("database", told, "make a backup; the next start upgrades it"))
    return [*(findings or [ok("database", f"{store} is sound, revision {report.revision}")]), *_versions(store)]


def _versions(store: Path) -> list[Finding]:
    findings = []
    for device_id, version in device_versions(store).items():
        try:
            check_version(version, __version__)
        except VersionError as error:
            findings.append(warning("versions", f"{device_id}: {error}", "update edgefl on that board"))
    return findings


def _runs(directory: CoordinatorDirectory) -> list[Finding]:
    """Returns which journals and checkpoints cannot be read."""
    runs = sorted(path for path in directory.runs.iterdir() if path.is_dir()) if directory.runs.is_dir() else []
    findings = [finding for run in runs for finding in _run(run)]
    return findings or [ok("journals", f"journals and checkpoints can be read; runs: {len(runs)}")]


def _run(run: Path) -> list[Finding]:
    for attempt in range(_TRIES):
        try:
            return _read_run(run)
        except StoreTooNewError as error:
            return [problem("journals", f"run {run.name}: {error}", "start a newer edgefl")]
        except (JournalError, OSError) as error:
            # A coordinator that runs may have pruned what was just listed.
            if attempt == _TRIES - 1:
                return [problem("journals", f"run {run.name}: {error}", BACKUP)]
    return []


def _read_run(run: Path) -> list[Finding]:
    folder, findings = run / "checkpoints", []
    saved = checkpoints(folder)
    num_notes = len(list(folder.glob("*.checkpoint.json"))) if folder.is_dir() else 0
    if num_notes > len(saved):
        findings.append(problem("journals", f"run {run.name}: a checkpoint's note is damaged", BACKUP))
    damaged = [path for checkpoint in saved for path in checkpoint_files(folder, checkpoint) if not is_whole(path)]
    findings += [
        problem("journals", f"run {run.name}: checkpoint {path.name[:12]}… is damaged", BACKUP) for path in damaged
    ]
    _read_all(run / "journal", known=saved[0].last_record if saved else 0)
    return findings


def _read_all(journal: Path, *, known: int) -> None:
    """Reads what is left of a journal; what lies before the newest checkpoint's own record may be gone."""
    files = journal_files(journal)
    header = read_header(files[0]) if files else None
    first = header.first_record if header else 1
    if first > known + 2:
        raise JournalError(f"journal {journal}: records {known + 1} to {first - 1} are missing")
    for _ in read_journal(journal, after=first - 1):
        pass


def _models(directory: CoordinatorDirectory, store: Path) -> list[Finding]:
    try:
        named = named_models(store)
    except StoreError:
        return []  # said already
    findings, num_bytes = [], 0
    for sha256 in sorted(named):
        path = directory.models / f"{sha256}.safetensors"
        if not path.is_file():
            told = f"the model {sha256[:12]}…, which the store names, is missing"
            findings.append(warning("models", told, "it was left out of a backup, or removed"))
        elif sha256_of_file(path) != sha256:
            findings.append(problem("models", f"the model {sha256[:12]}… is damaged", BACKUP))
        else:
            num_bytes += path.stat().st_size
    return findings or [ok("models", f"{len(named)} models, {num_bytes / 1e6:.1f} MB, are as they were written")]
