/* The two matrix products of attention over up to KEY_TILE keys, for any number of rows. See attention_products.c. */
#pragma once
#include "attention.h"

#define STRIP LANES /* keys in a register */
#define STRIPS (KEY_TILE / STRIP)
#define SCORE_STRIDE (KEY_TILE * 4) /* bytes from a row's scores to the next row's; weights take their place */

/* Bytes from a row's query to the next row's: a constant is part of an address; the line more spreads rows over sets. */
#define QUERY_STRIDE(is_bf16) (MAX_HEAD_SIZE * ((is_bf16) ? 2 : 4) + 64)

/* Where the strips of a key tile lie. */
typedef struct key_tile {
    const char *keys[STRIPS];
    const char *values[STRIPS];
    int64_t key_stride; /* bytes from a row of keys to the next */
    int64_t num_strips;
} key_tile;

/* Thread-own memory for M rows, which are padded to a multiple of LANES; what padding holds doesn't matter. */
typedef struct workspace {
    char *query;  /* [M, head_size] of the query's dtype */
    char *scores; /* [M, KEY_TILE] float, then weights in the query's dtype at the same stride */
    float *best, *total, *sums;             /* [M], [M], [M, head_size]: of this split */
    float *all_best, *all_total, *all_sums; /* of the splits before */
    float *new_best, *shrink;               /* [M] */
    float *key_scales, *value_scales;       /* [KEY_TILE]: of a quantized cache's tile */
    char *copies;
} workspace;

/* Scores of rows [first, num_rows) with all keys of `num_strips` strips, of a cache of `dtype`. */
void score_rows(int dtype, const char *query, const key_tile *tile, int64_t num_strips, int64_t first,
                int64_t num_rows, int64_t head_size, char *scores);

/* sums = sums · shrink + weights · values for rows [first, num_rows). Keys of `next` are going to be read after that. */
void mix_rows(int dtype, const char *weights, const key_tile *tile, const key_tile *next, int64_t num_strips,
              int64_t first, int64_t num_rows, int64_t head_size, const float *shrink, float *sums);
