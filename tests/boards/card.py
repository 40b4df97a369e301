"""What lies on a board's card, written by `edgefl provision raspberry-pi` as a user would write it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from boards import cache
from boards.site import Site

from edgefl.provision.wheels import WheelPlatform

# Below /home, which the units hide: the card's drop-in has to show it.
SHARD_ON_BOARD = "/home/data/digits.npz"
# What a card has that was written as always, as far as edgefl looks at it.
STOCK = {
    "cmdline.txt": "console=serial0,115200 console=tty1 root=PARTUUID=4a5c0d2e-02 rootfstype=ext4 rootwait\n",
    "config.txt": "arm_64bit=1\n",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One board's card: who it is to be, and how it finds the coordinator (`coordinator` is HOST:PORT).

    It installs from the wheels of its family, without any index. `static` is its address and its gateway; without
    it, it asks by DHCP. `signer` is the public key whose releases it takes.
    """

    name: str
    token: str
    coordinator: str
    family: WheelPlatform
    static: tuple[str, str] | None = None
    signer: Path | None = None

    def write(self, site: Site, *place: str) -> None:
        """Writes it where `--boot DIR` or `--image FILE --out FILE` says."""
        static = ["--ip", f"{self.static[0]}/24", "--gateway", self.static[1]] if self.static else []
        signer = ["--signer", str(self.signer)] if self.signer else []
        site.fleet.run_command(
            "provision", "raspberry-pi", *place, "--token", self.token, "--name", self.name,
            "--address", self.coordinator, "--shard", f"digits={SHARD_ON_BOARD}", *static, *signer,
            "--wheels", str(cache.wheels(self.family)), "--lock", str(cache.lock(self.family)),
        )  # fmt: skip


def put_stock(boot: Path) -> None:
    """Makes a boot partition that nobody has changed."""
    boot.mkdir(parents=True, exist_ok=True)
    for name, text in STOCK.items():
        (boot / name).write_text(text)


def put_shard(shard: Path, root: Path) -> None:
    """Puts a board's own data where its card says, into its root file system."""
    place = root / SHARD_ON_BOARD.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".npz", ".json"):
        shutil.copy(shard.with_suffix(suffix), place.with_suffix(suffix))
