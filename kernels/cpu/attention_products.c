/* The matrix products of attention, blocked for registers, which bring near what will be read next.
 *
 * Both keep a block of R rows × C registers of sums; per step they load C registers of keys or values and broadcast
 * four bytes of each row: a float, or a pair of bfloat16 for the dot product of pairs. R ≤ 6 and C ≤ 4 fill the 32
 * registers of AVX-512 (24 sums, 4 operands, a broadcast), R ≤ 4 and C = 1 the 16 of AVX2 (8, a pair of bfloat16 in 4,
 * and 2 to 4 for a row's). Every sum is one chain in a fixed order, so blocking changes no bits.
 *
 * Numbers of a quantized cache become floats in registers and are multiplied by floats; their scales are left to whoever
 * calls, who multiplies scores and weights by them.
 *
 * Decode waits for memory unless that works all the time: scores prefetch their tile's values, the mix prefetches the
 * next tile's keys, as many lines per step as are read, and where there are several blocks of rows each prefetches its
 * share (what a prefetch finds in the cache costs nothing). Into L2: into L1 it was slower by a quarter to a half (Zen 4;
 * 32 × 1,024 keys, 14 heads, 2 KV heads of 64, and 32 heads, 8 KV heads of 128). Against no prefetch it gained 40 %,
 * against a whole tile ahead by the first block of rows 8 to 15 %. */
#include "attention_products.h"
#include "kv_quantize.h"
#include "vector.h"

#if HAS_AVX512
#define MAX_R 6
#define MAX_C 4
#else
#define MAX_R 4
#define MAX_C 1
#endif
#define INLINE static inline __attribute__((always_inline))
/* Steps between two prefetches: as many as read a line, where rows of keys lie close (in blocks of 16 tokens, that is). */
#define PREFETCH_STEPS(dtype) (64 / (LANES * (int)word_bytes(dtype)))

/* 16 words of keys or values as products take them. */
INLINE ints load_words(int dtype, const char *p) {
    return has_scales(dtype) ? as_ints(floats_from_numbers(dtype, p)) : load_ints(p);
}

/* One step of a sum: a float each, or pairs of bfloat16. */
INLINE floats add_product(int dtype, floats sum, ints a, ints b) {
    if (dtype == BF16) return add_bf16_products(sum, a, b);
    return multiply_add(as_floats(a), as_floats(b), sum);
}

INLINE ints broadcast_word(const char *p) {
    int32_t word;
    memcpy(&word, p, 4);
    return ints_of(word);
}

/* scores[r][c] = Σ query[r][i] keys[c][i] for R rows and C strips; both are `length` words. Prefetches as
 * many bytes as it reads from each of ahead[c]. */
INLINE void score_block(int dtype, int R, int C, const char *query, const char *const *keys,
                        const char *const *ahead, int64_t key_stride, int64_t length, char *scores) {
    floats sums[MAX_R][MAX_C];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sums[r][c] = floats_of(0);
    for (int64_t line = 0, at = 0; line < length / PREFETCH_STEPS(dtype); line++)
#pragma GCC unroll 4
        for (int step = 0; step < PREFETCH_STEPS(dtype); step++, at += key_stride, query += 4) {
            ints key[MAX_C];
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) {
                key[c] = load_words(dtype, keys[c] + at);
                if (step == 0) _mm_prefetch(ahead[c] + line * 64, _MM_HINT_T1);
            }
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                const ints word = broadcast_word(query + r * QUERY_STRIDE(dtype == BF16));
#pragma GCC unroll 4
                for (int c = 0; c < C; c++) sums[r][c] = add_product(dtype, sums[r][c], key[c], word);
            }
        }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) store((float *)(scores + r * SCORE_STRIDE) + c * STRIP, sums[r][c]);
}

/* sums[r][c] = sums[r][c] · shrink[r] + Σ weights[r][k] values[k][c] for R rows and C registers of the head,
 * those from `column` on. Prefetches a line of each ahead_stride bytes from ahead[strip], or of each fourth. */
INLINE void mix_block(int dtype, int R, int C, const char *weights, const char *const *values,
                      const char *const *ahead, int64_t ahead_stride, int64_t column, int64_t num_strips,
                      int64_t head_size, const float *shrink, float *out) {
    const int steps = dtype == BF16 ? STRIP / 2 : STRIP; /* words of weights in a strip */
    const int width = LANES * (int)word_bytes(dtype);
    floats sums[MAX_R][MAX_C];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++)
            sums[r][c] = multiply(load(out + r * head_size + c * LANES), floats_of(shrink[r]));
    for (int64_t strip = 0; strip < num_strips; strip++) {
        const char *at = values[strip] + column * width, *next = ahead[strip] + column * steps * ahead_stride;
#pragma GCC unroll 4
        for (int i = 0; i < steps; i++, at += head_size * word_bytes(dtype), next += C * ahead_stride, weights += 4) {
            ints value[MAX_C];
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) {
                value[c] = load_words(dtype, at + c * width);
                if (i % PREFETCH_STEPS(dtype) == 0) _mm_prefetch(next + c * ahead_stride, _MM_HINT_T1);
            }
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                const ints word = broadcast_word(weights + r * SCORE_STRIDE);
#pragma GCC unroll 4
                for (int c = 0; c < C; c++) sums[r][c] = add_product(dtype, sums[r][c], value[c], word);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) store(out + r * head_size + c * LANES, sums[r][c]);
}

