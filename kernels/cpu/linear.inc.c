/* Matrix products with packed weights, for one DTYPE.
 *
 * Sums run in float, in an order of k that is the same for any number of rows: a row never depends on the
 * other rows. A panel is 16 output columns, zero past the last one, so that a lane of an
 * accumulator is a column and nothing is summed across lanes. GROUP panels are packed side by side
 * (the last group may be narrower), so that a product reads one stream of memory:
 *
 *     b16         [group][in / 2][panel][16][2]   pairs of k, as vdpbf16ps takes them; `in` is even
 *     f16, f32    [group][in][panel][16]
 */

INLINE long output_stride(const struct linear_args *a) { return a->stride ? a->stride : a->out_features; }

static __attribute__((noinline)) void NAME(write_last_columns)(
    const struct linear_args *a, long row, long column, const float *sums) {
    const DTYPE *bias = a->bias, *residual = a->residual;
    for (; column < a->out_features; column++) {
        long at = row * output_stride(a) + column;
        float value = *sums++ + (bias ? GET(bias + column) : 0.0f);
        if (residual) value = ROUND(splat(value))[0] + GET(residual + at);
        PUT((DTYPE *)a->y + at, value);
    }
}

INLINE void NAME(write_columns)(const struct linear_args *a, long row, long column, const union parts *sum) {
    const long at = row * output_stride(a) + column, left = a->out_features - column;
    if (a->is_float) { /* for routers: neither bias nor residual */
        memcpy((float *)a->y + at, sum, (left < LANES ? left : LANES) * sizeof(float));
        return;
    }
    if (left < LANES) {
        NAME(write_last_columns)(a, row, column, (const float *)sum);
        return;
    }
    for (long i = 0; i < NUM_PARTS; i++) {
        const long lane = i * PART_LANES;
        vec_part value = sum->part[i];
        if (a->bias) value += LOAD_PART((const DTYPE *)a->bias + column + lane);
        if (a->residual) value = ROUND_PART(value) + LOAD_PART((const DTYPE *)a->residual + at + lane);
        STORE_PART((DTYPE *)a->y + at + lane, value);
    }
}

/* Not inlined, so that the loop before it has all registers for the sums. */
static __attribute__((noinline)) void NAME(write_tile)(
    const struct linear_args *a, long row, long column, const union parts *sums, int rows, int panels) {
    if (!pool_claim()) return;
    for (long end = row + rows; row < end; row++)
        for (int v = 0; v < panels; v++) NAME(write_columns)(a, row, column + v * LANES, sums++);
    pool_release();
}

/* `rows` rows against a group, prefetching `lines` cache lines with each k, from `ahead` on */
INLINE void NAME(tile)(
    const struct linear_args *a, long row, long group, const int rows, const int panels, const int lines,
    const char *ahead) {
    const long in = a->in_features;
    const DTYPE *x = (const DTYPE *)a->x + row * in;
    const DTYPE *w = (const DTYPE *)a->weight + group * GROUP * LANES * in;
    const int parts = panels * NUM_PARTS;
    vec_part sums[MAX_ROWS * GROUP * NUM_PARTS];
    union parts finished[MAX_ROWS * GROUP];
#pragma GCC unroll 32
    for (int i = 0; i < rows * parts; i++) sums[i] = (vec_part){0};
    for (long k = 0; k < in; k += PAIR) {
        NAME(weights) weights[GROUP * NUM_PARTS];
#pragma GCC unroll 8
        for (int i = 0; i < parts; i++)
            weights[i] = NAME(load_weights)(w + k * panels * LANES + i * NAME(part_stride));
#pragma GCC unroll 4
        for (int i = 0; i < lines; i++, ahead += LINE_BYTES) __builtin_prefetch(ahead, 0, 2);
        NAME(add_products)(sums, x + k, in, weights, rows, parts);
    }
#pragma GCC unroll 32
    for (int i = 0; i < rows * parts; i++) finished[i / NUM_PARTS].part[i % NUM_PARTS] = sums[i];
    NAME(write_tile)(a, row, group * GROUP * LANES, finished, rows, panels);
}

#ifndef HAS_TILES
/* Rows from `row` up to `end` against one group, which stays in the cache meanwhile. Tiles that
 * only multiply prefetch the next group, from `ahead` on (null: none). */
