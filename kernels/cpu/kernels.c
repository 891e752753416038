/* All CPU kernels as one translation unit, for one dtype: -DDTYPE=f32, f16 or b16. With -DVARIANT=name the names
 * of operations end in it: a library that is shipped has several, one for each set of instructions. */
#include "candidates.h"
#include "bytes.h"
#include "ops.h"
#include "pool.h"
#include "ranks.h"
#include "simd.h"

#include <float.h>
#include <math.h>

/* Register tiles: rows × panels of 16 floats must fit into registers. Linear layers use MAX_ROWS
 * rows by GROUP panels, those with quantized weights QUANTIZED_ROWS, adapters LORA_ROWS by two sums;
 * attention up to MAX_PANELS panels with half as many rows. */
#if defined(__AVX512F__)
enum { MAX_ROWS = 8, GROUP = 3, MAX_PANELS = 4, QUANTIZED_ROWS = 8, BYTE_ROWS = 4, LORA_ROWS = 8, BYTE_TILES = 2 };
#elif defined(__AVX2__) || defined(__aarch64__) /* 16 registers of 8 lanes, 32 of 4 */
enum { MAX_ROWS = 6, GROUP = 1, MAX_PANELS = 2, QUANTIZED_ROWS = 4, BYTE_ROWS = 4, LORA_ROWS = 3, BYTE_TILES = 2 };
#else
enum { MAX_ROWS = 2, GROUP = 1, MAX_PANELS = 1, QUANTIZED_ROWS = 2, BYTE_ROWS = 2, LORA_ROWS = 1, BYTE_TILES = 1 };
#endif

/* AMX multiplies b16 sixteen rows at a time, from tiles of registers. */
#if defined(__AMX_BF16__) && defined(DTYPE_PAIRS)
#define HAS_TILES
enum { TILE_ROWS = 16, TILE_K = 32, DENSE_ROWS = TILE_ROWS };
enum { CACHED_BYTES = 1 << 20, ITEMS_PER_THREAD = 4 };
#else
enum { DENSE_ROWS = MAX_ROWS };
#endif

/* Without instructions that multiply b16, or read f16 while they multiply, it is faster to widen weights first
 * where so many rows need them. */
#if !defined(__AVX512F__) && !defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define WIDENS
enum { WIDE_ROWS = 24 };
#endif

enum { ROWS_PER_ITEM = 128 };
/* How far ahead quantized weights are prefetched. */
enum { AHEAD_BYTES = 4096, MAX_AHEAD_BYTES = 384 << 10 };
/* How many positions ahead keys of a byte each are prefetched. */
enum { KEYS_AHEAD = 128 };
/* Other products prefetch the group of weights that their thread takes next: full tiles all of it
 * (`lines_ahead`), fewer rows its first lines. */
enum { LINE_BYTES = 64, SHORT_GROUP_BYTES = 64 << 10, HEAD_LINES = 96 };
enum { MAX_QUERIES = 16, CHUNK = 256, MAX_HEAD_DIM = 256 };
enum { LOGITS_PER_ITEM = 8192 };
enum { SPAN = 512 };          /* tokens of the vocabulary whose weights are summed together */
enum { LORA_AHEAD_BYTES = 1024, LORA_CHUNK = 1024, LORA_COLUMNS = 256, MAX_LORA_RANK = 512 };
#define MIN_TEMPERATURE 1e-30 /* smaller ones would vanish in a float */

#ifdef DTYPE_PAIRS /* b16: values of neighbouring k are multiplied in pairs */
enum { PAIR = 2 };
#else
enum { PAIR = 1 };
#endif

/* sum + x[2i] · w[2i] + x[2i + 1] · w[2i + 1] in lane i, of bfloat16 values */
INLINE vec_part dot_pairs(vec_part sum, uvec_part x, uvec_part w) {
#if defined(__AVX512BF16__)
    return (vec_part)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    const bfloat16x8_t of_x = vreinterpretq_bf16_u32((uint32x4_t)x);
    return (vec_part)vbfdotq_f32((float32x4_t)sum, of_x, vreinterpretq_bf16_u32((uint32x4_t)w));
#else
    sum += (vec_part)(x << 16) * (vec_part)(w << 16);
    return sum + (vec_part)(x & 0xffff0000) * (vec_part)(w & 0xffff0000);
#endif
}

INLINE long ceil_div(long size, long unit) { return (size + unit - 1) / unit; }
INLINE long round_up(long size, long unit) { return ceil_div(size, unit) * unit; }

INLINE long num_panels(long out_features) { return ceil_div(out_features, LANES); }
INLINE long num_groups(long out_features) { return ceil_div(num_panels(out_features), GROUP); }
INLINE long num_row_parts(long num_rows) { return ceil_div(num_rows, ROWS_PER_ITEM); }
INLINE long num_panels_of_group(long out_features, long group) {
    long rest = num_panels(out_features) - group * GROUP;
    return rest < GROUP ? rest : GROUP;
}

/* Threads take items in turn: gives each a contiguous share of the groups, which the processor reads
 * ahead as one stream. */
