"""The ClientApp of an exported app: each Flower node trains and evaluates on its shard as one of our devices does."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from edgefl.adapters.app_messages import body_record, pack, unpack
from edgefl.config import RunConfig, load_run
from edgefl.errors import ConfigError, DataError, EdgeflError
from edgefl.tasks.cutting import cut_shards
from edgefl.types import Json, Role, derived_seed

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,62}\Z", re.ASCII)
STATE_VARIABLE = "XDG_STATE_HOME"


class Trainer(Protocol):
    """What an app needs of `edgefl.device.trainer.Trainer`."""

    def train(self, header: Json, body: bytes) -> tuple[Json, bytes]: ...
    def evaluate(self, header: Json, body: bytes) -> tuple[Json, bytes]: ...
    def examples(self) -> dict[str, int]: ...
    def blocks(self) -> dict[str, list[int]]: ...
    def close(self) -> None:
        """Writes what is to survive."""


MakeTrainer = Callable[..., Trainer]


def make_client_app(run_file: Path, make_trainer: MakeTrainer) -> ClientApp:
    """Returns the app of a node.

    Its shard is the node's `shard` (a path in the node's or the run's configuration, where `{partition}` stands for
    the node's number from 1 on), else it is cut from the task's data set by the node's `partition-id`.

    Args:
        run_file: what the ServerApp drives.
        make_trainer: the class `edgefl.device.trainer.Trainer`.
    """
    app = ClientApp()

    @app.query()
    def introduce(message: Message, context: Context) -> Message:
        return _answered(message, context, lambda trainer: (_introduction(trainer), b""))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _answered(message, context, lambda trainer: trainer.train(*unpack(message.content)))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return _answered(message, context, lambda trainer: trainer.evaluate(*unpack(message.content)))

    def _answered(message: Message, context: Context, work: Callable[[Trainer], tuple[Json, bytes]]) -> Message:
        """Returns the reply; what we refuse travels as one line, a bug is Flower's to report."""
        try:
            config = load_run(run_file)
            name, shard = _seat(context, config)
            trainer = _trainer(context, config, name, shard, make_trainer)
            try:
                header, body = work(trainer)
            finally:
                trainer.close()
        except EdgeflError as error:
            name, header, body = "", {"v": 1, "error": f"{type(error).__name__}: {error}"}, b""
        return Message(
            content=pack({**header, "device": name}, body_record(body) if body else None), reply_to=message
        )

    return app


def _introduction(trainer: Trainer) -> Json:
    examples = trainer.examples()
    if not examples:
        raise DataError("this node's shard cannot be read; its log says why")
    return {"v": 1, "examples": examples, "blocks": trainer.blocks()}


def _trainer(context: Context, config: RunConfig, name: str, shard: Path, make_trainer: MakeTrainer) -> Trainer:
    state_dir = _state_root() / name
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    return make_trainer(
        device_id=name,
        role=Role.TRAINER,
        shards=lambda: {config.run.task: str(shard)},
        accelerator=str(context.run_config.get("accelerator", "cpu")),
        threads=int(context.run_config.get("threads", 0)) or None,
        state_dir=state_dir,
        on_progress=lambda *_: None,
    )


def _seat(context: Context, config: RunConfig) -> tuple[str, Path]:
    """Returns the name of this node as a device, and its shard."""
    node = context.node_config
    partition = int(node["partition-id"]) if "partition-id" in node else None
    given = str(node.get("shard") or context.run_config.get("shard") or "")
    if not given and partition is None:
        raise ConfigError(
            "this node has no shard: start its SuperNode with --node-config 'shard=\"PATH\"', or with "
            "'partition-id=0 num-partitions=4' to cut one from the task's data set"
        )
    path = Path(given.replace("{partition}", f"{0 if partition is None else partition + 1:02}"))
    if not given:
        path = _cut(context, config, partition or 0)
    numbered = f"node-{context.node_id}" if partition is None else f"device-{partition + 1:02}"
    name = str(node.get("name") or numbered)
    if not _NAME.match(name):
        raise ConfigError(f"a node's name must be letters, digits, dots, _ and -, got {name!r}")
    return name, path


def _cut(context: Context, config: RunConfig, partition: int) -> Path:
    """Returns this partition's shard; the first node of this machine that asks cuts them all."""
    num_devices = int(context.node_config.get("num-partitions") or context.run_config.get("num-devices", 0))
    if not 0 <= partition < num_devices:
        raise ConfigError(f"partition-id must lie in 0 to num-partitions - 1 = {num_devices - 1}, got {partition}")
    scheme = str(context.run_config.get("scheme") or config.simulation.scheme or "iid")
    data = str(context.run_config.get("data") or config.simulation.data or "")
    key = derived_seed(config.run.task, scheme, num_devices, config.run.seed, data)
    folder = _state_root() / "shards" / f"{key:032x}"
    if not folder.is_dir():
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
        cut_shards(config.run.task, scheme, num_devices, unfinished, Path(data) if data else None, config.run.seed)
        with contextlib.suppress(OSError):  # another node was faster: its shards are the same
            unfinished.rename(folder)
        shutil.rmtree(unfinished, ignore_errors=True)
    return sorted(folder.glob("device-*.npz"))[partition]


def _state_root() -> Path:
    root = os.environ.get(STATE_VARIABLE)
    return (Path(root) if root else Path.home() / ".local" / "state") / "edgefl" / "flower-app"
