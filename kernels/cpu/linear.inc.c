/* Matrix products with packed weights, for one DTYPE.
 *
 * Sums run in float, in the order of k whatever the number of rows: a row never depends on the
 * rows beside it. Weights are packed into panels of 16 output columns, zero past the last one, so
 * that a lane of an accumulator is a column and nothing is summed across lanes:
 *
 *     b16         [num_panels][in / 2][16][2]   pairs of k, as vdpbf16ps takes them; `in` is even
 *     f16, f32    [num_panels][in][16]
 */

/* One k (b16: one pair) of `rows` rows against `panels` panels of weights. */
INLINE void NAME(accumulate)(
    vec *sums, const DTYPE *x, const DTYPE *w, long in, long k, const int rows, const int panels) {
#ifdef DTYPE_PAIRS
    uvec weights[WIDEST];
#pragma GCC unroll 8
    for (int v = 0; v < panels; v++) memcpy(&weights[v], w + (v * in + k) * LANES, sizeof(uvec));
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        uint32_t pair;
        memcpy(&pair, x + r * in + k, sizeof pair);
#pragma GCC unroll 8
        for (int v = 0; v < panels; v++)
            sums[r * panels + v] = dot_pairs(sums[r * panels + v], usplat(pair), weights[v]);
    }
#else
    vec weights[WIDEST];
#pragma GCC unroll 8
    for (int v = 0; v < panels; v++) weights[v] = LOAD(w + (v * in + k) * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        vec value = splat(GET(x + r * in + k));
#pragma GCC unroll 8
        for (int v = 0; v < panels; v++) sums[r * panels + v] += value * weights[v];
    }
#endif
}

static __attribute__((noinline)) void NAME(write_last_columns)(
    const struct linear_args *a, long row, long column, const float *sums) {
    const DTYPE *bias = a->bias, *residual = a->residual;
    for (; column < a->out_features; column++) {
        long at = row * a->out_features + column;
        float value = *sums++ + (bias ? GET(bias + column) : 0.0f);
        if (residual) value = ROUND(splat(value))[0] + GET(residual + at);
        PUT((DTYPE *)a->y + at, value);
    }
}

INLINE void NAME(write_columns)(const struct linear_args *a, long row, long column, vec sum) {
    long at = row * a->out_features + column;
    if (column + LANES > a->out_features) {
        float sums[LANES];
        store_f32(sums, sum);
        NAME(write_last_columns)(a, row, column, sums);
        return;
    }
    if (a->bias) sum += LOAD((const DTYPE *)a->bias + column);
    if (a->residual) sum = ROUND(sum) + LOAD((const DTYPE *)a->residual + at);
    STORE((DTYPE *)a->y + at, sum);
}

INLINE void NAME(tile)(
    const struct linear_args *a, long row, long panel, const int rows, const int panels) {
    const long in = a->in_features;
    const DTYPE *x = (const DTYPE *)a->x + row * in;
    const DTYPE *w = (const DTYPE *)a->weight + panel * in * LANES;
    vec sums[MAX_TILE];
#pragma GCC unroll 32
    for (int i = 0; i < rows * panels; i++) sums[i] = (vec){0};
    for (long k = 0; k < in; k += PAIR)
        NAME(accumulate)(sums, x, w, in, k, rows, panels);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < panels; v++)
            NAME(write_columns)(a, row + r, (panel + v) * LANES, sums[r * panels + v]);
}

/* All rows against `panels` neighbouring panels, which stay in the cache meanwhile. */
INLINE void NAME(rows_of_panels)(const struct linear_args *a, long panel, const int panels) {
    long num_rows = *a->num_rows, row = 0;
    for (; row + MAX_ROWS <= num_rows; row += MAX_ROWS) NAME(tile)(a, row, panel, MAX_ROWS, panels);
    switch (num_rows - row) {
#define CASE(n) case n: if (n < MAX_ROWS) NAME(tile)(a, row, panel, n < MAX_ROWS ? n : 1, panels); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
#undef CASE
    }
}

static void NAME(linear_item)(const void *args, long item) {
    const struct linear_args *a = args;
    long num_panels = (a->out_features + LANES - 1) / LANES;
    if (*a->num_rows == 1) { /* bound by memory: more streams at once */
        long panel = item * SINGLE_PANELS;
        if (panel + SINGLE_PANELS <= num_panels) NAME(tile)(a, 0, panel, 1, SINGLE_PANELS);
        else for (; panel < num_panels; panel++) NAME(tile)(a, 0, panel, 1, 1);
        return;
    }
    long panel = item * MAX_PANELS;
    if (panel + MAX_PANELS <= num_panels) NAME(rows_of_panels)(a, panel, MAX_PANELS);
    else for (; panel < num_panels; panel++) NAME(rows_of_panels)(a, panel, 1);
}

void NAME(linear)(const struct linear_args *a) {
    long num_panels = (a->out_features + LANES - 1) / LANES;
    long step = *a->num_rows == 1 ? SINGLE_PANELS : MAX_PANELS;
    pool_run(NAME(linear_item), a, (num_panels + step - 1) / step);
}

struct NAME(pack_args) {
    DTYPE *packed;
    const DTYPE *weight;
    long in, out;
};

static void NAME(pack_item)(const void *args, long panel) {
    const struct NAME(pack_args) *a = args;
    DTYPE *packed = a->packed + panel * LANES * a->in;
    for (long n = 0; n < LANES; n++) {
        const DTYPE *row = a->weight + (panel * LANES + n) * a->in;
        for (long k = 0; k < a->in; k += PAIR) {
            DTYPE *to = packed + k * LANES + n * PAIR;
            if (panel * LANES + n < a->out) memcpy(to, row + k, PAIR * sizeof *to);
            else memset(to, 0, PAIR * sizeof *to);
        }
    }
}

/* weight [out, in] → packed, as above */
void NAME(pack)(DTYPE *packed, const DTYPE *weight, int64_t in, int64_t out) {
    struct NAME(pack_args) args = {packed, weight, in, out};
    pool_run(NAME(pack_item), &args, (out + LANES - 1) / LANES);
}
