/* The tokens of a row that truncation may keep, and the search for the threshold, without sorting. */
#ifndef PENSTOCK_CANDIDATES_H
#define PENSTOCK_CANDIDATES_H

#include "simd.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

enum { ALL_LANES = 0xffff };
#define LEAST_EXPONENT (-87.0f) /* e to a smaller one would vanish in a float */

typedef float half_vec __attribute__((vector_size(32)));
typedef double dvec __attribute__((vector_size(64)));
struct sums { dvec low, high; }; /* of sixteen lanes */

INLINE dvec widen(half_vec x) {
#if defined(__AVX512F__) /* GCC converts in two halves */
    return (dvec)_mm512_cvtps_pd((__m256)x);
#else
    return __builtin_convertvector(x, dvec);
#endif
}

INLINE void add_lanes(struct sums *sums, vec x) {
    sums->low += widen(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7));
    sums->high += widen(__builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
}

INLINE double total_of(struct sums sums) {
    dvec x = sums.low + sums.high;
    return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7]));
}

/* The lanes of x whose bit is set, 0 elsewhere. */
INLINE vec mask_lanes(uint32_t bits, vec x) {
#if defined(__AVX512F__)
    return (vec)_mm512_maskz_mov_ps((__mmask16)bits, (__m512)x);
#else
    return (vec)((ivec)x & -((int32_t)bits >> LANE_NUMBERS & 1));
#endif
}

/* The lanes of x whose bit is set, those of y elsewhere. */
INLINE vec select_lanes(uint32_t bits, vec x, vec y) {
#if defined(__AVX512F__)
    return (vec)_mm512_mask_mov_ps((__m512)y, (__mmask16)bits, (__m512)x);
#else
    ivec is_set = -((int32_t)bits >> LANE_NUMBERS & 1);
    return (vec)(((ivec)x & is_set) | ((ivec)y & ~is_set));
#endif
}

/* The lanes before the n-th. */
INLINE uint32_t bits_below(long n) { return n < LANES ? (1u << n) - 1 : ALL_LANES; }

/* Logits in vocabulary order, none of them infinite, and which tokens they are of. */
struct candidates {
    float *keys;
    float *ids; /* the bits are an int32_t's */
    long count;
    float *weights;                      /* [count], once weighed */
    float *search_keys, *search_weights; /* a search's own copies */
    double *masses;                      /* for a row without candidates: where keys would be */
};

/* No candidates, and a thread's memory for up to `size` of them: kept for the next row, and mostly
 * untouched. Pointers are null if it cannot be allocated. */
static struct candidates no_candidates(long size) {
    static _Thread_local float *memory;
    static _Thread_local long capacity;
    if (size + 2 * LANES > capacity) {
        capacity = size + 2 * LANES; /* more than vectors write past the last one */
        free(memory);
        memory = malloc(5 * capacity * sizeof *memory);
        if (!memory) capacity = 0;
    }
    if (!memory) return (struct candidates){0};
    return (struct candidates){
        .keys = memory,
        .ids = memory + capacity,
        .weights = memory + 2 * capacity,
        .search_keys = memory + 3 * capacity,
        .search_weights = memory + 4 * capacity,
        .masses = (double *)memory,
    };
}

/* Add the lanes whose bit is set, of the sixteen tokens that start with `first`. */
INLINE void add_candidates(struct candidates *c, uint32_t bits, vec keys, long first) {
    compress(c->ids + c->count, bits, (vec)((int32_t)first + LANE_NUMBERS));
    c->count += compress(c->keys + c->count, bits, keys);
}

/* Drop candidates below the threshold. */
static void keep_candidates(struct candidates *c, float threshold) {
    long count = 0;
    for (long i = 0; i < c->count; i += LANES) {
        vec keys = load_f32(c->keys + i), ids = load_f32(c->ids + i);
        uint32_t bits = at_least(keys, splat(threshold)) & bits_below(c->count - i);
        compress(c->ids + count, bits, ids);
        count += compress(c->keys + count, bits, keys);
    }
    c->count = count;
}

