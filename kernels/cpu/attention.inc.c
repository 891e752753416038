/* Attention over the paged cache, for one DTYPE, as specified by kernels/reference/paged_attention.py.
 *
 * Within a block each key head has its own part, in the order in which the products read it:
 *
 *     keys      [head_dim / PAIR][block_size][PAIR]   a lane is a position
 *     values    [block_size / PAIR][head_dim][PAIR]   a lane is a dimension
 *
 * In int8 (kernels/int8_cache.py) a part ends with the scales of its positions, float [block_size]. The products
 * take the codes as they are, small integers that every DTYPE holds exactly; a key's scale then multiplies its
 * scores, a value's its weights.
 *
 * The block has the size given by the pool's shape, so moving whole blocks does not depend on this.
 *
 * An item is one key head and the queries of a few neighbouring tokens that share it: up to
 * MAX_QUERIES rows. Positions are taken in chunks of CHUNK by the online softmax of Milakov and
 * Gimelshein (2018): scores of the chunk, their maximum, then the weighted values, with the earlier
 * sums scaled down. Weights are rounded to DTYPE, as in FlashAttention (Dao et al., 2022). Chunks
 * start at multiples of CHUNK from position 0, so a row's result does not depend on how its prompt was
 * split or batched.
 *
 * Memory past the sequence's end or outside every window may hold anything, NaN too: keys there are
 * read and their scores dropped; values are not read.
 */

struct NAME(attention_tile) {
    DTYPE query[MAX_QUERIES * MAX_HEAD_DIM]; /* [num_rows, head_dim] */
    DTYPE *out[MAX_QUERIES];
    long first[MAX_QUERIES], last[MAX_QUERIES]; /* positions a row sees, both included */
    long query_head[MAX_QUERIES];
    long first_of_all, last_of_all;
    int num_rows;
    const int32_t *table;
    long head; /* of the keys */
};

/* Positions begin + [first, end) of the sequence, which some row sees, as read by the products; keys
 * from `first_panel`, where a panel of LANES positions starts. */
struct NAME(attention_chunk) {
    long begin, first_panel, first, end;
    long key_stride;                   /* from one k (pair) of a key to the next */
    const DTYPE *keys[CHUNK / LANES];  /* of LANES positions each */
    const DTYPE *values[CHUNK / PAIR]; /* of PAIR positions each */
    /* Of each panel, whose scores prefetch them: memory is read while products are computed. NULL: find_values
     * does, as tiles take too few instructions for it. */
    const DTYPE *values_ahead[CHUNK / LANES];
    DTYPE gathered[CHUNK * MAX_HEAD_DIM], widened[CHUNK * MAX_HEAD_DIM];
    DTYPE masked[2][MAX_HEAD_DIM * PAIR]; /* pairs at the ends, of which one is not seen */
    float key_scales[CHUNK], value_scales[CHUNK]; /* in int8 */
};

/* Where the tile's head starts in the block of a position, in values. */
INLINE long NAME(block_start)(
    const struct attention_args *a, const struct NAME(attention_tile) *tile, long position) {
    long block = tile->table[position / a->block_size];
    return part_start(block, tile->head, a->num_kv_heads, a->block_size, a->head_dim, a->is_int8);
}

INLINE const DTYPE *NAME(find_block)(
    const struct attention_args *a, const struct NAME(attention_tile) *tile, const void *cache,
    long position) {
    return (const DTYPE *)cache + NAME(block_start)(a, tile, position);
}

/* Copy the keys of LANES positions side by side, where they would span blocks. */
static void NAME(gather_keys)(
    const struct attention_args *a, const struct NAME(attention_tile) *tile, DTYPE *to, long position) {
    for (long lane = 0, run; lane < LANES && position <= tile->last_of_all; lane += run, position += run) {
        long offset = position % a->block_size;
        run = a->block_size - offset < LANES - lane ? a->block_size - offset : LANES - lane;
        const DTYPE *keys = NAME(find_block)(a, tile, a->key_cache, position) + offset * PAIR;
        for (long d = 0; d < a->head_dim; d += PAIR)
            memcpy(to + d * LANES + lane * PAIR, keys + d * a->block_size, run * PAIR * sizeof *to);
    }
}

