/* What threads and ranks that wait for each other have in common. */
#ifndef PENSTOCK_WAITING_H
#define PENSTOCK_WAITING_H

#include <time.h>

static inline void pause_cpu(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

#endif
