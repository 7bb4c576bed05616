// The noise of sampling, by key and token id: operations and their order are those of specpaged.sampling.noise.

#pragma once

#include "vectors.h"

namespace {

typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));

constexpr float MOST_NOISE = 22.3f;  // and a little more

inline Bits mix(Bits x) {  // the finaliser lowbias32
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ (x >> 16);
}

// 31 bits for each id.
inline Ints noise_bits(Ints ids, const uint32_t (&keys)[3]) {
    return (Ints)(mix(mix((Bits)ids ^ keys[0]) + keys[1]) ^ keys[2]) & 0x7FFFFFFF;
}

// ln x of normal x > 0, as specpaged.sampling.elementwise.log_fp32_.
inline Floats log_rounded(Floats x) {
    const Ints bits = (Ints)x, k = (bits - 0x3F3504F3) >> 23;
    x = (Floats)(bits - (k << 23));
    const Floats s = (x - splat(1.0f)) / (x + splat(1.0f)), z = s * s;
    Floats series = z * splat(float(1.0 / 9)) + splat(float(1.0 / 7));
    series = series * z + splat(float(1.0 / 5));
    series = series * z + splat(float(1.0 / 3));
    series = series * z * s + s;
    return series * splat(2.0f) + __builtin_convertvector(k, Floats) * splat(0.693147180559945309f);
}

// The noise -ln(-ln(1 - w)).
inline Floats gumbel(Ints bits) {
    const Floats largest = splat(1.0f - 0x1p-24f);
    Floats w = (__builtin_convertvector(bits, Floats) + splat(0.5f)) * splat(0x1p-31f);
    w = w > largest ? largest : w;
    const Floats u = splat(1.0f) - w;
    const Floats rounding = ((u - splat(1.0f)) + w) / u;
    return -log_rounded(rounding - log_rounded(u));
}

// No less than that. It is at most -ln w, and the logarithm of a float to base 2 at least what its bits are as a number
// in units of 2^23, less 127: the exponent, and for its logarithm the fraction itself.
inline Floats most_noise(Ints bits) {
    const Ints logarithm = (Ints)__builtin_convertvector(bits, Floats);  // of 2^31 w, or a little less
    return splat(158 * 0.693147181f + 1e-3f) - __builtin_convertvector(logarithm, Floats) * splat(0.693147181f * 0x1p-23f);
}

}  // namespace
