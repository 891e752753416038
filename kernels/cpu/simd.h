/* Sixteen lanes of float on any machine, and the three dtypes that reach them.
 *
 * GCC's and Clang's vector extensions lower `vec` to whatever the -m flags allow: one AVX-512
 * register, two of AVX2, four of SSE2 or NEON. Where it is wider than a register, GCC keeps it in memory; so
 * matrix products, where nearly all time goes, are written in parts of a register's width. Only what the
 * extensions cannot express, the bf16 dot product and half-precision conversion, uses intrinsics, each next
 * to its portable version.
 */
#ifndef PENSTOCK_SIMD_H
#define PENSTOCK_SIMD_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16 };

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));
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

/* The pieces of a vec that registers hold: GCC compares wider ones lane by lane. */
#if defined(__AVX512F__)
enum { PART_BYTES = 64 };
#elif defined(__AVX2__)
enum { PART_BYTES = 32 };
#else
enum { PART_BYTES = 16 };
#endif
enum { NUM_PARTS = 64 / PART_BYTES, PART_LANES = LANES / NUM_PARTS };
typedef float vec_part __attribute__((vector_size(PART_BYTES)));
typedef int32_t ivec_part __attribute__((vector_size(PART_BYTES)));
typedef uint32_t uvec_part __attribute__((vector_size(PART_BYTES)));
typedef uint16_t hvec_part __attribute__((vector_size(PART_BYTES / 2)));
union parts { vec all; vec_part part[NUM_PARTS]; };
union iparts { ivec all; ivec_part part[NUM_PARTS]; };
union uparts { uvec all; uvec_part part[NUM_PARTS]; };

INLINE vec_part splat_part(float x) { return x - (vec_part){0}; }
INLINE uvec_part usplat_part(uint32_t x) { return x - (uvec_part){0}; }

INLINE vec_part choose_part(ivec_part mask, vec_part yes, vec_part no) {
    return (vec_part)((mask & (ivec_part)yes) | (~mask & (ivec_part)no));
}

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

INLINE vec_part load_part_f32(const f32 *p) {
    vec_part x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE void store_part_f32(f32 *p, vec_part x) { memcpy(p, &x, sizeof x); }
INLINE vec_part round_part_f32(vec_part x) { return x; }

/* --- bfloat16: rounds to nearest even (subnormals to zero where the instruction does) -------- */

INLINE vec_part widen_part_b16(hvec_part bits) {
#if defined(__AVX512F__) /* GCC converts in two halves */
    return (vec_part)((uvec_part)_mm512_cvtepu16_epi32((__m256i)bits) << 16);
#elif defined(__AVX2__)
    return (vec_part)((uvec_part)_mm256_cvtepu16_epi32((__m128i)bits) << 16);
#else
    return (vec_part)(__builtin_convertvector(bits, uvec_part) << 16);
#endif
}

INLINE hvec_part narrow_part_b16(vec_part x) {
#if defined(__AVX512BF16__)
    return (hvec_part)_mm512_cvtneps_pbh((__m512)x);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return (hvec_part)vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)x));
#else
    const uvec_part bits = (uvec_part)x, is_nan = (uvec_part)(x != x);
    const uvec_part rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uvec_part quiet = (bits >> 16) | 0x40; /* rounding could carry a NaN into an infinity */
    const uvec_part narrow = (is_nan & quiet) | (~is_nan & rounded);
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i all = (__m256i)narrow;
    return (hvec_part)_mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
#else
    return __builtin_convertvector(narrow, hvec_part);
#endif
#endif
}

INLINE float get_b16(const b16 *p) {
    uint32_t bits = (uint32_t)p->bits << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
/* --- half precision ------------------------------------------------------------------------- */

INLINE vec_part widen_part_f16(hvec_part bits) {
#if defined(__AVX512F__)
    return (vec_part)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__AVX2__)
    return (vec_part)_mm256_cvtph_ps((__m128i)bits);
#elif defined(__aarch64__)
    return (vec_part)vcvt_f32_f16(vreinterpret_f16_u16((uint16x4_t)bits));
#else
    /* Shift exponent and mantissa into place; the product moves the bias and mends subnormals. */
    uvec_part wide = __builtin_convertvector(bits, uvec_part);
    uvec_part magnitude = (wide & 0x7fff) << 13;
    uvec_part is_special = (uvec_part)((wide & 0x7c00) == 0x7c00); /* infinity or NaN */
    vec_part scaled = (vec_part)magnitude * splat_part(0x1p112f);
    uvec_part result = (is_special & (magnitude | 0x7f800000)) | (~is_special & (uvec_part)scaled);
    return (vec_part)(result | (wide & 0x8000) << 16);
#endif
}

INLINE hvec_part narrow_part_f16(vec_part x) {
#if defined(__AVX512F__)
    return (hvec_part)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
    return (hvec_part)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
    return (hvec_part)vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x));
