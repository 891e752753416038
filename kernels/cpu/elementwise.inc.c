/* The small operations between matrix products, for one DTYPE: a row is an item. */

INLINE float NAME(sum_squares)(const DTYPE *x, long size) {
    vec sum = {0};
    long i = 0;
    for (; i + LANES <= size; i += LANES) {
        vec value = LOAD(x + i);
        sum += value * value;
    }
    float total = sum_lanes(sum);
    for (; i < size; i++) total += GET(x + i) * GET(x + i);
    return total;
}

INLINE float NAME(rms_scale)(const DTYPE *x, long size, double eps) {
    return 1.0f / sqrtf(NAME(sum_squares)(x, size) / (float)size + (float)eps);
}

INLINE void NAME(scale_row)(
    DTYPE *y, const DTYPE *x, const DTYPE *weight, long size, float scale, float offset) {
    long i = 0;
    for (; i + LANES <= size; i += LANES)
        STORE(y + i, LOAD(x + i) * splat(scale) * (LOAD(weight + i) + splat(offset)));
    for (; i < size; i++) PUT(y + i, GET(x + i) * scale * (GET(weight + i) + offset));
}

static void NAME(rms_norm_item)(const void *args, long row) {
    const struct rms_norm_args *a = args;
    const long stride = a->stride ? a->stride : a->size;
    const DTYPE *x = (const DTYPE *)a->x + row * stride;
    NAME(scale_row)((DTYPE *)a->y + row * stride, x, a->weight, a->size, NAME(rms_scale)(x, a->size, a->eps),
                    (float)a->offset);
}

struct job NAME(rms_norm)(const void *args) {
    return (struct job){NAME(rms_norm_item), args, *((const struct rms_norm_args *)args)->num_rows, 0};
}

/* In two passes: the mean of squares minus the squared mean would lose precision. */
INLINE void NAME(norm_group)(
    DTYPE *y, const DTYPE *x, const DTYPE *weight, const DTYPE *bias, long size, double eps) {
    vec sum = {0}, squares = {0};
    long i = 0;
    for (; i + LANES <= size; i += LANES) sum += LOAD(x + i);
    float mean = sum_lanes(sum);
    for (; i < size; i++) mean += GET(x + i);
    mean /= (float)size;
    for (i = 0; i + LANES <= size; i += LANES) {
        vec centred = LOAD(x + i) - splat(mean);
        squares += centred * centred;
    }
    float total = sum_lanes(squares);
    for (; i < size; i++) total += (GET(x + i) - mean) * (GET(x + i) - mean);
    const float scale = 1.0f / sqrtf(total / (float)size + (float)eps);
    for (i = 0; i + LANES <= size; i += LANES) {
        vec normed = (LOAD(x + i) - splat(mean)) * splat(scale) * LOAD(weight + i);
        STORE(y + i, bias ? normed + LOAD(bias + i) : normed);
    }
    for (; i < size; i++) {
        float normed = (GET(x + i) - mean) * scale * GET(weight + i);
        PUT(y + i, bias ? normed + GET(bias + i) : normed);
    }
}

static void NAME(layer_norm_item)(const void *args, long row) {
    const struct layer_norm_args *a = args;
    const long stride = a->stride ? a->stride : a->size * a->num_groups;
    const DTYPE *x = (const DTYPE *)a->x + row * stride, *weight = a->weight, *bias = a->bias;
    DTYPE *y = (DTYPE *)a->y + row * stride;
    for (long start = 0; start < a->size * a->num_groups; start += a->size)
        NAME(norm_group)(y + start, x + start, weight + start, bias ? bias + start : NULL, a->size, a->eps);
}

struct job NAME(layer_norm)(const void *args) {
    return (struct job){NAME(layer_norm_item), args, *((const struct layer_norm_args *)args)->num_rows, 0};
}

