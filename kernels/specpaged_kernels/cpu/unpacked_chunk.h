// A chunk's keys and values of one head, read where they lie by the few rows of a decode or a short verify.
#pragma once

#include "attention_row.h"

namespace {

// Sums of pairs of lanes, then of those: in `sums` lane i becomes the sum of the lanes of x[i], in one order for all i.
inline Floats pairs(Floats x, Floats y) {
    return SHUFFLE(x, y, 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE(x, y, 2, 10, 3, 11, 6, 14, 7, 15);
}
inline Floats fours(const Floats (&x)[4]) {
    const Floats low = pairs(x[0], x[1]), high = pairs(x[2], x[3]);
    return SHUFFLE(low, high, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(low, high, 2, 3, 10, 11, 6, 7, 14, 15);
}
inline Floats sums(Floats low, Floats high) {  // `fours` of x[0] to x[3] and of x[4] to x[7]
    return SHUFFLE(low, high, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(low, high, 4, 5, 6, 7, 12, 13, 14, 15);
}

// The first `count` of eight values, zeros behind them.
template <typename T>
Floats load_some(const T* from, int count) {
    Floats x = splat(0.0f);
    for (int i = 0; i < count; ++i) x[i] = to_float(from[i]);
    return x;
}

// Slots that will be wanted next, of which keys and values of all heads are fetched in the order in which they lie: so
// memory is quickest. Waiting for it overlaps with work only where it is asked for little by little.
template <typename T>
struct Ahead {
    const T* slots[CHUNK];
    int count, heads, head_dim;
    int64_t values_behind;  // their keys, in elements
    int slot = 0, head = 0;

    inline void fetch() {  // D keys or values more
        if (slot >= count) return;
        const T* from = slots[slot] + (head < heads ? head * head_dim : values_behind + (head - heads) * head_dim);
        for (size_t byte = 0; byte < head_dim * sizeof(T); byte += 64) __builtin_prefetch((const char*)from + byte, 0, 2);
        if (++head == 2 * heads) head = 0, ++slot;
    }
};

// Of products of queries [D] with four keys [D]: the `fours` of their lanes. WHOLE: D is a multiple of LANES.
template <bool WHOLE, int ROWS, typename T>
inline __attribute__((always_inline)) void multiply_keys(Row* const (&rows)[ROWS], const T* const* keys, int head_dim,
                                                         Floats (&result)[ROWS]) {
    Floats total[ROWS][4] = {};
    int d = 0;
    for (; d + LANES <= head_dim; d += LANES) {
        Floats part[4];
        for (int i = 0; i < 4; ++i) part[i] = load(keys[i] + d);
        for (int r = 0; r < ROWS; ++r) {
            const Floats query = load(rows[r]->query + d);
            for (int i = 0; i < 4; ++i) total[r][i] = fma(query, part[i], total[r][i]);
        }
    }
    if (!WHOLE)
        for (int r = 0; r < ROWS; ++r) {
            const Floats query = load_some(rows[r]->query + d, head_dim - d);
            for (int i = 0; i < 4; ++i) total[r][i] = fma(query, load_some(keys[i] + d, head_dim - d), total[r][i]);
        }
    for (int r = 0; r < ROWS; ++r) result[r] = fours(total[r]);
}

// Weights of each row's keys from .. to - 1 of a chunk (`exponentiate`). Meanwhile as much is fetched `ahead`, unless it
// is null.
template <bool WHOLE, int ROWS, typename T>
void weigh(Row* const (&rows)[ROWS], const T* const* keys, Ahead<T>* ahead, const Scores& scores, int head_dim) {
    int from = CHUNK, to = 0;
    Floats largest[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        from = std::min(from, rows[r]->from);
        to = std::max(to, rows[r]->to);
        largest[r] = splat(-INFINITY);
    }
    const int begin = from / LANES * LANES, end = (to + LANES - 1) / LANES * LANES;
    for (int key = begin; key < end; key += LANES) {
        if (ahead)
            for (int i = 0; i < LANES; ++i) ahead->fetch();
        Floats low[ROWS], high[ROWS];
        multiply_keys<WHOLE>(rows, keys + key, head_dim, low);
        multiply_keys<WHOLE>(rows, keys + key + 4, head_dim, high);
        for (int r = 0; r < ROWS; ++r) {
            const Floats x = scores.of(sums(low[r], high[r]), *rows[r], key);
            store(rows[r]->weights + key, x);
            largest[r] = x > largest[r] ? x : largest[r];
        }
    }
    exponentiate(rows, largest, begin, end, head_dim);
}

template <int ROWS, int VECTORS, typename T>
void add_columns(Row* const (&rows)[ROWS], const T* const* values, Ahead<T>* ahead, int from, int to, int d) {
    Floats total[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) total[r][v] = load(rows[r]->output + d + v * LANES);
    for (int i = from; i < to; ++i) {
        if (ahead && d == 0) ahead->fetch();
        Floats value[VECTORS];
        for (int v = 0; v < VECTORS; ++v) value[v] = load(values[i] + d + v * LANES);
        for (int r = 0; r < ROWS; ++r) {
            Floats weight = splat(rows[r]->weights[i]);
            for (int v = 0; v < VECTORS; ++v) total[r][v] = fma(weight, value[v], total[r][v]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) store(rows[r]->output + d + v * LANES, total[r][v]);
}

// Adds the values [D] of the keys from .. to - 1 of a chunk. Meanwhile as much is fetched `ahead`, unless it is
// null.
template <int ROWS, typename T>
void add_values(Row* const (&rows)[ROWS], const T* const* values, Ahead<T>* ahead, int from, int to, int head_dim) {
    if (from >= to) return;
    int d = 0;
    for (; d + 4 * LANES <= head_dim; d += 4 * LANES) add_columns<ROWS, 4>(rows, values, ahead, from, to, d);
    for (; d + LANES <= head_dim; d += LANES) add_columns<ROWS, 1>(rows, values, ahead, from, to, d);
    for (; d < head_dim; ++d)
        for (int r = 0; r < ROWS; ++r)
            for (int i = from; i < to; ++i)
                rows[r]->output[d] = fma(rows[r]->weights[i], to_float(values[i][d]), rows[r]->output[d]);
}

// The values of all keys that rows read: each row adds them in order; those that all read, together.
template <int ROWS, typename T>
void add_all_values(Row* const (&rows)[ROWS], const T* const* values, Ahead<T>* ahead, int head_dim) {
    const auto [from, to] = common_keys(rows);
    for (int r = 0; r < ROWS; ++r)
        add_values<1>({rows[r]}, values, ahead, rows[r]->from, std::min(from, rows[r]->to), head_dim);
    add_values<ROWS>(rows, values, ahead, from, to, head_dim);
    for (int r = 0; r < ROWS; ++r)
        add_values<1>({rows[r]}, values, ahead, std::max(to, rows[r]->from), rows[r]->to, head_dim);
}

}  // namespace
