#define _GNU_SOURCE
#include "ranks.h"
#include "waiting.h"

#include <sched.h>
#include <stdatomic.h>

/* Ranks come to a sum of a decoding step within some microseconds of each other. One that is later was
 * descheduled, and may need this core; one that is much later still plans its step. */
enum { MAX_SPIN_NS = 10000, MAX_YIELD_NS = 200000, SPINS_PER_LOOK = 16 };

/* One rank's line of the shared memory; after the last there is one whose first member is not zero once the
 * ranks have been given up. */
struct place {
    _Atomic uint32_t num_meetings; /* to which it came; others wait for it to change */
    _Atomic uint32_t num_sleeping; /* of those that do */
    char pad[56];
};
_Static_assert(sizeof(struct place) == 64, "as engine/parallel/ranks.py lays it out");

static int has_come(uint32_t num_meetings, uint32_t meeting) { return (int32_t)(num_meetings - meeting) >= 0; }

static void wait_for(struct place *other, uint32_t meeting, struct place *end) {
    long begin_ns = 0, waited_ns = 0;
    for (long spin = 1; waited_ns < MAX_YIELD_NS; spin++) {
        if (has_come(atomic_load_explicit(&other->num_meetings, memory_order_acquire), meeting)) return;
        if (waited_ns > MAX_SPIN_NS) sched_yield();
        else pause_cpu();
        if (spin % SPINS_PER_LOOK) continue;
        if (!begin_ns) begin_ns = now_ns();
        waited_ns = now_ns() - begin_ns;
    }
    /* Counted before the last look, and looked for after the counter has changed: one of both sees the other. */
    atomic_fetch_add(&other->num_sleeping, 1);
    for (;;) {
        const uint32_t seen = atomic_load(&other->num_meetings);
        if (has_come(seen, meeting) || atomic_load(&end->num_meetings)) break;
        ranks_sleep_while(&other->num_meetings, seen);
    }
    atomic_fetch_sub(&other->num_sleeping, 1);
}

uint32_t ranks_count(const struct ranks *ranks) {
    const struct place *places = ranks->places;
    return atomic_load_explicit(&places[ranks->rank].num_meetings, memory_order_relaxed);
}

void ranks_come(const struct ranks *ranks) {
    struct place *own = (struct place *)ranks->places + ranks->rank;
    atomic_store(&own->num_meetings, ranks_count(ranks) + 1);
    if (atomic_load(&own->num_sleeping))
        ranks_wake_all(&own->num_meetings);
}

void ranks_await(const struct ranks *ranks, long rank, uint32_t count) {
    struct place *places = ranks->places;
    wait_for(&places[rank], count, &places[ranks->num_ranks]);
}

void ranks_meet(const struct ranks *ranks) {
    ranks_come(ranks);
    const uint32_t meeting = ranks_count(ranks);
    for (long rank = 0; rank < ranks->num_ranks; rank++)
        if (rank != ranks->rank) ranks_await(ranks, rank, meeting);
}
