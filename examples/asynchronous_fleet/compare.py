"""Runs both files and prints how many updates and what accuracy each reached in the same virtual seconds."""

from __future__ import annotations

import edgefl


def main() -> None:
    print(f"{'strategy':10} {'virtual s':>9} {'updates':>8} {'accuracy':>9}")
    for file in ("waiting.toml", "buffered.toml"):
        result = edgefl.simulate(file, root="history")
        used = [update for update in result.updates if update["outcome"] == "used"]
        values = result.metrics
        print(f"{file.removesuffix('.toml'):10} {values['seconds']:9.1f} {len(used):8} {values['accuracy']:9.3f}")


if __name__ == "__main__":
    main()
