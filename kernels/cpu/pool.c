/* tests/kernels/cpu/pool_model.py is a model of this file: the same functions, one step for each
 * access to shared memory, and it tries every interleaving. If the order of accesses changes here,
 * change it there too. */
#define _GNU_SOURCE
#include "pool.h"
#include "waiting.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>

enum { MAX_THREADS = 256, NUM_SPINS = 2000, SPINS_PER_LOOK = 64 };
enum { COUNT_BITS = 32, ITEM_BITS = 24, STATE_BITS = 8, MAX_ITEMS = 1 << ITEM_BITS };
enum { MIN_PATIENCE_NS = 20000, ITEMS_OF_PATIENCE = 3 };

#ifndef POOL_PAUSE
/* Between two accesses; tests stop a thread there (tests/kernels/cpu/pool_driver.c). */
#define POOL_PAUSE(point)
#endif

/* What a thread is working on, as seen by others. */
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

/* A ticket holds, from its low bits up, the next item and the number of items. A thread that adds one
 * to it and gets an existing item has an item of the current job, which does not end before this item
 * is done: until then `number` and `jobs` belong to this job. A late thread gets no item. */
static struct {
    struct slot slots[MAX_THREADS];
    _Atomic uint64_t ticket;
    char pad0[56];
    atomic_long num_done; /* of the job's items */
    char pad1[56];
    _Atomic uint32_t epoch; /* number of jobs announced; threads wait for it to change */
    atomic_int num_sleeping, is_running;
    atomic_long item_ns; /* approximate time of one of the job's items; 0: not known yet */
    atomic_long num_repeated, num_calls;
    /* From here on changed only by the thread that finished a job, before it stores the next ticket.
     * The job's number is not `epoch`: a thread that loses its core between ticket and epoch would
     * later set that back. Two jobs: one may still be looked at while the next begins. */
    atomic_uint number;
    struct job jobs[2];
    const struct call *call, *last_call;
    int num_threads;
} pool = {.num_threads = 1};

static const uint64_t ITEM_MASK = ((uint64_t)1 << ITEM_BITS) - 1;
/* Not of the initial-exec model: that takes from the little static TLS that is left in a running process
 * for all libraries, and loading fails where others took it. To find it costs a call: once a function. */
static _Thread_local struct slot *my_slot;

static uint64_t word_of(unsigned number, uint64_t item, enum state state) {
    return ((uint64_t)number << ITEM_BITS | item) << STATE_BITS | state;
}

static enum state state_of(uint64_t word) { return word & ((1 << STATE_BITS) - 1); }

void pool_open(void) {
    struct slot *slot = my_slot;
    if (!slot) return;
    uint64_t word = atomic_load_explicit(&slot->word, memory_order_relaxed);
    if (state_of(word) == FIXED)
        atomic_store_explicit(&slot->word, word - FIXED + OPEN, memory_order_release);
}

int pool_claim(void) {
    struct slot *slot = my_slot;
    if (!slot) return 1;
    uint64_t word = atomic_load_explicit(&slot->word, memory_order_relaxed);
    if (state_of(word) != OPEN) return state_of(word) != LOST;
    return atomic_compare_exchange_strong(&slot->word, &word, word - OPEN + WRITING);
}

void pool_release(void) {
    struct slot *slot = my_slot;
    if (!slot) return;
    uint64_t word = atomic_load_explicit(&slot->word, memory_order_relaxed);
    if (state_of(word) == WRITING)
        atomic_store_explicit(&slot->word, word - WRITING + OPEN, memory_order_release);
}

static struct job plan(const struct call *call) {
    long num_calls = atomic_load_explicit(&pool.num_calls, memory_order_relaxed);
    atomic_store_explicit(&pool.num_calls, num_calls + 1, memory_order_relaxed);
    return call->plan(call->args);
}

/* Start the next call with more than one item, after running the single items before it; or end the
 * run. */
static void begin_next_job(void) {
    unsigned number = atomic_load_explicit(&pool.number, memory_order_relaxed) + 1;
    struct job job = {0};
    while (pool.call < pool.last_call) {
        job = plan(pool.call++);
        if (job.num_items > 1 && job.num_items <= MAX_ITEMS) break;
        for (long item = 0; item < job.num_items; item++) job.fn(job.args, item);
        job.num_items = 0;
    }
    pool.jobs[number & 1] = job;
    atomic_store_explicit(&pool.num_done, 0, memory_order_relaxed);
    atomic_store_explicit(&pool.item_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&pool.number, number, memory_order_release);
    POOL_PAUSE(BEFORE_TICKET);
    /* From here on other threads may do the whole job, and the ones after it. */
    atomic_store(&pool.ticket, (uint64_t)job.num_items << COUNT_BITS);
    POOL_PAUSE(BEFORE_EPOCH);
    atomic_fetch_add(&pool.epoch, 1);
    POOL_PAUSE(BEFORE_END);
    /* Last, since the caller may then return and start another run. */
    if (!job.num_items) atomic_store(&pool.is_running, 0);
    else if (atomic_load(&pool.num_sleeping))
        wake_all(&pool.epoch);
}

