#!/bin/sh
# The network of examples/desktop.yaml on this machine, to try portranger with: the namespace
# `desktop` as a virt-launcher pod has it, reachable at 192.0.2.10, and behind its bridge a guest
# (another namespace, desktop-guest) that serves HTTP on port 8000.
#
#     sh examples/desktop.sh        makes them
#     sh examples/desktop.sh down   removes them
set -eu
PATH=$PATH:/usr/sbin:/sbin

down() {
    if [ -e /run/netns/desktop-guest ]; then
        for pid in $(ip netns pids desktop-guest); do kill "$pid"; done
        ip netns del desktop-guest
    fi
    if [ -e /run/netns/desktop ]; then ip netns del desktop; fi
}

up() {
    ip netns add desktop
    ip netns add desktop-guest
    ip link add desktop-host type veth peer name eth0 netns desktop
    ip addr add 192.0.2.1/24 dev desktop-host
    ip link set desktop-host up
    ip -n desktop link set lo up
    ip -n desktop addr add 192.0.2.10/24 dev eth0
    ip -n desktop link set eth0 up
    ip -n desktop link add k6t-eth0 type bridge
    ip -n desktop addr add 10.0.2.1/24 dev k6t-eth0
    ip -n desktop link set k6t-eth0 up
    ip -n desktop link add tap0 type veth peer name eth0 netns desktop-guest
    ip -n desktop link set tap0 master k6t-eth0 up
    ip -n desktop-guest addr add 10.0.2.2/24 dev eth0
    ip -n desktop-guest link set eth0 up
    ip -n desktop-guest route add default via 10.0.2.1
    ip netns exec desktop-guest python3 -m http.server -d "$(dirname "$0")" 8000 >/dev/null 2>&1 &
    echo "made: the namespace desktop (192.0.2.10) and its guest, which serves HTTP on port 8000"
}

case ${1:-up} in
    up) up ;;
    down) down ;;
    *) echo "usage: $0 [up|down]" >&2; exit 64 ;;
esac
