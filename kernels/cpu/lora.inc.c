/* Low-rank updates of rows by their adapters, for one DTYPE (Hu et al., "LoRA", 2021; rows of many
 * adapters in one call as in Chen et al., "Punica", 2023).
 *
 * Sums run in float, in the order of k within each chunk and then of the chunks, whatever rows are
 * computed together: a row never depends on the other rows. Two sums, of even and odd k (or pairs of
 * them), so that a single row does not wait for each product.
 */

INLINE const struct lora_pair *lora_pair_of(
    const struct lora_pair *pairs, const int64_t *group, long num_parts, long part) {
    return pairs + group[0] * num_parts + part;
}

struct NAME(panel) {
    NAME(weights) part[NUM_PARTS];
};

INLINE struct NAME(panel) NAME(load_panel)(const DTYPE *p) {
    struct NAME(panel) panel;
#pragma GCC unroll 4
    for (int i = 0; i < NUM_PARTS; i++) panel.part[i] = NAME(load_weights)(p + i * NAME(part_stride));
    return panel;
}

/* sums[r] = x[r][0 … end) · w[0 … end), with w in a panel */
INLINE void NAME(lora_sums)(
    union parts *sums, const DTYPE *const *x, const DTYPE *w, long end, const int rows) {
    vec_part even[LORA_ROWS * NUM_PARTS], odd[LORA_ROWS * NUM_PARTS];
#pragma GCC unroll 8
    for (int i = 0; i < rows * NUM_PARTS; i++) even[i] = odd[i] = (vec_part){0};
    long k = 0;
    for (; k + 2 * PAIR <= end; k += 2 * PAIR) {
        const struct NAME(panel) first = NAME(load_panel)(w + k * LANES);
        const struct NAME(panel) second = NAME(load_panel)(w + (k + PAIR) * LANES);
        /* Short streams of memory end before the processor reads ahead by itself. */
        prefetch((const char *)(w + k * LANES) + LORA_AHEAD_BYTES, 2 * LANES * PAIR * (long)sizeof *w);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            NAME(add_products)(even + r * NUM_PARTS, x[r] + k, 0, first.part, 1, NUM_PARTS);
            NAME(add_products)(odd + r * NUM_PARTS, x[r] + k + PAIR, 0, second.part, 1, NUM_PARTS);
        }
    }
    if (k < end) {
        const struct NAME(panel) last = NAME(load_panel)(w + k * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            NAME(add_products)(even + r * NUM_PARTS, x[r] + k, 0, last.part, 1, NUM_PARTS);
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows * NUM_PARTS; i++) sums[i / NUM_PARTS].part[i % NUM_PARTS] = even[i] + odd[i];
}

static __attribute__((noinline)) void NAME(lora_tile)(
    union parts *sums, const DTYPE *const *x, const DTYPE *w, long end, int rows) {
    switch (rows) { /* a constant in each: the sums need all registers */
#define CASE(n) case n: if (n <= LORA_ROWS) NAME(lora_sums)(sums, x, w, end, (n <= LORA_ROWS ? n : 1)); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
    }
}

/* An item: a group, a part and a chunk of x. */
static void NAME(lora_shrink_item)(const void *args, long item) {
    const struct lora_shrink_args *a = args;
    const long num_chunks = ceil_div(a->in_features, LORA_CHUNK);
    const long chunk = item % num_chunks, part = item / num_chunks % a->num_parts;
    const int64_t *group = a->rows->groups + item / (num_chunks * a->num_parts) * 3;
    const struct lora_pair *pair = lora_pair_of(a->pairs, group, a->num_parts, part);
    if (!pair->a) return;
    const long start = chunk * LORA_CHUNK, in = a->in_features;
    const long end = start + LORA_CHUNK < in ? LORA_CHUNK : in - start;
    for (long first = group[1]; first < group[2]; first += LORA_ROWS) {
        const int rows = (int)(group[2] - first < LORA_ROWS ? group[2] - first : LORA_ROWS);
        const DTYPE *x[LORA_ROWS];
        for (int r = 0; r < rows; r++)
            x[r] = (const DTYPE *)a->x + a->rows->order[first + r] * in + start;
        for (long lane = 0; lane < pair->rank; lane += LANES) {
            union parts sums[LORA_ROWS];
            NAME(lora_tile)(sums, x, (const DTYPE *)pair->a + lane * in + start * LANES, end, rows);
            for (int r = 0; r < rows; r++) {
                const long at = ((first + r) * a->num_parts + part) * num_chunks + chunk;
                store_f32(a->h + at * a->max_rank + lane, sums[r].all);
            }
        }
    }
}

