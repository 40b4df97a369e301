#!/bin/sh
# Makes this board ready for edgefl from the payload in FOLDER: sh install.sh FOLDER [--no-start]
#
# A user, a virtual environment, the units. It may be run as often as one likes: what is there already stays, and
# another version goes into the other of the two slots, so that a running device is not pulled from under its feet.
# EDGEFL_ROOT is for tests: a tree to work on instead of /, without making users. EDGEFL_WAIT_S: how long an update that
# is under way is waited for.
set -eu
umask 022

root=${EDGEFL_ROOT:-}
opt=$root/opt/edgefl
etc=$root/etc/edgefl
state=$root/var/lib/edgefl
units=$root/etc/systemd/system
user=edgefl
room_mb=400
room_with_torch_mb=1500
wait_s=${EDGEFL_WAIT_S:-120}

say() {
    printf 'edgefl-install: %s\n' "$*"
}

fail() {
    printf 'edgefl-install: failed: %s\n' "$*" >&2
    exit 1
}

check_arguments() {
    if [ $# -lt 1 ] || [ $# -gt 2 ]; then
        fail "usage: sh install.sh FOLDER [--no-start]"
    fi
    [ -d "$1/units" ] || fail "$1 is no payload: it has no folder units; make one with edgefl provision"
    folder=$(cd "$1" && pwd)
    starts=yes
    case "${2:-}" in
        "") ;;
        --no-start) starts=no ;;
        *) fail "the second argument may only be --no-start, got $2" ;;
    esac
    if [ -z "$root" ] && [ "$(id -u)" != 0 ]; then
        fail "this must be run by root: sudo sh install.sh FOLDER"
    fi
    command -v systemctl >/dev/null || fail "this board has no systemd; run edgefl in a container instead"
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    for candidate in ${EDGEFL_PYTHON:-} python3 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null && is_new_enough "$candidate"; then
            python=$(command -v "$candidate")
            return 0
        fi
    done
    found=$(python3 -c 'import platform; print(platform.python_version())' 2>/dev/null || echo none)
    fail "edgefl needs Python 3.11 or newer, this board has $found: update its system (Debian 12, Ubuntu 24.04," \
        "JetPack 7), or run the container (JetPack 6)"
}

