"""What lies on a board's boot partition, made by `edgefl provision raspberry-pi` as a user would make it."""

from __future__ import annotations

from pathlib import Path

from boards.site import Site

SHARD_ON_BOARD = "/var/lib/edgefl-shards/digits.npz"


def write_card(boot: Path, site: Site, *, name: str, token: str, wheels: Path, lock: Path) -> None:
    """Writes the boot partition of one board, which installs from the wheels without any index."""
    boot.mkdir(parents=True, exist_ok=True)
    (boot / "cmdline.txt").write_text("console=serial0,115200 root=PARTUUID=0 rootfstype=ext4 rootwait\n")
    site.fleet.command(
        "provision", "raspberry-pi", "--boot", str(boot), "--token", token, "--name", name,
        "--shard", f"digits={SHARD_ON_BOARD}", "--wheels", str(wheels), "--lock", str(lock),
    )  # fmt: skip
