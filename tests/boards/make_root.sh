#!/bin/sh
# Makes the root file system of an emulated board: Debian 13 with systemd, cloud-init and Python, as Raspberry Pi OS has.
#
#   make_root.sh arm64|amd64 FOLDER      FOLDER/root-arm64 or FOLDER/root-amd64 (root only; 25 or 4 minutes)
#
# amd64 boots in systemd-nspawn and needs no kernel. A build that was cut off leaves no folder that passes for a whole one.
set -eu

arch=${1:?arm64 or amd64}
folder=${2:?the folder that keeps the root file systems}
root=$folder/root-$arch
suite=trixie
mirror=${EDGEFL_DEBIAN:-http://deb.debian.org/debian}
packages=systemd-sysv,udev,dbus,cloud-init,netplan.io,systemd-resolved,systemd-timesyncd,python3,python3-venv
packages=$packages,ca-certificates,iproute2,procps,kmod

case $arch in
arm64) packages=$packages,linux-image-cloud-arm64,initramfs-tools ;;
amd64) ;;
*)
    echo "make_root.sh: there are boards for arm64 and amd64, got $arch" >&2
    exit 2
    ;;
esac
if [ -e "$root" ]; then
    echo "$root is there already"
    exit 0
fi
if [ "$(id -u)" != 0 ]; then
    echo "make_root.sh: only root can make $root" >&2
    exit 2
fi
if [ "$arch" = arm64 ]; then
    # The kernel hands arm64 programs to qemu-user once this is registered; a container often lacks the mount.
    test -e /proc/sys/fs/binfmt_misc/register || mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
    test -e /proc/sys/fs/binfmt_misc/qemu-aarch64 || update-binfmts --enable qemu-aarch64
fi
mkdir -p "$folder"
rm -rf "$root.part"
mmdebstrap --mode=root --arch="$arch" --variant=minbase --components=main --include="$packages" \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    "$suite" "$root.part" "deb $mirror $suite main"
mv "$root.part" "$root"
