#!/bin/sh
# From a blank card to a joined board. Every first-boot mechanism calls this file where it lies, beside the rest of
# the payload, and nothing else:
#
#   sh firstboot.sh              keeps itself and a unit that does the work, and starts it
#   sh firstboot.sh --no-start   the same where the board reboots next (Raspberry Pi OS Bookworm)
#   sh firstboot.sh --run        the work with its log; what the unit runs, again after a failure and at the next boot
#   sh firstboot.sh --work       the work
#
# It may be run as often as one likes. Its log lies in the journal and beside the payload, so that a board without a
# network can be asked by putting its card into a PC. EDGEFL_ROOT is for tests: a tree to work on instead of /.
set -eu
umask 077

root=${EDGEFL_ROOT:-}
home=$root/var/lib/edgefl-firstboot
done_mark=$root/var/lib/edgefl-firstboot.done
payload=$home/edgefl
unit=edgefl-firstboot.service
units=$root/etc/systemd/system
time_wait_s=${EDGEFL_TIME_WAIT_S:-120}
keep_log_bytes=65536

say() {
    printf 'edgefl: %s\n' "$*"
}

fail() {
    say "failed: $*"
    exit 1
}

# Tokens never reach a log, whoever printed them.
redacted() {
    sed -u 's/efl1\.[A-Za-z0-9_=-]*/efl1.(secret)/g'
}

# A power cut while a join file is overwritten leaves zeros under its name: such a one counts as absent.
holds_token() {
    grep -q 'efl1\.' "$1" 2>/dev/null && [ "$(tr -cd '\000' <"$1" | wc -c)" -eq 0 ]
}

system() {
    if command -v systemctl >/dev/null 2>&1; then
        systemctl "$@"
    fi
}

# --- kept at the first call ------------------------------------------------------------------------------------------

arrange() {
    here=$(cd "$(dirname "$0")" && pwd)
    mkdir -p "$home" "$units"
    chmod 700 "$home"
    if [ -e "$done_mark" ] && ! holds_token "$here/join.json"; then
        say "this board is ready already"
        return 0
    fi
    # A new join file means a new purpose: the card was written anew, the board stayed.
    rm -f "$done_mark"
    printf '%s\n' "$here" >"$home/source"
    cp "$here/firstboot.sh" "$home/firstboot.sh.new"
    mv "$home/firstboot.sh.new" "$home/firstboot.sh"
    cp "$here/$unit" "$units/$unit.new"
    chmod 644 "$units/$unit.new"
    mv "$units/$unit.new" "$units/$unit"
    sync
    system daemon-reload || true
    # Enabled by hand: systemctl is of no use where the system has not started yet.
    mkdir -p "$units/multi-user.target.wants"
    chmod 755 "$units/multi-user.target.wants"
    ln -sf "/etc/systemd/system/$unit" "$units/multi-user.target.wants/$unit"
    say "kept; $unit does the rest"
    if [ "${1:-}" != --no-start ]; then
        system start --no-block "$unit" || say "it starts at the next boot"
    fi
}

# --- the work --------------------------------------------------------------------------------------------------------

# Prints what sha256sum -c reads, from the manifest as edgefl writes it: one value on a line.
sums() {
    awk -F'"' '/^    "/ { name = $2 } /^      "sha256"/ { print $4 "  " name }' "$1/manifest.json"
}

is_whole() {
    [ -s "$1/manifest.json" ] && [ -n "$(sums "$1")" ] && (cd "$1" && sums . | sha256sum -c --status - 2>/dev/null)
}

first_damaged() {
    (cd "$1" && sums . | sha256sum -c --quiet - 2>/dev/null | head -n 1) || true
}

# A file system of flash memory may keep old blocks; overwriting is what can be done, and the token is good once only.
destroy() {
    for file in "$@"; do
        [ -f "$file" ] || continue
        bytes=$(wc -c <"$file")
        dd if=/dev/zero of="$file" bs=1 count="$bytes" conv=notrunc,fsync 2>/dev/null || true
        # Going on is right: the join uses the token up, and a board that stops here leaves a good one lying about.
        rm -f "$file" || say "cannot remove $file: remove it yourself, it may hold a token"
    done
}

# Copies the payload off the card, with the token into a place that only root can read; then the card has none.
take() {
    source=$(cat "$home/source")
    if ! holds_token "$source/join.json"; then
        # It was taken before; what failed came after.
        is_whole "$payload" ||
            fail "$source holds no join.json with a token, and $payload no whole payload; write the card again"
        return 0
    fi
    say "copying $source"
    rm -rf "$payload.new"
    mkdir -p "$payload.new"
    cp -R "$source/." "$payload.new/"
    rm -f "$payload.new/firstboot.log"
    chmod -R go-rwx "$payload.new"
    cmp -s "$source/join.json" "$payload.new/join.json" || fail "$source/join.json cannot be read; write the card again"
    is_whole "$payload.new" || fail "the card is damaged: $(first_damaged "$payload.new"); write it again"
    # The old payload may be whole where the new one is not: it goes last.
    rm -rf "$payload"
    mv "$payload.new" "$payload"
    sync
    destroy "$source/join.json"
    sync
}

# wait_until CONDITION MESSAGE: goes on all the same after time_wait_s.
wait_until() {
    waited_s=0
    until "$1"; do
        if [ "$waited_s" -ge "$time_wait_s" ]; then
            say "$2 after $time_wait_s s; going on all the same"
            return 0
        fi
        sleep 2
        waited_s=$((waited_s + 2))
    done
}

