/* Opens new flows at a steady rate, and reports each that is not answered as it should be.
 *
 *     hitless -c NETNS -g NETNS [-g NETNS] -m MAC -4 ADDRESS -6 ADDRESS -s ADDRESS -S ADDRESS
 *             [-r FLOWS_PER_SECOND] [-t TIMEOUT_MS] [-x MOST_SECONDS] tcp:1000-1009 udp:53-53+1000 ...
 *
 * Client (-c) and guests (-g) are network namespaces with a link eth0 and no address: every packet is
 * made and read here, on packet sockets, so that nothing is retransmitted and a lost first packet is a
 * lost flow. A flow is a SYN that a guest answers with a SYN-ACK, and that is then closed with a RST; or
 * a datagram that a guest answers with one. Guests answer on every port and say who they are (0, 1, ...)
 * and at which port they were asked; `+1000` is how far that port is from the one the client asked.
 *
 * Flows go to both addresses (-4, -6) over the next hop's MAC address (-m), from SOURCES addresses
 * beginning with -s and -S, and from PORTS source ports each. One line of JSON goes to standard output
 * when it begins, one for each lost flow, and one at the end, which comes when standard input is closed,
 * or after -x seconds. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_packet.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <signal.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { SOURCES = 16, PORTS = 16384, FIRST_PORT = 10000, GUESTS = 4, RANGES = 256, BURST = 64 };
enum { UDP_ONE_IN = 10 }; /* connection tracking remembers a datagram for seconds, a reset not at all */
enum { TCP = 6, UDP = 17, ICMP = 1, ICMP6 = 58, SYN = 2, RST = 4, ACK = 16 };
enum { NONE, WAITING, ANSWERED };
enum { ETHER = 14, IP4 = 20, IP6 = 40 };

struct flow { uint64_t sent; uint16_t port, expected; uint8_t state; };
struct range { int protocol, first, count, shift; };

static struct flow flows[2][2][SOURCES][PORTS]; /* by version, protocol, address, source port */
static uint32_t *order;                         /* the flows that wait, in the order of their sending */
static uint64_t head, tail, room;
static struct range ranges[RANGES];
static int range_count, totals[2], guest_count, client, guests[GUESTS];
static uint8_t client_mac[6], hop_mac[6];
static uint8_t to[2][16], from[2][16];
static uint64_t sent, answered, refused, timed_out, cut, astray, late, by_guest[GUESTS];
static uint64_t timeout = 3000000000ull;
static uint64_t seed, begin; /* other ports than the client that ran before */

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ull + time.tv_nsec;
}

/* ------------------------------------------------------------------------------------- packets */

static uint32_t sum(const uint8_t *data, size_t size, uint32_t start)
{
    for (size_t place = 0; place + 1 < size; place += 2)
        start += data[place] << 8 | data[place + 1];
    return size & 1 ? start + (data[size - 1] << 8) : start;
}

static uint16_t fold(uint32_t total)
{
    while (total >> 16)
        total = (total & 0xffff) + (total >> 16);
    return ~total;
}

static void put16(uint8_t *at, uint32_t value) { at[0] = value >> 8; at[1] = value; }
static void put32(uint8_t *at, uint32_t value) { put16(at, value >> 16); put16(at + 2, value); }
static uint32_t get16(const uint8_t *at) { return at[0] << 8 | at[1]; }
static uint32_t get32(const uint8_t *at) { return get16(at) << 16 | get16(at + 2); }

struct packet { uint8_t bytes[128]; size_t size; };

