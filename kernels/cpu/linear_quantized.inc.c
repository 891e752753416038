/* Matrix products with quantized weights, for one DTYPE of output; the numbers are those of
 * kernels/reference/linear_quantized.py.
 *
 * Codes are unsigned, of 4 or 8 bits. A block is columns_per_scale neighbouring k, with a scale and perhaps
 * an offset for each column. Either x is rounded to bytes, block by block (quantize_blocks); then products
 * within a block are exact sums of integers, which start at minus `zero` times the sum of x: `zero` is the
 * code that stands for 0. Or x stays as it is ("exact"), and codes become floats as they are read. Either
 * way a block's sum is scaled and added to the others in float, in the order of k: a row never depends on
 * the other rows.
 *
 * A line is 64 bytes: for each of 16 columns the codes of 4 or 8 neighbouring k. Everything that a group of
 * GROUP panels needs is in one place, with zeros past the last k and the last column:
 *
 *     [group] factors [column], [block] (scales [column], offsets [column], lines [in / 4 or 8][panel][16][4])
 *
 * Scales and offsets are half-precision, times a column's factor, if is_half, and otherwise float.
 *
 * The nibbles of a column's 32 bits hold k = 0 2 4 6 1 3 5 7, from the lowest on. So a shift by 4 i leaves
 * k = 2 i and 2 i + 1 at the ends of two 16-bit words, which index a table of bfloat16.
 */

enum { GROUP_LANES = GROUP * LANES };
const int64_t NAME(group_lanes) = GROUP_LANES; /* for library.py */

INLINE long k_per_line(long code_bits) { return 32 / code_bits; }

/* Where k of a line of nibbles is in its column's 32 bits. */
INLINE int nibble_shift(int k) { return (k & 1) * 16 + (k >> 1) * 4; }

/* The sizes of one group's parts, in bytes. */
struct quantized_layout {
    long k_per_line, num_blocks, scales, group;
};

INLINE struct quantized_layout quantized_layout(
    const struct quantized_format *f, long in_features, const int code_bits) {
    struct quantized_layout layout;
    layout.k_per_line = k_per_line(code_bits);
    layout.num_blocks = ceil_div(in_features, f->columns_per_scale);
    layout.scales = GROUP_LANES * (f->is_half ? 2 : 4);
    layout.group = GROUP_LANES * 4 + layout.num_blocks * layout.scales * (f->has_offsets ? 2 : 1) +
                   ceil_div(in_features, layout.k_per_line) * GROUP * LINE_BYTES;
    return layout;
}

/* Those of the columns of one part. */
INLINE vec_part load_scales(const char *p, long part, long is_half) {
    return is_half ? load_part_f16((const f16 *)p + part * PART_LANES)
                   : load_part_f32((const float *)p + part * PART_LANES);
}

/* --- codes as floats ------------------------------------------------------------------------ */

/* table[code & 15] */
INLINE vec_part look_up(const union parts *table, uvec_part codes) {
#if defined(__AVX512F__)
    return (vec_part)_mm512_permutexvar_ps((__m512i)codes, (__m512)table->all);
#elif defined(__AVX2__)
    const __m256 low = _mm256_permutevar8x32_ps((__m256)table->part[0], (__m256i)codes);
    const __m256 high = _mm256_permutevar8x32_ps((__m256)table->part[1], (__m256i)codes);
    return (vec_part)_mm256_blendv_ps(low, high, (__m256)(codes << 28));
#else
    vec_part values;
    for (int lane = 0; lane < PART_LANES; lane++) {
        const uint32_t code = codes[lane] & 15;
        values[lane] = table->part[code / PART_LANES][code % PART_LANES];
    }
    return values;
#endif
}

/* The numbers that the codes of k stand for, before scales. */
INLINE vec_part decode_k(
    const struct quantized_format *f, uvec_part line, int k, const union parts *table, const int code_bits) {
    if (code_bits == 4) return look_up(table, line >> nibble_shift(k));
    const uvec_part codes = line >> 8 * k & 0xff;
    if (f->is_float8) return widen_part_float8(codes);
    return float_of_ints(codes - (uint32_t)f->zero);
}

#ifdef DTYPE_PAIRS
#if defined(__AVX512BW__)
typedef uvec nibble_table; /* 16 pairs of the same bfloat16: vpermw ignores an index's other bits */

INLINE nibble_table make_nibble_table(vec table) {
    const hvec_part halves = narrow_part_b16((vec_part)table);
    union { hvec_part half[2]; uvec all; } twice = {{halves, halves}};
    return twice.all;
}
INLINE uvec_part nibble_pairs(const nibble_table *table, uvec_part line, int pair) {
    return (uvec_part)_mm512_permutexvar_epi16((__m512i)(line >> 4 * pair), (__m512i)*table);
}
#else
typedef union parts nibble_table;
INLINE nibble_table make_nibble_table(vec table) { return (nibble_table){ROUND(table)}; }
INLINE uvec_part nibble_pairs(const nibble_table *table, uvec_part line, int pair) {
    const uvec_part first = (uvec_part)look_up(table, line >> 4 * pair);
    return first >> 16 | (uvec_part)look_up(table, line >> (16 + 4 * pair));
}
#endif

/* Codes of 8 bits are exact in bfloat16. */
INLINE NAME(weights) NAME(decode)(
    const struct quantized_format *f, uvec_part line, int step, const nibble_table *table, const int code_bits) {
    if (code_bits == 4) return nibble_pairs(table, line, step);
    const uvec_part first = (uvec_part)decode_k(f, line, 2 * step, NULL, 8);
    return first >> 16 | (uvec_part)decode_k(f, line, 2 * step + 1, NULL, 8);
}
#else
typedef union parts nibble_table;
INLINE nibble_table make_nibble_table(vec table) { return (nibble_table){table}; }
INLINE NAME(weights) NAME(decode)(
    const struct quantized_format *f, uvec_part line, int step, const nibble_table *table, const int code_bits) {
    return decode_k(f, line, step, table, code_bits);
}
#endif

/* --- rows as bytes -------------------------------------------------------------------------- */

