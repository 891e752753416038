/* The small operations between matrix products, for one DTYPE: a row is an item. */

INLINE float NAME(rms_scale)(const DTYPE *x, long size, double eps) {
    vec sum = {0};
    long i = 0;
    for (; i + LANES <= size; i += LANES) {
        vec value = LOAD(x + i);
        sum += value * value;
    }
    float total = sum_lanes(sum);
    for (; i < size; i++) total += GET(x + i) * GET(x + i);
    return 1.0f / sqrtf(total / (float)size + (float)eps);
}

static void NAME(rms_norm_item)(const void *args, long row) {
    const struct rms_norm_args *a = args;
    const DTYPE *x = (const DTYPE *)a->x + row * a->size, *weight = a->weight;
    DTYPE *y = (DTYPE *)a->y + row * a->size;
    float scale = NAME(rms_scale)(x, a->size, a->eps);
    long i = 0;
    for (; i + LANES <= a->size; i += LANES)
        STORE(y + i, LOAD(x + i) * splat(scale) * LOAD(weight + i));
    for (; i < a->size; i++) PUT(y + i, GET(x + i) * scale * GET(weight + i));
}

struct job NAME(rms_norm)(const void *args) {
    return (struct job){NAME(rms_norm_item), args, *((const struct rms_norm_args *)args)->num_rows, 0};
}

/* Normalise (with a weight) and rotate one head; a pair is dimensions i and i + size / 2. */
INLINE void NAME(rotate)(
    DTYPE *y, const DTYPE *x, const DTYPE *norm, const float *cosine, const float *sine, long size,
    double eps) {
    long half = size / 2, i = 0;
    float scale = norm ? NAME(rms_scale)(x, size, eps) : 1.0f;
    for (; i + LANES <= half; i += LANES) {
        vec first = LOAD(x + i), second = LOAD(x + half + i);
        vec cos = load_f32(cosine + i), sin = load_f32(sine + i);
        if (norm) {
            first = ROUND(first * splat(scale) * LOAD(norm + i));
            second = ROUND(second * splat(scale) * LOAD(norm + half + i));
        }
        STORE(y + i, first * cos - second * sin);
        STORE(y + half + i, second * cos + first * sin);
    }
    for (; i < half; i++) {
        float first = GET(x + i), second = GET(x + half + i);
        if (norm) {
            first = ROUND(splat(first * scale * GET(norm + i)))[0];
            second = ROUND(splat(second * scale * GET(norm + half + i)))[0];
        }
        PUT(y + i, first * cosine[i] - second * sine[i]);
        PUT(y + half + i, second * cosine[i] + first * sine[i]);
    }
}

/* Store a head's key and value in attention's layout (see attention.inc.c). Value by value: a vector
 * would write to neighbouring tokens, which another thread may be storing. */
INLINE void NAME(store_key_value)(
    const struct rope_store_args *a, long head, long slot, const DTYPE *key, const DTYPE *value) {
    const long size = a->head_dim, block = slot / a->block_size, offset = slot % a->block_size;
    const long start = part_start(block, head, a->num_kv_heads, a->block_size, size, a->is_int8);
    const long key_start = start + offset * PAIR;
    const long value_start = start + offset / PAIR * PAIR * size + offset % PAIR;
    if (a->key_scales || a->is_int8) {
        uint8_t *keys = (uint8_t *)a->key_cache + key_start, *values = (uint8_t *)a->value_cache + value_start;
        uint8_t key_codes[MAX_HEAD_DIM], value_codes[MAX_HEAD_DIM];
        if (a->is_int8) {
            const long scale_start = start + a->block_size * size + offset * (long)sizeof(float);
            *(float *)((char *)a->key_cache + scale_start) = NAME(encode_int8)(key_codes, key, size);
            *(float *)((char *)a->value_cache + scale_start) = NAME(encode_int8)(value_codes, value, size);
        } else {
            for (long d = 0; d < size; d++) {
                key_codes[d] = narrow_float8(GET(key + d) / a->key_scales[head]);
                value_codes[d] = narrow_float8(GET(value + d) / a->value_scales[head]);
            }
        }
        for (long d = 0; d < size; d++) {
            keys[d / PAIR * PAIR * a->block_size + d % PAIR] = key_codes[d];
            values[d * PAIR] = value_codes[d];
        }
        return;
    }
    DTYPE *keys = (DTYPE *)a->key_cache + key_start, *values = (DTYPE *)a->value_cache + value_start;
    for (long d = 0; d < size; d += PAIR) memcpy(keys + d * a->block_size, key + d, PAIR * sizeof *key);
    for (long d = 0; d < size; d++) values[d * PAIR] = value[d];
}