/* Normalise (with a weight) and rotate one head; a pair is dimensions i and i + size / 2. */
INLINE void NAME(rotate)(
    DTYPE *y, const DTYPE *x, const DTYPE *norm, const float *cosine, const float *sine, long size,
    double eps, double norm_offset) {
    const float offset = (float)norm_offset;
    long half = size / 2, i = 0;
    float scale = norm ? NAME(rms_scale)(x, size, eps) : 1.0f;
    for (; i + LANES <= half; i += LANES) {
        vec first = LOAD(x + i), second = LOAD(x + half + i);
        vec cos = load_f32(cosine + i), sin = load_f32(sine + i);
        if (norm) {
            first = ROUND(first * splat(scale) * (LOAD(norm + i) + splat(offset)));
            second = ROUND(second * splat(scale) * (LOAD(norm + half + i) + splat(offset)));
        }
        STORE(y + i, first * cos - second * sin);
        STORE(y + half + i, second * cos + first * sin);
    }
    for (; i < half; i++) {
        float first = GET(x + i), second = GET(x + half + i);
        if (norm) {
            first = ROUND(splat(first * scale * (GET(norm + i) + offset)))[0];
            second = ROUND(splat(second * scale * (GET(norm + half + i) + offset)))[0];
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
    const long row = token * (a->num_heads + 2 * a->num_kv_heads) * size;
    const DTYPE *qkv = (const DTYPE *)a->qkv + row, *keys = qkv + a->num_heads * size;
    const DTYPE *values = (a->values ? (const DTYPE *)a->values + row : qkv) + (a->num_heads + a->num_kv_heads) * size;
    const long angles = a->rope * a->step->rope_stride + a->step->rotary_rows[token] * (size / 2);
    const float *cosine = a->step->cosines + angles, *sine = a->step->sines + angles;
    DTYPE *query = (DTYPE *)a->query + token * a->num_heads * size, key[MAX_HEAD_DIM];
    for (long h = 0; h < a->num_heads; h++)
        NAME(rotate)(query + h * size, qkv + h * size, a->query_norm, cosine, sine, size, a->eps, a->norm_offset);
    for (long h = 0; h < a->num_kv_heads; h++) {
        NAME(rotate)(key, keys + h * size, a->key_norm, cosine, sine, size, a->eps, a->norm_offset);
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

/* gelu of negative x without the cancellation of 1 + erf: erfc(z) = polynomial(1 / (1 + pz)) e^(-z²), within
 * 1.5e-7 of 1 (Abramowitz and Stegun, "Handbook of Mathematical Functions", 7.1.26). */
INLINE vec NAME(gelu)(vec x) {
    const vec size = vmax(x, -x) * splat(0.70710678118654752f);
    const vec t = splat(1.0f) / (splat(1.0f) + splat(0.3275911f) * size);
    vec sum = splat(1.061405429f);
    sum = sum * t + splat(-1.453152027f);
    sum = sum * t + splat(1.421413741f);
    sum = sum * t + splat(-0.284496736f);
    sum = sum * t + splat(0.254829592f);
    const vec tail = splat(0.5f) * x * (sum * t * exp_vec(-size * size));
    return choose(is_above(x, splat(0.0f)), x - tail, tail);
}

INLINE vec NAME(activation)(vec x, const int kind) {
    switch (kind) {
    case 0: return x / (splat(1.0f) + exp_vec(-x));
    case 1: return NAME(gelu)(x);
    case 2: /* (1 + tanh(u)) / 2 = 1 / (1 + e^(-2u)) */
        return x / (splat(1.0f) + exp_vec(x * (splat(-1.5957691216f) - splat(0.0713548162726f) * x * x)));
    case 3: return vmax(splat(0.0f), x);
    default:
        x = vmax(splat(0.0f), x);
        return x * x;
    }
}

INLINE void NAME(activate_row)(const struct activate_args *a, long row, const int kind) {
    const DTYPE *x = (const DTYPE *)a->x + row * a->size * (a->is_gated ? 2 : 1);
    const DTYPE *up = a->is_gated ? x + a->size : NULL;
    DTYPE *y = (DTYPE *)a->y + row * a->size;
    long i = 0;
    for (; i + LANES <= a->size; i += LANES) {
        vec active = NAME(activation)(LOAD(x + i), kind);
        STORE(y + i, up ? ROUND(active) * LOAD(up + i) : active);
    }
    for (; i < a->size; i++) {
        vec active = NAME(activation)(splat(GET(x + i)), kind);
        PUT(y + i, up ? ROUND(active)[0] * GET(up + i) : active[0]);
    }
}

static void NAME(activate_item)(const void *args, long row) {
    const struct activate_args *a = args;
    switch (a->kind) {
    case 0: NAME(activate_row)(a, row, 0); break;
    case 1: NAME(activate_row)(a, row, 1); break;
    case 2: NAME(activate_row)(a, row, 2); break;
    case 3: NAME(activate_row)(a, row, 3); break;
    default: NAME(activate_row)(a, row, 4);
    }
}

struct job NAME(activate)(const void *args) {
    return (struct job){NAME(activate_item), args, *((const struct activate_args *)args)->num_rows, 0};
}

static void NAME(scale_add_item)(const void *args, long row) {
    const struct scale_add_args *a = args;
    const DTYPE *x = (const DTYPE *)a->x + row * a->size;
    const DTYPE *residual = a->residual ? (const DTYPE *)a->residual + row * a->size : NULL;
    DTYPE *y = (DTYPE *)a->y + row * a->size;
    const float factor = (float)a->factor;
    long i = 0;
    for (; i + LANES <= a->size; i += LANES) {
        vec scaled = LOAD(x + i) * splat(factor);
        STORE(y + i, residual ? ROUND(scaled) + LOAD(residual + i) : scaled);
    }
    for (; i < a->size; i++) {
        float scaled = GET(x + i) * factor;
        PUT(y + i, residual ? ROUND(splat(scaled))[0] + GET(residual + i) : scaled);
    }
}

struct job NAME(scale_add)(const void *args) {
    return (struct job){NAME(scale_add_item), args, *((const struct scale_add_args *)args)->num_rows, 0};
}

static void NAME(clamp_item)(const void *args, long row) {
    const struct clamp_args *a = args;
    const DTYPE *x = (const DTYPE *)a->x + row * a->stride;
    DTYPE *y = (DTYPE *)a->y + row * a->stride;
    const vec limit = splat((float)a->limit);
    long i = 0;
    for (; i + LANES <= a->size; i += LANES) STORE(y + i, -vmax(-vmax(LOAD(x + i), -limit), -limit));
    for (; i < a->size; i++) PUT(y + i, (-vmax(-vmax(splat(GET(x + i)), -limit), -limit))[0]);
}

struct job NAME(clamp)(const void *args) {
    return (struct job){NAME(clamp_item), args, *((const struct clamp_args *)args)->num_rows, 0};
}

static void NAME(add_positions_item)(const void *args, long token) {
    const struct add_positions_args *a = args;
    const DTYPE *x = (const DTYPE *)a->x + token * a->size;
    const DTYPE *added = (const DTYPE *)a->table + a->step->rotary_rows[token] * a->size;
    DTYPE *y = (DTYPE *)a->y + token * a->size;
    long i = 0;
    for (; i + LANES <= a->size; i += LANES) STORE(y + i, LOAD(x + i) + LOAD(added + i));
    for (; i < a->size; i++) PUT(y + i, GET(x + i) + GET(added + i));
}

struct job NAME(add_positions)(const void *args) {
    const struct add_positions_args *a = args;
    return (struct job){NAME(add_positions_item), a, a->step->num_tokens, 0};
}

INLINE vec NAME(cap_logit)(vec x, float factor, float soft_cap) {
    x = ROUND(x * splat(factor));
    return soft_cap > 0 ? cap_softly(x, soft_cap) : x;
}

/* An item: a row's values of LOGITS_PER_ITEM tokens. */
static void NAME(cap_logits_item)(const void *args, long item) {
    const struct cap_logits_args *a = args;
    const long parts = ceil_div(a->size, LOGITS_PER_ITEM), row = item / parts;
    const long rest = a->size - item % parts * LOGITS_PER_ITEM;
    const long size = rest < LOGITS_PER_ITEM ? rest : LOGITS_PER_ITEM;
    const long start = row * a->size + item % parts * LOGITS_PER_ITEM;
    const DTYPE *x = (const DTYPE *)a->x + start;
    DTYPE *y = (DTYPE *)a->y + start;
    const float factor = (float)a->factor, soft_cap = (float)a->soft_cap;
    long i = 0;
    for (; i + LANES <= size; i += LANES) STORE(y + i, NAME(cap_logit)(LOAD(x + i), factor, soft_cap));
    for (; i < size; i++) PUT(y + i, NAME(cap_logit)(splat(GET(x + i)), factor, soft_cap)[0]);
}

struct job NAME(cap_logits)(const void *args) {
    const struct cap_logits_args *a = args;
    return (struct job){NAME(cap_logits_item), a, *a->num_rows * ceil_div(a->size, LOGITS_PER_ITEM), 0};
}

static void NAME(embed_item)(const void *args, long token) {
    const struct embed_args *a = args;
    const long id = a->step->token_ids[token] - a->first_id;
    DTYPE *y = (DTYPE *)a->y + token * a->size;
    if (a->num_ids && (id < 0 || id >= a->num_ids)) {
        memset(y, 0, a->size * sizeof(DTYPE));
        return;
    }
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

static void NAME(place_features_item)(const void *args, long i) {
    const struct place_features_args *a = args;
    DTYPE *y = (DTYPE *)a->y + a->step->feature_rows[i] * a->size;
    memcpy(y, (const DTYPE *)a->step->features + i * a->size, a->size * sizeof(DTYPE));
}

struct job NAME(place_features)(const void *args) {
    return (struct job){NAME(place_features_item), args, ((const struct place_features_args *)args)->step->num_features, 0};
}

struct job NAME(gather_rows)(const void *args) { return (struct job){NAME(gather_rows_item), args, 1, 0}; }