/* In the order of a line of nibbles: the low halves of its bytes, then the high ones. */
INLINE bvec order_as_nibbles(bvec bytes) {
    return __builtin_shufflevector(bytes, bytes, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
}

enum { MAX_OUTLIER_BLOCK = 128 }; /* as in kernels/reference/linear_quantized.py */

INLINE vec NAME(magnitudes)(const DTYPE *x, long size) {
    return (vec)((ivec)NAME(load_up_to)(x, size) & 0x7fffffff);
}

/* Copies a block to `rest` without its outliers, and lists them from `found` on; the number after the last. If
 * there are none, `rest` stays as it is. Few blocks have a number as `large` as to be one. */
static __attribute__((noinline)) long NAME(take_outliers)(
    DTYPE *rest, const struct quantize_blocks_args *a, long found, const DTYPE *x, long start, long size,
    float largest, float large) {
    vec total = {0};
    ivec num_large = {0};
    for (long i = 0; i < size; i += LANES) {
        const vec each = NAME(magnitudes)(x + i, size - i);
        const ivec is_large = is_above(each, splat(large));
        total += (vec)(~is_large & (ivec)each);
        num_large -= is_large;
    }
    const float threshold = 16.0f * sum_lanes(total) / (float)(size - isum_lanes(num_large));
    if (threshold > large) large = threshold;
    if (!(largest > large)) return found;
    memcpy(rest, x, size * sizeof(DTYPE));
    for (long i = 0; i < size; i += LANES) {
        const ivec is_outlier = is_above(NAME(magnitudes)(x + i, size - i), splat(large));
        for (int lane = 0; lane < LANES; lane++) {
            if (!is_outlier[lane]) continue;
            a->outlier_columns[found] = (int32_t)(start + i + lane);
            a->outlier_values[found++] = GET(x + i + lane);
            PUT(rest + i + lane, 0.0f);
        }
    }
    return found;
}

/* LANES neighbouring blocks of a row, or those that are left. */
struct NAME(row_blocks) {
    const DTYPE *at[LANES];
    long num, start, last_size; /* how many; where in the row; the last one's size */
};

INLINE long NAME(size_of_block)(const struct NAME(row_blocks) *blocks, long block, long size) {
    return block + 1 < blocks->num ? size : blocks->last_size;
}

/* The sum and the largest of magnitudes, of each lane. */
INLINE void NAME(look_at_block)(vec *total, ivec *most, const DTYPE *x, const long size) {
    vec sum = {0};
    ivec largest = {0};
#pragma GCC unroll 2
    for (long i = 0; i < size; i += LANES) {
        const vec each = NAME(magnitudes)(x + i, size - i);
        sum += each;
        largest = imax(largest, (ivec)each);
    }
    *total = sum, *most = largest;
}

/* Writes a block's bytes; returns the sums of each lane. */
INLINE ivec NAME(round_block)(
    uint8_t *bytes, const DTYPE *x, vec inverse, const long size, const long code_bits) {
    const long padded = round_up(size, k_per_line(code_bits));
    ivec sum = {0};
#pragma GCC unroll 2
    for (long i = 0; i < size; i += LANES) {
        const ivec rounded = round_to_int(NAME(load_up_to)(x + i, size - i) * inverse);
        bvec ordered = to_bytes(rounded);
        if (code_bits == 4) ordered = order_as_nibbles(ordered);
        memcpy(bytes + i, &ordered, padded - i >= LANES ? LANES : padded - i);
        sum += rounded;
    }
    return sum;
}

/* The magnitude, as its bits, of each block's largest number but for outliers, which are listed from *found on;
 * their blocks' places become `rest`, where they are zeros. */
INLINE ivec NAME(largest_of_blocks)(
    const struct quantize_blocks_args *a, struct NAME(row_blocks) *blocks, DTYPE (*rest)[MAX_OUTLIER_BLOCK],
    long *found, const long size) {
    vec totals[LANES], sizes = splat((float)size);
    ivec most[LANES];
    for (long block = 0; block < blocks->num; block++) {
        const long own_size = NAME(size_of_block)(blocks, block, size);
        if (own_size == size) NAME(look_at_block)(totals + block, most + block, blocks->at[block], size);
        else NAME(look_at_block)(totals + block, most + block, blocks->at[block], own_size);
    }
    for (long block = blocks->num; block < LANES; block++) totals[block] = (vec){0}, most[block] = (ivec){0};
    union iparts largest = {imax_of_each(most)};
    if (!a->outlier_columns) return largest.all;
    sizes[blocks->num - 1] = (float)blocks->last_size;
    const vec large = splat(5.0f) * sum_of_each(totals) / sizes;
    const uint32_t has_large = at_least(large, (vec)largest.all) ^ ((1 << LANES) - 1);
    for (long block = 0; block < blocks->num; block++) {
        if (!(has_large >> block & 1)) continue;
        const long own_size = NAME(size_of_block)(blocks, block, size);
        const long last = NAME(take_outliers)(
            rest[block], a, *found, blocks->at[block], blocks->start + block * size, own_size,
            ((vec)largest.all)[block], large[block]);
        if (last == *found) continue;
        *found = last;
        blocks->at[block] = rest[block];
        const float left = NAME(largest_magnitude)(rest[block], own_size);
        memcpy((char *)&largest + block * sizeof left, &left, sizeof left);
    }
    return largest.all;
}

/* Writes the bytes of blocks, each times a number of `inverses`; returns their sums. */
INLINE ivec NAME(round_blocks)(
    uint8_t *bytes, const struct NAME(row_blocks) *blocks, vec inverses, const long size, const long code_bits) {
    float each[LANES];
    memcpy(each, &inverses, sizeof each);
    ivec sums[LANES];
    for (long block = 0; block < blocks->num; block++, bytes += size) {
        const long own_size = NAME(size_of_block)(blocks, block, size);
        const vec inverse = splat(each[block]);
        if (own_size == size) sums[block] = NAME(round_block)(bytes, blocks->at[block], inverse, size, code_bits);
        else sums[block] = NAME(round_block)(bytes, blocks->at[block], inverse, own_size, code_bits);
    }
    for (long block = blocks->num; block < LANES; block++) sums[block] = (ivec){0};
    return isum_of_each(sums);
}

INLINE void NAME(quantize_row_by)(
    const struct quantize_blocks_args *a, long row, const long size, const long code_bits) {
    const long num_blocks = ceil_div(a->size, size);
    const DTYPE *x = (const DTYPE *)a->x + row * a->size;
    uint8_t *bytes = a->bytes + row * round_up(a->size, k_per_line(code_bits));
    DTYPE rest[LANES][MAX_OUTLIER_BLOCK];
    long found = row * a->most_outliers;
    for (long first = 0; first < num_blocks; first += LANES) {
        const long at = row * num_blocks + first;
        struct NAME(row_blocks) blocks = {.start = first * size};
        blocks.num = num_blocks - first < LANES ? num_blocks - first : LANES;
        const long last = blocks.start + (blocks.num - 1) * size;
        blocks.last_size = a->size - last < size ? a->size - last : size;
        for (long i = 0; i < blocks.num; i++) blocks.at[i] = x + blocks.start + i * size;
        const vec largest = (vec)NAME(largest_of_blocks)(a, &blocks, rest, &found, size);
        const vec scales = largest / splat(127.0f);
        const ivec sums = NAME(round_blocks)(bytes + blocks.start, &blocks, inverse_scales(largest), size, code_bits);
        const uvec starts = (uvec)sums * (uint32_t)-a->zero; /* of what is not finite a sum is any number */
        const vec float_sums = scales * __builtin_convertvector(sums, vec);
        memcpy(a->scales + at, &scales, blocks.num * sizeof(float));
        memcpy(a->sums + at, &starts, blocks.num * sizeof(float));
        if (a->float_sums) memcpy(a->float_sums + at, &float_sums, blocks.num * sizeof(float));
    }
    if (a->outlier_columns) a->outlier_columns[found] = -1;
}

static void NAME(quantize_row)(const void *args, long row) {
    const struct quantize_blocks_args *a = args;
    if (a->columns_per_scale == 32 && a->code_bits == 8) NAME(quantize_row_by)(a, row, 32, 8);
    else if (a->columns_per_scale == 32) NAME(quantize_row_by)(a, row, 32, 4);
    else NAME(quantize_row_by)(a, row, a->columns_per_scale, a->code_bits);
}

struct job NAME(quantize_blocks)(const void *args) {
    return (struct job){NAME(quantize_row), args, *((const struct quantize_blocks_args *)args)->num_rows, 0};
}

static void NAME(sum_blocks_row)(const void *args, long row) {
    const struct sum_blocks_args *a = args;
    const long num_blocks = ceil_div(a->size, a->columns_per_scale);
    const DTYPE *x = (const DTYPE *)a->x + row * a->size;
    for (long block = 0, i = 0; block < num_blocks; block++) {
        const long end = i + a->columns_per_scale < a->size ? i + a->columns_per_scale : a->size;
        vec sum = {0};
        for (; i + LANES <= end; i += LANES) sum += LOAD(x + i);
        float total = sum_lanes(sum);
        for (; i < end; i++) total += GET(x + i);
        a->sums[row * num_blocks + block] = total;
    }
}

struct job NAME(sum_blocks)(const void *args) {
    return (struct job){NAME(sum_blocks_row), args, *((const struct sum_blocks_args *)args)->num_rows, 0};
}

/* y[r, i] = x[r, indices[i]] */
static void NAME(permute_columns_row)(const void *args, long row) {
    const struct permute_columns_args *a = args;
    const DTYPE *x = (const DTYPE *)a->x + row * a->size;
    DTYPE *y = (DTYPE *)a->y + row * a->size;
    for (long i = 0; i < a->size; i++) y[i] = x[a->indices[i]];
}

struct job NAME(permute_columns)(const void *args) {
    return (struct job){NAME(permute_columns_row), args, *((const struct permute_columns_args *)args)->num_rows, 0};
}

/* y[r, i] = x[r, i] · factors[i] */
static void NAME(scale_columns_row)(const void *args, long row) {
    const struct scale_columns_args *a = args;
    const DTYPE *x = (const DTYPE *)a->x + row * a->size;
    DTYPE *y = (DTYPE *)a->y + row * a->size;
    for (long i = 0; i < a->size; i++) PUT(y + i, GET(x + i) * a->factors[i]);
}

struct job NAME(scale_columns)(const void *args) {
    return (struct job){NAME(scale_columns_row), args, *((const struct scale_columns_args *)args)->num_rows, 0};
}

/* --- products -------------------------------------------------------------------------------- */

/* table[code] of each byte, or the codes themselves */
INLINE uvec_part codes_or_entries(uvec_part codes, bvec table, int has_table) {
    if (!has_table) return codes;
#if defined(__AVX512BW__)
    return (uvec_part)_mm512_shuffle_epi8(_mm512_broadcast_i32x4((__m128i)table), (__m512i)codes);
#elif defined(__AVX2__)
    return (uvec_part)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256((__m128i)table), (__m256i)codes);
#else
    uint8_t bytes[PART_BYTES];
    memcpy(bytes, &codes, sizeof bytes);
    for (int i = 0; i < PART_BYTES; i++) bytes[i] = table[bytes[i]];
    memcpy(&codes, bytes, sizeof bytes);
    return codes;
#endif
}