/* Ethernet and IP headers and the checksums; what follows the IP header is there already. */
static void wrap(struct packet *packet, int six, int protocol, const uint8_t *source,
                 const uint8_t *target, const uint8_t *mac, const uint8_t *next, size_t inner)
{
    uint8_t *ip = packet->bytes + ETHER, *segment = ip + (six ? IP6 : IP4);
    size_t length = six ? 16 : 4;
    uint8_t *checksum = segment + (protocol == TCP ? 16 : 6);
    uint16_t value;

    memcpy(packet->bytes, next, 6);
    memcpy(packet->bytes + 6, mac, 6);
    put16(packet->bytes + 12, six ? ETHERTYPE_IPV6 : ETHERTYPE_IP);
    memset(ip, 0, six ? IP6 : IP4);
    if (six) {
        ip[0] = 0x60;
        put16(ip + 4, inner);
        ip[6] = protocol;
        ip[7] = 64;
        memcpy(ip + 8, source, 16);
        memcpy(ip + 24, target, 16);
    } else {
        ip[0] = 0x45;
        put16(ip + 2, IP4 + inner);
        ip[6] = 0x40;
        ip[8] = 64;
        ip[9] = protocol;
        memcpy(ip + 12, source, 4);
        memcpy(ip + 16, target, 4);
        put16(ip + 10, fold(sum(ip, IP4, 0)));
    }
    put16(checksum, 0);
    value = fold(sum(segment, inner, sum(source, length, sum(target, length, protocol + inner))));
    put16(checksum, value ? value : 0xffff);
    packet->size = segment + inner - packet->bytes;
}

static size_t segment(uint8_t *at, int source, int target, uint32_t number, uint32_t ack, int flags)
{
    memset(at, 0, 20);
    put16(at, source);
    put16(at + 2, target);
    put32(at + 4, number);
    put32(at + 8, ack);
    at[12] = 5 << 4;
    at[13] = flags;
    put16(at + 14, 65535);
    return 20;
}

static size_t datagram(uint8_t *at, int source, int target, uint32_t words)
{
    put16(at, source);
    put16(at + 2, target);
    put16(at + 4, 12);
    put32(at + 8, words);
    return 12;
}

static void push(int link, const struct packet *packet)
{
    while (send(link, packet->bytes, packet->size, 0) < 0)
        if (errno == ENOBUFS || errno == EAGAIN || errno == EINTR)
            usleep(200);
        else
            err(1, "send");
}

/* -------------------------------------------------------------------------------------- guests */

/* What a guest says: which it is, and the port it was asked at. */
static void guest_answers(int who, const uint8_t *frame, size_t size)
{
    int type = get16(frame + 12), six = type == ETHERTYPE_IPV6, protocol, port, asker;
    const uint8_t *ip = frame + ETHER, *inner;
    struct packet packet;
    uint8_t *made = packet.bytes + ETHER + (six ? IP6 : IP4);
    size_t length;

    if ((type != ETHERTYPE_IP && !six) || size < ETHER + (six ? IP6 : IP4) + 8u)
        return;
    protocol = six ? ip[6] : ip[9];
    inner = ip + (six ? IP6 : (ip[0] & 15) * 4);
    if (inner + (protocol == TCP ? 20 : 8) > frame + size)
        return;
    asker = get16(inner);
    port = get16(inner + 2);
    if (protocol == TCP && (inner[13] & (SYN | ACK | RST)) == SYN)
        length = segment(made, port, asker, who << 16 | port, get32(inner + 4) + 1, SYN | ACK);
    else if (protocol == UDP)
        length = datagram(made, port, asker, who << 16 | port);
    else
        return;
    wrap(&packet, six, protocol, ip + (six ? 24 : 16), ip + (six ? 8 : 12), frame, frame + 6, length);
    push(guests[who], &packet);
}

/* -------------------------------------------------------------------------------------- client */

static void address_of(uint8_t *at, int six, int source)
{
    memcpy(at, from[six], 16);
    at[six ? 15 : 3] += source;
}

static void lost(const char *how, int six, int udp, int source, int port, const struct flow *flow,
                 const char *more)
{
    char text[INET6_ADDRSTRLEN];
    uint8_t address[16];

    address_of(address, six, source);
    inet_ntop(six ? AF_INET6 : AF_INET, address, text, sizeof text);
    printf("{\"lost\": \"%s\", \"protocol\": \"%s\", \"family\": %d, \"from\": \"%s\", \"source\": %d, "
           "\"port\": %d, \"sent\": %.6f, \"noticed\": %.6f, \"more\": \"%s\"}\n",
           how, udp ? "udp" : "tcp", six ? 6 : 4, text, port + FIRST_PORT, flow->port,
           flow->sent / 1e9, now() / 1e9, more);
    fflush(stdout);
}

