// The largest of a row of logits, and how likely it is.
#pragma once

#include <cmath>

#include "vectors.h"

namespace {

struct Largest {
    int64_t idx;  // of equals the first; 0 where all are -inf or NaN
    bool ok;      // none of the values is NaN, and not all are -inf
};

template <typename T>
Largest largest(const T* values, int64_t size) {
    Floats best = splat(-INFINITY);  // of each lane
    Ints starts = {}, nans = {};     // of the vector that it comes from; lanes that are NaN somewhere
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const Floats x = load(values + i);
        const Ints more = x > best;
        nans |= x != x;
        best = more ? x : best;
        starts = more ? Ints{} + int32_t(i) : starts;
    }
    float most = -INFINITY;
    Largest found = {0, true};
    for (int lane = 0; lane < LANES; ++lane) {
        const int64_t idx = starts[lane] + lane;
        found.ok &= !nans[lane];
        if (best[lane] > most || (best[lane] == most && idx < found.idx)) {
            most = best[lane];
            found.idx = idx;
        }
    }
    for (; i < size; ++i) {
        const float x = to_float(values[i]);
        found.ok &= x == x;
        if (x > most) {
            most = x;
            found.idx = i;
        }
    }
    found.ok &= most > -INFINITY;
    return found;
}

// The log-softmax of the largest of logits [size].
template <typename T>
float largest_logprob(const T* logits, int64_t size, float largest) {
    Floats sums = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) sums += exp(load(logits + i) - splat(largest));
    float total = sum(sums);
    for (; i < size; ++i) total += exp(to_float(logits[i]) - largest);
    return -std::log(total);
}

}  // namespace
