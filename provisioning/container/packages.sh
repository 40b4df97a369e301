#!/bin/sh
# What an image installs, run from the top of the repository: sh packages.sh VENV [EXTRAS]
#
# What edgefl needs comes by the hashes of the lock of this machine and Python; edgefl itself is this very folder.
# EXTRAS is "[coordinator]" for a coordinator, "[train]" for a device with torch; what no lock has comes by constraints.txt.
# PIP_FLAGS are more words for pip.
set -eu

venv=$1
extras=${2:-}

install() {
    # shellcheck disable=SC2086
    "$venv/bin/python" -m pip install --no-cache-dir ${PIP_FLAGS:-} "$@"
}

python3 -m venv "$venv"
cpython=$("$venv/bin/python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
case "$(uname -m)-$cpython" in
    aarch64-cp312) family=jetson-cp312 ;;
    aarch64-*) family=pi-$cpython ;;
    x86_64-*) family=pc-$cpython ;;
    *)
        echo "there is no lock for $(uname -m)" >&2
        exit 1
        ;;
esac
lock=provisioning/locks/$family-light.txt
rest=$extras
case "$extras" in
    "[coordinator]") lock=provisioning/locks/$family-coordinator.txt rest= ;;
    "[train]") [ ! -e "provisioning/locks/$family.txt" ] || lock=provisioning/locks/$family.txt rest= ;;
esac
if [ ! -e "$lock" ]; then
    echo "there is no lock $lock; take a base whose Python has one" >&2
    exit 1
fi
# --no-deps: nothing comes by its name alone, and nothing of Flower's that a board never imports.
install --no-deps --require-hashes --requirement "$lock"
if [ -z "$rest" ]; then
    install --no-deps .
else
    install --constraint constraints.txt ".$rest"
fi
