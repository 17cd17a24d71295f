/* Preloaded into a node's processes: their wall clock is SKEW_S seconds ahead of the machine's. Timers by other clocks
   are left alone, and what waits until a moment of the wall clock waits until the moment that it means. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long skew_s;

__attribute__((constructor)) static void read_skew(void) {
    const char *text = getenv("SKEW_S");
    skew_s = text ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += skew_s;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int failed = (int)syscall(SYS_gettimeofday, now, zone);
    if (!failed) now->tv_sec += skew_s;
    return failed;
}

time_t time(time_t *now) {
    struct timespec read;
    clock_gettime(CLOCK_REALTIME, &read);
    if (now) *now = read.tv_sec;
    return read.tv_sec;
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    int (*wait)(sem_t *, const struct timespec *);
    *(void **)&wait = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec meant = {until->tv_sec - skew_s, until->tv_nsec};
    return wait(semaphore, &meant);
}
