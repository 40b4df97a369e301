#!/bin/sh
# Makes this board a device of a fleet. `edgefl coordinator token` and the page print the line that fetches and runs it:
#
#   sh setup.sh https://HOST:PORT sha256//PIN [--name NAME] [TASK=PATH ...]
#
# The token is in EDGEFL_JOIN_TOKEN, never in an argument. PIN is the hash of the coordinator's public key, by which curl
# knows it without a certificate authority. It may be run as often as one likes. EDGEFL_ROOT is for tests: a tree to
# work on instead of /.
set -eu
umask 077

root=${EDGEFL_ROOT:-}
wait_s=${EDGEFL_WAIT_S:-300}

say() {
    printf 'edgefl-setup: %s\n' "$*"
}

fail() {
    printf 'edgefl-setup: failed: %s\n' "$*" >&2
    exit 1
}

# Letters that mean nothing to JSON, a unit or a shell: so words need no quoting.
check_word() {
    case "$1" in
        "" | *[!A-Za-z0-9_./:+@,=-]*) fail "a word may have letters, digits and _ . / : + @ , = - alone, got $1" ;;
    esac
}

check_path() {
    case "$1/" in
        *:* | */../*) fail "a path of data may have no : and no .. in it, got $1" ;;
    esac
}

read_arguments() {
    [ $# -ge 2 ] || fail "usage: sh setup.sh https://HOST:PORT sha256//PIN [--name NAME] [TASK=PATH ...]"
    url=$1
    pin=$2
    shift 2
    name=
    shards=
    folders=
    while [ $# -gt 0 ]; do
        case "$1" in
            --name)
                [ $# -ge 2 ] || fail "--name needs a word after it"
                check_word "$2"
                name=$2
                shift 2
                continue
                ;;
            [!=]*=/?*) ;;
            *) fail "data is TASK=PATH with an absolute path on this board, such as digits=/home/pi/data.npz, got $1" ;;
        esac
        check_word "$1"
        check_path "${1#*=}"
        shards="$shards${shards:+, }\"${1%%=*}\": \"${1#*=}\""
        add_folder "${1#*=}"
        shift
    done
    case "${EDGEFL_JOIN_TOKEN:-}" in
        efl1.?*) check_word "$EDGEFL_JOIN_TOKEN" ;;
        *) fail "EDGEFL_JOIN_TOKEN holds no token, which begins with efl1.; paste the whole line" ;;
    esac
    if [ -z "$root" ] && [ "$(id -u)" != 0 ]; then
        fail "this must be run by root: put sudo before sh"
    fi
    is_member=no
    [ ! -e "$root/var/lib/edgefl/device.json" ] || is_member=yes
    if [ "$is_member" = yes ] && [ -n "$shards$name" ]; then
        fail "this board has joined a fleet already; without TASK=PATH and --name edgefl is updated; add data with:" \
            "sudo /opt/edgefl/current/bin/python -m edgefl device shard add TASK PATH --state /var/lib/edgefl"
    fi
}

# The units see no home folders: the folder of the data is mounted for them, read-only.
add_folder() {
    is_hidden=no
    for hidden in /home /root /run/user /tmp /var/tmp; do
        case "$1" in "$hidden"/*) is_hidden=yes ;; esac
    done
    [ "$is_hidden" = yes ] || return 0
    case "${1##*/}" in
        ?*.?*) folders="$folders${1%/*}
" ;;
        *) folders="$folders$1
" ;;
    esac
}

download() {
    folder=$(mktemp -d "$root/var/tmp/edgefl.XXXXXXXX")
    trap 'rm -rf "$folder"' EXIT
    trap 'exit 130' HUP INT TERM # else the line above is not done
    say "downloading edgefl from $url"
    printf 'Authorization: Bearer %s\n' "$EDGEFL_JOIN_TOKEN" |
        curl --silent --show-error --insecure --pinnedpubkey "$pin" --header @- --output "$folder/answer" \
            --write-out '%{http_code}\n' "$url/edgefl/v1/setup/payload.tar" >"$folder/status" ||
        fail "nothing was downloaded: the coordinator cannot be reached, has another key than this line says (make a" \
            "new token), or this board is full; curl's words are above"
    [ "$(cat "$folder/status")" = 200 ] || fail "the coordinator refuses: $(head -c 600 "$folder/answer" | tr -d '\000')"
    mkdir "$folder/edgefl"
    tar -xf "$folder/answer" -C "$folder/edgefl" || fail "the download broke off; paste the line again"
    rm "$folder/answer"
}

write_shard_units() {
    [ -n "$folders" ] || return 0
    for unit in edgefl-device edgefl-join; do
        mkdir -p "$folder/edgefl/units/$unit.service.d"
        {
            echo "[Service]"
            printf '%s' "$folders" | sort -u | sed 's/^/BindReadOnlyPaths=-/'
        } >"$folder/edgefl/units/$unit.service.d/20-shards.conf"
    done
}

write_join_file() {
    # Without a name the board is called as its host.
    printf '{"v": 1, "token": "%s", "name": %s, "shards": {%s}, "addresses": ["%s"]}\n' \
        "$EDGEFL_JOIN_TOKEN" "${name:+\"}${name:-null}${name:+\"}" "$shards" "${url#https://}" \
        >"$folder/edgefl/join.json"
}

wait_until_joined() {
    rm -rf "$folder/edgefl/join.json" "$folder/edgefl/wheels"
    if [ "$is_member" = yes ]; then
        say "this board has joined a fleet already and stays in it; edgefl is up to date"
        return 0
    fi
    [ -z "$root" ] || return 0
    say "joining; this takes up to $wait_s s"
    sh "$folder/edgefl/await.sh" "$wait_s" >"$folder/told" ||
        fail "$(sed -n 's/^edgefl: reason //p' "$folder/told"); more: sudo journalctl -u edgefl-join -u edgefl-device"
    say "joined; the coordinator lists this board, and it starts at every boot"
}

main() {
    read_arguments "$@"
    download
    if [ "$is_member" = no ]; then
        write_shard_units
        write_join_file
        systemctl reset-failed edgefl-join.service 2>/dev/null || true # of an earlier try
    fi
    sh "$folder/edgefl/install.sh" "$folder/edgefl"
    wait_until_joined
}

# Last, so that half of a script that broke off on its way does nothing.
main "$@"
