"""The doctor's look at a device, and at a coordinator from outside. Changes nothing, disturbs no running agent."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgefl import __version__
from edgefl.device.board.board import Board
from edgefl.device.board.capabilities import probe
from edgefl.device.board.throttling import NOT_THROTTLED, throttling
from edgefl.device.board.training_facts import training_facts
from edgefl.device.broker_probe import BrokerRules, probe_rules, shake_hands
from edgefl.device.install_facts import Site, install_facts, own_site
from edgefl.device.mqtt_session import LinkTls
from edgefl.device.slots.layout import PROVISIONED
from edgefl.device.state import DeviceState
from edgefl.device.trust import Hello, pinned_context, say_hello
from edgefl.errors import BrokerError, EdgeflError, NotJoinedError, VersionError, WrongCaError
from edgefl.files import is_held
from edgefl.findings import (
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
from edgefl.protocol import check_version
from edgefl.tasks.registry import make_task
from edgefl.tasks.shards import check_shard
from edgefl.types import Role

TIMEOUT_S = 5.0
RENEW = "its agent renews it as soon as it reaches the coordinator: edgefl device start; or join again"
REJOIN = "join again with a new token: edgefl device join"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSide:
    """Who looks at a broker: `is_in_use` when somebody is connected under `identity` now, who must stay so."""

    tls: LinkTls
    fleet: str
    identity: str
    is_in_use: bool


def check_device(root: Path, *, now: float) -> list[Finding]:
    """Returns what is found in a device's state directory, and of what it needs; `now` is unix time."""
    try:
        state = DeviceState.load(root)
    except EdgeflError as error:
        return [problem("device", str(error), REJOIN)]
    device, is_running = state.device, is_held(root / "lock")
    findings = [
        ok("device", f"{device.device_id} of fleet {device.fleet}, a {device.role}, in {root}"),
        _agent(root, is_running=is_running),
        *check_private(root, [state.key, root / "device.json"]),
        _certificate(state, now),
        check_updates(own_site()),
        check_disk(root),
        *check_memory_limits(),
        check_clock(now),
    ]
    try:
        ca_pem = state.ca.read_bytes()
    except OSError:
        return [*findings, problem("certificates", f"{state.ca} is missing", REJOIN), *_shards(state)]
    hello, told = check_coordinator(device.addresses, ca_pem)
    port = hello.broker_port if hello else device.broker_port
    side = BrokerSide(
        tls=LinkTls(ca=state.ca, cert=state.cert, key=state.key),
        fleet=device.fleet,
        identity=device.device_id,
        is_in_use=is_running,
    )
    broker = check_broker(device.broker_hosts, port, side)
    return [*findings, *told, *broker, *_shards(state), *check_board(device.role, device.shards)]


def check_board(role: str, tasks: Iterable[str], root: Path = Path("/")) -> list[Finding]:
    """Returns how this board trains each of its tasks, or why not, and what holds it back."""
    facts = probe(root)
    told = training_facts(role, tasks, facts)
    ways = ", ".join(f"{task} with {way}" for task, way in told.get("paths", {}).items() if way != "none")
    findings = []
    if role == Role.EVALUATOR:
        findings.append(ok("training", "its role is evaluator, and it trains nothing"))
    elif told["trains"]:
        findings.append(ok("training", f"it trains {ways or 'with ' + ' and '.join(told['backends'])}"))
    else:
        findings.append(warning("training", told["trains_reason"], "see docs/explanation/boards.md, small boards"))
    return [*findings, *_held_back(Board(root))]


def _held_back(board: Board) -> list[Finding]:
    held = throttling(board)
    if held is None:
        return []
    past = held.since_boot or held.now
    if held.now == past == NOT_THROTTLED:
        return [ok("board", "nothing holds it back, now or since it was switched on")]
    remedy = "a better power supply and cable" if "under-voltage" in past else "a heat sink or a fan"
    return [warning("board", f"held back now: {held.now}; since it was switched on: {past}", remedy)]


def check_updates(site: Site) -> Finding:
    """Returns whether this edgefl can be updated from afar, and by whom."""
    told = install_facts(site)["installs"]
    if site.slots is None:
        return ok("updates", told["reason"])
    remedy = f"see docs/how-to/update-boards.md; keys of signers lie in {site.signers}, which root alone may change"
    if not told["able"]:
        return warning("updates", f"this board takes no updates: {told['reason']}", remedy)
    if os.geteuid() != 0 and os.access(site.signers, os.W_OK):
        return problem("updates", f"the agent's own user could add signers to {site.signers}", remedy)
    packs = ", ".join(f"{name} {pack['version']}" for name, pack in told["packs"].items()) or "no packs"
    return ok("updates", f"slot {told['slot']}, {packs}, takes what {', '.join(told['signers'])} sign")


