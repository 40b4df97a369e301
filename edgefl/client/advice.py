"""What an advice takes from a fleet's history: boards as measured, and how wrong earlier predictions were."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgefl.core.errors import DataError

if TYPE_CHECKING:
    from edgefl.client.sources import Source
    from edgefl.core.config import Quantity, RunConfig
    from edgefl.core.types import Json
    from edgefl.simulation.advice.advice import Advice
    from edgefl.simulation.advice.automatic import Choice
    from edgefl.simulation.advice.boards import MeasuredBoard
    from edgefl.simulation.sweep import SweepOutcome

MAX_RUNS = 20
"""Newest runs of the task from which boards are measured."""
MAX_UPDATES = 1000
"""Newest updates of one run."""
MAX_PREDICTIONS = 50
MIN_CORRECTED = 3
"""Finished runs of a task from which on their errors correct the next advice."""
MAX_CORRECTION = 4.0
"""Largest factor, either way: beyond it the fleet has changed, and an old error says nothing."""
PREDICTED = ("seconds", "bytes", "joules")
ERROR_COLUMNS = (
    "run_id", "name", "task", "strategy", "predicted_s", "seconds", "seconds_error", "predicted_bytes", "bytes",
    "bytes_error", "predicted_j", "joules", "joules_error",
)  # fmt: skip


def advise(  # noqa: PLR0913 the options of the command line, all by name
    config: RunConfig | Mapping[str, Any] | str | Path,
    source: Source | None = None,
    *,
    goal: str | None = None,
    minimise: Quantity | None = None,
    budgets: Mapping[Quantity, float] | None = None,
    seconds: float = 60.0,
    num_jobs: int | None = None,
    devices: int | Sequence[str | Path] | None = None,
    profiles: Sequence[str] = (),
    data: str | Path | None = None,
    scheme: str | None = None,
    root: str | Path | None = None,
    on_end: Callable[[SweepOutcome], None] = lambda _: None,
) -> Advice:
    """Returns which strategy, codec and local work suit a run and its boards.

    Args:
        config: a run file, its tables, or the result of `config.load_run`.
        source: of a fleet whose boards are meant, as its history measured them; None for described boards.
        goal: of a metric, such as `accuracy >= 0.9`; None for the run file's own, else what it comes to.
        minimise: time, bytes or energy; None for the run file's `strategy.minimise`, else time.
        budgets: most seconds, bytes or joules, by quantity.
        seconds: that the advice may take.
        num_jobs: simulations side by side; one for each core when None.
        devices: as of `edgefl.simulate`, for described boards.
        profiles: likewise.
        data: folder of the data to train on, as of `edgefl.simulate`.
        scheme: likewise, how it is cut.
        root: where simulated runs are kept; `~/.local/share/edgefl/simulations/advice` when None.
        on_end: called as simulated runs end.

    Raises:
        EdgeflError: the run file or the goal is invalid, no board has trained the task, or data is missing.
    """
    from edgefl.core.config import make_run_config  # noqa: PLC0415 fast start
    from edgefl.simulation.advice import advice  # noqa: PLC0415 likewise
    from edgefl.simulation.advice.automatic import make_base  # noqa: PLC0415 likewise
    from edgefl.simulation.simulated_run import count_cores  # noqa: PLC0415 likewise

    started_s = time.monotonic()
    run_config, own_quantity = make_base(make_run_config(config))
    task = run_config.run.task
    folder = _find_folder(root)
    fleet = advice.describe_fleet(
        run_config,
        folder,
        measured=[] if source is None else read_measured_boards(source, task),
        devices=devices if devices is None or isinstance(devices, int) else [Path(path) for path in devices],
        profiles=profiles,
        data=None if data is None else Path(data),
        scheme=scheme,
    )
    request = advice.Request(
        goal=goal,
        minimise=minimise or own_quantity,
        budgets=budgets or {},
        seconds=max(1.0, seconds - (time.monotonic() - started_s)),
        num_jobs=num_jobs or count_cores(),
    )
    corrections = {} if source is None else compute_corrections(read_errors(source), task)
    return advice.advise(fleet, request, folder, clock=time.monotonic, corrections=corrections, on_end=on_end)


def settle_strategy(
    config: RunConfig, source: Source, *, seconds: float | None = None, root: str | Path | None = None
) -> Choice:
    """Returns a run file without `auto`: with the strategy, codec and work chosen for a fleet, and the reasons.

    A run file that names a strategy comes back as it is, without reasons.

    Args:
        config: the run file.
        source: of the fleet, whose history says how fast its boards are.
        seconds: that it may take; below a minute when None.
        root: as of `advise`.

    Raises:
        DataError: no board has trained the task yet.
        RunFailedError: no candidate reached the goal.
        EdgeflError: as `advise`.
    """
    from edgefl.core.config import AUTO_STRATEGY  # noqa: PLC0415 fast start
    from edgefl.simulation.advice.automatic import AUTO_SECONDS, Choice, choose_settings  # noqa: PLC0415 likewise

    if config.strategy.name != AUTO_STRATEGY:
        return Choice(config=config, reasons=())
    started_s, task = time.monotonic(), config.run.task
    try:
        measured = read_measured_boards(source, task)
    except DataError as error:
        raise DataError(f"strategy.name = {AUTO_STRATEGY!r}: {error}") from None
    return choose_settings(
        config,
        _find_folder(root),
        clock=time.monotonic,
        seconds=(AUTO_SECONDS if seconds is None else seconds) - (time.monotonic() - started_s),
        measured=measured,
        corrections=compute_corrections(read_errors(source), task),
    )


def _find_folder(root: str | Path | None) -> Path:
    """Returns where simulated runs of advice are kept."""
    from edgefl.simulation.simulated_run import ADVICE_FOLDER, default_root  # noqa: PLC0415 fast start

    return Path(default_root() / ADVICE_FOLDER if root is None else root).expanduser().resolve()


def read_measured_boards(source: Source, task: str) -> list[MeasuredBoard]:
    """Returns the boards of a fleet that have trained a task, by their newest updates.

    Raises:
        DataError: none has.
        EdgeflError: as the source raises.
    """
    from edgefl.simulation.advice.boards import compute_bodies, measure_boards  # noqa: PLC0415 fast start

    rows = [row for row in source.read_rows("runs") if row["task"] == task and row["num_used"]]
    run_ids = [row["run_id"] for row in rows[-MAX_RUNS:]]
    updates = [
        row for run_id in run_ids for row in source.read_newest("updates", {"run": run_id, "limit": MAX_UPDATES})
    ]
    runs = {run_id: source.find_run(run_id) for run_id in run_ids}
    capabilities = source.read_capabilities({row["device_id"] for row in updates})
    found: dict[str, tuple[int, int] | None] = {}
    for run in runs.values():
        if (key := _get_body_key(run.config)) not in found:
            found[key] = compute_bodies(run.config)
    bodies = {run_id: found[_get_body_key(run.config)] for run_id, run in runs.items()}
    return measure_boards(
        source.read_rows("devices"),
        updates,
        task,
        {run_id: run.batch_size for run_id, run in runs.items()},
        capabilities=capabilities,
        bodies={run_id: body for run_id, body in bodies.items() if body is not None},
    )


def _get_body_key(config: Mapping[str, Any]) -> str:
    """Returns a key of the settings on which the size of a run's models and updates depends."""
    rest = {name: table for name, table in config.items() if name not in {"run", "strategy", "devices", "advice"}}
    return json.dumps([config["run"]["task"], config["strategy"]["name"], rest], sort_keys=True, default=str)


