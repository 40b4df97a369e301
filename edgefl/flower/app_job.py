"""A Flower app as a job: each message of its ServerApp is a part, which its ClientApp does on the board of the node.

The class of a pack inherits from `FlowerApp`, and names the folder with the app's files beside it. The ClientApp is
imported once in a board's confined process, and stays there; its context's state lies in the job's scratch folder.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from edgefl.core.config import RunConfig, parse_run
from edgefl.core.errors import ConfigError, DataError, StoreError, TaskError
from edgefl.core.safe_parsing import parse_toml
from edgefl.core.types import APP_JOB_PREFIX, Json, Scalar
from edgefl.flower.app_folder import CONFIG_FILE, AppFolder, flatten_config, read_app
from edgefl.flower.internals import make_message
from edgefl.system.atomic_files import write_atomic
from edgefl.tasks.job import Job, JobContext

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Context, Message, RecordDict

log = logging.getLogger(__name__)

LOAD_ERROR, RAISED_ERROR = 1, 2
"""Flower's error codes of a ClientApp that cannot be imported, and of one that raised."""
CRASHED_ERROR, UNAVAILABLE_ERROR = 8, 5
"""Flower's error codes of a ClientApp whose process ended, and of a node that is away."""
SERVER_NODE_ID = 1
ROUND_KEY = "server-round"
"""With which Flower's strategies number their messages."""
PATH_KEYS = ("data-path", "dataset-path")
"""Of a node's configuration, for the board's files: Flower's examples have the second."""
MAX_REASON_CHARS = 500
LIFETIME_S = 10.0**11
"""Of messages on a board, whose clock may be wrong, from 1970 on."""
STATE_FILE = "context"
RESIDUAL_PREFIX = "edgefl.residual/"
"""Of records beside a ClientApp's own state that it does not see: what a codec with `ef` left out of its replies."""
LOAD_S = 300.0
"""How long boards may import the ClientApp, and what it needs, before the run begins."""
_PAIR = re.compile(r"""(\S+?)=('[^']*'|"[^"]*"|\S+)""")


