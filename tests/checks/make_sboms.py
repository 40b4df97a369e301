"""Writes a CycloneDX bill of materials for each lock of boards; exit code 1 when a licence is not permitted.

    python tests/checks/make_sboms.py [FOLDER]          [default: build/sbom]

A package's licence is read from its metadata in this environment. Each component has the hash of its wheel.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from license_expression import ExpressionError, get_spdx_licensing
from packageurl import PackageURL

from edgefl import __version__
from edgefl.coordinator.api.dashboard import PAGE_FOLDER
from edgefl.provision.wheels import PinnedWheel, parse_lock

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "provisioning/locks"
# Older metadata name a licence in words, in `License` or as a classifier.
SPDX = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "ISC License": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Public Domain": "LicenseRef-public-domain",
}
LICENSING = get_spdx_licensing()
# All of them may be passed on in a wheel, an image or a card beside code under another licence.
PERMITTED = {
    *("0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "ISC", "LLVM-exception", "MIT"),
    *("LicenseRef-public-domain", "MIT-0", "MPL-2.0", "PSF-2.0", "Zlib"),
}


def main(folder: Path) -> int:
    """Returns the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    faults: set[str] = set()
    num_components = 0
    locks = sorted(LOCKS.glob("*-cp*.txt"))
    for lock in locks:
        wheels = parse_lock(lock.read_text(encoding="utf-8"))
        licences = {wheel.name: find_licence(wheel.name) for wheel in wheels}
        faults |= {
            f"{name}: licence {text or 'unknown'}" for name, text in licences.items() if not is_permitted(text)
        }
        bom = make_bom(lock.stem, wheels, licences)
        (folder / f"{lock.stem}.cdx.json").write_text(JsonV1Dot6(bom).output_as_string(indent=1), encoding="utf-8")
        num_components += len(wheels)
    print("".join(f"{fault}\n" for fault in sorted(faults)), end="")
    print(f"licences: {num_components} components of {len(locks)} locks, {len(faults)} that are not permitted")
    return 1 if faults else 0


def find_licence(package: str) -> str:
    """Returns the SPDX expression of an installed package's licence, empty where its metadata name none."""
    try:
        about = metadata(package)
    except PackageNotFoundError:
        return ""
    if expression := about.get("License-Expression"):
        return str(expression)
    classifiers = [
        str(text).split(" :: ")[-1] for text in about.get_all("Classifier", []) if "License ::" in str(text)
    ]
    words = [str(about.get("License") or "").split("\n")[0], *classifiers]
    known = [SPDX.get(word, word) for word in words if SPDX.get(word, word) in PERMITTED]
    return known[0] if known else next((word for word in words if word not in ("", "UNKNOWN")), "")


def is_permitted(expression: str) -> bool:
    """Says whether one choice of an SPDX expression holds permitted licences only."""
    try:
        parsed = LICENSING.parse(expression)
    except ExpressionError:
        return False
    if parsed is None:
        return False
    terms = {key.strip() for key in LICENSING.license_keys(parsed)}
    choices = [choice.strip(" ()") for choice in expression.split(" OR ")]
    if terms <= PERMITTED:
        return True
    return len(choices) > 1 and any(is_permitted(choice) for choice in choices)


def make_chart_library() -> Component:
    """Returns the component of the page's chart library, which lies in edgefl's own wheel as it came from npm."""
    code = (PAGE_FOLDER / "uplot.js").read_bytes()
    version = re.search(rb"\(v([\d.]+)\)", code[:500])
    assert version is not None
    return Component(
        name="uplot",
        version=version[1].decode(),
        bom_ref="uplot.js",
        purl=PackageURL("npm", name="uplot", version=version[1].decode()),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=hashlib.sha256(code).hexdigest())],
        licenses=[LicenseFactory().make_from_string("MIT")],
    )


def make_bom(name: str, wheels: Iterable[PinnedWheel], licences: dict[str, str]) -> Bom:
    """Returns the bill of materials of one lock: edgefl with its chart library, made of these wheels."""
    bom = Bom()
    factory = LicenseFactory()
    bom.metadata.component = Component(
        name="edgefl-fleet",
        version=__version__,
        type=ComponentType.APPLICATION,
        bom_ref=f"edgefl-fleet@{__version__}+{name}",
        licenses=[factory.make_from_string("Apache-2.0")],
    )
    bom.components.add(shipped := make_chart_library())
    bom.register_dependency(bom.metadata.component, [shipped])
    for wheel in wheels:
        licence = licences[wheel.name]
        component = Component(
            name=wheel.name,
            version=wheel.version,
            bom_ref=wheel.file,
            purl=PackageURL("pypi", name=wheel.name, version=wheel.version),
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=wheel.sha256)],
            licenses=[factory.make_from_string(licence)] if licence else [],
        )
        bom.components.add(component)
        bom.register_dependency(bom.metadata.component, [component])
    return bom


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build/sbom"))