INLINE void NAME(rows_of_group)(
    const struct linear_args *a, long row, long end, long group, const int panels, const char *ahead) {
    const int num_full = (int)((end - row) / MAX_ROWS);
    const long bytes = GROUP * LANES * a->in_features * (long)sizeof(DTYPE);
    for (int i = 0; i < num_full; i++, row += MAX_ROWS) {
        const int lines = ahead ? lines_ahead(i, num_full, bytes) : 0;
        switch (lines) { /* a constant in each tile: the sums need all registers */
#define CASE(n) case n: NAME(tile)(a, row, group, MAX_ROWS, panels, n, ahead); break;
            CASE(0) CASE(1) CASE(2) CASE(3)
#undef CASE
        }
        if (lines) ahead += a->in_features / PAIR * lines * LINE_BYTES;
    }
    if (!num_full && ahead) /* the hardware prefetcher takes a while to detect a new stream */
        for (int i = 0; i < HEAD_LINES; i++) __builtin_prefetch(ahead + i * LINE_BYTES, 0, 2);
#define TILE(n) NAME(tile)(a, row, group, n, panels, 0, NULL)
    FEW_ROWS(end - row, MAX_ROWS)
#undef TILE
}
#endif

#if defined(WIDENS) && !JOIN(IS, DTYPE)
/* A full tile in float: many rows against weights that are widened once, not with each tile. */
INLINE void NAME(wide_tile)(const struct linear_args *a, long row, long group, const float *x, const float *w) {
    const long in = a->in_features;
    vec_part sums[MAX_ROWS * NUM_PARTS];
    union parts finished[MAX_ROWS];
#pragma GCC unroll 32
    for (int i = 0; i < MAX_ROWS * NUM_PARTS; i++) sums[i] = (vec_part){0};
    for (long k = 0; k < in; k++) {
#pragma GCC unroll 8
        for (int r = 0; r < MAX_ROWS; r++)
#pragma GCC unroll 8
            for (int i = 0; i < NUM_PARTS; i++)
                sums[r * NUM_PARTS + i] += splat_part(x[r * in + k]) * load_part_f32(w + k * LANES + i * PART_LANES);
    }
#pragma GCC unroll 32
    for (int i = 0; i < MAX_ROWS * NUM_PARTS; i++) finished[i / NUM_PARTS].part[i % NUM_PARTS] = sums[i];
    NAME(write_tile)(a, row, group * LANES, finished, MAX_ROWS, 1);
}

/* Full tiles of rows from `row` on; returns the row after the last one. */
static __attribute__((noinline)) long NAME(wide_rows)(
    const struct linear_args *a, long row, long end, long group) {
    _Static_assert(GROUP == 1, "a group is a panel");
    static _Thread_local float *memory;
    static _Thread_local long capacity;
    const long in = a->in_features, size = in * (LANES + MAX_ROWS);
    if (size > capacity) {
        free(memory);
        memory = malloc(size * sizeof *memory);
        capacity = memory ? size : 0;
        if (!memory) return row;
    }
    float *w = memory, *x = memory + in * LANES;
    const DTYPE *from = (const DTYPE *)a->weight + group * LANES * in;
    for (long k = 0; k < in; k += PAIR)
        for (int i = 0; i < NUM_PARTS; i++) {
            const NAME(weights) each = NAME(load_weights)(from + k * LANES + i * NAME(part_stride));
            float *to = w + k * LANES + i * PART_LANES;
#ifdef DTYPE_PAIRS
            const uvec_part first = each << 16, second = each & 0xffff0000;
            memcpy(to, &first, sizeof first);
            memcpy(to + LANES, &second, sizeof second);
#else
            memcpy(to, &each, sizeof each);
#endif
        }
    for (; row + MAX_ROWS <= end; row += MAX_ROWS) {
        const DTYPE *rows = (const DTYPE *)a->x + row * in;
        long i = 0;
        for (; i + PART_LANES <= MAX_ROWS * in; i += PART_LANES) {
            const vec_part wide = LOAD_PART(rows + i);
            memcpy(x + i, &wide, sizeof wide);
        }
        for (; i < MAX_ROWS * in; i++) x[i] = GET(rows + i);
        NAME(wide_tile)(a, row, group, x, w);
    }
    return row;
}
#endif

