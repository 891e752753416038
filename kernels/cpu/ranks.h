/* Where the processes that share a model wait for each other: a counter for each, in memory that all share. */
#ifndef PENSTOCK_RANKS_H
#define PENSTOCK_RANKS_H

#include "ops.h"

/* Return once every rank has called this as often as this one. On return, what they wrote before can be
 * read, unless the ranks have been given up meanwhile: a rank that does not come would hold up all. */
void ranks_meet(const struct ranks *ranks);

#endif
