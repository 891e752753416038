/* What ranks, the processes that share a model, tell each other, for one DTYPE. Each writes its part into
 * memory that all share; when all have, each reads the parts of all. Two such places take turns: a rank that
 * writes to one again has met the others since they read it. */

static void NAME(sum_ranks_item)(const void *args, long row) {
    const struct sum_ranks_args *a = args;
    const DTYPE *parts = (const DTYPE *)a->parts + row * a->size;
    const DTYPE *residual = a->residual ? (const DTYPE *)a->residual + row * a->size : NULL;
    DTYPE *y = (DTYPE *)a->y + row * a->size;
    const long num_ranks = a->ranks->num_ranks;
    long i = 0;
    for (; i + LANES <= a->size; i += LANES) {
        vec sum = LOAD(parts + i);
        for (long rank = 1; rank < num_ranks; rank++) sum += LOAD(parts + rank * a->part_stride + i);
        STORE(y + i, residual ? ROUND(sum) + LOAD(residual + i) : sum);
    }
    for (; i < a->size; i++) {
        float sum = GET(parts + i);
        for (long rank = 1; rank < num_ranks; rank++) sum += GET(parts + rank * a->part_stride + i);
        PUT(y + i, residual ? ROUND(splat(sum))[0] + GET(residual + i) : sum);
    }
}

/* The thread that plans it waits for the other ranks; then rows are items. */
struct job NAME(sum_ranks)(const void *args) {
    const struct sum_ranks_args *a = args;
    ranks_meet(a->ranks);
    return (struct job){NAME(sum_ranks_item), a, *a->num_rows, 0};
}

static void NAME(query_key_squares_item)(const void *args, long row) {
    const struct query_key_squares_args *a = args;
    const DTYPE *x = (const DTYPE *)a->x + row * a->stride;
    a->y[2 * row] = NAME(sum_squares)(x, a->query_size);
    a->y[2 * row + 1] = NAME(sum_squares)(x + a->query_size, a->key_size);
}

struct job NAME(query_key_squares)(const void *args) {
    const struct query_key_squares_args *a = args;
    return (struct job){NAME(query_key_squares_item), a, *a->num_rows, 0};
}

static void NAME(query_key_norm_item)(const void *args, long row) {
    const struct query_key_norm_args *a = args;
    const DTYPE *x = (const DTYPE *)a->x + row * a->stride;
    DTYPE *y = (DTYPE *)a->y + row * a->stride;
    const long num_ranks = a->ranks->num_ranks, sizes[] = {a->query_size, a->key_size};
    const DTYPE *weights[] = {a->query_weight, a->key_weight};
    for (long i = 0; i < 2; x += sizes[i], y += sizes[i], i++) {
        float total = 0;
        for (long rank = 0; rank < num_ranks; rank++) total += a->parts[rank * a->part_stride + 2 * row + i];
        const float mean = total / (float)(num_ranks * sizes[i]);
        NAME(scale_row)(y, x, weights[i], sizes[i], 1.0f / sqrtf(mean + (float)a->eps), (float)a->offset);
    }
}

struct job NAME(query_key_norm)(const void *args) {
    const struct query_key_norm_args *a = args;
    ranks_meet(a->ranks);
    return (struct job){NAME(query_key_norm_item), a, *a->num_rows, 0};
}

static void NAME(gather_ranks_item)(const void *args, long row) {
    const struct gather_ranks_args *a = args;
    const DTYPE *part = (const DTYPE *)a->parts + row * a->part_size;
    DTYPE *y = (DTYPE *)a->y + row * a->size;
    for (long start = 0; start < a->size; start += a->part_size, part += a->part_stride) {
        const long rest = a->size - start;
        memcpy(y + start, part, (rest < a->part_size ? rest : a->part_size) * sizeof *y);
    }
}

struct job NAME(gather_ranks)(const void *args) {
    const struct gather_ranks_args *a = args;
    ranks_meet(a->ranks);
    return (struct job){NAME(gather_ranks_item), a, *a->num_rows, 0};
}

/* Rows are few beside what is computed of them, so the thread that plans it copies them. */
struct job NAME(send_rows)(const void *args) {
    const struct send_rows_args *a = args;
    const uint32_t count = ranks_count(a->ranks);
    for (long rank = 1; rank < a->ranks->num_ranks; rank++)
        ranks_await(a->ranks, rank, count + 1 - (uint32_t)a->num_slots);
    DTYPE *slot = (DTYPE *)a->slots + count % (uint32_t)a->num_slots * a->slot_stride;
    memcpy(slot, a->x, (size_t)(*a->num_rows * a->size) * sizeof *slot);
    ranks_come(a->ranks);
    return (struct job){0};
}

struct job NAME(receive_rows)(const void *args) {
    const struct receive_rows_args *a = args;
    const uint32_t count = ranks_count(a->ranks);
    ranks_await(a->ranks, 0, count + 1);
    const DTYPE *slot = (const DTYPE *)a->slots + count % (uint32_t)a->num_slots * a->slot_stride;
    memcpy(a->y, slot, (size_t)(*a->num_rows * a->size) * sizeof *slot);
    ranks_come(a->ranks);
    return (struct job){0};
}