/* What is prefetched while a group is multiplied: `lines` with each step, a block or a line of one. */
struct ahead {
    const char *at, *end;
    int lines;
};

/* The tiles of a group share the lines of the next one; a single one reads ahead of itself. */
INLINE struct ahead read_ahead(
    const struct linear_quantized_args *a, long group, long num_tiles, long step_bytes, long group_bytes) {
    const char *start = (const char *)a->linear.weight + group * group_bytes, *end = start + 2 * group_bytes;
    const long lines = ceil_div(step_bytes, LINE_BYTES);
    if (num_tiles == 1) return (struct ahead){start + AHEAD_BYTES, end, (int)lines};
    return (struct ahead){start + group_bytes, end, (int)ceil_div(lines, num_tiles)};
}

INLINE void prefetch_step(struct ahead *ahead) {
    for (int i = 0; i < ahead->lines; i++, ahead->at += LINE_BYTES) __builtin_prefetch(ahead->at, 0, 2);
}

/* sums += the products of a block, in integers */
INLINE const char *NAME(add_byte_products)(
    uvec_part *sums, const uint8_t *x, long stride, const char *w, long num_lines, struct ahead *ahead,
    bvec table, const int has_table, const int rows, const int code_bits) {
    enum { PARTS = GROUP * NUM_PARTS };
#pragma GCC unroll 8
    for (long k = 0; k < num_lines; k++, w += GROUP * LINE_BYTES) {
        uvec_part lines[PARTS];
#pragma GCC unroll 8
        for (int i = 0; i < PARTS; i++) memcpy(&lines[i], w + i * PART_BYTES, PART_BYTES);
        if (ahead) prefetch_step(ahead);
#pragma GCC unroll 2
        for (int half = 0; half < 8 / code_bits; half++) {
            uvec_part codes[PARTS];
#pragma GCC unroll 8
            for (int i = 0; i < PARTS; i++)
                codes[i] = code_bits == 8 ? lines[i]
                                          : codes_or_entries(lines[i] >> 4 * half & 0x0f0f0f0f, table, has_table);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                uint32_t quad;
                memcpy(&quad, x + r * stride + k * k_per_line(code_bits) + half * QUAD, sizeof quad);
#pragma GCC unroll 8
                for (int i = 0; i < PARTS; i++) {
                    const uvec_part sum = sums[r * PARTS + i], quads = quad - (uvec_part){0};
                    sums[r * PARTS + i] = code_bits == 4 && !has_table ? dot_small_quads(sum, codes[i], quads)
                                                                       : dot_quads(sum, codes[i], quads);
                }
            }
        }
    }
    return w;
}

