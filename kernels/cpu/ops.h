/* The arguments of each kind of op. Buffers have room for the largest step; rows are dense unless a stride is named.
 * Python's view of the same structs is ops.py: change both. */
#pragma once
#include "quire.h"

/* A weight [out, in] in panels of 16 outputs, so that a vector register holds 16 outputs' partial sums.
 *
 *   F32   [out/16][in][16] float
 *   BF16  [out/16][in/2][16][2] bfloat16: pairs along `in` for the dot-product instruction
 *   INT8  [out/16][in/4][16][4] uint8 n, and scales [out] float: w ≈ scale · (n − 128)
 *   INT4  groups of 32 along `in`: [out/16][in/32] of { nibbles [4][16][4] bytes, scales [16] fp16 }:
 *         w ≈ scale · (n − 8). The low nibble of byte [v][o][b] is number 8v + b of output o's group, the high one
 *         number 8v + 4 + b.
 *
 *   INT4_ZEROS  the same with zero points [16] uint8 behind the scales: w ≈ scale · (n − zero)
 *
 * `out` is padded to a multiple of 16 and `in` to a multiple of 2, 4 or 32 with zeros. Quantized weights are unsigned
 * since the instruction that multiplies bytes takes one operand unsigned. */
#define INT8_ZERO_POINT 128
#define INT4_ZERO_POINT 8
#define INT4_GROUP 32
#define INT4_GROUP_BYTES (16 * INT4_GROUP / 2 + 16 * 2)
#define INT4_ZEROS_GROUP_BYTES (INT4_GROUP_BYTES + 16)

typedef struct weight {
    int32_t dtype;
    int32_t reserved;
    int64_t in, out;         /* true sizes */
    const void *panels;
    const float *scales;     /* [out padded]; INT8 only */
} weight;

/* out[row] = scale · table[token_ids[row]]; the table is a weight [vocab, hidden]. Dequantized if need be. */
typedef struct embed_args {
    weight table;
    float *out; /* [rows, hidden] */
    float scale;
    int32_t reserved;
} embed_args;

/* A quantized row, what INT8, INT4 and INT4_ZEROS weights are multiplied by: int8 q [width padded to 64 with zeros], x ≈ scale · q
 * with scale = max|x| / 127 (kept elsewhere), then int32 [1 + groups of 32] that undo the weights' zero points:
 * −128 · (sum of all q), and −8 · (sum of q) of each group. Strides are multiples of 64. A row of zeros has scale 0;
 * one that holds a NaN or an infinity has q = 0 and scale NaN. */
static inline int64_t quantized_width(int64_t width) { return ceil_div(width, 64) * 64; }
static inline const int32_t *quantized_starts(const int8_t *row, int64_t width) {
    return (const int32_t *)(row + quantized_width(width));
}

/* out[row] = in[row] / sqrt(mean(in²) + eps) · scale, converted to `out_dtype`. INT8: a quantized row. With `is_added`,
 * F32 only, it is added to what is there. */
typedef struct norm_args {
    const float *in;    /* [rows, hidden] */
    const float *scale; /* [hidden] */
    void *out;          /* [rows, out_stride]; hidden padded to 64 bytes if the stride has room */
    float *out_scales;  /* [rows]; INT8 only */
    int64_t hidden;
    int64_t out_stride; /* elements */
    int32_t out_dtype;
    float eps;
    int32_t is_added;
    int32_t reserved;
} norm_args;

enum epilogue { STORE = 0, ADD = 1, SILU_MUL = 2, GELU_MUL = 3 };

static inline int is_gate(int32_t epilogue) { return epilogue == SILU_MUL || epilogue == GELU_MUL; }

/* y = x · Wᵀ + bias. STORE: y [rows, out] float is overwritten; ADD: y += ... (the residual). SILU_MUL: panels of gate
 * and up alternate, and y [rows, out/2] = silu(gate) · up in `out_dtype` (F32 or BF16). GELU_MUL: the same with gelu's
 * approximation by tanh (kernels/gelu_mul.py). */