INLINE void NAME(widen_bytes)(DTYPE *to, const uint8_t *from, long size, const int is_int8) {
    long i = 0;
    for (; i + LANES <= size; i += LANES)
        STORE(to + i, is_int8 ? load_int8(from + i) : widen_float8(load_bytes(from + i)));
    for (; i < size; i++) PUT(to + i, is_int8 ? (int8_t)from[i] : widen_float8(usplat(from[i]))[0]);
}

/* Both from a cache of bytes: the keys of a panel side by side, values as they are. */
INLINE void NAME(widen_chunk)(
    const struct attention_args *a, const struct NAME(attention_tile) *tile,
    struct NAME(attention_chunk) *chunk, const int is_int8) {
    chunk->key_stride = LANES * PAIR;
    for (long i = chunk->first_panel, run; i < chunk->end; i += run) {
        const long position = chunk->begin + i, offset = position % a->block_size, lane = i % LANES;
        run = a->block_size - offset < LANES - lane ? a->block_size - offset : LANES - lane;
        DTYPE *to = chunk->gathered + (i - lane) * a->head_dim;
        const long start = NAME(block_start)(a, tile, position);
        const long share = offset * a->head_dim, ahead = position + KEYS_AHEAD;
        prefetch((const uint8_t *)a->value_cache + start + share, run * a->head_dim);
        if (ahead <= tile->last_of_all)
            prefetch((const uint8_t *)a->key_cache + NAME(block_start)(a, tile, ahead) + share, run * a->head_dim);
        const uint8_t *keys = (const uint8_t *)a->key_cache + start + offset * PAIR;
        if (run == LANES)
            for (long d = 0; d < a->head_dim; d += PAIR)
                NAME(widen_bytes)(to + d * LANES, keys + d * a->block_size, LANES * PAIR, is_int8);
        else
            for (long d = 0; d < a->head_dim; d += PAIR)
                NAME(widen_bytes)(to + d * LANES + lane * PAIR, keys + d * a->block_size, run * PAIR, is_int8);
        chunk->keys[i / LANES] = to;
        chunk->values_ahead[i / LANES] = NULL;
        if (is_int8) {
            const long scales = start + a->block_size * a->head_dim + offset * (long)sizeof(float);
            memcpy(chunk->key_scales + i, (const char *)a->key_cache + scales, run * sizeof(float));
            memcpy(chunk->value_scales + i, (const char *)a->value_cache + scales, run * sizeof(float));
        }
    }
    for (long i = chunk->first / PAIR * PAIR; i < chunk->end; i += PAIR) {
        const long position = chunk->begin + i;
        const uint8_t *values = (const uint8_t *)a->value_cache + NAME(block_start)(a, tile, position) +
                                position % a->block_size * a->head_dim;
        NAME(widen_bytes)(chunk->widened + i * a->head_dim, values, PAIR * a->head_dim, is_int8);
        chunk->values[i / PAIR] = chunk->widened + i * a->head_dim;
    }
}

INLINE int NAME(has_tiles_for)(long head_dim) {
#ifdef HAS_TILES
    return head_dim % TILE_K == 0;
#else
    return (void)head_dim, 0;
#endif
}

static void NAME(find_keys)(
    const struct attention_args *a, const struct NAME(attention_tile) *tile,
    struct NAME(attention_chunk) *chunk) {
    const int is_whole = a->block_size % LANES == 0, has_ahead = is_whole && !NAME(has_tiles_for)(a->head_dim);
    chunk->key_stride = (is_whole ? a->block_size : LANES) * PAIR;
    for (long i = chunk->first_panel; i < chunk->end; i += LANES) {
        long position = chunk->begin + i;
        DTYPE *gathered = chunk->gathered + i * a->head_dim;
        if (!is_whole) NAME(gather_keys)(a, tile, gathered, position);
        chunk->keys[i / LANES] =
            is_whole ? NAME(find_block)(a, tile, a->key_cache, position) + position % a->block_size * PAIR
                     : gathered;
        chunk->values_ahead[i / LANES] =
            has_ahead ? NAME(find_block)(a, tile, a->value_cache, position) + position % a->block_size * a->head_dim
                      : NULL;
        if (is_whole)
            for (long d = 0; d < a->head_dim / PAIR; d++)
                prefetch(chunk->keys[i / LANES] + d * chunk->key_stride, LANES * PAIR * sizeof(DTYPE));
    }
}

