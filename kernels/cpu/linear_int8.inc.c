/* Matrix products of bytes, for one DTYPE of input and output; the numbers are those of
 * kernels/linear_int8_reference.py.
 *
 * A row of x is rounded to 255 steps of its own scale just before the product, each weight to as many
 * steps of its column's scale. Bytes of x are stored with 128 added, as vpdpbusd requires, and sums
 * start at minus 128 times the column's weights. Sums are exact in 32 bits, so their order does not
 * matter, and end within 31 bits for up to MAX_FEATURES (int8.py) of them; intermediate overflows
 * cancel out. Weights are packed as in linear.inc.c, by four k, with everything that a group needs in
 * one place:
 *
 *     [group] first sums [panel][16], scales [panel][16], weights [in / 4][panel][16][4]
 *
 * with zeros past the last k and the last column.
 */

enum { NUM_HEADERS = 2 }; /* first sums and scales: each as long as the weights of four k */

INLINE long num_quads(long size) { return (size + QUAD - 1) / QUAD; }

INLINE long int8_group_start(long in_features, long group) {
    return group * GROUP * LANES * QUAD * (NUM_HEADERS + num_quads(in_features));
}

/* The largest magnitude, by the bits of floats: NaN is above infinity, which is above all others. */
INLINE float NAME(largest_magnitude)(const DTYPE *x, long size) {
    ivec largest = {0};
    long i = 0;
    for (; i + LANES <= size; i += LANES) largest = imax(largest, (ivec)LOAD(x + i) & 0x7fffffff);
    for (; i < size; i++) largest = imax(largest, (ivec)splat(GET(x + i)) & 0x7fffffff);
    int32_t bits = 0;
    for (int lane = 0; lane < LANES; lane++) bits = largest[lane] > bits ? largest[lane] : bits;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void NAME(quantize_row)(const void *args, long row) {
    const struct quantize_rows_args *a = args;
    const DTYPE *x = (const DTYPE *)a->x + row * a->size;
    uint8_t *bytes = a->bytes + row * num_quads(a->size) * QUAD;
    const float largest = NAME(largest_magnitude)(x, a->size);
    float inverse = 127.0f / largest;
    if (!(inverse <= FLT_MAX)) inverse = 0.0f; /* all zeros, or too small for a quotient; NaN */
    long i = 0;
    for (; i + LANES <= a->size; i += LANES)
        store_bytes(bytes + i, round_to_int(LOAD(x + i) * splat(inverse)) + ZERO_BYTE);
    for (; i < a->size; i++)
        bytes[i] = (uint8_t)(round_to_int(splat(GET(x + i) * inverse))[0] + ZERO_BYTE);
    for (; i % QUAD; i++) bytes[i] = ZERO_BYTE;
    a->scales[row] = largest / 127.0f;
}

struct job NAME(quantize_rows)(const void *args) {
    return (struct job){NAME(quantize_row), args, *((const struct quantize_rows_args *)args)->num_rows, 0};
}

static __attribute__((noinline)) void NAME(write_int8_tile)(
    const struct linear_int8_args *a, long row, long column, const uvec_part *sums,
    const float *scales, int rows, int panels) {
    for (long end = row + rows; row < end; row++)
        for (long v = 0; v < panels; v++, sums += NUM_PARTS) {
            ivec total;
            memcpy(&total, sums, sizeof total);
            vec product = __builtin_convertvector(total, vec);
            product = product * splat(a->x_scales[row]) * load_f32(scales + v * LANES);
            NAME(write_columns)(&a->linear, row, column + v * LANES, product);
        }
}

/* `rows` rows against a group, which is `parts` registers wide */
INLINE void NAME(int8_tile)(
    const struct linear_int8_args *a, long row, long group, const int rows, const int panels) {
    const int parts = panels * NUM_PARTS;
    const long quads = num_quads(a->linear.in_features), size = parts * PART_BYTES;
    const uint8_t *x = (const uint8_t *)a->linear.x + row * quads * QUAD;
    const char *first_sums = (const char *)a->linear.weight + int8_group_start(a->linear.in_features, group);
    const char *scales = first_sums + size, *w = scales + size;
    uvec_part sums[MAX_ROWS * GROUP * NUM_PARTS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int i = 0; i < parts; i++)
            memcpy(&sums[r * parts + i], first_sums + i * PART_BYTES, PART_BYTES);
    for (long k = 0; k < quads; k++, w += size) {
        uvec_part weights[GROUP * NUM_PARTS];
#pragma GCC unroll 8
        for (int i = 0; i < parts; i++) memcpy(&weights[i], w + i * PART_BYTES, PART_BYTES);
        if (rows == MAX_ROWS)
#pragma GCC unroll 8
            for (int v = 0; v < panels; v++) __builtin_prefetch(w + v * LANES * QUAD + AHEAD_BYTES, 0, 2);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            uint32_t quad;
            memcpy(&quad, x + (r * quads + k) * QUAD, sizeof quad);
#pragma GCC unroll 8
            for (int i = 0; i < parts; i++)
                sums[r * parts + i] = dot_quads(sums[r * parts + i], quad - (uvec_part){0}, weights[i]);
        }
    }
    uvec_part finished[MAX_ROWS * GROUP * NUM_PARTS];
#pragma GCC unroll 32
    for (int i = 0; i < rows * parts; i++) finished[i] = sums[i];
    if (!pool_claim()) return;
    NAME(write_int8_tile)(
        a, row, group * GROUP * LANES, finished, (const float *)scales, rows, panels);
    pool_release();
}

