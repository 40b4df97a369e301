"""Wire protocol besides tensors: MQTT topics, JSON messages, Flower record keys, versions.

Every JSON object carries `"v": 1`; unknown fields are ignored, so that a newer peer can add some. A message
that does not parse raises `NetworkError`; the receiver counts it, logs it once a minute and drops it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

from edgefl import DISTRIBUTION
from edgefl.core.errors import EdgeflError, NetworkError, TokenInvalidError, UsageError, VersionError
from edgefl.core.safe_parsing import SHA256, check_nesting, parse_json, parse_message
from edgefl.core.safe_text import escape_text
from edgefl.core.types import Json, ModelSpec

if TYPE_CHECKING:
    from cryptography import x509

PROTOCOL_VERSION = 1
INSTRUCTION_VERSION = 2
"""Version of the headers of instructions and replies, and of messages between devices."""
MAX_JSON_BYTES = 64 * 1024
MAX_FACTS_BYTES = 16 * 1024
MAX_FACTS_DEPTH = 8
"""Nesting limit of a device's reported facts, which are in every checkpoint: so they are small and shallow."""
INLINE_BODY_BYTES = 256 * 1024
"""Bodies up to this size travel inside the message (two requests a round), larger ones as chunks."""
CHUNK_BYTES = 8 * 1024 * 1024
JOB_LIMITS, JOB_LOG = "job", "log"
"""Keys of a job: of instructions, with `num_parts`, `max_part_bytes`, `deadline_s`; of replies, a list of lines."""
MAX_JOB_LOG_LINES, MAX_JOB_LOG_CHARS = 100, 300
"""Of one part."""
REPLY_SALT_BYTES = 16
"""Unique bytes at the start of every chunk of a reply: equal chunks would be one object."""
PERSONAL_KEY = "has_personal"
"""Entry of an instruction: true where devices have personal copies of the model."""
ADAPT_KEY = "adapt"
"""Key in the header of instructions: what of the model is trained, and the base that it is trained on."""
COMPILED_KEY, FOR_ALL_KEY = "compiled", "is_for_all"
"""Key in the header of instructions, the file by which boards train without torch; in it, whether all boards do."""
TORCH, ONNX, NUMPY = "torch", "onnx", "numpy"
"""What a board trains with."""
PRIVACY_KEY, EXAMPLE_UNIT = "privacy", "example"
"""In the header of a run with private examples, whose plans have the settings under the same key."""
SECURE_KEY = "secure"
"""In the header of a run with secure aggregation, true; in the plan of an instruction that is a step of it."""
APP_CODING_KEY = "app_coding"
"""In the header of a Flower app's run with `ef` or `[compression] down`, true; in a board's facts: that it can."""
SPARSE_KEY = "sparse_graph"
"""In the header of a run with `secure_aggregation.graph = "sparse"`, true; in a board's facts: that it can."""
CONDITIONS_KEY = "conditions"
"""Key in the header of instructions: `[conditions]` of the run file; in a board's facts: that it knows them."""
SLICES_KEY = "slices"
"""Key in the header of instructions, true: updates are sent in parts; in a board's facts: that it can."""
QUERIES_KEY = "queries"
"""In a board's facts: that it waits for the answers to its progress reports where a plan says so."""
ANSWER_TIMEOUT_S = 1.0
"""Longest wait for the answer to such a report, once per assignment; then the fallback of its plan holds."""
BASE_TRAFFIC_KEY = "base_bytes"
"""Key in the header of answers: bytes of base and compiled task that the device has fetched meanwhile."""
METERED_KEY = "metered"
"""Key in the header of instructions: heartbeats tell whether the board's connection is metered. Of a question and its
answer, too."""
BASES_PATH = "/edgefl/v1/bases"
MAX_BODY_BYTES = 512 * 1024 * 1024
"""Maximum size of a reply's body, in bytes, sent in chunks."""
MAX_REQUEST_BYTES = 4 * 1024 * 1024
"""Maximum size of another request to the Fleet API: a header, a small body, the names of the chunks."""
PEER_PORT = 8884
"""Default port on which a device listens for its neighbours."""
MAX_PEER_BYTES = 16 * 1024 * 1024 - 1024
"""Maximum size of a device-to-device message, in bytes: with its MQTT headers it fits brokers' packet limits."""
MAX_MODEL_BYTES = 512 * 1024 * 1024
"""Maximum size of a model file that a device fetches to deploy it."""
BUNDLES_PATH = "/edgefl/v1/bundles"
"""Upload path of releases and task packs."""
SPLIT_PATH = "/edgefl/v1/split"
"""Path of the batches of a network that is cut."""
MAX_SPLIT_BYTES = 64 * 1024 * 1024
"""Maximum size of a batch of such a network, either way."""
HANDED_BACK_KEY = "handed_back"
"""Of a reply beside `error`: why the board may not train now, as in a heartbeat's `blocked`."""
ALLOWANCE_KEY = "allowance"
"""Of a reply: what hours and budgets allow afterwards, as in a heartbeat."""
IGNORES_REPLY_KEY = "ignores_reply"
"""Of an instruction: a finished answer to it on the device is worth nothing; it trains anew."""
SPLIT_LABEL_BYTES = 4
"""A label before a batch's activations: int32, little-endian."""
SPLIT_LOSS_BYTES = 8
"""The loss before the gradient of a batch's activations: float64, little-endian."""
MAX_RETAINED_PEER_BYTES = 64 * 1024 * 1024
"""Maximum of retained messages of a device over all its receivers, in bytes."""

