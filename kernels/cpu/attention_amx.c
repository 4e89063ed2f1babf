/* Attention over one key tile by AMX tiles: scores, weights and sums of up to 32 rows at a time.
 *
 * A tile of queries is 16 rows × 32 elements, of keys a strip's 16 keys × 32 elements as they lie in the cache; a tile
 * of weights is 16 rows × the 16 keys of a strip, of values these keys × 16 elements as they lie. A product takes 16
 * cycles for 16 rows whether it adds up 32 keys or 16, so 32 would halve the products with values; but strips of blocks
 * of 16 would have to be copied together first, and that cost more than it saved (500 ns for 128 keys; 32 rows gained
 * 150 ns). Strips in place also make the numbers independent of the block size.
 *
 * Numbers: a score is one chain over the head in steps of 32 elements, a sum one chain over the keys in steps of 16.
 * Scores are taken relative to a reference: the best of the first key tile of a split in which a row sees keys, replaced by a later tile's best only
 * where that is more than SLACK above it (idea: FlashAttention-4), which spares most tiles the scaling of their sums.
 * The weight 2^(score − reference) is at most 2^SLACK; its relative precision is the same anywhere. Totals are of floats
 * before they are rounded to bfloat16, in two chains of lanes (even and odd strips), and across lanes in one tree. All
 * of that is a row's own: rows beside it, hidden keys (weight 0) and strips that nobody sees change no bit.
 *
 * Speed (Intel Xeon with AMX, one thread, head of 64): 32 rows × 128 keys take 270 ns for scores, 410 ns for
 * weights (at the limit of the two vector ports) and 340 ns for sums. Decode waits for memory: 32 × 190 keys take about
 * as long as reading 4 KB here and 4 KB there, which goes at two thirds of the speed of reading straight on. So each
 * phase brings near what comes next: scores their tile's values, weights and sums the next tile's keys. */
#include "attention_amx.h"
#include "vector.h"

#if HAS_AMX
#include <immintrin.h>
#include <math.h>

#define INLINE static inline __attribute__((always_inline))
#define BLOCK (2 * TILE_ROWS) /* rows whose scores stay in L1 while they become weights */
#define SLACK 8.0f            /* binary orders */
#define GROUP_LINES 8         /* brought near at a time; divides the head_size / 2 lines of a strip's keys or values */

/* Registers: 0 to 3 sums; 4 queries, 5 keys; 6 weights of 16 keys, 7 values of 16 keys. Always 16 rows of A and C: rows
 * of the workspace are padded, and what padding holds stays in its own rows. */
static const tile_shapes SHAPES = {
    .palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 32, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 8}};

void shape_tiles(void) { __asm__ volatile("ldtilecfg %0" ::"m"(SHAPES)); }

/* What the compiler has not written to memory yet, tile loads would not see. */
INLINE void settle(void) { __asm__ volatile("" ::: "memory"); }

/* Keys or values that are going to be read, to be brought near a few lines at a time. */
typedef struct ahead {
    const char *const *strips;
    int64_t num_strips;
    int64_t stride;    /* from a line of a strip to the next */
    int64_t num_lines; /* in a strip */
    int64_t line;      /* of strips[0] */
} ahead;

INLINE int64_t groups_ahead(const ahead *ahead) { return ahead->num_strips * ahead->num_lines / GROUP_LINES; }

INLINE void bring(ahead *ahead, int64_t num_groups) {
    for (; num_groups > 0 && ahead->num_strips > 0; num_groups--) {
        const char *from = *ahead->strips + ahead->line * ahead->stride;
#pragma GCC unroll 8
        for (int64_t i = 0; i < GROUP_LINES; i++) _mm_prefetch(from + i * ahead->stride, _MM_HINT_T1);
        ahead->line += GROUP_LINES;
        if (ahead->line < ahead->num_lines) continue;
        ahead->line = 0;
        ahead->strips++, ahead->num_strips--;
    }
}

void bring_keys(const key_tile *tile, int64_t head_size) {
    ahead keys = {tile->keys, tile->num_strips, tile->key_stride, head_size / 2, 0};
    bring(&keys, groups_ahead(&keys));
}

