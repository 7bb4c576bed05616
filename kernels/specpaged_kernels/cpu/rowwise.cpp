// What a decoder does between its matrix products and its attention, each in one pass over the rows.
//
// A row's operations follow from its length alone (see paged_attention.cpp on what the compiler may do).

#pragma once

#include <cmath>

#include "vectors.h"

namespace {

template <typename T>
float inverse_rms(const T* x, int64_t size, float eps) {
    Floats totals[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        for (int v = 0; v < 4; ++v) {
            const Floats part = load(x + i + v * LANES);
            totals[v] = fma(part, part, totals[v]);
        }
    float total = sum((totals[0] + totals[1]) + (totals[2] + totals[3]));
    for (; i < size; ++i) total = fma(to_float(x[i]), to_float(x[i]), total);
    return 1.0f / std::sqrt(total / float(size) + eps);
}

template <typename T>
void scale(const T* x, float factor, const float* weight, int64_t size, T* y) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(y + i, load(x + i) * splat(factor) * load(weight + i));
    for (; i < size; ++i) from_float(to_float(x[i]) * factor * weight[i], y + i);
}

template <typename T>
void rms_norm(T* x, int64_t x_row, const T* added, float multiplier, const float* weight, float eps, int64_t num_rows,
              int64_t size, T* y) {
    for (int64_t row = 0; row < num_rows; ++row) {
        T* values = x + row * x_row;
        if (added) {
            const T* more = added + row * size;
            int64_t i = 0;
            for (; i + LANES <= size; i += LANES)
                store(values + i, load(values + i) + load(more + i) * splat(multiplier));
            for (; i < size; ++i) from_float(to_float(values[i]) + to_float(more[i]) * multiplier, values + i);
        }
        scale(values, inverse_rms(values, size, eps), weight, size, y + row * size);
    }
}

template <typename T>
void norm_and_rotate(T* qkv, int64_t qkv_row, const float* weight, float eps, const float* cosine, const float* sine,
                     int64_t half, int64_t num_rows, int64_t num_heads, int64_t head_dim) {
    for (int64_t row = 0; row < num_rows; ++row)
        for (int64_t head = 0; head < num_heads; ++head) {
            T* x = qkv + row * qkv_row + head * head_dim;
            if (weight) scale(x, inverse_rms(x, head_dim, eps), weight + head * head_dim, head_dim, x);
            if (!half) continue;
            const float *c = cosine + row * half, *s = sine + row * half;
            int64_t i = 0;
            for (; i + LANES <= half; i += LANES) {
                const Floats first = load(x + i), second = load(x + half + i), cos = load(c + i), sin = load(s + i);
                store(x + i, first * cos - second * sin);
                store(x + half + i, second * cos + first * sin);
            }
            for (; i < half; ++i) {
                const float first = to_float(x[i]), second = to_float(x[half + i]);
                from_float(first * c[i] - second * s[i], x + i);
                from_float(second * c[i] + first * s[i], x + half + i);
            }
        }
}

inline Floats silu(Floats x) {
    const Floats size = x < splat(0.0f) ? -x : x, e = exp(-size);
    return x * (x < splat(0.0f) ? e : splat(1.0f)) / (splat(1.0f) + e);
}

inline Floats gelu_tanh(Floats x) {
    const Floats inner = splat(0.7978845608f) * fma(splat(0.044715f) * x * x, x, x);
    return splat(0.5f) * x * (splat(1.0f) + tanh(inner));
}

template <Floats (*ACTIVATION)(Floats), typename T>
void gate(const T* gate_up, int64_t num_rows, int64_t size, T* y) {
    for (int64_t row = 0; row < num_rows; ++row) {
        const T *gates = gate_up + row * 2 * size, *up = gates + size;
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES)
            store(y + row * size + i, ACTIVATION(load(gates + i)) * load(up + i));
        for (; i < size; ++i)
            from_float(ACTIVATION(splat(to_float(gates[i])))[0] * to_float(up[i]), y + row * size + i);
    }
}

}  // namespace

// x [M, H], x_row elements from row to row; added [M, H] or null: x becomes x + added * multiplier, in place, first.
// weight [H] float; y [M, H].
#undef DEFINE
#define DEFINE(SUFFIX, TYPE)                                                                                         \
    extern "C" void rms_norm_##SUFFIX(void* x, int64_t x_row, const void* added, float multiplier,                  \
                                      const void* weight, float eps, int64_t num_rows, int64_t size, void* y) {     \
        rms_norm((TYPE*)x, x_row, (const TYPE*)added, multiplier, (const float*)weight, eps, num_rows, size,        \
                 (TYPE*)y);                                                                                         \
    }                                                                                                                \
    extern "C" void norm_and_rotate_##SUFFIX(void* qkv, int64_t qkv_row, const void* weight, float eps,             \
                                             const void* cosine, const void* sine, int64_t half, int64_t num_rows,  \
                                             int64_t num_heads, int64_t head_dim) {                                 \
        norm_and_rotate((TYPE*)qkv, qkv_row, (const float*)weight, eps, (const float*)cosine, (const float*)sine,   \
                        half, num_rows, num_heads, head_dim);                                                       \
    }                                                                                                                \
    extern "C" void silu_gate_##SUFFIX(const void* gate_up, int64_t num_rows, int64_t size, void* y) {              \
        gate<silu>((const TYPE*)gate_up, num_rows, size, (TYPE*)y);                                                 \
    }                                                                                                                \
    extern "C" void gelu_tanh_gate_##SUFFIX(const void* gate_up, int64_t num_rows, int64_t size, void* y) {         \
        gate<gelu_tanh>((const TYPE*)gate_up, num_rows, size, (TYPE*)y);                                            \
    }

DEFINE(float32, float)
DEFINE(bfloat16, bfloat16)
