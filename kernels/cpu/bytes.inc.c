/* Rows rounded to signed bytes, for one DTYPE: byte = value · inverse_scale(largest), value ≈ byte · largest / 127,
 * as in quantize_rows_reference of kernels/reference/linear_quantized.py. */

/* LANES values, with zeros past the last. */
INLINE vec NAME(load_up_to)(const DTYPE *x, long size) {
    if (size >= LANES) return LOAD(x);
    DTYPE last[LANES];
    memset(last, 0, sizeof last);
    memcpy(last, x, size * sizeof(DTYPE));
    return LOAD(last);
}

/* The largest magnitude, by the bits of floats: NaN is above infinity, which is above all others. */
INLINE float NAME(largest_magnitude)(const DTYPE *x, long size) {
    ivec largest = {0};
    for (long i = 0; i < size; i += LANES)
        largest = imax(largest, (ivec)NAME(load_up_to)(x + i, size - i) & 0x7fffffff);
    const int32_t bits = imax_lanes(largest);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* x, a multiple of LANES, as codes; returns their scale. */
INLINE float NAME(encode_int8)(uint8_t *codes, const DTYPE *x, long size) {
    const float largest = NAME(largest_magnitude)(x, size);
    const vec inverse = splat(inverse_scale(largest));
    for (long i = 0; i < size; i += LANES) {
        const bvec bytes = to_bytes(round_to_int(LOAD(x + i) * inverse));
        memcpy(codes + i, &bytes, LANES);
    }
    return largest / 127.0f;
}
