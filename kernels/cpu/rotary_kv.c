/* Norm of heads and rotary position embedding of a step's queries and keys, and the write of its keys and values into
 * the cache.
 *
 * A head vector (a, b) of two halves becomes (a·cos + b·(−sin), b·cos + a·sin): multiplied, multiplied, added, each
 * rounded to float, the very operations of kernels/rotary.py. bfloat16 is rounded to nearest even (numbers below
 * 2⁻¹²⁶ become zero); int8 and fp8 get a scale for each row and head (kv_quantize.h).
 *
 * A tile is some rows. Two rows of one pair of keys may be in different tiles: each writes its own bytes only. */
#include "kv_cache.h"
#include "kv_quantize.h"
#include "ops.h"
#include "rms.h"
#include "vector.h"

#define ROWS 8 /* of a tile: a block's worth of neighbours would save little, and a few rows should still be shared out */
#define MAX_HEAD_SIZE 256

/* `x` itself, or its norm in `room` where there is a `weight`. */
static const float *normed(const rotary_kv_args *a, const float *x, const float *weight, float *room) {
    if (!weight) return x;
    normalize(x, weight, a->head_size, a->eps, room);
    return room;
}

/* out = x rotated, then multiplied by `scale`. */
static void rotate(const float *x, const float *cos_sin, int64_t head_size, float scale, float *out) {
    const int64_t half = head_size / 2;
    const floats factor = floats_of(scale);
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t left = half - i;
        const floats a = load_first(x + i, left), b = load_first(x + half + i, left);
        const floats cos = load_first(cos_sin + i, left);
        const floats sin = load_first(cos_sin + half + i, left);
        const floats first = subtract(multiply(a, cos), multiply(b, sin));
        const floats second = add(multiply(b, cos), multiply(a, sin));
        store_first(out + i, left, multiply(first, factor));
        store_first(out + half + i, left, multiply(second, factor));
    }
}

static void write_query(const float *x, int64_t head_size, int32_t dtype, char *out) {
    for (int64_t i = 0; i < head_size; i += LANES) {
        if (dtype == BF16)
            _mm256_storeu_si256((__m256i *)(out + i * 2), to_bf16(load(x + i)));
        else
            store((float *)(out + i * 4), load(x + i));
    }
}

/* `keys`: the head's part of the block. */
static void write_key(const float *x, int64_t head_size, int64_t block_size, int64_t offset, int32_t dtype, char *keys) {
    _Alignas(64) uint32_t words[MAX_HEAD_SIZE]; /* elements, or pairs of them */
    write_query(x, head_size, dtype, (char *)words);
    uint32_t *out = (uint32_t *)keys + offset;
    const int64_t num_words = dtype == BF16 ? head_size / 2 : head_size;
    for (int64_t i = 0; i < num_words; i++) out[i * block_size] = words[i];
}

static void write_value(const float *x, int64_t head_size, int64_t offset, int32_t dtype, char *values) {
    if (dtype == F32) {
        write_query(x, head_size, dtype, values + offset * head_size * 4);
        return;
    }
    uint16_t narrow[MAX_HEAD_SIZE], *pairs = (uint16_t *)(values + offset / 2 * head_size * 4) + offset % 2;
    write_query(x, head_size, dtype, (char *)narrow);
    for (int64_t i = 0; i < head_size; i++) pairs[2 * i] = narrow[i];
}

/* A key's and a value's numbers and scales. */
static void write_quantized(const float *key, const float *value, const rotary_kv_args *a, const kv_layout *layout,
                            int64_t offset, char *part) {
    uint8_t numbers[MAX_HEAD_SIZE];
    uint16_t *scales = (uint16_t *)(part + layout->scales_at) + offset;
    scales[0] = quantize_head(key, a->head_size, a->cache_dtype, numbers);
    for (int64_t i = 0; i < a->head_size; i++) ((uint8_t *)part)[i * a->block_size + offset] = numbers[i];
    uint8_t *values = (uint8_t *)part + layout->key_bytes + offset * a->head_size;
    scales[a->block_size] = quantize_head(value, a->head_size, a->cache_dtype, values);
}

static void run_row(const rotary_kv_args *a, const step *step, int64_t row) {
    _Alignas(64) float rotated[MAX_HEAD_SIZE], room[MAX_HEAD_SIZE];
    const int64_t size = a->head_size;
    const float *x = a->qkv + row * (a->heads + 2 * a->kv_heads) * size;
    const float *cos_sin = a->cos_sin + step->positions[row] * size;
    const int32_t dtype = query_dtype(a->cache_dtype);
    char *query = (char *)a->query + row * a->heads * size * element_bytes(dtype);
    for (int64_t head = 0; head < a->heads; head++) {
        rotate(normed(a, x + head * size, a->query_norm, room), cos_sin, size, a->query_scale, rotated);
        write_query(rotated, size, dtype, query + head * size * element_bytes(dtype));
    }
    const int64_t slot = step->slots[row];
    if (slot < 0) return;
    const kv_layout layout = kv_layout_of(a->cache_dtype, size, a->block_size, a->block_stride);
    char *part = (char *)a->cache + slot / a->block_size * layout.block_bytes;
    const int64_t offset = slot % a->block_size;
    for (int64_t head = 0; head < a->kv_heads; head++, part += layout.head_bytes) {
        rotate(normed(a, x + (a->heads + head) * size, a->key_norm, room), cos_sin, size, 1.0f, rotated);
        const float *value = x + (a->heads + a->kv_heads + head) * size;
        if (has_scales(a->cache_dtype)) {
            write_quantized(rotated, value, a, &layout, offset, part);
            continue;
        }
        write_key(rotated, size, a->block_size, offset, a->cache_dtype, part);
        write_value(value, size, offset, a->cache_dtype, part + layout.key_bytes);
    }
}

static int64_t num_tiles(const void *args, const step *step, int num_threads) {
    return ceil_div(step->num_rows, ROWS);
}

static void run_tile(const void *args, const step *step, int64_t tile, int thread, int num_threads) {
    const int64_t end = (tile + 1) * ROWS < step->num_rows ? (tile + 1) * ROWS : step->num_rows;
    for (int64_t row = tile * ROWS; row < end; row++) run_row(args, step, row);
}

const op_class rotary_kv_class = {.num_tiles = num_tiles, .run_tile = run_tile};
