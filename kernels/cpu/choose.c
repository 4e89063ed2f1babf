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

static floats divided(const row *r, int64_t at) {
    const floats minus_infinity = floats_of(-INFINITY);
    const floats z = load_first_or(r->logits + at, r->width - at, minus_infinity);
    const floats y = divide(z, floats_of(r->temperature));
    return select_floats(is_nan(y), minus_infinity, y);
}

/* The id of the largest logit, the lowest on a tie. */
static int64_t find_largest(const float *logits, int64_t width) {
    floats best = floats_of(-INFINITY);
    for (int64_t k = 0; k < width; k += LANES) {
        const floats v = load_first_or(logits + k, width - k, best);
        best = select_floats(is_greater(v, best), v, best);
    }
    const floats largest = floats_of(largest_of(best));
    for (int64_t k = 0; k < width; k += LANES) {
        const floats v = load_first(logits + k, width - k);
        const uint32_t found = bits_of(both(first_lanes(width - k), is_equal(v, largest)));
        if (found) return k + __builtin_ctz(found);
    }
    return 0;
}

/* Those of the divided logits that are at least `floor`, in `out`; how many. */
static int64_t gather(const row *r, float floor, float *out) {
    int64_t count = 0;
    for (int64_t k = 0; k < r->width; k += LANES) {
        const floats z = divided(r, k);
        const lanes is_kept = both(first_lanes(r->width - k), is_at_least(z, floats_of(floor)));
        count += store_selected(out + count, is_kept, z);
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
    doubles sums = no_doubles();
    for (int64_t k = begin; k < end; k += LANES) {
        const floats z = divided(r, k);
        const lanes is_kept = both(first_lanes(end - k), is_at_least(z, floats_of(floor)));
        const floats e = exp_of(subtract(z, floats_of(r->largest)));
        sums = add_to_doubles(sums, select_floats(is_kept, e, floats_of(0)));
    }
    return sum_of_doubles(sums);
}

static double sum_kept(const row *r, float floor) {
    double total = 0;
    for (int64_t k = 0; k < r->width; k += CHUNK) total += sum_chunk(r, k, floor);
    return total;
}

static float weight_of(const row *r, float z) {
    float e[LANES];
    store(e, exp_of(floats_of(z - r->largest)));
    return e[0];
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
        const floats wide = divided(r, k);
        store(z, wide);
        store(e, exp_of(subtract(wide, floats_of(r->largest))));
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
