/* One token for each wanted row of logits: the likeliest, or a draw from what temperature, min_p, top_k and top_p leave.
 *
 * The same as kernels/sampling.py, where the filters are described, in one pass over memory after another:
 *
 * 1. the largest logit (and its lowest id: all there is to do at temperature 0);
 * 2. with filters, the smallest logit that they keep: logits near the largest are compressed into scratch and sorted; if
 *    these were not enough to know, the ones farther away as well;
 * 3. the sums of e^(z − largest) over what is kept, chunk after chunk, in double;
 * 4. the chunk where the running sum passes number · total, then the token in it. The number is Philox4x32-10 of the
 *    row's seed, choice and position.
 *
 * A row is one tile, so its token depends on nothing else. NaN is never drawn; a row of NaN or −∞ gives 0.
 */
#include "rows.h"
#include "vector_math.h"

#include <math.h>
#include <string.h>

#define CHUNK 512
#define FIRST_RANGE 8.0f /* below the largest: e^−8 is 1/3000 of it */
#define RADIX_BITS 11
#define RADIX (1 << RADIX_BITS)

typedef struct row {
    const float *logits;
    int64_t width;
    float temperature, largest; /* of the divided logits */
} row;

static __m512 divided(const row *r, int64_t at) {
    const __m512 minus_infinity = _mm512_set1_ps(-INFINITY);
    const __m512 z = _mm512_mask_loadu_ps(minus_infinity, first_lanes(r->width - at), r->logits + at);
    const __m512 y = _mm512_div_ps(z, _mm512_set1_ps(r->temperature));
    return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(y, y, _CMP_UNORD_Q), minus_infinity);
}

/* The id of the largest logit, the lowest on a tie. */
static int64_t find_largest(const float *logits, int64_t width) {
    __m512 best = _mm512_set1_ps(-INFINITY);
    for (int64_t k = 0; k < width; k += LANES) {
        const __m512 v = _mm512_mask_loadu_ps(best, first_lanes(width - k), logits + k);
        best = _mm512_mask_mov_ps(best, _mm512_cmp_ps_mask(v, best, _CMP_GT_OQ), v);
    }
    const __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(best));
    for (int64_t k = 0; k < width; k += LANES) {
        const __mmask16 lanes = first_lanes(width - k);
        const __mmask16 found = _mm512_mask_cmp_ps_mask(lanes, _mm512_maskz_loadu_ps(lanes, logits + k), largest, _CMP_EQ_OQ);
        if (found) return k + __builtin_ctz(found);
    }
    return 0;
}

/* Those of the divided logits that are at least `floor`, in `out`; how many. */
static int64_t gather(const row *r, float floor, float *out) {
    int64_t count = 0;
    for (int64_t k = 0; k < r->width; k += LANES) {
        const __m512 z = divided(r, k);
        const __mmask16 is_kept = _mm512_mask_cmp_ps_mask(first_lanes(r->width - k), z, _mm512_set1_ps(floor), _CMP_GE_OQ);
        _mm512_mask_compressstoreu_ps(out + count, is_kept, z);
        count += __builtin_popcount(is_kept);
    }
    return count;
}

/* Bits that order like the float does, largest first. */
static uint32_t descending(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits & 0x80000000u ? bits : ~bits & 0x7FFFFFFFu;
}

static float from_descending(uint32_t bits) {
    bits = bits & 0x80000000u ? bits : ~bits & 0x7FFFFFFFu;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* Sort `values`, largest first. `keys` has room for twice as many. */
static void sort_descending(float *values, uint32_t *keys, int64_t count) {
    uint32_t *from = keys, *to = keys + count;
    for (int64_t i = 0; i < count; i++) from[i] = descending(values[i]);
    for (int shift = 0; shift < 32; shift += RADIX_BITS) {
        int64_t starts[RADIX + 1] = {0};
        for (int64_t i = 0; i < count; i++) starts[((from[i] >> shift) & (RADIX - 1)) + 1]++;
        for (int i = 0; i < RADIX; i++) starts[i + 1] += starts[i];
        for (int64_t i = 0; i < count; i++) to[starts[(from[i] >> shift) & (RADIX - 1)]++] = from[i];
        uint32_t *swapped = from;
        from = to;
        to = swapped;
    }
    for (int64_t i = 0; i < count; i++) values[i] = from_descending(from[i]);
}

static double sum_chunk(const row *r, int64_t begin, float floor) {
    const int64_t end = begin + CHUNK < r->width ? begin + CHUNK : r->width;
    __m512d low = _mm512_setzero_pd(), high = low;
    for (int64_t k = begin; k < end; k += LANES) {
        const __m512 z = divided(r, k);
        const __mmask16 is_kept = _mm512_mask_cmp_ps_mask(first_lanes(end - k), z, _mm512_set1_ps(floor), _CMP_GE_OQ);
        const __m512 e = _mm512_maskz_mov_ps(is_kept, exp_ps(_mm512_sub_ps(z, _mm512_set1_ps(r->largest))));
        low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(e)));
        high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(e, 1)));
    }
    return _mm512_reduce_add_pd(_mm512_add_pd(low, high));
}