static void NAME(find_values)(
    const struct attention_args *a, const struct NAME(attention_tile) *tile,
    struct NAME(attention_chunk) *chunk) {
    for (long i = chunk->first / PAIR * PAIR; i < chunk->end;) {
        long offset = (chunk->begin + i) % a->block_size, run = a->block_size - offset;
        const DTYPE *values =
            NAME(find_block)(a, tile, a->value_cache, chunk->begin + i) + offset * a->head_dim;
        for (; run > 0 && i < chunk->end; run -= PAIR, i += PAIR, values += PAIR * a->head_dim) {
            chunk->values[i / PAIR] = values;
            if (!chunk->values_ahead[i / LANES]) prefetch(values, PAIR * a->head_dim * sizeof(DTYPE));
        }
    }
}

/* Zeros for the positions that are not seen beside those that are. */
static void NAME(mask_ends)(const struct attention_args *a, struct NAME(attention_chunk) *chunk) {
    (void)a, (void)chunk;
#ifdef DTYPE_PAIRS
    for (int at_end = 0; at_end < 2; at_end++) {
        long i = at_end ? chunk->end : chunk->first;
        if (i % 2 == 0) continue;
        const DTYPE **values = &chunk->values[i / 2];
        DTYPE *masked = memcpy(chunk->masked[at_end], *values, 2 * a->head_dim * sizeof *masked);
        for (long d = 0; d < a->head_dim; d++) masked[2 * d + at_end] = (DTYPE){0};
        *values = masked;
    }
#endif
}

/* How many steps of k (pairs) take a line of a panel's values. */
#define STEPS_OF_LINE (LINE_BYTES > LANES * PAIR * (long)sizeof(DTYPE) ? LINE_BYTES / (LANES * PAIR * (long)sizeof(DTYPE)) : 1)

/* scores[row][key] of `rows` queries and `panels` times LANES keys; prefetches the panels' values, unless NULL */
INLINE void NAME(score_tile)(
    const DTYPE *query, long head_dim, const DTYPE *const *keys, long key_stride, float (*scores)[CHUNK],
    const DTYPE *const *values_ahead, const int rows, const int panels) {
    const int parts = panels * NUM_PARTS;
    vec_part sums[MAX_ROWS * MAX_PANELS * NUM_PARTS];
#pragma GCC unroll 32
    for (int i = 0; i < rows * parts; i++) sums[i] = (vec_part){0};
    for (long d = 0, at = 0; d < head_dim; d += PAIR, at += key_stride) {
        NAME(weights) weights[MAX_PANELS * NUM_PARTS];
        if (values_ahead && d % (PAIR * STEPS_OF_LINE) == 0)
#pragma GCC unroll 8
            for (int v = 0; v < panels; v++) __builtin_prefetch(values_ahead[v] + d * LANES, 0, 2);
#pragma GCC unroll 8
        for (int i = 0; i < parts; i++)
            weights[i] = NAME(load_weights)(keys[i / NUM_PARTS] + at + i % NUM_PARTS * NAME(part_stride));
        NAME(add_products)(sums, query + d, head_dim, weights, rows, parts);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int i = 0; i < parts; i++)
            memcpy(scores[r] + i * PART_LANES, &sums[r * parts + i], sizeof *sums);
}

/* sums[row][d] = sums[row][d] · shrink[row] + Σ_i weights[row][i] · values[i][d], for `rows` rows
 * and `panels` times LANES dimensions from d on */
