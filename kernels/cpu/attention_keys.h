/* Finds the strips of a key tile in the cache, and copies those that can't be read where they lie.
 *
 * A strip is 16 keys in the cache's own arrangement. Where blocks hold a multiple of 16 tokens, strips are read in
 * place. Other block sizes are copied strip by strip; and of a strip that goes past the context the values are copied,
 * zeros in place of what is stale. Copies are arranged as in a block of 16, so results have the same bits. Numbers of a
 * quantized cache are finite whatever they are, so stale ones stay: their scales are read as zeros.
 *
 * Blocks before the one of `first_key` are not read: in place of a strip that no row sees stand whatever keys of that
 * block and values, or scales, of zeros. */
#pragma once
#include "attention_products.h"
#include "kv_quantize.h"

#include <string.h>

/* A sequence's part of the cache. */
typedef struct key_source {
    const char *cache; /* with the KV head's offset */
    const int32_t *blocks;
    kv_layout layout;
    int32_t dtype;
    int32_t block_size;
    int32_t head_size;
    int32_t first_key; /* none before it is seen by any row */
    int32_t num_keys;  /* the context */
    char *copies;     /* [STRIPS][keys, values of a strip] */
} key_source;

static inline int64_t strip_bytes(int32_t dtype, int64_t head_size) {
    return 2 * STRIP * head_size * element_bytes(dtype);
}

/* `count` keys of one block, from `offset` on, to keys `to` .. of a strip. */
static void copy_keys(const key_source *source, const char *part, int32_t offset, int32_t count, int32_t to,
                      char *keys) {
    const int64_t words = source->dtype == BF16 ? source->head_size / 2 : source->head_size;
    const int64_t bytes = word_bytes(source->dtype);
    for (int64_t i = 0; i < words; i++)
        memcpy(keys + (i * STRIP + to) * bytes, part + (i * source->block_size + offset) * bytes,
               (size_t)(count * bytes));
}

/* Likewise of values. */
static void copy_values(const key_source *source, const char *part, int32_t offset, int32_t count, int32_t to,
                        char *values) {
    const int64_t size = source->head_size, key_bytes = size * element_bytes(source->dtype);
    const char *from = part + source->layout.key_bytes;
    int32_t k = 0;
    if (source->dtype != BF16 || (offset % 2 == 0 && to % 2 == 0)) {
        k = source->dtype != BF16 ? count : count / 2 * 2;
        memcpy(values + to * key_bytes, from + offset * key_bytes, (size_t)(k * key_bytes));
    }
    for (; k < count; k++) { /* one half of each pair */
        const uint32_t *in = (const uint32_t *)from + (offset + k) / 2 * size;
        uint32_t *out = (uint32_t *)values + (to + k) / 2 * size;
        const int in_shift = (offset + k) % 2 * 16, out_shift = (to + k) % 2 * 16;
        for (int64_t d = 0; d < size; d++)
            out[d] = (out[d] & ~(0xffffu << out_shift)) | (in[d] >> in_shift & 0xffffu) << out_shift;
    }
}

/* Of STRIP keys from `position` on, how many are before the first that is seen. */
static inline int32_t num_unseen(const key_source *source, int32_t position) {
    const int32_t unseen = source->first_key - position;
    return unseen < 0 ? 0 : unseen < STRIP ? unseen : STRIP;
}

/* Keys from `position` on, `count` of them, zeros for those behind them and for those that are not seen. */
static void copy_strip(const key_source *source, int32_t position, int32_t count, char *keys, char *values) {
    const int32_t unseen = num_unseen(source, position);
    if (count < STRIP || unseen) memset(keys, 0, (size_t)strip_bytes(source->dtype, source->head_size));
    for (int32_t done = unseen, run; done < count; done += run) {
        const int32_t block = (position + done) / source->block_size, offset = (position + done) % source->block_size;
        const char *part = source->cache + source->blocks[block] * source->layout.block_bytes;
        run = source->block_size - offset < count - done ? source->block_size - offset : count - done;
        copy_keys(source, part, offset, run, done, keys);
        copy_values(source, part, offset, run, done, values);
    }
}

/* Where strips begin from `start` on: all of them, where blocks hold a multiple of 16 tokens. Those in blocks that are not
 * read: as if they lay in the first one that is. */