#ifdef HAS_TILES
/* While a pair of tiles is multiplied, so many rows of the one before it are written with each TILE_K. */
enum { ROWS_PER_STEP = 4, CACHED_OUTPUT_BYTES = 512 << 10 };

/* A pair of tiles' sums: `rows` rows from each of `begins` on. */
struct NAME(tile_pair) {
    long begins[2];
    int num_tiles;
    union parts sums[2 * TILE_ROWS * GROUP];
};

/* Write a row of a pair, whose tiles have `rows` rows, by whole panels. */
INLINE void NAME(write_row)(
    const struct linear_args *a, const struct NAME(tile_pair) *pair, int row, long column, int rows, const int panels) {
    const long at = (row < rows ? pair->begins[0] + row : pair->begins[1] + row - rows) * output_stride(a) + column;
    const DTYPE *bias = a->bias, *residual = a->residual;
    for (int v = 0; v < panels; v++) {
        vec_part value = pair->sums[row * panels + v].part[0];
        if (bias) value += LOAD_PART(bias + column + v * LANES);
        if (residual) value = ROUND_PART(value) + LOAD_PART(residual + at + v * LANES);
        STORE_PART((DTYPE *)a->y + at + v * LANES, value);
    }
}

/* Write the rows of a pair from `row` on. */
static __attribute__((noinline)) void NAME(write_rest)(
    const struct linear_args *a, const struct NAME(tile_pair) *pair, int row, long column, int rows, int panels) {
    for (; row < pair->num_tiles * rows; row++)
        for (int v = 0; v < panels; v++)
            NAME(write_columns)(a, pair->begins[row / rows] + row % rows, column + v * LANES,
                                pair->sums + row * panels + v);
}

/* What is left of k, after the tiles' share. */
static __attribute__((noinline)) void NAME(add_rest)(
    const struct linear_args *a, struct NAME(tile_pair) *pair, long k, long group, int rows, int panels) {
    const DTYPE *x = a->x, *w = (const DTYPE *)a->weight + group * GROUP * LANES * a->in_features;
    for (; k < a->in_features; k += PAIR)
        for (int i = 0; i < pair->num_tiles * rows * panels; i++) {
            const int r = i / panels;
            uint32_t both;
            memcpy(&both, x + (pair->begins[r / rows] + r % rows) * a->in_features + k, sizeof both);
            const NAME(weights) weights = NAME(load_weights)(w + k * panels * LANES + i % panels * NAME(part_stride));
            pair->sums[i].part[0] = dot_pairs(pair->sums[i].part[0], usplat_part(both), weights);
        }
}

/* The rows of a pair by a group; prefetches `lines` cache lines of weights with each TILE_K. The unit of tiles
 * waits for nothing: meanwhile the pair before, if any, is written, a few rows at a time, and if the output does not
 * stay in the cache the lines that this one will be written to are read. Registers 0 to 2 and 3 to 5 hold sums, 6
 * rows, which are read once for a group and leave the nearest cache to the weights, 7 weights. Whatever the number
 * of rows, a sum's order is that of the instruction; what is left of k is added after it. */
