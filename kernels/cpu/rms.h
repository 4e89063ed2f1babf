/* The RMS norm of some numbers: of a row of hidden states, or of a head.
 *
 * Their squares are added in four vectors, vector after vector, then lane by lane in one tree: an order that depends on
 * `width` only. */
#pragma once
#include "vector.h"

#include <math.h>

#define NUM_SUMS 4

static inline float mean_square(const float *x, int64_t width) {
    floats sums[NUM_SUMS] = {floats_of(0), floats_of(0), floats_of(0), floats_of(0)};
    int64_t k = 0;
    for (; k + NUM_SUMS * LANES <= width; k += NUM_SUMS * LANES)
#pragma GCC unroll 4
        for (int i = 0; i < NUM_SUMS; i++) {
            const floats v = load(x + k + i * LANES);
            sums[i] = multiply_add(v, v, sums[i]);
        }
    for (; k < width; k += LANES) {
        const floats v = load_first(x + k, width - k);
        sums[0] = multiply_add(v, v, sums[0]);
    }
    const floats sum = add(add(sums[0], sums[1]), add(sums[2], sums[3]));
    return sum_of(sum) / (float)width;
}

/* out[width] = x / sqrt(mean(x²) + eps) · scale; out may be x. */
static inline void normalize(const float *x, const float *scale, int64_t width, float eps, float *out) {
    const floats factor = floats_of(1.0f / sqrtf(mean_square(x, width) + eps));
    for (int64_t k = 0; k < width; k += LANES) {
        const int64_t left = width - k;
        const floats v = multiply(load_first(x + k, left), factor);
        store_first(out + k, left, multiply(v, load_first(scale + k, left)));
    }
}
