/* Short runs on the pool of kernels/cpu, each checked, with threads stopped where it hurts.
 *
 *     pool_driver MODE NUM_THREADS SECONDS HANG_SECONDS
 *
 * MODE is
 *     plain    nobody is stopped
 *     random   at every POOL_PAUSE a thread may yield or sleep, as if it lost its core
 *     end      the worker that finishes a run stands still at each point of its end in turn, until the
 *              caller has begun the next run or will not
 *
 * Exit codes: 0 all was well, 3 a run did not end (the pool's state is printed), 4 a wrong result.
 */
enum point {
    BEFORE_TICKET, BEFORE_EPOCH, BEFORE_END, BEFORE_ITEM, AFTER_ITEM, BEFORE_COUNT, BEFORE_TAKE,
    BEFORE_REPEAT, NUM_POINTS
};
static void pause_at(enum point point);
#define POOL_PAUSE(point) pause_at(point)
#include "pool.c"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NUM_CALLS = 3, NUM_ITEMS = 3, NUM_KEPT = 4096, STILL_MS = 100 };

struct args {
    long run;
    int call;
};

static enum { PLAIN, RANDOM, END } mode;
static struct args all_args[NUM_KEPT][NUM_CALLS]; /* late threads look at theirs: not used again soon */
static _Atomic long results[NUM_CALLS][NUM_ITEMS];
static atomic_long run_now, hang_s;
static atomic_int num_begun, stop_at;
static _Thread_local uint32_t dice = 1;

static void sleep_ns(long ns) {
    struct timespec time = {ns / 1000000000L, ns % 1000000000L};
    nanosleep(&time, NULL);
}

static int is_worker(void) { return my_slot && my_slot != &pool.slots[0]; }

static void pause_at(enum point point) {
    if (mode == RANDOM) {
        if (dice == 1) dice = (uint32_t)(uintptr_t)&dice | 1;
        dice ^= dice << 13, dice ^= dice >> 17, dice ^= dice << 5;
        if (dice % 256 == 0) sleep_ns(100000);
        else if (dice % 8 == 0) sched_yield();
    } else if (mode == END && is_worker() && (int)point == atomic_load(&stop_at)) {
        long run = atomic_load(&run_now);
        for (int ms = 0; ms < STILL_MS; ms++) {
            /* Until the next run has its first ticket: what we store now is for the last one. */
            if (atomic_load(&run_now) > run && atomic_load(&pool.ticket) >> COUNT_BITS) break;
            sleep_ns(1000000);
        }
    }
}

static void do_checked(const void *data, long item) {
    const struct args *args = data;
    pool_open();
    if (!pool_claim()) return;
    atomic_store(&results[args->call][item], args->run);
    pool_release();
}

/* One of two items of a run that the worker ends: each thread has one, and the caller is first. */
static void do_ending(const void *data, long item) {
    (void)data, (void)item;
    atomic_fetch_add(&num_begun, 1);
    while (atomic_load(&num_begun) < 2) sched_yield();
    while (is_worker() && atomic_load(&pool.num_done) == 0) sched_yield();
}

static struct job plan_checked(const void *data) {
    const struct args *args = data;
    return (struct job){do_checked, data, NUM_ITEMS - args->call % 2, args->call != 1};
}

static struct job plan_ending(const void *data) { return (struct job){do_ending, data, 2, 0}; }

static void *watch(void *unused) {
    char text[1024];
    long last = -1, num_still = 0;
    while (num_still < 10 * atomic_load(&hang_s)) { /* ticks: a machine that stood still is no hang */
        sleep_ns(100000000);
        long now = atomic_load(&run_now);
        num_still = now == last ? num_still + 1 : 0;
        last = now;
    }
    pool_describe(text, sizeof text);
    printf("run %ld does not end: %s\n", last, text);
    fflush(stdout);
    _exit(3);
    return unused;
}

static void run_checked(long run) {
    struct args *args = all_args[run % NUM_KEPT];
    struct call calls[NUM_CALLS];
    for (int i = 0; i < NUM_CALLS; i++) {
        args[i] = (struct args){run, i};
        calls[i] = (struct call){plan_checked, &args[i]};
    }
    pool_run(calls, NUM_CALLS, 1);
    for (int i = 0; i < NUM_CALLS; i++)
        for (int item = 0; item < NUM_ITEMS - i % 2; item++)
            if (atomic_load(&results[i][item]) != run) {
                printf("run %ld: call %d, item %d is of run %ld\n", run, i, item, results[i][item]);
                exit(4);
            }
    if (run % (NUM_KEPT / 2) == 0) pool_settle();
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    mode = !strcmp(argv[1], "random") ? RANDOM : !strcmp(argv[1], "end") ? END : PLAIN;
    atomic_store(&hang_s, atol(argv[4]));
    pthread_t handle;
    if (pool_start(atoi(argv[2])) != atoi(argv[2]) || pthread_create(&handle, NULL, watch, NULL))
        return 2;
    long end_ns = now_ns() + atol(argv[3]) * 1000000000L, run = 1;
    struct call ending = {plan_ending, NULL};
    for (; mode == END ? run <= 4 * NUM_POINTS : now_ns() < end_ns; run++) {
        atomic_store(&num_begun, 0);
        atomic_store(&stop_at, (int)(run % NUM_POINTS));
        atomic_store(&run_now, run);
        if (mode == END) pool_run(&ending, 1, 1);
        else run_checked(run);
    }
    printf("%ld runs, %ld items repeated\n", run - 1, pool_num_repeated());
    return 0;
}
