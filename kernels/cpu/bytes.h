/* Vectors of bytes: rounding to them, and their exact products. */
#ifndef PENSTOCK_BYTES_H
#define PENSTOCK_BYTES_H

#include "simd.h"

#include <float.h>

enum { QUAD = 4 }; /* bytes whose products are summed at once */

typedef int16_t short_part __attribute__((vector_size(PART_BYTES)));

/* The larger. */
INLINE ivec imax(ivec a, ivec b) {
    union iparts x = {a}, y = {b};
    for (int i = 0; i < NUM_PARTS; i++) {
        ivec_part mask = x.part[i] > y.part[i];
        x.part[i] = (x.part[i] & mask) | (y.part[i] & ~mask);
    }
    return x.all;
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

/* Signed integers as floats. */
INLINE vec_part float_of_ints(uvec_part x) {
#if defined(__AVX512F__)
    return (vec_part)_mm512_cvtepi32_ps((__m512i)x);
#else
    return __builtin_convertvector((ivec_part)x, vec_part);
#endif
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
/* sum + Σ x[4i + j] · w[4i + j] over j in lane i, bytes of x unsigned, those of w signed. Exact modulo
 * 2^32. */
INLINE uvec_part dot_quads(uvec_part sum, uvec_part x, uvec_part w) {
#if defined(__AVX512VNNI__)
    return (uvec_part)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)w);
#else
    return (uvec_part)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)x, (__m256i)w);
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
