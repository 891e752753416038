#define _GNU_SOURCE
#include "pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MAX_THREADS = 256, NUM_SPINS = 2000, COUNT_BITS = 24, MAX_ITEMS = 1 << (COUNT_BITS - 1) };

/* A kernel being run. The two take turns: one may still be looked at while the next begins. */
struct job {
    item_fn *fn;
    const void *args;
    atomic_long num_done;
};

/* A ticket holds, from its low bits up, the next item, the number of items, and which job it is.
 * Whoever adds one to it learns all three in one indivisible step, so a thread that comes late
 * never takes an item of one job for an item of another, and nobody has to wait for it. */
static struct {
    struct job jobs[2];
    int num_threads, is_shared;
    char pad0[64];
    _Atomic uint64_t ticket;
    char pad1[64];
    atomic_int epoch; /* one more for every job; workers wait on it */
    atomic_int num_sleeping;
} pool = {.num_threads = 1, .is_shared = 1};

static inline void pause_cpu(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void take_items(void) {
    const uint64_t mask = ((uint64_t)1 << COUNT_BITS) - 1;
    for (;;) {
        uint64_t ticket = atomic_fetch_add(&pool.ticket, 1);
        uint64_t item = ticket & mask, num_items = ticket >> COUNT_BITS & mask;
        if (item >= num_items) return;
        struct job *job = &pool.jobs[ticket >> (2 * COUNT_BITS) & 1];
        job->fn(job->args, (long)item);
        atomic_fetch_add_explicit(&job->num_done, 1, memory_order_release);
    }
}

static int wait_for_epoch(int seen) {
    for (int spin = 0; spin < NUM_SPINS; spin++) {
        int epoch = atomic_load_explicit(&pool.epoch, memory_order_acquire);
        if (epoch != seen) return epoch;
        pause_cpu();
    }
    atomic_fetch_add(&pool.num_sleeping, 1);
    int epoch;
    while ((epoch = atomic_load(&pool.epoch)) == seen)
        syscall(SYS_futex, &pool.epoch, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&pool.num_sleeping, 1);
    return epoch;
}

static void *work(void *unused) {
    for (int epoch = 0;;) {
        take_items();
        epoch = wait_for_epoch(epoch);
    }
    return unused;
}

int pool_start(int num_threads) {
    if (num_threads > MAX_THREADS) num_threads = MAX_THREADS;
    for (int thread = pool.num_threads; thread < num_threads; thread++) {
        pthread_t handle;
        if (pthread_create(&handle, NULL, work, NULL)) break;
        pthread_detach(handle);
        pool.num_threads++;
    }
    return pool.num_threads;
}

void pool_share(int is_shared) { pool.is_shared = is_shared; }

void pool_run(item_fn *fn, const void *args, long num_items) {
    if (pool.num_threads == 1 || !pool.is_shared || num_items == 1 || num_items > MAX_ITEMS) {
        for (long item = 0; item < num_items; item++) fn(args, item);
        return;
    }
    unsigned epoch = (unsigned)atomic_load_explicit(&pool.epoch, memory_order_relaxed) + 1;
    struct job *job = &pool.jobs[epoch & 1];
    job->fn = fn;
    job->args = args;
    atomic_store_explicit(&job->num_done, 0, memory_order_relaxed);
    atomic_store(&pool.ticket, ((uint64_t)(epoch & 1) << COUNT_BITS | (uint64_t)num_items) << COUNT_BITS);
    atomic_store(&pool.epoch, (int)epoch);
    if (atomic_load(&pool.num_sleeping))
        syscall(SYS_futex, &pool.epoch, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
    take_items();
    for (int spin = 0; atomic_load_explicit(&job->num_done, memory_order_acquire) < num_items; spin++) {
        if (spin < NUM_SPINS) pause_cpu();
        else sched_yield(); /* the thread that holds the last item may want this core */
    }
}
