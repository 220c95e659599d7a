/*
 * A delaying proxy: every byte leaves later than it came, by the same time in both directions.
 *
 *     delay DELAY_US HOST PORT...
 *
 * Prints a port on loopback for each PORT of HOST that is reached through it, and ends with its standard input. It
 * forwards bytes unchanged, limits no bandwidth, and makes no byte wait for a later one. Connecting is not delayed.
 *
 * The delay is the same for all, so the bytes under way are one queue in the order of arrival, whatever the connection.
 */
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define PIECE_BYTES 65536
#define EVENTS 256
#define LISTENERS 64
#define SPIN_NS 200000 /* waking is slow: before and after its work, it stays awake for so long */

/* One side of a connection. It is never freed: an event of it may still be in hand. */
struct end {
    int fd;             /* -1: closed */
    int has_ended;      /* nothing more comes from it */
    int is_told;        /* it was told that nothing more comes from its peer */
    struct end *peer;
    struct piece *late, *last_late; /* due, but its socket was full */
};

struct piece {
    struct piece *next;
    struct end *to;
    int64_t due_ns;
    size_t sent, length; /* a length of 0: the end of the stream */
    char data[];
};

/* One server, and the port on loopback where it is reached. */
struct listener {
    int fd;
    struct addrinfo *server;
};

static struct piece *under_way, *last_under_way;
static struct listener listeners[LISTENERS];
static int64_t delay_ns;
static int events_fd, timer_fd;

static void die(const char *what)
{
    perror(what);
    exit(1);
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Wake in time for the first piece that is due. */
static void set_timer(void)
{
    int64_t wake_ns = under_way->due_ns - SPIN_NS;
    struct itimerspec at = {.it_value = {wake_ns / 1000000000, wake_ns % 1000000000}};
    if (timerfd_settime(timer_fd, TFD_TIMER_ABSTIME, &at, NULL) != 0)
        die("timerfd_settime");
}

static void append(struct piece **first, struct piece **last, struct piece *piece)
{
    piece->next = NULL;
    if (*first == NULL)
        *first = piece;
    else
        (*last)->next = piece;
    *last = piece;
}

static void watch(int fd, void *what, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.ptr = what};
    if (epoll_ctl(events_fd, EPOLL_CTL_ADD, fd, &event) != 0)
        die("epoll_ctl");
}

static void receive(struct end *from)
{
    static char data[PIECE_BYTES];

    while (!from->has_ended) {
        ssize_t n = recv(from->fd, data, sizeof data, 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        size_t length = n > 0 ? (size_t)n : 0; /* a reset is passed on as an end */
        struct piece *piece = malloc(sizeof *piece + length);
        if (piece == NULL)
            die("malloc");
        *piece = (struct piece){.to = from->peer, .due_ns = now_ns() + delay_ns, .length = length};
        memcpy(piece->data, data, length);
        from->has_ended = length == 0;
        append(&under_way, &last_under_way, piece);
    }
}

static void tell_end(struct end *end)
{
    end->is_told = 1;
    shutdown(end->fd, SHUT_WR);
    if (end->peer->is_told) {
        close(end->fd);
        close(end->peer->fd);
        end->fd = end->peer->fd = -1;
    }
}

/* Send the late pieces of an end as far as there is room. */
static void send_late(struct end *to)
{
    struct piece *piece;

    while ((piece = to->late) != NULL) {
        while (piece->sent < piece->length) {
            ssize_t n = send(to->fd, piece->data + piece->sent, piece->length - piece->sent, MSG_NOSIGNAL);
            if (n >= 0)
                piece->sent += (size_t)n;
            else if (errno == EAGAIN || errno == EWOULDBLOCK)
                return;
            else if (errno != EINTR)
                break; /* it is closed: drop the bytes */
        }
        to->late = piece->next;
        if (piece->length == 0)
            tell_end(to);
        free(piece);
    }
}

static void send_due(void)
{
    struct piece *piece;

    while ((piece = under_way) != NULL && piece->due_ns <= now_ns()) {
        struct end *to = piece->to;
        under_way = piece->next;
        append(&to->late, &to->last_late, piece);
        if (piece == to->late)
            send_late(to);
    }
}

static struct end *new_end(int fd)
{
    struct end *end = calloc(1, sizeof *end);
    int on = 1;

    if (end == NULL)
        die("calloc");
    end->fd = fd;
    if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0)
        die("TCP_NODELAY");
    if (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) != 0)
        die("O_NONBLOCK");
    return end;
}

