/* One pool of threads for all kernels of a process.
 *
 * A kernel consists of items that may run in any order, on any thread; a call plans one kernel.
 * Threads take the next item from a shared counter; the thread that finishes the last item starts the
 * next call.
 *
 * Cores are shared with the gateway and with clients, so any thread may be descheduled at any moment.
 * No thread waits for it: another thread computes its item again and takes over the right to write.
 * For this an item of a repeatable kernel
 *   - asks before each write (`pool_claim`), and writes nothing if the answer is no,
 *   - gives the same result when it runs twice: it does not modify what it reads.
 *
 * Between kernels threads spin for a bounded time (a step is a series of kernels microseconds apart),
 * then yield; between steps they sleep.
 */
#ifndef PENSTOCK_POOL_H
#define PENSTOCK_POOL_H

typedef void item_fn(const void *args, long item);

struct job {
    item_fn *fn;
    const void *args;
    long num_items;
    int is_repeatable;
};

struct call {
    struct job (*plan)(const void *args);
    const void *args;
};

/* Start threads up to this number, including the caller's; never stops any. */
int pool_start(int num_threads);
/* The number of threads, including the caller's. */
int pool_num_threads(void);
/* Run calls one after the other; alone, or with all threads. One caller at a time. On return a thread
 * may still be inside an item that another one has finished: it will not write. */
void pool_run(const struct call *calls, long num_calls, int is_shared);
/* Wait until no thread is inside an item, so that memory read by items may be freed. */
void pool_settle(void);
/* How many items were finished by another thread than the one that started them. */
long pool_num_repeated(void);
/* How many calls were started; grows while a run makes progress. */
long pool_num_calls(void);
/* The state that threads share, in words, for the log when a run hangs. */
void pool_describe(char *text, long num_bytes);

/* Inside an item that is not repeatable at first: makes it so. From here on it must only read memory
 * that stays in place. */
void pool_open(void);
/* Inside a repeatable item, around each write. */
int pool_claim(void);
void pool_release(void);

#endif