HEARTBEAT_S = 5.0
HEARTBEAT_JITTER = 0.1
LATE_AFTER_HEARTBEATS = 2
GONE_AFTER_HEARTBEATS = 3
MAX_THROTTLED_CHARS = 100
"""Of what a board says throttles it; all words together have 64."""
POLL_S = 30.0
"""Interval at which a device polls for work without a wake-up."""

INSTANCE_HEADER = "edgefl-instance"
"""Id of a device's agent process: new with every start, and never on disk."""
STAMP_HEADER = "edgefl-stamp"
"""Sent with every answer to a device and repeated in its next request, which proves that the process is alive."""
KEY_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER = "flwr-public-key", "flwr-timestamp", "flwr-signature"
"""Public key (PEM) and signature in base64, and time (ISO 8601) of a device's request; named as Flower does."""
NONCE_HEADER = "edgefl-nonce"
"""Signer and number of a device's request: `parse_nonce`."""
BODY_HASH_HEADER = "edgefl-body-sha256"
"""SHA-256 of a device's request body, 64 hexadecimal digits; sent ahead, so that headers are verified first.

That of a request that pushes an object is `compute_push_hash`."""
SIGNED_HEADERS = (TIMESTAMP_HEADER, NONCE_HEADER, BODY_HASH_HEADER, INSTANCE_HEADER, STAMP_HEADER)
SIGNATURE_VERSION = 2
"""Version of what a device's signature covers; the first, Flower's, covered the timestamp alone."""
CLONED_STATUS = 409
"""Status of the answer to an agent whose identity another agent uses."""

RECORD_HEADER = "header"
RECORD_BODY = "body"
FIELD_JSON = "json"
FIELD_BYTES = "bytes"

COORDINATOR_NAME = "coordinator"
EVALUATOR_NAME = "coordinator-evaluator"
RESERVED_NAMES = frozenset({COORDINATOR_NAME})

_NONCE = re.compile(r"([0-9a-f]{16})-([0-9]{1,15})\Z", re.ASCII)
_SLUG = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\Z")

PEER = "peer"

_NONE = type(None)
_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "bool | None": (bool, _NONE),
    "str | None": (str, _NONE),
    "int | None": (int, _NONE),
    "float | None": (int, float, _NONE),
    "list[str]": (list,),
    "Json": (dict,),
    "Json | None": (dict, _NONE),
}

JOIN_TOKEN_VARIABLE = "EDGEFL_JOIN_TOKEN"  # noqa: S105 its name, no secret
"""Environment variable of a join token: other users of a machine do not see it, unlike arguments."""
TOKEN_PREFIX = "efl1."  # noqa: S105 the format's mark, no secret
MAX_TOKEN_CHARS = 4096
_ADDRESS = re.compile(r"(?:\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})\Z")


def select_backend(backends: Collection[str], compiled: Mapping[str, Any] | None, *, needs_torch: bool) -> str | None:
    """Returns what a board trains a task with; None where it cannot.

    Args:
        backends: that the board has, and has the memory for.
        compiled: of the instruction's header; None where the task was not compiled.
        needs_torch: whether the task's model is one of torch.
    """
    if not needs_torch:
        return NUMPY if NUMPY in backends else None
    if compiled is None:
        return TORCH if TORCH in backends else None
    if ONNX in backends and (compiled.get(FOR_ALL_KEY) or TORCH not in backends):
        return ONNX
    return TORCH if TORCH in backends and not compiled.get(FOR_ALL_KEY) else None