class FlowerApp(Job):
    """A Flower app, installed from a pack.

    Args:
        fingerprint: of the app that the run was submitted with; empty for whichever is here.
        run_config: other values for `[tool.flwr.app.config]`, as `flwr run` takes them: `key=value key="text"`.
    """

    root: ClassVar[Path]

    def __init__(self, *, fingerprint: str = "", run_config: str = "") -> None:
        self.app = read_app(self.root, is_packed=True)
        self.fingerprint = compute_fingerprint(self.app)
        if fingerprint not in ("", self.fingerprint):
            raise TaskError(
                f"the Flower app {self.app.name} is here with the fingerprint {self.fingerprint}, and the run is of "
                f"{fingerprint:.40}; install the pack of the same files on the boards and beside the coordinator"
            )
        self.run_config = merge_config(self.app, run_config)
        self.needs_torch = any(re.match(r"torch\b", line) for line in self.app.dependencies)
        self._client: Any = None
        self._state: bytes | None = None

    def load(self) -> None:
        """Imports the ClientApp, so that no message waits for that; what it raises is each message's error."""
        try:
            self._load_client()
        except (Exception, SystemExit):  # another author's code may raise anything
            log.warning("the ClientApp of %s cannot be imported", self.app.name, exc_info=True)

    def work(self, context: JobContext) -> bytes:
        """Returns the ClientApp's reply to a message, or its error."""
        from edgefl.flower.app_codec import ChangeCodec  # noqa: PLC0415 only where Flower runs
        from edgefl.flower.app_messages import TRAIN, decode_message, encode_message, split_envelope  # noqa: PLC0415 likewise

        envelope, message = split_envelope(context.input)
        header, content = decode_message(message, is_from_server=True)
        if content is None:
            raise DataError("a Flower message without content")
        header |= envelope
        try:
            code = LOAD_ERROR
            client = self._load_client()
            code = RAISED_ERROR
            key = {
                "run": f"{context.run} {header['run']}",
                "message": f"{context.part} {hashlib.sha256(context.input).hexdigest()}",
            }
            before = self._load_state(key, context.scratch)
            state, residuals = _decode_state(before)
            codec = None
            if (line := str(header.get("codec", ""))) and str(header["type"]).startswith(TRAIN):
                codec = ChangeCodec(content, line, *key.values(), context.device_id, residuals=residuals)
            flower_context = self._make_context(header, context, state)
            reply = client(_make_message(header, content, context.part), flower_context)
            answer = b"" if reply.has_error() else encode_message({}, reply.content, codec)
            self._save_state(key, before, _encode_state(flower_context.state, residuals), context.scratch)
        except (Exception, SystemExit) as error:  # another author's code may raise anything
            reason = f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS]
            log.warning("the ClientApp of %s failed", self.app.name, exc_info=True)
            context.log(f"{format_label(header, content)}: {reason}")
            return encode_message({"error": code, "reason": reason})
        if reply.has_error():
            return encode_message({"error": reply.error.code, "reason": str(reply.error.reason)[:MAX_REASON_CHARS]})
        context.log(f"{format_label(header, content)}: {format_metrics(reply.content)}")
        return answer

    def _load_client(self) -> Any:
        if self._client is None:
            self._client = load_component(self.app.root, self.app.client)
        return self._client

    def _make_context(self, header: Json, context: JobContext, state: RecordDict) -> Context:
        from flwr.app import Context  # noqa: PLC0415 only where Flower runs

        return Context(
            run_id=int(header["run_id"]),
            node_id=int(header["node_id"]),
            node_config={
                **header["node_config"],
                **dict.fromkeys(PATH_KEYS, str(context.path)),
                "name": context.device_id,
            },
            state=state,
            run_config=dict(self.run_config),
        )

    def _load_state(self, key: Json, scratch: Path) -> bytes:
        """Returns the state that a message begins with; empty for a new run.

        It is that which the last message left, or which it began with where it comes again: its reply was lost.
        """
        from edgefl.flower.app_messages import split_envelope  # noqa: PLC0415 likewise

        try:
            header, states = split_envelope(
                self._state if self._state is not None else (scratch / STATE_FILE).read_bytes()
            )
            before, after = states[: (size := int(header["size"]))], states[size:]
        except FileNotFoundError:
            return b""
        except (OSError, DataError, LookupError, TypeError, ValueError, OverflowError) as error:
            log.warning("the state of the ClientApp is lost: %s", error)
            return b""
        if header.get("run") != key["run"]:
            return b""
        return before if header.get("message") == key["message"] else after

    def _save_state(self, key: Json, before: bytes, after: bytes, scratch: Path) -> None:
        from edgefl.flower.app_messages import encode_envelope  # noqa: PLC0415 likewise

        if after == self._load_state({**key, "message": ""}, scratch):
            return
        self._state = encode_envelope({**key, "size": len(before)}) + before + after
        try:
            write_atomic(scratch / STATE_FILE, self._state)
        except StoreError as error:
            log.warning("the state of the ClientApp stays in memory: %s", error)


def _encode_state(state: RecordDict, residuals: dict[str, ArrayRecord]) -> bytes:
    """Returns a ClientApp's state with the residuals of its replies; nothing where both are empty."""
    from flwr.app import RecordDict  # noqa: PLC0415 only where Flower runs

    from edgefl.flower.app_messages import encode_message  # noqa: PLC0415 likewise

    kept = RecordDict({**state, **{f"{RESIDUAL_PREFIX}{name}": record for name, record in residuals.items()}})
    return encode_message({}, kept) if kept else b""


def _decode_state(saved: bytes) -> tuple[RecordDict, dict[str, ArrayRecord]]:
    """Returns a ClientApp's state and the residuals of its replies by their records.

    Both are blank where nothing, or nothing that makes sense, was saved.
    """
    from flwr.app import RecordDict  # noqa: PLC0415 only where Flower runs

    from edgefl.flower.app_messages import decode_message  # noqa: PLC0415 likewise

    try:
        state = (decode_message(saved)[1] if saved else None) or RecordDict()
    except DataError as error:
        log.warning("the state of the ClientApp is lost: %s", error)
        state = RecordDict()
    names = [name for name in state.array_records if name.startswith(RESIDUAL_PREFIX)]
    kept = {name.removeprefix(RESIDUAL_PREFIX): state.array_records[name] for name in names}
    for name in names:
        del state[name]
    return state, kept


