"""A round of Flower's own SecAgg+ in this process: its workflow on one side, its mod of clients on the other."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.serverapp import Grid

OBSERVED = 1


class InProcessGrid:
    """Carries messages to clients as their serialised bytes; counts those of one client, and its CPU.

    Args:
        updates: node id -> [n] float32, what it has trained.
        num_examples: of each.
        lost: nodes that send no update, nor anything after it.
    """

    def __init__(self, updates: dict[int, np.ndarray], num_examples: int, lost: frozenset[int]) -> None:
        from flwr.app import Context, RecordDict  # noqa: PLC0415 for this comparison alone

        self.updates, self.num_examples, self.lost = updates, num_examples, lost
        self.cpu_s, self.num_bytes, self.num_stages = 0.0, 0, 0
        self._contexts = {
            node: Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})
            for node in updates
        }

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:  # noqa: ARG002
        self.num_stages += 1
        is_over = self.num_stages >= 3
        return [self._ask(found) for found in messages if not (is_over and found.metadata.dst_node_id in self.lost)]

    def _ask(self, message: Message) -> Message:
        from flwr.client.mod import secaggplus_mod  # noqa: PLC0415 likewise

        node, trained_s = message.metadata.dst_node_id, 0.0

        def train(message: Message, _: Context) -> Message:
            nonlocal trained_s
            started_s = time.process_time()
            reply = self._make_reply(message, node)
            trained_s = time.process_time() - started_s
            return reply

        sent, size = _copy(message)
        started_s = time.process_time()
        reply = secaggplus_mod(sent, self._contexts[node], train)
        cpu_s = time.process_time() - started_s - trained_s
        received, reply_size = _copy(reply)
        if node == OBSERVED:
            self.cpu_s += cpu_s
            self.num_bytes += size + reply_size
        return received

    def _make_reply(self, message: Message, node: int) -> Message:
        from flwr.app import Message  # noqa: PLC0415 likewise
        from flwr.common import Code, FitRes, Status, ndarrays_to_parameters  # noqa: PLC0415 likewise
        from flwr.compat.common.recorddict_compat import fitres_to_recorddict  # noqa: PLC0415 likewise

        result = FitRes(
            status=Status(Code.OK, ""),
            parameters=ndarrays_to_parameters([self.updates[node]]),
            num_examples=self.num_examples,
            metrics={},
        )
        return Message(fitres_to_recorddict(result, keep_input=False), reply_to=message)


def _copy(message: Message) -> tuple[Message, int]:
    """Returns a message as it arrives, and its bytes."""
    from flwr.common.serde import message_from_proto, message_to_proto  # noqa: PLC0415 likewise

    message.metadata.__dict__["_message_id"] = message.metadata.message_id or "0" * 64  # as long as a real one
    content = message_to_proto(message)
    return message_from_proto(content), content.ByteSize()


def run_round(
    vectors: Sequence[np.ndarray],
    *,
    num_shares: int,
    threshold: int,
    num_examples: int,
    max_weight: int,
    num_lost: int,
) -> tuple[float, int, float]:
    """Returns CPU seconds and bytes of one client, and the largest difference of the mean to the exact one.

    Args:
        vectors: [n] float32 of each client, in [-1, 1]; the last `num_lost` are not sent.
        num_shares: of each client's secrets; an odd number, or that of the clients.
        threshold: of them, to open a secret.
        num_examples: of each client.
        max_weight: largest number of examples.
        num_lost: clients that are lost before their update.
    """
    from flwr.app import ConfigRecord, Context, RecordDict  # noqa: PLC0415 likewise
    from flwr.common import FitIns, ndarrays_to_parameters, parameters_to_ndarrays  # noqa: PLC0415 likewise
    from flwr.compat.common.recorddict_compat import (  # noqa: PLC0415 likewise
        arrayrecord_to_parameters,
        parameters_to_arrayrecord,
    )
    from flwr.server.compat.legacy_context import LegacyContext  # noqa: PLC0415 likewise
    from flwr.server.strategy import FedAvg  # noqa: PLC0415 likewise
    from flwr.server.workflow import SecAggPlusWorkflow  # noqa: PLC0415 likewise
    from flwr.server.workflow.constant import (  # noqa: PLC0415 likewise
        MAIN_CONFIGS_RECORD,
        MAIN_PARAMS_RECORD,
        Key,
    )
    from flwr.supercore.task_identity import TaskIdentity  # noqa: PLC0415 likewise

    logging.getLogger("flwr").setLevel(logging.ERROR)
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, OBSERVED
    count = len(vectors)
    updates = dict(enumerate(vectors, start=OBSERVED))
    grid = InProcessGrid(updates, num_examples, frozenset(list(updates)[count - num_lost :]))
    model = ndarrays_to_parameters([np.zeros_like(vectors[0])])

    class AllClients(FedAvg):
        def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:  # noqa: ARG002
            return [(SimpleNamespace(node_id=node, cid=str(node)), FitIns(parameters, {})) for node in updates]

    state = RecordDict()
    context = LegacyContext(
        Context(run_id=1, node_id=0, node_config={}, state=state, run_config={}), strategy=AllClients()
    )
    state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: 1})
    state.array_records[MAIN_PARAMS_RECORD] = parameters_to_arrayrecord(model, keep_input=True)
    workflow = SecAggPlusWorkflow(
        num_shares=num_shares,
        reconstruction_threshold=threshold,
        max_weight=float(max_weight),
        clipping_range=1.0,
    )
    workflow(cast("Grid", grid), context)
    (mean,) = parameters_to_ndarrays(
        arrayrecord_to_parameters(state.array_records[MAIN_PARAMS_RECORD], keep_input=True)
    )
    exact = np.mean(vectors[: count - num_lost], axis=0)
    return grid.cpu_s, grid.num_bytes, float(np.abs(mean - exact).max())