/* The flow that a packet from outside is for; none, if it is for nobody. */
static struct flow *flow_of(int six, int protocol, const uint8_t *address, int port, int *source)
{
    *source = address[six ? 15 : 3] - from[six][six ? 15 : 3];
    if (*source < 0 || *source >= SOURCES || port < FIRST_PORT || port >= FIRST_PORT + PORTS)
        return NULL;
    if (memcmp(address, from[six], six ? 15 : 3) || (protocol != TCP && protocol != UDP))
        return NULL;
    return &flows[six][protocol == UDP][*source][port - FIRST_PORT];
}

static void open_flow(void)
{
    uint64_t number = sent++;
    int six = number & 1, source = number / 2 % SOURCES;
    int port = (number / (2 * SOURCES) + begin) % PORTS, place, udp;
    struct range *range = ranges;
    struct packet packet;
    struct flow *flow;
    uint8_t *inner = packet.bytes + ETHER + (six ? IP6 : IP4), address[16];

    udp = !totals[0] || (totals[1] && number / 2 % UDP_ONE_IN == 0);
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    for (place = seed % totals[udp]; udp != (range->protocol == UDP) || place >= range->count; range++)
        place -= udp == (range->protocol == UDP) ? range->count : 0;
    flow = &flows[six][udp][source][port];
    if (flow->state == WAITING) /* the one before is not over: only if the rate is far too high */
        errx(1, "source ports are used up");
    *flow = (struct flow){now(), range->first + place, range->first + place + range->shift, WAITING};
    address_of(address, six, source);
    wrap(&packet, six, range->protocol, address, to[six], client_mac, hop_mac,
         udp ? datagram(inner, port + FIRST_PORT, flow->port, number)
             : segment(inner, port + FIRST_PORT, flow->port, (uint32_t)number, 0, SYN));
    order[tail++ % room] = ((six * 2 + udp) * SOURCES + source) * PORTS + port;
    push(client, &packet);
}

static void answer(struct flow *flow, int six, int protocol, int source, int port,
                   const uint8_t *ip, const uint8_t *inner)
{
    int words = protocol == TCP ? get32(inner + 4) : get32(inner + 8), who = words >> 16;
    uint8_t address[16], more[64];

    if (flow->state != WAITING) {
        late += flow->state == NONE; /* a second answer is no news */
        return;
    }
    flow->state = ANSWERED;
    snprintf((char *)more, sizeof more, "guest %d port %d", who, words & 0xffff);
    if (memcmp(ip + (six ? 8 : 12), to[six], six ? 16 : 4) || (int)get16(inner) != flow->port) {
        cut++; /* its translation was forgotten between the question and the answer */
        lost("cut", six, protocol == UDP, source, port - FIRST_PORT, flow, (char *)more);
        return;
    }
    if ((words & 0xffff) != flow->expected || who >= guest_count) {
        astray++;
        lost("astray", six, protocol == UDP, source, port - FIRST_PORT, flow, (char *)more);
        return;
    }
    answered++;
    by_guest[who]++;
    if (protocol == TCP) { /* nothing need be remembered of it on the way */
        struct packet packet;
        uint8_t *made = packet.bytes + ETHER + (six ? IP6 : IP4);
        address_of(address, six, source);
        wrap(&packet, six, TCP, address, to[six], client_mac, hop_mac,
             segment(made, port, flow->port, get32(inner + 8), 0, RST));
        push(client, &packet);
    }
}

static void refuse(struct flow *flow, int six, int protocol, int source, int port, const char *more)
{
    if (flow->state != WAITING)
        return;
    flow->state = ANSWERED;
    refused++;
    lost("refused", six, protocol == UDP, source, port - FIRST_PORT, flow, more);
}

