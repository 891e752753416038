/* The step that all matrix products share, for one DTYPE: rows of x against weights, by parts of a vec.
 *
 * A lane is a column of the product, and PAIR neighbouring k are multiplied at once, as in vdpbf16ps:
 * weights are laid out as [k / PAIR][column][PAIR].
 */

#ifdef DTYPE_PAIRS
typedef uvec_part NAME(weights);

INLINE NAME(weights) NAME(load_weights)(const DTYPE *p) {
    uvec_part pairs;
    memcpy(&pairs, p, sizeof pairs);
    return pairs;
}
#else
typedef vec_part NAME(weights);

INLINE NAME(weights) NAME(load_weights)(const DTYPE *p) { return LOAD_PART(p); }
#endif

/* Values from one part of the weights to the next. */
enum { NAME(part_stride) = PART_LANES * PAIR };

/* sums[r · parts + i] += x[r · stride] · weights[i], for one k (or pair of them) */
INLINE void NAME(add_products)(
    vec_part *sums, const DTYPE *x, long stride, const NAME(weights) *weights, const int rows,
    const int parts) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#ifdef DTYPE_PAIRS
        uint32_t pair;
        memcpy(&pair, x + r * stride, sizeof pair);
#pragma GCC unroll 8
        for (int i = 0; i < parts; i++)
            sums[r * parts + i] = dot_pairs(sums[r * parts + i], usplat_part(pair), weights[i]);
#else
        vec_part value = splat_part(GET(x + r * stride));
#pragma GCC unroll 8
        for (int i = 0; i < parts; i++) sums[r * parts + i] += value * weights[i];
#endif
    }
}

#ifdef HAS_TILES
/* Before tiles are loaded from memory that was just written: GCC does not know that these instructions read it. */
#define BEFORE_TILES() __asm__ volatile("" : : : "memory")

/* Tiles 0 to 6 of so many rows; tile 7, of weights or the like, of all. Of tile 6, which is multiplied by it, so
 * many bytes of k. */
INLINE void configure_tiles_for(int rows, int k_bytes) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.bytes[i] = LINE_BYTES, shape.rows[i] = (uint8_t)rows;
    shape.bytes[6] = (uint16_t)k_bytes, shape.rows[7] = (uint8_t)(k_bytes / 4);
    BEFORE_TILES();
    _tile_loadconfig(&shape);
}

INLINE void configure_tiles(int rows) { configure_tiles_for(rows, LINE_BYTES); }
#endif
