/* A head's keys or values as int8 or fp8 (e4m3) numbers with one fp16 scale, and back: the arithmetic of
 * kernels/kv_quantize.py, to the bit.
 *
 * An fp8 number's bits, moved to where fp16 has exponent and mantissa, are its value · 2⁻⁸ (fp16's bias is 15, e4m3's 7),
 * also where it is subnormal: so it is read as fp16, and its scale is multiplied by 2⁸ when that is read. */
#pragma once
#include "vector.h"

#include <math.h>

#define MAX_SCALE 65504.0f /* the largest fp16 */
#define FP8_SCALE_FACTOR 256.0f

static inline float quantized_limit(int dtype) { return dtype == INT8 ? 127.0f : 448.0f; }

/* 16 numbers as floats; of FP8, times 2⁻⁸. */
static inline floats floats_from_numbers(int dtype, const void *p) {
    if (dtype == INT8) return load_int8(p);
    const __m128i bytes = _mm_loadu_si128(p);
    const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7); /* the sign twice, exponent, mantissa, 0s */
    return floats_from_half(_mm256_and_si256(words, _mm256_set1_epi16((short)0xbfff)));
}

/* 16 fp16 scales as what numbers are to be multiplied by. */
static inline floats floats_from_scales(int dtype, const void *p) {
    const floats scales = floats_from_half(_mm256_loadu_si256(p));
    return dtype == INT8 ? scales : multiply(scales, floats_of(FP8_SCALE_FACTOR));
}

/* The bits of x, |x| ≤ 448, rounded to e4m3, ties to even. */
static inline uint8_t to_fp8(float x) {
    uint32_t bits, small;
    memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 24 & 0x80, most = bits & INT32_MAX;
    memcpy(&x, &most, 4);
    x += 16384.0f; /* below 2⁻⁶ numbers are multiples of 2⁻⁹: the sum's last bits */
    memcpy(&small, &x, 4);
    const uint32_t rounded = most + 0x7ffff + (most >> 20 & 1);
    return (uint8_t)(sign | (most < 0x3c800000 ? small - 0x46800000 : (rounded >> 20) - (120 << 3)));
}

/* The largest |x| of a head; NaN if there is one. */
static inline float largest_magnitude(const float *x, int64_t head_size) {
    ints most = ints_of(0); /* as integers: in floats' order, and NaN is the largest */
    for (int64_t i = 0; i < head_size; i += LANES)
        most = ints_larger(most, ints_and(as_ints(load(x + i)), ints_of(INT32_MAX)));
    const int32_t bits = largest_of_ints(most);
    float largest;
    memcpy(&largest, &bits, 4);
    return largest;
}

/* numbers = x quantized; returns the scale's fp16 bits. */
static inline uint16_t quantize_head(const float *x, int64_t head_size, int dtype, uint8_t *numbers) {
    const float limit = quantized_limit(dtype), wanted = largest_magnitude(x, head_size) / limit;
    const uint16_t bits = _cvtss_sh(wanted > MAX_SCALE ? MAX_SCALE : wanted, _MM_FROUND_TO_NEAREST_INT);
    const float scale = _cvtsh_ss(bits);
    if (!(scale > 0)) { /* 0, or NaN */
        memset(numbers, 0, (size_t)head_size);
        return bits;
    }
    for (int64_t i = 0; i < head_size; i++) {
        const float ratio = x[i] / scale, within = ratio > limit ? limit : ratio < -limit ? -limit : ratio;
        numbers[i] = dtype == INT8 ? (uint8_t)(int8_t)rintf(within) : to_fp8(within);
    }
    return bits;
}
