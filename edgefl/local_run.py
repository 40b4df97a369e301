"""One training run on a fleet of this machine, as a function: for notebooks and scripts."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl.assembly import assemble
from edgefl.config import RunConfig, load_run, parse_run
from edgefl.errors import ConfigError
from edgefl.local_fleet import LocalDevice, LocalFleet
from edgefl.summary import node_figures, run_in_words
from edgefl.tasks.cutting import TEST_NAME, cut_shards
from edgefl.tasks.registry import make_task
from edgefl.types import Json

log = logging.getLogger(__name__)

SCHEMES = {"digits": "dirichlet:0.5", "motionsense": "natural"}
DEFAULT_SCHEME = "iid"


@dataclass(frozen=True, slots=True, kw_only=True)
class CutFleet:
    """Devices with shards of their own, and the coordinator's test shard."""

    devices: tuple[LocalDevice, ...]
    test_shards: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What became of a run.

    Attributes:
        run_id, status, reason: as `edgefl run show` says; status is finished or stopped.
        metrics: `accuracy` and `loss` of the last version (None when nobody evaluated it), `bytes_up`, `bytes_down`,
            `seconds` from the start of the run to its end; where devices have models of their own, `node_accuracy`,
            `worst_node_accuracy` and `disagreement` as far as they are known.
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
        return run_in_words(self.run_id, self.status, self.reason, self.metrics)


def run(
    config: RunConfig | Mapping[str, Any] | str | Path,
    *,
    devices: int | Sequence[str | Path] = 4,
    data: str | Path | None = None,
    scheme: str | None = None,
    root: str | Path | None = None,
) -> RunResult:
    """Trains on a coordinator and devices that are processes of this machine, and returns the history.

    Args:
        config: a run file, its tables, or what `config.load_run` made of it.
        devices: how many shards to cut the task's data set into, or the shards that there are, one per device.
        data: the folder of the data set; digits needs none.
        scheme: how to cut [digits: dirichlet:0.5; motionsense: natural; others: iid].
        root: where everything is kept; a new folder under the system's temporary one when None.

    Raises:
        EdgeflError: the run file makes no sense, data is missing, or the run failed.
    """
    known = _config(config)
    _check_devices(known, count_devices(devices))
    check_here(known)
    folder = Path(tempfile.mkdtemp(prefix="edgefl-") if root is None else root).resolve()
    cut = _cut(known, devices, data, scheme, folder / "shards")
    log.info("run of %s on this machine; all of it is kept in %s", known.run.task, folder)
    with LocalFleet(root=folder, devices=cut.devices, test_shards=cut.test_shards) as fleet:
        run_id = fleet.submit(known)
        return _result(fleet, fleet.wait_run(run_id))


def cut_devices(task: str, scheme: str, num_devices: int, out: Path, data: Path | None, seed: int) -> CutFleet:
    """Cuts a central data set into shards for so many devices; raises as `tasks.cutting.cut_shards`."""
    paths = cut_shards(task, scheme, num_devices, out, data, seed)
    devices = tuple(LocalDevice(name=path.stem, shards={task: str(path.resolve())}) for path in paths)
    return CutFleet(devices=devices, test_shards={task: str((out / TEST_NAME).resolve())})


def check_here(config: RunConfig) -> None:
    """Raises what is wrong with a run before anything is started; its task must be able to train on this machine."""
    assemble(config, "check")
    make_task(config.run.task, config.task).learner()


def default_scheme(task: str) -> str:
    """Returns how a task's data is cut when nobody says it."""
    return SCHEMES.get(task, DEFAULT_SCHEME)


def count_devices(devices: int | Sequence[str | Path]) -> int:
    """Returns how many devices there are, of their number or their shards.

    Raises:
        ConfigError: neither.
    """
    if isinstance(devices, int) and not isinstance(devices, bool):
        return devices
    if isinstance(devices, Sequence) and not isinstance(devices, str | bytes):
        return len(devices)
    raise ConfigError(f"devices must be how many there are, or a list with the shard of each, got {devices!r}")


def _config(config: RunConfig | Mapping[str, Any] | str | Path) -> RunConfig:
    if isinstance(config, RunConfig):
        return config
    return parse_run(config) if isinstance(config, Mapping) else load_run(config)


def _check_devices(config: RunConfig, num_devices: int) -> None:
    if num_devices < max(1, config.devices.min):
        raise ConfigError(f"the run needs at least {max(1, config.devices.min)} devices, got {num_devices}")


def _cut(
    config: RunConfig, devices: int | Sequence[str | Path], data: str | Path | None, scheme: str | None, out: Path
) -> CutFleet:
    task = config.run.task
    if isinstance(devices, int):
        folder = None if data is None else Path(data)
        return cut_devices(task, scheme or default_scheme(task), devices, out, folder, config.run.seed)
    shards = [str(Path(path).resolve()) for path in devices]
    named = (LocalDevice(name=f"device-{n:02}", shards={task: shard}) for n, shard in enumerate(shards, 1))
    return CutFleet(devices=tuple(named), test_shards={})


def _result(fleet: LocalFleet, run: Json) -> RunResult:
    run_id = run["run_id"]
    rounds = fleet.history("rounds", run=run_id)
    # A round that was under way when the goal was reached stays open.
    last = next((row for row in reversed(rounds) if row["closed_at"] is not None), {})
    return RunResult(
        run_id=run_id,
        status=run["status"],
        reason=run["reason"],
        metrics={
            "accuracy": last.get("accuracy"),
            "loss": last.get("loss"),
            "bytes_up": sum(row["bytes_up"] for row in rounds),
            "bytes_down": sum(row["bytes_down"] for row in rounds),
            "seconds": run["finished_at"] - run["started_at"],
            **node_figures(last),
        },
        rounds=rounds,
        updates=fleet.history("updates", run=run_id),
        evaluations=fleet.history("evaluations", run=run_id),
        model=fleet.model_file(run["model"]),
        root=fleet.root,
    )
