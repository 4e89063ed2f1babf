/* vector.h for AVX2 with FMA and F16C: each vector is two registers, lanes 0 to 7 and 8 to 15. */
#pragma once

typedef struct floats {
    __m256 low, high;
} floats;
typedef struct ints {
    __m256i low, high;
} ints;
typedef struct lanes { /* all bits of a lane, or none */
    __m256i low, high;
} lanes;
typedef struct doubles { /* 16 */
    __m256d part[4];
} doubles;


static inline floats floats_of(float x) { return (floats){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline floats load(const float *p) { return (floats){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float *p, floats x) {
    _mm256_storeu_ps(p, x.low);
    _mm256_storeu_ps(p + 8, x.high);
}
static inline floats load_first(const float *p, int64_t count) {
    if (count >= LANES) return load(p);
    float all[LANES] = {0};
    memcpy(all, p, (size_t)count * 4);
    return load(all);
}
static inline floats load_first_or(const float *p, int64_t count, floats rest) {
    if (count >= LANES) return load(p);
    float all[LANES];
    _mm256_storeu_ps(all, rest.low), _mm256_storeu_ps(all + 8, rest.high);
    memcpy(all, p, (size_t)count * 4);
    return load(all);
}
static inline void store_first(float *p, int64_t count, floats x) {
    if (count >= LANES) {
        store(p, x);
    } else {
        float all[LANES];
        store(all, x);
        memcpy(p, all, (size_t)count * 4);
    }
}

#define BINARY(name, instruction)                                                                             \
    static inline floats name(floats a, floats b) {                                                           \
        return (floats){instruction(a.low, b.low), instruction(a.high, b.high)};                              \
    }
BINARY(add, _mm256_add_ps)
BINARY(subtract, _mm256_sub_ps)
BINARY(multiply, _mm256_mul_ps)
BINARY(divide, _mm256_div_ps)
/* b where either is NaN. */
BINARY(larger, _mm256_max_ps)
BINARY(smaller, _mm256_min_ps)
#undef BINARY

/* a · b + c, and c − a · b: rounded once. */
static inline floats multiply_add(floats a, floats b, floats c) {
    return (floats){_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
static inline floats subtract_product(floats c, floats a, floats b) {
    return (floats){_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
static inline floats nearest_integer(floats x) {
    return (floats){_mm256_round_ps(x.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                    _mm256_round_ps(x.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

/* What 2^n is computed from: at the ends 2^n is 0 and infinity, in between floor and what is above it are exact. */
static inline floats clamp_exponent(floats n) { return smaller(floats_of(254.0f), larger(floats_of(-252.0f), n)); }

/* x − floor(x), 0 of infinities. */
static inline floats above_floor(floats x) {
    x = clamp_exponent(x);
    return subtract(x, (floats){_mm256_floor_ps(x.low), _mm256_floor_ps(x.high)});
}

static inline __m256 scale_half(__m256 x, __m256 n) {
    const __m256i whole = _mm256_cvtps_epi32(_mm256_floor_ps(n)), bias = _mm256_set1_epi32(127);
    const __m256i first = _mm256_srai_epi32(whole, 1), second = _mm256_sub_epi32(whole, first);
    x = _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(first, bias), 23)));
    return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(second, bias), 23)));
}

/* x · 2^floor(n), in two steps since one factor's exponent may be out of range. A subnormal result is rounded twice. */
static inline floats times_power_of_2(floats x, floats n) {
    n = clamp_exponent(n);
    return (floats){scale_half(x.low, n.low), scale_half(x.high, n.high)};
}

/* 1 / x. Not the same bits with AVX-512. */
static inline floats reciprocal(floats x) { return divide(floats_of(1.0f), x); }

/* In the order of AVX-512's reductions: halves, then halves of these. */
static inline float sum_of(floats x) {
    const __m256 eight = _mm256_add_ps(x.low, x.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
static inline float largest_of(floats x) {
    const __m256 eight = _mm256_max_ps(x.low, x.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

/* Comparisons are false of NaN. */
#define COMPARISON(name, predicate)                                                                           \
    static inline lanes name(floats a, floats b) {                                                            \
        return (lanes){_mm256_castps_si256(_mm256_cmp_ps(a.low, b.low, predicate)),                           \
                       _mm256_castps_si256(_mm256_cmp_ps(a.high, b.high, predicate))};                        \
    }
COMPARISON(is_less, _CMP_LT_OQ)
COMPARISON(is_greater, _CMP_GT_OQ)
COMPARISON(is_at_least, _CMP_GE_OQ)
COMPARISON(is_equal, _CMP_EQ_OQ)
COMPARISON(is_unordered, _CMP_UNORD_Q)
#undef COMPARISON
static inline lanes is_nan(floats x) { return is_unordered(x, x); }

static inline lanes first_lanes(int64_t count) {
    const __m256i number = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const int32_t few = count < LANES ? (int32_t)count : LANES;
    return (lanes){_mm256_cmpgt_epi32(_mm256_set1_epi32(few), number),
                   _mm256_cmpgt_epi32(_mm256_set1_epi32(few - 8), number)};
}
static inline lanes both(lanes a, lanes b) {
    return (lanes){_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)};
}
/* A bit for each lane. */
static inline uint32_t bits_of(lanes x) {
    const int low = _mm256_movemask_ps(_mm256_castsi256_ps(x.low));
    return (uint32_t)low | (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(x.high)) << 8;
}
static inline floats select_floats(lanes where, floats yes, floats no) {
    return (floats){_mm256_blendv_ps(no.low, yes.low, _mm256_castsi256_ps(where.low)),
                    _mm256_blendv_ps(no.high, yes.high, _mm256_castsi256_ps(where.high))};
}
static inline ints select_ints(lanes where, ints yes, ints no) {
    return (ints){_mm256_blendv_epi8(no.low, yes.low, where.low), _mm256_blendv_epi8(no.high, yes.high, where.high)};
}
/* The lanes of x that are set, one behind the other; writes no more than these. Returns how many. */
static inline int64_t store_selected(float *p, lanes where, floats x) {
    float all[LANES];
    int64_t count = 0;
    uint32_t left = bits_of(where);
    if (left) store(all, x);
    for (; left; left &= left - 1) p[count++] = all[__builtin_ctz(left)];
    return count;
}

static inline ints ints_of(int32_t x) { return (ints){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline ints load_ints(const void *p) {
    return (ints){_mm256_loadu_si256(p), _mm256_loadu_si256((const __m256i *)p + 1)};
}
static inline void store_ints(void *p, ints x) {
    _mm256_storeu_si256(p, x.low);
    _mm256_storeu_si256((__m256i *)p + 1, x.high);
}
static inline ints ints_add(ints a, ints b) {
    return (ints){_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
static inline ints ints_and(ints a, ints b) {
    return (ints){_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)};
}
static inline ints ints_larger(ints a, ints b) {
    return (ints){_mm256_max_epi32(a.low, b.low), _mm256_max_epi32(a.high, b.high)};
}
static inline ints ints_shift_left(ints x, int count) {
    return (ints){_mm256_slli_epi32(x.low, count), _mm256_slli_epi32(x.high, count)};
}
static inline ints ints_from_uint16(__m256i x) {
    return (ints){_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)),
                  _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1))};
}
static inline int32_t largest_of_ints(ints x) {
    int32_t all[LANES], largest;
    store_ints(all, x);
    largest = all[0];
    for (int i = 1; i < LANES; i++) largest = all[i] > largest ? all[i] : largest;
    return largest;
}
static inline floats as_floats(ints x) {
    return (floats){_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)};
}
static inline ints as_ints(floats x) { return (ints){_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }
static inline floats floats_from_int8(__m128i x) {
    return (floats){_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)),
                    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}
/* The same of 16 bytes in memory, each half widened as it is loaded. */
static inline floats load_int8(const void *p) {
    return (floats){_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p))),
                    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)((const char *)p + 8))))};
}
/* 16 numbers of 0 to 65535, in order. */
static inline __m256i narrow_ints(ints x) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(x.low, x.high), 0xD8);
}
/* To the nearest even; all within [−128, 127]. */
static inline __m128i to_int8(floats x) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high));
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xD8);
    return _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
}
static inline floats floats_from_half(__m256i x) {
    return (floats){_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}

static inline __m256i round_half_to_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x), sign = _mm256_set1_epi32(INT32_MIN);
    const __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i is_subnormal = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x800000), _mm256_andnot_si256(sign, bits));
    const __m256i finite = _mm256_blendv_epi8(rounded, _mm256_and_si256(bits, sign), is_subnormal);
    return _mm256_srli_epi32(_mm256_blendv_epi8(finite, quiet, is_nan), 16);
}
/* To bfloat16, to the nearest even; subnormal numbers become 0. */
static inline __m256i to_bf16(floats x) {
    return narrow_ints((ints){round_half_to_bf16(x.low), round_half_to_bf16(x.high)});
}

