// A row of attention, a query token and a head, and its softmax over the keys of one chunk after the other.
#pragma once

#include <algorithm>
#include <cmath>

#include "lines.h"
#include "vectors.h"

namespace {

constexpr int CHUNK = 64;

template <typename Vector>
inline Vector loaded(const float* from) {
    Vector x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

struct Row {
    const float* query;   // [D]
    float* output;        // [D], the sum of weighted values so far
    float max, sum;
    int first, last;      // positions that it reads
    int from, to;         // of the current chunk: keys from .. to - 1
    alignas(LINE) float weights[CHUNK];
};

inline float largest_lane(Floats x) {
    Floats y = SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
    x = x > y ? x : y;
    y = SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5);
    x = x > y ? x : y;
    return x[0] > x[1] ? x[0] : x[1];
}

// The eight lanes that are first in a vector, those behind them, ..
template <typename Vector>
struct Eights {
    static constexpr int COUNT = sizeof(Vector) / sizeof(Floats);
    Floats eights[COUNT];
    explicit Eights(Vector x) { std::memcpy(eights, &x, sizeof x); }
};

// Keys of the current chunk.
struct Keys {
    int from, to;  // of which none is read where these are equal
};

// Those that all of some rows read.
template <int ROWS>
Keys common_keys(Row* const (&rows)[ROWS]) {
    Keys keys{0, CHUNK};
    for (const Row* row : rows) {
        keys.from = std::max(keys.from, row->from);
        keys.to = std::min(keys.to, row->to);
    }
    keys.to = std::max(keys.from, keys.to);
    return keys;
}

// How products of queries and keys become scores.
struct Scores {
    float scaling, softcap;  // softcap 0: none

    // The scores of keys from `key` on: -inf where the row does not read them.
    template <typename Vector>
    Vector of(Vector products, const Row& row, int key) const {
        constexpr int SIZE = sizeof(Vector) / sizeof(float);
        Vector x = products * scaling;
        if (softcap > 0) x = tanh(x / softcap) * softcap;
        if (key < row.from || key + SIZE > row.to) {
            Vector idx;
            for (int i = 0; i < SIZE; ++i) idx[i] = float(key + i);
            x = (idx < float(row.from)) | (idx >= float(row.to)) ? Vector{} - INFINITY : x;
        }
        return x;
    }
};

// Of rows whose weights are scores, from key `begin` to `end` (multiples of a vector's lanes): weights e^(score - max),
// and the sums so far rescaled to the new maximum. `largest`: of each row's scores, lane by lane. Weights are added eight
// at a time, whatever the vector; those that the row does not read are zeros.
template <int ROWS, typename Vector>
inline __attribute__((always_inline)) void exponentiate(Row* const (&rows)[ROWS], const Vector (&largest)[ROWS],
                                                        int begin, int end, int head_dim) {
    constexpr int SIZE = sizeof(Vector) / sizeof(float);
    float max[ROWS];
    Floats total[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        max[r] = rows[r]->max;
        for (const Floats& eight : Eights(largest[r]).eights) max[r] = std::max(max[r], largest_lane(eight));
        total[r] = splat(0.0f);
    }
    for (int key = begin; key < end; key += SIZE)
        for (int r = 0; r < ROWS; ++r) {
            const Vector weight = exp(loaded<Vector>(rows[r]->weights + key) - max[r]);
            std::memcpy(rows[r]->weights + key, &weight, sizeof weight);
            for (const Floats& eight : Eights(weight).eights) total[r] = total[r] + eight;
        }
    for (int r = 0; r < ROWS; ++r) {
        Row& row = *rows[r];
        const float rescale = row.max == max[r] ? 1.0f : exp(row.max - max[r]);
        row.sum = fma(row.sum, rescale, sum(total[r]));
        row.max = max[r];
        if (rescale != 1.0f)
            for (int d = 0; d < head_dim; ++d) row.output[d] *= rescale;
    }
}

}  // namespace
