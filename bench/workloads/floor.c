/*
 * The floor: acquire+release pairs per second on one connection, each pair two blocking round trips.
 *
 *     floor HOST PORT SECONDS blocking|spinning ACQUIRE ACQUIRED RELEASE RELEASED
 *
 * ACQUIRE and RELEASE are the requests, ACQUIRED and RELEASED their correct replies, all in hex. Prints pairs per
 * second; at any other reply it prints that reply and exits with 1. Each reply must be a single line.
 */
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MAX_BYTES 4096
#define WARM_UP_PAIRS 200
#define PAIRS_PER_LOOK 10

struct bytes {
    char data[MAX_BYTES];
    size_t length;
};

static int connection;
static int receive_flags;

static void die(const char *what)
{
    perror(what);
    exit(1);
}

static struct bytes from_hex(const char *hex)
{
    struct bytes result = {{0}, strlen(hex) / 2};
    if (result.length > MAX_BYTES) {
        fprintf(stderr, "a request of more than %d bytes\n", MAX_BYTES);
        exit(1);
    }
    for (size_t i = 0; i < result.length; i++) {
        char digits[3] = {hex[2 * i], hex[2 * i + 1], 0};
        result.data[i] = (char)strtol(digits, NULL, 16);
    }
    return result;
}

static void round_trip(const struct bytes *request, const struct bytes *right)
{
    char reply[MAX_BYTES];
    size_t length = 0;

    for (size_t sent = 0; sent < request->length;) {
        ssize_t n = send(connection, request->data + sent, request->length - sent, 0);
        if (n < 0)
            die("send");
        sent += (size_t)n;
    }
    do {
        ssize_t n = recv(connection, reply + length, sizeof reply - length, receive_flags);
        if (n > 0)
            length += (size_t)n;
        else if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR))
            die("recv");
    } while (length == 0 || (reply[length - 1] != '\n' && length < sizeof reply));
    if (length != right->length || memcmp(reply, right->data, length) != 0) {
        fprintf(stderr, "wrong reply: %.*s", (int)length, reply);
        exit(1);
    }
}

static void open_connection(const char *host, const char *port)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *address;
    int on = 1;

    if (getaddrinfo(host, port, &hints, &address) != 0) {
        fprintf(stderr, "unknown host %s\n", host);
        exit(1);
    }
    connection = socket(address->ai_family, address->ai_socktype, address->ai_protocol);
    if (connection < 0 || connect(connection, address->ai_addr, address->ai_addrlen) != 0)
        die("connect");
    if (setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0)
        die("TCP_NODELAY");
    freeaddrinfo(address);
}

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

int main(int argc, char **argv)
{
    if (argc != 9) {
        fprintf(stderr, "see the head of floor.c\n");
        return 2;
    }
    double seconds = atof(argv[3]);
    struct bytes acquire = from_hex(argv[5]), acquired = from_hex(argv[6]);
    struct bytes release = from_hex(argv[7]), released = from_hex(argv[8]);
    long pairs = 0;
    double began, now;

    receive_flags = strcmp(argv[4], "spinning") == 0 ? MSG_DONTWAIT : 0;
    open_connection(argv[1], argv[2]);
    for (int i = 0; i < WARM_UP_PAIRS; i++) {
        round_trip(&acquire, &acquired);
        round_trip(&release, &released);
    }
    began = now = now_s();
    while (now < began + seconds) {
        for (int i = 0; i < PAIRS_PER_LOOK; i++) {
            round_trip(&acquire, &acquired);
            round_trip(&release, &released);
        }
        pairs += PAIRS_PER_LOOK;
        now = now_s();
    }
    printf("%.1f\n", (double)pairs / (now - began));
    close(connection);
    return 0;
}
