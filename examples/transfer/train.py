"""Brings the base to a coordinator, and trains on it by its SHA-256 with three devices: processes of this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edgefl.core.config import load_run
from edgefl.simulation.local_fleet import LocalFleet, partition_devices


def main() -> None:
    options = load_run("lora.toml").task
    shards, new = Path("fleet/shards"), Path("data/new")
    devices, test = partition_devices("pictures", "iid", 3, shards, new, 7, options=options)
    with LocalFleet(root=Path("fleet").resolve(), devices=devices, test_shards=test) as fleet:
        added = fleet.run_command("base", "add", "base.safetensors", "--dir", str(fleet.directory))
        sha256 = added.split()[2].rstrip(":")
        print(added)
        for method in ("lora", "head"):
            config = load_run(f"{method}.toml")
            run = fleet.wait_for_run(fleet.submit(replace(config, adapt=replace(config.adapt, base=sha256))))
            downs = [row["bytes_down"] for row in fleet.list_history("rounds", run=run["run_id"])]
            print(
                f"{method}: accuracy {run['accuracy']:.3f}, first round {downs[0]:,} bytes down, last {downs[-1]:,}"
            )


if __name__ == "__main__":
    main()