INLINE long group_of_item(long number, long groups) {
    const long threads = pool_num_threads(), share = groups / threads;
    return number < share * threads ? number % threads * share + number / threads : number;
}

/* TILE(rows) with fewer than `max` rows, a constant in each: the sums need all registers. */
#define CASE_OF_ROWS(n, max) case n: if (n < max) TILE((n < max ? n : 1)); break;
#define FEW_ROWS(rows, max) \
    switch (rows) { CASE_OF_ROWS(1, max) CASE_OF_ROWS(2, max) CASE_OF_ROWS(3, max) CASE_OF_ROWS(4, max) \
                    CASE_OF_ROWS(5, max) CASE_OF_ROWS(6, max) CASE_OF_ROWS(7, max) }

/* How many lines of the next group of weights full tile `i` of `num_full` prefetches with each k. The
 * first tile waits for its own group; if it is the only one it has time for both, and the processor
 * reads ahead by itself in a group that is not short. */
INLINE int lines_ahead(int i, int num_full, long group_bytes) {
    if (num_full == 1) return group_bytes <= SHORT_GROUP_BYTES ? GROUP : 0;
    if (i == 0 || i > GROUP) return 0;
    return (GROUP + num_full - 2) / (num_full - 1);
}

/* Where a key head's part of a block starts in a cache, in its numbers; in int8 a part has a float of scale for
 * each position. */
INLINE long part_start(
    long block, long head, long num_kv_heads, long block_size, long head_dim, int64_t is_int8) {
    const long size = head_dim + (is_int8 ? (long)sizeof(float) : 0);
    return (block * num_kv_heads + head) * block_size * size;
}

/* Blocks lie anywhere, so the processor cannot predict the next reads. */
INLINE void prefetch(const void *p, long num_bytes) {
    for (long i = 0; i < num_bytes; i += LINE_BYTES) __builtin_prefetch((const char *)p + i, 0, 2);
}

INLINE int panels_for(int rows) { return rows <= MAX_ROWS / 2 || MAX_PANELS == 1 ? MAX_PANELS : MAX_PANELS / 2; }

/* cap · tanh(x / cap) */
INLINE vec cap_softly(vec x, float cap) {
    vec power = exp_vec(x * splat(2.0f / cap));
    return splat(cap) * (splat(1.0f) - splat(2.0f) / (power + splat(1.0f)));
}

/* How a sequence's queries are cut into items: up to num_tokens tokens with up to num_heads of the
 * query heads that share a key head; num_parts of these are the whole group. */
struct attention_split {
    long num_tokens, num_heads, num_parts;
};

INLINE struct attention_split split_attention(const struct attention_args *a) {
    long group = a->num_heads / a->num_kv_heads;
    struct attention_split split;
    split.num_heads = group < MAX_QUERIES ? group : MAX_QUERIES;
    split.num_parts = ceil_div(group, split.num_heads);
    split.num_tokens = MAX_QUERIES / split.num_heads;
    return split;
}

INLINE long num_attention_items(
    const struct attention_args *a, const struct attention_split *split, long seq) {
    long num_queries = a->step->query_start_loc[seq + 1] - a->step->query_start_loc[seq];
    long num_tiles = ceil_div(num_queries, split->num_tokens);
    return num_tiles * a->num_kv_heads * split->num_parts;
}

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#ifdef VARIANT
#define NAME(name) JOIN(JOIN(name, DTYPE), VARIANT)
#else
#define NAME(name) JOIN(name, DTYPE)
#endif
#define LOAD(p) JOIN(load, DTYPE)(p)
#define LOAD_PART(p) JOIN(load_part, DTYPE)(p)
#define STORE(p, x) JOIN(store, DTYPE)(p, x)
#define STORE_PART(p, x) JOIN(store_part, DTYPE)(p, x)
#define GET(p) JOIN(get, DTYPE)(p)
#define PUT(p, x) JOIN(put, DTYPE)(p, x)
#define ROUND(x) JOIN(round, DTYPE)(x)
#define ROUND_PART(x) JOIN(round_part, DTYPE)(x)

#define IS_f32 1

/* How many rows take little more than one, for library.py: of dense weights, of quantized ones by rows of bytes,
 * and by exact rows. It is a tile's rows; of bytes two tiles where vectors multiply them, since their weights then
 * come from the cache: with AVX2 8 rows of bytes take 1.2 to 1.6 times as long as one, 4 exact ones 1.5, 8 exact 3. */
const int64_t NAME(verify_rows)[] = {DENSE_ROWS, BYTE_TILES * BYTE_ROWS, QUANTIZED_ROWS};

#include "products.inc.c"
#include "bytes.inc.c"
#include "attention.inc.c"
#include "draw.inc.c"
#include "elementwise.inc.c"
#include "limits.inc.c"
#include "linear.inc.c"
#include "linear_quantized.inc.c"
#include "lora.inc.c"
#include "experts.inc.c"
#include "ranks.inc.c"
#include "sampling.inc.c"

/* Logits that penalties changed are floats, whatever the dtype. */
#if !JOIN(IS, DTYPE)
#undef DTYPE
#define DTYPE f32
#include "sampling.inc.c"
#endif
