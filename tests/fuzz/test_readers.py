"""Every reader of bytes from outside: it reads what is valid, and refuses what is damaged with an error of ours.

The long form is `make fuzz`. Here each reader gets a few of the same mutations.
"""

from __future__ import annotations

import ast
import json
import sys
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any

import pytest
from fuzz.mutation import changed, mutated
from fuzz.reader import (
    MIB,
    MOST_INPUT_BYTES,
    Form,
    HangError,
    Reader,
    Seed,
    TooLargeError,
    TooSlowError,
    Trial,
    peak_bytes,
)
from fuzz.readers import INSIDE, READERS

from edgefl.core.errors import EdgeflError, NetworkError

PACKAGE = Path(__file__).parents[2] / "edgefl"
NUM_CASES = 200
"""How many damaged inputs each reader is fed here, the same ones every time."""
WHOLE = (
    b"", b"\x00", b"\xff" * 80, b"null", b"true", b"0", b"-1.5", b'""', b'"x"', b"[]", b"[null]", b"{}", b'{"v":1}',
    b'{"v":[1]}', b'{"v":1,"":{}}', b"[" * 5000 + b"]" * 5000,
)  # fmt: skip
"""Fed in place of any seed's content."""
PARSERS = {
    "parse_json", "parse_toml", "parse_message", "load_json", "safe_load", "frombuffer", "fromfile", "unpack_from",
    "iter_unpack", "FromString", "ParseFromString", "message_from_proto", "b64decode", "fromisoformat", "load_file",
    "load_safetensors", "ZipFile", "GzipFile", "frombuf", "load_pem_x509_csr", "load_pem_x509_certificate",
    "load_der_x509_certificate", "load_pem_private_key", "load_pem_public_key", "load_pem_x509_crl",
    "InferenceSession", "ParquetFile",
    "get_single_data",
    "literal_eval", "loadtxt", "genfromtxt", "memmap", "open_memmap", "read_array", "decompress",
}  # fmt: skip
"""Names of calls that give bytes a meaning, whatever they are called on; those of `QUALIFIED` with what they are."""
QUALIFIED = {
    "json.loads", "json.load", "tomllib.loads", "tomllib.load", "np.load", "numpy.load", "struct.unpack",
    "tarfile.open",
    "csv.reader", "shlex.split", "onnx.load", "lzma.open", "gzip.open", "yaml.parse", "torch.load", "pickle.loads",
}  # fmt: skip
OURS = {"core/safe_parsing.py"}
OWN_CALLS = {"reader.read_array"}
"""Calls of `PayloadReader`, which stands in the registry itself, not of numpy's function of that name."""


@pytest.mark.parametrize("name", READERS)
def test_a_reader_reads_what_is_valid_and_reads_or_refuses_the_rest_within_its_caps(
    made: Callable[[str], Reader], name: str
) -> None:
    reader, luck = made(name), Random(name)
    reached = _reached(lambda: _feed_seeds(reader))
    assert not set(READERS[name].covers) - reached, "its seeds do not run through what it stands for"
    trial = Trial(reader)
    with trial.alarmed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", RuntimeWarning)
        for content in WHOLE:
            trial.run(luck.choice(reader.seeds).close(content))
        for _ in range(NUM_CASES):
            seed = luck.choice(reader.seeds)
            trial.run(seed.close(mutated(seed, luck, reader.words)))
    assert not trial.findings, [(one.what, one.where, one.content) for one in trial.findings.values()]


def _feed_seeds(reader: Reader) -> None:
    for seed in reader.seeds:
        try:
            reader.feed(seed.close(seed.content))
        except EdgeflError:
            assert not reader.takes_seeds, seed.content


def _reached(act: Callable[[], object]) -> set[str]:
    """Returns the functions of edgefl, as `file:name`, that are called meanwhile."""
    seen = set[CodeType]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen.add(frame.f_code)

    threading.setprofile_all_threads(note) if sys.version_info >= (3, 12) else threading.setprofile(note)
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {
        f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_qualname.replace('.<locals>', '')}"
        for code in seen
        if Path(code.co_filename).is_relative_to(PACKAGE)
    }


def parsing_functions() -> Iterator[str]:
    """`file:name` of every function of edgefl that calls a parser."""
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        if file not in OURS:
            yield from (f"{file}:{name}" for name in _parsing(ast.parse(path.read_text()), ()))


def _parsing(tree: ast.AST, where: tuple[str, ...]) -> set[str]:
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found |= _parsing(node, (*where, node.name))
            continue
        if isinstance(node, ast.Call) and _is_parser(node.func):
            found.add(".".join(where))
        found |= _parsing(node, where)
    return found


def _is_parser(called: ast.expr) -> bool:
    name = ast.unparse(called)
    if name in OWN_CALLS:
        return False
    is_struct = name.endswith(".unpack") and name.rpartition(".")[0].isupper()
    return name in QUALIFIED or name.rpartition(".")[2] in PARSERS or is_struct