typedef struct linear_args {
    weight weight;
    const void *x;         /* [rows, x_stride]: float, bfloat16, or quantized */
    const float *x_scales; /* [rows]; quantized weights */
    const float *bias;     /* [out padded] or NULL */
    void *y;
    int64_t x_stride, y_stride; /* elements */
    int32_t epilogue;
    int32_t out_dtype;
} linear_args;

/* Of `qkv` [rows, (heads + 2 kv_heads) · head_size] float: norms the heads of queries and keys where there are weights
 * for it (as OP_NORM), and rotates them by the row's position. Queries go to `query` [rows, heads, head_size] in
 * query_dtype(cache_dtype), multiplied by `query_scale` (which is to hold the factor of the scores and log2(e), see
 * attention.c); keys and values go into the cache at the row's slot. */
typedef struct rotary_kv_args {
    const float *qkv;
    const float *cos_sin; /* [positions, head_size]: cos half, then sin half */
    void *query;
    void *cache; /* one layer's part of the first block, see kv_cache.h */
    const float *query_norm, *key_norm; /* [head_size], or NULL */
    int64_t heads, kv_heads, head_size, block_size, block_stride /* elements */;
    int32_t cache_dtype;
    float query_scale;
    float eps;
    int32_t reserved;
} rotary_kv_args;

/* Causal attention of the step's chunks over the paged cache, of each row over its last `window` keys, into `out` [rows, out_stride] in `out_dtype` (F32, BF16,
 * or F32 rows that OP_QUANTIZE reads). OP_ATTENTION_PLAN cuts the step into tiles once (`plan`, read by all layers);
 * OP_ATTENTION computes them; where a tile's context was cut into splits, OP_ATTENTION_MERGE adds these up in order.
 * See attention.h. */
typedef struct attention_args {
    const void *query; /* [rows, heads, head_size], scaled, in query_dtype(cache_dtype) */
    const void *cache; /* as in rotary_kv_args */
    void *plan;        /* attention_plan, with room for max_rows and max_partials */
    float *partial;    /* [max_partials, heads, head_size] sums of values, then [max_partials, heads, 2] best, total */
    void *out;
    int64_t heads, kv_heads, head_size, block_size, block_stride, out_stride; /* elements */
    int64_t max_rows;     /* of a step */
    int64_t max_partials; /* (row, split) pairs that may be computed apart in a step; any number gives the same bits */
    int64_t window;       /* keys that a row sees at most, its own the last of them; 0: all up to its own */
    int32_t cache_dtype;
    int32_t out_dtype;
} attention_args;

typedef struct quantize_args {
    const void *in; /* [rows, in_stride] of in_dtype */
    int8_t *out; /* quantized rows */
    float *out_scales;
    const int32_t *order; /* [width]: which number of a row each one is, or NULL: as they lie */
    int64_t width, in_stride, out_stride;
    int32_t in_dtype;
    int32_t per_row; /* rows of the buffers for each row of the step: 1, or a pair's */
} quantize_args;

/* One adapter's factors of a linear, in panels as weights of F32 or BF16 are: a [parts · rank, in], b [out, rank] with
 * the adapter's scale in it. Ranks are padded with zeros. */
typedef struct lora_weight {
    const void *a, *b;
    int64_t rank; /* of a part, a multiple of 16; 0: it leaves this linear alone */
} lora_weight;

/* y[row] += b · (a · x[row]) with the factors in the row's slot; rows of no adapter are left alone. A fused linear has
 * parts, each with rows of `a` of its own: its outputs begin at panel 0, `second_part` and `third_part` (INT64_MAX:
 * none), or they alternate panel by panel, as a gate's do. OP_LORA_SHRINK leaves a · x in `shrunk`, in the factors' type
 * (x is rounded to it, too), OP_LORA_EXPAND adds. Sums are float. */
