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

void NAME(rms_norm)(const struct rms_norm_args *a) { pool_run(NAME(rms_norm_item), a, *a->num_rows); }

/* Norm (if asked) and turn one head; a pair is dimensions i and i + size / 2. */
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

static void NAME(rope_store_item)(const void *args, long token) {
    const struct rope_store_args *a = args;
    const long size = a->head_dim;
    const DTYPE *qkv = (const DTYPE *)a->qkv + token * (a->num_heads + 2 * a->num_kv_heads) * size;
    const DTYPE *key = qkv + a->num_heads * size, *value = key + a->num_kv_heads * size;
    const float *cosine = a->step->cosines + a->step->rotary_rows[token] * (size / 2);
    const float *sine = a->step->sines + a->step->rotary_rows[token] * (size / 2);
    DTYPE *query = (DTYPE *)a->query + token * a->num_heads * size;
    long slot = a->step->slot_mapping[token] * a->num_kv_heads * size;
    for (long h = 0; h < a->num_heads; h++)
        NAME(rotate)(query + h * size, qkv + h * size, a->query_norm, cosine, sine, size, a->eps);
    for (long h = 0; h < a->num_kv_heads; h++)
        NAME(rotate)((DTYPE *)a->key_cache + slot + h * size, key + h * size, a->key_norm, cosine,
                     sine, size, a->eps);
    memcpy((DTYPE *)a->value_cache + slot, value, a->num_kv_heads * size * sizeof(DTYPE));
}

void NAME(rope_store)(const struct rope_store_args *a) {
    pool_run(NAME(rope_store_item), a, a->step->num_tokens);
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

void NAME(silu_mul)(const struct silu_mul_args *a) { pool_run(NAME(silu_mul_item), a, *a->num_rows); }

static void NAME(embed_item)(const void *args, long token) {
    const struct embed_args *a = args;
    long id = a->step->token_ids[token];
    DTYPE *y = (DTYPE *)a->y + token * a->size;
    if (!a->is_packed) {
        memcpy(y, (const DTYPE *)a->weight + id * a->size, a->size * sizeof(DTYPE));
        return;
    }
    const long group = id / (GROUP * LANES), n = id % (GROUP * LANES);
    const long width = num_panels_of_group(a->num_rows, group) * LANES;
    const DTYPE *row = (const DTYPE *)a->weight + group * GROUP * LANES * a->size + n * PAIR;
    for (long k = 0; k < a->size; k += PAIR)
        memcpy(y + k, row + k * width, PAIR * sizeof(DTYPE));
}

void NAME(embed)(const struct embed_args *a) { pool_run(NAME(embed_item), a, a->step->num_tokens); }

static void NAME(argmax_item)(const void *args, long row) {
    const struct argmax_args *a = args;
    const DTYPE *x = (const DTYPE *)a->x + row * a->size;
    vec most = splat(-INFINITY);
    ivec has_nan = {0};
    long i = 0;
    for (; i + LANES <= a->size; i += LANES) {
        vec value = LOAD(x + i);
        has_nan |= value != value;
        most = vmax(most, value);
    }
    float best = max_lanes(most);
    for (; i < a->size; i++) {
        float value = GET(x + i);
        has_nan[0] |= -(value != value);
        best = value > best ? value : best;
    }
    int is_nan = 0;
    for (int lane = 0; lane < LANES; lane++) is_nan |= has_nan[lane];
    long index = 0; /* a second look finds where: cheaper than carrying positions along */
    for (; index < a->size - 1; index++) {
        float value = GET(x + index);
        if (is_nan ? value != value : value == best) break;
    }
    a->index[row] = index;
    a->best[row] = is_nan ? NAN : best;
}

void NAME(argmax)(const struct argmax_args *a) { pool_run(NAME(argmax_item), a, *a->num_rows); }
