"""`edgefl device infer` and `serve`: run the deployed model, or a file, on this board."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl.cli.device_options import state_option
from edgefl.cli.render import print_rows
from edgefl.core.errors import NotFoundError

if TYPE_CHECKING:
    from edgefl.device.inference.model_store import DeployedModel, ModelStore

COLUMNS: tuple[str, ...] = ("row", "class", "index", "probability")

model_option = click.option(
    "--model",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="An ONNX file [default: the model that is deployed here].",
)
threads_option = click.option("--threads", type=click.IntRange(1, 64), default=1, show_default=True)


@click.command()
@click.option(
    "--input",
    "source",
    required=True,
    type=click.Path(path_type=Path),
    help="Rows: .npy, .npz, .csv, an IDX file, or a shard.",
)
@model_option
@state_option
@threads_option
@click.option("--format", "fmt", type=click.Choice(["table", "json", "csv"]), default="table", show_default=True)
def infer(*, source: Path, file: Path | None, root: Path | None, threads: int, fmt: str) -> None:
    """Print class and probability of every row of a file."""
    import numpy as np  # noqa: PLC0415 fast start

    from edgefl.device.inference.inputs import read_inputs  # noqa: PLC0415 likewise
    from edgefl.device.inference.onnx_model import OnnxModel  # noqa: PLC0415 likewise

    model = OnnxModel(file or _find_deployed_file(root), threads=threads)
    rows = read_inputs(source, model)
    predictions = [
        {"row": number, **prediction.to_json()} for number, prediction in enumerate(model.predict(rows.inputs))
    ]
    columns = COLUMNS
    if rows.labels is not None:
        predictions = [{**row, "label": int(label)} for row, label in zip(predictions, rows.labels, strict=True)]
        columns = (*COLUMNS, "label")
    print_rows(predictions, columns, fmt, kind="predictions")
    if rows.labels is not None and predictions:
        right = float(np.mean([row["index"] == row["label"] for row in predictions]))
        click.echo(f"accuracy {right:.4f} on {len(predictions)} labelled rows", err=True)


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; there is no login.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 takes a free one.")
@model_option
@state_option
@threads_option
def serve(*, host: str, port: int, file: Path | None, root: Path | None, threads: int) -> None:
    """Answer POST /predict with the deployed model until SIGTERM or Ctrl-C; a new one is taken over as it comes."""
    from edgefl.device.inference.server import InferenceServer, ServedModel  # noqa: PLC0415 fast start
    from edgefl.system.process_control import on_stop_signal  # noqa: PLC0415 likewise

    served = ServedModel(store=None if file else _open_store(root), file=file, threads=threads)
    server = InferenceServer(served, host, port)
    with on_stop_signal(server.stop):
        server.start()
        click.echo(f"serving on http://{host}:{server.port}")
        if served.current is None:
            logging.getLogger(__name__).warning("no model is deployed yet; requests get 503 until one is")
        server.wait()


def _open_store(root: Path | None) -> ModelStore:
    from edgefl.device.inference.model_store import ModelStore  # noqa: PLC0415 fast start
    from edgefl.device.state_dir import get_default_state_dir  # noqa: PLC0415 likewise

    return ModelStore(root or get_default_state_dir())


def _find_deployed_file(root: Path | None) -> Path:
    store: Any = _open_store(root)
    current: DeployedModel | None = store.load().current
    if current is None:
        raise NotFoundError(
            f"no model is deployed in {store.folder.parent}; on the coordinator: edgefl model deploy MODEL, "
            "or name a file: --model FILE.onnx"
        )
    path: Path = store.path(current)
    return path
