/* Rotary position embedding of a step's queries and keys, and the write of its keys and values into the cache.
 *
 * A head vector (a, b) of two halves becomes (a·cos + b·(−sin), b·cos + a·sin): multiplied, multiplied, added, each
 * rounded to float, the very operations of kernels/rotary.py. bfloat16 is rounded to nearest even (numbers below
 * 2⁻¹²⁶ become zero).
 *
 * A tile is some rows. Two rows of one pair of keys may be in different tiles: each writes its own bytes only. */
#include "kv_cache.h"
#include "ops.h"

#include <immintrin.h>

#define ROWS 8 /* of a tile: a block's worth of neighbours would save little, and a few rows should still be shared out */
#define MAX_HEAD_SIZE 256

static inline __mmask16 lanes_left(int64_t count) {
    return count >= LANES ? 0xffff : (__mmask16)((1u << count) - 1);
}

/* out = x rotated, then multiplied by `scale`. */
static void rotate(const float *x, const float *cos_sin, int64_t head_size, float scale, float *out) {
    const int64_t half = head_size / 2;
    const __m512 factor = _mm512_set1_ps(scale);
    for (int64_t i = 0; i < half; i += LANES) {
        const __mmask16 lanes = lanes_left(half - i);
        const __m512 a = _mm512_maskz_loadu_ps(lanes, x + i), b = _mm512_maskz_loadu_ps(lanes, x + half + i);
        const __m512 cos = _mm512_maskz_loadu_ps(lanes, cos_sin + i);
        const __m512 sin = _mm512_maskz_loadu_ps(lanes, cos_sin + half + i);
        const __m512 first = _mm512_sub_ps(_mm512_mul_ps(a, cos), _mm512_mul_ps(b, sin));
        const __m512 second = _mm512_add_ps(_mm512_mul_ps(b, cos), _mm512_mul_ps(a, sin));
        _mm512_mask_storeu_ps(out + i, lanes, _mm512_mul_ps(first, factor));
        _mm512_mask_storeu_ps(out + half + i, lanes, _mm512_mul_ps(second, factor));
    }
}

static inline __m256i to_bf16(const float *x) { return (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x)); }

static void write_query(const float *x, int64_t head_size, int32_t dtype, char *out) {
    for (int64_t i = 0; i < head_size; i += LANES) {
        if (dtype == BF16)
            _mm256_storeu_si256((__m256i *)(out + i * 2), to_bf16(x + i));
        else
            _mm512_storeu_ps((float *)(out + i * 4), _mm512_loadu_ps(x + i));
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
    char *pairs = values + offset / 2 * head_size * 4;
    const __mmask32 own = offset % 2 ? 0xaaaaaaaau : 0x55555555u;
    for (int64_t i = 0; i < head_size; i += LANES) {
        const __m512i wide = _mm512_cvtepu16_epi32(to_bf16(x + i));
        _mm512_mask_storeu_epi16(pairs + i * 4, own, _mm512_or_si512(wide, _mm512_slli_epi32(wide, 16)));
    }
}

static void run_row(const rotary_kv_args *a, const step *step, int64_t row) {
    _Alignas(64) float rotated[MAX_HEAD_SIZE];
    const int64_t size = a->head_size;
    const float *x = a->qkv + row * (a->heads + 2 * a->kv_heads) * size;
    const float *cos_sin = a->cos_sin + step->positions[row] * size;
    char *query = (char *)a->query + row * a->heads * size * element_bytes(a->cache_dtype);
    for (int64_t head = 0; head < a->heads; head++) {
        rotate(x + head * size, cos_sin, size, a->query_scale, rotated);
        write_query(rotated, size, a->cache_dtype, query + head * size * element_bytes(a->cache_dtype));
    }
    const int64_t slot = step->slots[row];
    if (slot < 0) return;
    const kv_layout layout = kv_layout_of(a->cache_dtype, size, a->block_size, a->block_stride);
    char *part = (char *)a->cache + slot / a->block_size * layout.block_bytes;
    const int64_t offset = slot % a->block_size;
    for (int64_t head = 0; head < a->kv_heads; head++, part += layout.head_bytes) {
        rotate(x + (a->heads + head) * size, cos_sin, size, 1.0f, rotated);
        write_key(rotated, size, a->block_size, offset, a->cache_dtype, part);
        write_value(x + (a->heads + a->kv_heads + head) * size, size, offset, a->cache_dtype, part + layout.key_bytes);
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
