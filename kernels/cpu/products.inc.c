/* The step that all matrix products share, for one DTYPE: rows of x against vectors of weights.
 *
 * A lane is a column of the product, and PAIR neighbouring k are multiplied at once, as in vdpbf16ps:
 * weights are laid out as [k / PAIR][column][PAIR].
 */

#ifdef DTYPE_PAIRS
typedef uvec NAME(weights);

INLINE NAME(weights) NAME(load_weights)(const DTYPE *p) {
    uvec pairs;
    memcpy(&pairs, p, sizeof pairs);
    return pairs;
}
#else
typedef vec NAME(weights);

INLINE NAME(weights) NAME(load_weights)(const DTYPE *p) { return LOAD(p); }
#endif

/* sums[r · panels + v] += x[r · stride] · weights[v], for one k (or pair of them) */
INLINE void NAME(add_products)(
    vec *sums, const DTYPE *x, long stride, const NAME(weights) *weights, const int rows,
    const int panels) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#ifdef DTYPE_PAIRS
        uint32_t pair;
        memcpy(&pair, x + r * stride, sizeof pair);
#pragma GCC unroll 8
        for (int v = 0; v < panels; v++)
            sums[r * panels + v] = dot_pairs(sums[r * panels + v], usplat(pair), weights[v]);
#else
        vec value = splat(GET(x + r * stride));
#pragma GCC unroll 8
        for (int v = 0; v < panels; v++) sums[r * panels + v] += value * weights[v];
#endif
    }
}