def check_coordinator(addresses: Sequence[str], ca_pem: bytes) -> tuple[Hello | None, list[Finding]]:
    """Returns what the coordinator says of itself at the first address that answers, and what was found at all."""
    hello, findings, failures = None, list[Finding](), list[str]()
    for address in addresses:
        try:
            answer = say_hello(address, pinned_context(ca_pem), timeout_s=TIMEOUT_S)
        except WrongCaError as error:
            return None, [
                problem("coordinator", str(error), "somebody else is there; check the address, or join again")
            ]
        except (EdgeflError, ValueError) as error:
            failures.append(str(error))
            continue
        if hello is None:
            hello = answer
            findings += [ok("coordinator", f"answers at {address}"), _version(answer), check_skew(answer.skew_s)]
    remedy = "see that the coordinator runs and no firewall is between: edgefl coordinator start"
    if hello is None:
        return None, [problem("coordinator", told, remedy) for told in failures or ["it has no address"]]
    unused = "harmless while another answers; on its machine: edgefl coordinator readdress"
    return hello, [*findings, *(warning("coordinator", told, unused) for told in failures)]


def check_broker(hosts: Sequence[str], port: int, side: BrokerSide) -> list[Finding]:
    """Returns whether a broker of the fleet answers at one of the hosts, and keeps to its rules."""
    failures = []
    for host in hosts:
        try:
            if side.is_in_use:
                shake_hands(host, port, side.tls, timeout_s=TIMEOUT_S)
                told = f"answers at {host}:{port}; its rules are tried when {side.identity} is not connected"
                return [ok("broker", told)]
            rules = probe_rules(host, port, side.tls, fleet=side.fleet, identity=side.identity, timeout_s=TIMEOUT_S)
        except (BrokerError, NotJoinedError) as error:
            failures.append(str(error))
            continue
        return [ok("broker", f"{host}:{port} lets {side.identity} in"), *_rules(rules)]
    remedy = "see that the coordinator's broker runs, and that nothing blocks its port"
    return [problem("broker", told, remedy) for told in failures or ["it has no address"]]


def _rules(rules: BrokerRules) -> list[Finding]:
    remedy = "give the broker the fleet's rules; docs/reference/protocol.md has them"
    findings = []
    if rules.writes_as_others:
        findings.append(problem("broker", "it lets a device speak as another one", remedy))
    if rules.reads_others:
        findings.append(problem("broker", "it lets a device read what another one says", remedy))
    return findings or [ok("broker", "it refuses what a device says as another one")]


def _agent(root: Path, *, is_running: bool) -> Finding:
    if is_running:
        return ok("agent", "the agent runs")
    return warning("agent", "no agent runs", f"edgefl device start --state {root}, or its systemd unit")


def _certificate(state: DeviceState, now: float) -> Finding:
    try:
        cert, ca, key = state.cert.read_bytes(), state.ca.read_bytes(), state.key.read_bytes()
    except OSError as error:
        return problem("certificates", f"{error.filename} cannot be read: {error.strerror}", REJOIN)
    return check_certificate(
        "this device's certificate", cert, ca, key_pem=key, now=now, remedy=RENEW, renewed_by="its agent"
    )


def _version(hello: Hello) -> Finding:
    try:
        check_version(__version__, hello.version)
    except VersionError as error:
        return problem(
            "versions", str(error), "devices and coordinator need the same minor version, or a device the one before"
        )
    return ok("versions", f"the coordinator has edgefl {hello.version}, which fits")


def _shard_add(words: str) -> str:
    command = PROVISIONED.format if own_site().slots is not None else "edgefl {}".format
    return command(f"device shard add {words}")


def _shards(state: DeviceState) -> list[Finding]:
    shards = state.device.shards
    if not shards:
        return [warning("shards", "this device has no shard", _shard_add("TASK PATH"))]
    findings = []
    for task, path in shards.items():
        try:
            report = check_shard(make_task(task, {}), path)
        except (EdgeflError, OSError) as error:
            findings.append(problem("shards", f"{task}: {error}", _shard_add(f"{task} PATH")))
            continue
        missing = f"; none of the classes {', '.join(map(str, report.missing))}" if report.missing else ""
        findings.append(ok("shards", f"{task}: {report.num_examples} examples in {path}{missing}"))
    return findings
