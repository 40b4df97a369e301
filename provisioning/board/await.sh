#!/bin/sh
# Waits up to SECONDS until this board has joined and its device runs; run as root. Prints "edgefl: NAME VALUE".
set -u

seconds=$1
waited=0
while [ "$waited" -lt "$seconds" ]; do
    active=$(systemctl is-active edgefl-device.service 2>/dev/null)
    if [ -e /var/lib/edgefl/device.json ] && [ "$active" = active ]; then
        printf 'edgefl: device %s\n' "$(tr -d '\n' </var/lib/edgefl/device.json)"
        exit 0
    fi
    if [ "$(systemctl is-active edgefl-join.service 2>/dev/null)" = failed ]; then
        break
    fi
    sleep 1
    waited=$((waited + 1))
done
unit=edgefl-join.service
[ ! -e /var/lib/edgefl/device.json ] || unit=edgefl-device.service
printf 'edgefl: reason %s\n' "$(journalctl --quiet --no-pager --output=cat --lines=1 --unit="$unit" 2>/dev/null | tail -n 1)"
exit 1
