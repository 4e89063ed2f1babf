/* Where a key and a value lie in the paged cache.
 *
 * A block holds, for each of its KV heads, a part of keys and after it a part of values, so that whoever computes one
 * head reads one run of memory per block. Two elements of four bytes, or four of two, are what an instruction takes:
 *
 *              keys                             values                                scales
 *   BF16       [head_size/2][block_size][2]     [ceil(block_size/2)][head_size][2]    none
 *   F32        [head_size][block_size]          [block_size][head_size]               none
 *   INT8, FP8  [head_size][block_size]          [block_size][head_size]               fp16 [keys, values][block_size]
 *
 * Keys lie in lanes: one load is 16 keys, at one pair of elements of each. Of values a load is 16 elements at one pair
 * of keys. In BF16 and F32 a row of keys is 4 · block_size bytes, and a value (pair) starts 4 · head_size bytes after
 * the one before; in INT8 and FP8 it is a byte in place of 4 (`word_bytes`). Scales lie behind a head's values: a copied
 * block brings them along. */
#pragma once
#include "quire.h"

typedef struct kv_layout {
    int64_t key_bytes;   /* of a head's keys in a block */
    int64_t scales_at;   /* from a head's keys to its scales */
    int64_t head_bytes;  /* of all that a block has of a head */
    int64_t block_bytes; /* from a block to the next */
} kv_layout;

static inline int has_scales(int32_t dtype) { return dtype == INT8 || dtype == FP8; }
static inline int64_t element_bytes(int32_t dtype) { return has_scales(dtype) ? 1 : dtype == BF16 ? 2 : 4; }
/* Of what a lane takes at once: an element, or a pair of bfloat16. */
static inline int64_t word_bytes(int32_t dtype) { return has_scales(dtype) ? 1 : 4; }
/* Of queries, and of weights of values: what products take. */
static inline int32_t query_dtype(int32_t cache_dtype) { return cache_dtype == BF16 ? BF16 : F32; }

static inline kv_layout kv_layout_of(int32_t dtype, int64_t head_size, int64_t block_size, int64_t block_stride) {
    const int64_t key_bytes = head_size * block_size * element_bytes(dtype);
    const int64_t value_rows = dtype == BF16 ? ceil_div(block_size, 2) : block_size;
    const int64_t scales_at = key_bytes + value_rows * head_size * word_bytes(dtype);
    const int64_t scale_bytes = has_scales(dtype) ? 2 * block_size * 2 : 0;
    return (kv_layout){key_bytes, scales_at, scales_at + scale_bytes, block_stride * element_bytes(dtype)};
}
