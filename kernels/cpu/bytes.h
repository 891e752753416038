/* Vectors of bytes: rounding to them, and their exact products. */
#ifndef PENSTOCK_BYTES_H
#define PENSTOCK_BYTES_H

#include "simd.h"

#include <float.h>
#include <math.h>

enum { QUAD = 4 }; /* bytes whose products are summed at once */

typedef int16_t short_part __attribute__((vector_size(PART_BYTES)));

/* The larger. */
INLINE ivec imax(ivec a, ivec b) {
#if defined(__AVX512F__)
    return (ivec)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
    union iparts x = {a}, y = {b};
    for (int i = 0; i < NUM_PARTS; i++) {
        ivec_part mask = x.part[i] > y.part[i];
        x.part[i] = (x.part[i] & mask) | (y.part[i] & ~mask);
    }
    return x.all;
#endif
}

/* To the nearest integer, ties to even; arbitrary for NaN and infinity. */
INLINE ivec round_to_int(vec x) {
#if defined(__AVX512F__)
    return (ivec)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    union parts from = {x};
    union iparts to;
    for (int i = 0; i < NUM_PARTS; i++) to.part[i] = (ivec_part)_mm256_cvtps_epi32((__m256)from.part[i]);
    return to.all;
#elif defined(__aarch64__)
    union parts from = {x};
    union iparts to;
    for (int i = 0; i < NUM_PARTS; i++) to.part[i] = (ivec_part)vcvtnq_s32_f32((float32x4_t)from.part[i]);
    return to.all;
#else
    ivec to;
    for (int lane = 0; lane < LANES; lane++) to[lane] = (int32_t)__builtin_lrintf(x[lane]);
    return to;
#endif
}

/* Of a row whose largest magnitude this is; 0 where it is zero, NaN, or too small for a quotient. */
INLINE float inverse_scale(float largest) {
    const float inverse = 127.0f / largest;
    return inverse <= FLT_MAX ? inverse : 0.0f;
}

/* The same of each lane. */
INLINE vec inverse_scales(vec largest) {
    const vec inverse = splat(127.0f) / largest;
    return choose(is_above(splat((float)INFINITY), inverse), inverse, splat(0.0f));
}

/* The low byte of each lane. */
INLINE bvec to_bytes(ivec x) {
#if defined(__AVX512F__)
    return (bvec)_mm512_cvtepi32_epi8((__m512i)x);
#else
    return __builtin_convertvector(x, bvec);
#endif
}

INLINE int32_t isum_lanes(ivec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += x[lane];
    return sum;
#endif
}

INLINE int32_t imax_lanes(ivec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)x);
#else
    int32_t largest = x[0];
    for (int lane = 1; lane < LANES; lane++) largest = x[lane] > largest ? x[lane] : largest;
    return largest;
#endif
}

/* Lane i of the result: op over the lanes of v[i], in the order of sum_lanes. v is overwritten. */
#if defined(__AVX512F__)
#define FOLD(op, a, b, low, high) op(__builtin_shufflevector(a, b, low), __builtin_shufflevector(a, b, high))
#define OF_16_LOW 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define OF_16_HIGH 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define OF_8_LOW 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define OF_8_HIGH 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
#define OF_4_LOW 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29
#define OF_4_HIGH 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31
#define OF_2_LOW 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define OF_2_HIGH 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define OVER_EACH(name, type, op, over_one) \
    INLINE type name(type *v) { \
        for (int i = 0; i < 8; i++) v[i] = FOLD(op, v[2 * i], v[2 * i + 1], OF_16_LOW, OF_16_HIGH); \
        for (int i = 0; i < 4; i++) v[i] = FOLD(op, v[2 * i], v[2 * i + 1], OF_8_LOW, OF_8_HIGH); \
        for (int i = 0; i < 2; i++) v[i] = FOLD(op, v[2 * i], v[2 * i + 1], OF_4_LOW, OF_4_HIGH); \
        return FOLD(op, v[0], v[1], OF_2_LOW, OF_2_HIGH); \
    }
#else
#define OVER_EACH(name, type, op, over_one) \
    INLINE type name(type *v) { \
        type all = {0}; \
        for (int i = 0; i < LANES; i++) all[i] = over_one(v[i]); \
        return all; \
    }
#endif
#define SUM(a, b) ((a) + (b))
OVER_EACH(sum_of_each, vec, SUM, sum_lanes)
OVER_EACH(isum_of_each, ivec, SUM, isum_lanes)
OVER_EACH(imax_of_each, ivec, imax, imax_lanes)

/* Signed integers as floats. */
INLINE vec_part float_of_ints(uvec_part x) {
#if defined(__AVX512F__)
    return (vec_part)_mm512_cvtepi32_ps((__m512i)x);
#else
    return __builtin_convertvector((ivec_part)x, vec_part);
#endif
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
/* sum + Σ x[4i + j] · w[4i + j] over j in lane i, bytes of x unsigned, those of w signed. Exact modulo
 * 2^32. */
INLINE uvec_part dot_quads(uvec_part sum, uvec_part x, uvec_part w) {
#if defined(__AVX512VNNI__)
    return (uvec_part)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)w);
#elif defined(__AVXVNNI__)
    return (uvec_part)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)x, (__m256i)w);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return (uvec_part)vusdotq_s32((int32x4_t)sum, (uint8x16_t)x, (int8x16_t)w);
#else /* both signed: x - 128, and 128 times the sum of w */
    const int32x4_t sum_of_w = vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), (int8x16_t)w);
    const int8x16_t less = (int8x16_t)(x ^ 0x80808080);
    return (uvec_part)vdotq_s32((int32x4_t)sum, less, (int8x16_t)w) + ((uvec_part)sum_of_w << 7);
#endif
}

INLINE uvec_part dot_small_quads(uvec_part sum, uvec_part x, uvec_part w) { return dot_quads(sum, x, w); }
#else
/* sum + a[2i] · b[2i] + a[2i + 1] · b[2i + 1] in lane i */
INLINE uvec_part add_pairs(uvec_part sum, short_part a, short_part b) {
#if defined(__AVX512F__)
    return sum + (uvec_part)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return sum + (uvec_part)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    uvec_part first = (uvec_part)(((ivec_part)a << 16 >> 16) * ((ivec_part)b << 16 >> 16));
    return sum + first + (uvec_part)(((ivec_part)a >> 16) * ((ivec_part)b >> 16));
#endif
}

/* Bytes as pairs of 16 bits, even ones and odd ones: 8 bits cannot hold a sum of products, and the
 * instruction that adds pairs of bytes saturates at 16. */
INLINE uvec_part dot_quads(uvec_part sum, uvec_part x, uvec_part w) {
    short_part w_even = (short_part)(w << 8) >> 8, w_odd = (short_part)w >> 8;
    sum = add_pairs(sum, (short_part)(x & 0x00ff00ff), w_even);
    return add_pairs(sum, (short_part)(x >> 8 & 0x00ff00ff), w_odd);
}

/* The same of x that are at most 128: their pairs do not saturate. */
INLINE uvec_part dot_small_quads(uvec_part sum, uvec_part x, uvec_part w) {
    const short_part ones = (short_part){0} + 1;
#if defined(__AVX512BW__)
    return add_pairs(sum, (short_part)_mm512_maddubs_epi16((__m512i)x, (__m512i)w), ones);
#elif defined(__AVX2__)
    return add_pairs(sum, (short_part)_mm256_maddubs_epi16((__m256i)x, (__m256i)w), ones);
#else
    return (void)ones, dot_quads(sum, x, w);
#endif
}
#endif

#endif
