#define _GNU_SOURCE
#include "pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MAX_THREADS = 256, NUM_SPINS = 2000, SPINS_PER_LOOK = 64 };
enum { COUNT_BITS = 24, STATE_BITS = 8, MAX_ITEMS = 1 << (COUNT_BITS - 1) };
enum { MIN_PATIENCE_NS = 20000, ITEMS_OF_PATIENCE = 3 };

/* What a thread has in its hands, as others see it. */
enum state {
    FREE,    /* nothing */
    FIXED,   /* an item that only this thread can finish */
    OPEN,    /* a repeatable item: others may take it over */
    WRITING, /* a repeatable item, in the middle of a write */
    LOST     /* an item that another thread has taken over */
};

struct slot {
    _Atomic uint64_t word; /* from the low bits: state, item, job number */
    char pad[56];
};

/* A ticket holds, from its low bits up, the next item, the number of items, and the job's number.
 * Whoever adds one to it learns all three in one indivisible step, so a thread that comes late
 * never takes an item of one job for an item of another. */
static struct {
    struct slot slots[MAX_THREADS];
    _Atomic uint64_t ticket;
    char pad0[56];
    atomic_long num_done; /* of the job's items */
    char pad1[56];
    atomic_int epoch; /* the job's number; threads wait on it */
    atomic_int num_sleeping, is_running;
    atomic_long item_ns; /* what an item of the job takes, roughly; 0: not known yet */
    atomic_long num_repeated;
    /* Changed only by the thread that finished a job. Two jobs: one may still be looked at while the
     * next begins. */
    struct job jobs[2];
    const struct call *call, *last_call;
    int num_threads;
} pool = {.num_threads = 1};

static const uint64_t COUNT_MASK = ((uint64_t)1 << COUNT_BITS) - 1;
static _Thread_local struct slot *my_slot __attribute__((tls_model("initial-exec")));

static uint64_t word_of(unsigned number, uint64_t item, enum state state) {
    return ((uint64_t)(uint16_t)number << COUNT_BITS | item) << STATE_BITS | state;
}

static enum state state_of(uint64_t word) { return word & ((1 << STATE_BITS) - 1); }

