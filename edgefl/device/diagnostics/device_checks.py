"""Checks of `edgefl doctor` for a device, and for a coordinator and its broker from outside; read-only.

A device may publish below its own name only, and reads topics addressed to it. A probe published under another name
*to itself* must not come back, while one under its own name must: this works with any broker, and no device is called
`edgefl-doctor`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import ssl
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from edgefl import __version__
from edgefl.core.errors import BrokerError, EdgeflError, NotJoinedError, VersionError, WrongCaError
from edgefl.core.protocol import Topic, check_version, parse_peer_topic, peer_topic, topic
from edgefl.core.types import Role
from edgefl.device.hardware.board_reader import NOT_THROTTLED, BoardReader, read_throttle_status
from edgefl.device.hardware.capabilities import probe
from edgefl.device.hardware.requirements import get_training_facts
from edgefl.device.mqtt.session import create_tls_context
from edgefl.device.state_dir import DeviceStateDir
from edgefl.device.updates.slots import (
    PROVISIONED_COMMAND,
    SoftwareUpdateConfig,
    get_install_facts,
    load_update_config,
)
from edgefl.system.atomic_files import TlsFiles, is_locked
from edgefl.system.confinement import find_gaps
from edgefl.system.diagnostics import (
    Finding,
    check_certificate,
    check_clock,
    check_disk,
    check_memory_limits,
    check_private,
    check_skew,
    ok,
    problem,
    warning,
)
from edgefl.system.https_client import CoordinatorInfo, create_pinned_context, fetch_coordinator_info
from edgefl.tasks.datasets.shards import inspect_shard

TIMEOUT_S = 5.0
PROBE_SENDER = "edgefl-doctor"

RENEW_REMEDY = "its agent renews it as soon as it reaches the coordinator: edgefl device start; or join again"
REJOIN_REMEDY = "join again with a new token: edgefl device join"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerAccessRules:
    """Access violations that a broker allowed: write as another device, read another's status."""

    can_write_as_others: bool
    can_read_others: bool


