/* The operations and their arguments. `structures.py` reads this file, and Python fills in
 * `struct <operation>_args` by the names of its members: pointers, int64_t and double. Pointers are to
 * contiguous memory of the library's dtype unless stated otherwise. A call is recorded once and run for
 * every step, so everything that changes from step to step is in `struct step`. */
#ifndef PENSTOCK_OPS_H
#define PENSTOCK_OPS_H

#include <stdint.h>

/* One step: the fields of PagedLayout (kernels/paged_layout.py), the tokens, and which of them are
 * sampled from. */
struct step {
    int64_t num_tokens, num_seqs, table_stride, num_sampled;
    const int64_t *token_ids, *slot_mapping;                        /* [num_tokens] */
    const int32_t *query_start_loc, *seq_lens;
    const int32_t *block_tables; /* [num_seqs, table_stride]; read after the step, to no effect */
    const float *cosines, *sines;       /* [ropes, n, head_dim / 2] */
    const int64_t *rotary_rows;         /* [num_tokens], rows of these; positions, but with dynamic ropes */
    int64_t rope_stride;                /* from the table of one kind of rotary positions to the next */
    const int64_t *sampled_tokens;      /* [num_sampled], or null: the first num_sampled tokens */
    int64_t num_features;
    const int64_t *feature_rows; /* [num_features] */
    const void *features;        /* [num_features, hidden size] */
};

/* y[rows, out] = x[rows, in] · packed weight (+ bias) (+ residual, after rounding the product) */
struct linear_args {
    void *y;
    const void *x, *weight, *bias, *residual; /* bias, residual: may be null, and are not y */
    const int64_t *num_rows;
    int64_t in_features, out_features;
    int64_t stride; /* from row to row of y and residual; 0: out_features */
    int64_t is_float; /* y holds floats, whatever the dtype; without bias and residual */
};

/* How a matrix is stored by pack_quantized: see linear_quantized.inc.c. */
struct quantized_format {
    int64_t code_bits;         /* 4 or 8 */
    int64_t columns_per_scale; /* a multiple of 32 / code_bits, or all columns */
    int64_t zero;              /* the code that stands for 0 */
    int64_t has_offsets, is_half;
    int64_t is_float8; /* codes are E4M3 */
    const void *table; /* what codes of 4 bits stand for: [16], bytes for products of bytes (null: the
                        * codes themselves), floats for others */
};

/* Codes [out, in] of a byte each, in the layout of linear_quantized.inc.c. */
struct pack_quantized_args {
    char *packed;
    const uint8_t *codes;
    const float *factors;         /* [out] */
    const void *scales, *offsets; /* [out, blocks], f16 if is_half, else float */
    int64_t in_features, out_features;
    struct quantized_format format;
};

/* Each block of a row of x as signed bytes: x / scale, rounded, where scale = its largest magnitude / 127;
 * minus `zero` times the sum of these bytes, and the sum times the scale. Outliers, by split_outliers of
 * kernels/reference/linear_quantized.py, become zeros there: a row's are listed, and after the last a column of
 * -1. */
struct quantize_blocks_args {
    uint8_t *bytes; /* [rows, size rounded up to a line], in the order of a line of code_bits */
    float *scales;     /* [rows, blocks] */
    int32_t *sums;     /* [rows, blocks], times -zero */
    float *float_sums; /* [rows, blocks]; null: not needed */
    int32_t *outlier_columns; /* [rows, most_outliers]; null: there are no outliers */
    float *outlier_values;    /* [rows, most_outliers] */
    const void *x;  /* [rows, size] */
    const int64_t *num_rows;
    int64_t size, columns_per_scale, code_bits, zero;
    int64_t most_outliers; /* more than a fifth of `size` */
};

/* The sum of each block of a row of x. */
struct sum_blocks_args {
    float *sums;   /* [rows, blocks] */
    const void *x; /* [rows, size] */
    const int64_t *num_rows;
    int64_t size, columns_per_scale;
};

/* y[r, i] = x[r, indices[i]] */
struct permute_columns_args {
    void *y;
    const void *x; /* [rows, size] */
    const int64_t *num_rows, *indices;
    int64_t size;
};

/* y[r, i] = x[r, i] · factors[i] */
struct scale_columns_args {
    void *y;
    const void *x; /* [rows, size] */
    const int64_t *num_rows;
    const float *factors;
    int64_t size;
};

/* linear, of weights that pack_quantized packed. x_scales null: x as it is, with float sums by sum_blocks if
 * there are offsets. Otherwise x is what quantize_blocks wrote, with float sums if there are offsets. */