/* Sums + each lane's a · b, of two bfloat16 in each lane: first the low ones, then the high ones, each rounded once. Not
 * the same bits with AVX-512. */
static inline floats add_bf16_products(floats sums, ints a, ints b) {
    const ints high = ints_of((int32_t)0xffff0000);
    const ints low_a = ints_shift_left(a, 16), low_b = ints_shift_left(b, 16);
    const floats first = multiply_add(as_floats(low_a), as_floats(low_b), sums);
    return multiply_add(as_floats(ints_and(a, high)), as_floats(ints_and(b, high)), first);
}

static inline doubles no_doubles(void) {
    const __m256d zero = _mm256_setzero_pd();
    return (doubles){{zero, zero, zero, zero}};
}
static inline doubles add_to_doubles(doubles sums, floats x) {
    const __m128 four[4] = {_mm256_castps256_ps128(x.low), _mm256_extractf128_ps(x.low, 1),
                            _mm256_castps256_ps128(x.high), _mm256_extractf128_ps(x.high, 1)};
    for (int i = 0; i < 4; i++) sums.part[i] = _mm256_add_pd(sums.part[i], _mm256_cvtps_pd(four[i]));
    return sums;
}
static inline double sum_of_doubles(doubles x) {
    const __m256d first = _mm256_add_pd(x.part[0], x.part[2]), second = _mm256_add_pd(x.part[1], x.part[3]);
    const __m256d four = _mm256_add_pd(first, second);
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}
