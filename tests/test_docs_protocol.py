"""The page of the protocol describes what crosses the network as the code has it."""

import base64
import hashlib
import json
import ssl
import struct
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from fastapi.routing import APIRoute
from markdown_pages import code, page, part, rows, tables

from edgefl import __version__
from edgefl.compression import wire
from edgefl.compression.registry import LAYERS, LAYERS_ID, STAGES
from edgefl.coordinator import auth
from edgefl.coordinator.api.context import ApiContext
from edgefl.coordinator.api.server import make_routers
from edgefl.coordinator.brokers import broker, mqtt_service
from edgefl.coordinator.execution import admission, live_fleet, messaging
from edgefl.coordinator.execution.headers import (
    LINEAGE_KEY,
    MODEL_HASH_KEY,
    RECORD_KEY,
    RunIncarnations,
    create_instruction_header,
)
from edgefl.coordinator.execution.model_distribution import KEEP_MODEL, PREFETCHED_KEY, REPLY_ONLY
from edgefl.coordinator.fleet import presence
from edgefl.coordinator.flower import fleet_api, superlink
from edgefl.coordinator.rollouts import deployments, installations, service
from edgefl.core import protocol
from edgefl.core.clusters import CLUSTERS_KEY
from edgefl.core.config import OpenIdSettings, parse_run
from edgefl.core.protocol import JOB_LIMITS, Topic, peer_topic
from edgefl.core.sites import PARTIAL_SUMS_KEY, SITE_LIMITS_KEY
from edgefl.core.types import EvaluateInstruction, TrainConfig, TrainInstruction
from edgefl.device.diagnostics import json_log
from edgefl.device.flower import work_loop
from edgefl.device.inference import server
from edgefl.device.inference.deployments import ModelOffer
from edgefl.device.peers import collective_link, collective_messages, listener, peer_connection, sender
from edgefl.device.peers.peer_connection import PeerTimeouts
from edgefl.device.rollouts import download
from edgefl.device.rollouts.client import RolloutReport
from edgefl.engine.assembly.build import build_run
from edgefl.strategies.peer_algorithms import collectives
from edgefl.tasks.adaptation.base_file import MAX_BASE_BYTES

PROTOCOL = page("protocol")


def test_the_page_describes_every_topic_with_its_writer_quality_and_fields():
    messages = {
        Topic.STATUS: protocol.StatusMessage, Topic.HEARTBEAT: protocol.Heartbeat,
        Topic.CAPABILITIES: protocol.Capabilities, Topic.PROGRESS: protocol.ProgressReport,
        Topic.COMMAND: protocol.Command, Topic.ANSWER: protocol.CommandReply,
    }  # fmt: skip
    told = {code(row[0])[0]: row for row in rows(part(PROTOCOL, "MQTT")) if len(row) == 5}
    assert told.pop(f"{protocol.PEER}/OTHER")[2:4] == ["1", "yes"]
    assert set(told) == set(Topic)
    for topic, (_, writer, quality, retained, said) in told.items():
        assert writer.startswith("device") == (topic in protocol.FROM_DEVICE), topic
        assert int(quality) == {**mqtt_service.QOS, Topic.WAKEUP: 0, Topic.COMMAND: 1}[Topic(topic)], topic
        assert retained == ("yes" if topic in {"status", "capabilities"} else "no"), topic
        if topic in messages:
            known = {item.name for item in fields(messages[Topic(topic)])}
            assert known <= set(code(said)), topic
    for kind in protocol.CommandKind:
        assert f"`{kind}`" in part(PROTOCOL, "MQTT"), kind


def test_the_page_gives_the_rules_as_our_own_mosquitto_has_them():
    assert f"```\n{broker.render_acl_file('FLEET')}```\n" in part(PROTOCOL, "MQTT")
    assert f"`{peer_topic('FLEET', 'SENDER', 'RECEIVER')}`" in part(PROTOCOL, "From device to device")
    assert f"`{peer_topic('FLEET', '+', 'RECEIVER')}`" in part(PROTOCOL, "From device to device")


def guard():
    """Stands for a guard of routes, which nobody calls here."""
    return lambda: None


viewer, operator, admin, device = guard(), guard(), guard(), guard()
KIND_OF_MODEL, KIND_OF_BUNDLE = (
    SimpleNamespace(repository=None, artefact=kind.artefact, request=kind.request)
    for kind in (deployments.Deployments, installations.Installations)
)