INLINE void NAME(int8_rows_of_group)(
    const struct linear_int8_args *a, long row, long end, long group, const int panels) {
    for (; row + MAX_ROWS <= end; row += MAX_ROWS) NAME(int8_tile)(a, row, group, MAX_ROWS, panels);
    switch (end - row) {
#define CASE(n) case n: if (n < MAX_ROWS) NAME(int8_tile)(a, row, group, n < MAX_ROWS ? n : 1, panels); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
#undef CASE
    }
}

static void NAME(linear_int8_item)(const void *args, long item) {
    const struct linear_int8_args *a = args;
    const long num_rows = *a->linear.num_rows, parts = num_row_parts(num_rows);
    const long group = item / parts, row = item % parts * ROWS_PER_ITEM;
    const long end = row + ROWS_PER_ITEM < num_rows ? row + ROWS_PER_ITEM : num_rows;
    switch (num_panels_of_group(a->linear.out_features, group)) {
#define CASE(n) case n: NAME(int8_rows_of_group)(a, row, end, group, n < GROUP ? n : GROUP); break;
        CASE(1) CASE(2) CASE(3)
#undef CASE
    }
}

struct job NAME(linear_int8)(const void *args) {
    const struct linear_args *a = &((const struct linear_int8_args *)args)->linear;
    return (struct job){
        NAME(linear_int8_item), args, num_groups(a->out_features) * num_row_parts(*a->num_rows), 1};
}

static void NAME(pack_int8_item)(const void *args, long group) {
    const struct pack_int8_args *a = args;
    const long quads = num_quads(a->in_features), first = group * GROUP * LANES;
    const long width = num_panels_of_group(a->out_features, group) * LANES;
    int32_t *first_sums = (int32_t *)(a->packed + int8_group_start(a->in_features, group));
    float *scales = (float *)(first_sums + width);
    int8_t *packed = (int8_t *)(scales + width);
    for (long n = 0; n < width; n++) {
        const int8_t *codes = a->codes + (first + n) * a->in_features;
        const int is_there = first + n < a->out_features;
        const long size = is_there ? a->in_features : 0;
        int32_t sum = 0;
        for (long k = 0; k < quads; k++) {
            int8_t weights[QUAD] = {0};
            for (int i = 0; i < QUAD && k * QUAD + i < size; i++) {
                weights[i] = codes[k * QUAD + i];
                sum += weights[i];
            }
            memcpy(packed + (k * width + n) * QUAD, weights, QUAD);
        }
        first_sums[n] = -ZERO_BYTE * sum;
        scales[n] = is_there ? a->scales[first + n] : 0.0f;
    }
}

struct job NAME(pack_int8)(const void *args) {
    return (struct job){
        NAME(pack_int8_item), args, num_groups(((const struct pack_int8_args *)args)->out_features), 0};
}
