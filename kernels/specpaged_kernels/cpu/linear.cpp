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
#include <type_traits>
#include <vector>

#include "lines.h"
#include "status.h"
#include "team.h"
#include "vectors.h"

namespace {

constexpr int PANEL = 16, EACH = PANEL / WIDE;  // outputs, and their vectors
constexpr int BLOCK = 128;     // of K, in float32: its weights, and the rows' values, stay in the nearest cache
constexpr int MOST_ROWS = 96;  // whose sums wait side by side
constexpr int LEAST_CONVERTED = 4;  // tiles for which a block's 16 bits are converted once, and not in each of them
constexpr int AHEAD = 64;      // columns that a single tile fetches in advance: the hardware stops at a page's end
constexpr int FARTHER = 8192;  // bytes from those to what comes into the second cache: the nearest waits for few lines
// Sums, weights and an input fill the vector registers: 32 of sixteen lanes, 16 of eight.
constexpr int TILE_ROWS = WIDE == PANEL ? 12 : 6;
constexpr int TILE_PANELS = WIDE == PANEL ? 2 : 1;
constexpr int MOST_PANELS = WIDE == PANEL ? 8 : 4;  // of a task

// Panels of a single tile: with few rows, several keep as many sums in flight, and as many streams of weights.
constexpr int panels_of(int rows) {
    if (WIDE == PANEL) return rows == 1 ? 8 : rows == 4 ? 3 : rows <= 6 ? 4 : rows <= 8 ? 3 : TILE_PANELS;
    return rows == 1 ? 4 : rows <= 3 ? 2 : TILE_PANELS;
}

// Panels of a task: as many as a whole number of tiles takes, so that none is left for a tile of its own.
constexpr int64_t task_panels_of(int64_t num_rows) {
    const int of_tile = panels_of(int(std::min<int64_t>(num_rows, TILE_ROWS)));
    return MOST_PANELS / of_tile * of_tile;
}

// Vector v of a panel's column, as floats.
template <typename W>
Wides column_vector(const W* column, int v) {
    return load_wide(column + v * WIDE);
}
// Of bfloat16, outputs i and i + PANEL / 2 lie side by side: a half is a shift or a mask of all that is read. Sixteen
// lanes are one permutation, which leaves zeros where the bits of a float32 end.
inline Wides column_vector(const bfloat16* column, int v) {
    static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first of a pair is the low half");
#if WIDE_LANES == 16 && defined(__AVX512BW__)
    const __m512i pairs = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)column));
    const __m512i places = _mm512_set_epi32(15 << 16, 13 << 16, 11 << 16, 9 << 16, 7 << 16, 5 << 16, 3 << 16, 1 << 16,
                                            14 << 16, 12 << 16, 10 << 16, 8 << 16, 6 << 16, 4 << 16, 2 << 16, 0);
    return (Wides)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, places, pairs);
#else
    Ints pairs;
    std::memcpy(&pairs, column, sizeof pairs);
    const Ints halves[2] = {pairs << 16, pairs & int32_t(0xffff0000)};
    Wides x;
    std::memcpy(&x, halves + v, sizeof x);
    return x;
#endif
}

// The rows of a tile, column by column: what a tile multiplies by lies together, whatever the rows' own stride is.
struct TileRows {
    const float* values;  // [K, rows of the tile]
};

