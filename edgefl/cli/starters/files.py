"""Files that `edgefl task new` and `edgefl strategies new` write from templates: names, texts, and writing them."""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Mapping
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from edgefl.core.errors import DataError, UsageError

NAME_PATTERN = re.compile(r"[a-z][a-z0-9_]*\Z")


def check_module_name(name: str, noun: str, *, out: Path | None = None) -> None:
    """Rejects a name that is invalid for a module of the user's own.

    Args:
        name: of the module and, in other letters, of its class.
        noun: what the module will hold, such as strategy.
        out: folder that the module is written to; one on the search path is no package of that name.

    Raises:
        UsageError: with the reason.
    """
    if not NAME_PATTERN.match(name) or keyword.iskeyword(name) or name.endswith("_"):
        raise UsageError(f"a {noun}'s name is a module's: small letters, digits and _, as my_{noun}; got {name!r}")
    if name in sys.stdlib_module_names or _is_installed(name, out):
        raise UsageError(f"there is a module {name!r} that others import; choose another name, such as my_{name}")


def make_class_name(name: str) -> str:
    """Returns the name of the class in the module `name`: wind_speed has WindSpeed."""
    return "".join(part.capitalize() for part in name.split("_"))


def render_template(package: str, path: str, values: Mapping[str, str]) -> str:
    """Returns the text of a template in a package, `@NAME@` and the like replaced by their values."""
    text = files(package).joinpath(*path.split("/")).read_text(encoding="utf-8")
    return re.sub(r"@([A-Z]+)@", lambda match: values[match[1]], text)


def write_files(texts: Mapping[Path, str]) -> None:
    """Writes texts to their paths, and makes the folders that are not there.

    Raises:
        DataError: a file cannot be written.
    """
    for path, text in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error.strerror}") from None


def _is_installed(name: str, out: Path | None) -> bool:
    """Whether an import of `name` finds a module, or a folder without `__init__.py` that is not `out`."""
    found = find_spec(name)
    if found is None:
        return False
    if found.origin is not None or out is None:
        return True
    return any(Path(place).resolve() != out.resolve() for place in found.submodule_search_locations or ())
