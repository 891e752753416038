/* The next token of each row of logits, for one DTYPE, as specified by kernels/reference/sampling.py.
 *
 * A row is an item. Weights are e^((x - largest) / temperature), in float, and their sums are in
 * double. With truncation, the tokens that may be kept are collected first, usually few, and the rest
 * of the work uses only them. Otherwise a row is drawn from in spans of the vocabulary: their sums
 * determine in which span the draw ends, and only that one is scanned token by token.
 */

struct NAME(row) {
    const DTYPE *x;
    long size;
    double temperature;
    float scale;   /* 1 / temperature */
    float largest; /* logit */
    float least;   /* smaller ones have weight 0 */
};

/* Sixteen logits; past the last one they are -inf. */
INLINE vec NAME(logits_at)(const struct NAME(row) *row, long i) {
    if (i + LANES <= row->size) return LOAD(row->x + i);
    float x[LANES];
    for (int lane = 0; lane < LANES; lane++)
        x[lane] = i + lane < row->size ? GET(row->x + i + lane) : -INFINITY;
    return load_f32(x);
}

INLINE long NAME(span_end)(const struct NAME(row) *row, long begin) {
    return begin + SPAN < row->size ? begin + SPAN : row->size;
}

/* Sixteen weights. */
INLINE vec NAME(weights_at)(const struct NAME(row) *row, vec x) {
    return mask_lanes(at_least(x, splat(row->least)), weights_of(x, row->largest, row->scale));
}

/* Find `largest`, NaN if there is one, and return its first index. maxima: if not null, gets the
 * largest of each lane of each span. */
static long NAME(find_largest)(struct NAME(row) *row, float *maxima) {
    long span = 0;
    uint32_t numbers = ALL_LANES; /* lanes without NaN */
    row->largest = -INFINITY;
    for (long begin = 0; begin < row->size; begin += SPAN) {
        vec most = splat(-INFINITY);
        for (long i = begin, end = NAME(span_end)(row, begin); i < end; i += LANES) {
            vec x = NAME(logits_at)(row, i);
            numbers &= at_least(x, x);
            most = vmax(most, x);
        }
        if (maxima) store_f32(maxima + begin / SPAN * LANES, vmax(most, splat(-FLT_MAX)));
        if (at_least(splat(row->largest), most) == ALL_LANES) continue;
        row->largest = max_lanes(most);
        span = begin;
    }
    if (numbers != ALL_LANES) row->largest = NAN;
    for (long i = span; i < row->size; i += LANES) {
        uint32_t bits = at_least(NAME(logits_at)(row, i), splat(row->largest));
        if (bits) return i + __builtin_ctz(bits);
    }
    return 0;
}

/* All tokens from a logit upwards. */
static void NAME(collect)(const struct NAME(row) *row, float bound, struct candidates *c) {
    for (long i = 0; i < row->size; i += LANES) {
        vec x = NAME(logits_at)(row, i);
        uint32_t bits = at_least(x, splat(bound));
        if (bits) add_candidates(c, bits, x, i);
    }
}

/* The k likeliest tokens. search_keys holds the maxima of `find_largest`: at least k logits reach
 * their k-th largest, so the k-th largest logit does too, and few others. */
static void NAME(collect_top_k)(const struct NAME(row) *row, double k, struct candidates *c) {
    long num_maxima = ceil_div(row->size, SPAN) * LANES;
    float bound = -FLT_MAX;
    if (k <= (double)num_maxima) {
        for (long i = 0; i < num_maxima; i++) c->search_weights[i] = 1.0f;
        bound = find_threshold(c->search_keys, c->search_weights, num_maxima, k);
    }
    NAME(collect)(row, bound, c);
    keep_candidates(c, fmaxf(find_kth_largest(c, k), row->least));
}

/* All tokens that top_p may keep; returns the weight of the whole row. It never keeps a token that
 * weighs less than (1 - top_p) / size of the total, since all of these together weigh less than what is
 * left out. The total so far, a lower bound of the final one, is good enough. */
static double NAME(collect_nucleus)(
    const struct NAME(row) *row, double top_p, struct candidates *c) {
    double total = 0.0, share = 0.5 * (1.0 - top_p) / (double)row->size; /* half: for rounding */
    for (long begin = 0; begin < row->size; begin += SPAN) {
        vec bound = splat(fmaxf((float)(share * fmax(total, 1.0)), FLT_MIN));
        struct sums sums = {0};
        for (long i = begin, end = NAME(span_end)(row, begin); i < end; i += LANES) {
            vec x = NAME(logits_at)(row, i), weights = NAME(weights_at)(row, x);
            add_lanes(&sums, weights);
            uint32_t bits = at_least(weights, bound);
            if (bits) add_candidates(c, bits, x, i);
        }
        total += total_of(sums);
    }
    return total;
}

