"""`edgefl codecs`: lists the stages of `[compression]` lines, and measures codecs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgefl.cli.command_group import FullHelpGroup
from edgefl.cli.render import format_option, print_rows
from edgefl.core.errors import EdgeflError, UsageError

if TYPE_CHECKING:
    from edgefl.core.types import Json
    from edgefl.tasks.datasets.sample_updates import SampleUpdate

LIST_COLUMNS = ("name", "kind", "argument", "biased", "contraction", "summary")
BENCH_COLUMNS = (
    "codec", "bytes_body", "ratio", "encode_mb_per_s", "decode_mb_per_s", "relative_error", "index_bits",
    "entropy_bits",
)  # fmt: skip
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@click.group("codecs", cls=FullHelpGroup)
def command() -> None:
    """List the codecs, measure them on a gradient."""


@command.command("list")
@format_option
def list_(*, fmt: str) -> None:
    """List the stages that a codec is made of, those of installed packages too.

    A line is a tensor stage, then a value stage, then a lossless one, joined by bars; each may be left out.
    `contraction` says whether the stage works behind `ef`.
    """
    from edgefl.compression.catalogue import list_stages  # noqa: PLC0415 fast start

    rows = [
        {
            "name": row.name,
            "kind": row.kind,
            "argument": row.argument,
            "biased": row.is_biased,
            "contraction": row.is_contraction,
            "summary": row.summary,
        }
        for row in list_stages()
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
    from edgefl.compression.catalogue import make_example_specs  # noqa: PLC0415 after the line above, and slow

    gradient = _load_gradient(name, data)
    rows = (
        _measure_codecs(gradient, specs, repeats)
        if specs
        else _measure_codecs(gradient, make_example_specs(gradient.tensors), repeats)
    )
    if fmt == "table":
        print_rows(rows, BENCH_COLUMNS, fmt, title=f"gradient: {gradient.source}")
    else:
        labelled_rows = [{"gradient": gradient.source, **row} for row in rows]
        print_rows(labelled_rows, ("gradient", *BENCH_COLUMNS), fmt, kind="codec-bench")


def _measure_codecs(gradient: SampleUpdate, specs: Sequence[str], repeats: int) -> list[Json]:
    import time  # noqa: PLC0415 only measuring needs a clock

    from edgefl.compression.codec_benchmark import measure_codec  # noqa: PLC0415 fast start

    rows: list[Json] = []
    is_terminal = sys.stderr.isatty()
    with click.progressbar(specs, file=sys.stderr) if is_terminal else nullcontext(specs) as pending:
        for spec in pending:
            result = measure_codec(spec, gradient.tensors, gradient.shapes, clock=time.perf_counter, repeats=repeats)
            rows.append(
                {
                    "codec": result.spec,
                    "bytes_body": result.num_bytes,
                    "ratio": result.ratio,
                    "encode_mb_per_s": result.encode_mb_per_s,
                    "decode_mb_per_s": result.decode_mb_per_s,
                    "relative_error": result.relative_error,
                    "index_bits": result.index_bits,
                    "entropy_bits": result.entropy_bits,
                }
            )
    return rows


def _load_gradient(name: str, data: Path | None) -> SampleUpdate:
    """Returns a real update, or a random one where none is available.

    Raises:
        EdgeflError: the gradient is unknown or its file is invalid, or the named folder has no images.
    """
    from edgefl.tasks.datasets.sample_updates import SAMPLE_SETTINGS, compute_sample_update, read_sample_update  # noqa: PLC0415 fast start

    if name not in SAMPLE_SETTINGS:
        if "." not in name:
            raise UsageError(
                f"--gradient is {', '.join(SAMPLE_SETTINGS)}, or a file .npz or .safetensors, got {name!r}"
            )
        return read_sample_update(Path(name))
    try:
        return compute_sample_update(name, data)
    except EdgeflError as error:
        if data is not None:
            raise
        click.echo(f"edgefl: no real gradient, one is drawn: {error}", err=True)
        return _draw_gradient(name)


def _draw_gradient(name: str) -> SampleUpdate:
    from edgefl.compression.codec_benchmark import make_random_update  # noqa: PLC0415 fast start
    from edgefl.core.types import derive_rng  # noqa: PLC0415 NumPy
    from edgefl.tasks.datasets.sample_updates import SEED, SampleUpdate, get_network_shapes  # noqa: PLC0415 likewise

    shapes = get_network_shapes(name)
    return SampleUpdate(
        tensors=make_random_update(shapes, derive_rng(SEED, "drawn")),
        shapes=shapes,
        source=f"drawn from Student's t with 3 degrees of freedom, in the shapes of {name}",
    )