INLINE void NAME(amx_tiles)(
    const struct linear_args *a, struct NAME(tile_pair) *pair, const struct NAME(tile_pair) *before, long group,
    const int panels, const int num_tiles, const int rows, const char *ahead, const int lines) {
    const long in = a->in_features, stride = panels * LINE_BYTES, x_stride = in * (long)sizeof(DTYPE);
    const long column = group * GROUP * LANES, num_steps = in / TILE_K;
    const DTYPE *x = (const DTYPE *)a->x + pair->begins[0] * in, *second = (const DTYPE *)a->x + pair->begins[1] * in;
    const DTYPE *w = (const DTYPE *)a->weight + column * in;
    const long value_bytes = a->is_float ? (long)sizeof(float) : (long)sizeof(DTYPE), y_stride = output_stride(a) * value_bytes;
    const char *y = (const char *)a->y + pair->begins[0] * y_stride + column * value_bytes;
    const char *const y_end = (const char *)a->y + (pair->begins[num_tiles - 1] + rows) * y_stride;
    const int is_cached = *a->num_rows * y_stride <= CACHED_OUTPUT_BYTES;
    const int reads_per_step = is_cached ? 0 : (int)ceil_div(num_tiles * rows, num_steps > 0 ? num_steps : 1);
    const int is_claimed = before && pool_claim();
    const int num_written = is_claimed ? before->num_tiles * rows : 0;
    const int is_whole = !a->is_float && column + panels * LANES <= a->out_features;
    int written = 0;
#define LOAD_WEIGHTS(v) _tile_loadd(7, w + v * LANES * PAIR, stride)
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3); _tile_zero(4); _tile_zero(5);
    for (long step = 0; step < num_steps; step++, w += TILE_K * panels * LANES, x += TILE_K, second += TILE_K) {
        for (int i = 0; i < lines; i++, ahead += LINE_BYTES) __builtin_prefetch(ahead, 0, 2);
        for (int i = 0; i < reads_per_step && y < y_end; i++, y += y_stride) {
            __builtin_prefetch(y, 1, 3);
            __builtin_prefetch(y + panels * LANES * value_bytes - 1, 1, 3);
        }
        _tile_stream_loadd(6, x, x_stride);
        LOAD_WEIGHTS(0);
        _tile_dpbf16ps(0, 6, 7);
        if (panels > 1) { LOAD_WEIGHTS(1); _tile_dpbf16ps(1, 6, 7); }
        if (panels > 2) { LOAD_WEIGHTS(2); _tile_dpbf16ps(2, 6, 7); }
        if (num_tiles > 1) { /* backwards: the last weights are still there */
            _tile_stream_loadd(6, second, x_stride);
            if (panels > 2) { _tile_dpbf16ps(5, 6, 7); LOAD_WEIGHTS(1); }
            if (panels > 1) { _tile_dpbf16ps(4, 6, 7); LOAD_WEIGHTS(0); }
            _tile_dpbf16ps(3, 6, 7);
        }
        if (written < num_written && is_whole) {
            for (int i = 0; i < ROWS_PER_STEP && written < num_written; i++)
                NAME(write_row)(a, before, written++, column, rows, panels);
            if (written == num_written) pool_release();
        }
    }
#undef LOAD_WEIGHTS
    if (written < num_written) {
        NAME(write_rest)(a, before, written, column, rows, panels);
        pool_release();
    }
#define STORE_TILE(tile, r, v) if (v < panels) { _tile_stored(tile, pair->sums + r * panels + v, stride); }
    STORE_TILE(0, 0, 0) STORE_TILE(1, 0, 1) STORE_TILE(2, 0, 2)
    if (num_tiles > 1) { STORE_TILE(3, rows, 0) STORE_TILE(4, rows, 1) STORE_TILE(5, rows, 2) }
#undef STORE_TILE
    if (in % TILE_K) NAME(add_rest)(a, pair, num_steps * TILE_K, group, rows, panels);
}

/* All rows by tiles. The last tile begins early, so that all have as many rows: rows that two of them have are
 * written twice, with the same numbers. The pairs of tiles share the lines of the next group; without one, or if
 * it would not stay in the cache, the first pair reads ahead of itself. */
INLINE void NAME(rows_of_group)(
    const struct linear_args *a, long row, long end, long group, const int panels, const char *ahead) {
    const int rows = end - row < TILE_ROWS ? (int)(end - row) : TILE_ROWS;
    const long bytes = GROUP * LANES * a->in_features * (long)sizeof(DTYPE);
    const long num_pairs = ceil_div(end - row, 2 * TILE_ROWS);
    const int is_spread = num_pairs > 1 && ahead && bytes <= MAX_AHEAD_BYTES;
    int lines = is_spread ? (int)ceil_div(panels * TILE_ROWS, num_pairs) : panels * TILE_ROWS;
    if (!is_spread) ahead = (const char *)a->weight + group * bytes + AHEAD_BYTES;
    struct NAME(tile_pair) pairs[2], *before = NULL;
    configure_tiles(rows);
    for (const long last = end - rows; row < end; row += 2 * TILE_ROWS) {
        struct NAME(tile_pair) *pair = before == pairs ? pairs + 1 : pairs;
        pair->num_tiles = row + TILE_ROWS < end ? 2 : 1;
        pair->begins[0] = row < last ? row : last;
        pair->begins[1] = row + TILE_ROWS < last ? row + TILE_ROWS : last;
        if (pair->num_tiles > 1) NAME(amx_tiles)(a, pair, before, group, panels, 2, rows, ahead, lines);
        else NAME(amx_tiles)(a, pair, before, group, panels, 1, rows, ahead, lines);
        if (is_spread) ahead += a->in_features / TILE_K * lines * LINE_BYTES;
        else lines = 0;
        before = pair;
    }
    _tile_release();
    if (!pool_claim()) return;
    NAME(write_rest)(a, before, 0, group * GROUP * LANES, rows, panels);
    pool_release();
}
#endif