static void join(int client_fd, const struct addrinfo *server)
{
    int server_fd = socket(server->ai_family, server->ai_socktype, server->ai_protocol);
    if (server_fd < 0)
        die("socket");
    if (connect(server_fd, server->ai_addr, server->ai_addrlen) != 0) { /* no server: close the client, too */
        close(server_fd);
        close(client_fd);
        return;
    }
    struct end *client = new_end(client_fd), *far = new_end(server_fd);
    client->peer = far;
    far->peer = client;
    watch(client_fd, client, EPOLLIN | EPOLLOUT | EPOLLET);
    watch(server_fd, far, EPOLLIN | EPOLLOUT | EPOLLET);
}

static void open_listener(struct listener *listener, const char *host, const char *port)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM, 0);

    if (fd < 0 || bind(fd, (struct sockaddr *)&address, length) != 0 || listen(fd, SOMAXCONN) != 0)
        die("listen");
    if (getsockname(fd, (struct sockaddr *)&address, &length) != 0)
        die("getsockname");
    if (getaddrinfo(host, port, &hints, &listener->server) != 0) {
        fprintf(stderr, "unknown host %s\n", host);
        exit(1);
    }
    listener->fd = fd;
    watch(fd, listener, EPOLLIN);
    printf("%d\n", ntohs(address.sin_port));
}

int main(int argc, char **argv)
{
    struct epoll_event events[EVENTS];
    int input = 0; /* its address, and the timer's, stand for them in events */
    uint64_t expirations;
    int64_t heard_ns = 0;
    char word[64];

    if (argc < 4 || argc - 3 > LISTENERS) {
        fprintf(stderr, "see the head of delay.c\n");
        return 2;
    }
    delay_ns = (int64_t)(atof(argv[1]) * 1e3);
    events_fd = epoll_create1(0);
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    if (events_fd < 0 || timer_fd < 0)
        die("epoll_create1, timerfd_create");
    watch(STDIN_FILENO, &input, EPOLLIN);
    watch(timer_fd, &timer_fd, EPOLLIN);
    for (int i = 3; i < argc; i++)
        open_listener(&listeners[i - 3], argv[2], argv[i]);
    fflush(stdout);
    for (;;) {
        int64_t now = now_ns();
        int spins = now - heard_ns < SPIN_NS || (under_way != NULL && under_way->due_ns - now < SPIN_NS);
        if (!spins && under_way != NULL)
            set_timer();
        int count = epoll_wait(events_fd, events, EVENTS, spins ? 0 : -1);
        if (count < 0 && errno != EINTR)
            die("epoll_wait");
        if (count > 0)
            heard_ns = now;
        for (int i = 0; i < count; i++) {
            void *what = events[i].data.ptr;
            if (what == &input) {
                if (read(STDIN_FILENO, word, sizeof word) <= 0)
                    return 0;
            } else if (what >= (void *)listeners && what < (void *)(listeners + LISTENERS)) {
                struct listener *listener = what;
                int fd = accept(listener->fd, NULL, NULL);
                if (fd >= 0)
                    join(fd, listener->server);
            } else if (what == &timer_fd) {
                if (read(timer_fd, &expirations, sizeof expirations) < 0 && errno != EAGAIN)
                    die("timerfd");
            } else {
                struct end *end = what;
                if (end->fd >= 0)
                    receive(end);
                if (end->fd >= 0)
                    send_late(end);
            }
        }
        send_due();
    }
}
