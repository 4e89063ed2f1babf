/* Finds the strips of a key tile in the cache, and copies those that can't be read where they lie.
 *
 * A strip is 16 keys in the cache's own arrangement. Where blocks hold a multiple of 16 tokens, strips are read in
 * place. Other block sizes are copied strip by strip; and of a strip that goes past the context the values are copied,
 * zeros in place of what is stale. Copies are arranged as in a block of 16, so results have the same bits. */
#pragma once
#include "attention_products.h"

#include <string.h>

/* A sequence's part of the cache. */
typedef struct key_source {
    const char *cache; /* with the KV head's offset */
    const int32_t *blocks;
    kv_layout layout;
    int32_t dtype;
    int32_t block_size;
    int32_t head_size;
    int32_t num_keys; /* the context */
    char *copies;     /* [STRIPS][keys, values of a strip] */
} key_source;

static inline int64_t strip_bytes(int32_t dtype, int64_t head_size) {
    return 2 * STRIP * head_size * element_bytes(dtype);
}

/* A run of `count` keys of one block, from `offset` on, to keys `to` .. of a strip. */
static void copy_run(const key_source *source, const char *part, int32_t offset, int32_t count, int32_t to,
                     char *keys, char *values) {
    const int64_t size = source->head_size, block_size = source->block_size;
    const int64_t words = source->dtype == BF16 ? size / 2 : size;
    for (int64_t i = 0; i < words; i++)
        memcpy(keys + (i * STRIP + to) * 4, part + (i * block_size + offset) * 4, (size_t)count * 4);
    const char *from = part + source->layout.key_bytes;
    if (source->dtype == F32 || (offset % 2 == 0 && to % 2 == 0 && count % 2 == 0)) {
        const int64_t key_bytes = size * element_bytes(source->dtype);
        memcpy(values + to * key_bytes, from + offset * key_bytes, (size_t)(count * key_bytes));
        return;
    }
    for (int64_t k = 0; k < count; k++) {
        const uint16_t *in = (const uint16_t *)from + (offset + k) / 2 * size * 2 + (offset + k) % 2;
        uint16_t *out = (uint16_t *)values + (to + k) / 2 * size * 2 + (to + k) % 2;
        for (int64_t d = 0; d < size; d++) out[2 * d] = in[2 * d];
    }
}

/* Keys from `position` on, `count` of them, the rest zeros. */
static void copy_strip(const key_source *source, int32_t position, int32_t count, char *keys, char *values) {
    if (count < STRIP) memset(keys, 0, (size_t)strip_bytes(source->dtype, source->head_size));
    for (int32_t done = 0, run; done < count; done += run) {
        const int32_t block = (position + done) / source->block_size, offset = (position + done) % source->block_size;
        run = source->block_size - offset < count - done ? source->block_size - offset : count - done;
        copy_run(source, source->cache + source->blocks[block] * source->layout.block_bytes, offset, run, done, keys,
                 values);
    }
}

/* The strips of the keys from `start` on. */
static void find_strips(const key_source *source, int32_t start, int32_t num_strips, key_tile *out) {
    const int64_t bytes = strip_bytes(source->dtype, source->head_size);
    const int is_in_place = source->block_size % STRIP == 0;
    out->key_stride = is_in_place ? source->block_size * 4 : STRIP * 4;
    for (int32_t i = 0; i < num_strips; i++) {
        const int32_t position = start + i * STRIP, left = source->num_keys - position;
        char *copy = source->copies + i * bytes;
        if (!is_in_place || left < STRIP) {
            copy_strip(source, position, left < STRIP ? left : STRIP, copy, copy + bytes / 2);
            out->keys[i] = copy;
            out->values[i] = copy + bytes / 2;
        }
        if (!is_in_place) continue;
        const int32_t block = position / source->block_size, offset = position % source->block_size;
        const char *part = source->cache + source->blocks[block] * source->layout.block_bytes;
        out->keys[i] = part + offset * 4;
        if (left >= STRIP)
            out->values[i] = part + source->layout.key_bytes
                             + offset * source->head_size * element_bytes(source->dtype);
    }
}

/* Where the keys from `start` on lie, to bring them near; 0: there are none. Only the block table is read. */
static int peek_keys(const key_source *source, int32_t start, key_tile *out) {
    if (start >= source->num_keys) return 0;
    out->key_stride = source->block_size * 4;
    for (int32_t i = 0; i < STRIPS; i++) {
        const int32_t position = start + i * STRIP < source->num_keys ? start + i * STRIP : start;
        const int32_t block = position / source->block_size, offset = position % source->block_size;
        out->keys[i] = source->cache + source->blocks[block] * source->layout.block_bytes + offset * 4;
    }
    return 1;
}
