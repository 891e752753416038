/* Sixteen lanes of float on any machine, and the three dtypes that reach them.
 *
 * GCC's and Clang's vector extensions lower `vec` to whatever the -m flags allow: one AVX-512
 * register, two of AVX2, four of SSE2 or NEON. Only what they cannot express, the bf16 dot product
 * and half-precision conversion, uses intrinsics, each next to its portable version.
 */
#ifndef PENSTOCK_SIMD_H
#define PENSTOCK_SIMD_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16 };

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef uint16_t hvec __attribute__((vector_size(32)));
typedef uint8_t bvec __attribute__((vector_size(16)));

typedef float f32;
typedef struct { uint16_t bits; } b16; /* bfloat16: the upper half of a float */
typedef struct { uint16_t bits; } f16; /* IEEE half precision */

static const ivec LANE_NUMBERS = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

INLINE vec splat(float x) { return x - (vec){0}; }
INLINE uvec usplat(uint32_t x) { return x - (uvec){0}; }

/* Between two loops' uses of x, so that GCC gives each its own register: with one for all, it keeps x in
 * memory during the inner loop. */
#if defined(__AVX512F__)
#define KEEP_IN_REGISTER(x) __asm__("" : "+v"(x))
#else
#define KEEP_IN_REGISTER(x) ((void)0)
#endif

/* The lanes of `yes` where `mask` is set, those of `no` elsewhere. */
INLINE vec choose(ivec mask, vec yes, vec no) {
    return (vec)((mask & (ivec)yes) | (~mask & (ivec)no));
}

/* A vec in pieces of the registers there are: GCC compares wider ones lane by lane. */
#if defined(__AVX512F__)
enum { PART_BYTES = 64 };
#elif defined(__AVX2__)
enum { PART_BYTES = 32 };
#else
enum { PART_BYTES = 16 };
#endif
enum { NUM_PARTS = 64 / PART_BYTES };
typedef float vec_part __attribute__((vector_size(PART_BYTES)));
typedef int32_t ivec_part __attribute__((vector_size(PART_BYTES)));
union parts { vec all; vec_part part[NUM_PARTS]; };
union iparts { ivec all; ivec_part part[NUM_PARTS]; };

/* a > b, as a mask */
INLINE ivec is_above(vec a, vec b) {
    union parts x = {a}, y = {b};
    union iparts mask;
    for (int i = 0; i < NUM_PARTS; i++) mask.part[i] = x.part[i] > y.part[i];
    return mask.all;
}

/* The larger, and b where either is NaN. */
INLINE vec vmax(vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return choose(is_above(a, b), a, b);
#endif
}

/* --- float --------------------------------------------------------------------------------- */

INLINE vec load_f32(const f32 *p) {
    vec x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE void store_f32(f32 *p, vec x) { memcpy(p, &x, sizeof x); }
INLINE float get_f32(const f32 *p) { return *p; }
INLINE void put_f32(f32 *p, float x) { *p = x; }
INLINE vec round_f32(vec x) { return x; }

/* --- bfloat16: rounds to nearest even (subnormals to zero where the instruction does) -------- */

INLINE vec widen_b16(hvec bits) {
#if defined(__AVX512F__) /* GCC converts in two halves */
    return (vec)((uvec)_mm512_cvtepu16_epi32((__m256i)bits) << 16);
#else
    return (vec)(__builtin_convertvector(bits, uvec) << 16);
#endif
}

INLINE hvec narrow_b16(vec x) {
#if defined(__AVX512BF16__)
    return (hvec)_mm512_cvtneps_pbh((__m512)x);
#else
    uvec bits = (uvec)x;
    uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uvec quiet = (bits >> 16) | 0x40; /* rounding could carry a NaN into an infinity */
    ivec is_nan = x != x;
    return __builtin_convertvector(((uvec)is_nan & quiet) | (~(uvec)is_nan & rounded), hvec);
#endif
}

INLINE vec load_b16(const b16 *p) {
    hvec bits;
    memcpy(&bits, p, sizeof bits);
    return widen_b16(bits);
}
INLINE void store_b16(b16 *p, vec x) {
    hvec bits = narrow_b16(x);
    memcpy(p, &bits, sizeof bits);
}
INLINE float get_b16(const b16 *p) {
    uint32_t bits = (uint32_t)p->bits << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
INLINE void put_b16(b16 *p, float x) { p->bits = narrow_b16(splat(x))[0]; }
INLINE vec round_b16(vec x) { return widen_b16(narrow_b16(x)); }

/* --- half precision ------------------------------------------------------------------------- */

INLINE vec widen_f16(hvec bits) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__F16C__)
    union { hvec all; __m128i part[2]; } half = {bits};
    union { __m256 part[2]; vec all; } full;
    full.part[0] = _mm256_cvtph_ps(half.part[0]);
    full.part[1] = _mm256_cvtph_ps(half.part[1]);
    return full.all;
#else
    /* Shift exponent and mantissa into place; the product moves the bias and mends subnormals. */
    uvec wide = __builtin_convertvector(bits, uvec);
    uvec magnitude = (wide & 0x7fff) << 13;
    uvec is_special = (uvec)((wide & 0x7c00) == 0x7c00); /* infinity or NaN */
    vec scaled = (vec)magnitude * splat(0x1p112f);
    uvec result = (is_special & (magnitude | 0x7f800000)) | (~is_special & (uvec)scaled);
    return (vec)(result | (wide & 0x8000) << 16);
#endif
}

