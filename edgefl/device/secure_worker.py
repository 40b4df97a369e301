"""A board's steps of secure aggregation, around its trainer: what leaves the board is masked.

It stands in the agent's own process, which has the board's key: a confined process that trains gets none of it, nor
any secret of the protocol.
"""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgefl.core.errors import DataError, EdgeflError, SecureAggregationError
from edgefl.core.protocol import INSTRUCTION_VERSION, SECURE_KEY
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Json, PeerMessage, SecureAggregationConfig, SecureStep
from edgefl.device.state_dir import DeviceStateDir
from edgefl.strategies.peer_algorithms.gossip_node import decode_messages, encode_messages
from edgefl.system.atomic_files import write_atomic

if TYPE_CHECKING:
    from edgefl.core.secure_aggregation.participant import Consent, ConsentRecorder, Participant

log = logging.getLogger(__name__)

CONSENTS_FILE = "secure-aggregation.json"
"""Of the last consent of each run."""
MAX_RUN_CHARACTERS = 200
MAX_CONSENTS_BYTES = 2 * 1024 * 1024
"""Of a thousand runs with ids of as many characters, each of which JSON may write as six."""

Content = tuple[Json, bytes]
Train = Callable[[Json, bytes], Content]


class SecureWorker:
    """Answers the steps of secure aggregation; used by the training thread.

    Args:
        state: of the board, with its key and certificate.
        train: of the trainer: header and body -> reply and body.
    """

    def __init__(self, state: DeviceStateDir, train: Train) -> None:
        self._state, self._train = state, train
        self._participant: Participant | None = None

    def train(self, header: Json, body: bytes) -> Content:
        """Returns the reply to an instruction: the trainer's own, but for the steps of secure aggregation."""
        plan = header.get("plan")
        if "phase" in header or not isinstance(plan, Mapping) or plan.get(SECURE_KEY) is None:
            return self._train(header, body)
        reply: Json = {"v": INSTRUCTION_VERSION, "run": header.get("run"), "assignment": header.get("assignment")}
        if header.get("has_stored_reply"):  # a held one would have been sent already
            return {**reply, "error": "the answer to it is not held here", "requires_full_model": True}, b""
        try:
            config = SecureAggregationConfig.from_json(plan[SECURE_KEY])
            run = _check_instruction(header, config)
            messages, rest = decode_messages(header.get("messages", []), body)
            if config.step == SecureStep.UPDATE:
                return self._send_update(header, config, messages, rest)
            started_s = time.process_time()
            answer = self._get_participant(config).answer(run, config, messages)
        except EdgeflError as error:
            log.warning("assignment %s failed: %s", header.get("assignment"), error)
            return {**reply, "error": f"{type(error).__name__}: {error}"}, b""
        except (OSError, KeyError, TypeError, ValueError) as error:  # a full card, or a malformed header
            log.warning("assignment %s failed: %s", header.get("assignment"), error)
            return {**reply, "error": f"{type(error).__name__}: {error}"}, b""
        compute_s = time.process_time() - started_s
        metrics = {"iterations": 0, "num_examples": 0, "loss": None, "compute_s": compute_s}
        index, encoded = encode_messages(answer)
        return {**reply, "metrics": metrics, "messages": index}, encoded

    def _send_update(
        self, header: Json, config: SecureAggregationConfig, messages: tuple[PeerMessage, ...], body: bytes
    ) -> Content:
        """Trains, and returns the masked update; shares that do not fit are found before the training."""
        participant, run = self._get_participant(config), str(header["run"])
        participant.accept_shares(run, config, messages)
        own_header = {name: value for name, value in header.items() if name != "messages"}
        reply, vector = self._train(own_header, body)
        if "error" in reply:
            return reply, vector
        index, masked = encode_messages(participant.mask(run, config, np.frombuffer(vector, "<u4").copy()))
        return {**reply, "messages": index}, masked

    def _get_participant(self, config: SecureAggregationConfig) -> Participant:
        """Returns the board's participant, with its present certificate at the first step of an attempt.

        Raises:
            DataError: the record of its consents cannot be read: it takes no part.
        """
        from edgefl.core.secure_aggregation.keys import CertificateIdentity  # noqa: PLC0415 for secure runs alone
        from edgefl.core.secure_aggregation.participant import Participant  # noqa: PLC0415 likewise

        if self._participant is None or config.step == SecureStep.KEYS:
            state = self._state
            identity = CertificateIdentity(
                state.device_id,
                key_pem=state.key.read_bytes(),
                cert_pem=state.cert.read_bytes(),
                ca_pem=state.ca.read_bytes(),
            )
            self._participant = Participant(identity, load_consents(state.root / CONSENTS_FILE))
        return self._participant


def _check_instruction(header: Json, config: SecureAggregationConfig) -> str:
    """Returns the run of a step, whose consents are kept under it.

    Raises:
        SecureAggregationError: its id is too long to be kept, or the model is of another version than the sum.
    """
    run = header["run"]
    if not isinstance(run, str) or len(run) > MAX_RUN_CHARACTERS:
        raise SecureAggregationError(
            f"the id of a run with secure aggregation is a text of up to {MAX_RUN_CHARACTERS} characters, "
            f"got {run!r:.40}"
        )
    if header["version"] != config.version:
        raise SecureAggregationError(
            f"the sum is of version {config.version!r:.20}, and the instruction of {header['version']!r:.20}"
        )
    return run


def load_consents(path: Path) -> ConsentRecorder:
    """Returns the consents that a board has given, from a file to which later ones are written.

    Raises:
        DataError: the file is damaged.
    """
    from edgefl.core.secure_aggregation.participant import Consent, ConsentRecorder  # noqa: PLC0415 likewise

    def save(consents: Mapping[str, Consent]) -> None:
        content = {run: asdict(consent) for run, consent in consents.items()}
        write_atomic(path, json.dumps(content, separators=(",", ":")).encode())

    try:
        found = parse_json(_read_consents(path)) if path.exists() else {}
        consents = OrderedDict(
            (str(run), Consent(version=int(item["version"]), digest=str(item["digest"])))
            for run, item in found.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(
            f"{path} cannot be read, so nobody knows what this board has consented to: {error}; delete it only if no "
            "run with secure aggregation is under way"
        ) from None
    return ConsentRecorder(consents=consents, save=save)


def _read_consents(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(MAX_CONSENTS_BYTES + 1)
    if len(content) > MAX_CONSENTS_BYTES:
        raise ValueError(f"it has more than {MAX_CONSENTS_BYTES} bytes")
    return content
