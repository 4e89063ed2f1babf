/* vector.h for AVX-512 with its bfloat16 and int8 products. */
#pragma once

typedef __m512 floats;
typedef __m512i ints;
typedef __mmask16 lanes;
typedef struct doubles { /* 16 */
    __m512d low, high;
} doubles;

static inline lanes first_lanes(int64_t count) {
    return count >= LANES ? (lanes)0xffff : (lanes)((1u << count) - 1);
}

static inline floats floats_of(float x) { return _mm512_set1_ps(x); }
static inline floats load(const float *p) { return _mm512_loadu_ps(p); }
static inline void store(float *p, floats x) { _mm512_storeu_ps(p, x); }
static inline floats load_first(const float *p, int64_t count) { return _mm512_maskz_loadu_ps(first_lanes(count), p); }
static inline floats load_first_or(const float *p, int64_t count, floats rest) {
    return _mm512_mask_loadu_ps(rest, first_lanes(count), p);
}
static inline void store_first(float *p, int64_t count, floats x) { _mm512_mask_storeu_ps(p, first_lanes(count), x); }

static inline floats add(floats a, floats b) { return _mm512_add_ps(a, b); }
static inline floats subtract(floats a, floats b) { return _mm512_sub_ps(a, b); }
static inline floats multiply(floats a, floats b) { return _mm512_mul_ps(a, b); }
static inline floats divide(floats a, floats b) { return _mm512_div_ps(a, b); }
/* a · b + c, and c − a · b: rounded once. */
static inline floats multiply_add(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
static inline floats subtract_product(floats c, floats a, floats b) { return _mm512_fnmadd_ps(a, b, c); }
/* b where either is NaN. */
static inline floats larger(floats a, floats b) { return _mm512_max_ps(a, b); }
static inline floats smaller(floats a, floats b) { return _mm512_min_ps(a, b); }
static inline floats nearest_integer(floats x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
/* x − floor(x), 0 of infinities. */
static inline floats above_floor(floats x) {
    return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
/* x · 2^floor(n) */
static inline floats times_power_of_2(floats x, floats n) { return _mm512_scalef_ps(x, n); }
/* 1 / x to about an ulp, for x below 2^126: a guess of 14 bits and one step of Newton's. Not the same bits with AVX2. */
static inline floats reciprocal(floats x) {
    const floats guess = _mm512_rcp14_ps(x), error = _mm512_fnmadd_ps(x, guess, _mm512_set1_ps(1.0f));
    return _mm512_fmadd_ps(guess, error, guess);
}

static inline float sum_of(floats x) { return _mm512_reduce_add_ps(x); }
static inline float largest_of(floats x) { return _mm512_reduce_max_ps(x); }

/* Comparisons are false of NaN. */
static inline lanes is_less(floats a, floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
static inline lanes is_greater(floats a, floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
static inline lanes is_at_least(floats a, floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
static inline lanes is_equal(floats a, floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
static inline lanes is_nan(floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
static inline lanes both(lanes a, lanes b) { return a & b; }
/* A bit for each lane. */
static inline uint32_t bits_of(lanes x) { return x; }
static inline floats select_floats(lanes where, floats yes, floats no) { return _mm512_mask_mov_ps(no, where, yes); }
static inline ints select_ints(lanes where, ints yes, ints no) { return _mm512_mask_mov_epi32(no, where, yes); }
/* The lanes of x that are set, one behind the other; writes no more than these. Returns how many. */
static inline int64_t store_selected(float *p, lanes where, floats x) {
    _mm512_mask_compressstoreu_ps(p, where, x);
    return __builtin_popcount(where);
}

static inline ints ints_of(int32_t x) { return _mm512_set1_epi32(x); }
static inline ints load_ints(const void *p) { return _mm512_loadu_si512(p); }
static inline void store_ints(void *p, ints x) { _mm512_storeu_si512(p, x); }
static inline ints ints_add(ints a, ints b) { return _mm512_add_epi32(a, b); }
static inline ints ints_and(ints a, ints b) { return _mm512_and_si512(a, b); }
static inline ints ints_larger(ints a, ints b) { return _mm512_max_epi32(a, b); }
static inline ints ints_shift_left(ints x, int count) { return _mm512_slli_epi32(x, (unsigned)count); }
static inline ints ints_from_uint16(__m256i x) { return _mm512_cvtepu16_epi32(x); }
static inline int32_t largest_of_ints(ints x) { return _mm512_reduce_max_epi32(x); }
static inline floats as_floats(ints x) { return _mm512_castsi512_ps(x); }
static inline ints as_ints(floats x) { return _mm512_castps_si512(x); }
static inline floats floats_from_int8(__m128i x) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x)); }
static inline floats load_int8(const void *p) { return floats_from_int8(_mm_loadu_si128(p)); }
/* To the nearest even; all within [−128, 127]. */
static inline __m128i to_int8(floats x) { return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)); }
static inline floats floats_from_half(__m256i x) { return _mm512_cvtph_ps(x); }
/* To bfloat16, to the nearest even; subnormal numbers become 0. */
static inline __m256i to_bf16(floats x) { return (__m256i)_mm512_cvtneps_pbh(x); }

/* Sums + each lane's a · b, of two bfloat16 in each lane: the order is the instruction's, not the same bits with AVX2. */
static inline floats add_bf16_products(floats sums, ints a, ints b) {
    return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
}

static inline doubles no_doubles(void) { return (doubles){_mm512_setzero_pd(), _mm512_setzero_pd()}; }
static inline doubles add_to_doubles(doubles sums, floats x) {
    return (doubles){_mm512_add_pd(sums.low, _mm512_cvtps_pd(_mm512_castps512_ps256(x))),
                     _mm512_add_pd(sums.high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)))};
}
static inline double sum_of_doubles(doubles x) { return _mm512_reduce_add_pd(_mm512_add_pd(x.low, x.high)); }