static double sum_kept(const row *r, float floor) {
    double total = 0;
    for (int64_t k = 0; k < r->width; k += CHUNK) total += sum_chunk(r, k, floor);
    return total;
}

static float weight_of(const row *r, float z) {
    return _mm512_cvtss_f32(exp_ps(_mm512_set1_ps(z - r->largest)));
}

/* The smallest of `count` values, largest first, that are needed to reach `wanted`; the last one when they don't. */
static float cut_mass(const row *r, const float *sorted, int64_t count, double wanted, int *is_reached) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) {
        sum += weight_of(r, sorted[i]);
        if (sum >= wanted) {
            *is_reached = 1;
            return sorted[i];
        }
    }
    return sorted[count - 1];
}

/* The smallest divided logit that min_p, then top_k, then top_p keep. `values` and `keys`: scratch. */
static float smallest_kept(const row *r, const choose_args *a, int64_t index, float *values, uint32_t *keys) {
    const float min_p = a->min_p[index], top_p = a->top_p[index];
    const int64_t top_k = a->top_k[index] > 0 && a->top_k[index] < r->width ? a->top_k[index] : r->width;
    float floor = min_p > 0 ? fminf(r->largest + logf(min_p), r->largest) : -INFINITY;
    if (top_k == r->width && top_p >= 1) return floor;
    for (float range = FIRST_RANGE;; range = range < 100 ? 2 * range : INFINITY) {
        const float nearest = fmaxf(r->largest - range, floor);
        const int is_all = nearest == floor;
        const int64_t count = gather(r, nearest, values);
        if (count < top_k && top_k < r->width && !is_all) continue;
        sort_descending(values, keys, count);
        const int has_kth = count >= top_k;
        if (has_kth) floor = fmaxf(floor, values[top_k - 1]);
        if (top_p >= 1) return floor;
        int is_reached = is_all || has_kth;
        const float cut = cut_mass(r, values, has_kth ? top_k : count, top_p * sum_kept(r, floor), &is_reached);
        if (is_reached) return cut;
    }
}

static double uniform(uint64_t seed, uint32_t choice, uint32_t position) {
    uint32_t c[4] = {position, choice, 0, 0}, key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (int i = 0; i < 10; i++) {
        const uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
        const uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ key[0], (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ key[1],
                                  (uint32_t)a};
        memcpy(c, next, sizeof c);
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    return (double)((uint64_t)c[0] << 20 | c[1] >> 12) * 0x1p-52;
}

/* Where the running sum of what is kept passes `number` times the whole. */
static int64_t draw(const row *r, float floor, double number, double *sums) {
    const int64_t num_chunks = ceil_div(r->width, CHUNK);
    double total = 0;
    for (int64_t i = 0; i < num_chunks; i++) total += sums[i] = sum_chunk(r, i * CHUNK, floor);
    const double wanted = number * total;
    double before = 0;
    int64_t chunk = 0;
    while (chunk + 1 < num_chunks && before + sums[chunk] <= wanted) before += sums[chunk++];
    while (chunk > 0 && sums[chunk] == 0) before -= sums[--chunk]; /* rounding left the last one that counts */
    int64_t last = chunk * CHUNK;
    for (int64_t k = chunk * CHUNK; k < r->width && k < (chunk + 1) * CHUNK; k += LANES) {
        float z[LANES], e[LANES];
        const __m512 wide = divided(r, k);
        _mm512_storeu_ps(z, wide);
        _mm512_storeu_ps(e, exp_ps(_mm512_sub_ps(wide, _mm512_set1_ps(r->largest))));
        for (int i = 0; i < LANES && k + i < r->width; i++) {
            if (!(z[i] >= floor) || !(e[i] > 0)) continue;
            before += e[i];
            last = k + i;
            if (before > wanted) return last;
        }
    }
    return last;
}

static int64_t choose_num_tiles(const void *args, const step *step, int num_threads) { return step->num_wanted; }

static void choose_run_tile(const void *args, const step *step, int64_t tile, int thread, int num_threads) {
    const choose_args *a = args;
    const float *logits = a->logits + tile * a->stride;
    const int64_t best = find_largest(logits, a->width);
    const float temperature = a->temperatures[tile];
    a->out[tile] = best;
    if (temperature == 0) return;
    const row r = {logits, a->width, temperature, logits[best] / temperature};
    if (!(r.largest > -INFINITY)) return;
    float *values = scratch(3 * (a->width + LANES) * (int64_t)sizeof(float));
    float floor = -INFINITY;
    if (a->min_p[tile] > 0 || a->top_k[tile] > 0 || a->top_p[tile] < 1)
        floor = smallest_kept(&r, a, tile, values, (uint32_t *)values + a->width + LANES);
    const double number = uniform((uint64_t)a->seeds[tile], (uint32_t)a->choices[tile], (uint32_t)a->positions[tile]);
    a->out[tile] = draw(&r, floor, number, (double *)values);
}

const op_class choose_class = {choose_num_tiles, choose_run_tile, NULL};