static void NAME(rope_store_token)(const struct rope_store_args *a, long token) {
    const long size = a->head_dim, slot = a->step->slot_mapping[token];
    const DTYPE *qkv = (const DTYPE *)a->qkv + token * (a->num_heads + 2 * a->num_kv_heads) * size;
    const DTYPE *keys = qkv + a->num_heads * size, *values = keys + a->num_kv_heads * size;
    const float *cosine = a->step->cosines + a->step->rotary_rows[token] * (size / 2);
    const float *sine = a->step->sines + a->step->rotary_rows[token] * (size / 2);
    DTYPE *query = (DTYPE *)a->query + token * a->num_heads * size, key[MAX_HEAD_DIM];
    for (long h = 0; h < a->num_heads; h++)
        NAME(rotate)(query + h * size, qkv + h * size, a->query_norm, cosine, sine, size, a->eps);
    for (long h = 0; h < a->num_kv_heads; h++) {
        NAME(rotate)(key, keys + h * size, a->key_norm, cosine, sine, size, a->eps);
        NAME(store_key_value)(a, h, slot, key, values + h * size);
    }
}

/* Neighbouring tokens of a prompt share cache lines of keys, so one thread takes a few of them. */
INLINE long rope_tokens_per_item(const struct rope_store_args *a) {
    return a->step->num_tokens > a->step->num_seqs ? LANES : 1;
}

static void NAME(rope_store_item)(const void *args, long item) {
    const struct rope_store_args *a = args;
    long n = rope_tokens_per_item(a), token = item * n;
    long end = token + n < a->step->num_tokens ? token + n : a->step->num_tokens;
    for (; token < end; token++) NAME(rope_store_token)(a, token);
}

struct job NAME(rope_store)(const void *args) {
    const struct rope_store_args *a = args;
    long n = rope_tokens_per_item(a);
    return (struct job){NAME(rope_store_item), a, ceil_div(a->step->num_tokens, n), 0};
}

static void NAME(silu_mul_item)(const void *args, long row) {
    const struct silu_mul_args *a = args;
    const DTYPE *gate = (const DTYPE *)a->x + row * 2 * a->size, *up = gate + a->size;
    DTYPE *y = (DTYPE *)a->y + row * a->size;
    long i = 0;
    for (; i + LANES <= a->size; i += LANES) {
        vec x = LOAD(gate + i);
        STORE(y + i, ROUND(x / (splat(1.0f) + exp_vec(-x))) * LOAD(up + i));
    }
    for (; i < a->size; i++) {
        vec x = splat(GET(gate + i));
        PUT(y + i, ROUND(x / (splat(1.0f) + exp_vec(-x)))[0] * GET(up + i));
    }
}

struct job NAME(silu_mul)(const void *args) {
    return (struct job){NAME(silu_mul_item), args, *((const struct silu_mul_args *)args)->num_rows, 0};
}

static void NAME(embed_item)(const void *args, long token) {
    const struct embed_args *a = args;
    long id = a->step->token_ids[token];
    DTYPE *y = (DTYPE *)a->y + token * a->size;
    if (!a->is_packed) {
        memcpy(y, (const DTYPE *)a->weight + id * a->size, a->size * sizeof(DTYPE));
        return;
    }
    const long group = id / (GROUP * LANES), n = id % (GROUP * LANES);
    const long width = num_panels_of_group(a->vocab_size, group) * LANES;
    const DTYPE *row = (const DTYPE *)a->weight + group * GROUP * LANES * a->size + n * PAIR;
    for (long k = 0; k < a->size; k += PAIR)
        memcpy(y + k, row + k * width, PAIR * sizeof(DTYPE));
}

struct job NAME(embed)(const void *args) {
    return (struct job){NAME(embed_item), args, ((const struct embed_args *)args)->step->num_tokens, 0};
}

/* One item: few rows, of a prompt's many. */
static void NAME(gather_rows_item)(const void *args, long item) {
    const struct gather_rows_args *a = args;
    (void)item;
    const int64_t *tokens = a->step->sampled_tokens;
    for (long r = 0; r < a->step->num_sampled; r++) {
        const DTYPE *x = (const DTYPE *)a->x + (tokens ? tokens[r] : r) * a->size;
        memcpy((DTYPE *)a->y + r * a->size, x, a->size * sizeof(DTYPE));
    }
}

struct job NAME(gather_rows)(const void *args) { return (struct job){NAME(gather_rows_item), args, 1, 0}; }