static void do_item(const struct job *job, unsigned number, uint64_t item) {
    struct slot *slot = my_slot;
    POOL_PAUSE(BEFORE_ITEM);
    atomic_store(&slot->word, word_of(number, item, job->is_repeatable ? OPEN : FIXED));
    job->fn(job->args, (long)item);
    POOL_PAUSE(AFTER_ITEM);
    enum state state = state_of(atomic_exchange(&slot->word, FREE));
    POOL_PAUSE(BEFORE_COUNT);
    if (state != LOST && atomic_fetch_add(&pool.num_done, 1) + 1 == job->num_items) begin_next_job();
}

/* Run items of this job and, while this thread is the one to start them, of the jobs after it. */
static void take_items(void) {
    long begin_ns = 0, num_taken = 0;
    for (unsigned last_number = 0;; num_taken++) {
        POOL_PAUSE(BEFORE_TAKE);
        uint64_t ticket = atomic_fetch_add(&pool.ticket, 1);
        uint64_t item = (uint32_t)ticket;
        if (item >= ticket >> COUNT_BITS) break;
        unsigned number = atomic_load_explicit(&pool.number, memory_order_relaxed);
        struct job job = pool.jobs[number & 1];
        if (!num_taken || number != last_number) begin_ns = now_ns(), num_taken = 0;
        last_number = number;
        do_item(&job, number, item);
    }
    if (!num_taken) return;
    long ns = (now_ns() - begin_ns) / num_taken;
    atomic_store_explicit(&pool.item_ns, ns, memory_order_relaxed);
}

/* Take over an item of the job from a thread that has taken too long. */
static void repeat_item(void) {
    /* Read before the job itself: if a slot then has this number, the job has not changed. */
    unsigned number = atomic_load(&pool.number);
    struct job job = pool.jobs[number & 1];
    for (int thread = 0; thread < pool.num_threads; thread++) {
        struct slot *slot = &pool.slots[thread];
        uint64_t word = atomic_load(&slot->word), item = word >> STATE_BITS & ITEM_MASK;
        if (slot == my_slot || word != word_of(number, item, OPEN)) continue;
        POOL_PAUSE(BEFORE_REPEAT);
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

/* Wait for another epoch, and take over items that others do not finish. Returns when the run has
 * ended. */
static void wait_for_job(uint32_t epoch) {
    long begin_ns = 0;
    for (long spin = 1; atomic_load_explicit(&pool.epoch, memory_order_acquire) == epoch; spin++) {
        if (!atomic_load_explicit(&pool.is_running, memory_order_acquire)) return;
        if (spin < NUM_SPINS) pause_cpu();
        else sched_yield(); /* the thread with the last item may need this core */
        if (spin < NUM_SPINS && spin % SPINS_PER_LOOK) continue;
        if (!begin_ns) begin_ns = now_ns();
        else if (now_ns() - begin_ns > patience_ns()) {
            repeat_item();
            begin_ns = 0;
        }
    }
}

static void sleep_until_job(uint32_t epoch) {
    for (int spin = 0; spin < NUM_SPINS; spin++) {
        if (atomic_load_explicit(&pool.epoch, memory_order_acquire) != epoch) return;
        pause_cpu();
    }
    atomic_fetch_add(&pool.num_sleeping, 1);
    while (atomic_load(&pool.epoch) == epoch)
        sleep_while(&pool.epoch, epoch);
    atomic_fetch_sub(&pool.num_sleeping, 1);
}

static void *work(void *slot) {
    my_slot = slot;
    for (;;) {
        uint32_t epoch = atomic_load(&pool.epoch);
        take_items();
        wait_for_job(epoch);
        if (!atomic_load_explicit(&pool.is_running, memory_order_acquire)) sleep_until_job(epoch);
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
            struct job job = plan(&calls[i]);
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
        uint32_t epoch = atomic_load(&pool.epoch);
        take_items();
        wait_for_job(epoch);
    }
    my_slot = NULL;
}

void pool_settle(void) {
    for (int thread = 0; thread < pool.num_threads; thread++)
        while (atomic_load(&pool.slots[thread].word) != FREE) sched_yield();
}

long pool_num_repeated(void) { return atomic_load(&pool.num_repeated); }

long pool_num_calls(void) { return atomic_load_explicit(&pool.num_calls, memory_order_relaxed); }

void pool_describe(char *text, long num_bytes) {
    static const char *const names[] = {"free", "fixed", "open", "writing", "lost"};
    uint64_t ticket = atomic_load(&pool.ticket);
    long num_written = snprintf(text, (size_t)num_bytes,
        "job %u, epoch %u, %s, items taken %lu of %lu, done %ld, sleeping %d, repeated %ld",
        atomic_load(&pool.number), atomic_load(&pool.epoch),
        atomic_load(&pool.is_running) ? "running" : "at rest", (unsigned long)(uint32_t)ticket,
        (unsigned long)(ticket >> COUNT_BITS), atomic_load(&pool.num_done),
        atomic_load(&pool.num_sleeping), atomic_load(&pool.num_repeated));
    for (int thread = 0; thread < pool.num_threads && num_written < num_bytes; thread++) {
        uint64_t word = atomic_load(&pool.slots[thread].word);
        num_written += snprintf(text + num_written, (size_t)(num_bytes - num_written),
            "; thread %d: %s, job %u, item %lu", thread, names[state_of(word)],
            (unsigned)(word >> (ITEM_BITS + STATE_BITS)), (unsigned long)(word >> STATE_BITS & ITEM_MASK));
    }
}
