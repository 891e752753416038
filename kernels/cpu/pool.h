/* One pool of threads for all kernels of a process.
 *
 * A kernel is a number of items that may run in any order, on any thread; a call plans one. Threads
 * take the next item from a shared counter, and whoever finishes the last one begins the next call.
 *
 * Cores are shared with the gateway and with clients, so any thread may be taken off its core at any
 * moment. Nobody waits for it: the item in its hands is done again by another thread, which takes
 * from it the right to write. For this an item of a repeatable kernel
 *   - asks before each write (`pool_claim`), and writes nothing if the answer is no,
 *   - gives the same result when it runs twice: it does not change what it reads.
 *
 * Between kernels threads spin for a bounded time (a step is a run of kernels microseconds apart),
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

/* Let there be so many threads, the caller's counted; fewer than there are changes nothing. */
int pool_start(int num_threads);
/* The threads there are, the caller's counted. */
int pool_num_threads(void);
/* Run calls one after the other; alone, or with all threads. One caller at a time. On return another
 * thread may still be inside an item that somebody else has done: it will not write. */
void pool_run(const struct call *calls, long num_calls, int is_shared);
/* Wait until no thread is inside an item: what items read may go. */
void pool_settle(void);
/* How many items were done by another thread than the one that began them. */
long pool_num_repeated(void);
/* How many calls have been begun: while a run gets on, this grows. */
long pool_num_calls(void);
/* What threads share, in words, for the log of a run that does not end. */
void pool_describe(char *text, long num_bytes);

/* Inside an item that is not repeatable at first, where it becomes so: from here on it reads only
 * what stays where it is. */
void pool_open(void);
/* Inside a repeatable item, around each write. */
int pool_claim(void);
void pool_release(void);

#endif
