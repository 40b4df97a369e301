"""`edgefl provision raspberry-pi`: a card, an image, or the files of many cards."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from edgefl.cli.provision_options import BoardOptions, BoardToken, board_options, read_text
from edgefl.errors import UsageError

if TYPE_CHECKING:
    from edgefl.provision.boot_folder import BootFolder
    from edgefl.provision.boot_image import BootImage
    from edgefl.provision.card import Files, Network, Read, System, Wishes

_IMAGE = click.Path(path_type=Path, dir_okay=False, exists=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is the same for all cards of one call."""

    options: BoardOptions
    wishes: Wishes
    extras: Files
    system: str | None
    force: bool

    def payload_of(self, name: str, token: BoardToken) -> Files:
        from edgefl.provision.payload import payload  # noqa: PLC0415 fast start

        return payload(self.options.join_file(name, token.token).text(), self.extras)

    def files_of(self, name: str, token: BoardToken, read: Read) -> tuple[Files, str]:
        """Returns what a card gets, and in words for which system."""
        from edgefl.provision.card import System, detected_system  # noqa: PLC0415 fast start
        from edgefl.provision.card_files import card_files  # noqa: PLC0415 likewise

        system: System
        if self.system is None:
            system, reason = detected_system(read)
        else:
            system, reason = System(self.system), "as --os says"
        # A first boot of its own for each call: cloud-init does nothing again under the same name.
        instance = f"edgefl-{name}-{secrets.token_hex(4)}"
        wishes = replace(self.wishes, name=name, instance_id=instance)
        return card_files(system, wishes, self.payload_of(name, token), read), f"{system} ({reason})"


@click.command("raspberry-pi")
@board_options
@click.option("--boot", type=click.Path(path_type=Path, file_okay=False), help="The card's mounted boot partition.")
@click.option("--image", type=_IMAGE, help="An image (.img, .img.xz, .img.gz); its copy --out is written, never it.")
@click.option("--count", type=int, help="So many boards, with a token each; --name is a pattern, --out a folder.")
@click.option("--first", type=click.IntRange(0), default=1, show_default=True, help="The first number of --count.")
@click.option("--out", type=click.Path(path_type=Path), help="The new image, or the folder of many cards.")
@click.option(
    "--os", "system", type=click.Choice(["trixie", "bookworm", "preseed"]), help="What reads it [default: seen]."
)
@click.option("--hostname", help="The board's host name [default: the card's own, else the device's name].")
@click.option("--user", help="Its account, without a password [default: the card's own, else pi].")
@click.option("--ssh-key", type=click.File(), help="Public key of whoever may log in; SSH is on only with one.")
@click.option("--wifi-ssid", help="Its Wi-Fi [default: the card's own, else none].")
@click.option("--wifi-password", envvar="EDGEFL_WIFI_PASSWORD", help="Its password; asked for when it is missing.")
@click.option("--wifi-open", is_flag=True, help="The Wi-Fi has no password.")
@click.option("--wifi-hidden", is_flag=True, help="The Wi-Fi does not show its name.")
@click.option("--wifi-country", metavar="CC", help="Whose rules the radio follows, such as DE; --wifi-ssid needs it.")
@click.option("--ip", metavar="ADDRESS/PREFIX", help="A fixed address, of the Wi-Fi if one is named [default: DHCP].")
@click.option("--gateway", help="The gateway of a fixed address.")
@click.option("--dns", multiple=True, help="A name server of a fixed address [default: the gateway]; repeat.")
@click.option("--interface", default="eth0", show_default=True, help="The wired interface.")
@click.option(
    "--qr",
    type=click.Choice(["page", "join"]),
    default="page",
    show_default=True,
    help="What --count's sheet shows as codes: the boards' pages, or commands with tokens.",
)
@click.option("--dry-run", is_flag=True, help="Show the difference; write nothing, make no token.")
@click.option("--force", is_flag=True, help="Also where this does not look like a Raspberry Pi's boot partition.")
def command(  # noqa: PLR0913, PLR0917 one argument per option
    boot: Path | None,
    image: Path | None,
    count: int | None,
    first: int,
    out: Path | None,
    system: str | None,
    hostname: str | None,
    user: str | None,
    ssh_key: TextIO | None,
    wifi_ssid: str | None,
    wifi_password: str | None,
    wifi_open: bool,
    wifi_hidden: bool,
    wifi_country: str | None,
    ip: str | None,
    gateway: str | None,
    dns: tuple[str, ...],
    interface: str,
    qr: str,
    dry_run: bool,
    force: bool,
) -> None:
    """Put all that a board needs to join by itself onto its card, an image, or the files of many cards.

    Write the card as always, then call this with --boot; no device is ever written, and nothing needs root.
    """
    from edgefl.provision import card, wifi  # noqa: PLC0415 fast start

    options = BoardOptions.given()
    is_password_said = wifi_password is not None and "EDGEFL_WIFI_PASSWORD" not in os.environ
    if wifi_ssid is None and (is_password_said or wifi_open or wifi_hidden or wifi_country):
        raise UsageError("a Wi-Fi needs its name: --wifi-ssid NAME")
    if wifi_ssid is not None and wifi_country is None:
        raise UsageError("a Wi-Fi needs its country, without which the radio stays off: --wifi-country DE")
    network = card.Network(
        ssid=None if wifi_ssid is None else wifi.checked_ssid(wifi_ssid),
        psk=None if wifi_ssid is None or wifi_open else _key(wifi_ssid, wifi_password),
        country=None if wifi_country is None else wifi.checked_country(wifi_country),
        hidden=wifi_hidden,
        interface=card.checked_interface(interface),
    )
    network = _with_address(network, ip, gateway, dns)
    wishes = card.Wishes(
        name="",
        hostname=None if hostname is None else card.checked_hostname(hostname),
        user=None if user is None else card.checked_user(user),
        ssh_keys=() if ssh_key is None else card.ssh_keys(_keys_in(ssh_key), ssh_key.name),
        network=network,
    )
    job = Job(options=options, wishes=wishes, extras=options.extras(), system=system, force=force)
    if count is not None:
        if hostname or ip:
            raise UsageError("--hostname and --ip are one board's; with --count host names are the boards' names")
        _many(job, _Many(count=count, first=first, image=image, out=out, boot=boot, qr=qr), dry_run=dry_run)
    else:
        _one(job, boot=boot, image=image, out=out, dry_run=dry_run)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Many:
    count: int
    first: int
    image: Path | None
    out: Path | None
    boot: Path | None
    qr: str


