/* The two matrix products of attention over up to KEY_TILE keys, for any number of rows.
 *
 * Both keep a block of R rows × C registers of sums; per step they load C registers of keys or values and broadcast
 * four bytes of each row: a float, or a pair of bfloat16 for the dot product of pairs. R ≤ 6 and C ≤ 4 fill the 32
 * registers (24 sums, 4 operands, a broadcast). Every sum is one chain in a fixed order, so blocking changes no bits. */
#pragma once
#include "attention.h"

#include <immintrin.h>
#include <string.h>

#define STRIP LANES /* keys in a register */
#define STRIPS (KEY_TILE / STRIP)
#define MAX_R 6
#define MAX_C 4
#define SCORE_STRIDE (KEY_TILE * 4) /* bytes from a row's scores to the next row's; weights take their place */

/* Where the strips of a key tile lie. */
typedef struct key_tile {
    const char *keys[STRIPS];
    const char *values[STRIPS];
    int64_t key_stride; /* bytes from a row of keys to the next */
} key_tile;

/* One step of a sum: a float each, or pairs of bfloat16. */
static inline __attribute__((always_inline)) __m512 add_product(int is_bf16, __m512 sum, __m512i a, __m512i b) {
    if (is_bf16) return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
}

static inline __attribute__((always_inline)) __m512i broadcast_word(const char *p) {
    int32_t word;
    memcpy(&word, p, 4);
    return _mm512_set1_epi32(word);
}

/* scores[r][c] = Σ query[r][i] keys[c][i] for R rows and C strips; both are `length` words of four bytes. */
static inline __attribute__((always_inline)) void score_block(int is_bf16, int R, int C, const char *query,
                                                              int64_t query_stride, const char *const *keys,
                                                              int64_t key_stride, int64_t length, char *scores) {
    __m512 sums[MAX_R][MAX_C];
    const char *at[MAX_C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) at[c] = keys[c];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sums[r][c] = _mm512_setzero_ps();
    for (int64_t i = 0; i < length; i++) {
        __m512i key[MAX_C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) key[c] = _mm512_loadu_si512(at[c]), at[c] += key_stride;
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            const __m512i word = broadcast_word(query + r * query_stride + i * 4);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) sums[r][c] = add_product(is_bf16, sums[r][c], key[c], word);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) _mm512_storeu_ps(scores + r * SCORE_STRIDE + c * 64, sums[r][c]);
}

/* sums[r][c] = sums[r][c] · shrink[r] + Σ weights[r][k] values[k][c] for R rows and C registers of the head. */
static inline __attribute__((always_inline)) void mix_block(int is_bf16, int R, int C, const char *weights,
                                                            const char *const *values, int64_t offset,
                                                            int64_t num_strips, int64_t head_size, const float *shrink,
                                                            float *out) {
    const int steps = is_bf16 ? STRIP / 2 : STRIP; /* words of weights in a strip */
    __m512 sums[MAX_R][MAX_C];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++)
            sums[r][c] = _mm512_mul_ps(_mm512_loadu_ps(out + r * head_size + c * LANES), _mm512_set1_ps(shrink[r]));
    for (int64_t strip = 0; strip < num_strips; strip++) {
        const char *at = values[strip] + offset;
        for (int i = 0; i < steps; i++, at += head_size * 4, weights += 4) {
            __m512i value[MAX_C];
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) value[c] = _mm512_loadu_si512(at + c * 64);
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                const __m512i word = broadcast_word(weights + r * SCORE_STRIDE);
#pragma GCC unroll 4
                for (int c = 0; c < C; c++) sums[r][c] = add_product(is_bf16, sums[r][c], value[c], word);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) _mm512_storeu_ps(out + r * head_size + c * LANES, sums[r][c]);
}

/* Call `block` with R and C as constants. */
#define FOR_R(block, R, C, ...)                                                                                        \
    switch (R) {                                                                                                       \
    case 1: block(is_bf16, 1, C, __VA_ARGS__); break;                                                                  \
    case 2: block(is_bf16, 2, C, __VA_ARGS__); break;                                                                  \
    case 3: block(is_bf16, 3, C, __VA_ARGS__); break;                                                                  \
    case 4: block(is_bf16, 4, C, __VA_ARGS__); break;                                                                  \
    case 5: block(is_bf16, 5, C, __VA_ARGS__); break;                                                                  \
    default: block(is_bf16, 6, C, __VA_ARGS__);                                                                        \
    }
#define FOR_C(block, R, C, ...)                                                                                        \
    if ((C) == 4) {                                                                                                    \
        FOR_R(block, R, 4, __VA_ARGS__)                                                                                \
    } else if ((C) == 2) {                                                                                             \
        FOR_R(block, R, 2, __VA_ARGS__)                                                                                \
    } else {                                                                                                           \
        FOR_R(block, R, 1, __VA_ARGS__)                                                                                \
    }

/* The largest of 4, 2, 1 that is at most `left`. */
static inline int registers(int64_t left) { return left >= 4 ? 4 : left >= 2 ? 2 : 1; }

/* Rows of a block when `left` remain: at most MAX_R, about equally many in each. */
static inline int block_rows(int64_t left) { return (int)ceil_div(left, ceil_div(left, MAX_R)); }

/* Scores of rows [first, num_rows) with all keys of `num_strips` strips. */
static inline __attribute__((always_inline)) void score_rows(int is_bf16, const char *query, int64_t query_stride,
                                                             const key_tile *tile, int64_t num_strips, int64_t first,
                                                             int64_t num_rows, int64_t length, char *scores) {
    for (int64_t strip = 0, C; strip < num_strips; strip += C) {
        C = registers(num_strips - strip);
        for (int64_t row = first, R; row < num_rows; row += R) {
            R = block_rows(num_rows - row);
            FOR_C(score_block, R, C, query + row * query_stride, query_stride, tile->keys + strip, tile->key_stride,
                  length, scores + row * SCORE_STRIDE + strip * 64)
        }
    }
}

/* sums = sums · shrink + weights · values for rows [first, num_rows). */
static inline __attribute__((always_inline)) void mix_rows(int is_bf16, const char *weights, const key_tile *tile,
                                                           int64_t num_strips, int64_t first, int64_t num_rows,
                                                           int64_t head_size, const float *shrink, float *sums) {
    for (int64_t column = 0, C; column < head_size / LANES; column += C) {
        C = registers(head_size / LANES - column);
        for (int64_t row = first, R; row < num_rows; row += R) {
            R = block_rows(num_rows - row);
            FOR_C(mix_block, R, C, weights + row * SCORE_STRIDE, tile->values, column * 64, num_strips, head_size,
                  shrink + row, sums + row * head_size + column * LANES)
        }
    }
}