INLINE void NAME(mix_tile)(
    float *sums, long head_dim, const float *shrink, const DTYPE (*weights)[CHUNK],
    const struct NAME(attention_chunk) *chunk, long d, const int rows, const int panels) {
    const int parts = panels * NUM_PARTS;
    vec_part acc[MAX_ROWS * MAX_PANELS * NUM_PARTS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int i = 0; i < parts; i++)
            acc[r * parts + i] =
                load_part_f32(sums + r * head_dim + d + i * PART_LANES) * splat_part(shrink[r]);
    for (long i = chunk->first / PAIR * PAIR; i < chunk->end; i += PAIR) {
        const DTYPE *from = chunk->values[i / PAIR] + d * PAIR;
        NAME(weights) values[MAX_PANELS * NUM_PARTS];
#pragma GCC unroll 8
        for (int v = 0; v < parts; v++) values[v] = NAME(load_weights)(from + v * NAME(part_stride));
        NAME(add_products)(acc, weights[0] + i, CHUNK, values, rows, parts);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int i = 0; i < parts; i++)
            memcpy(sums + r * head_dim + d + i * PART_LANES, &acc[r * parts + i], sizeof *acc);
}

#ifdef HAS_TILES
enum { MIX_DIMS = 4 * LANES }; /* whose sums have registers at once */

/* The same as score_chunk by tiles of registers: 0 to 3 hold the scores of panels, 4 queries, 7 keys. */
static __attribute__((noinline)) void NAME(score_by_tiles)(
    const struct NAME(attention_tile) *tile, long head_dim, const struct NAME(attention_chunk) *chunk,
    float (*scores)[CHUNK]) {
    const long query_stride = head_dim * (long)sizeof(DTYPE), key_stride = chunk->key_stride * (long)sizeof(DTYPE);
    BEFORE_TILES();
    for (long i = chunk->first_panel; i < chunk->end; i += 4 * LANES) {
        const long panels = ceil_div(chunk->end - i, LANES);
        const DTYPE *const *keys = chunk->keys + i / LANES;
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
        for (long d = 0; d < head_dim; d += TILE_K) {
            _tile_loadd(4, tile->query + d, query_stride);
#define MULTIPLY(v) \
    if (v < panels) { \
        _tile_loadd(7, keys[v] + d / PAIR * chunk->key_stride, key_stride); \
        _tile_dpbf16ps(v, 4, 7); \
    }
            MULTIPLY(0) MULTIPLY(1) MULTIPLY(2) MULTIPLY(3)
#undef MULTIPLY
        }
#define STORE_TILE(v) if (v < panels) _tile_stored(v, &scores[0][i + v * LANES], CHUNK * sizeof(float));
        STORE_TILE(0) STORE_TILE(1) STORE_TILE(2) STORE_TILE(3)
#undef STORE_TILE
    }
}

/* MIX_DIMS dimensions from d on of the values from position i of the chunk on; zeros where none is seen. */
INLINE void NAME(gather_values)(
    DTYPE (*to)[MIX_DIMS * PAIR], const struct NAME(attention_chunk) *chunk, long i, long d, long num_dims) {
    for (int pair = 0; pair < TILE_K / PAIR; pair++, i += PAIR) {
        const int is_seen = i >= chunk->first / PAIR * PAIR && i < chunk->end;
        for (long lane = 0; lane < num_dims; lane += LANES) {
            uvec_part values = {0};
            if (is_seen) memcpy(&values, chunk->values[i / PAIR] + (d + lane) * PAIR, sizeof values);
            memcpy(to[pair] + lane * PAIR, &values, sizeof values);
        }
    }
}

/* The same as mix_chunk: 0 to 3 hold sums, 4 weights, 7 values. TILE_K positions are multiplied together, whose
 * first is a multiple of it, since the order of a sum depends on that. */
