/* Vectors of 16 floats or 32-bit integers: one register with AVX-512, a pair of registers with AVX2.
 *
 * All but the products of linears and of attention is written in these, once for every instruction set. The same
 * function rounds in the same places whichever it is compiled for; what is not bit for bit the same says so.
 *
 * Loads and stores need no alignment. `_first` ones touch `count` lanes only (16 if it is more); what is not loaded is 0.
 */
#pragma once
#include "isa.h"
#include "quire.h"

#include <immintrin.h>
#include <string.h>

#if HAS_AVX512
#include "vector_avx512.h"
#else
#include "vector_avx2.h"
#endif

/* 16 numbers of 16 bits, the first `count` of them. */
static inline __m256i load_first_uint16(const uint16_t *p, int64_t count) {
    if (count >= LANES) return _mm256_loadu_si256((const __m256i *)p);
    uint16_t all[LANES] = {0};
    memcpy(all, p, (size_t)count * 2);
    return _mm256_loadu_si256((const __m256i *)all);
}
static inline void store_first_uint16(uint16_t *p, int64_t count, __m256i x) {
    if (count >= LANES) {
        _mm256_storeu_si256((__m256i *)p, x);
    } else {
        uint16_t all[LANES];
        _mm256_storeu_si256((__m256i *)all, x);
        memcpy(p, all, (size_t)count * 2);
    }
}

/* 16 bfloat16 to floats. */
static inline floats from_bf16(__m256i x) {
    return as_floats(ints_shift_left(ints_from_uint16(x), 16));
}

/* 2^x of 16 floats.
 *
 * x = n + r with n = floor(x) and r in [0, 1), both exact; 2^r is a polynomial of degree 6 with constant term 1, fitted
 * for the least relative error (Remez: 0.034 · 2⁻²⁴ before rounding). With the rounding of its evaluation the error
 * stays below 1.1 ulp (2⁻²³ relative to a result in [1, 2)), measured over all r.
 *
 * Exact where it matters: 2^0 = 1, 2^−inf = 0, and no NaN unless x is NaN. */
static inline floats exp2_of(floats x) {
    const floats r = above_floor(x);
    floats y = floats_of(0x1.c54174p-13f);
    y = multiply_add(y, r, floats_of(0x1.46d64ep-10f));
    y = multiply_add(y, r, floats_of(0x1.3d0b92p-7f));
    y = multiply_add(y, r, floats_of(0x1.c68912p-5f));
    y = multiply_add(y, r, floats_of(0x1.ebfd58p-3f));
    y = multiply_add(y, r, floats_of(0x1.62e42cp-1f));
    y = multiply_add(y, r, floats_of(1.0f));
    return times_power_of_2(y, x);
}

/* e^x to about 1 ulp for x in [−87, 88]; 0 below (−inf too), large above. x = n ln 2 + r, |r| ≤ ln 2 / 2; e^r by its
 * series to r^7, whose remainder is below 2^−25. NaN gives NaN. */
static inline floats exp_of(floats x) {
    const floats n = nearest_integer(multiply(x, floats_of(1.44269504088896341f)));
    floats r = subtract_product(x, n, floats_of(0.693145751953125f));
    r = subtract_product(r, n, floats_of(1.42860682030941723e-6f));
    floats y = floats_of(1.0f / 5040);
    y = multiply_add(y, r, floats_of(1.0f / 720));
    y = multiply_add(y, r, floats_of(1.0f / 120));
    y = multiply_add(y, r, floats_of(1.0f / 24));
    y = multiply_add(y, r, floats_of(1.0f / 6));
    y = multiply_add(y, r, floats_of(0.5f));
    y = multiply_add(y, r, floats_of(1.0f));
    y = multiply_add(y, r, floats_of(1.0f));
    return select_floats(is_less(x, floats_of(-87.3f)), floats_of(0), times_power_of_2(y, n));
}