def served():
    """Every route of the HTTPS port, and who may call it."""
    # The routes are looked at, not called, so nothing has to stand behind them.
    context = SimpleNamespace(**dict.fromkeys(item.name for item in fields(ApiContext)))
    context.viewer, context.operator, context.admin, context.device = viewer, operator, admin, device
    context.signer = device
    openid = OpenIdSettings(issuer="https://id.example", client_id="c", admins=("a@b.c",))
    context.directory = SimpleNamespace(models=None, openid=openid, port=8000)
    context.clients = SimpleNamespace(
        deployments=SimpleNamespace(name="deployment", kind=KIND_OF_MODEL),
        installations=SimpleNamespace(name="installation", kind=KIND_OF_BUNDLE),
        bundle_store=None, run_scheduler=None,
    )  # fmt: skip
    found = {f"POST /v1/fleet/{name}": "device" for name in superlink._HANDLERS}
    for route in (route for router in make_routers(context) for route in router.routes):
        assert isinstance(route, APIRoute)
        guards = [item.dependency for item in route.dependencies]
        known = {admin: "admin", operator: "operator", viewer: "viewer", device: "device"}
        who = next((name for guard, name in known.items() if guard in guards), "anyone")
        found |= {f"{method} {route.path}": who for method in route.methods or ()}
    return found


def test_the_page_lists_what_a_device_reports_of_an_installation():
    (reports,) = tables(part(PROTOCOL, "Installations"))
    told = {name: cells[1] for cells in reports for name in code(cells[0])}
    assert set(told) == {item.name for item in fields(RolloutReport)} - {
        "accuracy",
        "former_accuracy",
        "num_examples",
    }
    assert set(code(told["state"])) == {
        *installations.Installations.states_in_progress,
        *installations.Installations.reports,
    }


def test_the_page_lists_every_route_and_who_may_call_it():
    told = {name: row[1] for row in rows(part(PROTOCOL, "HTTPS")) for name in code(row[0]) if " /" in name}
    assert told == served()
    room = Path(fleet_api.__file__).parents[1]
    routers = {path.stem for path in room.rglob("*.py") if "APIRouter(" in path.read_text()}
    assert routers == {
        "dashboard", "devices", "enrolment_service", "runs", "server", "sign_in", "split",
    }  # fmt: skip


def test_the_page_lists_every_status_that_an_error_can_have():
    told = {int(row[0]) for row in rows(part(PROTOCOL, "HTTPS")) if row[0].isdigit()}
    assert told == {*auth.STATUS_BY_ERROR.values(), 422}


def test_the_page_describes_every_key_of_an_offer_and_of_what_a_device_says_of_it():
    offers, reports = tables(part(PROTOCOL, "Deployments"))
    offer = {item.name for item in fields(ModelOffer)} - {"num_bytes"} | {"deployment", "bytes"}
    assert {name for row in offers for name in code(row[0])} == offer
    report = {item.name for item in fields(RolloutReport)} | {"runs"}
    assert {name for row in reports for name in code(row[0])} == report
    (states,) = [set(code(row[1])) for row in reports if row[0] == "`state`"]
    assert states == {*deployments.Deployments.states_in_progress, *deployments.Deployments.reports}


def test_the_page_describes_every_key_of_an_instruction_and_no_other():
    instructions, *_ = tables(part(PROTOCOL, "Work"))
    plan = TrainConfig(iterations=1, options={"a": 1})
    order = TrainInstruction(assignment_id="a1", device_id="d1", base_version=0, plan=plan, block=0)
    # What the downlink adds.
    of_model = {**KEEP_MODEL, "base_version": 0, **REPLY_ONLY, "messages": [], PREFETCHED_KEY: 0}
    of_model[protocol.IGNORES_REPLY_KEY] = True
    told_order = {**create_instruction_header(RunIncarnations("r1"), order), **of_model}
    of_store = {LINEAGE_KEY, RECORD_KEY, MODEL_HASH_KEY, "split", protocol.ADAPT_KEY, protocol.PERSONAL_KEY}
    of_store |= {CLUSTERS_KEY, protocol.PRIVACY_KEY, protocol.CONDITIONS_KEY, protocol.SLICES_KEY}
    of_store |= {protocol.METERED_KEY, PARTIAL_SUMS_KEY, SITE_LIMITS_KEY, protocol.SECURE_KEY}
    of_store |= {protocol.SPARSE_KEY, protocol.APP_CODING_KEY}
    sent = {
        **build_run(parse_run({"run": {"task": "digits"}, "strategy": {"name": "fltrust"}}), "r1").header,
        **told_order,
        JOB_LIMITS: {},
    }
    assert {name for row in instructions for name in code(row[0])} == set(sent) | of_store
    (told,) = [code(row[1]) for row in instructions if row[0] == "`plan`"]
    assert set(told) - {"train"} == {item.name for item in fields(TrainConfig)} - {"messages"}
    evaluation = EvaluateInstruction(assignment_id="e1", device_id="d1", version=0, round=0)
    only_train = {row[0].strip("`") for row in instructions if row[1].startswith("`train` only")}
    assert only_train == set(told_order) - set(create_instruction_header(RunIncarnations("r1"), evaluation))


