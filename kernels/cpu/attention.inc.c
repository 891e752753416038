/* Attention over the paged cache, for one DTYPE: as kernels/paged_attention_reference.py has it.
 *
 * An item is one key head and the queries of a few neighbouring tokens that share it: up to
 * MAX_QUERIES rows. Keys are taken in chunks of CHUNK positions, by the online softmax of Milakov
 * and Gimelshein (2018): scores of the chunk, their maximum, then the weighted values, with what
 * was summed before scaled down. Chunks begin at multiples of CHUNK from position 0, so a row's
 * result does not depend on how its prompt was split or with whom it was batched.
 *
 * Slots past the sequence's end are never read: what they hold may be anything.
 */

struct NAME(attention_tile) {
    const DTYPE *query[MAX_QUERIES];
    DTYPE *out[MAX_QUERIES];
    long first[MAX_QUERIES], last[MAX_QUERIES]; /* positions a row sees, both included */
    long first_of_all, last_of_all;
    int num_rows;
    const int32_t *table;
    long head; /* of the keys */
};

INLINE vec NAME(partial_dot)(const DTYPE *a, const DTYPE *b, long size) {
    vec sum = {0};
    long d = 0;
#ifdef DTYPE_PAIRS
    for (; d + 2 * LANES <= size; d += 2 * LANES) {
        uvec x, y;
        memcpy(&x, a + d, sizeof x);
        memcpy(&y, b + d, sizeof y);
        sum = dot_pairs(sum, x, y);
    }
#endif
    for (; d < size; d += LANES) sum += LOAD(a + d) * LOAD(b + d);
    return sum;
}

/* scores[row][i] of the chunk's keys; -inf where a row does not look */
static void NAME(score_chunk)(
    const struct attention_args *a, const struct NAME(attention_tile) *tile, long begin,
    const DTYPE *const *keys, float (*scores)[CHUNK], int num_keys) {
    for (int r = 0; r < tile->num_rows; r++)
        for (int j = 0; j < num_keys; j += LANES) {
            vec sums[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                sums[i] = NAME(partial_dot)(tile->query[r], keys[j + i], a->head_dim);
            vec score = sum_rows(sums) * splat((float)a->scale);
            ivec position = (int32_t)(begin + j) + LANE_NUMBERS;
            ivec is_seen = (position >= (int32_t)tile->first[r]) & (position <= (int32_t)tile->last[r]);
            store_f32(&scores[r][j], choose(is_seen, score, splat(-INFINITY)));
        }
}

/* Turn scores into weights and keep the running maximum and sum; by how much the sums of earlier
 * chunks shrink. */
INLINE float NAME(weigh)(float *scores, int num_keys, float *largest, float *total) {
    vec most = splat(-INFINITY);
    for (int j = 0; j < num_keys; j += LANES) most = vmax(most, load_f32(scores + j));
    float best = max_lanes(most);
    if (!(best > *largest)) best = *largest;
    if (best == -INFINITY) { /* the row sees nothing of this chunk, nor of those before */
        memset(scores, 0, num_keys * sizeof *scores);
        return 1.0f;
    }
    vec sum = {0};
    for (int j = 0; j < num_keys; j += LANES) {
        vec weight = exp_vec(load_f32(scores + j) - splat(best));
        store_f32(scores + j, weight);
        sum += weight;
    }
    float shrink = exp_vec(splat(*largest - best))[0];
    *total = *total * shrink + sum_lanes(sum);
    *largest = best;
    return shrink;
}

/* sums[row] = sums[row] · shrink[row] + Σ_j weights[row][j] · values[j], for `rows` rows and
 * `vecs` · 16 dimensions */
INLINE void NAME(mix)(
    float *sums, long head_dim, const float *shrink, const float (*weights)[CHUNK],
    const DTYPE *const *values, long d, int num_keys, const int rows, const int vecs) {
    vec acc[4 * 4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++)
            acc[r * vecs + v] = load_f32(sums + r * head_dim + d + v * LANES) * splat(shrink[r]);
    for (int j = 0; j < num_keys; j++) {
        vec value[4];
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) value[v] = LOAD(values[j] + d + v * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vecs; v++) acc[r * vecs + v] += splat(weights[r][j]) * value[v];
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) store_f32(sums + r * head_dim + d + v * LANES, acc[r * vecs + v]);
}

