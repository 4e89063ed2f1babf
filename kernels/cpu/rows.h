/* What the ops that work row by row share: how rows are cut into tiles, and a row's conversions. */
#pragma once
#include "ops.h"
#include "vector.h"

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

/* Clear a row from `used` bytes to the next multiple of 64, at most to its stride: what linears read beyond `in`. */
static inline void clear_padding(void *row, int64_t used, int64_t stride) {
    const int64_t padded = ceil_div(used, 64) * 64, end = padded < stride ? padded : stride;
    if (end > used) memset((char *)row + used, 0, (size_t)(end - used));
}

/* out[width] = in[width], to the nearest even; subnormal numbers become 0. */
static inline void narrow_row(const float *in, uint16_t *out, int64_t width) {
    for (int64_t k = 0; k < width; k += LANES) store_first_uint16(out + k, width - k, to_bf16(load_first(in + k, width - k)));
}

static inline void widen_row(const uint16_t *in, float *out, int64_t width) {
    for (int64_t k = 0; k < width; k += LANES)
        store_first(out + k, width - k, from_bf16(load_first_uint16(in + k, width - k)));
}

/* The sum of 32 numbers: of 8 each, + 128 each, then of these. */
static inline int32_t sum_of_group(const int8_t *numbers) {
    const __m256i sign = _mm256_set1_epi8((char)0x80);
    const __m256i biased = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)numbers), sign);
    const __m256i eights = _mm256_sad_epu8(biased, _mm256_setzero_si256());
    const __m128i sums = _mm_add_epi64(_mm256_castsi256_si128(eights), _mm256_extracti128_si256(eights, 1));
    return _mm_cvtsi128_si32(_mm_add_epi64(sums, _mm_unpackhi_epi64(sums, sums))) - 128 * INT4_GROUP;
}

/* What a quantized row ends in (ops.h), from its padded numbers. */
static inline void finish_quantized_row(int8_t *row, int64_t width) {
    int32_t *starts = (int32_t *)(row + quantized_width(width)), all = 0;
    for (int64_t k = 0; k < width; k += INT4_GROUP) {
        const int32_t sum = sum_of_group(row + k);
        starts[1 + k / INT4_GROUP] = -INT4_ZERO_POINT * sum;
        all += sum;
    }
    starts[0] = -INT8_ZERO_POINT * all;
}

/* out = in as a quantized row; returns its scale. A row so near 0 that its scale has no inverse counts as 0. */
static inline float quantize_row(const float *in, int8_t *out, int64_t width) {
    ints most = ints_of(0); /* as integers: in floats' order, and NaN is the largest */
    for (int64_t k = 0; k < width; k += LANES)
        most = ints_larger(most, ints_and(as_ints(load_first(in + k, width - k)), ints_of(INT32_MAX)));
    const int32_t largest_bits = largest_of_ints(most);
    float largest;
    memcpy(&largest, &largest_bits, 4);
    const int is_finite = largest < __builtin_inff(), is_zero = largest <= 0x1p-100f;
    memset(out + width, 0, (size_t)(quantized_width(width) - width));
    if (is_zero || !is_finite) {
        memset(out, 0, (size_t)width);
    } else { /* the last vector's other lanes are 0, as the padding is */
        const floats inverse = floats_of(127.0f / largest);
        for (int64_t k = 0; k < width; k += LANES)
            _mm_storeu_si128((__m128i *)(out + k), to_int8(multiply(load_first(in + k, width - k), inverse)));
    }
    finish_quantized_row(out, width);
    return is_zero ? 0.0f : is_finite ? largest / 127.0f : __builtin_nanf("");
}