// How rows are divided into tiles that are alike, of at most TILE_ROWS: 13 of them into 5, 4 and 4.
struct Tiling {
    int64_t num_rows, num_tiles;
    explicit Tiling(int64_t rows) : num_rows(rows), num_tiles((rows + TILE_ROWS - 1) / TILE_ROWS) {}
    int64_t first(int64_t tile) const { return num_rows / num_tiles * tile + std::min(tile, num_rows % num_tiles); }
    int64_t size(int64_t tile) const { return first(tile + 1) - first(tile); }
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

// Adds `depth` columns to sums [ROWS, PANELS * PANEL], or begins them. The hardware fetches too late what several rows
// multiply by, and what lies in few panels: with each column a line is fetched for each of them, and with eight
// lanes another one, from FARTHER, where the core would else wait for memory.
template <int ROWS, int PANELS, bool FAR, typename W>
void multiply(TileRows x, Panels<W> panels, int64_t depth, bool begins, Fetched fetched, float* sums) {
    constexpr int VECTORS = PANELS * EACH;
    Wides total[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v)
            total[r][v] = begins ? Wides{} : load_wide(sums + r * PANELS * PANEL + v * WIDE);
    for (int64_t k = 0; k < depth; ++k) {
        if constexpr (ROWS > 1 || PANELS <= TILE_PANELS)
            for (int p = 0; p < PANELS; ++p) {
                const char* const line = fetched.from + p * fetched.panel + k * fetched.column;
                __builtin_prefetch(line);
                if constexpr (FAR) __builtin_prefetch(line + FARTHER, 0, 2);
            }
        const auto input = [&](int r) { return splat_wide(x.values[k * ROWS + r]); };
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
template <int ROWS, int PANELS, bool FAR, typename W>
void multiply_tile(int64_t count, TileRows x, Panels<W> panels, int64_t depth, bool begins, Fetched fetched, float* sums) {
    if constexpr (ROWS > 1) {
        if (count < ROWS) {
            multiply_tile<ROWS - 1, PANELS, FAR>(count, x, panels, depth, begins, fetched, sums);
            return;
        }
    }
    multiply<ROWS, PANELS, FAR>(x, panels, depth, begins, fetched, sums);
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
void run_tile(TileRows x, Task<W, Y> task) {
    // Two panels of float32, of 2 and 3 rows, are read in time, and took a tenth more with it.
    constexpr bool FAR = WIDE != PANEL && (ROWS > 3 || !std::is_same_v<W, float>);
    float sums[ROWS * PANELS * PANEL];
    for (; task.num_panels >= PANELS; task = task.from(PANELS)) {
        const Fetched fetched = fetched_of(task.panels.at(0, AHEAD), PANEL);
        multiply<ROWS, PANELS, FAR>(x, task.panels, task.in_features, true, fetched, sums);
        finish(sums, PANELS * PANEL, ROWS, std::min<int64_t>(PANELS * PANEL, task.width), task.bias, task.y, task.y_row);
    }
    if constexpr (PANELS > 1) run_tile<ROWS, PANELS / 2>(x, task);
}

template <int ROWS, typename W, typename Y>
void run_one_tile(int64_t count, TileRows x, const Task<W, Y>& task) {
    if constexpr (ROWS > 1) {
        if (count < ROWS) {
            run_one_tile<ROWS - 1>(count, x, task);
            return;
        }
    }
    run_tile<ROWS, panels_of(ROWS)>(x, task);
}

// Columns of PANELS panels as floats.
template <int PANELS, typename W>
Panels<float> converted(Panels<W> panels, int64_t depth, float* floats) {
    for (int p = 0; p < PANELS; ++p)
        for (int64_t k = 0; k < depth; ++k)
            for (int v = 0; v < EACH; ++v)
                store_wide(floats + (p * BLOCK + k) * PANEL + v * WIDE, column_vector(panels.at(p, k).weights, v));
    return {floats, BLOCK * PANEL};
}

// Some tiles in turn: tiles first .. last - 1, of at most MOST_ROWS rows together. With eight lanes it takes less to
// convert 16 bits in each tile.
template <int PANELS, typename W, typename Y>
void run_tiles(const Tiling& tiling, int64_t first, int64_t last, const float* x, Task<W, Y> task) {
    constexpr bool CONVERTS = WIDE == PANEL && !std::is_same_v<W, float>;
    constexpr bool FAR = WIDE != PANEL && std::is_same_v<W, float>;  // 16 bits are read in time
    float sums[MOST_ROWS * PANELS * PANEL], floats[CONVERTS ? PANELS * BLOCK * PANEL : 1];
    const int64_t first_row = tiling.first(first), count = tiling.first(last) - first_row, step = PANEL / (last - first);
    const bool converts = CONVERTS && last - first >= LEAST_CONVERTED;
    const int64_t most = converts ? BLOCK : BLOCK * sizeof(float) / sizeof(W);
    for (; task.num_panels >= PANELS; task = task.from(PANELS)) {
        for (int64_t k = 0; k == 0 || k < task.in_features; k += most) {  // of nothing, the sums are 0
            const int64_t depth = std::min(most, task.in_features - k);
            Fetched fetched = fetched_of(task.panels.at(0, k + depth), step);
            const auto multiply_by = [&](auto block) {
                for (int64_t tile = first; tile < last; ++tile) {
                    const int64_t row = tiling.first(tile), rows = tiling.size(tile);
                    const TileRows of_tile = {x + row * task.in_features + k * rows};
                    multiply_tile<TILE_ROWS, PANELS, FAR>(rows, of_tile, block, depth, k == 0, fetched,
                                                          sums + (row - first_row) * PANELS * PANEL);
                    fetched.from += depth * fetched.column;
                }
            };
            if (converts) multiply_by(converted<PANELS>(task.panels.at(0, k), depth, floats));
            else multiply_by(task.panels.at(0, k));
        }
        finish(sums, PANELS * PANEL, count, std::min<int64_t>(PANELS * PANEL, task.width), task.bias, task.y,
               task.y_row);
    }
    if constexpr (PANELS > 1) run_tiles<PANELS / 2>(tiling, first, last, x, task);
}

// All rows, x [K, rows] tile by tile.
template <typename W, typename Y>
void run(const Tiling& tiling, const float* x, const Task<W, Y>& task) {
    if (tiling.num_tiles == 1) {
        run_one_tile<TILE_ROWS>(tiling.num_rows, {x}, task);
        return;
    }
    constexpr int64_t MOST_TILES = MOST_ROWS / TILE_ROWS;
    Task<W, Y> of_group = task;
    for (int64_t first = 0; first < tiling.num_tiles; first += MOST_TILES) {
        of_group.y = task.y + tiling.first(first) * task.y_row;
        run_tiles<TILE_PANELS>(tiling, first, std::min(tiling.num_tiles, first + MOST_TILES), x, of_group);
    }
}

typedef float Fours __attribute__((vector_size(16)));

template <typename T>
Fours load_fours(const T* from) {
    return Fours{to_float(from[0]), to_float(from[1]), to_float(from[2]), to_float(from[3])};
}

// Columns of a tile's rows, as floats: four by four, and what is left one by one.
template <typename T>
void turn(const T* rows, int64_t stride, int64_t num_rows, int64_t size, float* to) {
    if (num_rows == 1) {
        for (int64_t k = 0; k < size; ++k) to[k] = to_float(rows[k]);
        return;
    }
    int64_t k = 0;
    for (; k + 4 <= size; k += 4) {
        int64_t row = 0;
        for (; row + 4 <= num_rows; row += 4) {
            Fours x[4];
            for (int i = 0; i < 4; ++i) x[i] = load_fours(rows + (row + i) * stride + k);
            const Fours low[2] = {SHUFFLE(x[0], x[1], 0, 4, 1, 5), SHUFFLE(x[2], x[3], 0, 4, 1, 5)};
            const Fours high[2] = {SHUFFLE(x[0], x[1], 2, 6, 3, 7), SHUFFLE(x[2], x[3], 2, 6, 3, 7)};
            const Fours columns[4] = {SHUFFLE(low[0], low[1], 0, 1, 4, 5), SHUFFLE(low[0], low[1], 2, 3, 6, 7),
                                      SHUFFLE(high[0], high[1], 0, 1, 4, 5), SHUFFLE(high[0], high[1], 2, 3, 6, 7)};
            for (int i = 0; i < 4; ++i) std::memcpy(to + (k + i) * num_rows + row, &columns[i], sizeof(Fours));
        }
        for (; row < num_rows; ++row)
            for (int i = 0; i < 4; ++i) to[(k + i) * num_rows + row] = to_float(rows[row * stride + k + i]);
    }
    for (; k < size; ++k)
        for (int64_t row = 0; row < num_rows; ++row) to[k * num_rows + row] = to_float(rows[row * stride + k]);
}

struct Weight {
    const void* panels;  // [ceil(N / PANEL), K, PANEL], zeros behind N
    int64_t storage;
};

template <typename W, typename T>
void linear(const Tiling& tiling, const float* x, const W* weight, const T* bias, int64_t in_features,
            int64_t out_features, T* y, int num_threads) {
    const int64_t num_panels = (out_features + PANEL - 1) / PANEL;
    const int64_t task_panels = task_panels_of(tiling.num_rows);
    const int64_t num_tasks = (num_panels + task_panels - 1) / task_panels;
    const Task<W, T> all = {{weight, in_features * PANEL}, num_panels, in_features, out_features, bias, y, out_features};
    Team::run(num_tasks, num_threads, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            Task<W, T> task = all.from(i * task_panels);
            task.num_panels = std::min(task_panels, task.num_panels);
            run(tiling, x, task);
        }
    });
}

template <typename T>
void linear(const T* rows, int64_t stride, int64_t num_rows, const Weight& weight, const T* bias, int64_t in_features,
            int64_t out_features, T* y, int num_threads) {
    if (num_rows == 0) return;
    static thread_local Lines scratch;
    const Tiling tiling(num_rows);
    float* const turned = scratch.resized(size_t(num_rows * in_features));  // of the thread that called
    Team::run(tiling.num_tiles, num_threads, [&](int64_t first, int64_t last) {
        for (int64_t tile = first; tile < last; ++tile) {
            const int64_t row = tiling.first(tile);
            turn(rows + row * stride, stride, tiling.size(tile), in_features, turned + row * in_features);
        }
    });
    const auto as = [&](const auto* panels) {
        linear(tiling, turned, panels, bias, in_features, out_features, y, num_threads);
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