/* sums += the products of a block, in float */
INLINE const char *NAME(add_float_products)(
    vec_part *sums, const struct quantized_format *f, const DTYPE *x, long stride, const char *w, long num_lines,
    struct ahead *ahead, const nibble_table *table, const int rows, const int code_bits) {
    enum { PARTS = GROUP * NUM_PARTS };
    const int num_k = 32 / code_bits;
    for (long line = 0; line < num_lines; line++, w += GROUP * LINE_BYTES) {
        uvec_part lines[PARTS];
#pragma GCC unroll 8
        for (int i = 0; i < PARTS; i++) memcpy(&lines[i], w + i * PART_BYTES, PART_BYTES);
        if (ahead) prefetch_step(ahead);
#pragma GCC unroll 8
        for (int step = 0; step < num_k / PAIR; step++) {
            NAME(weights) weights[PARTS];
#pragma GCC unroll 8
            for (int i = 0; i < PARTS; i++) weights[i] = NAME(decode)(f, lines[i], step, table, code_bits);
            NAME(add_products)(sums, x + line * num_k + step * PAIR, stride, weights, rows, PARTS);
        }
    }
    return w;
}

/* Rows of a group, [row][panel]. */
static __attribute__((noinline)) void NAME(write_quantized_rows)(
    const struct linear_quantized_args *a, long row, long end, long group, const union parts *sums,
    const float *factors) {
    const long column = group * GROUP_LANES;
    if (!pool_claim()) return;
    for (; row < end; row++)
        for (long v = 0; v < GROUP; v++, sums++) {
            const union parts scaled = {sums->all * load_f32(factors + v * LANES)};
            if (column + v * LANES < a->linear.out_features)
                NAME(write_columns)(&a->linear, row, column + v * LANES, &scaled);
        }
    pool_release();
}

/* totals += the products of a block times its scales, from the registers that hold them. */
INLINE void NAME(add_block)(
    const struct linear_quantized_args *a, const struct quantized_format *f, vec_part *totals,
    const uvec_part *sums, const vec_part *float_sums, long row, const int rows, long block, long num_blocks,
    const char *scales, const int is_exact) {
    enum { PARTS = GROUP * NUM_PARTS };
    const char *offsets = scales + GROUP_LANES * (f->is_half ? 2 : 4);
    vec_part factors[PARTS];
#pragma GCC unroll 8
    for (int i = 0; i < PARTS; i++) factors[i] = load_scales(scales, i, f->is_half);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        const vec_part x_scale =
            is_exact ? (vec_part){0} : splat_part(a->x_scales[(row + r) * num_blocks + block]);
#pragma GCC unroll 8
        for (int i = 0; i < PARTS; i++) {
            const int at = r * PARTS + i;
            if (is_exact) totals[at] += float_sums[at] * factors[i];
            else totals[at] += float_of_ints(sums[at]) * (x_scale * factors[i]);
        }
    }
    if (!f->has_offsets) return;
#pragma GCC unroll 8
    for (int i = 0; i < PARTS; i++) factors[i] = load_scales(offsets, i, f->is_half);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        const vec_part x_sum = splat_part(a->x_float_sums[(row + r) * num_blocks + block]);
#pragma GCC unroll 8
        for (int i = 0; i < PARTS; i++) totals[r * PARTS + i] -= x_sum * factors[i];
    }
}

/* totals += a row's outliers times their columns of the group whose blocks are given. A thread that comes late to what
 * another has done may find the list of a later, wider matrix: its columns end the loop, and the results are dropped. */
static __attribute__((noinline)) void NAME(add_outliers)(
    const struct quantized_format *f, const struct quantized_layout *layout, union parts *totals,
    const int32_t *columns, const float *values, const long size, const char *blocks, bvec table,
    const int code_bits) {
    enum { PARTS = GROUP * NUM_PARTS };
    const long per_line = k_per_line(code_bits), scales_size = layout->scales * (f->has_offsets ? 2 : 1);
    for (long n = 0, column; (column = columns[n]) >= 0 && column < size; n++) {
        const long block = column / f->columns_per_scale, line = column / per_line;
        const char *scales = blocks + block * (scales_size + f->columns_per_scale / per_line * GROUP * LINE_BYTES);
        const char *w = blocks + (block + 1) * scales_size + line * GROUP * LINE_BYTES;
        const int k = column % per_line, shift = code_bits == 4 ? nibble_shift(k) : 8 * k;
#pragma GCC unroll 8
        for (int i = 0; i < PARTS; i++) {
            uvec_part codes;
            memcpy(&codes, w + i * PART_BYTES, PART_BYTES);
            codes = codes >> shift & (code_bits == 4 ? 0xf : 0xff);
            if (code_bits == 4) codes = codes_or_entries(codes, table, f->table != NULL) & 0xff;
            vec_part number = float_of_ints(codes - (uint32_t)f->zero) * load_scales(scales, i, f->is_half);
            if (f->has_offsets) number -= load_scales(scales + layout->scales, i, f->is_half);
            totals[i / NUM_PARTS].part[i % NUM_PARTS] += number * splat_part(values[n]);
        }
    }
}

INLINE void NAME(add_outliers_of_rows)(
    const struct linear_quantized_args *a, long row, long end, const struct quantized_layout *layout, const char *w,
    bvec table, union parts *results, const int code_bits) {
    for (; a->outlier_columns && row < end; row++, results += GROUP) {
        const long list = row * a->most_outliers;
        if (a->outlier_columns[list] >= 0)
            NAME(add_outliers)(
                &a->format, layout, results, a->outlier_columns + list, a->outlier_values + list,
                a->linear.in_features, w, table, code_bits);
    }
}

/* Of products of a block: minus `zero` times the sum of x. */
INLINE void NAME(start_sums)(uvec_part *sums, const int32_t *x_sums, long stride, const int rows) {
    enum { PARTS = GROUP * NUM_PARTS };
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        const uvec_part start = usplat_part((uint32_t)x_sums[r * stride]);
#pragma GCC unroll 8
        for (int i = 0; i < PARTS; i++) {
            sums[r * PARTS + i] = start;
            KEEP_IN_REGISTER(sums[r * PARTS + i]);
        }
    }
}

/* results = `rows` rows of bytes times a group, where blocks are of 32, all of them whole, with scales in half
 * precision, and codes need no table: as in most files and in penstock's own rounding. */