struct linear_quantized_args {
    struct linear_args linear;
    const float *x_scales;     /* [rows, blocks] */
    const int32_t *x_sums;     /* [rows, blocks], times -zero */
    const float *x_float_sums; /* [rows, blocks] */
    const int32_t *outlier_columns; /* as in quantize_blocks_args */
    const float *outlier_values;
    int64_t most_outliers;
    struct quantized_format format;
};

/* embed, of such weights; its table, if any, holds floats */
struct embed_quantized_args {
    void *y;
    const void *weight;
    const struct step *step;
    int64_t size;
    int64_t first_id, num_ids; /* as in embed_args */
    struct quantized_format format;
};

/* y[t] = weight[token_ids[t]], of vocab_size rows of `size` values; packed: as linear weights are */
struct embed_args {
    void *y;
    const void *weight;
    const struct step *step;
    int64_t size, vocab_size, is_packed;
    int64_t first_id, num_ids; /* of the rows that there are; others are zero; num_ids 0: all are there */
};

/* y[feature_rows[i], size] = features[i]; other rows of y stay */
struct place_features_args {
    void *y;
    const struct step *step;
    int64_t size;
};

/* y = x / sqrt(mean(x²) + eps) · (weight + offset), row by row */
struct rms_norm_args {
    void *y;
    const void *x, *weight;
    const int64_t *num_rows;
    int64_t size;
    int64_t stride; /* from row to row of x and y; 0: size */
    double eps, offset;
};

/* y = (x - mean(x)) / sqrt(variance(x) + eps) · weight (+ bias), of each of the groups of `size` values that
 * a row has */
struct layer_norm_args {
    void *y;
    const void *x, *weight, *bias; /* weight, bias: [num_groups, size]; bias may be null */
    const int64_t *num_rows;
    int64_t size, num_groups;
    int64_t stride; /* from row to row of x and y; 0: size · num_groups */
    double eps;
};

/* Normalise (if there are norms) and rotate queries and keys of each token; queries go to `query`, keys
 * and values into the cache, in the layout of attention.inc.c. qkv: [num_tokens, num_heads + 2 · num_kv_heads, head_dim] */
struct rope_store_args {
    void *query, *key_cache, *value_cache;
    const void *qkv, *query_norm, *key_norm; /* norms: [head_dim], may be null */
    const void *values; /* where the values are, in rows like those of qkv; null: there */
    const float *key_scales, *value_scales;  /* [num_kv_heads], if the cache is in E4M3; else null */
    const struct step *step;
    int64_t block_size, num_heads, num_kv_heads, head_dim;
    int64_t is_int8; /* the cache holds bytes with scales */
    int64_t rope;    /* number of the table of cosines and sines */
    double eps, norm_offset;
};

/* As specified by kernels/reference/paged_attention.py, except for the order of numbers in a block. */
struct attention_args {
    void *out;
    const void *query, *key_cache, *value_cache;
    const float *key_scales, *value_scales; /* [num_kv_heads], if the cache is in E4M3; else null */
    const void *sinks;                      /* [num_heads], or null */
    const float *alibi;                     /* [num_heads], or null */
    const struct step *step;
    int64_t block_size, num_heads, num_kv_heads, head_dim;
    int64_t is_int8; /* the cache holds bytes with scales */
    int64_t window;  /* 0: none */
    double scale, soft_cap; /* soft_cap 0: none */
};

/* y[rows, size] = silu(x[:, :size]) · x[:, size:] */
struct silu_mul_args {
    void *y;
    const void *x;
    const int64_t *num_rows;
    int64_t size;
};

/* y[rows, size] = activation(x), or activation(x[:, :size]) · x[:, size:] if gated */
struct activate_args {
    void *y;
    const void *x;
    const int64_t *num_rows;
    int64_t size;
    int64_t kind; /* 0: silu, 1: gelu, 2: gelu by tanh, 3: relu, 4: its square */
    int64_t is_gated;
};

/* y[rows, size] = x · factor (+ residual, after rounding the product); residual may be null, and is not y */
struct scale_add_args {
    void *y;
    const void *x, *residual;
    const int64_t *num_rows;
    int64_t size;
    double factor;
};

/* y[rows, size] = x, from -limit to limit */
struct clamp_args {
    void *y;
    const void *x;
    const int64_t *num_rows;
    int64_t size, stride; /* from row to row of x and y */
    double limit;
};

/* y[t, size] = x[t] + table[position of t] */
struct add_positions_args {
    void *y;
    const void *x, *table; /* table: [positions, size] */
    const struct step *step;
    int64_t size;
};

