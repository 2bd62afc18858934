// e^x as plain arithmetic, so that loops around it vectorise; libm's would be a call.

#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

// e^x to 2e-7 relative for x <= 88: 2^n times a polynomial on [-ln2 / 2, ln2 / 2] (Cephes' coefficients); below -87 it stays at e^-87.
static inline float fast_exp(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = rintf(x * 1.44269504f), r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}
