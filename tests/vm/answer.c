/* Answers on the ports it is given, TCP and UDP, IPv4 and IPv6: whatever is sent to it, it says
 *
 *     <the release of the kernel it runs on> <tcp or udp> <port> <who asks>
 *
 * so that a client knows which machine answered, at which port, and whom that machine saw. It is the
 * only program in the guest besides busybox: Debian's has no server for UDP. */

#include <arpa/inet.h>
#include <err.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/utsname.h>
#include <unistd.h>

enum { MOST = 512, LISTENS, DATAGRAMS, TALKS };

static struct pollfd watched[MOST];
static int kinds[MOST];
static nfds_t count;

static void watch(int descriptor, int kind)
{
    if (count == MOST) {
        close(descriptor);
        return;
    }
    watched[count] = (struct pollfd){.fd = descriptor, .events = POLLIN};
    kinds[count++] = kind;
}

static void forget(nfds_t index)
{
    close(watched[index].fd);
    watched[index] = watched[--count];
    kinds[index] = kinds[count];
}

/* On both families: an IPv4 peer is seen as ::ffff:192.0.2.1, and said without that. */
static void serve(int port, int type, int kind)
{
    struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
    int descriptor = socket(AF_INET6, type, 0), no = 0;

    if (descriptor < 0 || setsockopt(descriptor, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no) ||
        bind(descriptor, (struct sockaddr *)&any, sizeof any) ||
        (kind == LISTENS && listen(descriptor, 64)))
        err(1, "port %d", port);
    watch(descriptor, kind);
}

static int port_of(int descriptor)
{
    struct sockaddr_in6 own;
    socklen_t size = sizeof own;

    if (getsockname(descriptor, (struct sockaddr *)&own, &size))
        return 0;
    return ntohs(own.sin6_port);
}

static size_t words(char *text, size_t size, const char *protocol, int descriptor,
                    const struct sockaddr_in6 *peer)
{
    struct utsname system;
    char address[INET6_ADDRSTRLEN];
    const char *shown = inet_ntop(AF_INET6, &peer->sin6_addr, address, sizeof address);

    uname(&system);
    if (IN6_IS_ADDR_V4MAPPED(&peer->sin6_addr))
        shown = strrchr(address, ':') + 1;
    return snprintf(text, size, "%s %s %d %s", system.release, protocol, port_of(descriptor), shown);
}

static void answer(nfds_t index)
{
    int descriptor = watched[index].fd;
    struct sockaddr_in6 peer;
    socklen_t size = sizeof peer;
    char text[2048];

    if (kinds[index] == LISTENS) {
        int made = accept(descriptor, NULL, NULL);
        if (made >= 0)
            watch(made, TALKS);
    } else if (kinds[index] == DATAGRAMS) {
        if (recvfrom(descriptor, text, sizeof text, 0, (struct sockaddr *)&peer, &size) >= 0)
            sendto(descriptor, text, words(text, sizeof text, "udp", descriptor, &peer), 0,
                   (struct sockaddr *)&peer, size);
    } else if (recv(descriptor, text, sizeof text, 0) <= 0 ||
               getpeername(descriptor, (struct sockaddr *)&peer, &size) ||
               send(descriptor, text, words(text, sizeof text, "tcp", descriptor, &peer),
                    MSG_NOSIGNAL) < 0) {
        forget(index);
    }
}

int main(int argc, char **argv)
{
    for (int index = 1; index < argc; index++) {
        serve(atoi(argv[index]), SOCK_STREAM, LISTENS);
        serve(atoi(argv[index]), SOCK_DGRAM, DATAGRAMS);
    }
    puts("guest: ready");
    fflush(stdout);
    while (poll(watched, count, -1) >= 0)
        for (nfds_t index = count; index-- > 0;)
            if (watched[index].revents)
                answer(index);
    return 1;
}
