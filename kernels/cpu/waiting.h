/* What threads and ranks that wait for each other have in common. */
#ifndef PENSTOCK_WAITING_H
#define PENSTOCK_WAITING_H

#include <stdatomic.h>
#include <stdint.h>
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

/* `sleep_while` returns once a word has another value, as `wake_all` tells after the change; or early. Those
 * of `ranks` do so for threads of other processes, too, and return after some time in any case. */
#if defined(__linux__) && !defined(WITHOUT_FUTEX)
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { LOOK_NS = 50000000 };

static inline void sleep_while(_Atomic uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static inline void wake_all(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static inline void ranks_sleep_while(_Atomic uint32_t *word, uint32_t value) {
    const struct timespec look = {.tv_nsec = LOOK_NS};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &look, NULL, 0);
}

static inline void ranks_wake_all(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}
#else
#include <pthread.h>

enum { LOOK_NS = 100000 };

static pthread_mutex_t waiting_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t waiting_changed = PTHREAD_COND_INITIALIZER;

static inline void sleep_while(_Atomic uint32_t *word, uint32_t value) {
    pthread_mutex_lock(&waiting_lock);
    while (atomic_load(word) == value) pthread_cond_wait(&waiting_changed, &waiting_lock);
    pthread_mutex_unlock(&waiting_lock);
}

static inline void wake_all(_Atomic uint32_t *word) {
    (void)word;
    pthread_mutex_lock(&waiting_lock);
    pthread_cond_broadcast(&waiting_changed);
    pthread_mutex_unlock(&waiting_lock);
}

static inline void ranks_sleep_while(_Atomic uint32_t *word, uint32_t value) {
    const struct timespec look = {.tv_nsec = LOOK_NS};
    if (atomic_load(word) == value) nanosleep(&look, NULL);
}

static inline void ranks_wake_all(_Atomic uint32_t *word) { (void)word; }
#endif

#endif