/* Call `block` with R and C as constants. */
#define FOR_R(block, R, C, ...)                                                                                        \
    switch (R) {                                                                                                       \
    case 1: block(dtype, 1, C, __VA_ARGS__); break;                                                                  \
    case 2: block(dtype, 2, C, __VA_ARGS__); break;                                                                  \
    case 3: block(dtype, 3, C, __VA_ARGS__); break;                                                                  \
    case 5: block(dtype, MAX_R < 5 ? MAX_R : 5, C, __VA_ARGS__); break;                                              \
    case 6: block(dtype, MAX_R < 6 ? MAX_R : 6, C, __VA_ARGS__); break;                                              \
    default: block(dtype, 4, C, __VA_ARGS__);                                                                        \
    }
#define FOR_C(block, R, C, ...)                                                                                        \
    if (MAX_C == 4 && (C) == 4) {                                                                                                    \
        FOR_R(block, R, 4, __VA_ARGS__)                                                                                \
    } else if (MAX_C >= 2 && (C) == 2) {                                                                                             \
        FOR_R(block, R, 2, __VA_ARGS__)                                                                                \
    } else {                                                                                                           \
        FOR_R(block, R, 1, __VA_ARGS__)                                                                                \
    }

/* The largest of 4, 2, 1 that is at most `left` and MAX_C. */
static inline int registers(int64_t left) {
    return left < 2 || MAX_C == 1 ? 1 : left < 4 ? 2 : 4;
}

/* Rows of a block when `left` remain: at most MAX_R, about equally many in each. */
static inline int block_rows(int64_t left) { return (int)ceil_div(left, ceil_div(left, MAX_R)); }

/* Of the strips that `num_blocks` blocks of rows prefetch together, the one that `block` takes in place of `strip`. */
static inline int64_t share(int64_t strip, int64_t num_strips, int64_t block, int64_t num_blocks) {
    const int64_t own = block * num_strips / num_blocks + strip % ceil_div(num_strips, num_blocks);
    return own < num_strips ? own : num_strips - 1;
}

INLINE void score_all(int dtype, const char *query, const key_tile *tile, int64_t num_strips, int64_t first,
                      int64_t num_rows, int64_t head_size, char *scores) {
    const int64_t num_blocks = ceil_div(num_rows - first, MAX_R);
    for (int64_t strip = 0, C; strip < num_strips; strip += C) {
        C = registers(num_strips - strip);
        for (int64_t row = first, block = 0, R; row < num_rows; row += R, block++) {
            const char *ahead[MAX_C];
            for (int64_t c = 0; c < C; c++) ahead[c] = tile->values[strip + share(c, C, block, num_blocks)];
            R = block_rows(num_rows - row);
            FOR_C(score_block, R, C, query + row * QUERY_STRIDE(dtype == BF16), tile->keys + strip, ahead, tile->key_stride,
                  dtype == BF16 ? head_size / 2 : head_size, scores + row * SCORE_STRIDE + strip * 64)
        }
    }
}

INLINE void mix_all(int dtype, const char *weights, const key_tile *tile, const key_tile *next, int64_t num_strips,
                    int64_t first, int64_t num_rows, int64_t head_size, const float *shrink, float *sums) {
    const int64_t num_blocks = ceil_div(num_rows - first, MAX_R);
    for (int64_t column = 0, C; column < head_size / LANES; column += C) {
        C = registers(head_size / LANES - column);
        for (int64_t row = first, block = 0, R; row < num_rows; row += R, block++) {
            const char *ahead[STRIPS];
            for (int64_t i = 0; i < num_strips; i++) ahead[i] = next->keys[share(i, num_strips, block, num_blocks)];
            R = block_rows(num_rows - row);
            FOR_C(mix_block, R, C, weights + row * SCORE_STRIDE, tile->values, ahead, next->key_stride, column,
                  num_strips, head_size, shrink + row, sums + row * head_size + column * LANES)
        }
    }
}

/* Call `all` with the dtype as a constant. */
#define FOR_DTYPE(all, dtype, ...)                                                                                     \
    switch (dtype) {                                                                                                   \
    case BF16: all(BF16, __VA_ARGS__); break;                                                                          \
    case INT8: all(INT8, __VA_ARGS__); break;                                                                          \
    case FP8: all(FP8, __VA_ARGS__); break;                                                                            \
    default: all(F32, __VA_ARGS__);                                                                                    \
    }

void score_rows(int dtype, const char *query, const key_tile *tile, int64_t num_strips, int64_t first,
                int64_t num_rows, int64_t head_size, char *scores) {
    FOR_DTYPE(score_all, dtype, query, tile, num_strips, first, num_rows, head_size, scores)
}

void mix_rows(int dtype, const char *weights, const key_tile *tile, const key_tile *next, int64_t num_strips,
              int64_t first, int64_t num_rows, int64_t head_size, const float *shrink, float *sums) {
    FOR_DTYPE(mix_all, dtype, weights, tile, next, num_strips, first, num_rows, head_size, shrink, sums)
}
