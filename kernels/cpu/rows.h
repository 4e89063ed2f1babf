/* What the ops that work row by row share: how rows are cut into tiles, and a row's conversions. */
#pragma once
#include "ops.h"
#include "vector_math.h"

#include <immintrin.h>
#include <string.h>

/* A row of some thousand numbers takes about as long as taking a tile: one a tile while there are few, then more, but
 * so that each thread gets several tiles. */
#define MAX_ROWS_PER_TILE 16
#define TILES_PER_THREAD 4

static inline int64_t rows_per_tile(int64_t num_rows, int num_threads) {
    const int64_t wanted = num_rows / (TILES_PER_THREAD * num_threads);
    return wanted < 1 ? 1 : wanted > MAX_ROWS_PER_TILE ? MAX_ROWS_PER_TILE : wanted;
}

static inline int64_t row_tiles(int64_t num_rows, int num_threads) {
    return ceil_div(num_rows, rows_per_tile(num_rows, num_threads));
}

typedef struct row_range {
    int64_t begin, end;
} row_range;

static inline row_range rows_of_tile(int64_t num_rows, int64_t tile, int num_threads) {
    const int64_t size = rows_per_tile(num_rows, num_threads), end = (tile + 1) * size;
    return (row_range){tile * size, end < num_rows ? end : num_rows};
}

/* The first `count` lanes, all from 16 on. */
static inline __mmask16 first_lanes(int64_t count) {
    return count >= LANES ? (__mmask16)0xffff : (__mmask16)((1u << count) - 1);
}

/* Clear a row from `used` bytes to the next multiple of 64, at most to its stride: what linears read beyond `in`. */
static inline void clear_padding(void *row, int64_t used, int64_t stride) {
    const int64_t padded = ceil_div(used, 64) * 64, end = padded < stride ? padded : stride;
    if (end > used) memset((char *)row + used, 0, (size_t)(end - used));
}

/* out[width] = in[width], to the nearest even; subnormal numbers become 0. */
static inline void narrow_row(const float *in, uint16_t *out, int64_t width) {
    for (int64_t k = 0; k < width; k += LANES) {
        const __mmask16 lanes = first_lanes(width - k);
        const __m256i narrow = to_bf16(_mm512_maskz_loadu_ps(lanes, in + k));
        _mm256_mask_storeu_epi16(out + k, lanes, narrow);
    }
}

static inline void widen_row(const uint16_t *in, float *out, int64_t width) {
    for (int64_t k = 0; k < width; k += LANES) {
        const __mmask16 lanes = first_lanes(width - k);
        _mm512_mask_storeu_ps(out + k, lanes, from_bf16(_mm256_maskz_loadu_epi16(lanes, in + k)));
    }
}

/* What a quantized row ends in (ops.h), from its padded numbers. */
static inline void finish_quantized_row(int8_t *row, int64_t width) {
    const __m512i sign = _mm512_set1_epi8((char)0x80), zero = _mm512_setzero_si512();
    int32_t *starts = (int32_t *)(row + quantized_width(width)), all = 0;
    for (int64_t k = 0; k < width; k += 64) {
        /* The sums of 8 numbers, each + 128, then of both halves of each 16, then of each 32. */
        __m512i sum = _mm512_sad_epu8(_mm512_xor_si512(_mm512_loadu_si512(row + k), sign), zero);
        sum = _mm512_add_epi64(sum, _mm512_shuffle_epi32(sum, _MM_PERM_BADC));
        sum = _mm512_add_epi64(sum, _mm512_shuffle_i64x2(sum, sum, 0xB1));
        const int32_t first = _mm_cvtsi128_si32(_mm512_castsi512_si128(sum)) - 128 * INT4_GROUP;
        const int32_t second = _mm_cvtsi128_si32(_mm512_extracti32x4_epi32(sum, 2)) - 128 * INT4_GROUP;
        starts[1 + k / INT4_GROUP] = -INT4_ZERO_POINT * first;
        if (k + INT4_GROUP < width) starts[2 + k / INT4_GROUP] = -INT4_ZERO_POINT * second;
        all += first + second;
    }
    starts[0] = -INT8_ZERO_POINT * all;
}

/* out = in as a quantized row; returns its scale. A row so near 0 that its scale has no inverse counts as 0. */
static inline float quantize_row(const float *in, int8_t *out, int64_t width) {
    const __m512i magnitude = _mm512_set1_epi32(INT32_MAX);
    __m512i most = _mm512_setzero_si512(); /* as integers: in floats' order, and NaN is the largest */
    for (int64_t k = 0; k < width; k += LANES) {
        const __m512i bits = _mm512_maskz_loadu_epi32(first_lanes(width - k), in + k);
        most = _mm512_max_epu32(most, _mm512_and_si512(bits, magnitude));
    }
    const float largest = _mm512_cvtss_f32(_mm512_castsi512_ps(_mm512_set1_epi32((int)_mm512_reduce_max_epu32(most))));
    const int is_finite = largest < __builtin_inff(), is_zero = largest <= 0x1p-100f;
    memset(out + width, 0, (size_t)(quantized_width(width) - width));
    if (is_zero || !is_finite) {
        memset(out, 0, (size_t)width);
    } else {
        const __m512 inverse = _mm512_set1_ps(127.0f / largest);
        for (int64_t k = 0; k < width; k += LANES) {
            const __mmask16 lanes = first_lanes(width - k);
            const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, in + k), inverse));
            _mm_mask_storeu_epi8(out + k, lanes, _mm512_cvtepi32_epi8(q));
        }
    }
    finish_quantized_row(out, width);
    return is_zero ? 0.0f : is_finite ? largest / 127.0f : __builtin_nanf("");
}