def test_whoever_parses_bytes_stands_in_the_registry_or_reads_nothing_from_outside() -> None:
    covered = {function for entry in READERS.values() for function in entry.covers}
    parsing = set(parsing_functions())
    assert sorted(parsing - covered - set(INSIDE)) == []
    assert sorted(set(INSIDE) - parsing) == [], "they parse nothing any more"
    assert sorted(covered & set(INSIDE)) == []


def test_a_parser_that_is_new_would_be_noticed() -> None:
    source = "import json\nclass A:\n    def read(self, body):\n        return json.loads(body)\n"
    assert _parsing(ast.parse(source), ()) == {"A.read"}


def _feeding(feed: Callable[[bytes], object], **options: Any) -> Trial:
    trial = Trial(Reader(feed=feed, seeds=(), **options))
    with trial.alarmed():
        for content in (b"", b"a", b"b", b"\x00" * 5):
            trial.run(content)
    return trial


def test_an_error_that_is_not_of_ours_is_a_finding_with_its_input() -> None:
    def feed(data: bytes) -> None:
        if not data:
            raise NetworkError("refused")
        if data == b"a":
            raise KeyError("x")

    trial = _feeding(feed)
    (found,) = trial.findings.values()
    assert (found.content, found.what, trial.num_cases, trial.num_read) == (b"a", "KeyError: 'x'", 4, 2)


def test_an_input_that_takes_too_much_memory_or_time_or_never_ends_is_a_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def take(data: bytes) -> None:
        kept = bytearray(5_000_000)
        assert len(kept) > len(data)
        raise NetworkError("refused, but dearly")

    def spin(_data: bytes) -> None:
        until_s = time.process_time() + 0.05
        while time.process_time() < until_s:
            pass

    def hang(data: bytes) -> None:
        while data == b"a":
            time.sleep(0.01)

    monkeypatch.setattr("fuzz.reader.MEASURED_EVERY", 1)
    assert {kind for kind, _ in _feeding(take, most_bytes=1_000_000).findings} == {TooLargeError.__name__}
    assert {kind for kind, _ in _feeding(spin, most_s=0.01).findings} == {TooSlowError.__name__}
    monkeypatch.setattr("fuzz.reader.HANGS_AFTER_S", 0.2)
    assert {kind for kind, _ in _feeding(hang).findings} == {HangError.__name__}


def test_an_input_that_makes_the_process_larger_is_measured_whichever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([100 * MIB, 100 * MIB, 100 * MIB, 107 * MIB])
    monkeypatch.setattr("fuzz.reader.MEASURED_EVERY", 1 << 40)
    monkeypatch.setattr("fuzz.reader.peak_bytes", lambda: next(sizes))
    taken: list[int] = []
    trial = Trial(Reader(feed=lambda data: taken.append(len(bytearray(9 * MIB))), seeds=()))
    with trial.alarmed():
        trial.run(b"a")  # as large as it was before, for all that the system says
        assert not trial.findings
        trial.run(b"b")
    assert ({kind for kind, _ in trial.findings}, len(taken)) == ({TooLargeError.__name__}, 3)


def test_what_was_resident_at_once_is_seen() -> None:
    before = peak_bytes()
    piece = b"x" * (before + 4 * MIB)
    assert len(piece) <= peak_bytes() <= 2 * len(piece)


@pytest.mark.parametrize("form", Form)
def test_mutations_differ_and_most_keep_the_form_of_the_seed(form: Form) -> None:
    content = {Form.JSON: b'{"v": 1, "a": [1, "x"]}', Form.TOML: b"[a]\nx = 1\ny = 'z'\n"}.get(form, b"a: 1, b: 2")
    luck = Random(5)
    made = [mutated(Seed(content=content, form=form), luck) for _ in range(300)]
    assert len(set(made)) > 100
    if form is Form.JSON:
        assert sum(_is_json(one) for one in made) > 150
    assert changed(content, form, Random(5)) == changed(content, form, Random(5))


def test_repeats_of_repeats_stay_as_small_as_an_input_may_be() -> None:
    """They took gigabytes, and the reader's process was said to hang."""
    luck, content = Random(3), b"x" * (MOST_INPUT_BYTES // 2)
    tracemalloc.start()
    try:
        for _ in range(60):
            assert len(changed(content, Form.TEXT, luck)) <= MOST_INPUT_BYTES
        assert tracemalloc.get_traced_memory()[1] < 8 * MOST_INPUT_BYTES
    finally:
        tracemalloc.stop()


def test_json_that_may_be_read_but_is_too_deep_to_be_written_is_changed_as_bytes() -> None:
    """It ended the reader's process, which counted as a finding of the reader."""
    luck, limit = Random(4), sys.getrecursionlimit()
    for depth in range(limit - 200, limit, 4):
        content = b'{"a":' * depth + b"1" + b"}" * depth
        assert isinstance(changed(content, Form.JSON, luck), bytes)


def _is_json(content: bytes) -> bool:
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return False
    return True