#else
    uvec_part bits = (uvec_part)x, sign = (bits >> 16) & 0x8000;
    uvec_part magnitude = bits & 0x7fffffff;
    uvec_part is_nan = (uvec_part)(magnitude > 0x7f800000), is_big = (uvec_part)(magnitude >= 0x477ff000);
    uvec_part is_small = (uvec_part)(magnitude < 0x38800000); /* below 2^-14: subnormal */
    /* Adding 2^-1 aligns a subnormal's last place with the last place of a float, rounded. */
    uvec_part small = (uvec_part)((vec_part)magnitude + splat_part(0.5f)) - 0x3f000000;
    uvec_part normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    uvec_part result = (is_small & small) | (~is_small & normal);
    result = (is_big & 0x7c00) | (~is_big & result);
    result = (is_nan & 0x7e00) | (~is_nan & result);
    return __builtin_convertvector(result | sign, hvec_part);
#endif
}

INLINE float get_f16(const f16 *p) { return widen_part_f16((hvec_part){p->bits})[0]; }

/* --- both ----------------------------------------------------------------------------------- */

#define OF_PARTS(type) \
    INLINE vec_part load_part_##type(const type *p) { \
        hvec_part bits; \
        memcpy(&bits, p, sizeof bits); \
        return widen_part_##type(bits); \
    } \
    INLINE void store_part_##type(type *p, vec_part x) { \
        const hvec_part bits = narrow_part_##type(x); \
        memcpy(p, &bits, sizeof bits); \
    } \
    INLINE vec_part round_part_##type(vec_part x) { return widen_part_##type(narrow_part_##type(x)); } \
    INLINE vec load_##type(const type *p) { \
        union parts x; \
        for (int i = 0; i < NUM_PARTS; i++) x.part[i] = load_part_##type(p + i * PART_LANES); \
        return x.all; \
    } \
    INLINE void store_##type(type *p, vec x) { \
        union parts from = {x}; \
        for (int i = 0; i < NUM_PARTS; i++) store_part_##type(p + i * PART_LANES, from.part[i]); \
    } \
    INLINE vec round_##type(vec x) { \
        union parts all = {x}; \
        for (int i = 0; i < NUM_PARTS; i++) all.part[i] = round_part_##type(all.part[i]); \
        return all.all; \
    } \
    INLINE void put_##type(type *p, float x) { p->bits = narrow_part_##type(splat_part(x))[0]; }
OF_PARTS(b16)
OF_PARTS(f16)
#undef OF_PARTS

/* --- E4M3: a byte, without infinities ------------------------------------------------------- */

/* Moved into a float's place, and its exponent's bias made up for. */
INLINE vec_part widen_part_float8(uvec_part codes) {
    const uvec_part magnitude = codes & 0x7f;
    const uvec_part nan = -(magnitude + 1 >> 7) & 0x7fc00000;
    const vec_part value = (vec_part)((codes & 0x80) << 24 | magnitude << 20) * splat_part(0x1p120f);
    return (vec_part)((uvec_part)value | nan);
}

INLINE vec widen_float8(uvec codes) {
    union uparts from = {codes};
    union parts to;
    for (int i = 0; i < NUM_PARTS; i++) to.part[i] = widen_part_float8(from.part[i]);
    return to.all;
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

/* e^x to 2 units in the last place for x in [-87.3, 88].
 * Source: Cephes `expf` (Moshier): x = n ln 2 + r, a polynomial of degree 5 in r. */
INLINE vec_part exp_inside(vec_part x) {
    vec_part shifted = x * splat_part(1.44269504f) + splat_part(0x1.8p23f); /* rounds to an integer */
    vec_part n = shifted - splat_part(0x1.8p23f);
    vec_part r = x - n * splat_part(0.693359375f);
    r = r + n * splat_part(2.12194440e-4f);
    vec_part p = splat_part(1.9875691500e-4f);
    p = p * r + splat_part(1.3981999507e-3f);
    p = p * r + splat_part(8.3334519073e-3f);
    p = p * r + splat_part(4.1665795894e-2f);
    p = p * r + splat_part(1.6666665459e-1f);
    p = p * r + splat_part(5.0000001201e-1f);
    p = p * r * r + r + splat_part(1.0f);
    ivec_part power = ((ivec_part)shifted + (127 - 0x4b400000)) << 23; /* n is in the low bits of `shifted` */
    return p * (vec_part)power;
}

/* The same for every x: 0 below, e^88 above. */
INLINE vec exp_vec(vec x) {
    union parts all = {x};
    for (int i = 0; i < NUM_PARTS; i++) {
        const vec_part each = all.part[i], least = splat_part(-87.3f), most = splat_part(88.0f);
        const ivec_part is_zero = least > each, is_large = each > most;
        const vec_part inside = choose_part(is_zero, splat_part(0.0f), choose_part(is_large, most, each));
        all.part[i] = choose_part(is_zero, splat_part(0.0f), exp_inside(inside));
    }
    return all.all;
}

#endif
