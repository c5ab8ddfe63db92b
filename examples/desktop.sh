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
    # With its namespace it would go as well, but some time later.
    ip link del desktop-host 2>/dev/null || true
    if [ -e /run/netns/desktop ]; then ip netns del desktop; fi
}

# http.server would ask the name service for its own name first, which here nobody answers.
serve='
import functools, http.server, socketserver, sys
http.server.HTTPServer.server_bind = socketserver.TCPServer.server_bind
pages = functools.partial(http.server.SimpleHTTPRequestHandler, directory=sys.argv[1])
server = http.server.ThreadingHTTPServer(("", 8000), pages)
print("listening", flush=True)
server.serve_forever()
'

up() {
    if [ -e /run/netns/desktop ] || [ -e /run/netns/desktop-guest ]; then
        echo "there is a namespace desktop or desktop-guest already; first: sh $0 down" >&2
        exit 1
    fi
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
    listening=$(mktemp -u)
    mkfifo "$listening"
    ip netns exec desktop-guest python3 -c "$serve" "$(dirname "$0")" >"$listening" 2>/dev/null &
    read -r _ <"$listening"
    rm "$listening"
    echo "made: the namespace desktop (192.0.2.10) and its guest, which serves HTTP on port 8000"
    echo "to remove them: sh $0 down"
}

if [ "$(id -u)" -ne 0 ]; then
    echo "$0 makes and removes network namespaces: run it as root" >&2
    exit 77
fi
case ${1:-up} in
    up) up ;;
    down) down ;;
    *) echo "usage: $0 [up|down]" >&2; exit 64 ;;
esac
