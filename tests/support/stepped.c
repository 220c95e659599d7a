/* Adds a number of microseconds, which a shared file has, to the clock of the day: to be preloaded by a program. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *offset_us;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("STEPPED_CLOCK");
    int file = path ? open(path, O_RDONLY) : -1;
    void *shared = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *offset_us, PROT_READ, MAP_SHARED, file, 0);
    if (shared != MAP_FAILED) offset_us = shared;
    if (file >= 0) close(file);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, id, now);
    if (!failed && offset_us && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) {
        long long ns = now->tv_nsec + *offset_us % 1000000 * 1000;
        now->tv_sec += *offset_us / 1000000 + (ns < 0 ? -1 : ns / 1000000000);
        now->tv_nsec = (ns + 1000000000) % 1000000000;
    }
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}