static void NAME(mix_chunk)(
    int num_rows, long head_dim, float *sums, const float *shrink, const float (*weights)[CHUNK],
    const DTYPE *const *values, int num_keys) {
    for (int r = 0; r < num_rows;) {
        int rows = num_rows - r >= 4 ? 4 : num_rows - r >= 2 ? 2 : 1;
        float *s = sums + r * head_dim;
        for (long d = 0; d < head_dim;) {
            int vecs = head_dim - d >= 4 * LANES ? 4 : 1;
#define MIX(n, v) NAME(mix)(s, head_dim, shrink + r, weights + r, values, d, num_keys, n, v)
            if (vecs == 4) { if (rows == 4) MIX(4, 4); else if (rows == 2) MIX(2, 4); else MIX(1, 4); }
            else { if (rows == 4) MIX(4, 1); else if (rows == 2) MIX(2, 1); else MIX(1, 1); }
#undef MIX
            d += vecs * LANES;
        }
        r += rows;
    }
}

static void NAME(attend)(const struct attention_args *a, const struct NAME(attention_tile) *tile) {
    float scores[MAX_QUERIES][CHUNK] __attribute__((aligned(64)));
    float sums[MAX_QUERIES * MAX_HEAD_DIM] __attribute__((aligned(64)));
    float largest[MAX_QUERIES], total[MAX_QUERIES] = {0}, shrink[MAX_QUERIES];
    const DTYPE *keys[CHUNK], *values[CHUNK];
    memset(sums, 0, tile->num_rows * a->head_dim * sizeof *sums);
    for (int r = 0; r < tile->num_rows; r++) largest[r] = -INFINITY;
    for (long begin = tile->first_of_all / CHUNK * CHUNK; begin <= tile->last_of_all; begin += CHUNK) {
        long end = begin + CHUNK - 1 < tile->last_of_all ? begin + CHUNK - 1 : tile->last_of_all;
        int num_keys = (int)(end - begin + 1);
        int padded = (num_keys + LANES - 1) / LANES * LANES;
        int skipped = tile->first_of_all > begin ? (int)(tile->first_of_all - begin) : 0;
        for (int j = 0; j < padded; j++) { /* what no row sees stands for a position that some do */
            long position = begin + (j < skipped ? skipped : j < num_keys ? j : num_keys - 1);
            long slot = tile->table[position / a->block_size] * a->block_size + position % a->block_size;
            long offset = (slot * a->num_kv_heads + tile->head) * a->head_dim;
            keys[j] = (const DTYPE *)a->key_cache + offset;
            values[j] = (const DTYPE *)a->value_cache + offset;
        }
        NAME(score_chunk)(a, tile, begin, keys, scores, padded);
        for (int r = 0; r < tile->num_rows; r++)
            shrink[r] = NAME(weigh)(scores[r], padded, &largest[r], &total[r]);
        NAME(mix_chunk)(
            tile->num_rows, a->head_dim, sums, shrink, (const float (*)[CHUNK])scores, values, num_keys);
    }
    for (int r = 0; r < tile->num_rows; r++)
        for (long d = 0; d < a->head_dim; d += LANES)
            STORE(tile->out[r] + d, load_f32(sums + r * a->head_dim + d) / splat(total[r]));
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
    struct NAME(attention_tile) tile = {
        .table = a->step->block_tables + seq * a->step->table_stride, .head = head, .first_of_all = INT64_MAX};
    for (; token < token_end; token++) {
        long position = num_before + token - query_start;
        long first = a->window && position >= a->window ? position - a->window + 1 : 0;
        for (long h = 0; h < num_heads; h++) {
            long offset = (token * a->num_heads + head * group + query_head + h) * a->head_dim;
            tile.query[tile.num_rows] = (const DTYPE *)a->query + offset;
            tile.out[tile.num_rows] = (DTYPE *)a->out + offset;
            tile.first[tile.num_rows] = first;
            tile.last[tile.num_rows++] = position;
        }
        if (first < tile.first_of_all) tile.first_of_all = first;
        tile.last_of_all = position;
    }
    NAME(attend)(a, &tile);
}

void NAME(attention)(const struct attention_args *a) {
    struct attention_split split = split_attention(a);
    long num_items = 0;
    for (long seq = 0; seq < a->step->num_seqs; seq++) num_items += num_attention_items(a, &split, seq);
    pool_run(NAME(attention_item), a, num_items);
}