static void pause_cpu(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

void pool_open(void) {
    if (!my_slot) return;
    uint64_t word = atomic_load_explicit(&my_slot->word, memory_order_relaxed);
    if (state_of(word) == FIXED)
        atomic_store_explicit(&my_slot->word, word - FIXED + OPEN, memory_order_release);
}

int pool_claim(void) {
    if (!my_slot) return 1;
    uint64_t word = atomic_load_explicit(&my_slot->word, memory_order_relaxed);
    if (state_of(word) != OPEN) return state_of(word) != LOST;
    return atomic_compare_exchange_strong(&my_slot->word, &word, word - OPEN + WRITING);
}

void pool_release(void) {
    if (!my_slot) return;
    uint64_t word = atomic_load_explicit(&my_slot->word, memory_order_relaxed);
    if (state_of(word) == WRITING)
        atomic_store_explicit(&my_slot->word, word - WRITING + OPEN, memory_order_release);
}

/* Begin the next call with more than one item, running those before it; or end the run. */
static void begin_next_job(void) {
    unsigned number = (unsigned)atomic_load_explicit(&pool.epoch, memory_order_relaxed) + 1;
    struct job job = {0};
    while (pool.call < pool.last_call) {
        job = pool.call->plan(pool.call->args);
        pool.call++;
        if (job.num_items > 1 && job.num_items <= MAX_ITEMS) break;
        for (long item = 0; item < job.num_items; item++) job.fn(job.args, item);
        job.num_items = 0;
    }
    pool.jobs[number & 1] = job;
    atomic_store_explicit(&pool.num_done, 0, memory_order_relaxed);
    atomic_store_explicit(&pool.item_ns, 0, memory_order_relaxed);
    uint64_t count = (uint64_t)job.num_items;
    if (!count) atomic_store(&pool.is_running, 0);
    atomic_store(&pool.ticket, ((uint64_t)(uint16_t)number << COUNT_BITS | count) << COUNT_BITS);
    atomic_store(&pool.epoch, (int)number);
    if (count && atomic_load(&pool.num_sleeping))
        syscall(SYS_futex, &pool.epoch, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static void do_item(const struct job *job, unsigned number, uint64_t item) {
    atomic_store(&my_slot->word, word_of(number, item, job->is_repeatable ? OPEN : FIXED));
    job->fn(job->args, (long)item);
    enum state state = state_of(atomic_exchange(&my_slot->word, FREE));
    if (state != LOST && atomic_fetch_add(&pool.num_done, 1) + 1 == job->num_items) begin_next_job();
}

/* Items of this job and, as long as this thread is the one to begin them, of those after it. */
static void take_items(void) {
    long begin_ns = 0, num_taken = 0;
    for (unsigned last_number = 0;; num_taken++) {
        uint64_t ticket = atomic_fetch_add(&pool.ticket, 1);
        uint64_t item = ticket & COUNT_MASK;
        unsigned number = (unsigned)(ticket >> (2 * COUNT_BITS));
        if (item >= (ticket >> COUNT_BITS & COUNT_MASK)) break;
        struct job job = pool.jobs[number & 1];
        if (!num_taken || number != last_number) begin_ns = now_ns(), num_taken = 0;
        last_number = number;
        do_item(&job, number, item);
    }
    if (!num_taken) return;
    long ns = (now_ns() - begin_ns) / num_taken;
    atomic_store_explicit(&pool.item_ns, ns, memory_order_relaxed);
}

/* Take over an item of the job from a thread that has been too long about it. */
static void repeat_item(unsigned number) {
    struct job job = pool.jobs[number & 1];
    for (int thread = 0; thread < pool.num_threads; thread++) {
        struct slot *slot = &pool.slots[thread];
        uint64_t word = atomic_load(&slot->word), item = word >> STATE_BITS & COUNT_MASK;
        if (slot == my_slot || word != word_of(number, item, OPEN)) continue;
        if (!atomic_compare_exchange_strong(&slot->word, &word, word - OPEN + LOST)) continue;
        atomic_fetch_add_explicit(&pool.num_repeated, 1, memory_order_relaxed);
        do_item(&job, number, item);
        return;
    }
}

static long patience_ns(void) {
    long ns = ITEMS_OF_PATIENCE * atomic_load_explicit(&pool.item_ns, memory_order_relaxed);
    return ns < MIN_PATIENCE_NS ? MIN_PATIENCE_NS : ns;
}

/* Wait for another job than `number`, and take over what others do not finish meanwhile. Returns when
 * the run is over. */
static void wait_for_job(int number) {
    long begin_ns = 0;
    for (long spin = 1; atomic_load_explicit(&pool.epoch, memory_order_acquire) == number; spin++) {
        if (!atomic_load_explicit(&pool.is_running, memory_order_acquire)) return;
        if (spin < NUM_SPINS) pause_cpu();
        else sched_yield(); /* who holds the last item may want this core */
        if (spin < NUM_SPINS && spin % SPINS_PER_LOOK) continue;
        if (!begin_ns) begin_ns = now_ns();
        else if (now_ns() - begin_ns > patience_ns()) {
            repeat_item((unsigned)number);
            begin_ns = 0;
        }
    }
}

static void sleep_until_job(int number) {
    for (int spin = 0; spin < NUM_SPINS; spin++) {
        if (atomic_load_explicit(&pool.epoch, memory_order_acquire) != number) return;
        pause_cpu();
    }
    atomic_fetch_add(&pool.num_sleeping, 1);
    while (atomic_load(&pool.epoch) == number)
        syscall(SYS_futex, &pool.epoch, FUTEX_WAIT_PRIVATE, number, NULL, NULL, 0);
    atomic_fetch_sub(&pool.num_sleeping, 1);
}

static void *work(void *slot) {
    my_slot = slot;
    for (;;) {
        int number = atomic_load(&pool.epoch);
        take_items();
        wait_for_job(number);
        if (!atomic_load_explicit(&pool.is_running, memory_order_acquire)) sleep_until_job(number);
    }
    return NULL;
}

int pool_start(int num_threads) {
    if (num_threads > MAX_THREADS) num_threads = MAX_THREADS;
    for (int thread = pool.num_threads; thread < num_threads; thread++) {
        pthread_t handle;
        if (pthread_create(&handle, NULL, work, &pool.slots[thread])) break;
        pthread_detach(handle);
        pool.num_threads++;
    }
    return pool.num_threads;
}

int pool_num_threads(void) { return pool.num_threads; }

void pool_run(const struct call *calls, long num_calls, int is_shared) {
    if (pool.num_threads == 1 || !is_shared) {
        for (long i = 0; i < num_calls; i++) {
            struct job job = calls[i].plan(calls[i].args);
            for (long item = 0; item < job.num_items; item++) job.fn(job.args, item);
        }
        return;
    }
    my_slot = &pool.slots[0];
    pool.call = calls;
    pool.last_call = calls + num_calls;
    atomic_store(&pool.is_running, 1);
    begin_next_job();
    while (atomic_load_explicit(&pool.is_running, memory_order_acquire)) {
        int number = atomic_load(&pool.epoch);
        take_items();
        wait_for_job(number);
    }
    my_slot = NULL;
}

void pool_settle(void) {
    for (int thread = 0; thread < pool.num_threads; thread++)
        while (atomic_load(&pool.slots[thread].word) != FREE) sched_yield();
}

long pool_num_repeated(void) { return atomic_load(&pool.num_repeated); }