static void client_hears(const uint8_t *frame, size_t size)
{
    int type = get16(frame + 12), six = type == ETHERTYPE_IPV6, protocol, source, port;
    const uint8_t *ip = frame + ETHER, *inner, *within;
    char more[64];
    struct flow *flow;

    if ((type != ETHERTYPE_IP && !six) || size < ETHER + (six ? IP6 : IP4) + 8u)
        return;
    protocol = six ? ip[6] : ip[9];
    inner = ip + (six ? IP6 : (ip[0] & 15) * 4);
    if (protocol == (six ? ICMP6 : ICMP)) { /* about a packet of ours, whose beginning is in it */
        within = inner + 8;
        if (inner[0] != (six ? 1 : 3) || within + (six ? IP6 : IP4) + 8 > frame + size)
            return;
        snprintf(more, sizeof more, "icmp type %d code %d", inner[0], inner[1]);
        protocol = six ? within[6] : within[9];
        inner = within + (six ? IP6 : (within[0] & 15) * 4);
        port = get16(inner);
        flow = flow_of(six, protocol, within + (six ? 8 : 12), port, &source);
        if (flow)
            refuse(flow, six, protocol, source, port, more);
        return;
    }
    if ((protocol != TCP && protocol != UDP) || inner + (protocol == TCP ? 20 : 12) > frame + size)
        return;
    port = get16(inner + 2);
    flow = flow_of(six, protocol, ip + (six ? 24 : 16), port, &source);
    if (!flow)
        return;
    if (protocol == TCP && inner[13] & RST)
        refuse(flow, six, protocol, source, port, "reset");
    else if (protocol == UDP || (inner[13] & (SYN | ACK)) == (SYN | ACK))
        answer(flow, six, protocol, source, port, ip, inner);
}

/* Those that nobody answered in time; what has arrived by now was read before. */
static void expire(void)
{
    uint64_t moment = now();

    while (head < tail) {
        uint32_t which = order[head % room];
        struct flow *flow = &((struct flow *)flows)[which];
        if (flow->state == WAITING && moment - flow->sent < timeout)
            return;
        if (flow->state == WAITING) {
            timed_out++;
            flow->state = NONE;
            lost("timed out", which / (2 * SOURCES * PORTS), which / (SOURCES * PORTS) % 2,
                 which / PORTS % SOURCES, which % PORTS, flow, "");
        }
        head++;
    }
}

/* --------------------------------------------------------------------------------------- set-up */

static int in_namespace(const char *name, uint8_t *mac)
{
    char path[256];
    struct sockaddr_ll address = {.sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL)};
    struct ifreq request = {.ifr_name = "eth0"};
    int space, made, yes = 1, size = 64 << 20;

    snprintf(path, sizeof path, strchr(name, '/') ? "%s" : "/run/netns/%s", name);
    space = open(path, O_RDONLY | O_CLOEXEC);
    if (space < 0 || setns(space, CLONE_NEWNET))
        err(1, "namespace %s", name);
    close(space);
    made = socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (made < 0 || ioctl(made, SIOCGIFHWADDR, &request))
        err(1, "eth0 in %s", name);
    memcpy(mac, request.ifr_hwaddr.sa_data, 6);
    address.sll_ifindex = if_nametoindex("eth0");
    if (setsockopt(made, SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof size) ||
        setsockopt(made, SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof size) ||
        setsockopt(made, SOL_PACKET, PACKET_IGNORE_OUTGOING, &yes, sizeof yes) ||
        setsockopt(made, SOL_PACKET, PACKET_QDISC_BYPASS, &yes, sizeof yes) ||
        bind(made, (struct sockaddr *)&address, sizeof address))
        err(1, "packets in %s", name);
    return made;
}

static unsigned overrun(int link)
{
    struct tpacket_stats found = {0};
    socklen_t size = sizeof found;

    getsockopt(link, SOL_PACKET, PACKET_STATISTICS, &found, &size);
    return found.tp_drops;
}

static void add_range(const char *text)
{
    struct range *range = &ranges[range_count++];
    char protocol[4];
    int last;

    if (range_count > RANGES ||
        sscanf(text, "%3[a-z]:%d-%d%d", protocol, &range->first, &last, &range->shift) < 3)
        errx(2, "not a range: %s", text);
    range->protocol = strcmp(protocol, "udp") ? TCP : UDP;
    range->count = last - range->first + 1;
    totals[range->protocol == UDP] += range->count;
}