struct job NAME(lora_shrink)(const void *args) {
    const struct lora_shrink_args *a = args;
    const long each = a->num_parts * ceil_div(a->in_features, LORA_CHUNK);
    return (struct job){NAME(lora_shrink_item), args, a->rows->num_groups * each, 0};
}

static void NAME(lora_lookup_item)(const void *args, long item) {
    const struct lora_lookup_args *a = args;
    const int64_t *group = a->rows->groups + item * 3;
    const struct lora_pair *pair = a->pairs + group[0];
    if (!pair->a) return;
    for (long i = group[1]; i < group[2]; i++) {
        const long id = a->step->token_ids[a->rows->order[i]];
        const DTYPE *row = (const DTYPE *)pair->a + id * pair->rank;
        for (long lane = 0; lane < pair->rank; lane += LANES)
            store_f32(a->h + i * a->max_rank + lane, LOAD(row + lane));
    }
}

struct job NAME(lora_lookup)(const void *args) {
    const struct lora_lookup_args *a = args;
    return (struct job){NAME(lora_lookup_item), args, a->rows->num_groups, 0};
}

/* The whole h of a row, in the dtype in which it is multiplied. */
INLINE void NAME(lora_hidden)(
    DTYPE *hidden, const float *h, long rank, long num_chunks, long max_rank) {
    for (long lane = 0; lane < rank; lane += LANES) {
        vec sum = load_f32(h + lane);
        for (long chunk = 1; chunk < num_chunks; chunk++)
            sum += load_f32(h + chunk * max_rank + lane);
        STORE(hidden + lane, sum);
    }
}

INLINE void NAME(lora_add)(DTYPE *y, vec sum, float scale, long num_columns) {
    if (num_columns >= LANES) {
        STORE(y, LOAD(y) + sum * splat(scale));
        return;
    }
    for (long i = 0; i < num_columns; i++) PUT(y + i, GET(y + i) + sum[i] * scale);
}

INLINE long lora_items_of_group(const struct lora_expand_args *a) {
    long num_items = 0;
    for (long part = 0; part < a->num_parts; part++)
        num_items += ceil_div(a->part_sizes[part], LORA_COLUMNS);
    return num_items;
}

/* An item: a group and up to LORA_COLUMNS columns of a part. It changes y in place, so nobody may
 * repeat it. */
static void NAME(lora_expand_item)(const void *args, long item) {
    const struct lora_expand_args *a = args;
    const long each = lora_items_of_group(a);
    const int64_t *group = a->rows->groups + item / each * 3;
    long part = 0, start = 0, number = item % each;
    for (; number >= ceil_div(a->part_sizes[part], LORA_COLUMNS); part++) {
        number -= ceil_div(a->part_sizes[part], LORA_COLUMNS);
        start += a->part_sizes[part];
    }
    const struct lora_pair *pair = lora_pair_of(a->pairs, group, a->num_parts, part);
    if (!pair->a) return;
    const long size = a->part_sizes[part], rank = pair->rank, begin = number * LORA_COLUMNS;
    const long end = begin + LORA_COLUMNS < size ? begin + LORA_COLUMNS : size;
    DTYPE *y = (DTYPE *)(a->y ? a->y : a->product->y) + start;
    for (long first = group[1]; first < group[2]; first += LORA_ROWS) {
        const int rows = (int)(group[2] - first < LORA_ROWS ? group[2] - first : LORA_ROWS);
        DTYPE hidden[LORA_ROWS * MAX_LORA_RANK];
        const DTYPE *x[LORA_ROWS];
        for (int r = 0; r < rows; r++) {
            const long at = ((first + r) * a->num_parts + part) * a->num_chunks;
            NAME(lora_hidden)(hidden + r * rank, a->h + at * a->max_rank, rank, a->num_chunks, a->max_rank);
            x[r] = hidden + r * rank;
        }
        for (long column = begin; column < end; column += LANES) {
            union parts sums[LORA_ROWS];
            NAME(lora_tile)(sums, x, (const DTYPE *)pair->b + column * rank, rank, rows);
            for (int r = 0; r < rows; r++) {
                DTYPE *row = y + a->rows->order[first + r] * a->stride + column;
                NAME(lora_add)(row, sums[r].all, (float)pair->scale, end - column);
            }
        }
    }
}

struct job NAME(lora_expand)(const void *args) {
    const struct lora_expand_args *a = args;
    const int has_rows = a->y || *a->product->num_rows; /* a step may want no logits */
    const long num_items = has_rows ? a->rows->num_groups * lora_items_of_group(a) : 0;
    return (struct job){NAME(lora_expand_item), args, num_items, 0};
}