INLINE void NAME(common_byte_tile)(
    const struct linear_quantized_args *a, long row, const char *w, struct ahead *rest, union parts *results,
    const int rows, const int code_bits) {
    enum { PARTS = GROUP * NUM_PARTS };
    struct ahead ahead = *rest;
    const long in = a->linear.in_features, num_blocks = in / 32, has_offsets = a->format.has_offsets;
    const long at = row * num_blocks;
    const uint8_t *x = (const uint8_t *)a->linear.x + row * in;
    vec_part totals[QUANTIZED_ROWS * PARTS];
#pragma GCC unroll 32
    for (int i = 0; i < rows * PARTS; i++) totals[i] = (vec_part){0};
    for (long block = 0; block < num_blocks; block++, x += 32) {
        const f16 *scales = (const f16 *)w;
        w += GROUP_LANES * 2 * (has_offsets ? 2 : 1);
        uvec_part sums[QUANTIZED_ROWS * PARTS];
        NAME(start_sums)(sums, a->x_sums + at + block, num_blocks, rows);
        prefetch_step(&ahead);
        w = NAME(add_byte_products)(sums, x, in, w, code_bits, NULL, (bvec){0}, 0, rows, code_bits);
#pragma GCC unroll 32
        for (int i = 0; i < rows * PARTS; i++) KEEP_IN_REGISTER(sums[i]);
        vec_part factors[PARTS];
#pragma GCC unroll 8
        for (int i = 0; i < PARTS; i++) factors[i] = load_part_f16(scales + i * PART_LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const vec_part x_scale = splat_part(a->x_scales[at + r * num_blocks + block]);
#pragma GCC unroll 8
            for (int i = 0; i < PARTS; i++)
                totals[r * PARTS + i] += float_of_ints(sums[r * PARTS + i]) * (x_scale * factors[i]);
        }
        if (!has_offsets) continue;
#pragma GCC unroll 8
        for (int i = 0; i < PARTS; i++) factors[i] = load_part_f16(scales + GROUP_LANES + i * PART_LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const vec_part x_sum = splat_part(a->x_float_sums[at + r * num_blocks + block]);
#pragma GCC unroll 8
            for (int i = 0; i < PARTS; i++) totals[r * PARTS + i] -= x_sum * factors[i];
        }
    }
    *rest = ahead;
#pragma GCC unroll 32
    for (int i = 0; i < rows * PARTS; i++) results[i / NUM_PARTS].part[i % NUM_PARTS] = totals[i];
}

/* The same of any blocks, and rows in bytes or exact; is_common: rows are exact, but blocks as above. */
INLINE void NAME(quantized_tile)(
    const struct linear_quantized_args *a, long row, const char *w, struct ahead *rest, union parts *results,
    const int rows, const int code_bits, const int is_exact, const int is_common) {
    struct ahead ahead = *rest;
    enum { PARTS = GROUP * NUM_PARTS };
    struct quantized_format f = a->format;
    if (is_common) f.columns_per_scale = 32, f.is_half = 1;
    const long in = a->linear.in_features;
    const struct quantized_layout layout = quantized_layout(&f, in, code_bits);
    const long stride = is_exact ? in : round_up(in, layout.k_per_line);
    bvec byte_table = {0};
    vec float_table = {0};
    if (!is_exact && f.table) memcpy(&byte_table, f.table, sizeof byte_table);
    if (is_exact && f.table) memcpy(&float_table, f.table, sizeof float_table);
    const nibble_table table = make_nibble_table(float_table);
    vec_part totals[QUANTIZED_ROWS * PARTS];
#pragma GCC unroll 32
    for (int i = 0; i < rows * PARTS; i++) totals[i] = (vec_part){0};
    for (long block = 0, k = 0; block < layout.num_blocks; block++, k += f.columns_per_scale) {
        const long size = in - k < f.columns_per_scale ? in - k : f.columns_per_scale;
        const long num_lines = ceil_div(size, layout.k_per_line);
        const char *scales = w;
        w += layout.scales * (f.has_offsets ? 2 : 1);
        if (is_exact) {
            vec_part sums[QUANTIZED_ROWS * PARTS];
#pragma GCC unroll 32
            for (int i = 0; i < rows * PARTS; i++) sums[i] = (vec_part){0};
            const DTYPE *x = (const DTYPE *)a->linear.x + row * in + k;
            if (is_common && size == 32) {
                prefetch_step(&ahead);
                w = NAME(add_float_products)(sums, &f, x, in, w, code_bits, NULL, &table, rows, code_bits);
            } else
                w = NAME(add_float_products)(
                    sums, &f, x, in, w, num_lines, is_common ? NULL : &ahead, &table, rows, code_bits);
#pragma GCC unroll 32
            for (int i = 0; i < rows * PARTS; i++) KEEP_IN_REGISTER(sums[i]);
            NAME(add_block)(a, &f, totals, NULL, sums, row, rows, block, layout.num_blocks, scales, 1);
        } else {
            uvec_part sums[QUANTIZED_ROWS * PARTS];
            NAME(start_sums)(sums, a->x_sums + row * layout.num_blocks + block, layout.num_blocks, rows);
            const uint8_t *x = (const uint8_t *)a->linear.x + row * stride + k;
            if (f.table)
                w = NAME(add_byte_products)(sums, x, stride, w, num_lines, &ahead, byte_table, 1, rows, code_bits);
            else
                w = NAME(add_byte_products)(sums, x, stride, w, num_lines, &ahead, byte_table, 0, rows, code_bits);
#pragma GCC unroll 32
            for (int i = 0; i < rows * PARTS; i++) KEEP_IN_REGISTER(sums[i]);
            NAME(add_block)(a, &f, totals, sums, NULL, row, rows, block, layout.num_blocks, scales, 0);
        }
    }
    *rest = ahead;
#pragma GCC unroll 32
    for (int i = 0; i < rows * PARTS; i++) results[i / NUM_PARTS].part[i % NUM_PARTS] = totals[i];
}

INLINE void NAME(tile_of_group)(
    const struct linear_quantized_args *a, long row, const char *w, struct ahead *ahead, union parts *results,
    const int rows, const int code_bits, const int is_exact, const int is_common) {
    if (is_common && !is_exact) NAME(common_byte_tile)(a, row, w, ahead, results, rows, code_bits);
    else NAME(quantized_tile)(a, row, w, ahead, results, rows, code_bits, is_exact, is_common);
}

enum { ROWS_AT_ONCE = 32 }; /* whose results are written together: a multiple of a tile's rows */

/* What is written after the products, without waiting then. */
INLINE void NAME(prefetch_outputs)(const struct linear_args *a, long row, long end, long column) {
    for (; row < end; row++) {
        const DTYPE *y = (const DTYPE *)a->y + row * output_stride(a) + column;
        __builtin_prefetch(y, 1, 3);
        __builtin_prefetch(y + GROUP_LANES - 1, 1, 3);
    }
}