/* Weights of sixteen keys relative to the largest, which weighs 1. */
INLINE vec weights_of(vec keys, float largest, float scale) {
    union parts x = {vmax((keys - splat(largest)) * splat(scale), splat(LEAST_EXPONENT))};
    for (int i = 0; i < NUM_PARTS; i++) x.part[i] = exp_inside(x.part[i]);
    return x.all;
}

/* Compute all weights; returns their sum. */
static double weigh_candidates(struct candidates *c, float largest, float scale) {
    struct sums sums = {0};
    for (long i = 0; i < c->count; i += LANES) {
        vec weights = weights_of(load_f32(c->keys + i), largest, scale);
        weights = mask_lanes(bits_below(c->count - i), weights);
        store_f32(c->weights + i, weights);
        add_lanes(&sums, weights);
    }
    return total_of(sums);
}

/* The first token at which the cumulative weights exceed `target`, which is less than their sum. */
static long find_candidate(const struct candidates *c, double target) {
    double reached = c->weights[0];
    long i = 0;
    while (reached <= target && i < c->count - 1) reached += c->weights[++i];
    int32_t id;
    memcpy(&id, c->ids + i, sizeof id);
    return id;
}

/* --- search --------------------------------------------------------------------------------- */

/* Integers in the order of floats. */
INLINE int32_t order_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits < 0 ? INT32_MIN - bits : bits;
}

INLINE float float_at(int32_t order) {
    int32_t bits = order < 0 ? INT32_MIN - order : order;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* What lies between two floats in their order: the larger where there is nothing. */
INLINE float middle_of(float low, float high) {
    int64_t between = ((int64_t)order_of(low) + order_of(high) + 1) >> 1;
    float middle = float_at((int32_t)between);
    return middle > low ? middle : high;
}

/* The largest key for which the weights of all keys at or above it reach a target; if even all of them
 * do not, the smallest key. Keys are finite; keys and weights are overwritten, up to LANES elements
 * past `count`.
 *
 * Bisection in the order of floats, which keeps only the remaining side: at most 32 rounds over ever
 * fewer keys. */
static float find_threshold(float *keys, float *weights, long count, double target) {
    double above = 0.0; /* weights of keys that have been passed */
    for (;;) {
        for (int lane = 0; lane < LANES; lane++) { /* fill the last vector: with what weighs nothing */
            keys[count + lane] = keys[count - 1];
            weights[count + lane] = 0.0f;
        }
        vec least = load_f32(keys), most = least;
        for (long i = LANES; i < count; i += LANES) {
            vec key = load_f32(keys + i);
            least = -vmax(-least, -key);
            most = vmax(most, key);
        }
        float low = -max_lanes(-least), high = max_lanes(most);
        if (!(low < high)) return high;
        vec pivot = splat(middle_of(low, high));
        struct sums sums = {0};
        for (long i = 0; i < count; i += LANES)
            add_lanes(&sums, mask_lanes(at_least(load_f32(keys + i), pivot), load_f32(weights + i)));
        double reached = above + total_of(sums);
        uint32_t flipped = reached >= target ? 0 : ALL_LANES; /* keep the lanes below the pivot */
        if (flipped) above = reached;
        long kept = 0;
        for (long i = 0; i < count; i += LANES) {
            vec key = load_f32(keys + i), weight = load_f32(weights + i);
            uint32_t bits = at_least(key, pivot) ^ flipped;
            compress(weights + kept, bits, weight);
            kept += compress(keys + kept, bits, key);
        }
        count = kept;
    }
}

/* The k-th largest key, or the least. */
static float find_kth_largest(const struct candidates *c, double k) {
    memcpy(c->search_keys, c->keys, c->count * sizeof *c->keys);
    for (long i = 0; i < c->count; i++) c->search_weights[i] = 1.0f;
    return find_threshold(c->search_keys, c->search_weights, c->count, k);
}

/* The largest key such that it and those above it weigh `target` or more. */
static float find_nucleus(const struct candidates *c, double target) {
    memcpy(c->search_keys, c->keys, c->count * sizeof *c->keys);
    memcpy(c->search_weights, c->weights, c->count * sizeof *c->weights);
    return find_threshold(c->search_keys, c->search_weights, c->count, target);
}

#endif
