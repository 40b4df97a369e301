"""The ClientApp of an exported app: trains and evaluates on a Flower node's shard, as an edgefl device does."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from edgefl.core.config import RunConfig, load_run
from edgefl.core.errors import ConfigError, DataError, EdgeflError
from edgefl.core.extensions import add_allowed_modules
from edgefl.core.types import Json, Role, derive_seed
from edgefl.flower.app_runtime import decode_content, encode_content, make_body_record
from edgefl.tasks.datasets.central import create_shards

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,62}\Z", re.ASCII)
STATE_VARIABLE = "XDG_STATE_HOME"


class AppTrainer(Protocol):
    """Interface of `edgefl.device.training.trainer.DeviceTrainer` that an app uses."""

    def train(self, header: Json, body: bytes) -> tuple[Json, bytes]: ...
    def evaluate(self, header: Json, body: bytes) -> tuple[Json, bytes]: ...
    def count_examples(self) -> dict[str, int]: ...
    def list_blocks(self) -> dict[str, list[int]]: ...
    def close(self) -> None:
        """Saves the persistent state."""


TrainerFactory = Callable[..., AppTrainer]


def make_client_app(
    run_file: Path, make_trainer: TrainerFactory, *, allowed_modules: Sequence[str] = ()
) -> ClientApp:
    """Returns the ClientApp of a node.

    Its shard is the node's `shard` (a path in the node's or the run's configuration, where `{partition}` stands for
    the node's number from 1 on), else it is cut from the task's data set by the node's `partition-id`.

    Args:
        run_file: of the ServerApp's run.
        make_trainer: the class `edgefl.device.training.trainer.DeviceTrainer`.
        allowed_modules: those of the run file's `module:Class`; whoever exported the app allowed them.
    """
    add_allowed_modules(allowed_modules)
    app = ClientApp()

    @app.query()
    def introduce(message: Message, context: Context) -> Message:
        return _run(message, context, lambda trainer: (_describe_node(trainer), b""))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _run(message, context, lambda trainer: trainer.train(*decode_content(message.content)))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return _run(message, context, lambda trainer: trainer.evaluate(*decode_content(message.content)))

    def _run(message: Message, context: Context, work: Callable[[AppTrainer], tuple[Json, bytes]]) -> Message:
        """Returns the reply; an edgefl error becomes one line, a bug is left to Flower's error report."""
        try:
            config = load_run(run_file)
            name, shard = _get_name_and_shard(context, config)
            trainer = _create_trainer(context, config, name, shard, make_trainer)
            try:
                header, body = work(trainer)
            finally:
                trainer.close()
        except EdgeflError as error:
            name, header, body = "", {"v": 1, "error": f"{type(error).__name__}: {error}"}, b""
        return Message(
            content=encode_content({**header, "device": name}, make_body_record(body) if body else None),
            reply_to=message,
        )

    return app


def _describe_node(trainer: AppTrainer) -> Json:
    examples = trainer.count_examples()
    if not examples:
        raise DataError("this node's shard cannot be read; its log says why")
    return {"v": 1, "examples": examples, "blocks": trainer.list_blocks()}


def _create_trainer(
    context: Context, config: RunConfig, name: str, shard: Path, make_trainer: TrainerFactory
) -> AppTrainer:
    state_dir = _get_state_root() / name
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    return make_trainer(
        device_id=name,
        role=Role.TRAINER,
        shards=lambda: {config.run.task: str(shard)},
        accelerator=str(context.run_config.get("accelerator", "cpu")),
        threads=int(context.run_config.get("threads", 0)) or None,
        state_dir=state_dir,
        on_progress=lambda *_: False,
    )


def _get_name_and_shard(context: Context, config: RunConfig) -> tuple[str, Path]:
    """Returns the name of this node as a device, and its shard."""
    node = context.node_config
    partition = int(node["partition-id"]) if "partition-id" in node else None
    shard_path = str(node.get("shard") or context.run_config.get("shard") or "")
    if not shard_path and partition is None:
        raise ConfigError(
            "this node has no shard: start its SuperNode with --node-config 'shard=\"PATH\"', or with "
            "'partition-id=0 num-partitions=4' to cut one from the task's data set"
        )
    path = Path(shard_path.replace("{partition}", f"{0 if partition is None else partition + 1:02}"))
    if not shard_path:
        path = _get_partition(context, config, partition or 0)
    default_name = f"node-{context.node_id}" if partition is None else f"device-{partition + 1:02}"
    name = str(node.get("name") or default_name)
    if not _NAME.match(name):
        raise ConfigError(f"a node's name must be letters, digits, dots, _ and -, got {name!r}")
    return name, path


def _get_partition(context: Context, config: RunConfig, partition: int) -> Path:
    """Returns this partition's shard; the first node on this machine cuts them all."""
    num_devices = int(context.node_config.get("num-partitions") or context.run_config.get("num-devices", 0))
    if not 0 <= partition < num_devices:
        raise ConfigError(f"partition-id must lie in 0 to num-partitions - 1 = {num_devices - 1}, got {partition}")
    scheme = str(context.run_config.get("scheme") or config.simulation.scheme or "iid")
    data = str(context.run_config.get("data") or config.simulation.data or "")
    key = derive_seed(
        config.run.task, scheme, num_devices, config.run.seed, data, *map(str, sorted(config.task.items()))
    )
    folder = _get_state_root() / "shards" / f"{key:032x}"
    if not folder.is_dir():
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent))
        source, seed = Path(data) if data else None, config.run.seed
        create_shards(config.run.task, scheme, num_devices, temporary, source, seed, options=config.task)
        with contextlib.suppress(OSError):  # lost the race to another node, whose shards are the same
            temporary.rename(folder)
        shutil.rmtree(temporary, ignore_errors=True)
    return sorted(folder.glob("device-*.npz"))[partition]


def _get_state_root() -> Path:
    root = os.environ.get(STATE_VARIABLE)
    return (Path(root) if root else Path.home() / ".local" / "state") / "edgefl" / "flower-app"
