/* One pool of threads for all kernels of a process.
 *
 * A kernel is a number of items that may run in any order, on any thread. Threads take the next
 * item from a shared counter, so a thread that the operating system takes away holds up no more
 * than the item in its hands. Workers wait for the next kernel by spinning for a bounded time
 * (a step is a run of kernels microseconds apart), then sleep: the gateway needs its core too.
 */
#ifndef PENSTOCK_POOL_H
#define PENSTOCK_POOL_H

typedef void item_fn(const void *args, long item);

/* Start the pool with this many threads, the caller's counted; again: changes nothing. */
int pool_start(int num_threads);
/* Whether kernels from now on share the pool; if not, the caller runs them alone. */
void pool_share(int is_shared);
/* Run items 0 … num_items - 1 and return when all are done. One caller at a time. */
void pool_run(item_fn *fn, const void *args, long num_items);

#endif
