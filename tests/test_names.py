"""Names in the code are the field's: none of the private words that they once were."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import edgefl

TERMS = {
    "agenda": "event queue",
    "aside": "spool",
    "asker": "client",
    "barrier": "round time-out",
    "beat": "heartbeat",
    "begun": "started",
    "bell": "wake-up",
    "brought": "build",
    "complaint": "warning",
    "diary": "writer",
    "door": "admission",
    "drawn": "sampled",
    "errand": "task",
    "flagged": "blocked",
    "frugal": "memory tuning",
    "given": "dispatched",
    "guest": "candidate",
    "heard": "received",
    "hindrance": "degraded mode",
    "hindered": "degraded",
    "inbox": "queue, or messages",
    "journey": "life cycle",
    "keeper": "retention",
    "ledger": "history writer",
    "leftover": "residual",
    "life": "incarnation",
    "lives": "incarnations",
    "mail": "messages",
    "mailbag": "messages",
    "meant": "eligible",
    "mended": "patched",
    "mending": "repair",
    "outbox": "messages, or uploader",
    "readmission": "re-enrolment",
    "readmit": "re-enrol",
    "readmitted": "re-enrolled",
    "recall": "cancel, or finish early",
    "recalled": "cancelled",
    "rescue": "time-out action",
    "resident": "local parameters",
    "roster": "registry",
    "said": "message",
    "seat": "work slot",
    "settled": "used",
    "shown": "visible",
    "stand": "phase",
    "standing": "snapshot",
    "tally": "progress",
    "teller": "notifier",
    "telling": "notification",
    "told": "notified, or sent",
    "twin": "clone",
    "unwell": "unhealthy",
    "vetting": "validation",
    "vitals": "health",
    "wanted": "requested",
    "whence": "source",
    "wish": "request",
    "witness": "diagnostics",
}
"""Word -> term of the field in its place; a plural with s counts as the word."""

LABELS = {
    ("tasks/motionsense.py", "standing"),  # a class of the data set
    ("cli/catalogue.py", "drawn"),  # seeds random numbers
    ("device/diagnostics/json_log.py", "mail"),  # stands for an e-mail address
}
"""Texts that are no names of ours, by file."""

_KEY = re.compile(r"[a-z]+(?:[-_][a-z0-9]+)*\Z")
_WORD = re.compile(r"[A-Z]?[a-z]+")
ROOT = Path(edgefl.__file__).parent


def names_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields line and name of all that a module names: classes, functions, parameters, attributes, keys."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield line, name
            case ast.arg(arg=str(name)) | ast.keyword(arg=str(name)) | ast.Attribute(attr=name) | ast.Name(id=name):
                yield line, name
            case ast.alias(name=name, asname=as_name):
                yield line, as_name or name
            case ast.Constant(value=str(text)) if _KEY.match(text):
                yield line, text


def old_words(name: str) -> Iterator[str]:
    for word in (found.lower() for found in _WORD.findall(name)):
        for form in (word, word.removesuffix("s"), word.removesuffix("es")):
            if form in TERMS:
                yield form
                break


def test_no_name_is_a_private_word_where_the_field_has_a_term():
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        place = str(path.relative_to(ROOT))
        names = [(1, name) for name in path.relative_to(ROOT).with_suffix("").parts]
        names += names_of(ast.parse(path.read_text()))
        found += [
            f"{place}:{line}: {name}: say {TERMS[word]}"
            for line, name in names
            if (place, name) not in LABELS
            for word in old_words(name)
        ]
    assert not found, "\n".join(found)


def test_the_search_finds_names_of_every_sort():
    source = """
import door
class Twins: ...
def hear(told): return told.seats
async def send(message): return dict(outbox=1, **{"vitals": 2, "run-told": 3})
"""
    found = [word for _, name in names_of(ast.parse(source)) for word in old_words(name)]
    assert sorted(set(found)) == ["door", "outbox", "seat", "told", "twin", "vitals"]
    assert list(old_words("backdoor_seatings")) == [], "a part of a longer word is none"
