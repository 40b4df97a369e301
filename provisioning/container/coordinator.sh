#!/bin/sh
# What a container of the coordinator runs: coordinator.sh start|broker
#
# EDGEFL_HOST says under which names and addresses boards find this machine, with blanks between them; a container
# cannot know them. EDGEFL_PORT and EDGEFL_BROKER_PORT are the ports, EDGEFL_BROKER is --broker of the coordinator.
set -eu

folder=/var/lib/edgefl-coordinator
export XDG_CONFIG_HOME="$folder/operator"
umask 077

# The folder is made by whichever container comes first; the second one finds it made.
set_up() {
    if [ -e "$folder/settings.toml" ]; then
        return 0
    fi
    set --
    for host in ${EDGEFL_HOST:?say under which name or address boards find this machine}; do
        set -- "$@" --host "$host"
    done
    edgefl coordinator init --dir "$folder" --port "${EDGEFL_PORT:-8000}" "$@"
}

case "${1:-start}" in
    start)
        set_up
        exec edgefl coordinator start --dir "$folder" --broker "${EDGEFL_BROKER:-auto}" \
            --broker-port "${EDGEFL_BROKER_PORT:-8883}"
        ;;
    broker)
        set_up
        exec edgefl coordinator broker --dir "$folder" --port "${EDGEFL_BROKER_PORT:-8883}"
        ;;
    *)
        echo "coordinator.sh takes start or broker, got $1" >&2
        exit 2
        ;;
esac