def validate_slug(text: str, what: str = "device name") -> str:
    """Returns `text` if it is a valid device or fleet id.

    Raises:
        UsageError: it is not 1 to 63 of a-z, 0-9 and inner hyphens.
    """
    if not is_slug(text):
        raise UsageError(
            f"{what} must be 1 to 63 of a-z, 0-9 and '-' and start and end with a letter or digit, got {text!r}"
        )
    return text


def is_slug(text: str) -> bool:
    """Returns whether `text` is a valid device or fleet id."""
    return _SLUG.match(text) is not None


class Topic(StrEnum):
    STATUS = "status"
    HEARTBEAT = "heartbeat"
    CAPABILITIES = "capabilities"
    WAKEUP = "wakeup"
    COMMAND = "command"
    PROGRESS = "progress"
    ANSWER = "answer"


FROM_DEVICE = (Topic.STATUS, Topic.HEARTBEAT, Topic.CAPABILITIES, Topic.PROGRESS, Topic.ANSWER)
TO_DEVICE = (Topic.WAKEUP, Topic.COMMAND)


def topic(fleet: str, device_id: str, kind: Topic) -> str:
    return f"edgefl/v1/{fleet}/{device_id}/{kind}"


def parse_topic(name: str) -> tuple[str, str, Topic]:
    """Returns fleet, device id and kind.

    Raises:
        NetworkError: not an edgefl topic.
    """
    parts = name.split("/")
    if len(parts) != 5 or parts[:2] != ["edgefl", "v1"] or parts[4] not in set(Topic):
        raise NetworkError(f"not an edgefl topic: {name!r}")
    return parts[2], parts[3], Topic(parts[4])


def peer_topic(fleet: str, sender: str, receiver: str) -> str:
    """Returns the topic of messages from `sender` to `receiver`; as a filter, `+` matches any device."""
    return f"edgefl/v1/{fleet}/{sender}/{PEER}/{receiver}"


def parse_peer_topic(name: str) -> tuple[str, str, str]:
    """Returns fleet, sender and receiver.

    Raises:
        NetworkError: not a device-to-device topic.
    """
    parts = name.split("/")
    if len(parts) != 6 or parts[:2] != ["edgefl", "v1"] or parts[4] != PEER:
        raise NetworkError(f"not an edgefl topic from device to device: {name!r}")
    fleet, sender, receiver = parts[2], parts[3], parts[5]
    if not (is_slug(fleet) and is_slug(sender) and is_slug(receiver)):
        raise NetworkError(f"not an edgefl topic from device to device: {name!r} holds what is no name")
    return fleet, sender, receiver


def dump_json(value: Mapping[str, Any]) -> bytes:
    """Returns compact UTF-8 JSON with the protocol version."""
    return json.dumps({"v": PROTOCOL_VERSION, **value}, separators=(",", ":"), allow_nan=False).encode()


def load_json(payload: bytes) -> Json:
    """Returns the object in `payload`.

    Lone surrogates and NULs, which no other text can carry on, are removed.

    Raises:
        NetworkError: too large, not UTF-8, not a JSON object, of another protocol version, or with a number that
            is NaN or has more than 64 bits.
    """
    if len(payload) > MAX_JSON_BYTES:
        raise NetworkError(f"message of {len(payload)} bytes, at most {MAX_JSON_BYTES} are read")
    try:
        value = parse_message(payload)
    except ValueError as error:
        raise NetworkError(f"message is not JSON: {error}") from None
    if not isinstance(value, dict) or value.get("v") != PROTOCOL_VERSION:
        raise NetworkError(f"message is not an edgefl v{PROTOCOL_VERSION} object")
    return value


NEXT_MODEL_HASH_KEY = "next_model_sha256"
"""Key of a reply: SHA-256 of the whole model that a member of a collective holds after its round, as `dense`."""


def check_facts(facts: Json, shards: Json) -> None:
    """Checks the size and depth of a device's reported facts, by MQTT or at its join.

    Raises:
        NetworkError: one is nested deeper than `MAX_FACTS_DEPTH`, or has more than `MAX_FACTS_BYTES` as JSON.
    """
    for what, facts_part in {"facts": facts, "shards": shards}.items():
        try:
            check_nesting(facts_part, max_depth=MAX_FACTS_DEPTH)
        except ValueError as error:
            raise NetworkError(f"malformed capabilities: {what} cannot be kept: {error}") from None
        num_bytes = len(json.dumps(facts_part, separators=(",", ":")))
        if num_bytes > MAX_FACTS_BYTES:
            raise NetworkError(
                f"malformed capabilities: {what} have {num_bytes} bytes, at most {MAX_FACTS_BYTES} are kept"
            )