INLINE hvec narrow_f16(vec x) {
#if defined(__AVX512F__)
    return (hvec)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
    union { vec all; __m256 part[2]; } full = {x};
    union { __m128i part[2]; hvec all; } half;
    half.part[0] = _mm256_cvtps_ph(full.part[0], _MM_FROUND_TO_NEAREST_INT);
    half.part[1] = _mm256_cvtps_ph(full.part[1], _MM_FROUND_TO_NEAREST_INT);
    return half.all;
#else
    uvec bits = (uvec)x, sign = (bits >> 16) & 0x8000;
    uvec magnitude = bits & 0x7fffffff;
    uvec is_nan = (uvec)(magnitude > 0x7f800000), is_big = (uvec)(magnitude >= 0x477ff000);
    uvec is_small = (uvec)(magnitude < 0x38800000); /* below 2^-14: subnormal */
    /* Adding 2^-1 aligns a subnormal's last place with the last place of a float, rounded. */
    uvec small = (uvec)((vec)magnitude + splat(0.5f)) - 0x3f000000;
    uvec normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    uvec result = (is_small & small) | (~is_small & normal);
    result = (is_big & 0x7c00) | (~is_big & result);
    result = (is_nan & 0x7e00) | (~is_nan & result);
    return __builtin_convertvector(result | sign, hvec);
#endif
}

INLINE vec load_f16(const f16 *p) {
    hvec bits;
    memcpy(&bits, p, sizeof bits);
    return widen_f16(bits);
}
INLINE void store_f16(f16 *p, vec x) {
    hvec bits = narrow_f16(x);
    memcpy(p, &bits, sizeof bits);
}
INLINE float get_f16(const f16 *p) { return widen_f16((hvec){p->bits})[0]; }
INLINE void put_f16(f16 *p, float x) { p->bits = narrow_f16(splat(x))[0]; }
INLINE vec round_f16(vec x) { return widen_f16(narrow_f16(x)); }

/* --- E4M3: a byte, without infinities ------------------------------------------------------- */

/* Moved into a float's place, and its exponent's bias made up for. */
INLINE vec widen_float8(uvec codes) {
    const uvec magnitude = codes & 0x7f;
    const uvec nan = -(magnitude + 1 >> 7) & 0x7fc00000;
    const vec value = (vec)((codes & 0x80) << 24 | magnitude << 20) * splat(0x1p120f);
    return (vec)((uvec)value | nan);
}

INLINE uvec load_bytes(const uint8_t *p) {
    bvec x;
    memcpy(&x, p, sizeof x);
#if defined(__AVX512F__)
    return (uvec)_mm512_cvtepu8_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, uvec);
#endif
}

/* Signed bytes. */
INLINE vec load_int8(const uint8_t *p) {
    typedef int8_t bytes __attribute__((vector_size(16)));
    bytes x;
    memcpy(&x, p, sizeof x);
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)x));
#else
    return __builtin_convertvector(x, vec);
#endif
}

