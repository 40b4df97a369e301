"""What lies on a board's boot partition."""

from __future__ import annotations

import shutil
from pathlib import Path

from edgefl.device.join_file import JoinFile
from edgefl.provision import extras
from edgefl.provision.card import Network, System, Wishes, card_files
from edgefl.provision.payload import payload

SHARD_ON_BOARD = "/srv/edgefl/digits.npz"


def write_card(
    boot: Path,
    *,
    coordinator: str,
    name: str,
    token: str,
    wheels: Path,
    lock: Path,
    static: tuple[str, str] | None = None,
) -> None:
    """Writes the boot partition of one board, which installs from the wheels without any index; `static` is its address and gateway."""
    boot.mkdir(parents=True, exist_ok=True)
    (boot / "cmdline.txt").write_text("console=serial0,115200 root=PARTUUID=0 rootfstype=ext4 rootwait\n")
    join = JoinFile(token=token, name=name, shards={"digits": SHARD_ON_BOARD}, addresses=(coordinator,))
    network = Network(address=f"{static[0]}/24", gateway=static[1], dns=(static[1],)) if static else Network()
    made = payload(join.text(), extras.wheels(wheels) | extras.lock(lock))
    wishes = Wishes(name=name, network=network, instance_id=f"edgefl-{name}-1")
    read = lambda path: (boot / path).read_bytes() if (boot / path).exists() else None  # noqa: E731
    for path, content in card_files(System.TRIXIE, wishes, made, read).items():
        place = boot / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content if isinstance(content, bytes) else content.read_bytes())


def put_shard(shard: Path, root: Path) -> None:
    """Puts a board's own data where its card says, into its root file system."""
    place = root / SHARD_ON_BOARD.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".npz", ".json"):
        shutil.copy(shard.with_suffix(suffix), place.with_suffix(suffix))
