"""Feeds damaged bodies of every codec to the decoders, guided by what of their code is reached: `make fuzz`.

    fuzz_bodies.py [RUNS]              one process after the other, each fuzzes an example of the registry
    fuzz_bodies.py SPEC ARGUMENTS...   one example, with libFuzzer's arguments, such as the file of an input

An input is the number of a surface (one byte) and its content. What the decoder makes of it must be a CodecError or
tensors as declared, within the caps of memory; all else stops the program, and the input is left in a file.
"""

import subprocess
import sys
import tempfile
import tracemalloc
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

NUM_RUNS = 1_000_000
MOST_BYTES = 1 << 20
"""What no decoding of the small tasks needs a tenth of."""
MEASURED_EVERY = 16
"""Measuring takes longer than decoding; the other inputs are held to `rss_limit_mb`."""
LIMITS = ("-max_len=4096", "-len_control=0", "-timeout=20", "-rss_limit_mb=1024")
KEPT = f"-artifact_prefix={Path(tempfile.gettempdir(), 'edgefl-fuzz-')}"


def fuzz_all(num_runs: int) -> int:
    """Returns 0 when no example stopped its program, else the number of those that did."""
    from codec_examples import EXAMPLES  # noqa: PLC0415 not before it can be instrumented, in the other use

    each, num_stopped = -(-num_runs // len(EXAMPLES)), 0
    for place, spec in enumerate(EXAMPLES):
        command = [sys.executable, __file__, spec, f"-runs={each}", f"-seed={place + 1}", KEPT]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        reached = [line for line in done.stdout.splitlines() if " cov: " in line][-1:]
        print(f"{spec}: {each} inputs, {reached[0].strip() if reached else 'none'}", flush=True)  # noqa: T201 a program
        if done.returncode:
            num_stopped += 1
            print(done.stdout, flush=True)  # noqa: T201 likewise
    return num_stopped


def fuzz_one(spec: str, arguments: list[str]) -> None:
    """Runs until the arguments say that it is enough, and ends the process."""
    import atheris  # noqa: PLC0415 for Linux on x86-64 alone, and only needed here

    with atheris.instrument_imports(include=["edgefl"]):
        import numpy as np  # noqa: PLC0415 as what follows
        from damaged_bodies import decode_damaged, surfaces_of  # noqa: PLC0415 imported while it is instrumented

    np.unique(np.arange(2))  # imports modules of its own at the first time
    surfaces = surfaces_of(spec)

    def decode(data: bytes) -> None:
        if not data:
            return
        surface, content = surfaces[data[0] % len(surfaces)], data[1:]
        # Which inputs are measured follows from the input, so that one that stopped the program does so again.
        if zlib.crc32(data) % MEASURED_EVERY:
            decode_damaged(surface, content)
            return
        tracemalloc.start()
        try:
            decode_damaged(surface, content)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < MOST_BYTES, f"{peak} bytes for {content.hex()}"

    with tempfile.TemporaryDirectory() as corpus:
        for number, surface in enumerate(surfaces):
            Path(corpus, str(number)).write_bytes(bytes([number]) + surface.content)
        is_replay = any(not argument.startswith("-") for argument in arguments)
        atheris.Setup([sys.argv[0], *LIMITS, *arguments, *([] if is_replay else [corpus])], decode)
        atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1:] and not sys.argv[1].isdigit():
        fuzz_one(sys.argv[1], sys.argv[2:])
    else:
        sys.exit(fuzz_all(int(sys.argv[1]) if sys.argv[1:] else NUM_RUNS))
