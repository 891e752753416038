/* The operations and their arguments, as Python fills them in: `structures.py` has the same fields
 * in the same order. Pointers are to contiguous memory of the dtype the library is built for unless
 * they say otherwise. A call is recorded once and run for every step, so all that changes from
 * step to step lies in `struct step`. */
#ifndef PENSTOCK_OPS_H
#define PENSTOCK_OPS_H

#include <stdint.h>

/* One step: the fields of PagedLayout (kernels/paged_layout.py), and the tokens. */
struct step {
    int64_t num_tokens, num_seqs, table_stride;
    const int64_t *token_ids, *slot_mapping;                        /* [num_tokens] */
    const int32_t *query_start_loc, *seq_lens, *block_tables;
    const float *cosines, *sines;                                   /* [n, head_dim / 2] */
    const int64_t *rotary_rows;                                     /* [num_tokens], rows of these */
};

/* A recorded call. */
struct call {
    void (*run)(const void *args);
    const void *args;
};

/* y[rows, out] = x[rows, in] · packed weight (+ bias) (+ residual, after rounding the product) */
struct linear_args {
    void *y;
    const void *x, *weight, *bias, *residual; /* bias, residual: may be null; residual may be y */
    const int64_t *num_rows;
    int64_t in_features, out_features;
};

/* y[t] = weight[token_ids[t]], of num_rows rows of `size` values; packed: as linear weights are */
struct embed_args {
    void *y;
    const void *weight;
    const struct step *step;
    int64_t size, num_rows, is_packed;
};

/* y = x / sqrt(mean(x²) + eps) · weight, row by row */
struct rms_norm_args {
    void *y;
    const void *x, *weight;
    const int64_t *num_rows;
    int64_t size;
    double eps;
};

/* Norm (if any) and rotate queries and keys of each token; queries go to `query`, keys and values
 * into the cache, laid out as attention.inc.c says. qkv: [num_tokens, num_heads + 2 · num_kv_heads, head_dim] */
struct rope_store_args {
    void *query, *key_cache, *value_cache;
    const void *qkv, *query_norm, *key_norm; /* norms: [head_dim], may be null */
    const struct step *step;
    int64_t block_size, num_heads, num_kv_heads, head_dim;
    double eps;
};

/* As kernels/paged_attention_reference.py specifies it, but for the order of values in a block. */
struct attention_args {
    void *out;
    const void *query, *key_cache, *value_cache;
    const struct step *step;
    int64_t block_size, num_heads, num_kv_heads, head_dim;
    int64_t window; /* 0: none */
    double scale;
};

/* y[rows, size] = silu(x[:, :size]) · x[:, size:] */
struct silu_mul_args {
    void *y;
    const void *x;
    const int64_t *num_rows;
    int64_t size;
};

/* The largest of each row and where it first is; a NaN is larger than all. */
struct argmax_args {
    float *best;
    int64_t *index;
    const void *x;
    const int64_t *num_rows;
    int64_t size;
};

#endif
