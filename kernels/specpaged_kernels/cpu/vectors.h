// Eight floats at a time, and the widest that there are, in GCC's and clang's vector extension.
#pragma once

#include <cstdint>
#include <cstring>
#if (defined(__AVX2__) && defined(__FMA__)) || defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 8;

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef uint8_t Quarters __attribute__((vector_size(LANES)));

// For sums whose lanes are outputs: how many lie in one vector changes no bit of them.
#if !defined(WIDE_LANES) && defined(__AVX512F__)
#define WIDE_LANES 16
#elif !defined(WIDE_LANES)
#define WIDE_LANES 8
#endif
constexpr int WIDE = WIDE_LANES;

typedef float Wides __attribute__((vector_size(WIDE * 4)));

// Lanes of two vectors, which are counted through both.
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
template <typename Vector>
inline Vector shuffled(Vector x, Vector y, const int (&lanes)[sizeof(Vector) / sizeof(float)]) {
    constexpr int SIZE = sizeof(Vector) / sizeof(float);
    Vector z;
    for (int i = 0; i < SIZE; ++i) z[i] = lanes[i] < SIZE ? x[lanes[i]] : y[lanes[i] - SIZE];
    return z;
}
#define SHUFFLE(x, y, ...) shuffled(x, y, {__VA_ARGS__})
#endif

enum Storage : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, FLOAT8 = 3 };  // the last one of KV alone

struct bfloat16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bfloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

// What weights and KV may be stored as, though they multiply as float32: every value of it is one.
struct float16 {
    uint16_t bits;
};
inline float to_float(float16 x) {
#if defined(__F16C__)
    return _cvtsh_ss(x.bits);
#else
    const uint32_t rest = uint32_t(x.bits & 0x7fff) << 13, is_finite = rest < 0x0f800000;
    const uint32_t bits = is_finite ? rest : rest + 0x70000000;  // infinities and NaN keep all bits of the exponent
    float y;
    std::memcpy(&y, &bits, 4);
    if (is_finite) y *= 0x1p112f;  // from the other bias; subnormal values, too
    return x.bits & 0x8000 ? -y : y;
#endif
}

// Four bits of exponent, biased by 7, and three of mantissa; no infinities (OCP's E4M3, PyTorch's float8_e4m3fn).
struct float8 {
    uint8_t bits;
};

inline void from_float(float x, float* out) { *out = x; }
inline void from_float(float x, bfloat16* out) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    out->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void from_float(float x, float16* out) {  // to nearest, ties to even
#if defined(__F16C__)
    out->bits = _cvtss_sh(x, 0);
#else
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) bits = 0x7e00;         // NaN
    else if (bits >= 0x477ff000) bits = 0x7c00;  // 65520 and more
    else if (bits < 0x38800000) {                // subnormal: in units of 2^-24, which adding to 0.5 rounds to
        float size;
        std::memcpy(&size, &bits, 4);
        size += 0.5f;
        std::memcpy(&bits, &size, 4);
        bits -= 0x3f000000;
    } else bits = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
    out->bits = uint16_t(sign | bits);
#endif
}

inline void from_float(float x, float8* out) {  // to nearest, ties to even; what is larger becomes the largest
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint8_t sign = uint8_t(bits >> 24 & 0x80);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) bits = 0x7f;          // NaN
    else if (bits >= 0x43e00000) bits = 0x7e;    // 448 and more
    else if (bits < 0x3c800000) {                // subnormal: in units of 2^-9, which adding to 2^14 rounds to
        float size;
        std::memcpy(&size, &bits, 4);
        size += 0x1p14f;
        std::memcpy(&bits, &size, 4);
        bits -= 0x46800000;
    } else bits = (bits - 0x3c000000 + 0x7ffff + (bits >> 20 & 1)) >> 20;
    out->bits = uint8_t(sign | bits);
}

inline Floats splat(float x) { return Floats{x, x, x, x, x, x, x, x}; }

inline Floats load(const float* from) {
    Floats x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
inline Floats load(const bfloat16* from) {
    Halves x;
    std::memcpy(&x, from, sizeof x);
    return (Floats)(__builtin_convertvector(x, Ints) << 16);
}
inline Floats load(const float16* from) {
#if defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    Floats x;
    for (int lane = 0; lane < LANES; ++lane) x[lane] = to_float(from[lane]);
    return x;
#endif
}
inline Floats load(const float8* from) {
#if defined(__AVX2__) && defined(__F16C__)
    // A float16 has one bit more of exponent, of another bias: 2^8 times as much.
    const Halves x = (Halves)_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)from)), rest = x & 0x7f;
    const Halves is_nan = (Halves)(rest == 0x7f), half = rest << 7 | (x & 0x80) << 8 | (is_nan & 0x7e00);
    return (Floats)_mm256_cvtph_ps((__m128i)half) * 256.0f;