def check_broker_tls(host: str, port: int, tls_files: TlsFiles, *, timeout_s: float = TIMEOUT_S) -> None:
    """Raises unless the server shows a certificate of the fleet's CA; sends no MQTT.

    Raises:
        BrokerError: no answer, or another server's.
    """
    context = create_tls_context(tls_files)
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as plain_socket:
            context.wrap_socket(plain_socket, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        reason = error.verify_message or error.reason
        raise BrokerError(f"{host}:{port} shows a certificate that does not verify: {reason}") from None
    except OSError as error:
        raise BrokerError(f"{host}:{port} cannot be reached: {error.strerror or error}") from None


def find_reachable_broker(state: DeviceStateDir, *, timeout_s: float = TIMEOUT_S) -> str | None:
    """Returns the HOST:PORT at which the broker answers an enrolled device, or None."""
    for host, port in state.settings.brokers:
        with contextlib.suppress(BrokerError, NotJoinedError):
            check_broker_tls(host, port, state.tls_files, timeout_s=timeout_s)
            return f"{host}:{port}"
    return None


def probe_access_rules(
    host: str, port: int, tls_files: TlsFiles, *, fleet: str, identity: str, timeout_s: float = TIMEOUT_S
) -> BrokerAccessRules:
    """Returns the access of `identity`, the name in the certificate.

    A connection replaces an earlier one of the same name: only for a name not in use.

    Raises:
        BrokerError: it cannot be reached, rejects the certificate, or drops allowed messages.
    """
    check_broker_tls(host, port, tls_files, timeout_s=timeout_s)
    probe = _AccessProbe(fleet, identity)
    client = mqtt.Client(CallbackAPIVersion.VERSION2, client_id=identity, reconnect_on_failure=False)
    client.tls_set_context(create_tls_context(tls_files))
    client.connect_timeout = timeout_s
    client.on_connect, client.on_subscribe, client.on_message = probe.on_connect, probe.on_subscribe, probe.on_message
    try:
        client.connect(host, port)
        client.loop_start()
        is_done = probe.done.wait(timeout_s)
    except OSError as error:
        raise BrokerError(f"{host}:{port} cannot be reached: {error.strerror or error}") from None
    finally:
        client.disconnect()
        client.loop_stop()
    if not is_done:
        raise BrokerError(f"{host}:{port} {probe.status}")
    return BrokerAccessRules(can_write_as_others=probe.can_write_as_others, can_read_others=probe.can_read_others)


class _AccessProbe:
    """State of one probe; `done` is set when the message under its own name, sent last, came back."""

    def __init__(self, fleet: str, identity: str) -> None:
        self._fleet, self._identity = fleet, identity
        self._nonce = secrets.token_bytes(16)
        self.done = threading.Event()
        self.status = "does not let this certificate in"
        self.can_write_as_others = self.can_read_others = False

    def on_connect(self, client: mqtt.Client, _data: Any, _flags: Any, reason: Any, _properties: Any) -> None:
        if reason.is_failure:
            self.status = f"does not let this certificate in: {reason}"
            return
        self.status = "lets this certificate in, but does not answer"
        client.subscribe(
            [(peer_topic(self._fleet, "+", self._identity), 1), (topic(self._fleet, "+", Topic.STATUS), 1)]
        )

    def on_subscribe(self, client: mqtt.Client, *_: object) -> None:
        self.status = "does not carry what this device may say: its rules are not those of the fleet"
        for sender in (PROBE_SENDER, self._identity):
            client.publish(peer_topic(self._fleet, sender, self._identity), self._nonce, qos=1)

    def on_message(self, _client: Any, _data: Any, message: mqtt.MQTTMessage) -> None:
        if message.topic.endswith(f"/{Topic.STATUS}"):
            self.can_read_others |= message.topic != topic(self._fleet, self._identity, Topic.STATUS)
        elif bytes(message.payload) == self._nonce:
            _, sender, _ = parse_peer_topic(message.topic)
            self.can_write_as_others |= sender == PROBE_SENDER
            if sender == self._identity:
                self.done.set()


def check_device(root: Path, *, now: float) -> list[Finding]:
    """Returns the findings for a device's state directory and services; `now` is unix time."""
    try:
        state = DeviceStateDir.load(root)
    except EdgeflError as error:
        return [problem("device", str(error), REJOIN_REMEDY)]
    device, is_running = state.settings, is_locked(root / "lock")
    findings = [
        ok("device", f"{device.device_id} of fleet {device.fleet}, a {device.role}, in {root}"),
        _check_agent(root, is_running=is_running),
        *check_private(root, [state.key, root / "device.json"]),
        _check_device_certificate(state, now),
        check_updates(load_update_config()),
        check_confinement(device.confine),
        check_disk(root),
        *check_memory_limits(),
        check_clock(now),
    ]
    try:
        ca_pem = state.ca.read_bytes()
    except OSError:
        return [*findings, problem("certificates", f"{state.ca} is missing", REJOIN_REMEDY), *_check_shards(state)]
    info, coordinator_findings = check_coordinator(device.addresses, ca_pem)
    port = info.broker_port if info else device.broker_port
    broker_findings = check_broker(
        [(host, port) for host in device.broker_hosts],
        state.tls_files,
        fleet=device.fleet,
        identity=device.device_id,
        is_in_use=is_running,
    )
    return [
        *findings,
        *coordinator_findings,
        *broker_findings,
        *_check_shards(state),
        *check_board(device.role, device.shards),
    ]


def check_board(role: str, tasks: Iterable[str], root: Path = Path("/")) -> list[Finding]:
    """Returns how this board trains each task, or why not, and its throttling."""
    facts = probe(root)
    training_facts = get_training_facts(role, tasks, facts)
    paths = ", ".join(
        f"{task} with {backend}" for task, backend in training_facts.get("paths", {}).items() if backend != "none"
    )
    findings = []
    if role == Role.EVALUATOR:
        findings.append(ok("training", "its role is evaluator, and it trains nothing"))
    elif training_facts["trains"]:
        findings.append(ok("training", f"it trains {paths or 'with ' + ' and '.join(training_facts['backends'])}"))
    else:
        findings.append(
            warning("training", training_facts["trains_reason"], "see docs/explanation/boards.md, small boards")
        )
    return [*findings, *_check_throttling(BoardReader(root))]


def _check_throttling(board: BoardReader) -> list[Finding]:
    status = read_throttle_status(board)
    if status is None:
        return []
    since_boot = status.since_boot or status.now
    if status.now == since_boot == NOT_THROTTLED:
        return [ok("board", "nothing holds it back, now or since it was switched on")]
    remedy = "a better power supply and cable" if "under-voltage" in since_boot else "a heat sink or a fan"
    return [warning("board", f"held back now: {status.now}; since it was switched on: {since_boot}", remedy)]


def check_updates(update_config: SoftwareUpdateConfig) -> Finding:
    """Returns whether this installation can be updated remotely, and by which signers."""
    facts = get_install_facts(update_config)["installs"]
    if update_config.slots is None:
        return ok("updates", facts["reason"])
    remedy = (
        f"see docs/how-to/update-boards.md; keys of signers lie in {update_config.signers}, "
        "which root alone may change"
    )
    if not facts["able"]:
        return warning("updates", f"this board takes no updates: {facts['reason']}", remedy)
    if os.geteuid() != 0 and os.access(update_config.signers, os.W_OK):
        return problem("updates", f"the agent's own user could add signers to {update_config.signers}", remedy)
    if facts.get("expired"):
        text = f"nobody has signed anything newer in time: {'; '.join(facts['expired'])}"
        return warning(
            "updates", text, "somebody may hold newer ones back; sign and send one, or a new list of signers"
        )
    packs = ", ".join(f"{name} {pack['version']}" for name, pack in facts["packs"].items()) or "no packs"
    return ok("updates", f"slot {facts['slot']}, {packs}, takes what {', '.join(facts['signers'])} sign")


def check_confinement(policy: str) -> Finding:
    """Returns whether code that is not built in runs here without the device's key, and what is missing for that."""
    if policy == "never":
        remedy = "edgefl device set --confine auto, and restart the agent"
        return warning("confinement", "code of packs runs in the agent, beside the device's key", remedy)
    if gaps := find_gaps():
        remedy = "see docs/explanation/security.md, confined training; a kernel with Landlock has all of it"
        return warning("confinement", "; ".join(gaps), remedy)
    what = "all training" if policy == "always" else "code that is not built in"
    return ok("confinement", f"{what} runs without the device's key, the network and other files")


def check_coordinator(addresses: Sequence[str], ca_pem: bytes) -> tuple[CoordinatorInfo | None, list[Finding]]:
    """Returns the coordinator's info from the first address that answers, and all findings."""
    info, findings, failures = None, list[Finding](), list[str]()
    for address in addresses:
        try:
            reply = fetch_coordinator_info(address, create_pinned_context(ca_pem), timeout_s=TIMEOUT_S)
        except WrongCaError as error:
            return None, [
                problem("coordinator", str(error), "somebody else is there; check the address, or join again")
            ]
        except (EdgeflError, ValueError) as error:
            failures.append(str(error))
            continue
        if info is None:
            info = reply
            findings += [
                ok("coordinator", f"answers at {address}"),
                _check_coordinator_version(reply),
                check_skew(reply.skew_s),
            ]
    remedy = "see that the coordinator runs and no firewall is between: edgefl coordinator start"
    if info is None:
        return None, [problem("coordinator", failure, remedy) for failure in failures or ["it has no address"]]
    unused_remedy = "harmless while another answers; on its machine: edgefl coordinator readdress"
    return info, [*findings, *(warning("coordinator", failure, unused_remedy) for failure in failures)]


def check_broker(
    brokers: Sequence[tuple[str, int]], tls_files: TlsFiles, *, fleet: str, identity: str, is_in_use: bool = False
) -> list[Finding]:
    """Checks that a broker of the fleet answers at one of the addresses, with correct access rules.

    `is_in_use` while an agent is connected as `identity`, which must stay connected.
    """
    failures = []
    for host, port in brokers:
        try:
            if is_in_use:
                check_broker_tls(host, port, tls_files, timeout_s=TIMEOUT_S)
                text = f"answers at {host}:{port}; its rules are tried when {identity} is not connected"
                return [ok("broker", text)]
            rules = probe_access_rules(host, port, tls_files, fleet=fleet, identity=identity, timeout_s=TIMEOUT_S)
        except (BrokerError, NotJoinedError) as error:
            failures.append(str(error))
            continue
        return [ok("broker", f"{host}:{port} lets {identity} in"), *_check_access_rules(rules)]
    remedy = "see that the coordinator's broker runs, and that nothing blocks its port"
    return [problem("broker", text, remedy) for text in failures or ["it has no address"]]


def _check_access_rules(rules: BrokerAccessRules) -> list[Finding]:
    remedy = "give the broker the fleet's rules; docs/reference/protocol.md has them"
    findings = []
    if rules.can_write_as_others:
        findings.append(problem("broker", "it lets a device speak as another one", remedy))
    if rules.can_read_others:
        findings.append(problem("broker", "it lets a device read what another one says", remedy))
    return findings or [ok("broker", "it refuses what a device says as another one")]


def _check_agent(root: Path, *, is_running: bool) -> Finding:
    if is_running:
        return ok("agent", "the agent runs")
    return warning("agent", "no agent runs", f"edgefl device start --state {root}, or its systemd unit")


def _check_device_certificate(state: DeviceStateDir, now: float) -> Finding:
    try:
        cert, ca, key = state.cert.read_bytes(), state.ca.read_bytes(), state.key.read_bytes()
    except OSError as error:
        return problem("certificates", f"{error.filename} cannot be read: {error.strerror}", REJOIN_REMEDY)
    return check_certificate(
        "this device's certificate", cert, ca, key_pem=key, now=now, remedy=RENEW_REMEDY, renewed_by="its agent"
    )


def _check_coordinator_version(info: CoordinatorInfo) -> Finding:
    try:
        check_version(__version__, info.version)
    except VersionError as error:
        return problem(
            "versions", str(error), "devices and coordinator need the same minor version, or a device the one before"
        )
    return ok("versions", f"the coordinator has edgefl {info.version}, which fits")


def _format_shard_add(arguments: str) -> str:
    command = PROVISIONED_COMMAND.format if load_update_config().slots is not None else "edgefl {}".format
    return command(f"device shard add {arguments}")


def _check_shards(state: DeviceStateDir) -> list[Finding]:
    shards = state.settings.shards
    if not shards:
        return [warning("shards", "this device has no shard", _format_shard_add("TASK PATH"))]
    findings = []
    for task, path in shards.items():
        try:
            report = inspect_shard(task, path)
        except (EdgeflError, OSError) as error:
            findings.append(problem("shards", f"{task}: {error}", _format_shard_add(f"{task} PATH")))
            continue
        missing = (
            f"; none of the classes {', '.join(map(str, report.missing_labels))}" if report.missing_labels else ""
        )
        findings.append(ok("shards", f"{task}: {report.num_examples} examples in {path}{missing}"))
    return findings