/* y[rows, size] = x · factor, rounded, then soft_cap · tanh(· / soft_cap) (soft_cap 0: none) */
struct cap_logits_args {
    void *y;
    const void *x;
    const int64_t *num_rows;
    int64_t size;
    double factor, soft_cap;
};

/* The experts of each row, by falling logit, of equal ones the lower number first, and their weights: a softmax
 * over these (is_normalized) or over all experts. */
struct route_args {
    int32_t *experts;    /* [num_rows, experts_per_token] */
    float *weights;      /* [num_rows, experts_per_token] */
    const float *logits; /* [num_rows, stride], of which num_experts count */
    const void *bias;    /* [num_experts], added to them; may be null */
    const int64_t *num_rows;
    int64_t num_experts, experts_per_token, stride, is_normalized;
};

/* A slot is a row at one of its experts: row · experts_per_token + rank. Sorts the slots by expert. */
struct group_slots_args {
    int32_t *slots;  /* [num_slots], sorted */
    int32_t *places; /* [num_slots], where each slot is in these */
    int32_t *tiles;  /* [num_tiles, 3]: an expert, and where some of its rows in `slots` begin and end */
    int64_t *counts; /* num_slots, num_tiles */
    const int32_t *experts;
    const int64_t *num_rows;
    int64_t num_experts, experts_per_token;
};

/* y[rows, size] = g · sigmoid(alpha · g) · (u + 1), g and u being x's halves, clamped */
struct clamped_swiglu_args {
    void *y;
    const void *x; /* [rows, 2 · size] */
    const int64_t *num_rows;
    int64_t size;
    double alpha, limit; /* g is at most `limit`, u between -limit and limit */
};

/* y[i] = x[slots[i] / experts_per_token] */
struct gather_slots_args {
    void *y;
    const void *x;
    const int32_t *slots;
    const int64_t *num_slots;
    int64_t row_bytes, experts_per_token;
};

/* y[i, j] = x[i, indices[expert of i, j]] */
struct permute_slots_args {
    void *y;
    const void *x; /* [num_slots, size] */
    const int64_t *indices; /* [num_experts, size] */
    const int32_t *tiles;
    const int64_t *num_tiles;
    int64_t size;
};

/* Which rows the experts multiply, by which weights. */
struct experts_rows {
    const int32_t *tiles;
    const int64_t *num_tiles;
    const int64_t *weights; /* [num_experts], addresses of packed matrices */
};

/* linear, row by row of x by the matrix, and bias [num_experts, out_features], of its expert */
struct experts_linear_args {
    struct linear_args linear; /* without weight and num_rows */
    struct experts_rows rows;
};

struct experts_linear_quantized_args {
    struct linear_quantized_args linear; /* likewise */
    struct experts_rows rows;
};

/* y[t] = Σ weights[t, rank] · x[places[t, rank]] (+ sigmoid(shared_logits[t]) · shared[t]) (+ residual[t], after
 * rounding the sum) */
struct combine_slots_args {
    void *y;
    const void *x, *residual, *shared; /* [rows, size]; residual and shared may be null */
    const int32_t *places;
    const float *weights, *shared_logits; /* shared_logits: one every `stride` */
    const int64_t *num_rows;
    int64_t size, experts_per_token, stride;
};

/* The processes that share a model, each with a part of the sums of every product. */
struct ranks {
    int64_t rank, num_ranks;
    void *places; /* [num_ranks + 1] of 64 bytes, in memory that all share; see ranks.c */
};

/* y[rows, size] = Σ over the ranks, in their order, of parts[rank] (+ residual, after rounding the sum). First
 * waits until all have written their parts. */
struct sum_ranks_args {
    void *y;
    const void *parts;    /* the first rank's [rows, size], in memory that all share */
    const void *residual; /* may be null, and is not y */
    const struct ranks *ranks;
    const int64_t *num_rows;
    int64_t size, part_stride; /* from a rank's part to the next one's, in values */
};

/* y[rows, 2] = Σ x² of the queries and of the keys with which a row begins */
struct query_key_squares_args {
    float *y;
    const void *x;
    const int64_t *num_rows;
    int64_t query_size, key_size, stride; /* from row to row of x */
};

/* y = x / sqrt(mean(x²) + eps) · (weight + offset) of the queries of a row, and of its keys, where the mean is
 * that of the ranks together: each has as many. First waits until all have written their squares. */
struct query_key_norm_args {
    void *y;
    const void *x, *query_weight, *key_weight;
    const float *parts; /* the first rank's [rows, 2], in memory that all share */
    const struct ranks *ranks;
    const int64_t *num_rows;
    int64_t query_size, key_size, stride; /* from row to row of x and y */
    int64_t part_stride;                  /* from a rank's part to the next one's */
    double eps, offset;
};

