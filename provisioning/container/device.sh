#!/bin/sh
# What a container of a device runs: it joins with the join file that it is given, once, and then works for ever.
set -eu

folder=/var/lib/edgefl
join=${EDGEFL_JOIN_FILE:-/run/secrets/edgefl-join}
umask 077

if [ ! -e "$folder/device.json" ]; then
    if [ ! -e "$join" ]; then
        echo "this device has joined no fleet, and there is no join file at $join: give it as the secret edgefl-join" >&2
        exit 36
    fi
    edgefl device join --file "$join" --until-joined --state "$folder"
fi
exec edgefl device start --state "$folder"
