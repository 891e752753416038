/* A mixture of experts, for one DTYPE, as specified by kernels/reference/experts.py.
 *
 * Which rows an expert multiplies is known only when the router has run: its tiles are a table that the next
 * operations plan by. Another step, or layer, may overwrite the table while a late thread still reads it
 * (pool.h): whatever it holds names existing experts and rows, and a late thread writes nothing.
 */

enum { MAX_EXPERTS = 1024 }; /* as in decoder_config.py */

/* The largest logit that comes after the one at `last`: smaller, or as large with a higher number. NaN comes
 * last. */
INLINE long NAME(next_expert)(const float *logits, long num_experts, long last) {
    long best = -1;
    for (long i = 0; i < num_experts; i++) {
        if (last >= 0 && !(logits[i] < logits[last] || (logits[i] == logits[last] && i > last))) continue;
        if (logits[i] == logits[i] && (best < 0 || logits[i] > logits[best])) best = i;
    }
    return best;
}

static void NAME(route_row)(const void *args, long row) {
    const struct route_args *a = args;
    const float *logits = a->logits + row * a->stride;
    float biased[MAX_EXPERTS];
    if (a->bias) {
        for (long i = 0; i < a->num_experts; i++) biased[i] = logits[i] + GET((const DTYPE *)a->bias + i);
        logits = biased;
    }
    int32_t *experts = a->experts + row * a->experts_per_token;
    float *weights = a->weights + row * a->experts_per_token;
    long last = -1, unknown = 0;
    for (long rank = 0; rank < a->experts_per_token; rank++) {
        if (rank == 0 || last >= 0) last = NAME(next_expert)(logits, a->num_experts, last);
        if (last < 0) /* only NaN is left */
            while (logits[unknown] == logits[unknown]) unknown++;
        experts[rank] = (int32_t)(last < 0 ? unknown++ : last);
        weights[rank] = logits[experts[rank]];
    }
    const float largest = weights[0];
    float total = 0.0f;
    for (long rank = 0; rank < a->experts_per_token; rank++) {
        weights[rank] = expf(weights[rank] - largest);
        if (a->is_normalized) total += weights[rank];
    }
    if (!a->is_normalized)
        for (long i = 0; i < a->num_experts; i++) total += expf(logits[i] - largest);
    for (long rank = 0; rank < a->experts_per_token; rank++) weights[rank] /= total;
}

struct job NAME(route)(const void *args) {
    return (struct job){NAME(route_row), args, *((const struct route_args *)args)->num_rows, 0};
}

/* One item: a pass over the slots, of which even a long prompt has few. */
static void NAME(group_slots_item)(const void *args, long item) {
    const struct group_slots_args *a = args;
    const long num_slots = *a->num_rows * a->experts_per_token;
    int32_t starts[MAX_EXPERTS + 1] = {0};
    (void)item;
    for (long slot = 0; slot < num_slots; slot++) starts[a->experts[slot] + 1]++;
    long num_tiles = 0;
    for (long expert = 0; expert < a->num_experts; expert++) {
        const int32_t start = starts[expert], end = starts[expert + 1] += start;
        for (int32_t row = start; row < end; row += ROWS_PER_ITEM) {
            int32_t *tile = a->tiles + 3 * num_tiles++;
            tile[0] = (int32_t)expert;
            tile[1] = row;
            tile[2] = row + ROWS_PER_ITEM < end ? row + ROWS_PER_ITEM : end;
        }
    }
    for (long slot = 0; slot < num_slots; slot++) {
        const int32_t place = starts[a->experts[slot]]++;
        a->slots[place] = (int32_t)slot;
        a->places[slot] = place;
    }
    a->counts[0] = num_slots;
    a->counts[1] = num_tiles;
}

struct job NAME(group_slots)(const void *args) { return (struct job){NAME(group_slots_item), args, 1, 0}; }

static void NAME(clamped_swiglu_row)(const void *args, long row) {
    const struct clamped_swiglu_args *a = args;
    const DTYPE *gate = (const DTYPE *)a->x + row * 2 * a->size, *up = gate + a->size;
    DTYPE *y = (DTYPE *)a->y + row * a->size;
    const vec limit = splat((float)a->limit), alpha = splat((float)a->alpha), one = splat(1.0f);
    for (long i = 0; i < a->size; i += LANES) {
        vec g = NAME(load_up_to)(gate + i, a->size - i), u = NAME(load_up_to)(up + i, a->size - i);
        g = choose(is_above(g, limit), limit, g);
        u = choose(is_above(u, limit), limit, choose(is_above(-limit, u), -limit, u));
        const vec gated = g / (one + exp_vec(-alpha * g)) * (u + one);
        if (a->size - i >= LANES) STORE(y + i, gated);
        else for (long lane = 0; lane < a->size - i; lane++) PUT(y + i + lane, gated[lane]);
    }
}

struct job NAME(clamped_swiglu)(const void *args) {
    return (struct job){
        NAME(clamped_swiglu_row), args, *((const struct clamped_swiglu_args *)args)->num_rows, 0};
}