is_time_kept() {
    [ -n "$root" ] || [ "$(timedatectl show -p NTP --value 2>/dev/null)" = yes ]
}

is_time_set() {
    [ -e "$root/run/systemd/timesync/synchronized" ] ||
        [ "$(timedatectl show -p NTPSynchronized --value 2>/dev/null)" = yes ]
}

# edgefl's own wheel alone is not all that it needs: the rest comes from an index.
has_all_wheels() {
    for wheel in "$payload"/wheels/*.whl; do
        case "${wheel##*/}" in
            "*.whl" | edgefl_fleet-*) ;;
            *) return 0 ;;
        esac
    done
    return 1
}

# Boards have no clock battery, and an index on the internet is trusted by date. Wheels from the card need no date.
wait_for_time() {
    if has_all_wheels || ! is_time_kept; then
        return 0
    fi
    wait_until is_time_set "the clock is not set"
}

install_edgefl() {
    say "installing"
    # It starts nothing yet: a join that runs would take its file away while it is being handed over.
    sh "$payload/install.sh" "$payload" --no-start || fail "the installation ended with $?; it is tried again"
}

hand_over() {
    holds_token "$payload/join.json" || return 0
    if [ -e "$root/var/lib/edgefl/device.json" ]; then
        say "this board has joined already and stays in its fleet; the token of the card is destroyed unused"
        destroy "$payload/join.json"
        return 0
    fi
    mkdir -p "$root/etc/edgefl"
    # install.sh has put it there: a second copy would leave the first one's blocks behind, with the token in them.
    if ! cmp -s "$payload/join.json" "$root/etc/edgefl/join.json"; then
        cp "$payload/join.json" "$root/etc/edgefl/join.json.new"
        chmod 600 "$root/etc/edgefl/join.json.new"
        mv "$root/etc/edgefl/join.json.new" "$root/etc/edgefl/join.json"
    fi
    sync
    destroy "$payload/join.json"
    sync
}

# cloud-init must not be robbed of its files while it works with them; it ends after the rest of the boot.
is_cloud_init_done() {
    [ ! -e "$root/run/cloud-init/enabled" ] || [ -e "$root/var/lib/cloud/instance/boot-finished" ]
}

# The token never lies in user-data; somebody may have pasted it there all the same, and cloud-init keeps copies.
scrub() {
    for boot in "$(dirname "$(cat "$home/source")")" "$root/boot/firmware" "$root/boot"; do
        for file in "$boot/user-data" "$boot/user-data.before-edgefl"; do
            grep -q 'efl1\.' "$file" 2>/dev/null || continue
            destroy "$file"
            printf '#cloud-config\n# What stood here was done at the first boot.\n{}\n' >"$boot/user-data"
        done
        destroy "$boot"/edgefl*/join.json
    done
    wait_until is_cloud_init_done "cloud-init has not ended"
    for instance in "$root"/var/lib/cloud/instance "$root"/var/lib/cloud/instances/*; do
        destroy "$instance"/user-data.txt* "$instance/cloud-config.txt" "$instance/obj.pkl"
    done
}

# After the mark, so that what is installed works and is not made again: the wheels would lie there for ever.
tidy_card() {
    source=$(cat "$home/source")
    if [ -e "$source/wheels" ] && [ ! -e "$source/keep-wheels" ]; then
        rm -rf "$source/wheels" || say "cannot remove $source/wheels; it only takes room"
        sync
    fi
}

clear_away() {
    rm -rf "$payload"
    tidy_card
    rm -f "$units/multi-user.target.wants/$unit" "$units/$unit"
}

finish() {
    mkdir -p "$root/var/lib"
    # Before anything goes: a board without payload and mark would ask for a card that it does not need.
    : >"$done_mark"
    sync
    clear_away
    for name in edgefl-join.service edgefl-device.service edgefl-update.path; do
        system start --no-block "$name" || true
    done
    say "ready; edgefl-join.service joins the fleet"
}

work() {
    take
    wait_for_time
    install_edgefl
    hand_over
    scrub
    finish
}

log_file() {
    source=$(cat "$home/source")
    if (: >>"$source/firstboot.log") 2>/dev/null; then
        echo "$source/firstboot.log"
    else
        echo "$home/firstboot.log"
    fi
}

# The status of the work passes through a file: a POSIX pipe forgets it.
run() {
    if [ -e "$done_mark" ]; then
        say "this board is ready already"
        # The power went after the mark and before the rest.
        [ ! -e "$home/source" ] || clear_away
        sync
        rm -rf "$home"
        return 0
    fi
    [ -e "$home/source" ] || fail "run firstboot.sh from the payload first"
    log=$(log_file)
    if [ -e "$log" ]; then
        tail -c "$keep_log_bytes" "$log" >"$home/log.old" && cp "$home/log.old" "$log" && rm -f "$home/log.old"
    fi
    echo 1 >"$home/status"
    {
        say "first boot, $(date -u '+%Y-%m-%d %H:%M:%S') UTC by this board's clock"
        # A process of its own: in a condition, set -e would not hold.
        if sh "$home/firstboot.sh" --work; then
            echo 0 >"$home/status"
        fi
    } 2>&1 | redacted | tee -a "$log"
    sync
    status=$(cat "$home/status")
    [ "$status" != 0 ] || rm -rf "$home"
    return "$status"
}

case "${1:-}" in
    --run) run ;;
    --work) work ;;
    "" | --no-start) arrange "$@" ;;
    *) fail "firstboot.sh takes --run, --no-start or nothing, got $1" ;;
esac