#else
    Quarters x;
    std::memcpy(&x, from, sizeof x);
    const Ints bits = __builtin_convertvector(x, Ints), rest = (bits & 0x7f) << 20, sign = (bits & 0x80) << 24;
    const Ints bias = Ints{} + (120 << 23), least = Ints{} + (121 << 23);  // 127 - 7; 2^-6, above which are subnormals
    const Floats normal = (Floats)(rest + bias), subnormal = (Floats)(rest + least) - (Floats)least;
    const Floats size = rest < (1 << 23) ? subnormal : normal;
    const Ints is_nan = rest == (0x7f << 20);
    return (Floats)((Ints)size | sign | (is_nan & 0x7fc00000));
#endif
}
inline float to_float(float8 x) {
    const float8 eight[LANES] = {x};
    return load(eight)[0];
}
inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX2__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}
inline float fma(float a, float b, float c) {
#if defined(__AVX2__) && defined(__FMA__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// Keeps a value in a register: GCC would rather read it anew from memory for each product, and is held up by that.
template <typename Vector>
inline Vector in_register(Vector x) {
#if defined(__AVX512F__)
    __asm__("" : "+v"(x));
#elif defined(__AVX__)
    if constexpr (sizeof x == 32) __asm__("" : "+x"(x));
#endif
    return x;
}

inline Wides load_wide(const float* from) {
    Wides x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
inline Wides load_wide(const float16* from) {
#if WIDE_LANES == 16 && defined(__AVX512F__)
    return (Wides)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif WIDE_LANES == 8 && defined(__F16C__)
    return (Wides)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    Wides x;
    for (int lane = 0; lane < WIDE; ++lane) x[lane] = to_float(from[lane]);
    return x;
#endif
}
inline void store_wide(float* to, Wides x) { std::memcpy(to, &x, sizeof x); }

inline Wides splat_wide(float x) { return x - Wides{}; }

inline Wides fma_wide(Wides a, Wides b, Wides c) {
#if WIDE_LANES == 16 && defined(__AVX512F__)
    return (Wides)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif WIDE_LANES == 8 && defined(__AVX2__) && defined(__FMA__)
    return (Wides)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int lane = 0; lane < WIDE; ++lane) c[lane] = fma(a[lane], b[lane], c[lane]);
    return c;
#endif
}

// Of vectors of either size.
template <typename Vector>
inline Vector multiply_add(Vector a, Vector b, Vector c) {
    if constexpr (sizeof(Vector) == sizeof(Floats)) return fma(a, b, c);
    else return fma_wide(a, b, c);
}

inline void store(bfloat16* to, Floats x) {
    Ints bits = (Ints)x;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    bits = x == x ? bits : Ints{} + 0x7fc0;
    Halves rounded = __builtin_convertvector(bits, Halves);
    std::memcpy(to, &rounded, sizeof rounded);
}

// e^x for x <= 0 within 2 units in the last place (Cephes' expf); 0 below -87; NaN stays NaN.
template <typename Vector>
inline Vector exp(Vector x) {
    typedef int32_t Integers __attribute__((vector_size(sizeof(Vector))));
    const Vector zero = {}, lowest = zero - 87.0f, magic = zero + 12582912.0f;  // 1.5 * 2^23
    const Vector clamped = x < lowest ? lowest : x;
    const Vector shifted = multiply_add(clamped, zero + 1.44269504f, magic);  // whose last bits are an integer
    const Vector n = shifted - magic;
    const Vector r = multiply_add(n, zero + 2.12194440e-4f, multiply_add(n, zero - 0.693359375f, clamped));
    Vector y = zero + 1.9875691500e-4f;
    y = multiply_add(y, r, zero + 1.3981999507e-3f);
    y = multiply_add(y, r, zero + 8.3334519073e-3f);
    y = multiply_add(y, r, zero + 4.1665795894e-2f);
    y = multiply_add(y, r, zero + 1.6666665459e-1f);
    y = multiply_add(y, r, zero + 5.0000001201e-1f);
    y = multiply_add(y * r, r, r) + 1.0f;
    const Vector power = (Vector)(((Integers)shifted + 127) << 23);  // 2^n
    return x < lowest ? zero : y * power;
}
inline float exp(float x) { return exp(splat(x))[0]; }

template <typename Vector>
inline Vector tanh(Vector x) {  // within 1e-7, absolutely
    const Vector zero = {}, size = x < zero ? -x : x, e = exp(-2.0f * size), y = (1.0f - e) / (1.0f + e);
    return x < zero ? -y : y;
}

inline float sum(Floats x) {
    return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7]));
}

}  // namespace
