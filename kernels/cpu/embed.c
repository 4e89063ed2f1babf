/* Rows of an embedding table that lies in a weight's panels, so that the head's packed weight serves both ends.
 *
 * In a panel the numbers of one output (here: a token) lie 64 bytes apart, four bytes at a time: 16 of these gathered
 * are neighbours along `in`.
 */
#include "linear.h"
#include "rows.h"

#define LINE 64

/* 16 times four bytes from one column of a panel, fewer at its end. */
static inline __m512i column(const char *panel, int64_t line, int64_t num_lines) {
    const __m512i at = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                          _mm512_set1_epi32(LINE));
    const __mmask16 lanes = first_lanes(num_lines - line);
    return _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), lanes, at, panel + line * LINE, 1);
}

static inline void store(float *out, int64_t k, int64_t width, __m512 value) {
    if (k < width) _mm512_mask_storeu_ps(out + k, first_lanes(width - k), value);
}

static inline __m512 from_int8(__m128i q) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(q)); }

static void embed_f32(const char *panel, float *out, int64_t width) {
    for (int64_t k = 0; k < width; k += LANES) store(out, k, width, _mm512_castsi512_ps(column(panel, k, width)));
}

static void embed_bf16(const char *panel, float *out, int64_t width) {
    const int64_t lines = ceil_div(width, 2);
    for (int64_t k = 0; k < width; k += 2 * LANES) {
        const __m512i pairs = column(panel, k / 2, lines);
        store(out, k, width, from_bf16(_mm512_castsi512_si256(pairs)));
        store(out, k + LANES, width, from_bf16(_mm512_extracti64x4_epi64(pairs, 1)));
    }
}

static void embed_int8(const char *panel, float *out, int64_t width, float scale) {
    const int64_t lines = ceil_div(width, 4);
    const __m512 scales = _mm512_set1_ps(scale);
    const __m512i sign = _mm512_set1_epi8((char)INT8_ZERO_POINT);
    for (int64_t k = 0; k < width; k += 4 * LANES) {
        const __m512i q = _mm512_xor_si512(column(panel, k / 4, lines), sign); /* n − 128 */
        store(out, k, width, _mm512_mul_ps(from_int8(_mm512_castsi512_si128(q)), scales));
        store(out, k + LANES, width, _mm512_mul_ps(from_int8(_mm512_extracti32x4_epi32(q, 1)), scales));
        store(out, k + 2 * LANES, width, _mm512_mul_ps(from_int8(_mm512_extracti32x4_epi32(q, 2)), scales));
        store(out, k + 3 * LANES, width, _mm512_mul_ps(from_int8(_mm512_extracti32x4_epi32(q, 3)), scales));
    }
}

/* `panel` begins at the column's own bytes; its scale is the column's two bytes after the nibbles. */
static void embed_int4(const char *panel, int64_t lane, float *out, int64_t width) {
    const __m128i low_bits = _mm_set1_epi8(15), zero_point = _mm_set1_epi8(INT4_ZERO_POINT);
    for (int64_t k = 0; k < width; k += INT4_GROUP, panel += INT4_GROUP_BYTES) {
        const __m128i nibbles = _mm512_castsi512_si128(column(panel, 0, 4));
        const __m128i even = _mm_and_si128(nibbles, low_bits);
        const __m128i odd = _mm_and_si128(_mm_srli_epi16(nibbles, 4), low_bits);
        uint16_t half;
        memcpy(&half, panel - 4 * lane + 4 * LINE + 2 * lane, sizeof(half));
        const __m512 scales = _mm512_set1_ps(_cvtsh_ss(half));
        const __m128i first = _mm_sub_epi8(_mm_unpacklo_epi32(even, odd), zero_point);
        const __m128i second = _mm_sub_epi8(_mm_unpackhi_epi32(even, odd), zero_point);
        store(out, k, width, _mm512_mul_ps(from_int8(first), scales));
        store(out, k + LANES, width, _mm512_mul_ps(from_int8(second), scales));
    }
}

static void embed_row(const weight *t, int64_t token, float *out) {
    const int64_t lane = token % LANES;
    const char *panel = (const char *)t->panels + token / LANES * panel_bytes(t) + 4 * lane;
    if (t->dtype == F32) embed_f32(panel, out, t->in);
    if (t->dtype == BF16) embed_bf16(panel, out, t->in);
    if (t->dtype == INT8) embed_int8(panel, out, t->in, t->scales[token]);
    if (t->dtype == INT4) embed_int4(panel, lane, out, t->in);
}

static int64_t embed_num_tiles(const void *args, const step *step, int num_threads) {
    return row_tiles(step->num_rows, num_threads);
}

static void embed_run_tile(const void *args, const step *step, int64_t tile, int thread, int num_threads) {
    const embed_args *a = args;
    const row_range rows = rows_of_tile(step->num_rows, tile, num_threads);
    for (int64_t i = rows.begin; i < rows.end; i++) embed_row(&a->table, step->token_ids[i], a->out + i * a->table.in);
}

const op_class embed_class = {embed_num_tiles, embed_run_tile, NULL};