static __attribute__((noinline)) void NAME(mix_by_tiles)(
    int num_rows, long head_dim, float *sums, const float *shrink, DTYPE (*weights)[CHUNK],
    const struct NAME(attention_chunk) *chunk) {
    const long begin = chunk->first / TILE_K * TILE_K, end = round_up(chunk->end, LANES);
    const long stride = head_dim * (long)sizeof(float), value_stride = MIX_DIMS * PAIR * (long)sizeof(DTYPE);
    DTYPE gathered[2][TILE_K / PAIR][MIX_DIMS * PAIR] __attribute__((aligned(64)));
    for (int r = 0; r < num_rows; r++) {
        for (long d = 0; d < head_dim; d += LANES)
            store_f32(sums + r * head_dim + d, load_f32(sums + r * head_dim + d) * splat(shrink[r]));
        memset(weights[r] + begin, 0, (chunk->first_panel - begin) * sizeof(DTYPE));
        memset(weights[r] + end, 0, (round_up(end, TILE_K) - end) * sizeof(DTYPE));
    }
    for (long d = 0; d < head_dim; d += MIX_DIMS) {
        const long num_dims = head_dim - d < MIX_DIMS ? head_dim - d : MIX_DIMS;
        BEFORE_TILES();
#define FOR_EACH(v, statement) if (v * LANES < num_dims) { statement; }
#define LOAD_SUMS(v) FOR_EACH(v, _tile_loadd(v, sums + d + v * LANES, stride))
#define MULTIPLY(v) FOR_EACH(v, _tile_loadd(7, values[0] + v * LANES * PAIR, value_stride); _tile_dpbf16ps(v, 4, 7))
#define STORE_SUMS(v) FOR_EACH(v, _tile_stored(v, sums + d + v * LANES, stride))
        LOAD_SUMS(0) LOAD_SUMS(1) LOAD_SUMS(2) LOAD_SUMS(3)
        for (long i = begin; i < chunk->end; i += TILE_K) {
            DTYPE (*values)[MIX_DIMS * PAIR] = gathered[i / TILE_K % 2];
            NAME(gather_values)(values, chunk, i, d, num_dims);
            BEFORE_TILES();
            _tile_loadd(4, weights[0] + i, CHUNK * sizeof(DTYPE));
            MULTIPLY(0) MULTIPLY(1) MULTIPLY(2) MULTIPLY(3)
        }
        STORE_SUMS(0) STORE_SUMS(1) STORE_SUMS(2) STORE_SUMS(3)
#undef FOR_EACH
#undef LOAD_SUMS
#undef MULTIPLY
#undef STORE_SUMS
    }
}
#endif

/* TILE(rows, panels) with constants; `panels` is panels_for(rows) or 1 */
#define DISPATCH(rows, panels) \
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
#define CASE(n) \
    case n: \
        if (panels == 1) TILE(n < MAX_ROWS ? n : MAX_ROWS, 1); \
        else TILE(n < MAX_ROWS ? n : MAX_ROWS, panels_for(n)); \
        break;

static __attribute__((noinline)) void NAME(score_chunk)(
    const struct NAME(attention_tile) *tile, long head_dim, const struct NAME(attention_chunk) *chunk,
    float (*scores)[CHUNK]) {
#ifdef HAS_TILES
    if (NAME(has_tiles_for)(head_dim)) {
        NAME(score_by_tiles)(tile, head_dim, chunk, scores);
        return;
    }
#endif
    for (int row = 0, rows; row < tile->num_rows; row += rows) {
        rows = tile->num_rows - row < MAX_ROWS ? tile->num_rows - row : MAX_ROWS;
        const DTYPE *query = tile->query + row * head_dim;
        for (long i = chunk->first_panel, panels; i < chunk->end; i += panels * LANES) {
            panels = i + panels_for(rows) * LANES <= round_up(chunk->end, LANES) ? panels_for(rows) : 1;
            const DTYPE *const *keys = chunk->keys + i / LANES;
            float (*to)[CHUNK] = (float (*)[CHUNK])&scores[row][i];
            const DTYPE *const *ahead = chunk->values_ahead + i / LANES;
            if (row || !*ahead) ahead = NULL;
#define TILE(n, v) NAME(score_tile)(query, head_dim, keys, chunk->key_stride, to, ahead, n, v)
            DISPATCH(rows, panels)
#undef TILE
        }
    }
}