/* The same of a group of any width. has_next: prefetch the one after it. */
static __attribute__((noinline)) void NAME(linear_rows)(
    const struct linear_args *a, long row, long end, long group, int has_next) {
    const long next = (group + 1) * GROUP * LANES * a->in_features;
    const char *ahead = has_next ? (const char *)((const DTYPE *)a->weight + next) : NULL;
#if defined(WIDENS) && !JOIN(IS, DTYPE)
    if (end - row >= WIDE_ROWS) row = NAME(wide_rows)(a, row, end, group);
#endif
    switch (num_panels_of_group(a->out_features, group)) {
#define CASE(n) case n: NAME(rows_of_group)(a, row, end, group, n < GROUP ? n : GROUP, ahead); break;
        CASE(1) CASE(2) CASE(3)
#undef CASE
    }
}

/* How many rows an item multiplies: by tiles as many as stay in the cache of a core, so that weights are read
 * once for them, but no more than leave some items for each thread. */
INLINE long NAME(rows_per_item)(const struct linear_args *a, long num_rows) {
    long rows = ROWS_PER_ITEM;
#ifdef HAS_TILES
    const long most = CACHED_BYTES / (a->in_features * (long)sizeof(DTYPE));
    const long least_parts = ceil_div(pool_num_threads() * ITEMS_PER_THREAD, num_groups(a->out_features));
    const long parts = ceil_div(num_rows, most > rows ? most : rows);
    const long even = round_up(ceil_div(num_rows, parts > least_parts ? parts : least_parts), 2 * TILE_ROWS);
    if (even > rows) rows = even;
#else
    (void)a, (void)num_rows;
#endif
    return rows;
}

/* Threads take the groups in turn for one part of the rows, which stays in the cache, then for the next. */
static void NAME(linear_item)(const void *args, long item) {
    const struct linear_args *a = args;
    const long num_rows = *a->num_rows, rows = NAME(rows_per_item)(a, num_rows), groups = num_groups(a->out_features);
    const long group = group_of_item(item % groups, groups), row = item / groups * rows;
    if (row < num_rows) /* else a late thread's: the next step has fewer */
        NAME(linear_rows)(a, row, row + rows < num_rows ? row + rows : num_rows, group, group + 1 < groups);
}

struct job NAME(linear)(const void *args) {
    const struct linear_args *a = args;
    const long parts = ceil_div(*a->num_rows, NAME(rows_per_item)(a, *a->num_rows));
    return (struct job){NAME(linear_item), a, num_groups(a->out_features) * parts, 1};
}

struct NAME(pack_args) {
    DTYPE *packed;
    const DTYPE *weight;
    long in, out;
};

static void NAME(pack_item)(const void *args, long group) {
    const struct NAME(pack_args) *a = args;
    const long width = num_panels_of_group(a->out, group) * LANES;
    DTYPE *packed = a->packed + group * GROUP * LANES * a->in;
    for (long n = 0; n < width; n++) {
        long column = group * GROUP * LANES + n;
        for (long k = 0; k < a->in; k += PAIR) {
            DTYPE *to = packed + k * width + n * PAIR;
            if (column < a->out) memcpy(to, a->weight + column * a->in + k, PAIR * sizeof *to);
            else memset(to, 0, PAIR * sizeof *to);
        }
    }
}

static struct job NAME(plan_pack)(const void *args) {
    return (struct job){NAME(pack_item), args, num_groups(((const struct NAME(pack_args) *)args)->out), 0};
}

/* weight [out, in] → packed, as above */
void NAME(pack)(DTYPE *packed, const DTYPE *weight, int64_t in, int64_t out) {
    struct NAME(pack_args) args = {packed, weight, in, out};
    struct call call = {NAME(plan_pack), &args};
    pool_run(&call, 1, 1);
}