/* y[rows, size] = the parts side by side, each of part_size columns but for the last, which has what is left. */
struct gather_ranks_args {
    void *y;
    const void *parts; /* the first rank's [rows, part_size], in memory that all share */
    const struct ranks *ranks;
    const int64_t *num_rows;
    int64_t size, part_size, part_stride;
};

/* Rows from rank 0 of a link to all its other ranks, through slots that take turns. Waits until the receivers
 * have read what was in the slot. */
struct send_rows_args {
    const void *x; /* [rows, size] */
    void *slots;   /* [num_slots, slot_stride values], in memory that all share */
    const struct ranks *ranks;
    const int64_t *num_rows;
    int64_t size, slot_stride, num_slots; /* num_slots: a power of two, so that counters may overflow */
};

/* y[rows, size] = what was sent next. Waits until it was. */
struct receive_rows_args {
    void *y;
    const void *slots;
    const struct ranks *ranks;
    const int64_t *num_rows;
    int64_t size, slot_stride, num_slots;
};

/* y[r, size] = x[sampled_tokens[r]], of num_sampled rows */
struct gather_rows_args {
    void *y;
    const void *x;
    const struct step *step;
    int64_t size;
};

/* The sum of each 256 KiB of words, of whole ones: how fast memory is read. */
struct read_words_args {
    int64_t *sums; /* [num_bytes / 256 KiB] */
    const uint32_t *words;
    int64_t num_bytes;
};

/* x · weights, by each item so many times: how fast numbers that are at hand are multiplied. */
struct multiply_tiles_args {
    int64_t *num_products; /* of all items; each with its addition */
    float *sums; /* [num_items], without a meaning */
    const void *x, *weights; /* [32, 128], [128, 48] */
    int64_t num_items, num_repeats;
};

/* The next token of each row of logits, as specified by kernels/reference/sampling.py. */
struct sample_tokens_args {
    int64_t *token_ids; /* [num_rows] */
    uint8_t *is_valid;  /* [num_rows], 0 or 1 */
    const void *logits; /* [num_rows, vocab_size] */
    const double *temperature, *top_k, *top_p, *min_p, *uniforms; /* [num_rows] */
    const uint32_t *masks; /* [masks, words of 32 tokens], a bit for each that may be drawn; or null */
    const int64_t *mask_indices; /* [num_rows], -1: all may be drawn */
    const int64_t *num_rows;
    int64_t vocab_size;
};

/* A number in [0, 1) for each row, as specified by kernels/reference/draw_uniforms.py. */
struct draw_uniforms_args {
    double *uniforms;                             /* [num_rows] */
    const uint64_t *seeds, *indices, *positions; /* [num_rows] */
    const int64_t *num_rows;
};

/* What an adapter adds to one matrix: scale · B (A x). In panels of 16 lanes and pairs as in
 * products.inc.c: a [rank / 16][in][16], b [out / 16][rank][16]; a null: nothing. */
struct lora_pair {
    const void *a, *b; /* of an embedding, a: [vocab, rank] */
    int64_t rank;      /* a multiple of 16: the rest is zero */
    double scale;
};

/* The rows that have adapters, in groups of one slot and at most 16 rows. */
struct lora_rows {
    int64_t num_groups;
    const int64_t *order;  /* numbers of rows */
    const int64_t *groups; /* [num_groups, 3]: slot, first and end in `order` */
};

/* h = A x for each part of a layer, in chunks of x whose sums lora_expand adds up. Rows of h are in
 * `order`: [parts, chunks, max_rank]. */
struct lora_shrink_args {
    float *h;
    const void *x;                 /* [rows, in] */
    const struct lora_pair *pairs; /* [slots, parts] */
    const struct lora_rows *rows;
    int64_t in_features, num_parts, max_rank;
};

/* The same for an embedding, where x has a single one. */
struct lora_lookup_args {
    float *h;
    const struct lora_pair *pairs; /* [slots, 1] */
    const struct lora_rows *rows;
    const struct step *step;
    int64_t max_rank;
};

/* y += scale · B h, part beside part; y null: the result of `product`. */
struct lora_expand_args {
    void *y;
    const float *h;
    const struct lora_pair *pairs; /* [slots, parts] */
    const struct lora_rows *rows;
    const struct linear_args *product;
    const int64_t *part_sizes; /* [parts] */
    int64_t num_parts, num_chunks, max_rank;
    int64_t stride; /* from row to row of y */
};

#endif