INLINE void NAME(quantized_rows_of_group)(
    const struct linear_quantized_args *a, long row, long end, long group, const int code_bits,
    const int is_exact, const int is_common) {
    const int most = is_exact ? QUANTIZED_ROWS : BYTE_ROWS;
    const struct quantized_format *f = &a->format;
    const struct quantized_layout layout = quantized_layout(f, a->linear.in_features, code_bits);
    const char *start = (const char *)a->linear.weight + group * layout.group, *w = start + GROUP_LANES * 4;
    const long num_tiles = layout.group <= MAX_AHEAD_BYTES ? ceil_div(end - row, most) : 1;
    const long step_bytes = is_common ? layout.group / layout.num_blocks : GROUP * LINE_BYTES;
    struct ahead ahead = read_ahead(a, group, num_tiles, step_bytes, layout.group);
    bvec table = {0};
    if (!is_exact && f->table) memcpy(&table, f->table, sizeof table);
    union parts results[ROWS_AT_ONCE * GROUP];
    while (row < end) {
        const long first = row, last = end - row < ROWS_AT_ONCE ? end : row + ROWS_AT_ONCE;
        union parts *at = results;
        NAME(prefetch_outputs)(&a->linear, first, last, group * GROUP_LANES);
#define TILE(n) NAME(tile_of_group)(a, row, w, &ahead, at, n, code_bits, is_exact, is_common)
        for (; row + most <= last; row += most, at += most * GROUP) {
            TILE(most);
            if (num_tiles == 1) ahead = read_ahead(a, group, 1, step_bytes, layout.group);
            else if (ahead.at >= ahead.end) ahead.lines = 0;
        }
        FEW_ROWS(last - row, most)
#undef TILE
        row = last;
        if (!is_exact) NAME(add_outliers_of_rows)(a, first, last, &layout, w, table, results, code_bits);
        NAME(write_quantized_rows)(a, first, last, group, results, (const float *)start);
    }
}

#ifdef HAS_TILES
/* --- rows of bytes by AMX's tiles --------------------------------------------------------------
 *
 * The numbers are those of the tiles above: integers are exact, and scaled in the same order. So any number of rows
 * may go there, where that is faster: blocks of 32 scale every 32 products, which takes longer than to make them, so
 * that only many rows gain. A span of k becomes signed bytes once for the rows of an item. Its products are made
 * before they are scaled: beside tiles' instructions the processor has one of its two units for floats. */

enum { SPAN_K = 256, MAX_SPAN_BLOCKS = SPAN_K / 32, PANEL_BYTES = SPAN_K * LANES };

/* Codes less `zero` must be signed bytes; those of 8 bits that start at 0 are multiplied as unsigned. */
INLINE int fits_byte_tiles(const struct quantized_format *f, long in, long rows) {
    const long size = f->columns_per_scale, least = size % LINE_BYTES ? 4 * TILE_ROWS : TILE_ROWS;
    return rows >= least && size % 32 == 0 && in % size == 0 && (f->code_bits == 4 || f->zero == 0 || f->zero == 128);
}

/* Blocks, or a part of one that is longer, for all panels. */
struct byte_span {
    long block, num_blocks, block_bytes, k, k_per_block, k_per_tile;
    int starts, ends;           /* its blocks' sums */
    const char *scales, *lines; /* of the first block */
};

INLINE struct byte_span first_byte_span(
    const struct quantized_format *f, const struct quantized_layout *layout, const char *w) {
    const long size = f->columns_per_scale, scales = layout->scales * (f->has_offsets ? 2 : 1);
    struct byte_span span = {.scales = w, .lines = w + scales};
    span.block_bytes = scales + size / layout->k_per_line * GROUP * LINE_BYTES;
    span.k_per_tile = size % LINE_BYTES ? 32 : LINE_BYTES;
    return span;
}

/* The part of the blocks from span->block and span->k on that a span has room for. */
INLINE void limit_byte_span(struct byte_span *span, long size, long num_blocks) {
    const long left = num_blocks - span->block, most = SPAN_K / size > 1 ? SPAN_K / size : 1, k_left = size - span->k;
    span->num_blocks = left < most ? left : most;
    span->k_per_block = k_left < SPAN_K ? k_left : SPAN_K;
    span->starts = span->k == 0;
    span->ends = span->k_per_block == k_left;
}

INLINE void advance_byte_span(struct byte_span *span, const struct quantized_layout *layout, long scale_bytes) {
    if (!span->ends) {
        span->k += span->k_per_block;
        span->lines += span->k_per_block / layout->k_per_line * GROUP * LINE_BYTES;
        return;
    }
    span->k = 0;
    span->block += span->num_blocks;
    span->scales += span->num_blocks * span->block_bytes;
    span->lines = span->scales + scale_bytes;
}

/* bytes [panel][k / 4][16][4] = the codes of a span less `zero` */
INLINE void NAME(decode_byte_span)(
    uint8_t (*bytes)[PANEL_BYTES], const struct quantized_format *f, const struct byte_span *span, bvec table,
    const int code_bits) {
    typedef uint8_t bytes_part __attribute__((vector_size(PART_BYTES)));
    const bytes_part zero = (uint8_t)f->zero - (bytes_part){0};
    const long num_lines = span->k_per_block / k_per_line(code_bits);
    long at = 0;
    for (long block = 0; block < span->num_blocks; block++) {
        const char *lines = span->lines + block * span->block_bytes;
        for (long line = 0; line < num_lines; line++, at += 8 / code_bits * LINE_BYTES)
#pragma GCC unroll 4
            for (long v = 0; v < GROUP; v++, lines += LINE_BYTES) {
                uvec_part codes;
                memcpy(&codes, lines, sizeof codes);
#pragma GCC unroll 2
                for (int half = 0; half < 8 / code_bits; half++) {
                    const uvec_part each =
                        code_bits == 8 ? codes
                                       : codes_or_entries(codes >> 4 * half & 0x0f0f0f0f, table, f->table != NULL);
                    const bytes_part less = (bytes_part)each - zero;
                    memcpy(bytes[v] + at + half * LINE_BYTES, &less, sizeof less);
                }
            }
    }
}

/* sums [block][row] = a tile of rows times a panel's span. A block's are stored after products after it have begun.
 * Registers 0 to 3 hold sums, 6 rows, 7 weights. */
static __attribute__((noinline)) void NAME(multiply_byte_span)(
    uvec_part (*sums)[TILE_ROWS], const uint8_t *x, long stride, const uint8_t *w, const struct byte_span *span,
    int is_unsigned) {
    const long num_blocks = span->num_blocks, k_per_block = span->k_per_block, k_per_tile = span->k_per_tile;
#define MULTIPLY(block, tile) \
    if (block < num_blocks) { \
        if (span->starts) _tile_zero(tile); \
        else _tile_loadd(tile, sums[block], LINE_BYTES); \
        for (long k = 0; k < k_per_block; k += k_per_tile, x += k_per_tile, w += k_per_tile * LANES) { \
            _tile_loadd(6, x, stride); \
            _tile_loadd(7, w, LINE_BYTES); \
            if (is_unsigned) _tile_dpbsud(tile, 6, 7); \
            else _tile_dpbssd(tile, 6, 7); \
        } \
    }
#define STORE_SUMS(block, tile) \
    if (block >= 0 && block < num_blocks) { _tile_stored(tile, sums[block], LINE_BYTES); }
    for (long block = 0; block < num_blocks + 2; block += 4) {
        MULTIPLY(block, 0) MULTIPLY((block + 1), 1)
        STORE_SUMS((block - 2), 2) STORE_SUMS((block - 1), 3)
        MULTIPLY((block + 2), 2) MULTIPLY((block + 3), 3)
        STORE_SUMS(block, 0) STORE_SUMS((block + 1), 1)
    }
#undef STORE_SUMS
#undef MULTIPLY
}