static void point_at_strips(const key_source *source, int32_t start, int32_t num_strips, key_tile *out) {
    int32_t block = start / source->block_size, offset = start % source->block_size;
    const int32_t least = source->first_key / source->block_size;
    out->key_stride = source->block_size * word_bytes(source->dtype);
    out->num_strips = num_strips;
    for (int32_t i = 0; i < num_strips; i++, offset += STRIP) {
        for (; offset >= source->block_size; offset -= source->block_size) block++;
        const int32_t read = block > least ? block : least;
        const char *part = source->cache + source->blocks[read] * source->layout.block_bytes;
        out->keys[i] = part + offset * word_bytes(source->dtype);
        out->values[i] = part + source->layout.key_bytes + offset * source->head_size * element_bytes(source->dtype);
    }
}

/* Zeros in place of the values of strips that no row sees, in the second half of the first copy. */
static inline void hide_values(const key_source *source, int32_t start, key_tile *out) {
    const int32_t unseen = (source->first_key - start) / STRIP;
    if (unseen <= 0) return;
    const int64_t bytes = strip_bytes(source->dtype, source->head_size) / 2;
    memset(source->copies + bytes, 0, (size_t)bytes);
    for (int32_t i = 0; i < unseen && i < out->num_strips; i++) out->values[i] = source->copies + bytes;
}

/* The strips of the keys from `start` on; values behind the context are zeros. */
static void find_strips(const key_source *source, int32_t start, int32_t num_strips, key_tile *out) {
    const int64_t bytes = strip_bytes(source->dtype, source->head_size);
    const int32_t last = num_strips - 1, left = source->num_keys - start - last * STRIP; /* from the last strip on */
    if (source->block_size % STRIP == 0) {
        point_at_strips(source, start, num_strips, out);
        hide_values(source, start, out);
        if (left >= STRIP || has_scales(source->dtype)) return;
        const char *part = out->values[last] - source->layout.key_bytes;
        memset(source->copies, 0, (size_t)(bytes / 2));
        copy_values(source, part, 0, left, 0, source->copies);
        out->values[last] = source->copies;
        return;
    }
    out->key_stride = STRIP * word_bytes(source->dtype);
    out->num_strips = num_strips;
    for (int32_t i = 0; i < num_strips; i++) {
        char *copy = source->copies + i * bytes;
        copy_strip(source, start + i * STRIP, i < last || left > STRIP ? STRIP : left, copy, copy + bytes / 2);
        out->keys[i] = copy;
        out->values[i] = copy + bytes / 2;
    }
}

/* The scales of a position, those of its key; those of its value are block_size further on. */
static inline const uint16_t *scales_at(const key_source *source, int32_t position) {
    const char *part = source->cache + source->blocks[position / source->block_size] * source->layout.block_bytes;
    return (const uint16_t *)(part + source->layout.scales_at) + position % source->block_size;
}

/* `count` scales, one by one, of keys and of values of a strip; zeros behind them and of keys that are not seen. */
static void gather_scales(const key_source *source, int32_t position, int32_t count, uint16_t found[2][STRIP]) {
    memset(found, 0, 2 * STRIP * sizeof(uint16_t));
    for (int32_t i = num_unseen(source, position); i < count; i++) {
        const uint16_t *scales = scales_at(source, position + i);
        found[0][i] = scales[0], found[1][i] = scales[source->block_size];
    }
}

/* Scales of keys and values from `start` on, `count` of them, as what numbers are to be multiplied by; zeros up to the
 * next multiple of 16. */
static void read_scales(const key_source *source, int32_t start, int32_t count, float *keys, float *values) {
    for (int32_t i = 0; i < count; i += STRIP) {
        const uint16_t *own, *behind;
        uint16_t found[2][STRIP];
        if (source->block_size % STRIP || count - i < STRIP || num_unseen(source, start + i)) {
            gather_scales(source, start + i, count - i < STRIP ? count - i : STRIP, found);
            own = found[0], behind = found[1];
        } else {
            own = scales_at(source, start + i), behind = own + source->block_size;
        }
        store(keys + i, floats_from_scales(source->dtype, own));
        store(values + i, floats_from_scales(source->dtype, behind));
    }
}

/* About where the keys from `start` on lie, to bring them near. Only the block table is read. */
static void peek_keys(const key_source *source, int32_t start, key_tile *out) {
    const int32_t left = source->num_keys - start, strips = left > 0 ? (int32_t)ceil_div(left, STRIP) : 0;
    point_at_strips(source, start, strips < STRIPS ? strips : STRIPS, out);
    for (int64_t i = out->num_strips; out->num_strips && i < STRIPS; i++) out->keys[i] = out->keys[0];
}