static __attribute__((noinline)) void NAME(mix_chunk)(
    int num_rows, long head_dim, float *sums, const float *shrink, DTYPE (*weights)[CHUNK],
    const struct NAME(attention_chunk) *chunk) {
#ifdef HAS_TILES
    if (NAME(has_tiles_for)(head_dim)) {
        NAME(mix_by_tiles)(num_rows, head_dim, sums, shrink, weights, chunk);
        return;
    }
#endif
    for (int row = 0, rows; row < num_rows; row += rows) {
        rows = num_rows - row < MAX_ROWS ? num_rows - row : MAX_ROWS;
        for (long d = 0, panels; d < head_dim; d += panels * LANES) {
            panels = d + panels_for(rows) * LANES <= head_dim ? panels_for(rows) : 1;
            const DTYPE (*of_rows)[CHUNK] = (const DTYPE (*)[CHUNK])(weights + row);
#define TILE(n, v) NAME(mix_tile)(sums + row * head_dim, head_dim, shrink + row, of_rows, chunk, d, n, v)
            DISPATCH(rows, panels)
#undef TILE
        }
    }
}
#undef CASE
#undef DISPATCH

/* Turn a row's scores into weights and update its running maximum and sum; returns the factor by which
 * earlier sums shrink. */
static float NAME(weigh)(
    const struct NAME(attention_tile) *tile, int row, const struct NAME(attention_chunk) *chunk,
    const struct attention_args *a, float *scores, DTYPE *weights, float *largest, float *total) {
    const vec scale = splat((float)a->scale * (a->key_scales ? a->key_scales[tile->head] : 1.0f));
    const int has_alibi = a->alibi != NULL;
    const float slope = has_alibi ? a->alibi[tile->query_head[row]] : 0.0f;
    vec most = splat(-INFINITY);
    for (long i = chunk->first_panel; i < chunk->end; i += LANES) {
        ivec position = (int32_t)(chunk->begin + i) + LANE_NUMBERS;
        ivec is_seen = (position >= (int32_t)tile->first[row]) & (position <= (int32_t)tile->last[row]);
        vec score = load_f32(scores + i) * scale;
        if (a->is_int8) score *= load_f32(chunk->key_scales + i);
        if (has_alibi) score += splat(slope) * __builtin_convertvector(position - (int32_t)tile->last[row], vec);
        if (a->soft_cap > 0) score = cap_softly(score, (float)a->soft_cap);
        score = choose(is_seen, score, splat(-INFINITY));
        store_f32(scores + i, score);
        most = vmax(most, score);
    }
    float best = max_lanes(most);
    if (!(best > *largest)) best = *largest;
    /* a row that sees nothing in this chunk or the ones before: all weights are 0 */
    float origin = best == -INFINITY ? 0.0f : best;
    vec sum = {0};
    for (long i = chunk->first_panel; i < chunk->end; i += LANES) {
        vec weight = exp_vec(load_f32(scores + i) - splat(origin));
        sum += weight;
        if (a->is_int8) { /* times 127: of the size of values, which a half holds; 0 stays, beside NaN too */
            const vec scaled = weight * (load_f32(chunk->value_scales + i) * splat(127.0f));
            weight = choose(is_above(weight, splat(0.0f)), scaled, splat(0.0f));
        }
        STORE(weights + i, weight);
    }
    float shrink = exp_vec(splat(*largest - origin))[0];
    *total = *total * shrink + sum_lanes(sum);
    *largest = best;
    return shrink;
}

