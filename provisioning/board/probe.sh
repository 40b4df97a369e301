#!/bin/sh
# What edgefl asks of a board that runs already, before it touches anything. Changes nothing; prints "edgefl: NAME VALUE".
# The argument is the program that makes one root, or none.
set -u

say() {
    printf 'edgefl: %s %s\n' "$1" "$2"
}

become=${1:-}
if [ "$(id -u)" = 0 ]; then
    say root yes
    become=
elif [ -n "$become" ] && "$become" -n true 2>/dev/null; then
    say root "$become"
    become="$become -n"
else
    say root no
    become=false
fi

say time "$(date +%s)"
say machine "$(uname -m)"
say bits "$(getconf LONG_BIT 2>/dev/null || echo 64)"
command -v systemctl >/dev/null && say systemd yes

for python in python3 python3.13 python3.12 python3.11; do
    if command -v "$python" >/dev/null; then
        say python "$("$python" -c 'import platform; print(platform.python_version())' 2>/dev/null)"
    fi
done

place=/opt
[ -d "$place" ] || place=/
say free_mb "$(df -Pk "$place" | awk 'NR == 2 { print int($4 / 1024) }')"

say device "$($become cat /var/lib/edgefl/device.json 2>/dev/null | tr -d '\n')"
python=/opt/edgefl/current/bin/python
if [ -x "$python" ]; then
    say version "$("$python" -I -c 'import importlib.metadata as m; print(m.version("edgefl-fleet"))' 2>/dev/null)"
fi
say active "$(systemctl is-active edgefl-device.service 2>/dev/null)"
say end ""