# The one thing that is asked of the payload's names: its wheel of edgefl says which version is wanted.
find_wanted() {
    own=
    wanted=
    for wheel in "$folder/wheels/edgefl_fleet-"*.whl; do
        [ -e "$wheel" ] || continue
        [ -z "$own" ] || fail "$folder/wheels has several wheels of edgefl; leave the one that is wanted"
        own=$wheel
        wanted=${wheel##*/edgefl_fleet-}
        wanted=${wanted%%-*}
    done
    if [ -z "$wanted" ] && [ -e "$folder/version" ]; then
        wanted=$(cat "$folder/version")
    fi
}

# What comes from an index comes by its hash: by the lock that was given, else by the one of this kind of board.
find_lock() {
    lock=$folder/requirements.txt
    [ ! -e "$lock" ] || return 0
    lock=
    has_all_wheels && return 0
    board=$("$python" -c 'import platform, sys
print("%s-cp%d%d" % (platform.machine() if sys.maxsize > 2**32 else "32bit", *sys.version_info[:2]))')
    if [ -e "$folder/locks/$board.txt" ]; then
        lock=$folder/locks/$board.txt
    else
        say "there is no lock for this board ($board): what edgefl needs comes from the index as it is there"
    fi
}

# Whoever may publish on an index could publish something called edgefl there: the name alone is no origin.
check_origin() {
    if [ -z "$own" ] && ! grep -qs '^edgefl-fleet==.*--hash=sha256:' "$folder/requirements.txt"; then
        fail "the payload has neither edgefl's wheel nor a lock with its hash, and an index is not asked for edgefl" \
            "itself: make the payload with --wheels"
    fi
}

version_in() {
    [ -e "$1/.complete" ] || return 0
    "$1/bin/python" -I -c 'import importlib.metadata as m; print(m.version("edgefl-fleet"))' 2>/dev/null || true
}

find_slot() {
    slot=a
    current=
    if [ -e "$opt/current" ]; then
        current=$(basename "$(readlink "$opt/current")")
        [ "$current" = a ] && slot=b
    fi
    there=
    [ -z "$current" ] || there=$(version_in "$opt/$current")
    is_new=yes
    if [ -n "$there" ] && { [ -z "$wanted" ] || [ "$there" = "$wanted" ]; }; then
        is_new=no
    fi
}

# The updater builds in the same slot and moves the same link: while it works this waits, and it while this works.
hold_slots() {
    command -v flock >/dev/null || fail "this board has no flock; install util-linux"
    mkdir -p "$opt/update"
    exec 9>"$opt/update/lock"
    if ! flock -n 9; then
        say "an update is under way: waiting for it"
        flock -w "$wait_s" 9 ||
            fail "the update under way did not end within $wait_s s: try again later, or give it up with" \
                "systemctl stop edgefl-update.service"
    fi
    find_slot
}

# An updater that was cut off would go on in a slot that is another one now; whoever asked for it is answered instead.
end_trial() {
    status=$opt/update/status.json
    [ -e "$status" ] || return 0
    "$python" -I -c 'import json, sys
told = json.load(open(sys.argv[1]))
if trial := told["trial"]:
    reason = "another edgefl was installed on the board meanwhile"
    told["outcome"] = {"id": trial["id"], "state": "failed", "reason": reason}
json.dump({**told, "trial": None}, open(sys.argv[2], "w"))' "$status" "$status.new" 2>/dev/null ||
        rm -f "$status" "$status.new" # the updater takes no notice of one that is damaged either
    [ ! -e "$status.new" ] || mv "$status.new" "$status"
}

check_room() {
    need_mb=$room_mb
    if grep -qs '^torch==' "$folder/requirements.txt" || ls "$folder/wheels/torch-"*.whl >/dev/null 2>&1; then
        need_mb=$room_with_torch_mb
    fi
    mkdir -p "$opt"
    free_mb=$(df -Pk "$opt" | awk 'NR == 2 { print int($4 / 1024) }')
    [ "$free_mb" -ge "$need_mb" ] ||
        fail "$opt has $free_mb MB free, edgefl needs $need_mb: remove what is not needed, or take a larger card"
}

make_user() {
    if [ -n "$root" ] || getent passwd "$user" >/dev/null; then
        return 0
    fi
    useradd --system --user-group --home-dir /var/lib/edgefl --no-create-home --shell /usr/sbin/nologin "$user"
    say "made the user $user"
}

# Debian has ensurepip in a package of its own. Without it and without an index, pip's own wheel in the payload does.
make_venv() {
    if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        "$python" -m venv "$1"
        return 0
    fi
    for pip in "$folder/wheels/pip-"*.whl; do
        [ -e "$pip" ] || continue
        "$python" -m venv --without-pip "$1"
        "$1/bin/python" "$pip/pip" install --quiet --no-index --no-deps "$pip"
        return 0
    done
    say "installing python3-venv"
    minor=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q "$minor" >&2 ||
        DEBIAN_FRONTEND=noninteractive apt-get install -y -q python3-venv >&2 ||
        fail "this board cannot make virtual environments: apt-get install python3-venv, or put pip's wheel into wheels/"
    "$python" -m venv "$1"
}

pip_install() {
    "$opt/$slot/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-cache-dir \
        --root-user-action ignore "$@" || fail "pip could not install edgefl; its words are above"
}

# A folder with edgefl's own wheel alone is for boards that get the rest from an index.
has_all_wheels() {
    for wheel in "$folder/wheels/"*.whl; do
        case "${wheel##*/}" in
            "*.whl" | edgefl_fleet-*) ;;
            *) return 0 ;;
        esac
    done
    return 1
}

# edgefl itself is installed by its path, so that no index has a say in it, whatever version it offers.
install_packages() {
    set -- --prefer-binary
    if ls "$folder/wheels/"*.whl >/dev/null 2>&1; then
        set -- "$@" --find-links "$folder/wheels"
    fi
    if has_all_wheels; then
        set -- "$@" --no-index
    elif [ "$(date +%Y)" -lt 2025 ]; then
        fail "the clock says $(date -u +%Y-%m-%d), so no index can be trusted: timedatectl set-ntp true, or bring wheels"
    fi
    if [ -n "$lock" ]; then
        # --no-deps: the lock leaves out what Flower asks for and no device imports.
        set -- "$@" --no-deps
        pip_install "$@" --require-hashes --requirement "$lock"
    fi
    [ -z "$own" ] || pip_install "$@" "$own"
}