/* 2^x for weights that are rounded to bfloat16: 2^frac is a polynomial of degree 3 with constant term 1, fitted for the
 * least relative error (Remez: 2^−13.5; rounding makes 2^−9). 2^0 = 1 and 2^−inf = 0. */
INLINE __m512 exp2_narrow(__m512 x) {
    const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 y = _mm512_set1_ps(0x1.3baaaap-4f);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0x1.d23788p-3f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0x1.63e65ap-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, x);
}

INLINE __m512 combine(int is_max, __m512 a, __m512 b) { return is_max ? _mm512_max_ps(a, b) : _mm512_add_ps(a, b); }

/* Lane i: the maximum or the sum of all lanes of rows[i], in the same order for each. */
INLINE __m512 across(int is_max, const __m512 rows[LANES]) {
    __m512 pairs[8], quads[4], halves[2];
    for (int i = 0; i < 8; i++)
        pairs[i] = combine(is_max, _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]),
                           _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        const __m512d even = _mm512_castps_pd(pairs[2 * i]), odd = _mm512_castps_pd(pairs[2 * i + 1]);
        quads[i] = combine(is_max, _mm512_castpd_ps(_mm512_unpacklo_pd(even, odd)),
                           _mm512_castpd_ps(_mm512_unpackhi_pd(even, odd)));
    }
    for (int i = 0; i < 2; i++)
        halves[i] = combine(is_max, _mm512_shuffle_f32x4(quads[2 * i], quads[2 * i + 1], 0x88),
                            _mm512_shuffle_f32x4(quads[2 * i], quads[2 * i + 1], 0xdd));
    return combine(is_max, _mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
                   _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
}

/* Scores of R · 16 rows with an even number of strips; the last may be one that isn't there. */
INLINE void score_block(int R, const attention_args *a, const char *query, const key_tile *tile, ahead *ahead,
                        int64_t brought, int64_t num_strips, char *scores) {
    const int64_t words = a->head_size / 2, stride = tile->key_stride, query_stride = QUERY_STRIDE(1);
    for (int64_t strip = 0; strip < num_strips; strip += 2, scores += 2 * 64) {
        const char *keys = tile->keys[strip], *others = strip + 1 < num_strips ? tile->keys[strip + 1] : keys;
        const char *rows = query, *more_rows = query + TILE_ROWS * query_stride;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t word = 0; word < words; word += 16, rows += 64, more_rows += 64) {
            _tile_loadd(5, keys + word * stride, stride);
            _tile_loadd(4, rows, query_stride);
            _tile_dpbf16ps(0, 4, 5);
            if (R == 2) {
                _tile_loadd(4, more_rows, query_stride);
                _tile_dpbf16ps(1, 4, 5);
            }
            _tile_loadd(5, others + word * stride, stride);
            if (R == 2) {
                _tile_dpbf16ps(3, 4, 5);
                _tile_loadd(4, rows, query_stride);
            }
            _tile_dpbf16ps(2, 4, 5);
        }
        _tile_stored(0, scores, SCORE_STRIDE);
        _tile_stored(2, scores + 64, SCORE_STRIDE);
        if (R == 2) {
            _tile_stored(1, scores + TILE_ROWS * SCORE_STRIDE, SCORE_STRIDE);
            _tile_stored(3, scores + TILE_ROWS * SCORE_STRIDE + 64, SCORE_STRIDE);
        }
        bring(ahead, brought);
    }
}

/* Scores before the `count`-th become −inf. */
INLINE void hide_first(float *scores, int64_t count, int64_t num_strips) {
    const __m512 hidden = _mm512_set1_ps(-INFINITY);
    int64_t strip = 0;
    for (; strip < num_strips && count >= STRIP; strip++, count -= STRIP) _mm512_store_ps(scores + strip * STRIP, hidden);
    if (strip < num_strips && count > 0)
        _mm512_mask_store_ps(scores + strip * STRIP, (__mmask16)((1u << count) - 1), hidden);
}