/* results [row][panel] of panel `v` += a span's sums times its blocks' scales, but for the first `skip` rows */
INLINE void NAME(scale_byte_span)(
    const struct linear_quantized_args *a, const struct byte_span *span, uvec_part (*sums)[TILE_ROWS],
    long row, long skip, long v, union parts *results, struct ahead *ahead) {
    const struct quantized_format *f = &a->format;
    const long stride = a->linear.in_features / f->columns_per_scale, at = row * stride + span->block;
    vec_part totals[TILE_ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; r++) totals[r] = results[r * GROUP + v].part[0];
    for (long block = 0; block < span->num_blocks; block++) {
        const char *scales = span->scales + block * span->block_bytes;
        const float *x_scales = a->x_scales + at + block;
        vec_part factors = load_scales(scales, v, f->is_half);
        prefetch_step(ahead);
#pragma GCC unroll 16
        for (int r = 0; r < TILE_ROWS; r++)
            totals[r] += float_of_ints(sums[block][r]) * (splat_part(x_scales[r * stride]) * factors);
        if (!f->has_offsets) continue;
        const float *x_sums = a->x_float_sums + at + block;
        factors = load_scales(scales + GROUP_LANES * (f->is_half ? 2 : 4), v, f->is_half);
#pragma GCC unroll 16
        for (int r = 0; r < TILE_ROWS; r++) totals[r] -= splat_part(x_sums[r * stride]) * factors;
    }
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; r++)
        if (r >= skip) results[r * GROUP + v].part[0] = totals[r];
}

/* Outliers and what follows a product, of a tile whose first `skip` rows are another's. */
INLINE void NAME(finish_byte_tile)(
    const struct linear_quantized_args *a, long row, long skip, long group, const struct quantized_layout *layout,
    bvec table, union parts *results) {
    const char *start = (const char *)a->linear.weight + group * layout->group, *w = start + GROUP_LANES * 4;
    const long first = row + skip, end = row + TILE_ROWS;
    results += skip * GROUP;
    if (a->format.code_bits == 4) NAME(add_outliers_of_rows)(a, first, end, layout, w, table, results, 4);
    else NAME(add_outliers_of_rows)(a, first, end, layout, w, table, results, 8);
    NAME(write_quantized_rows)(a, first, end, group, results, (const float *)start);
}

/* A tile's rows or more by a group. The last tile begins early, so that it is full. */
static __attribute__((noinline)) void NAME(multiply_byte_rows)(
    const struct linear_quantized_args *a, long row, long end, long group) {
    enum { MAX_TILES = ROWS_PER_ITEM / TILE_ROWS };
    enum { MAX_SUMS = MAX_SPAN_BLOCKS > MAX_TILES * GROUP ? MAX_SPAN_BLOCKS : MAX_TILES * GROUP };
    const struct quantized_format *f = &a->format;
    const long in = a->linear.in_features, num_tiles = ceil_div(end - row, TILE_ROWS), last = end - TILE_ROWS;
    const struct quantized_layout layout = quantized_layout(f, in, (int)f->code_bits);
    const char *w = (const char *)a->linear.weight + group * layout.group + GROUP_LANES * 4;
    const long scale_bytes = layout.scales * (f->has_offsets ? 2 : 1);
    const int is_unsigned = f->code_bits == 8 && !f->zero;
    bvec table = {0};
    if (f->table) memcpy(&table, f->table, sizeof table);
    uint8_t bytes[GROUP][PANEL_BYTES] __attribute__((aligned(LINE_BYTES)));
    uvec_part sums[MAX_SUMS][TILE_ROWS]; /* of a span's blocks, or of each tile's panels while a block lasts */
    union parts results[ROWS_PER_ITEM * GROUP];
    memset(results, 0, (end - row) * GROUP * sizeof *results);
    struct byte_span span = first_byte_span(f, &layout, w);
    for (; span.block < layout.num_blocks; advance_byte_span(&span, &layout, scale_bytes)) {
        limit_byte_span(&span, f->columns_per_scale, layout.num_blocks);
        if (f->code_bits == 4) NAME(decode_byte_span)(bytes, f, &span, table, 4);
        else NAME(decode_byte_span)(bytes, f, &span, table, 8);
        const long line_bytes = span.k_per_block / layout.k_per_line * GROUP * LINE_BYTES;
        const long span_bytes = span.num_blocks * (scale_bytes + line_bytes);
        struct ahead ahead = {span.lines + span_bytes, NULL, 0};
        ahead.lines = (int)ceil_div(span_bytes, LINE_BYTES * GROUP * num_tiles * span.num_blocks);
        const int is_last = span.ends && span.block + span.num_blocks == layout.num_blocks;
        BEFORE_TILES();
        for (long i = 0; i < num_tiles; i++) {
            const long next = row + i * TILE_ROWS, at = next < last ? next : last;
            const uint8_t *x = (const uint8_t *)a->linear.x + at * in + span.block * f->columns_per_scale + span.k;
            union parts *own = results + (at - row) * GROUP;
            if (is_last) NAME(prefetch_outputs)(&a->linear, next, at + TILE_ROWS, group * GROUP_LANES);
            for (long v = 0; v < GROUP; v++) {
                uvec_part (*of_panel)[TILE_ROWS] = span.starts && span.ends ? sums : sums + i * GROUP + v;
                NAME(multiply_byte_span)(of_panel, x, in, bytes[v], &span, is_unsigned);
                BEFORE_TILES();
                if (span.ends) NAME(scale_byte_span)(a, &span, of_panel, at, next - at, v, own, &ahead);
            }
            if (is_last) NAME(finish_byte_tile)(a, at, next - at, group, &layout, table, own);
        }
    }
}

/* Rows of bytes by tiles, but for a few that are left; returns the row after them. */
static long NAME(byte_tiles_of_group)(const struct linear_quantized_args *a, long row, long end, long group) {
    configure_tiles_for(TILE_ROWS, a->format.columns_per_scale % LINE_BYTES ? 32 : LINE_BYTES);
    while (end - row >= TILE_ROWS) {
        long last = end - row < ROWS_PER_ITEM ? end : row + ROWS_PER_ITEM;
        const long rest = (last - row) % TILE_ROWS;
        if (rest <= TILE_ROWS / 2) last -= rest;
        NAME(multiply_byte_rows)(a, row, last, group);
        row = last;
    }
    _tile_release();
    return row;
}
#endif

