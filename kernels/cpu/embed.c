/* Rows of an embedding table that lies in a weight's panels, so that the head's packed weight serves both ends.
 *
 * In a panel the numbers of one output (here: a token) lie 64 bytes apart, four bytes at a time: 16 of these gathered
 * are neighbours along `in`.
 */
#include "linear.h"
#include "rows.h"

#define LINE 64

/* 16 times four bytes from one column of a panel, zeros behind its end. */
static inline void take_column(const char *panel, int64_t line, int64_t num_lines, int32_t column[LANES]) {
    const int64_t count = num_lines - line < LANES ? num_lines - line : LANES;
    for (int64_t i = 0; i < count; i++) memcpy(column + i, panel + (line + i) * LINE, 4);
    for (int64_t i = count; i < LANES; i++) column[i] = 0;
}

static inline void put(float *out, int64_t k, int64_t width, floats value) {
    if (k < width) store_first(out + k, width - k, value);
}

static void embed_f32(const char *panel, float *out, int64_t width) {
    int32_t column[LANES];
    for (int64_t k = 0; k < width; k += LANES) {
        take_column(panel, k, width, column);
        put(out, k, width, as_floats(load_ints(column)));
    }
}

static void embed_bf16(const char *panel, float *out, int64_t width) {
    int32_t column[LANES];
    for (int64_t k = 0; k < width; k += 2 * LANES) {
        take_column(panel, k / 2, ceil_div(width, 2), column);
        for (int part = 0; part < 2; part++)
            put(out, k + part * LANES, width, from_bf16(_mm256_loadu_si256((const __m256i *)column + part)));
    }
}

static void embed_int8(const char *panel, float *out, int64_t width, float scale) {
    int32_t column[LANES];
    const __m128i sign = _mm_set1_epi8((char)INT8_ZERO_POINT);
    for (int64_t k = 0; k < width; k += 4 * LANES) {
        take_column(panel, k / 4, ceil_div(width, 4), column);
        for (int part = 0; part < 4; part++) {
            const __m128i q = _mm_xor_si128(_mm_loadu_si128((const __m128i *)column + part), sign); /* n − 128 */
            put(out, k + part * LANES, width, multiply(floats_from_int8(q), floats_of(scale)));
        }
    }
}

/* `panel` begins at the column's own bytes; its scale is the column's two bytes after the nibbles. */
static void embed_int4(const char *panel, int64_t lane, float *out, int64_t width) {
    int32_t column[LANES];
    const __m128i low_bits = _mm_set1_epi8(15), zero_point = _mm_set1_epi8(INT4_ZERO_POINT);
    for (int64_t k = 0; k < width; k += INT4_GROUP, panel += INT4_GROUP_BYTES) {
        take_column(panel, 0, 4, column);
        const __m128i nibbles = _mm_loadu_si128((const __m128i *)column);
        const __m128i even = _mm_and_si128(nibbles, low_bits);
        const __m128i odd = _mm_and_si128(_mm_srli_epi16(nibbles, 4), low_bits);
        uint16_t half;
        memcpy(&half, panel - 4 * lane + 4 * LINE + 2 * lane, sizeof(half));
        const floats scales = floats_of(_cvtsh_ss(half));
        const __m128i first = _mm_sub_epi8(_mm_unpacklo_epi32(even, odd), zero_point);
        const __m128i second = _mm_sub_epi8(_mm_unpackhi_epi32(even, odd), zero_point);
        put(out, k, width, multiply(floats_from_int8(first), scales));
        put(out, k + LANES, width, multiply(floats_from_int8(second), scales));
    }
}

static void scale_row(float *row, int64_t width, float scale) {
    for (int64_t k = 0; k < width; k += LANES)
        put(row, k, width, multiply(load_first(row + k, width - k), floats_of(scale)));
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
    for (int64_t i = rows.begin; i < rows.end; i++) {
        float *out = a->out + i * a->table.in;
        embed_row(&a->table, step->token_ids[i], out);
        if (a->scale != 1.0f) scale_row(out, a->table.in, a->scale);
    }
}

const op_class embed_class = {embed_num_tiles, embed_run_tile, NULL};