# Without the serials of the slot before, bundles that were signed before it would be taken once more.
carry_serials() {
    record=$opt/$current/edgefl-slot.json
    if [ -z "$current" ] || [ ! -e "$record" ]; then
        return 0
    fi
    packs=$("$python" -I -c 'import json, sys
old = json.load(open(sys.argv[1]))
serials, packs = dict(old["serials"]), dict(old["packs"])
json.dump({"v": 1, "packs": {}, "serials": serials}, open(sys.argv[2], "w"))
print(", ".join(sorted(packs)))' "$record" "$opt/$slot/edgefl-slot.json" 2>/dev/null) || {
        # Going on is right: to install the slots again is what mends such a record.
        rm -f "$opt/$slot/edgefl-slot.json"
        say "$record is damaged: this board takes signed bundles of any age again"
        return 0
    }
    if [ -n "$packs" ]; then
        say "its task packs are not in this installation: $packs; bring them with edgefl devices install"
        # For edgefl provision ssh, which tells it beside the board.
        printf 'edgefl: packs %s\n' "$packs"
    fi
}

make_slot() {
    say "installing edgefl ${wanted:-} into $opt/$slot with $("$python" --version)"
    end_trial
    rm -rf "${opt:?}/$slot"
    make_venv "$opt/$slot"
    install_packages
    "$opt/$slot/bin/python" -I -m edgefl --version >&2 ||
        fail "edgefl was installed and does not start; its words are above"
    carry_serials
    # Written last: a slot without it was cut off by a power failure and is made anew.
    : >"$opt/$slot/.complete"
    sync
    ln -sfn "$slot" "$opt/current.new"
    mv -T "$opt/current.new" "$opt/current"
}

# Copies FILE to PLACE with MODE unless it is there already; notes that something changed.
put() {
    if cmp -s "$1" "$2"; then
        return 0
    fi
    mkdir -p "$(dirname "$2")"
    cp "$1" "$2.new"
    chmod "$3" "$2.new"
    mv "$2.new" "$2"
    changed=yes
}

put_signers() {
    for signer in "$folder/signers/"*.pem "$folder/signers/signers.json"; do
        [ ! -e "$signer" ] || put "$signer" "$etc/signers/$(basename "$signer")" 644
    done
}

# A board has no use for the units of a coordinator.
put_units() {
    for unit in "$folder/units/edgefl-"*; do
        name=$(basename "$unit")
        case "$name" in
            edgefl-coordinator* | edgefl-broker*) ;;
            *.d)
                for conf in "$unit"/*.conf; do
                    [ ! -e "$conf" ] || put "$conf" "$units/$name/$(basename "$conf")" 644
                done
                ;;
            *) put "$unit" "$units/$name" 644 ;;
        esac
    done
}

# A power cut while a join file is overwritten leaves zeros under its name: such a one counts as absent.
holds_token() {
    grep -q 'efl1\.' "$1" 2>/dev/null && [ "$(tr -cd '\000' <"$1" | wc -c)" -eq 0 ]
}

put_join_file() {
    joins=no
    [ -e "$folder/join.json" ] || return 0
    if ! holds_token "$folder/join.json"; then
        say "the payload's join file holds no token and is not used"
        return 0
    fi
    if [ -e "$state/device.json" ]; then
        say "this board has joined a fleet already and stays in it; the join file is not used. To take it out of there:" \
            "sudo systemctl stop edgefl-device && sudo rm -r $state; then install it again with a join file"
        return 0
    fi
    mkdir -p "$etc"
    (umask 077 && cp "$folder/join.json" "$etc/join.json.new")
    mv "$etc/join.json.new" "$etc/join.json"
    joins=yes
}

# Nothing of it is changed: whoever owns the data decides who reads it. The device goes on without, and says so too.
look_at_data() {
    [ "$joins" = yes ] || return 0
    "$opt/current/bin/python" -I -m edgefl.device.enrolment.join_file --join "$etc/join.json" "$user" || true
}

enable_units() {
    [ "$changed" = no ] || systemctl daemon-reload
    for name in edgefl-join.service edgefl-device.service edgefl-update.path; do
        [ ! -e "$units/$name" ] || systemctl --quiet enable "$name"
    done
}

# Without waiting: at a first boot the rest of the boot may wait for us.
start_units() {
    [ "$starts" = yes ] || return 0
    [ ! -e "$units/edgefl-update.path" ] || systemctl start --no-block edgefl-update.path
    if [ "$joins" = yes ]; then
        systemctl start --no-block edgefl-join.service
    elif [ "$is_new" = yes ] || [ "$changed" = yes ]; then
        systemctl restart --no-block edgefl-device.service
    else
        systemctl start --no-block edgefl-device.service
    fi
}

check_arguments "$@"
find_python
find_wanted
find_slot
changed=no
make_user
if [ "$is_new" = yes ]; then
    check_origin
    check_room
    hold_slots
fi
if [ "$is_new" = yes ]; then
    find_lock
    make_slot
else
    say "edgefl $there is installed already"
fi
exec 9>&-
put_signers
put_units
put_join_file
look_at_data
enable_units
start_units
say "ready"
