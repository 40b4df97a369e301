"""Canary of a process that gets names of foreign code: what it imports and calls for them, as lines of a file.

Planted as `sitecustomize.py` on the PYTHONPATH. `CANARY_NAMES` is a file with lines `module:Name`, `CANARY_LOG`
the one that is written. A line is `import MODULE`, where a registry of edgefl imports a named module, or
`call NAME`, where such a file calls one of the named callables that are written in Python. Calls are counted only
with `CANARY_CALLS`: it makes a process slow.
"""

import os
import sys
import threading

NAMES, LOG = os.environ.get("CANARY_NAMES"), os.environ.get("CANARY_LOG")
REGISTRIES = (
    "core/extensions.py", "strategies/registry.py", "tasks/registry.py", "tasks/local_algorithms/registry.py",
    "compression/registry.py", "flower/strategy_options.py", "tasks/learners/torch_learner.py",
    "engine/assembly/build.py", "engine/assembly/strategy.py", "engine/assembly/job.py",
)  # fmt: skip
IMPORTERS = ("importlib/__init__.py", "importlib._bootstrap>", "importlib._bootstrap_external>")
MARK = "canary-7f3a"


def write(line):
    descriptor = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def is_registry(code):
    return code is not None and code.co_filename.endswith(REGISTRIES) and "edgefl" in code.co_filename


def find_importer(frame):
    """Returns the code that asked for an import; importlib.metadata imports what it needs itself."""
    while frame is not None and frame.f_code.co_filename.endswith(IMPORTERS):
        frame = frame.f_back
    return None if frame is None else frame.f_code


def find_codes(names):
    """Returns the code objects that a call of the names runs, where their modules are loaded already."""
    codes = {}
    for name in names:
        module, _, attribute = name.partition(":")
        found = getattr(sys.modules.get(module), attribute, None)
        for function in (found, getattr(found, "__init__", None), getattr(found, "__new__", None)):
            if (code := getattr(function, "__code__", None)) is not None:
                codes[code] = name
    return codes


def watch():
    with open(NAMES) as file:  # noqa: PTH123 pathlib is among the names that are watched
        names = file.read().split()
    modules, codes, known = {name.partition(":")[0] for name in names}, {}, {}

    def on_event(event, arguments):
        if event == "import" and arguments[0] in modules and is_registry(find_importer(sys._getframe().f_back)):
            write(f"import {arguments[0]}")

    def on_call(frame, event, argument):
        if event != "call" or frame.f_back is None:
            return
        caller = frame.f_back.f_code
        if caller not in known:
            known[caller] = is_registry(caller)
        if known[caller]:
            if not codes:
                codes.update(find_codes(names))
            if frame.f_code in codes and any(MARK in str(value) for value in frame.f_locals.values()):
                write(f"call {codes[frame.f_code]}")

    sys.addaudithook(on_event)
    if os.environ.get("CANARY_CALLS"):
        threading.setprofile(on_call)
        sys.setprofile(on_call)


if NAMES and LOG:
    watch()