/* To nearest even, beyond 448 to it. */
INLINE uint8_t narrow_float8(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint8_t)(sign | 0x7f);
    if (magnitude >= 0x43e00000) return (uint8_t)(sign | 0x7e); /* 448 */
    if (magnitude < 0x3c800000) { /* 2^-6: subnormal, in steps of 2^-9, as the sum's last place is */
        float small;
        memcpy(&small, &magnitude, sizeof small);
        small += 0x1p14f;
        memcpy(&bits, &small, sizeof bits);
        return (uint8_t)(sign | (bits - 0x46800000));
    }
    return (uint8_t)(sign | ((magnitude + 0x7ffff + (magnitude >> 20 & 1) >> 20) - (120 << 3)));
}

/* --- over lanes ------------------------------------------------------------------------------ */

INLINE float sum_lanes(vec x) {
    x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    x += __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    return x[0];
}

INLINE float max_lanes(vec x) {
    float best = x[0];
    for (int lane = 1; lane < LANES; lane++) best = x[lane] > best ? x[lane] : best;
    return best;
}

/* Bit i is set where a[i] >= b[i]. */
INLINE uint32_t at_least(vec a, vec b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ);
#else
    union parts x = {a}, y = {b};
    uint32_t bits = 0;
    for (int i = 0; i < NUM_PARTS; i++) {
#if defined(__AVX2__)
        __m256 mask = _mm256_cmp_ps((__m256)x.part[i], (__m256)y.part[i], _CMP_GE_OQ);
        bits |= (uint32_t)_mm256_movemask_ps(mask) << i * 8;
#elif defined(__SSE2__)
        __m128 mask = _mm_cmpge_ps((__m128)x.part[i], (__m128)y.part[i]);
        bits |= (uint32_t)_mm_movemask_ps(mask) << i * 4;
#else
        for (int lane = 0; lane < 4; lane++)
            bits |= (uint32_t)(x.part[i][lane] >= y.part[i][lane]) << (i * 4 + lane);
#endif
    }
    return bits;
#endif
}

/* Write the lanes whose bit is set contiguously to p[0 … LANES - 1], whose rest is overwritten too;
 * returns their number. */
INLINE long compress(float *p, uint32_t bits, vec x) {
#if defined(__AVX512F__)
    store_f32(p, (vec)_mm512_maskz_compress_ps((__mmask16)bits, (__m512)x));
    return __builtin_popcount(bits);
#else
    long count = 0;
    for (int lane = 0; lane < LANES; lane++) {
        p[count] = x[lane];
        count += bits >> lane & 1;
    }
    return count;
#endif
}

/* Lane i of the result is the sum of rows[i]: a tree of 15 joins instead of 16 sums. */
INLINE vec sum_rows(vec rows[LANES]) {
    vec w8[8], w4[4], w2[2];
    for (int i = 0; i < 8; i++) { /* i and i + 8: halves */
        vec a = rows[i], b = rows[i + 8];
        w8[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
    for (int i = 0; i < 4; i++) { /* i and i + 4: quarters */
        vec a = w8[i], b = w8[i + 4];
        w4[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
                __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    }
    for (int i = 0; i < 2; i++) {
        vec a = w4[i], b = w4[i + 2];
        w2[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    return __builtin_shufflevector(w2[0], w2[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           __builtin_shufflevector(w2[0], w2[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

/* e^x to 2 units in the last place for x in [-87.3, 88].
 * Source: Cephes `expf` (Moshier): x = n ln 2 + r, a polynomial of degree 5 in r. */
INLINE vec exp_inside(vec x) {
    vec shifted = x * splat(1.44269504f) + splat(0x1.8p23f); /* rounds to an integer */
    vec n = shifted - splat(0x1.8p23f);
    vec r = x - n * splat(0.693359375f);
    r = r + n * splat(2.12194440e-4f);
    vec p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    ivec power = ((ivec)shifted + (127 - 0x4b400000)) << 23; /* n is in the low bits of `shifted` */
    return p * (vec)power;
}

/* The same for every x: 0 below, e^88 above. */
INLINE vec exp_vec(vec x) {
    ivec is_zero = is_above(splat(-87.3f), x);
    x = choose(is_above(x, splat(88.0f)), splat(88.0f), x);
    return choose(is_zero, splat(0.0f), exp_inside(choose(is_zero, splat(0.0f), x)));
}

#endif
