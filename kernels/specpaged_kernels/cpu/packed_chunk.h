// A chunk's keys and values of one head, laid out for many rows that read them.
//
// Reading a key where it lies, a row ends with a sum over lanes (`sums` of unpacked_chunk.h), which takes as long as
// the product of a short head. Turned once, the keys are the lanes: the sums of eight are then of whole vectors, in the
// same order, so that a row has the same bits either way.
//
//     where they lie   key j:  d0 d1 .. d7 | d8 ..        lane l sums d = l, l + 8, ..; then the lanes are summed
//     packed           d:      key 0, key 1 ..            sum l of d = l, l + 8, ..;    then those are
#pragma once

#include "attention_row.h"

namespace {

constexpr int TOGETHER = 4;  // rows: their sums and what they share fill the registers

// Rows become columns: lane i of y[j] is lane j of x[i].
inline void transpose(const Floats (&x)[LANES], Floats (&y)[LANES]) {
    Floats pairs[LANES], fours[LANES];
    for (int i = 0; i < LANES; i += 2) {
        pairs[i] = SHUFFLE(x[i], x[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        pairs[i + 1] = SHUFFLE(x[i], x[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int half = 0; half < 2; ++half) {
            fours[i + 2 * half] = SHUFFLE(pairs[i + half], pairs[i + 2 + half], 0, 1, 8, 9, 4, 5, 12, 13);
            fours[i + 2 * half + 1] = SHUFFLE(pairs[i + half], pairs[i + 2 + half], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < 4; ++i) {
        y[i] = SHUFFLE(fours[i], fours[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        y[i + 4] = SHUFFLE(fours[i], fours[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

struct PackedChunk {
    Lines keys, values;  // [D, CHUNK], [CHUNK, D]
    int head_dim = 0;    // D, a multiple of LANES

    // Takes `num_keys` of them from where they lie: eight at a time, of which the last one stands for who is none, and
    // nobody reads that. `each` is called with each of them.
    template <typename T, typename Each>
    void pack(const T* const* from_keys, const T* const* from_values, int num_keys, int dim, Each each) {
        head_dim = dim;
        float* const to_keys = keys.resized(size_t(dim) * CHUNK);
        float* const to_values = values.resized(size_t(dim) * CHUNK);
        for (int i = 0; i < num_keys; ++i) {
            each();
            for (int d = 0; d < dim; d += LANES) store(to_values + size_t(i) * dim + d, load(from_values[i] + d));
        }
        for (int key = 0; key < num_keys; key += LANES)
            for (int d = 0; d < dim; d += LANES) {
                Floats rows[LANES], columns[LANES];
                for (int i = 0; i < LANES; ++i) rows[i] = load(from_keys[std::min(key + i, num_keys - 1)] + d);
                transpose(rows, columns);
                for (int i = 0; i < LANES; ++i) store(to_keys + size_t(d + i) * CHUNK + key, columns[i]);
            }
    }
};

// Sums [ROWS, VECTORS * WIDE] of products over d = lane, lane + 8, ..
template <int ROWS, int VECTORS>
inline __attribute__((always_inline)) void add_lane(Row* const (&rows)[ROWS], const PackedChunk& chunk, int key,
                                                    int lane, Wides (&total)[ROWS][VECTORS]) {
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) total[r][v] = Wides{};
    for (int d = lane; d < chunk.head_dim; d += LANES) {
        Wides part[VECTORS];
        const float* const keys = chunk.keys.data() + size_t(d) * CHUNK + key;
        for (int v = 0; v < VECTORS; ++v) part[v] = in_register(load_wide(keys + v * WIDE));
        for (int r = 0; r < ROWS; ++r) {
            const Wides query = splat_wide(rows[r]->query[d]);
            for (int v = 0; v < VECTORS; ++v) total[r][v] = fma_wide(query, part[v], total[r][v]);
        }
    }
}

// Their sums over four lanes from `lane` on, in the order of `fours`.
template <int ROWS, int VECTORS>
inline __attribute__((always_inline)) void add_four_lanes(Row* const (&rows)[ROWS], const PackedChunk& chunk, int key,
                                                          int lane, Wides (&total)[ROWS][VECTORS]) {
    Wides other[ROWS][VECTORS], next[ROWS][VECTORS];
    const auto add = [](Wides(&x)[ROWS][VECTORS], const Wides(&y)[ROWS][VECTORS]) {
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < VECTORS; ++v) x[r][v] = x[r][v] + y[r][v];
    };
    add_lane(rows, chunk, key, lane, total);
    add_lane(rows, chunk, key, lane + 2, next);
    add(total, next);
    add_lane(rows, chunk, key, lane + 1, other);
    add_lane(rows, chunk, key, lane + 3, next);
    add(other, next);
    add(total, other);
}

template <int ROWS>
void weigh_packed(Row* const (&rows)[ROWS], const PackedChunk& chunk, const Scores& scores) {
    constexpr int VECTORS = 2;
    constexpr int STEP = VECTORS * WIDE;
    static_assert(CHUNK % STEP == 0, "a chunk is whole vectors");
    int from = CHUNK, to = 0;
    Wides largest[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        from = std::min(from, rows[r]->from);
        to = std::max(to, rows[r]->to);
        largest[r] = Wides{} - INFINITY;
    }
    const int begin = from / STEP * STEP, end = (to + STEP - 1) / STEP * STEP;
    for (int key = begin; key < end; key += STEP) {
        Wides total[ROWS][VECTORS], half[ROWS][VECTORS];
        add_four_lanes(rows, chunk, key, 0, total);
        add_four_lanes(rows, chunk, key, 4, half);
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < VECTORS; ++v) {
                const int first = key + v * WIDE;
                const Wides x = scores.of(total[r][v] + half[r][v], *rows[r], first);
                store_wide(rows[r]->weights + first, x);
                largest[r] = x > largest[r] ? x : largest[r];
            }
    }
    exponentiate(rows, largest, begin, end, chunk.head_dim);
}

// Adds the values of the keys from .. to - 1.
template <int ROWS, int VECTORS, typename Vector>
inline void add_packed_columns(Row* const (&rows)[ROWS], const PackedChunk& chunk, int from, int to, int d) {
    constexpr int SIZE = sizeof(Vector) / sizeof(float);
    Vector total[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) total[r][v] = loaded<Vector>(rows[r]->output + d + v * SIZE);
    for (int i = from; i < to; ++i) {
        Vector value[VECTORS];
        for (int v = 0; v < VECTORS; ++v)
            value[v] = in_register(loaded<Vector>(chunk.values.data() + size_t(i) * chunk.head_dim + d + v * SIZE));
        for (int r = 0; r < ROWS; ++r) {
            const Vector weight = rows[r]->weights[i] - Vector{};
            for (int v = 0; v < VECTORS; ++v) total[r][v] = multiply_add(weight, value[v], total[r][v]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) std::memcpy(rows[r]->output + d + v * SIZE, &total[r][v], sizeof(Vector));
}

template <int ROWS>
void add_packed_values(Row* const (&rows)[ROWS], const PackedChunk& chunk, int from, int to) {
    if (from >= to) return;
    int d = 0;
    for (; d + 2 * WIDE <= chunk.head_dim; d += 2 * WIDE) add_packed_columns<ROWS, 2, Wides>(rows, chunk, from, to, d);
    for (; d + LANES <= chunk.head_dim; d += LANES) add_packed_columns<ROWS, 1, Floats>(rows, chunk, from, to, d);
}

// All of it for rows whose from and to are known: each adds the keys that it reads, in order; those that all read,
// together.
template <int ROWS>
void attend_packed(Row* const (&rows)[ROWS], const PackedChunk& chunk, const Scores& scores) {
    weigh_packed(rows, chunk, scores);
    const auto [from, to] = common_keys(rows);
    for (int r = 0; r < ROWS; ++r)
        add_packed_values<1>({rows[r]}, chunk, rows[r]->from, std::min(from, rows[r]->to));
    add_packed_values(rows, chunk, from, to);
    for (int r = 0; r < ROWS; ++r) add_packed_values<1>({rows[r]}, chunk, std::max(to, rows[r]->from), rows[r]->to);
}

}  // namespace