def make_app_run(  # noqa: PLR0913 each is one setting of the run file
    app: AppFolder,
    run_config: str,
    *,
    name: str | None,
    num_boards: int,
    groups: Sequence[str],
    codec: str = "",
    down: str = "",
    seed: int | None = None,
) -> RunConfig:
    """Returns the run file of an app.

    Args:
        app: in its folder, with the files that the boards must have.
        run_config: as `FlowerApp`'s.
        name: of the run; None for the app's.
        num_boards: that it begins with.
        groups: of the boards; all where empty.
        codec: of what they change in the app's arrays; empty for none.
        down: of the arrays that they are sent; empty for none.
        seed: of the ServerApp's generators; None for the run file's default.

    Raises:
        ConfigError: the run configuration makes no sense.
    """
    merge_config(app, run_config)
    options = {"fingerprint": compute_fingerprint(app), "run_config": run_config}
    compression = {key: line for key, line in (("up", codec), ("down", down)) if line}
    table: Json = {
        "run": {"name": name or app.name, **({} if seed is None else {"seed": seed})},
        "job": {"name": get_job_name(app.name), **{key: value for key, value in options.items() if value}},
        "devices": {"min": num_boards, "ready_s": LOAD_S, **({"groups": list(groups)} if groups else {})},
        **({"compression": compression} if compression else {}),
    }
    return parse_run(table)


def get_job_name(app_name: str) -> str:
    """Returns the name of an app's job, in run files and of boards' shards."""
    return f"{APP_JOB_PREFIX}{app_name.lower()}"


def load_component(root: Path, reference: str) -> Any:
    """Returns an app's object `module:attribute`; raises what its module raises when it is imported."""
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    name, _, attribute = reference.partition(":")
    module = importlib.import_module(name)
    place = getattr(module, "__file__", None) or "/"
    if root.resolve() not in Path(place).resolve().parents:
        raise TaskError(f"the module {name} is that of {place}, which was imported before: start again")
    return getattr(module, attribute)


def compute_fingerprint(app: AppFolder) -> str:
    """Returns 16 hex digits of a hash of an app's files and their names, and of what its `pyproject.toml` says."""
    digest = hashlib.sha256()
    for file in app.files:
        # A pack's has no federations, and is written anew.
        is_config = str(file) == CONFIG_FILE
        content = (
            json.dumps(app.content, sort_keys=True, default=str).encode()
            if is_config
            else (app.root / file).read_bytes()
        )
        digest.update(f"{file}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def merge_config(app: AppFolder, changes: str) -> dict[str, Scalar]:
    """Returns an app's run configuration with other values.

    Raises:
        ConfigError: the text makes no sense, or names a value that the app does not have.
    """
    pairs, left = _PAIR.findall(changes), _PAIR.sub("", changes).strip()
    try:
        table = parse_toml("\n".join([*(f"{key} = {value}" for key, value in pairs), left]))
    except ValueError as error:
        raise ConfigError(
            f"run_config must be pairs such as 'rounds=3 name=\"a\"', got {changes!r:.80}: {error}"
        ) from None
    values = flatten_config(table, "run_config")
    if unknown := sorted(values.keys() - app.config.keys()):
        known = ", ".join(sorted(app.config)) or "none"
        raise ConfigError(f"run_config: the app {app.name} has no {unknown[0]!r:.80}; it has {known}")
    return {**app.config, **values}


def _make_message(header: Json, content: RecordDict, part: int) -> Message:
    from flwr.app import Metadata  # noqa: PLC0415 likewise

    metadata = Metadata(
        run_id=int(header["run_id"]),
        message_id=str(part),
        src_node_id=SERVER_NODE_ID,
        dst_node_id=int(header["node_id"]),
        reply_to_message_id="",
        group_id=str(header["group"]),
        created_at=0.0,
        ttl=LIFETIME_S,
        message_type=str(header["type"]),
    )
    return make_message(metadata, content=content)


def format_label(header: Json, content: RecordDict) -> str:
    """Returns what a message asks for, such as `train in round 3`."""
    rounds = [record[ROUND_KEY] for record in content.config_records.values() if ROUND_KEY in record]
    return f"{header.get('type')} in round {rounds[0]!r:.20}" if rounds else str(header.get("type"))


def format_metrics(content: RecordDict) -> str:
    """Returns the numbers of a reply for the history, such as `num-examples 10, train_loss 0.5`."""
    values = [(name, value) for record in content.metric_records.values() for name, value in record.items()]
    return ", ".join(f"{name} {value:.6g}" for name, value in values if isinstance(value, int | float)) or "done"