static void NAME(attend)(const struct attention_args *a, const struct NAME(attention_tile) *tile) {
    struct NAME(attention_chunk) chunk;
    float scores[MAX_QUERIES][CHUNK] __attribute__((aligned(64)));
    DTYPE weights[MAX_QUERIES][CHUNK] __attribute__((aligned(64)));
    float sums[MAX_QUERIES * MAX_HEAD_DIM] __attribute__((aligned(64)));
    float largest[MAX_QUERIES], total[MAX_QUERIES], shrink[MAX_QUERIES];
    memset(sums, 0, tile->num_rows * a->head_dim * sizeof *sums);
    for (int r = 0; r < tile->num_rows; r++) {
        const DTYPE *sinks = a->sinks;
        largest[r] = sinks ? GET(sinks + tile->query_head[r]) : -INFINITY;
        total[r] = sinks ? 1.0f : 0.0f;
    }
#ifdef HAS_TILES
    if (NAME(has_tiles_for)(a->head_dim)) configure_tiles(tile->num_rows);
#endif
    for (long begin = tile->first_of_all / CHUNK * CHUNK; begin <= tile->last_of_all; begin += CHUNK) {
        chunk.begin = begin;
        chunk.first = tile->first_of_all > begin ? tile->first_of_all - begin : 0;
        chunk.first_panel = chunk.first / LANES * LANES;
        chunk.end = tile->last_of_all - begin < CHUNK ? tile->last_of_all - begin + 1 : CHUNK;
        if (a->is_int8) {
            NAME(widen_chunk)(a, tile, &chunk, 1);
        } else if (a->key_scales) {
            NAME(widen_chunk)(a, tile, &chunk, 0);
        } else {
            NAME(find_keys)(a, tile, &chunk);
            NAME(find_values)(a, tile, &chunk);
        }
        NAME(mask_ends)(a, &chunk);
        NAME(score_chunk)(tile, a->head_dim, &chunk, scores);
        for (int r = 0; r < tile->num_rows; r++)
            shrink[r] = NAME(weigh)(
                tile, r, &chunk, a, scores[r], weights[r], &largest[r], &total[r]);
        NAME(mix_chunk)(tile->num_rows, a->head_dim, sums, shrink, weights, &chunk);
    }
#ifdef HAS_TILES
    _tile_release();
#endif
    if (a->is_int8)
        for (int r = 0; r < tile->num_rows; r++) total[r] *= 127.0f;
    if (a->value_scales)
        for (int r = 0; r < tile->num_rows; r++) total[r] /= a->value_scales[tile->head];
    if (!pool_claim()) return;
    for (int r = 0; r < tile->num_rows; r++)
        for (long d = 0; d < a->head_dim; d += LANES)
            STORE(tile->out[r] + d, load_f32(sums + r * a->head_dim + d) / splat(total[r]));
    pool_release();
}

static void NAME(attention_item)(const void *args, long item) {
    const struct attention_args *a = args;
    struct attention_split split = split_attention(a);
    long seq = 0, count;
    while (item >= (count = num_attention_items(a, &split, seq))) item -= count, seq++;
    long query_start = a->step->query_start_loc[seq], query_end = a->step->query_start_loc[seq + 1];
    long num_before = a->step->seq_lens[seq] - (query_end - query_start);
    long part = item % split.num_parts, head = item / split.num_parts % a->num_kv_heads;
    long token = query_start + item / split.num_parts / a->num_kv_heads * split.num_tokens;
    long token_end = token + split.num_tokens < query_end ? token + split.num_tokens : query_end;
    long group = a->num_heads / a->num_kv_heads;
    long query_head = part * split.num_heads;
    long num_heads = group - query_head < split.num_heads ? group - query_head : split.num_heads;
    struct NAME(attention_tile) tile;
    tile.table = a->step->block_tables + seq * a->step->table_stride;
    tile.head = head;
    tile.first_of_all = INT64_MAX;
    tile.num_rows = 0;
    for (; token < token_end; token++) {
        long position = num_before + token - query_start;
        long first = a->window && position >= a->window ? position - a->window + 1 : 0;
        for (long h = 0; h < num_heads; h++) {
            long offset = (token * a->num_heads + head * group + query_head + h) * a->head_dim;
            memcpy(tile.query + tile.num_rows * a->head_dim, (const DTYPE *)a->query + offset,
                   a->head_dim * sizeof(DTYPE));
            tile.query_head[tile.num_rows] = head * group + query_head + h;
            tile.out[tile.num_rows] = (DTYPE *)a->out + offset;
            tile.first[tile.num_rows] = first;
            tile.last[tile.num_rows++] = position;
        }
        if (first < tile.first_of_all) tile.first_of_all = first;
        tile.last_of_all = position;
    }
    pool_open(); /* block tables stay in place, and always hold valid blocks of the pool */
    NAME(attend)(a, &tile);
}

struct job NAME(attention)(const void *args) {
    const struct attention_args *a = args;
    struct attention_split split = split_attention(a);
    long num_items = 0;
    for (long seq = 0; seq < a->step->num_seqs; seq++) num_items += num_attention_items(a, &split, seq);
    return (struct job){NAME(attention_item), a, num_items, 0};
}
