/* Where the processes that share a model wait for each other: a counter for each, in memory that all share. */
#ifndef PENSTOCK_RANKS_H
#define PENSTOCK_RANKS_H

#include "ops.h"

#include <stdint.h>

/* Return once every rank has called this as often as this one. On return, what they wrote before can be
 * read, unless the ranks have been given up meanwhile: a rank that does not come would hold up all. */
void ranks_meet(const struct ranks *ranks);

/* The same in parts. How often this rank has come; come once more; wait until another one has come so often. */
uint32_t ranks_count(const struct ranks *ranks);
void ranks_come(const struct ranks *ranks);
void ranks_await(const struct ranks *ranks, long rank, uint32_t count);

#endif
