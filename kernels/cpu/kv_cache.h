/* Where a key and a value lie in the paged cache.
 *
 * A block holds, for each of its KV heads, a part of keys and after it a part of values, so that whoever computes one
 * head reads one run of memory per block. Two elements of four bytes, or four of two, are what an instruction takes:
 *
 *            keys                             values
 *   BF16     [head_size/2][block_size][2]     [ceil(block_size/2)][head_size][2]
 *   F32      [head_size][block_size]          [block_size][head_size]
 *
 * Keys lie in lanes: one load is 16 keys, at one pair of elements of each. Of values a load is 16 elements at one pair
 * of keys. In both dtypes a row of keys is 4 · block_size bytes, and a value (pair) starts 4 · head_size bytes after
 * the one before. */
#pragma once
#include "quire.h"

typedef struct kv_layout {
    int64_t key_bytes;   /* of a head's keys in a block */
    int64_t head_bytes;  /* of a head's keys and values in a block */
    int64_t block_bytes; /* from a block to the next */
} kv_layout;

static inline int64_t element_bytes(int32_t dtype) { return dtype == BF16 ? 2 : 4; }

static inline kv_layout kv_layout_of(int32_t dtype, int64_t head_size, int64_t block_size, int64_t block_stride) {
    const int64_t key_bytes = head_size * block_size * element_bytes(dtype);
    const int64_t value_rows = dtype == BF16 ? ceil_div(block_size, 2) : block_size;
    return (kv_layout){key_bytes, key_bytes + value_rows * head_size * 4, block_stride * element_bytes(dtype)};
}
