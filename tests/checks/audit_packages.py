"""Asks PyPI's advisories about the tested set of packages; exit code 1 when one of them has a known vulnerability.

Where the advisories cannot be reached it says so and passes: a site without internet must be able to check its work.
"""

import json
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
TIMEOUT_S = 120


def main() -> int:
    command = ["-m", "pip_audit", "-r", str(CONSTRAINTS), "--disable-pip", "--no-deps"]
    shown = ["--format", "json", "--progress-spinner", "off", "--timeout", "5"]
    try:
        done = subprocess.run(
            [sys.executable, *command, *shown], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"packages: not audited, the advisories did not answer within {TIMEOUT_S} s")
        return 0
    return verdict(done.stdout, done.stderr)


def verdict(answer: str, errors: str) -> int:
    """Prints what an answer of pip-audit says and returns the exit code."""
    try:
        told = json.loads(answer)["dependencies"]
    except (ValueError, KeyError, TypeError):
        print(f"packages: not audited, the advisories cannot be reached: {(errors.splitlines() or ['?'])[-1]}")
        return 0
    known = [package for package in told if "skip_reason" not in package]
    if not known:
        print(f"packages: not audited, the advisories that can be reached know none of the {len(told)}")
        return 0
    faults = [(package, fault) for package in known for fault in package["vulns"]]
    for package, fault in faults:
        fixed = ", ".join(fault["fix_versions"]) or "no version"
        print(f"{package['name']} {package['version']}: {fault['id']}, mended in {fixed}")
    print(f"packages: {len(known)} of {len(told)} audited, {len(faults)} known vulnerabilities")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
