"""`edgefl codecs`: what may stand in a line of `[compression]`, and what each codec costs and loses."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgefl.cli.listing import ListedGroup
from edgefl.cli.render import format_option, print_rows
from edgefl.errors import EdgeflError, UsageError

if TYPE_CHECKING:
    from edgefl.tasks.gradients import Gradient
    from edgefl.types import Json

LIST_COLUMNS = ("name", "kind", "argument", "biased", "contraction", "summary")
BENCH_COLUMNS = (
    "codec", "bytes_body", "ratio", "encode_mb_per_s", "decode_mb_per_s", "relative_error", "index_bits",
    "entropy_bits",
)  # fmt: skip
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@click.group("codecs", cls=ListedGroup)
def command() -> None:
    """List the codecs, measure them on a gradient."""


@command.command("list")
@format_option
def list_(*, fmt: str) -> None:
    """List the stages that a codec is made of, those of installed packages too.

    A line is a tensor stage, then a value stage, then a lossless one, joined by bars; each may be left out.
    `contraction` says whether the stage works behind `ef`.
    """
    from edgefl.compression.catalogue import listed  # noqa: PLC0415 fast start

    rows = [
        {
            "name": row.name,
            "kind": row.kind,
            "argument": row.argument,
            "biased": row.is_biased,
            "contraction": row.is_contraction,
            "summary": row.summary,
        }
        for row in listed()
    ]
    print_rows(rows, LIST_COLUMNS, fmt, kind="codecs")
    if fmt == "table":
        click.echo('\nAs in up = "ef|topk:0.01|int8" of a run file; "auto" chooses for each device.')


@command.command()
@click.option("--codec", "specs", multiple=True, help="A codec to measure; may be repeated [default: all stages].")
@click.option(
    "--gradient",
    "name",
    default="mnist-cnn",
    show_default=True,
    help="mnist-cnn, resnet-18, or a file (.npz, .safetensors) with arrays by name.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Folder of the MNIST images that the networks learn; otherwise mnist in $EDGEFL_DATA.",
)
@click.option(
    "--repeats", type=click.IntRange(min=1, max=1000), default=5, show_default=True, help="The best counts."
)
@format_option
def bench(*, specs: Sequence[str], name: str, data: Path | None, repeats: int, fmt: str) -> None:
    """Measure bytes, speed and error of codecs on one update of a network, on one thread.

    Speeds are megabytes of dense float32 a second. index_bits are what the place of an entry takes, entropy_bits what
    it would take at its entropy if places were spread evenly. Without torch or images, numbers are drawn instead.
    """
    for variable in THREAD_VARIABLES:  # before NumPy is loaded
        os.environ.setdefault(variable, "1")
    from edgefl.compression.catalogue import usual_lines  # noqa: PLC0415 after the line above, and slow

    gradient = _gradient(name, data)
    rows = (
        _measured(gradient, specs, repeats) if specs else _measured(gradient, usual_lines(gradient.tensors), repeats)
    )
    if fmt == "table":
        print_rows(rows, BENCH_COLUMNS, fmt, title=f"gradient: {gradient.source}")
    else:
        sourced = [{"gradient": gradient.source, **row} for row in rows]
        print_rows(sourced, ("gradient", *BENCH_COLUMNS), fmt, kind="codec-bench")


def _measured(gradient: Gradient, specs: Sequence[str], repeats: int) -> list[Json]:
    import time  # noqa: PLC0415 only measuring needs a clock

    from edgefl.compression.measuring import measure  # noqa: PLC0415 fast start

    rows: list[Json] = []
    shows = sys.stderr.isatty()
    with click.progressbar(specs, file=sys.stderr) if shows else nullcontext(specs) as waiting:
        for spec in waiting:
            found = measure(spec, gradient.tensors, gradient.shapes, clock=time.perf_counter, repeats=repeats)
            rows.append(
                {
                    "codec": found.spec,
                    "bytes_body": found.num_bytes,
                    "ratio": found.ratio,
                    "encode_mb_per_s": found.encode_mb_per_s,
                    "decode_mb_per_s": found.decode_mb_per_s,
                    "relative_error": found.relative_error,
                    "index_bits": found.index_bits,
                    "entropy_bits": found.entropy_bits,
                }
            )
    return rows


def _gradient(name: str, data: Path | None) -> Gradient:
    """Returns the real update, or one that is drawn where it cannot be had.

    Raises:
        EdgeflError: the gradient is unknown or its file is no good, or the folder that was named has no images.
    """
    from edgefl.tasks.gradients import SETTINGS, measured_gradient, read_gradient  # noqa: PLC0415 fast start

    if name not in SETTINGS:
        if "." not in name:
            raise UsageError(f"--gradient is {', '.join(SETTINGS)}, or a file .npz or .safetensors, got {name!r}")
        return read_gradient(Path(name))
    try:
        return measured_gradient(name, data)
    except EdgeflError as error:
        if data is not None:
            raise
        click.echo(f"edgefl: no real gradient, one is drawn: {error}", err=True)
        return _drawn(name)


def _drawn(name: str) -> Gradient:
    from edgefl.compression.measuring import drawn_update  # noqa: PLC0415 fast start
    from edgefl.tasks.gradients import SEED, Gradient, network_shapes  # noqa: PLC0415 likewise
    from edgefl.types import derived_rng  # noqa: PLC0415 NumPy

    shapes = network_shapes(name)
    return Gradient(
        tensors=drawn_update(shapes, derived_rng(SEED, "drawn")),
        shapes=shapes,
        source=f"drawn from Student's t with 3 degrees of freedom, in the shapes of {name}",
    )