def _one(job: Job, *, boot: Path | None, image: Path | None, out: Path | None, dry_run: bool) -> None:
    name = job.options.one_name()
    if (boot is None) == (image is None):
        raise UsageError("say where: --boot DIR (a mounted card), or --image FILE.img --out COPY.img")
    if boot is not None and out is not None:
        raise UsageError("--out goes with --image or --count; --boot writes where it says")
    if dry_run:
        _show(job, name, boot, image)
        return
    if image is not None and out is None:
        raise UsageError("--image is not changed: say where its copy goes with --out COPY.img")
    with _opened(job, boot, image, out) as (place, read):
        # Before the token: a refusal must not leave one behind.
        job.files_of(name, job.options.stand_in(), read)
        token = job.options.tokens(1)[0]
        files, words = job.files_of(name, token, read)
        place.write(files)
    _say(name, words, files, token)
    click.echo(
        "next: eject the card and start the board with it; `edgefl devices list` shows it in a few minutes. "
        "If not, edgefl/firstboot.log on the card says why"
        if boot is not None
        else f"next: write {out} onto a card as it is, without settings of Raspberry Pi Imager"
    )


@contextmanager
def _opened(
    job: Job, boot: Path | None, image: Path | None, out: Path | None
) -> Iterator[tuple[BootFolder | BootImage, Read]]:
    from edgefl.provision.boot_folder import BootFolder  # noqa: PLC0415 fast start
    from edgefl.provision.boot_image import copied  # noqa: PLC0415 likewise

    if boot is not None:
        folder = BootFolder(boot)
        folder.check(force=job.force)
        yield folder, folder.read
    else:
        assert image is not None
        assert out is not None
        with copied(image, out) as partition:
            partition.check(force=job.force)
            yield partition, partition.read


def _show(job: Job, name: str, boot: Path | None, image: Path | None) -> None:
    from edgefl.provision.boot_folder import BootFolder  # noqa: PLC0415 fast start
    from edgefl.provision.boot_image import BootImage  # noqa: PLC0415 likewise
    from edgefl.provision.difference import difference  # noqa: PLC0415 likewise

    place: BootFolder | BootImage
    if boot is not None:
        place = BootFolder(boot)
    else:
        assert image is not None
        if image.suffix in {".xz", ".gz"}:
            raise UsageError("--dry-run looks into an image that is not packed; unpack it first")
        place = BootImage(image)
    place.check(force=job.force)
    # A token that was given is not used up by looking at it.
    has_token = job.options.text or job.options.token_file
    token = job.options.tokens(1)[0] if has_token else job.options.stand_in()
    files, words = job.files_of(name, token, place.read)
    click.echo(f"{name}: {words}; nothing is written", err=True)
    for line in difference(files, place.read):
        click.echo(line)