def ask(door, path, body=None):
    """One request over TLS that is checked against the fleet's CA alone."""
    context = ssl.create_default_context(cafile=str(door.directory.ca_cert))
    with httpx.Client(base_url=f"https://{door.address}", verify=context, trust_env=False) as client:
        return client.get(path) if body is None else client.post(path, json={"v": 1, **body})


def test_a_board_that_does_what_protocol_md_says_has_joined(front_door):
    text = front_door.token().text().removeprefix("efl1.")
    raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    assert raw[:3] == hashlib.sha256(raw[3:]).digest()[:3]
    fingerprint, token_id, secret, fleet, addresses = json.loads(raw[3:])
    ca = x509.load_pem_x509_certificate(ask(front_door, "/edgefl/v1/ca").content).public_key()
    spki = ca.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert (fingerprint, addresses) == (hashlib.sha256(spki).hexdigest(), [front_door.address])
    said = {name for row in rows(part(PROTOCOL, "Joining")) for name in code(row[0])}
    key = ec.generate_private_key(ec.SECP256R1())
    request = {
        "token_id": token_id,
        "secret": secret,
        "name": "pi-07",
        "role": "trainer",
        "csr": pem(x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())),
        "public_key": key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode(),
        "capabilities": {"facts": {"cores": 4}, "shards": {"digits": 12}},
        "version": __version__,
    }
    assert set(request) == said
    for name in said - {"capabilities"}:
        assert ask(front_door, "/edgefl/v1/enroll", {**request, name: ""}).status_code == 400, name
    answer = ask(front_door, "/edgefl/v1/enroll", request).json()
    assert set(answer) == {"v", "device_id", "role", "certificate", "fleet", "addresses", "broker"}
    assert (answer["fleet"], answer["device_id"], set(answer["broker"])) == (fleet, "pi-07", {"port", "host"})
    (subject,) = x509.load_pem_x509_certificate(answer["certificate"].encode()).subject
    assert subject.value == "pi-07"


def pem(request):
    return request.public_bytes(Encoding.PEM).decode()


def test_the_page_names_every_field_of_a_hello(front_door):
    (answer,) = [row[3] for row in rows(part(PROTOCOL, "HTTPS")) if row[0] == "`GET /edgefl/v1/hello`"]
    assert set(code(answer)) == set(ask(front_door, "/edgefl/v1/hello").json()) - {"v"}


def test_the_page_describes_the_header_and_the_stages_of_a_codec_body():
    header, stages = [], {}
    for row in rows(part(PROTOCOL, "A codec body")):
        if row[0].isdigit() and code(row[1]):
            stages |= dict.fromkeys(code(row[1]), int(row[0]))
        elif row[0].isdigit() and row[1].isdigit():
            header.append((int(row[0]), int(row[1])))
    assert [offset for offset, _ in header] == [sum(size for _, size in header[:n]) for n in range(len(header))]
    assert sum(size for _, size in header) == wire._FIXED_HEADER.size
    assert stages == {LAYERS: LAYERS_ID, **{name: number for name, (number, _) in STAGES.items()}}
    assert f"`{wire.MAGIC.decode()}`" in PROTOCOL


def test_the_page_describes_the_frames_from_board_to_board():
    header, kinds = tables(part(PROTOCOL, "From board to board"))
    places = [(int(offset), int(size)) for offset, size, _ in header]
    assert [offset for offset, _ in places] == [sum(size for _, size in places[:n]) for n in range(len(places))]
    assert [size for _, size in places] == [struct.calcsize(f"<{code}") for code in ("4s", *"HHIQQ")]
    assert peer_connection.HEADER.format == "<4sHHIQQ"
    assert code(header[0][2]) == [peer_connection.MAGIC.decode()]
    assert header[1][2] == f"frame version, {peer_connection.FRAME_VERSION}"
    told = {code(name)[0]: int(number) for number, name, _, _ in kinds}
    assert told == {kind.name: kind.value for kind in peer_connection.FrameKind}