/* Scores from the `visible`-th on become −inf. */
INLINE void hide(float *scores, int64_t visible, int64_t num_strips) {
    const __m512 hidden = _mm512_set1_ps(-INFINITY);
    int64_t strip = visible > 0 ? visible / STRIP : 0;
    const __mmask16 seen = visible > 0 ? (__mmask16)((1u << visible % STRIP) - 1) : 0;
    if (strip >= num_strips) return;
    _mm512_store_ps(scores + strip * STRIP, _mm512_mask_mov_ps(hidden, seen, _mm512_load_ps(scores + strip * STRIP)));
    while (++strip < num_strips) _mm512_store_ps(scores + strip * STRIP, hidden);
}

INLINE __m512 best_scores(const float *scores, int64_t num_strips) {
    __m512 best = _mm512_load_ps(scores), other = _mm512_load_ps(scores + STRIP);
    for (int64_t strip = 2; strip < num_strips; strip += 2) {
        best = _mm512_max_ps(best, _mm512_load_ps(scores + strip * STRIP));
        other = _mm512_max_ps(other, _mm512_load_ps(scores + (strip + 1) * STRIP));
    }
    return _mm512_max_ps(best, other);
}

/* Weights 2^(score − best) in bfloat16 in place of the scores; returns the totals of their lanes. */
INLINE __m512 weigh(float *scores, int64_t num_strips, float best) {
    const __m512 subtrahend = _mm512_set1_ps(best);
    __m512 total = _mm512_setzero_ps(), other = _mm512_setzero_ps();
    for (int64_t strip = 0; strip < num_strips; strip += 2) {
        const __m512 even = exp2_narrow(_mm512_sub_ps(_mm512_load_ps(scores + strip * STRIP), subtrahend));
        const __m512 odd = exp2_narrow(_mm512_sub_ps(_mm512_load_ps(scores + (strip + 1) * STRIP), subtrahend));
        total = _mm512_add_ps(total, even);
        other = _mm512_add_ps(other, odd);
        _mm512_store_si512(scores + strip * STRIP / 2, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
    }
    return _mm512_add_ps(total, other);
}

/* Take scores that outgrew their row's best as the new one, and scale what was added up to it. */
INLINE void grow(const workspace *w, int64_t first, int64_t num_rows, __m512 best, int64_t head_size) {
    const __m512 old = _mm512_load_ps(w->best + first);
    uint32_t rows = _mm512_cmp_ps_mask(best, _mm512_add_ps(old, _mm512_set1_ps(SLACK)), _CMP_GT_OQ);
    rows &= (1u << num_rows) - 1;
    if (!rows) return;
    const __m512 shrink = exp2_of(_mm512_sub_ps(old, best)), total = _mm512_load_ps(w->total + first);
    _mm512_mask_store_ps(w->best + first, (__mmask16)rows, best);
    _mm512_mask_store_ps(w->total + first, (__mmask16)rows, _mm512_mul_ps(total, shrink));
    _mm512_store_ps(w->shrink + first, shrink);
    for (; rows; rows &= rows - 1) {
        const int64_t row = first + __builtin_ctz(rows);
        const __m512 factor = _mm512_set1_ps(w->shrink[row]);
        float *sums = w->sums + row * head_size;
        for (int64_t i = 0; i < head_size; i += LANES)
            _mm512_store_ps(sums + i, _mm512_mul_ps(_mm512_load_ps(sums + i), factor));
    }
}

/* Weights of rows first .. of the workspace, at most 16, from their scores. */
INLINE void weigh_rows(const attention_args *a, const workspace *w, ahead *ahead, int64_t brought, int64_t num_strips,
                       int64_t first, int64_t num_rows, char *scores) {
    _Alignas(64) __m512 lanes[LANES];
    for (int64_t r = 0; r < LANES; r++)
        lanes[r] = r < num_rows ? best_scores((float *)(scores + r * SCORE_STRIDE), num_strips) : _mm512_setzero_ps();
    grow(w, first, num_rows, across(1, lanes), a->head_size);
    for (int64_t r = 0; r < num_rows; r++) {
        lanes[r] = weigh((float *)(scores + r * SCORE_STRIDE), num_strips, w->best[first + r]);
        bring(ahead, brought);
    }
    _mm512_store_ps(w->total + first, _mm512_add_ps(_mm512_load_ps(w->total + first), across(0, lanes)));
}

/* sums += weights · values for R · 16 rows. */
INLINE void mix_block(int R, const attention_args *a, const char *weights, const key_tile *tile, ahead *ahead,
                      int64_t brought, int64_t num_strips, float *sums) {
    const int64_t stride = a->head_size * 4;
    float *more_sums = sums + TILE_ROWS * a->head_size;
    for (int64_t column = 0; column < a->head_size; column += 2 * LANES) {
        _tile_loadd(0, sums + column, stride);
        _tile_loadd(2, sums + column + LANES, stride);
        if (R == 2) {
            _tile_loadd(1, more_sums + column, stride);
            _tile_loadd(3, more_sums + column + LANES, stride);
        }
        for (int64_t strip = 0; strip < num_strips; strip++) {
            const char *rows = weights + strip * STRIP * 2, *more_rows = rows + TILE_ROWS * SCORE_STRIDE;
            const char *values = tile->values[strip] + column * 4;
            _tile_loadd(7, values, stride);
            _tile_loadd(6, rows, SCORE_STRIDE);
            _tile_dpbf16ps(0, 6, 7);
            if (R == 2) {
                _tile_loadd(6, more_rows, SCORE_STRIDE);
                _tile_dpbf16ps(1, 6, 7);
            }
            _tile_loadd(7, values + 64, stride);
            if (R == 2) {
                _tile_dpbf16ps(3, 6, 7);
                _tile_loadd(6, rows, SCORE_STRIDE);
            }
            _tile_dpbf16ps(2, 6, 7);
            bring(ahead, brought);
        }
        _tile_stored(0, sums + column, stride);
        _tile_stored(2, sums + column + LANES, stride);
        if (R == 2) {
            _tile_stored(1, more_sums + column, stride);
            _tile_stored(3, more_sums + column + LANES, stride);
        }
    }
}

/* One block of rows. The first brings what is read next: the tile's values while it computes scores, then the next
 * tile's keys. */
INLINE void attend_block(int R, const attention_args *a, const workspace *w, const key_tile *tile, const key_tile *next,
                         int is_first, int64_t first, int64_t num_rows, int64_t visible) {
    const int64_t size = a->head_size, group = a->heads / a->kv_heads;
    const int64_t num_strips = tile->num_strips, even_strips = (num_strips + 1) / 2 * 2;
    ahead values = {tile->values, is_first ? num_strips : 0, 64, size / 2, 0};
    ahead keys = {next->keys, is_first ? next->num_strips : 0, next->key_stride, size / 2, 0};
    const int64_t brought = ceil_div(groups_ahead(&keys), num_rows + num_strips * size / 32);
    score_block(R, a, w->query + first * QUERY_STRIDE(1), tile, &values,
                ceil_div(groups_ahead(&values), even_strips / 2), num_strips, w->scores);
    visible += first / group;
    const int64_t most_visible = visible + (first % group + num_rows - 1) / group;
    if (visible < even_strips * STRIP || (a->window && most_visible > a->window)) {
        for (int64_t r = 0, head = first % group; r < num_rows; r++) {
            float *scores = (float *)(w->scores + r * SCORE_STRIDE);
            hide(scores, visible, even_strips);
            if (a->window) hide_first(scores, visible - a->window, even_strips);
            if (++head == group) head = 0, visible++;
        }
    }
    for (int64_t r = 0; r < num_rows; r += LANES)
        weigh_rows(a, w, &keys, brought, even_strips, first + r, num_rows - r < LANES ? num_rows - r : LANES,
                   w->scores + r * SCORE_STRIDE);
    settle();
    mix_block(R, a, w->scores, tile, &keys, brought, num_strips, w->sums + first * size);
}

void attend_on_tiles(const attention_args *a, const workspace *w, const key_tile *tile, const key_tile *next,
                     int64_t first, int64_t M, int64_t visible) {
    const int64_t begin = first / TILE_ROWS * TILE_ROWS;
    settle();
    for (int64_t row = begin; row < M; row += BLOCK) {
        if (M - row > TILE_ROWS)
            attend_block(2, a, w, tile, next, row == begin, row, M - row < BLOCK ? M - row : BLOCK, visible);
        else
            attend_block(1, a, w, tile, next, row == begin, row, M - row, visible);
    }
}
#endif