/* The same of any codes and rows. */
static __attribute__((noinline)) void NAME(quantized_rows)(
    const struct linear_quantized_args *a, long row, long end, long group) {
    const struct quantized_format *f = &a->format;
    const int is_exact = !a->x_scales;
#ifdef HAS_TILES
    if (!is_exact && fits_byte_tiles(f, a->linear.in_features, end - row))
        row = NAME(byte_tiles_of_group)(a, row, end, group);
    if (row == end) return;
#endif
    const int is_common =
        f->columns_per_scale == 32 && f->is_half && (is_exact || !(f->table || a->linear.in_features % 32));
#define ROWS(bits, exact, common) \
    if (f->code_bits == bits && is_exact == exact && is_common == common) \
        NAME(quantized_rows_of_group)(a, row, end, group, bits, exact, common);
    ROWS(4, 0, 0) ROWS(4, 0, 1) ROWS(4, 1, 0) ROWS(4, 1, 1)
    ROWS(8, 0, 0) ROWS(8, 0, 1) ROWS(8, 1, 0) ROWS(8, 1, 1)
#undef ROWS
}

/* By tiles, threads take the groups in turn for one part of the rows, which stays in the cache, then for the next;
 * by vectors the parts in turn for one group, which does. */
static void NAME(linear_quantized_item)(const void *args, long item) {
    const struct linear_quantized_args *a = args;
    const long num_rows = *a->linear.num_rows, groups = num_groups(a->linear.out_features);
#ifdef HAS_TILES
    const long row = item / groups * ROWS_PER_ITEM, number = item % groups;
#else
    const long parts = num_row_parts(num_rows), row = item % parts * ROWS_PER_ITEM, number = item / parts;
#endif
    const long end = row + ROWS_PER_ITEM < num_rows ? row + ROWS_PER_ITEM : num_rows;
    if (row < num_rows && number < groups) /* else a late thread's: the next step has fewer rows */
        NAME(quantized_rows)(a, row, end, group_of_item(number, groups));
}

struct job NAME(linear_quantized)(const void *args) {
    const struct linear_args *a = &((const struct linear_quantized_args *)args)->linear;
    return (struct job){
        NAME(linear_quantized_item), args, num_groups(a->out_features) * num_row_parts(*a->num_rows), 1};
}

/* --- packing, and reading single rows back ---------------------------------------------------- */

/* What of a column is in a line of nibbles: 8 codes in its 32 bits. A product moves 4 nibbles, 16 bits from
 * each other, beside each other at the top. */
INLINE uint32_t nibbles_of(const uint8_t *codes) {
    const uint64_t even = 0x000f000f000f000f, beside = 1ull << 48 | 1ull << 36 | 1ull << 24 | 1ull << 12;
    uint64_t bytes;
    memcpy(&bytes, codes, sizeof bytes);
    return (uint32_t)((bytes & even) * beside >> 48 | ((bytes >> 8 & even) * beside >> 48) << 16);
}

static void NAME(pack_quantized_item)(const void *args, long group) {
    const struct pack_quantized_args *a = args;
    const struct quantized_format *f = &a->format;
    const long in = a->in_features, bits = f->code_bits;
    const struct quantized_layout layout = quantized_layout(f, in, bits);
    const long scale_bytes = f->is_half ? 2 : 4;
    for (long n = 0; n < GROUP_LANES && group * GROUP_LANES + n < a->out_features; n++) {
        const long column = group * GROUP_LANES + n;
        const uint8_t *codes = a->codes + column * in;
        char *w = a->packed + group * layout.group;
        memcpy(w + n * 4, a->factors + column, 4);
        w += GROUP_LANES * 4;
        for (long block = 0, k = 0; block < layout.num_blocks; block++) {
            const long at = (column * layout.num_blocks + block) * scale_bytes;
            const long end = k + f->columns_per_scale < in ? k + f->columns_per_scale : in;
            memcpy(w + n * scale_bytes, (const char *)a->scales + at, scale_bytes);
            w += layout.scales;
            if (f->has_offsets) {
                memcpy(w + n * scale_bytes, (const char *)a->offsets + at, scale_bytes);
                w += layout.scales;
            }
            for (; k < end; k += layout.k_per_line, w += GROUP * LINE_BYTES) {
                uint32_t word = 0;
                if (bits == 4 && k + layout.k_per_line <= end)
                    word = nibbles_of(codes + k);
                else
                    for (int i = 0; i < layout.k_per_line && k + i < end; i++)
                        word |= (uint32_t)codes[k + i] << (bits == 4 ? nibble_shift(i) : 8 * i);
                memcpy(w + n * 4, &word, 4);
            }
            k = end;
        }
    }
}

struct job NAME(pack_quantized)(const void *args) {
    return (struct job){
        NAME(pack_quantized_item), args, num_groups(((const struct pack_quantized_args *)args)->out_features), 0};
}

static void NAME(embed_quantized_item)(const void *args, long token) {
    const struct embed_quantized_args *a = args;
    const struct quantized_format *f = &a->format;
    const long id = a->step->token_ids[token] - a->first_id, n = id % GROUP_LANES, bits = f->code_bits;
    if (a->num_ids && (id < 0 || id >= a->num_ids)) {
        memset((DTYPE *)a->y + token * a->size, 0, a->size * sizeof(DTYPE));
        return;
    }
    const struct quantized_layout layout = quantized_layout(f, a->size, bits);
    const char *start = (const char *)a->weight + id / GROUP_LANES * layout.group, *w = start + GROUP_LANES * 4;
    const float factor = ((const float *)start)[n];
    DTYPE *y = (DTYPE *)a->y + token * a->size;
    union parts table = {{0}};
    if (f->table) memcpy(&table, f->table, sizeof table);
    for (long block = 0, k = 0; block < layout.num_blocks; block++) {
        const long end = k + f->columns_per_scale < a->size ? k + f->columns_per_scale : a->size;
        const float scale = load_scales(w, n / PART_LANES, f->is_half)[n % PART_LANES];
        const float offset = f->has_offsets ? load_scales(w + layout.scales, n / PART_LANES, f->is_half)[n % PART_LANES] : 0.0f;
        for (w += layout.scales * (f->has_offsets ? 2 : 1); k < end; k += layout.k_per_line, w += GROUP * LINE_BYTES) {
            uint32_t word;
            memcpy(&word, w + n * 4, sizeof word);
            for (int i = 0; i < layout.k_per_line && k + i < end; i++) {
                const vec_part code = decode_k(f, usplat_part(word), i, &table, bits);
                PUT(y + k + i, (code[0] * scale - offset) * factor);
            }
        }
        k = end;
    }
}

struct job NAME(embed_quantized)(const void *args) {
    return (struct job){
        NAME(embed_quantized_item), args, ((const struct embed_quantized_args *)args)->step->num_tokens, 0};
}