def make_signed_request(method: str, target: str, headers: Mapping[str, str]) -> bytes:
    """Returns what a device signs of a request; `target` is the path with the query, as they are sent."""
    values = (headers.get(name, "") for name in SIGNED_HEADERS)
    return "\n".join((f"edgefl-request {SIGNATURE_VERSION}", method, target, *values)).encode()


def compute_push_hash(request: Any) -> str:
    """Returns the value of `BODY_HASH_HEADER` for Flower's `PushObjectRequest`: SHA-256 of the JSON list of its ids.

    The content is covered by its id, which is the SHA-256 of the content: the receiver has to compute that anyway.
    """
    ids = [request.node.node_id, request.run_id, request.session_id, request.object_id]
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def parse_nonce(nonce: str) -> tuple[str, int]:
    """Returns signer and number of a nonce: 16 hexadecimal digits, chosen at random by each signer, `-`, a number.

    Raises:
        ValueError: malformed.
    """
    match = _NONCE.match(nonce)
    if match is None:
        raise ValueError(f"no nonce: {nonce!r:.60}")
    return match[1], int(match[2])


def finite_or_none(value: object) -> float | None:
    """Returns `value` as a finite float, or None."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


class _Message:
    """JSON serialisation of the dataclasses below: unknown fields are ignored, types are checked."""

    def dump(self) -> bytes:
        return dump_json({k: v for k, v in asdict(self).items() if v is not None})  # type: ignore[call-overload]

    @classmethod
    def load(cls, payload: bytes) -> Self:
        value = load_json(payload)
        field_names = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
        values = {name: value[name] for name in field_names if value.get(name) is not None}
        try:
            message = cls(**values)
        except TypeError as error:
            raise NetworkError(f"malformed {cls.__name__.lower()}: {error}") from None
        message._check()
        return message

    def _check(self) -> None:
        for name, annotation in self.__annotations__.items():
            value, kinds = getattr(self, name), _KINDS[str(annotation)]
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise NetworkError(
                    f"malformed {type(self).__name__.lower()}: {name} is {value!r}, expected {annotation}"
                )


class PresenceState(StrEnum):
    ONLINE = "online"
    OFFLINE = "offline"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusMessage(_Message):
    """`status`, retained, and the last will; `session_no` grows with every connection of a device.

    `will` marks a broken connection; a regular disconnect is `offline` too. `boot_id` is new with every start of
    the agent, `board` a hash that identifies the board.
    """

    state: str
    boot_id: str
    session_no: int
    version: str = ""
    will: bool = False
    board: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(_Message):
    """`heartbeat`: hardware telemetry of a board, every five seconds; fractions lie in 0-1.

    `model` is the SHA-256 of the deployed model that it runs, `deployment` the result of the last deployment,
    `installation` that of the last release or task pack; `boot_id` is that of the status; `blocked` is why it may not
    train now (`kind`, `reason`, `free_at_s`, `run` where it is that run's condition), `allowance` what its hours and
    budgets allow where it may; `metered` is whether its connection is metered, where a run asks for that.
    """

    seq: int
    session_no: int
    uptime_s: float
    clock_skew_s: float | None = None
    temperature_c: float | None = None
    throttled: str | None = None
    cpu_fraction: float | None = None
    memory_fraction: float | None = None
    memory_bytes: int | None = None
    disk_free_bytes: int | None = None
    battery_fraction: float | None = None
    power_w: float | None = None
    run: str | None = None
    assignment: str | None = None
    iteration: int | None = None
    holding: list[str] = field(default_factory=list)
    model: str | None = None
    deployment: Json | None = None
    installation: Json | None = None
    boot_id: str | None = None
    blocked: Json | None = None
    allowance: Json | None = None
    metered: bool | None = None

    def _check(self) -> None:
        # As in `Capabilities`.
        super(Heartbeat, self)._check()
        if self.throttled is not None and len(self.throttled) > MAX_THROTTLED_CHARS:
            raise NetworkError(
                f"malformed heartbeat: throttled has {len(self.throttled)} characters, "
                f"at most {MAX_THROTTLED_CHARS} are kept"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities(_Message):
    """`capabilities`, retained: the result of `edgefl device probe`; `shards` maps a task to its example count."""

    facts: Json
    shards: Json = field(default_factory=dict)

    def _check(self) -> None:
        # `slots=True` makes a new class, so a bare `super()` would find the wrong one.
        super(Capabilities, self)._check()
        check_facts(self.facts, self.shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressReport(_Message):
    """`progress`: seconds per iteration and the age of the last finished iteration."""

    assignment: str
    iteration: int
    seconds_per_iteration: float
    age_s: float = 0.0


class CommandKind(StrEnum):
    DRAIN = "drain"
    RESUME = "resume"
    FINISH_EARLY = "finish-early"
    CONTINUE = "continue"
    END = "end"
    RELOAD = "reload"
    LOG_LEVEL = "log-level"
    DEPLOY = "deploy"
    ROLLBACK = "rollback"
    INSTALL = "install"
    HEARTBEAT = "heartbeat"
    LOGS = "logs"
    RENEW = "renew"
    LOCKOUT = "lockout"
    CONDITIONS = "conditions"


class ReadinessPhase(StrEnum):
    """Readiness phases before a run begins: *can* (requirements met), then *prepare*."""

    CAN = "can"
    PREPARE = "prepare"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command(_Message):
    """`command`: idempotent by `id`.

    `argument` is an assignment id (with `continue` its iteration too, after a space), a run id (`end`), a log level,
    a deployment id (`deploy` and `rollback`), an installation id (`install`), or JSON (`logs`, `lockout`,
    `conditions`).
    """

    id: str
    kind: str
    argument: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandReply(_Message):
    """`answer`: a device's reply to the command of this id; `error` replaces `content` on failure."""

    id: str
    content: Json = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinToken:
    """A join token: the CA to trust, the coordinator's addresses, and the secret that admits a device.

    `ca_fingerprint` is the SHA-256 of the CA's public key (64 hexadecimal digits), `addresses` are HOST:PORT in the
    order in which they are tried. The secret stays out of the repr.
    """

    ca_fingerprint: str
    token_id: str
    secret: str = field(repr=False)
    fleet: str
    addresses: tuple[str, ...] = ()

    def text(self) -> str:
        value = [self.ca_fingerprint, self.token_id, self.secret, self.fleet, list(self.addresses)]
        body = json.dumps(value, separators=(",", ":")).encode()
        # Three bytes of checksum distinguish a truncated paste from a token unknown to the coordinator.
        return TOKEN_PREFIX + base64.urlsafe_b64encode(hashlib.sha256(body).digest()[:3] + body).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the token in `text`; white space from line breaks in a paste does not matter.

        Raises:
            TokenInvalidError: not a token, or only a part of one.
        """
        encoded = "".join(text.split())
        if not encoded.startswith(TOKEN_PREFIX) or len(encoded) > MAX_TOKEN_CHARS:
            raise TokenInvalidError(f"a join token starts with {TOKEN_PREFIX!r}, got {encoded[:5]!r}; copy it whole")
        encoded = encoded.removeprefix(TOKEN_PREFIX)
        try:
            raw = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
            is_valid = hashlib.sha256(raw[3:]).digest()[:3] == raw[:3]
            value = parse_json(raw[3:]) if is_valid else None
        except ValueError:
            value = None
        if not isinstance(value, list) or len(value) < 5:
            raise TokenInvalidError(
                f"the join token is damaged ({len(encoded)} characters after {TOKEN_PREFIX!r}); copy it whole"
            )
        return cls._validated(*value[:5])

    @classmethod
    def _validated(cls, ca: object, token_id: object, secret: object, fleet: object, addresses: object) -> Self:
        strings = [item for item in (ca, token_id, secret, fleet) if isinstance(item, str) and item]
        hosts = [item for item in addresses if isinstance(item, str)] if isinstance(addresses, list) else []
        if len(strings) != 4 or not SHA256.match(strings[0]) or not _SLUG.match(strings[3]):
            raise TokenInvalidError(
                "the join token's content makes no sense; make a new one: edgefl coordinator token"
            )
        try:
            host_addresses = tuple(validate_address(host) for host in hosts)
        except UsageError as error:
            raise TokenInvalidError(f"the join token's content makes no sense: {error}") from None
        return cls(
            ca_fingerprint=strings[0],
            token_id=strings[1],
            secret=strings[2],
            fleet=strings[3],
            addresses=host_addresses,
        )


def validate_address(text: str, default_port: int | None = None) -> str:
    """Returns `text` as HOST:PORT (an IPv6 address in brackets), with the default port where it has none.

    Raises:
        UsageError: not an address.
    """
    if default_port is not None and not re.search(r"[^:]:[0-9]+\Z|\]:[0-9]+\Z", text):
        bare_v6 = text.count(":") > 1 and not text.startswith("[")
        text = f"[{text}]:{default_port}" if bare_v6 else f"{text}:{default_port}"
    match = _ADDRESS.match(text)
    if not match or not 0 < int(match[1]) < 65536:
        raise UsageError(f"an address must be HOST:PORT with a port from 1 to 65535, got {text!r}")
    return text


def host_and_port(address: str) -> tuple[str, int]:
    """Returns the two parts of HOST:PORT; an IPv6 address without its brackets.

    Raises:
        UsageError: not an address.
    """
    host, _, port = validate_address(address).rpartition(":")
    return host.strip("[]"), int(port)


def single_certificate(pem: bytes) -> bytes:
    """Returns the first PEM certificate of a text and drops the rest, which is not verified.

    Raises:
        NetworkError: there is none.
    """
    from cryptography.hazmat.primitives.serialization import Encoding  # noqa: PLC0415 only joins need it

    return _certificate(pem).public_bytes(Encoding.PEM)


def certificate_fingerprint(cert_pem: bytes) -> str:
    """Returns the SHA-256 of the first certificate's public key (SubjectPublicKeyInfo), 64 hexadecimal digits.

    Raises:
        NetworkError: not a certificate.
    """
    from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415 only joins need it
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat  # noqa: PLC0415 likewise

    try:
        key = _certificate(cert_pem).public_key()
    except (ValueError, KeyError, UnsupportedAlgorithm) as error:
        raise NetworkError(f"not a certificate: {error}") from None
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _certificate(pem: bytes) -> x509.Certificate:
    from cryptography import x509  # noqa: PLC0415 only joins need it

    try:
        return x509.load_pem_x509_certificate(pem)
    except (ValueError, x509.InvalidVersion) as error:
        raise NetworkError(f"not a certificate: {error}") from None


def model_fingerprint(shapes: ModelSpec) -> str:
    """Returns a hash of the names, shapes, types and kinds of all tensors of a model."""
    layout = [[spec.name, list(spec.shape), spec.dtype, str(spec.kind), spec.shared] for spec in shapes]
    return hashlib.sha256(json.dumps(layout).encode()).hexdigest()[:16]


def parse_job_log(lines: object) -> list[str]:
    """Returns the log of a part of a job, bounded and safe to show whatever was sent."""
    if not isinstance(lines, list):
        return []
    return [escape_text(str(line)[:MAX_JOB_LOG_CHARS])[:MAX_JOB_LOG_CHARS] for line in lines[:MAX_JOB_LOG_LINES]]


def get_speed_name(task: str, model: object) -> str:
    """Returns the name of a task's model among the speeds that a board has measured: TASK/MODEL, TASK without one."""
    return task if model is None else f"{task}/{model}"


def error_code(error: EdgeflError) -> str:
    """Returns the error's code in HTTP answers: `TokenInvalidError` is `token-invalid`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(error).__name__.removesuffix("Error")).lower()


def error_from_code(code: str, message: str) -> EdgeflError:
    """Returns the error of a code from the peer; an unknown code becomes a `NetworkError`."""
    queue = [EdgeflError]
    for kind in queue:
        queue.extend(kind.__subclasses__())
        if error_code(kind(message)) == code:
            return kind(message)
    return NetworkError(message)


def check_version(device: str, coordinator: str) -> None:
    """Checks version compatibility: the device has the coordinator's minor version or the one before.

    Raises:
        VersionError: incompatible; the message says which side to update.
    """
    device_version, coordinator_version = _major_minor(device), _major_minor(coordinator)
    if (
        device_version is None
        or coordinator_version is None
        or device_version[0] != coordinator_version[0]
        or device_version[1] not in (coordinator_version[1], coordinator_version[1] - 1)
    ):
        is_device_newer = (
            device_version is not None and coordinator_version is not None and device_version > coordinator_version
        )
        raise VersionError(
            f"this device has edgefl {device[:20]!r} and the coordinator {coordinator!r}; "
            + (
                "update the coordinator"
                if is_device_newer
                else f"update the device: pip install {DISTRIBUTION}=={coordinator}"
            )
        )


def _major_minor(version: str) -> tuple[int, int] | None:
    match = re.match(r"([0-9]{1,6})\.([0-9]{1,6})(?:[.a-z+-]|\Z)", version)
    return (int(match[1]), int(match[2])) if match else None
