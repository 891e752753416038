/* What this machine can do at most, for one DTYPE: `load/limits.py` runs these beside what it compares. */

enum { READ_BYTES_PER_ITEM = 256 << 10, READ_STREAM_LINES = 4 };

/* Sums all words, four lines at a time: as a product of one row reads its weights, without the product. */
static void NAME(read_words_item)(const void *args, long item) {
    const struct read_words_args *a = args;
    const long items = a->num_bytes / READ_BYTES_PER_ITEM;
    item = group_of_item(item, items);
    const char *from = (const char *)a->words + item * READ_BYTES_PER_ITEM;
    uvec_part sums[READ_STREAM_LINES * NUM_PARTS] = {{0}};
    for (const char *end = from + READ_BYTES_PER_ITEM; from < end; from += sizeof sums) {
        for (int i = 0; i < READ_STREAM_LINES; i++) __builtin_prefetch(from + AHEAD_BYTES + i * LINE_BYTES, 0, 2);
#pragma GCC unroll 16
        for (int i = 0; i < READ_STREAM_LINES * NUM_PARTS; i++) {
            uvec_part words;
            memcpy(&words, from + i * PART_BYTES, sizeof words);
            sums[i] += words;
        }
    }
    int64_t total = 0;
    for (int i = 0; i < READ_STREAM_LINES * NUM_PARTS; i++)
        for (int lane = 0; lane < PART_LANES; lane++) total += sums[i][lane];
    a->sums[item] = total;
}

struct job NAME(read_words)(const void *args) {
    const struct read_words_args *a = args;
    return (struct job){NAME(read_words_item), a, a->num_bytes / READ_BYTES_PER_ITEM, 0};
}

/* The tile of linear.inc.c, again and again with the same rows and weights, which the nearest cache holds; nothing
 * is written. */
enum { LIMIT_IN = 128 };
#ifdef HAS_TILES
enum { LIMIT_ROWS = 2 * TILE_ROWS };
#else
enum { LIMIT_ROWS = MAX_ROWS };
#endif

static void NAME(multiply_tiles_item)(const void *args, long item) {
    const struct multiply_tiles_args *a = args;
    const DTYPE *x = a->x, *w = a->weights;
    (void)x, (void)w; /* not in float */
#ifdef HAS_TILES
    const DTYPE *second = x + TILE_ROWS * LIMIT_IN;
    configure_tiles(TILE_ROWS);
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3); _tile_zero(4); _tile_zero(5);
    for (long i = 0; i < a->num_repeats; i++)
        for (long k = 0; k < LIMIT_IN; k += TILE_K) {
#define LOAD_WEIGHTS(v) _tile_loadd(7, w + (k * GROUP + v * PAIR) * LANES, GROUP * LINE_BYTES)
            _tile_loadd(6, x + k, LIMIT_IN * sizeof(DTYPE));
            LOAD_WEIGHTS(0); _tile_dpbf16ps(0, 6, 7);
            LOAD_WEIGHTS(1); _tile_dpbf16ps(1, 6, 7);
            LOAD_WEIGHTS(2); _tile_dpbf16ps(2, 6, 7);
            _tile_loadd(6, second + k, LIMIT_IN * sizeof(DTYPE));
            _tile_dpbf16ps(5, 6, 7);
            LOAD_WEIGHTS(1); _tile_dpbf16ps(4, 6, 7);
            LOAD_WEIGHTS(0); _tile_dpbf16ps(3, 6, 7);
#undef LOAD_WEIGHTS
        }
    _tile_release();
    a->sums[item] = 0.0f;
#else
    const int parts = GROUP * NUM_PARTS;
    vec_part sums[MAX_ROWS * GROUP * NUM_PARTS];
#pragma GCC unroll 32
    for (int i = 0; i < MAX_ROWS * parts; i++) sums[i] = (vec_part){0};
    for (long i = 0; i < a->num_repeats; i++)
        for (long k = 0; k < LIMIT_IN; k += PAIR) {
#ifdef WIDENS /* then many rows are multiplied in float, whatever the dtype */
            const float *wide_x = a->x, *wide = a->weights;
#pragma GCC unroll 8
            for (int r = 0; r < MAX_ROWS; r++)
#pragma GCC unroll 8
                for (int v = 0; v < parts * PAIR; v++)
                    sums[r * parts + v % parts] += splat_part(wide_x[r * LIMIT_IN + k + v / parts]) *
                                                   load_part_f32(wide + k * GROUP * LANES + v * PART_LANES);
#else
            NAME(weights) weights[GROUP * NUM_PARTS];
#pragma GCC unroll 8
            for (int v = 0; v < parts; v++)
                weights[v] = NAME(load_weights)(w + k * GROUP * LANES + v * NAME(part_stride));
            NAME(add_products)(sums, x + k, LIMIT_IN, weights, MAX_ROWS, parts);
#endif
        }
    vec_part all = sums[0];
#pragma GCC unroll 32
    for (int i = 1; i < MAX_ROWS * parts; i++) all += sums[i];
    a->sums[item] = all[0];
#endif
}

struct job NAME(multiply_tiles)(const void *args) {
    const struct multiply_tiles_args *a = args;
    *a->num_products = a->num_items * a->num_repeats * LIMIT_ROWS * GROUP * LANES * LIMIT_IN;
    return (struct job){NAME(multiply_tiles_item), a, a->num_items, 0};
}
