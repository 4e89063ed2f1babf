/* The gates' functions, for a linear's epilogue (linear_finish.c) and for a gate by itself (gate.c). */
#pragma once
#include "ops.h"
#include "vector.h"

#define LOG2_E 1.44269504088896341f
#define GELU_SCALE (2 * 0.797884560802865356f) /* 2 √(2/π) */
#define GELU_CUBE 0.044715f

/* z / (1 + e^−u). e^−u stays below 2^120, so that the reciprocal is a normal number. */
static inline floats logistic_share(floats z, floats u) {
    const floats exponent = multiply(u, floats_of(-LOG2_E));
    const floats exponential = exp2_of(smaller(exponent, floats_of(120.0f)));
    return multiply(z, reciprocal(add(floats_of(1.0f), exponential)));
}

/* silu(z) or gelu(z), by the epilogue. */
static inline floats gated(int32_t epilogue, floats z) {
    if (epilogue == SILU_MUL) return logistic_share(z, z);
    const floats factor = multiply_add(multiply(z, z), floats_of(GELU_SCALE * GELU_CUBE), floats_of(GELU_SCALE));
    return logistic_share(z, multiply(z, factor));
}