static void read_all(int link, int who)
{
    uint8_t frame[2048];
    ssize_t size;

    while ((size = recv(link, frame, sizeof frame, 0)) > ETHER)
        if (who < 0)
            client_hears(frame, size);
        else
            guest_answers(who, frame, size);
}

int main(int argc, char **argv)
{
    struct pollfd watched[GUESTS + 2];
    uint64_t started, most = 600, rate = 6000, pace = 0, ended = 0;
    unsigned dropped = 0;
    uint8_t other[6];
    int option;
    const char *where = NULL;

    while ((option = getopt(argc, argv, "c:g:m:4:6:s:S:r:t:x:")) != -1)
        switch (option) {
        case 'c': where = optarg; break;
        case 'g':
            if (guest_count == GUESTS)
                errx(2, "too many guests");
            guests[guest_count++] = in_namespace(optarg, other);
            break;
        case 'm':
            if (sscanf(optarg, "%hhx:%hhx:%hhx:%hhx:%hhx:%hhx", hop_mac, hop_mac + 1, hop_mac + 2,
                       hop_mac + 3, hop_mac + 4, hop_mac + 5) != 6)
                errx(2, "not a MAC address: %s", optarg);
            break;
        case '4': inet_pton(AF_INET, optarg, to[0]); break;
        case '6': inet_pton(AF_INET6, optarg, to[1]); break;
        case 's': inet_pton(AF_INET, optarg, from[0]); break;
        case 'S': inet_pton(AF_INET6, optarg, from[1]); break;
        case 'r': rate = strtoull(optarg, NULL, 10); break;
        case 't': timeout = strtoull(optarg, NULL, 10) * 1000000ull; break;
        case 'x': most = strtoull(optarg, NULL, 10); break;
        default: return 2;
        }
    for (; optind < argc; optind++)
        add_range(argv[optind]);
    if (!where || !guest_count || !range_count || !rate)
        errx(2, "a client, a guest, a range and a rate are needed");
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setpriority(PRIO_PROCESS, 0, -20); /* where it may */
    client = in_namespace(where, client_mac);
    room = (uint64_t)4 * SOURCES * PORTS;
    order = malloc(room * sizeof *order);
    if (!order)
        err(1, "memory");
    watched[0] = (struct pollfd){.fd = client, .events = POLLIN};
    for (int who = 0; who < guest_count; who++)
        watched[1 + who] = (struct pollfd){.fd = guests[who], .events = POLLIN};
    watched[1 + guest_count] = (struct pollfd){.fd = STDIN_FILENO};
    printf("{\"ready\": %.6f}\n", now() / 1e9);
    fflush(stdout);
    started = seed = now();
    begin = started / 1000000 * rate / (2000 * SOURCES);
    while (!ended || head < tail) {
        struct timespec wait = {.tv_nsec = 500000};
        if (ppoll(watched, guest_count + 2, &wait, NULL) < 0 && errno != EINTR)
            err(1, "poll");
        for (int who = 0; who < guest_count; who++)
            read_all(guests[who], who);
        read_all(client, -1);
        expire();
        if (!ended) {
            uint64_t passed = now() - started, due = passed * rate / 1000000000ull;
            if (due > pace + rate) /* who was kept from running for long does not catch up */
                pace = due - rate;
            for (int count = 0; pace < due && count < BURST; pace++, count++)
                open_flow();
            if (watched[1 + guest_count].revents & (POLLHUP | POLLIN) || passed > most * 1000000000ull)
                ended = passed;
        }
    }
    dropped = overrun(client);
    for (int who = 0; who < guest_count; who++)
        dropped += overrun(guests[who]);
    printf("{\"sent\": %ju, \"answered\": %ju, \"refused\": %ju, \"timed out\": %ju, \"cut\": %ju, "
           "\"astray\": %ju, \"late\": %ju, \"overrun\": %u, \"seconds\": %.3f, \"guests\": [",
           sent, answered, refused, timed_out, cut, astray, late, dropped, ended / 1e9);
    for (int who = 0; who < guest_count; who++)
        printf("%s%ju", who ? ", " : "", by_guest[who]);
    puts("]}");
    return 0;
}
