// A row of logits as sampling reads it: divided by its temperature, in spans whose largest values are known.

#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t SPAN = 64;  // values whose largest is known

inline bool any(Ints mask) {
#if defined(__AVX2__) && defined(__FMA__)
    return _mm256_movemask_ps((__m256)mask) != 0;
#else
    int32_t found = 0;
    for (int lane = 0; lane < LANES; ++lane) found |= mask[lane];
    return found != 0;
#endif
}

inline Ints ids_from(int64_t first) { return Ints{0, 1, 2, 3, 4, 5, 6, 7} + int32_t(first); }

class LogitsRow {
public:
    float largest = 0.0f;
    bool is_infinite = false;  // the largest was: those that were have become 0, and all others -inf

    // The token of the largest value, of equals the first; -1 where a value is NaN, or all are -inf.
    int64_t read(const float* logits, int64_t vocab_size, float temperature) {
        const int64_t num_spans = (vocab_size + SPAN - 1) / SPAN, num_whole = vocab_size / SPAN;
        values_.resize(size_t(num_spans * SPAN));
        maxima_.resize(size_t(num_spans));
        const float divisor = temperature == 0.0f ? 1.0f : temperature;
        Ints nans = {};
        for (int64_t span = 0; span < num_whole; ++span) read_span(logits + span * SPAN, span, divisor, &nans);
        if (num_whole < num_spans) {
            float last[SPAN];
            std::fill_n(std::copy(logits + num_whole * SPAN, logits + vocab_size, last),
                        num_spans * SPAN - vocab_size, -INFINITY);
            read_span(last, num_whole, divisor, &nans);
        }
        const auto of_largest = std::max_element(maxima_.begin(), maxima_.end());  // the first span that has it
        largest = *of_largest;
        if (any(nans) || largest == -INFINITY) return -1;
        int64_t id = (of_largest - maxima_.begin()) * SPAN;
        while (values_[size_t(id)] != largest) ++id;
        is_infinite = largest == INFINITY;
        if (is_infinite) {
            for (std::vector<float>* all : {&values_, &maxima_})
                for (float& x : *all) x = x == INFINITY ? 0.0f : -INFINITY;
            largest = 0.0f;
        }
        return id;
    }

    const std::vector<float>& maxima() const { return maxima_; }
    const float* values() const { return values_.data(); }
    float operator[](int64_t id) const { return values_[size_t(id)]; }

    // Calls see(values) for the spans that reach `floor`, as it is then; in order.
    template <typename F>
    void for_each_span(const float& floor, const F& see) const {
        for (size_t span = 0; span < maxima_.size(); ++span)
            if (maxima_[span] >= floor) see(values() + int64_t(span) * SPAN);
    }

    // Calls see(i, vector) for their vectors.
    template <typename F>
    void for_each(const float& floor, const F& see) const {
        for_each_span(floor, [&](const float* span) {
            for (int64_t i = 0; i < SPAN; i += LANES) see(span + i - values(), load(span + i));
        });
    }

private:
    void read_span(const float* logits, int64_t span, float divisor, Ints* nans) {
        Floats most = splat(-INFINITY);
        for (int64_t i = 0; i < SPAN; i += LANES) {
            const Floats x = load(logits + i) / splat(divisor);
            *nans |= x != x;
            most = x > most ? x : most;
            store(values_.data() + span * SPAN + i, x);
        }
        float of_lanes[LANES];
        store(of_lanes, most);
        for (int half = LANES / 2; half > 0; half /= 2)
            for (int lane = 0; lane < half; ++lane) of_lanes[lane] = std::max(of_lanes[lane], of_lanes[lane + half]);
        maxima_[size_t(span)] = of_lanes[0];
    }

    std::vector<float> values_;  // -inf behind them, up to whole spans
    std::vector<float> maxima_;  // of spans
};

}  // namespace
