#!/bin/sh
# Two hosts in one machine: network namespaces "left" (10.77.0.1) and "right" (10.77.0.2), joined by a cable.
#
#     namespaces.sh up                     makes them; needs iproute2 and root, or asks sudo for it
#     namespaces.sh left|right COMMAND     runs a command there, as this user
#     namespaces.sh unplug|plug            takes the cable out of the right host, and puts it back
#     namespaces.sh down                   removes them, and ends what runs there
set -e

sudo=$([ "$(id -u)" = 0 ] || echo sudo)

case ${1:-} in
up)
    for host in left right; do
        $sudo ip netns add "shoal-$host"
        $sudo ip -n "shoal-$host" link set lo up
    done
    $sudo ip -n shoal-left link add eth0 type veth peer name eth0 netns shoal-right
    $sudo ip -n shoal-left addr add 10.77.0.1/24 dev eth0
    $sudo ip -n shoal-right addr add 10.77.0.2/24 dev eth0
    $sudo ip -n shoal-left link set eth0 up
    $sudo ip -n shoal-right link set eth0 up
    ;;
left | right)
    host=$1
    shift
    # A name of its own makes it a host, too: the names of workers begin with it.
    exec $sudo ip netns exec "shoal-$host" unshare --uts sh -c 'hostname "$0"; exec "$@"' "$host" \
        setpriv --reuid "$(id -u)" --regid "$(id -g)" --init-groups env PATH="$PATH" HOME="$HOME" "$@"
    ;;
unplug) $sudo ip -n shoal-right link set eth0 down ;;
plug) $sudo ip -n shoal-right link set eth0 up ;;
down)
    for host in left right; do
        [ -e "/run/netns/shoal-$host" ] || continue
        for pid in $($sudo ip netns pids "shoal-$host"); do
            $sudo kill "$pid" || true # it may have ended by itself
        done
        while [ -n "$($sudo ip netns pids "shoal-$host")" ]; do sleep 0.1; done
        $sudo ip netns delete "shoal-$host"
    done
    ;;
*)
    sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
