// x [M, K] times a weight [N, K], plus a bias, for the few rows of a decode or a verify as for a prefill's many.
//
// The weight lies in panels of PANEL outputs, [N / PANEL, K, PANEL]: a pass over K reads it once, front to back. A row's
// sum runs over K in order, one lane per output, in registers from beginning to end. How many rows and panels are taken
// together is a matter of speed: it changes no row's operations, so that a row has the same bits in every batch (see
// paged_attention.cpp on what the compiler may do).

#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "status.h"
#include "vectors.h"

namespace {

constexpr int PANEL = 2 * LANES;
constexpr int AHEAD = 64;    // of the columns that are multiplied, those that are fetched: the hardware stops at a page's end
constexpr int MAX_ROWS = 6;  // 12 sums, 2 weights and an input fill the 16 vector registers of AVX2

template <int ROWS, int PANELS, typename T, typename Y>
void multiply(const T* x, int64_t x_row, const T* panel, const Y* bias, int64_t in_features, int64_t out_features,
              int64_t first, Y* y) {
    constexpr int VECTORS = PANELS * PANEL / LANES;
    Floats total[ROWS][VECTORS] = {};
    const int64_t panel_size = in_features * PANEL;
    for (int64_t k = 0; k < in_features; ++k) {
        for (int p = 0; p < PANELS; ++p) __builtin_prefetch(panel + p * panel_size + (k + AHEAD) * PANEL);
        Floats column[VECTORS];
        for (int v = 0; v < VECTORS; ++v)
            column[v] = load(panel + v / 2 * panel_size + k * PANEL + v % 2 * LANES);
        for (int r = 0; r < ROWS; ++r) {
            const Floats input = splat(to_float(x[r * x_row + k]));
            for (int v = 0; v < VECTORS; ++v) total[r][v] = fma(input, column[v], total[r][v]);
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        float sums[VECTORS * LANES];
        for (int v = 0; v < VECTORS; ++v) store(sums + v * LANES, total[r][v]);
        const int64_t count = out_features - first < VECTORS * LANES ? out_features - first : VECTORS * LANES;
        Y* to = y + r * out_features + first;
        for (int64_t i = 0; i < count; ++i) from_float(bias ? sums[i] + to_float(bias[first + i]) : sums[i], to + i);
    }
}

// Outputs first .. first + panels * PANEL - 1 of some rows.
template <int ROWS, typename T, typename Y>
void multiply(const T* x, int64_t x_row, const T* panel, const Y* bias, int64_t in_features, int64_t out_features,
              int64_t first, int panels, Y* y) {
    // With few rows, several panels keep as many sums in flight.
    constexpr int TOGETHER = ROWS == 1 ? 4 : ROWS <= 3 ? 2 : 1;
    for (; panels >= TOGETHER; panels -= TOGETHER) {
        multiply<ROWS, TOGETHER>(x, x_row, panel, bias, in_features, out_features, first, y);
        panel += TOGETHER * in_features * PANEL;
        first += TOGETHER * PANEL;
    }
    for (; panels > 0; --panels) {
        multiply<ROWS, 1>(x, x_row, panel, bias, in_features, out_features, first, y);
        panel += in_features * PANEL;
        first += PANEL;
    }
}

// The same of all rows.
template <typename T, typename Y>
void multiply_rows(const T* x, int64_t x_row, int64_t num_rows, const T* panel, const Y* bias, int64_t in_features,
                   int64_t out_features, int64_t first, int panels, Y* y) {
    int64_t row = 0;
    const auto run = [&](auto rows) {
        multiply<rows.value>(x + row * x_row, x_row, panel, bias, in_features, out_features, first, panels,
                             y + row * out_features);
        row += rows.value;
    };
    while (num_rows - row >= MAX_ROWS) run(std::integral_constant<int, MAX_ROWS>());
    switch (num_rows - row) {
        case 5: run(std::integral_constant<int, 5>()); break;
        case 4: run(std::integral_constant<int, 4>()); break;
        case 3: run(std::integral_constant<int, 3>()); break;
        case 2: run(std::integral_constant<int, 2>()); break;
        case 1: run(std::integral_constant<int, 1>()); break;
    }
}

template <typename T>
std::vector<float> as_floats(const T* from, int64_t num_rows, int64_t row_size, int64_t stride) {
    std::vector<float> to(size_t(num_rows * row_size));
    for (int64_t row = 0; row < num_rows; ++row)
        for (int64_t i = 0; i < row_size; ++i) to[size_t(row * row_size + i)] = to_float(from[row * stride + i]);
    return to;
}

template <typename T>
void linear(const T* x, int64_t x_row, int64_t num_rows, const T* weight, const T* bias, int64_t in_features,
            int64_t out_features, T* y, int num_threads) {
    // Many rows pay for converting all that they share once; the products are the same.
    const bool converts = sizeof(T) < sizeof(float) && num_rows > 2 * MAX_ROWS;
    const std::vector<float> converted = converts ? as_floats(x, num_rows, in_features, x_row) : std::vector<float>();
    const int task_panels = converts ? 1 : 4;
    const int64_t num_panels = (out_features + PANEL - 1) / PANEL, panel_size = in_features * PANEL;
    const int64_t num_tasks = (num_panels + task_panels - 1) / task_panels;
    Programs programs;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
    for (int64_t task = 0; task < num_tasks; ++task) {
        const int64_t panel = task * task_panels;
        const int panels = int(std::min<int64_t>(task_panels, num_panels - panel));
        const T* weights = weight + panel * panel_size;
        if (converts)
            programs.run([&] {
                multiply_rows(converted.data(), in_features, num_rows,
                              as_floats(weights, panels, panel_size, panel_size).data(), bias, in_features,
                              out_features, panel * PANEL, panels, y);
            });
        else
            multiply_rows(x, x_row, num_rows, weights, bias, in_features, out_features, panel * PANEL, panels, y);
    }
    programs.rethrow();
}

}  // namespace

// x [M, K]: x_row elements from row to row; weight [ceil(N / PANEL), K, PANEL], zeros behind N; bias [N] or null;
// y [M, N] contiguous. Returns a Status.
#undef DEFINE
#define DEFINE(NAME, TYPE)                                                                                       \
    extern "C" int NAME(const void* x, int64_t x_row, int64_t num_rows, const void* weight, const void* bias,    \
                        int64_t in_features, int64_t out_features, void* y, int num_threads) {                   \
        return guarded([&] {                                                                                     \
            linear((const TYPE*)x, x_row, num_rows, (const TYPE*)weight, (const TYPE*)bias, in_features,         \
                   out_features, (TYPE*)y, num_threads);                                                         \
            return int(OK);                                                                                      \
        });                                                                                                      \
    }

DEFINE(linear_float32, float)
DEFINE(linear_bfloat16, bfloat16)