def _many(job: Job, many: _Many, *, dry_run: bool) -> None:
    from edgefl.provision.names import numbered  # noqa: PLC0415 fast start

    if many.boot is not None or many.out is None:
        raise UsageError("--count writes into a folder: --out DIR, with --image FILE.img for whole images")
    names = numbered(job.options.name or "", many.count, first=many.first)
    if many.image is None and job.system == "bookworm":
        raise UsageError("Bookworm's cmdline.txt is the card's own: give its image with --image, or use --boot")
    if dry_run:
        for name in names:
            click.echo(many.out / (f"{name}.img" if many.image else name))
        return
    if any((many.out / name).exists() or (many.out / f"{name}.img").exists() for name in names):
        raise UsageError(f"{many.out} holds some of these boards already; take another folder, or another --first")
    if many.out.is_dir() and (mode := many.out.stat().st_mode & 0o777) & 0o077:
        raise UsageError(
            f"{many.out} is open to others (mode {mode:o}), and whoever has a card's files can join in its place: "
            f"chmod 700 {many.out}, or take a folder that does not exist yet"
        )
    if many.image is None:
        job.files_of(names[0], job.options.stand_in(), lambda _: None)  # refuses before tokens are made
    many.out.mkdir(mode=0o700, parents=True, exist_ok=True)
    tokens = job.options.tokens(len(names))
    for name, token in zip(names, tokens, strict=True):
        _write_one_of_many(job, many, name, token)
    _write_sheet(job.options, many, names, tokens)


def _write_one_of_many(job: Job, many: _Many, name: str, token: BoardToken) -> None:
    from edgefl.provision.boot_folder import BootFolder  # noqa: PLC0415 fast start
    from edgefl.provision.boot_image import copied  # noqa: PLC0415 likewise

    assert many.out is not None
    if many.image is not None:
        with copied(many.image, many.out / f"{name}.img") as partition:
            partition.check(force=job.force)
            files, words = job.files_of(name, token, partition.read)
            partition.write(files)
    else:
        (many.out / name).mkdir(mode=0o700)
        folder = BootFolder(many.out / name)
        files, words = job.files_of(name, token, folder.read)
        folder.write(files)
    _say(name, words, files, token)


def _write_sheet(options: BoardOptions, many: _Many, names: Sequence[str], tokens: Sequence[BoardToken]) -> None:
    from edgefl.files import write_whole  # noqa: PLC0415 fast start
    from edgefl.provision.sheet import Label, sheet  # noqa: PLC0415 likewise

    assert many.out is not None
    labels = []
    for name, token in zip(names, tokens, strict=True):
        addresses = options.join_file(name, token.token).addresses
        labels.append(Label(name=name, token=token.token, addresses=addresses, expires=token.expires))
    write_whole(many.out / "sheet.html", sheet(labels, with_tokens=many.qr == "join").encode())
    click.echo(f"sheet to print: {many.out / 'sheet.html'}")
    if many.image is None:
        click.echo("next: copy what is in each folder onto the boot partition of that board's card")


def _say(name: str, words: str, files: Mapping[str, bytes | Path], token: BoardToken) -> None:
    from edgefl.provision.boot_folder import num_bytes  # noqa: PLC0415 fast start

    until = f"; its token lets one board in until {token.expires}" if token.expires else ""
    click.echo(f"{name}: {words}, {len(files)} files, {num_bytes(files) / 1e6:.1f} MB{until}")


def _keys_in(file: TextIO) -> str:
    return read_text(file, f"the SSH key {file.name}", at_most=65536)


def _key(ssid: str, password: str | None) -> str:
    from edgefl.provision.wifi import pre_shared_key  # noqa: PLC0415 fast start

    if password is None:
        if not sys.stdin.isatty():
            raise UsageError("the Wi-Fi's password is missing: EDGEFL_WIFI_PASSWORD, --wifi-password or --wifi-open")
        password = str(click.prompt(f"Password of {ssid}", hide_input=True, err=True))
    return pre_shared_key(ssid, password)


def _with_address(network: Network, ip: str | None, gateway: str | None, dns: tuple[str, ...]) -> Network:
    from edgefl.provision.card import checked_static  # noqa: PLC0415 fast start

    if ip is None:
        if gateway or dns:
            raise UsageError("--gateway and --dns go with a fixed address: --ip 10.0.0.7/24")
        return network
    address, via, servers = checked_static(ip, gateway, dns)
    return replace(network, address=address, gateway=via, dns=servers)