def read_errors(source: Source) -> list[Json]:
    """Returns a row for each finished run whose file says what was predicted of it, oldest first.

    An error is what the run took, to what was predicted, less 1: 0.1 says that it took a tenth more. Runs that ended
    by a limit, short of what was predicted, are left out.
    """
    rows = [row for row in source.read_rows("runs") if row["status"] == "finished"][-MAX_PREDICTIONS:]
    found = ((row, source.find_run(row["run_id"]).config) for row in rows)
    return [
        row for run, config in found if config.get("advice") and (row := _compare(source, run, config)) is not None
    ]


def compute_corrections(errors: list[Json], task: str) -> dict[str, float]:
    """Returns factors for the next advice of a task: medians of what runs took to what was simulated, by quantity.

    What was predicted holds the factors of its own time, which are taken out again. Empty for a quantity of which
    fewer than `MIN_CORRECTED` runs tell.
    """
    factors = {}
    for name in PREDICTED:
        ratios = [
            (1 + row[f"{name}_error"]) * row[f"{name}_factor"]
            for row in errors
            if row["task"] == task and row[f"{name}_error"] is not None
        ]
        if len(ratios) >= MIN_CORRECTED:
            factors[name] = min(MAX_CORRECTION, max(1 / MAX_CORRECTION, statistics.median(ratios)))
    return factors


def _compare(source: Source, run: Mapping[str, Any], config: Mapping[str, Any]) -> Json | None:
    """Returns the row of a run; None where it ended by a limit, so that it says nothing of the prediction."""
    from edgefl.engine.progress import is_goal_reason  # noqa: PLC0415 fast start

    predicted, section = config["advice"], config.get("run") or {}
    rounds = [row for row in source.read_rows("rounds", run=run["run_id"]) if row["closed_at"] is not None]
    if section.get("accuracy") is not None or section.get("until") is not None:
        is_comparable = is_goal_reason(run.get("reason") or "")
    else:
        is_comparable = len(rounds) >= (predicted.get("rounds") or 0)
    if not is_comparable:
        return None
    seconds = rounds[-1]["closed_at"] - rounds[0]["started_at"] if rounds else None
    sent = sum(row["bytes_up"] + row["bytes_down"] for row in rounds) if rounds else None
    up, down = predicted.get("bytes_up"), predicted.get("bytes_down")
    predicted_bytes = None if up is None or down is None else up + down
    return {
        **{name: run[name] for name in ("run_id", "name", "task", "strategy")},
        "predicted_s": predicted.get("seconds"),
        "seconds": seconds,
        "seconds_error": _compute_error(predicted.get("seconds"), seconds),
        "predicted_bytes": predicted_bytes,
        "bytes": sent,
        "bytes_error": _compute_error(predicted_bytes, sent),
        "predicted_j": predicted.get("joules"),
        "joules": run["energy_j"],
        "joules_error": _compute_error(predicted.get("joules"), run["energy_j"]),
        **{f"{name}_factor": predicted.get(f"{name}_factor") or 1.0 for name in PREDICTED},
    }


def _compute_error(predicted: float | None, measured: float | None) -> float | None:
    return measured / predicted - 1 if predicted and measured else None