/* The token whose share of the cumulative distribution holds `uniform`. */
static long NAME(draw)(const struct NAME(row) *row, double uniform, double *masses) {
    double total = 0.0, reached = 0.0;
    for (long begin = 0; begin < row->size; begin += SPAN) {
        struct sums sums = {0};
        for (long i = begin, end = NAME(span_end)(row, begin); i < end; i += LANES)
            add_lanes(&sums, NAME(weights_at)(row, NAME(logits_at)(row, i)));
        total += masses[begin / SPAN] = total_of(sums);
    }
    double target = uniform * total; /* < total, as uniform has 53 bits */
    long begin = 0, last = 0;
    for (; begin + SPAN < row->size; begin += SPAN) {
        if (reached + masses[begin / SPAN] > target) break;
        reached += masses[begin / SPAN];
    }
    for (long i = begin, end = NAME(span_end)(row, begin); i < end; i += LANES) {
        vec weights = NAME(weights_at)(row, NAME(logits_at)(row, i));
        for (int lane = 0; lane < LANES; lane++) {
            if (weights[lane] > 0.0f) last = i + lane; /* the result if rounding goes too far */
            reached += weights[lane];
            if (reached > target) return last;
        }
    }
    return last;
}

/* The same with truncation. */
static long NAME(draw_truncated)(
    const struct NAME(row) *row, const struct sample_tokens_args *a, long r, struct candidates *c) {
    double top_k = a->top_k[r], top_p = a->top_p[r], min_p = a->min_p[r], total = 0.0;
    float bound = fmaxf((float)(row->largest + row->temperature * log(min_p)), row->least);
    if (top_k > 0.0) NAME(collect_top_k)(row, top_k, c);
    else if (top_p < 1.0) total = NAME(collect_nucleus)(row, top_p, c);
    else NAME(collect)(row, bound, c);
    if (top_p < 1.0) {
        double weight = weigh_candidates(c, row->largest, row->scale);
        keep_candidates(c, find_nucleus(c, top_p * (top_k > 0.0 ? weight : total)));
    }
    keep_candidates(c, bound);
    return find_candidate(c, a->uniforms[r] * weigh_candidates(c, row->largest, row->scale));
}

/* A row with -inf for tokens whose bit is not set, in a thread's memory that is kept for the next row;
 * null if it cannot be allocated. Other rows pay nothing for masks, and the code above is one. */
static const DTYPE *NAME(masked)(const DTYPE *x, long size, const uint32_t *mask) {
    static _Thread_local DTYPE *memory;
    static _Thread_local long capacity;
    if (size > capacity) {
        capacity = size + LANES;
        free(memory);
        memory = malloc(capacity * sizeof *memory);
        if (!memory) capacity = 0;
    }
    if (!memory) return NULL;
    vec nothing = splat(-INFINITY);
    long i = 0;
    for (; i + LANES <= size; i += LANES) {
        uint32_t bits = mask[i / 32] >> i % 32 & ALL_LANES;
        if (!bits) STORE(memory + i, nothing);
        else STORE(memory + i, select_lanes(bits, LOAD(x + i), nothing));
    }
    for (; i < size; i++)
        if (mask[i / 32] >> i % 32 & 1) memory[i] = x[i];
        else PUT(memory + i, -INFINITY);
    return memory;
}

static void NAME(sample_row)(const void *args, long r) {
    const struct sample_tokens_args *a = args;
    struct NAME(row) row = {.x = (const DTYPE *)a->logits + r * a->vocab_size, .size = a->vocab_size};
    if (a->masks && a->mask_indices[r] >= 0) {
        long words = (a->vocab_size + 31) / 32;
        row.x = NAME(masked)(row.x, row.size, a->masks + a->mask_indices[r] * words);
        if (!row.x) {
            a->token_ids[r] = a->is_valid[r] = 0;
            return;
        }
    }
    if (a->temperature[r] == 0.0) {
        a->token_ids[r] = NAME(find_largest)(&row, NULL);
        a->is_valid[r] = isfinite(row.largest);
        return;
    }
    struct candidates candidates = no_candidates(row.size);
    a->token_ids[r] = NAME(find_largest)(&row, candidates.search_keys);
    a->is_valid[r] = isfinite(row.largest) && candidates.keys;
    if (!a->is_valid[r]) return;
    row.temperature = fmax(a->temperature[r], MIN_TEMPERATURE);
    row.scale = (float)(1.0 / row.temperature);
    row.least = fmaxf((float)(row.largest + row.temperature * LEAST_EXPONENT), -FLT_MAX);
    int is_truncated = a->top_k[r] > 0.0 || a->top_p[r] < 1.0 || a->min_p[r] > 0.0;
    a->token_ids[r] = is_truncated ? NAME(draw_truncated)(&row, a, r, &candidates)
                                   : NAME(draw)(&row, a->uniforms[r], candidates.masses);
}

struct job NAME(sample_tokens)(const void *args) {
    return (struct job){NAME(sample_row), args, *((const struct sample_tokens_args *)args)->num_rows, 0};
}