def test_the_page_describes_the_messages_between_members_of_a_collective():
    (header,) = tables(part(PROTOCOL, "Between members of a collective"))
    places = [(int(offset), int(size)) for offset, size, _ in header]
    assert [offset for offset, _ in places] == [sum(size for _, size in places[:n]) for n in range(len(places))]
    assert sum(size for _, size in places) == collective_messages.HEADER.size
    assert [size for _, size in places] == [struct.calcsize(f"<{code}") for code in ("16s", "8s", *"BIIQ")]
    assert collective_messages.HEADER.format == "<16s8sBIIQ"


NUMBERS = {
    "Between members of a collective": [
        f"up to {collectives.CHUNK_BYTES // 1024} KiB of floats",
        f"out of reach for {collective_link.LOST_S:g} s",
        f"it has {collective_link.FIRST_S:g} s",
    ],
    "From board to board": [
        f"up to {(protocol.MAX_PEER_BYTES + 1024) // 2**20} MiB less 1 KiB",
        f"after {PeerTimeouts().keep_alive_s:g} s without a message",
        f"after {PeerTimeouts().idle_timeout_s:g} s without a sign of life",
        f"at {peer_connection.MIN_BYTES_PER_S // 1024} KiB/s",
        f"up to {PeerTimeouts().max_backoff_s:g} s apart",
        f"the newest {listener.MAX_UNAUTHENTICATED}.",
        f"up to {sender.MAX_QUEUED_REPLIES} of them wait",
    ],
    "Limits": [
        f"{protocol.MAX_JSON_BYTES // 1024} KiB",
        f"{broker.MAX_MESSAGE_BYTES // 2**20} MiB",
        f"| {(protocol.MAX_PEER_BYTES + 1024) // 2**20} MiB less 1 KiB",
        f"all others together | {protocol.MAX_RETAINED_PEER_BYTES // 2**20} MiB",
        f"a reply of a device, in pieces | {protocol.MAX_BODY_BYTES // 2**20} MiB",
        f"split network | {protocol.MAX_SPLIT_BYTES // 2**20} MiB",
        f"base that a device fetches | {MAX_BASE_BYTES // 2**30} GiB",
        f"a request to `/v1/fleet/` | {protocol.MAX_REQUEST_BYTES // 2**20} MiB",
        f"codec body | {wire.MAX_PAYLOAD_BYTES // 2**20} MiB",
        f"{wire.MAX_TENSORS // 1000} {wire.MAX_TENSORS % 1000}",
        f"{wire.MAX_NAME_BYTES} bytes",
        f"{protocol.MAX_TOKEN_CHARS} characters",
        f"{live_fleet.EVALUATION_DEADLINE_S:g} s",
        f"log | {json_log.PAGE_BYTES // 1024} KiB",
        f"{json_log.MAX_MESSAGE_CHARS} characters",
        f"{1 + json_log.MAX_OLD_FILES} files of {json_log.MAX_FILE_BYTES // 1024} KiB",
        f"question | {messaging.REPLY_TIMEOUT_S:g} s",
        f"{live_fleet.MAX_REASON_CHARS} characters",
        f"deploys | {protocol.MAX_MODEL_BYTES // 2**20} MiB",
        f"`edgefl device serve` | {server.MAX_BODY_BYTES // 2**20} MiB",
    ],
    "Work": [
        f"after {admission.HEARTBEAT_REQUEST_AFTER_S:g} s is sent the command `heartbeat`",
        f"{protocol.INLINE_BODY_BYTES // 1024} KiB",
        f"{protocol.CHUNK_BYTES // 2**20} MiB",
        f"{protocol.REPLY_SALT_BYTES} bytes",
        f"{messaging.RESEND_AFTER_S:g} s ago",
    ],
    "Deployments": [
        f"leave {download.MIN_FREE_BYTES // 2**20} MiB",
        f"every {service.RESEND_AFTER_S:g} s",
    ],
    "MQTT": [
        f"every {protocol.HEARTBEAT_S:g} s ± {protocol.HEARTBEAT_JITTER:.0%}".replace("%", " %"),
        f"at most {protocol.POLL_S:g} s",
        f"pulls {work_loop.INITIAL_DISCONNECTED_S:g} s after",
        f"every {work_loop.MAX_DISCONNECTED_S:g} s at the",
    ],
    "Presence": [
        f"another {presence.PresenceTracker()._gone_after_will_s:g} s",
        f"({presence.PresenceTracker()._late_after_s:g} s)",
        f"({presence.PresenceTracker()._gone_after_s:g} s)",
    ],
}


@pytest.mark.parametrize("heading", NUMBERS)
def test_a_number_of_the_page_is_the_code_s(heading):
    text = " ".join(part(PROTOCOL, heading).split())
    assert [said for said in NUMBERS[heading] if said not in text] == []
