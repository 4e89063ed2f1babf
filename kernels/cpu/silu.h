/* The gate's function, for a linear's epilogue (linear_finish.c) and for the gate by itself (gate.c). */
#pragma once
#include "vector.h"

/* z / (1 + e^−z). e^−z stays below 2^120, so that the reciprocal is a normal number. */
static inline floats silu(floats z) {
    const floats exponent = multiply(z, floats_of(-1.44269504088896341f));
    const floats exponential = exp2_of(smaller(exponent, floats_of(120.0f)));
    return multiply(z, reciprocal(add(floats_of(1.0f), exponential)));
}