static void NAME(gather_slots_row)(const void *args, long row) {
    const struct gather_slots_args *a = args;
    const char *x = (const char *)a->x + a->slots[row] / a->experts_per_token * a->row_bytes;
    memcpy((char *)a->y + row * a->row_bytes, x, a->row_bytes);
}

struct job NAME(gather_slots)(const void *args) {
    return (struct job){NAME(gather_slots_row), args, *((const struct gather_slots_args *)args)->num_slots, 0};
}

/* One item an expert's tile: few, and it reads the expert's order once. */
static void NAME(permute_slots_tile)(const void *args, long tile) {
    const struct permute_slots_args *a = args;
    const int32_t expert = a->tiles[3 * tile], end = a->tiles[3 * tile + 2];
    const int64_t *indices = a->indices + expert * a->size;
    for (int32_t row = a->tiles[3 * tile + 1]; row < end; row++) {
        const DTYPE *x = (const DTYPE *)a->x + row * a->size;
        DTYPE *y = (DTYPE *)a->y + row * a->size;
        for (long i = 0; i < a->size; i++) y[i] = x[indices[i]];
    }
}

struct job NAME(permute_slots)(const void *args) {
    return (struct job){NAME(permute_slots_tile), args, *((const struct permute_slots_args *)args)->num_tiles, 0};
}

/* Item `item` of a product: which group of which tile's expert. Neighbours go to one thread. */
struct NAME(experts_item) {
    long tile, group;
};

INLINE struct NAME(experts_item) NAME(experts_item)(const struct experts_rows *e, long item, long out_features) {
    const long groups = num_groups(out_features);
    const long number = group_of_item(item, *e->num_tiles * groups);
    return (struct NAME(experts_item)){number / groups, number % groups};
}

static void NAME(experts_linear_item)(const void *args, long item) {
    const struct experts_linear_args *a = args;
    const struct NAME(experts_item) at = NAME(experts_item)(&a->rows, item, a->linear.out_features);
    const int32_t *tile = a->rows.tiles + 3 * at.tile;
    struct linear_args own = a->linear;
    own.weight = (const void *)(intptr_t)a->rows.weights[tile[0]];
    if (own.bias) own.bias = (const DTYPE *)own.bias + tile[0] * own.out_features;
    NAME(linear_rows)(&own, tile[1], tile[2], at.group, at.group + 1 < num_groups(own.out_features));
}

struct job NAME(experts_linear)(const void *args) {
    const struct experts_linear_args *a = args;
    return (struct job){
        NAME(experts_linear_item), a, *a->rows.num_tiles * num_groups(a->linear.out_features), 1};
}

static void NAME(experts_linear_quantized_item)(const void *args, long item) {
    const struct experts_linear_quantized_args *a = args;
    struct linear_quantized_args own = a->linear;
    const struct NAME(experts_item) at = NAME(experts_item)(&a->rows, item, own.linear.out_features);
    const int32_t *tile = a->rows.tiles + 3 * at.tile;
    own.linear.weight = (const void *)(intptr_t)a->rows.weights[tile[0]];
    if (own.linear.bias) own.linear.bias = (const DTYPE *)own.linear.bias + tile[0] * own.linear.out_features;
    NAME(quantized_rows)(&own, tile[1], tile[2], at.group);
}

struct job NAME(experts_linear_quantized)(const void *args) {
    const struct experts_linear_quantized_args *a = args;
    return (struct job){
        NAME(experts_linear_quantized_item), a,
        *a->rows.num_tiles * num_groups(a->linear.linear.out_features), 1};
}

/* y[t] = residual[t] + the sum of t's rows by their weights, and of the shared expert's */
static void NAME(combine_slots_row)(const void *args, long row) {
    const struct combine_slots_args *a = args;
    const int32_t *places = a->places + row * a->experts_per_token;
    const float *weights = a->weights + row * a->experts_per_token;
    const DTYPE *x = a->x, *residual = a->residual ? (const DTYPE *)a->residual + row * a->size : NULL;
    const DTYPE *shared = a->shared ? (const DTYPE *)a->shared + row * a->size : NULL;
    const float gate = shared ? 1.0f / (1.0f + expf(-a->shared_logits[row * a->stride])) : 0.0f;
    DTYPE *y = (DTYPE *)a->y + row * a->size;
    long i = 0;
    for (; i + LANES <= a->size; i += LANES) {
        vec sum = {0};
        for (long rank = 0; rank < a->experts_per_token; rank++)
            sum += splat(weights[rank]) * LOAD(x + places[rank] * a->size + i);
        if (shared) sum += splat(gate) * LOAD(shared + i);
        STORE(y + i, residual ? ROUND(sum) + LOAD(residual + i) : sum);
    }
    for (; i < a->size; i++) {
        float sum = 0.0f;
        for (long rank = 0; rank < a->experts_per_token; rank++)
            sum += weights[rank] * GET(x + places[rank] * a->size + i);
        if (shared) sum += gate * GET(shared + i);
        PUT(y + i, residual ? ROUND(splat(sum))[0] + GET(residual + i) : sum);
    }
}

struct job NAME(combine_slots)(const void *args) {
    return (struct job){NAME(combine_slots_row), args, *((const struct combine_slots_args *)args)->num_rows, 0};
}
