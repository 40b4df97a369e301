"""One training run on a fleet of this machine, as a function: for notebooks and scripts."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl.core import extensions
from edgefl.core.config import RunConfig, load_run, parse_run
from edgefl.core.errors import ConfigError
from edgefl.core.types import Json
from edgefl.engine.build import build_run
from edgefl.engine.run_summary import compute_run_metrics, format_run_outcome
from edgefl.simulation.local_fleet import LocalDeviceSpec, LocalFleet
from edgefl.tasks.datasets.central import TEST_NAME, create_shards
from edgefl.tasks.registry import make_task

log = logging.getLogger(__name__)

DEFAULT_SCHEMES = {"digits": "dirichlet:0.5", "motionsense": "natural"}
FALLBACK_SCHEME = "iid"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionedFleet:
    """Devices with shards of their own, and the coordinator's test shard."""

    devices: tuple[LocalDeviceSpec, ...]
    test_shards: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Outcome of a run.

    Attributes:
        run_id, status, reason: as in `edgefl run show`; status is finished or stopped.
        metrics: `accuracy` and `loss` of the last version (None when it was not evaluated), `bytes_up`, `bytes_down`,
            `seconds` from the start of the run to its end; where devices have models of their own, `node_accuracy`,
            `worst_node_accuracy` and `disagreement` where known.
        rounds, updates, evaluations: rows of the history, oldest first, in the columns of `edgefl history`.
        model: the last model, a safetensors file.
        root: the folder with the database, the logs and the shards.
    """

    run_id: str
    status: str
    reason: str
    metrics: Mapping[str, float | None]
    rounds: list[Json]
    updates: list[Json]
    evaluations: list[Json]
    model: Path
    root: Path

    def __str__(self) -> str:
        return format_run_outcome(self.run_id, self.status, self.reason, self.metrics)


def run(
    config: RunConfig | Mapping[str, Any] | str | Path,
    *,
    devices: int | Sequence[str | Path] = 4,
    data: str | Path | None = None,
    scheme: str | None = None,
    root: str | Path | None = None,
    allow_modules: Sequence[str] = (),
) -> RunResult:
    """Trains on a coordinator and devices that are processes of this machine, and returns the history.

    Args:
        config: a run file, its tables, or the result of `config.load_run`.
        devices: number of shards to cut the task's data set into, or existing shards, one per device.
        data: the folder of the data set; digits needs none.
        scheme: the partition scheme [digits: dirichlet:0.5; motionsense: natural; others: iid].
        root: folder of all files; a new folder under the system's temporary one when None.
        allow_modules: modules whose classes the run file may name, as `--allow-module`.

    Raises:
        EdgeflError: the run file is invalid, data is missing, or the run failed.
    """
    with extensions.allow_modules(allow_modules):
        run_config = _load_config(config)
        _check_devices(run_config, count_devices(devices))
        check_run(run_config)
        folder = Path(tempfile.mkdtemp(prefix="edgefl-") if root is None else root).resolve()
        partition = _partition_data(run_config, devices, data, scheme, folder / "shards")
        log.info("run of %s on this machine; all of it is kept in %s", run_config.run.task, folder)
        with LocalFleet(root=folder, devices=partition.devices, test_shards=partition.test_shards) as fleet:
            run_id = fleet.submit(run_config)
            return _build_result(fleet, fleet.wait_for_run(run_id))


def partition_devices(
    task: str, scheme: str, num_devices: int, out: Path, data: Path | None, seed: int
) -> PartitionedFleet:
    """Cuts a central data set into `devices` shards; raises as `create_shards`."""
    paths = create_shards(task, scheme, num_devices, out, data, seed)
    devices = tuple(LocalDeviceSpec(name=path.stem, shards={task: str(path.resolve())}) for path in paths)
    return PartitionedFleet(devices=devices, test_shards={task: str((out / TEST_NAME).resolve())})


def check_run(config: RunConfig) -> None:
    """Raises errors of a run before it starts; its task must be able to train on this machine."""
    build_run(config, "check")
    make_task(config.run.task, config.task).learner()


def default_scheme(task: str) -> str:
    """Returns the default partition scheme of a task."""
    return DEFAULT_SCHEMES.get(task, FALLBACK_SCHEME)


def count_devices(devices: int | Sequence[str | Path]) -> int:
    """Returns the number of devices, from a number or shards.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(devices, int) and not isinstance(devices, bool):
        return devices
    if isinstance(devices, Sequence) and not isinstance(devices, str | bytes):
        return len(devices)
    raise ConfigError(f"devices must be how many there are, or a list with the shard of each, got {devices!r}")


def _load_config(config: RunConfig | Mapping[str, Any] | str | Path) -> RunConfig:
    if isinstance(config, RunConfig):
        return config
    return parse_run(config) if isinstance(config, Mapping) else load_run(config)


def _check_devices(config: RunConfig, num_devices: int) -> None:
    if num_devices < max(1, config.devices.min):
        raise ConfigError(f"the run needs at least {max(1, config.devices.min)} devices, got {num_devices}")


def _partition_data(
    config: RunConfig, devices: int | Sequence[str | Path], data: str | Path | None, scheme: str | None, out: Path
) -> PartitionedFleet:
    task = config.run.task
    if isinstance(devices, int):
        folder = None if data is None else Path(data)
        return partition_devices(task, scheme or default_scheme(task), devices, out, folder, config.run.seed)
    shards = [str(Path(path).resolve()) for path in devices]
    specs = (LocalDeviceSpec(name=f"device-{n:02}", shards={task: shard}) for n, shard in enumerate(shards, 1))
    return PartitionedFleet(devices=tuple(specs), test_shards={})


def _build_result(fleet: LocalFleet, run: Json) -> RunResult:
    run_id = run["run_id"]
    rounds = fleet.list_history("rounds", run=run_id)
    return RunResult(
        run_id=run_id,
        status=run["status"],
        reason=run["reason"],
        metrics=compute_run_metrics(rounds, run["finished_at"] - run["started_at"]),
        rounds=rounds,
        updates=fleet.list_history("updates", run=run_id),
        evaluations=fleet.list_history("evaluations", run=run_id),
        model=fleet.get_model_path(run["model"]),
        root=fleet.root,
    )