typedef struct lora_args {
    const lora_weight *slots;
    const void *x;         /* [rows, x_stride] of x_dtype: F32, BF16, or quantized rows (INT8) */
    const float *x_scales; /* [rows]; INT8 only */
    float *shrunk;         /* [rows, shrunk_stride], room for all parts at the highest rank */
    float *y;              /* [rows, y_stride] */
    int64_t in, out, x_stride, y_stride, shrunk_stride; /* elements */
    int64_t num_parts, second_part, third_part;
    int32_t is_interleaved;
    int32_t dtype; /* of a and b */
    int32_t x_dtype;
    int32_t reserved;
} lora_args;

/* out[row] = activation(gate) · up, by the epilogue, of `in` [rows, in_stride] whose panels of gate and up alternate. */
typedef struct gate_args {
    const float *in;
    void *out; /* [rows, out_stride] of out_dtype: F32 or BF16 */
    int64_t width, in_stride, out_stride; /* elements; width: of out */
    int32_t out_dtype;
    int32_t epilogue;
} gate_args;

/* out[i] = in[wanted_rows[i]]; rows are dense. */
typedef struct gather_args {
    const void *in;
    void *out;
    int64_t row_bytes;
} gather_args;

/* The largest of each wanted row's first `width` logits, the lowest id on a tie. A row is searched in
 * width / ARGMAX_TILE tiles (OP_ARGMAX), whose best OP_ARGMAX_MERGE compares. */
#define ARGMAX_TILE 16384

typedef struct argmax_args {
    const float *logits; /* [wanted, stride] */
    int64_t width, stride;
    float *best;       /* [wanted, tiles] scratch */
    int64_t *best_ids; /* [wanted, tiles] scratch */
    int64_t *out;      /* [wanted] */
} argmax_args;

/* One token for each wanted row: see choose.c. Parameters are [wanted]; temperature 0: the likeliest token. */
typedef struct choose_args {
    const float *logits; /* [wanted, stride] */
    int64_t width, stride;
    const float *temperatures, *min_p, *top_p;
    const int64_t *top_k; /* 0: all */
    const int64_t *seeds, *choices, *positions;
    int64_t *out;
} choose_args;

/* Experts (experts.c): of each row of `logits` [rows, stride] the `num_used` likeliest of `num_experts`, and their shares
 * of 1, or of what they add up to (`is_normalized`); then its pairs by expert. */
typedef struct route_args {
    const float *logits;
    int64_t stride, num_experts, num_used;
    int32_t *chosen;   /* [rows, num_used], rising */
    float *shares;     /* the same */
    int32_t *place_of; /* the same: where the pair is, sorted by expert, then by row */
    int32_t *row_of;   /* [rows · num_used]: the row of each pair that is sorted */
    int32_t *starts;   /* [num_experts + 1]: first pair of each expert, and the end */
    int32_t *active;   /* [1 + num_experts]: how many experts have pairs, and which */
    int32_t is_normalized;
    int32_t reserved;
} route_args;

/* out[pair] = in[row_of[pair]], of row_bytes each, and their scales if there are any. */
typedef struct gather_pairs_args {
    const void *in;
    const float *in_scales;
    void *out;
    float *out_scales;
    const int32_t *row_of;
    int64_t row_bytes, num_used;
} gather_pairs_args;

/* `linear` of each expert's pairs by its weight; `linear.weight` is one of them, all are of one shape and dtype, and
 * without bias. */
typedef struct experts_args {
    linear_args linear;
    const weight *weights; /* [num_experts] */
    const int32_t *starts, *active;
} experts_args;

/* out[row] += Σ shares[row, j] · in[place_of[row, j]]; dense rows of `width`. */
typedef struct combine_args {
    const float *in, *shares;
    const int32_t *place_of;
    float *out;
    int64_t width, num_used;
} combine_args;
