// x [M, K] times a weight [N, K], plus a bias, for the few rows of a decode or a verify as for a prefill's many.
//
// The weight lies in panels of PANEL outputs, [N / PANEL, K, PANEL]. A row's sum runs over K in order, one lane per
// output, in float32. How many rows, panels and lanes are taken together, and where K is cut, is a matter of speed: a
// sum that waits in memory keeps its bits, so that a row has the same ones in every batch (see paged_attention.cpp on
// what the compiler may do). Weights may be stored in 16 bits, of which each is a float32: they have the same products,
// and half the bytes. A tile of rows fills the vector registers. One tile runs over all of K; of several, each
// runs over a block of K, while the panels' next block comes into the caches:
//
//              K                             K
//        +-----+-----+---                +-----+-----+---
//   row  |           >                   |  1  |  4  >          a tile
//        +-----+-----+---           tile +-----+-----+---
//                                        |  2  |  5  >
//                                        +-----+-----+---
//                                        |  3  |  6  >

#pragma once

#include <algorithm>
#include <vector>

#include "status.h"
#include "team.h"
#include "vectors.h"

namespace {

constexpr int PANEL = 16, EACH = PANEL / WIDE;  // outputs, and their vectors
constexpr int BLOCK = 256;     // of K: its weights, and the rows' values, stay in the nearest cache
constexpr int MOST_ROWS = 48;  // whose sums wait side by side
constexpr int AHEAD = 64;      // columns that a single tile fetches in advance: the hardware stops at a page's end
// Sums, weights and an input fill the vector registers: 32 of sixteen lanes, 16 of eight.
constexpr int TILE_ROWS = WIDE == PANEL ? 12 : 6;
constexpr int TILE_PANELS = WIDE == PANEL ? 2 : 1;
constexpr int TASK_PANELS = WIDE == PANEL ? 6 : 4;

// Panels of a single tile: with few rows, several keep as many sums in flight, and as many streams of weights.
constexpr int panels_of(int rows) {
    if (WIDE == PANEL) return rows == 1 ? 6 : rows == 4 ? 3 : rows <= 6 ? 4 : rows <= 8 ? 3 : TILE_PANELS;
    return rows == 1 ? 4 : rows <= 3 ? 2 : TILE_PANELS;
}

// Vector v of a panel's column, as floats.
template <typename W>
Wides column_vector(const W* column, int v) {
    return load_wide(column + v * WIDE);
}
// Of bfloat16, outputs i and i + PANEL / 2 lie side by side: a half is a shift or a mask of all that is read.
inline Wides column_vector(const bfloat16* column, int v) {
    static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first of a pair is the low half");
    Ints pairs;
    std::memcpy(&pairs, column, sizeof pairs);
    const Ints halves[2] = {pairs << 16, pairs & int32_t(0xffff0000)};
    Wides x;
    std::memcpy(&x, halves + v, sizeof x);
    return x;
}

struct Rows {
    const float* values;
    int64_t stride;
    Rows at(int64_t row, int64_t k = 0) const { return {values + row * stride + k, stride}; }
};

// Panels of one task, side by side in memory.
template <typename W>
struct Panels {
    const W* weights;
    int64_t size;  // of one
    Panels at(int64_t panel, int64_t k = 0) const { return {weights + panel * size + k * PANEL, size}; }
};

// What comes into the caches beside a multiplication: an address, and the bytes to the next panel's and column's.
struct Fetched {
    const char* from;
    int64_t panel, column;
};

template <typename W>
Fetched fetched_of(Panels<W> panels, int64_t step) {
    return {(const char*)panels.weights, panels.size * int64_t(sizeof(W)), step * int64_t(sizeof(W))};
}

// Adds `depth` columns to sums [ROWS, PANELS * PANEL], or begins them. Few panels are few streams of weights, which the
// hardware fetches too late: with each column a line is fetched for each of them.
template <int ROWS, int PANELS, typename W>
void multiply(Rows x, Panels<W> panels, int64_t depth, bool begins, Fetched fetched, float* sums) {
    constexpr int VECTORS = PANELS * EACH;
    Wides total[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v)
            total[r][v] = begins ? Wides{} : load_wide(sums + r * PANELS * PANEL + v * WIDE);
    for (int64_t k = 0; k < depth; ++k) {
        if constexpr (PANELS <= TILE_PANELS)
            for (int p = 0; p < PANELS; ++p) __builtin_prefetch(fetched.from + p * fetched.panel + k * fetched.column);
        const auto input = [&](int r) { return splat_wide(x.values[r * x.stride + k]); };
        const auto weights = [&](int v) { return column_vector(panels.at(v / EACH, k).weights, v % EACH); };
        if constexpr (ROWS < VECTORS) {  // what there is less of stays in registers
            Wides inputs[ROWS];
            for (int r = 0; r < ROWS; ++r) inputs[r] = in_register(input(r));
            for (int v = 0; v < VECTORS; ++v) {
                const Wides column = ROWS == 1 ? weights(v) : in_register(weights(v));
                for (int r = 0; r < ROWS; ++r) total[r][v] = fma_wide(inputs[r], column, total[r][v]);
            }
        } else {
            Wides column[VECTORS];
            for (int v = 0; v < VECTORS; ++v) column[v] = in_register(weights(v));
            for (int r = 0; r < ROWS; ++r) {
                const Wides of_row = input(r);
                for (int v = 0; v < VECTORS; ++v) total[r][v] = fma_wide(of_row, column[v], total[r][v]);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) store_wide(sums + r * PANELS * PANEL + v * WIDE, total[r][v]);
}

// The same with `count` rows, at most ROWS.
template <int ROWS, int PANELS, typename W>
void multiply_tile(int64_t count, Rows x, Panels<W> panels, int64_t depth, bool begins, Fetched fetched, float* sums) {
    if constexpr (ROWS > 1) {
        if (count < ROWS) {
            multiply_tile<ROWS - 1, PANELS>(count, x, panels, depth, begins, fetched, sums);
            return;
        }
    }
    multiply<ROWS, PANELS>(x, panels, depth, begins, fetched, sums);
}

// The outputs of some rows, [count, width] of y, from their sums.
template <typename Y>
void finish(const float* sums, int64_t sums_row, int64_t count, int64_t width, const Y* bias, Y* y, int64_t y_row) {
    for (int64_t r = 0; r < count; ++r)
        for (int64_t i = 0; i < width; ++i) {
            const float sum = sums[r * sums_row + i];
            from_float(bias ? sum + to_float(bias[i]) : sum, y + r * y_row + i);
        }
}

template <typename W, typename Y>
struct Task {
    Panels<W> panels;
    int64_t num_panels, in_features, width;  // of outputs; the last panel may have fewer of them
    const Y* bias;
    Y* y;
    int64_t y_row;

    // What lies from one of its panels on.
    Task from(int64_t panel) const {
        const int64_t first = panel * PANEL;
        return {panels.at(panel), num_panels - panel, in_features, width - first, bias ? bias + first : bias,
                y + first, y_row};
    }
};

// One tile of ROWS rows over PANELS panels at a time, and over those that are left.
template <int ROWS, int PANELS, typename W, typename Y>
void run_tile(Rows x, Task<W, Y> task) {
    float sums[ROWS * PANELS * PANEL];
    for (; task.num_panels >= PANELS; task = task.from(PANELS)) {
        const Fetched fetched = fetched_of(task.panels.at(0, AHEAD), PANEL);
        multiply<ROWS, PANELS>(x, task.panels, task.in_features, true, fetched, sums);
        finish(sums, PANELS * PANEL, ROWS, std::min<int64_t>(PANELS * PANEL, task.width), task.bias, task.y, task.y_row);
    }
    if constexpr (PANELS > 1) run_tile<ROWS, PANELS / 2>(x, task);
}

template <int ROWS, typename W, typename Y>
void run_one_tile(int64_t count, Rows x, const Task<W, Y>& task) {
    if constexpr (ROWS > 1) {
        if (count < ROWS) {
            run_one_tile<ROWS - 1>(count, x, task);
            return;
        }
    }
    run_tile<ROWS, panels_of(ROWS)>(x, task);
}

// Tiles that are alike: of 13 rows five, four and four, rather than six, six and one.
template <int PANELS, typename W, typename Y>
void run_tiles(int64_t count, Rows x, Task<W, Y> task) {
    float sums[MOST_ROWS * PANELS * PANEL];
    const int64_t num_tiles = (count + TILE_ROWS - 1) / TILE_ROWS, step = PANEL / num_tiles;
    for (; task.num_panels >= PANELS; task = task.from(PANELS)) {
        for (int64_t k = 0; k == 0 || k < task.in_features; k += BLOCK) {  // of nothing, the sums are 0
            const int64_t depth = std::min<int64_t>(BLOCK, task.in_features - k);
            for (int64_t tile = 0, row = 0; tile < num_tiles; ++tile) {
                const int64_t rows = (count - row + num_tiles - tile - 1) / (num_tiles - tile);
                Fetched fetched = fetched_of(task.panels.at(0, k + depth), step);
                fetched.from += tile * depth * fetched.column;
                multiply_tile<TILE_ROWS, PANELS>(rows, x.at(row, k), task.panels.at(0, k), depth, k == 0, fetched,
                                                 sums + row * PANELS * PANEL);
                row += rows;
            }
        }
        finish(sums, PANELS * PANEL, count, std::min<int64_t>(PANELS * PANEL, task.width), task.bias, task.y,
               task.y_row);
    }
    if constexpr (PANELS > 1) run_tiles<PANELS / 2>(count, x, task);
}

// All rows. Many are taken in groups that are alike, too.
template <typename W, typename Y>
void run(int64_t num_rows, Rows x, const Task<W, Y>& task) {
    if (num_rows <= TILE_ROWS) {
        run_one_tile<TILE_ROWS>(num_rows, x, task);
        return;
    }
    const int64_t num_groups = (num_rows + MOST_ROWS - 1) / MOST_ROWS;
    Task<W, Y> of_group = task;
    for (int64_t group = 0, row = 0; group < num_groups; ++group) {
        const int64_t count = (num_rows - row + num_groups - group - 1) / (num_groups - group);
        of_group.y = task.y + row * task.y_row;
        run_tiles<TILE_PANELS>(count, x.at(row), of_group);
        row += count;
    }
}

// Rows that are floats already are taken where they lie.
inline Rows as_floats(const float* rows, int64_t, int64_t, int64_t stride, std::vector<float>*) {
    return {rows, stride};
}
inline Rows as_floats(const bfloat16* rows, int64_t num_rows, int64_t size, int64_t stride, std::vector<float>* to) {
    to->resize(size_t(num_rows * size));
    for (int64_t row = 0; row < num_rows; ++row)
        for (int64_t i = 0; i < size; ++i) (*to)[size_t(row * size + i)] = to_float(rows[row * stride + i]);
    return {to->data(), size};
}

struct Weight {
    const void* panels;  // [ceil(N / PANEL), K, PANEL], zeros behind N
    int64_t storage;
};

template <typename W, typename T>
void linear(Rows x, int64_t num_rows, const W* weight, const T* bias, int64_t in_features, int64_t out_features, T* y,
            int num_threads) {
    const int64_t num_panels = (out_features + PANEL - 1) / PANEL;
    const int64_t num_tasks = (num_panels + TASK_PANELS - 1) / TASK_PANELS;
    const Task<W, T> all = {{weight, in_features * PANEL}, num_panels, in_features, out_features, bias, y, out_features};
    Team::run(num_tasks, num_threads, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            Task<W, T> task = all.from(i * TASK_PANELS);
            task.num_panels = std::min<int64_t>(TASK_PANELS, task.num_panels);
            run(num_rows, x, task);
        }
    });
}

template <typename T>
void linear(const T* rows, int64_t stride, int64_t num_rows, const Weight& weight, const T* bias, int64_t in_features,
            int64_t out_features, T* y, int num_threads) {
    if (num_rows == 0) return;
    std::vector<float> converted;
    const Rows x = as_floats(rows, num_rows, in_features, stride, &converted);
    const auto as = [&](const auto* panels) {
        linear(x, num_rows, panels, bias, in_features, out_features, y, num_threads);
    };
    if (weight.storage == BFLOAT16) as((const bfloat16*)weight.panels);
    else if (weight.storage == FLOAT16) as((const float16*)weight.panels);
    else as((const float*)weight.panels);
}

}  // namespace

// Whether stored float16 is converted as fast as it is read.
extern "C" int converts_float16() {
#if defined(__F16C__) || defined(__AVX512F__)
    return 1;
#else
    return 0;
#endif
}

// x [M, K]: x_row elements from row to row; bias [N] or null; y [M, N] contiguous. Returns a Status.
#undef DEFINE
#define DEFINE(NAME, TYPE)                                                                                       \
    extern "C" int NAME(const void* x, int64_t x_row, int64_t num_rows, const void* panels, int64_t storage,     \
                        const void* bias, int64_t in_features, int64_t out_features, void* y, int num_threads) { \
        return guarded([&] {                                                                                     \
            linear((const TYPE*)x, x_row, num_rows, Weight{panels, storage}, (const TYPE*)bias, in_features,     \
                   out_features, (TYPE*)y, num_threads);                                                         \
            return int(OK);                                                                                      \
        });                                                                                                      \
    }

DEFINE(linear_float32, float)
DEFINE(linear_bfloat16, bfloat16)
