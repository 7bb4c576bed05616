// Which tokens of a row top-k and top-p let stay.
//
// Tokens are in the order (largest value, lowest id). One stays if fewer than top_k come before it, and if those of the
// top_k that come before it weigh less than top_p of what all of the top_k weigh. So the last one is where a measure,
// number or weight, has come to enough; it is looked for in three steps, by number, and then by weight:
//
//     guess      counts the largest tokens and an eighth of the others, by buckets of how far they are behind the
//                largest: those in which the last one should be
//     measure    sums up, in one pass over the row, the measure of all tokens and of those before these buckets, and
//                sets aside what is in them
//     resolve    sums up what was set aside by cells, parts of buckets, and sorts the one in which enough is reached
//
//     largest |      |      |      |      |      |      |      |      |      |    far behind
//     guessed |             |<------------------>|                                in buckets
//     cells                 | | | | | |*| | | | |                                 *: sorted
//
// All decisions are by exact sums: where a guess was wrong, further buckets are measured, and no token changes.

#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "logits_row.h"
#include "weights.h"

namespace {

// The tokens that stay: of larger values than `last`, and those of this value with ids up to `last_id`.
struct Cut {
    float last;
    int32_t last_id;
    int64_t weight;  // of all that stay; 0: not known
};

// Writes those lanes of x one after the other, and anything into the rest of WIDE places; returns what is behind them.
inline float* append(Wides x, WideInts lanes, float* to) {
#if WIDE_LANES == 16 && defined(__AVX512F__)
    const __mmask16 mask = _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes);
    store_wide(to, (Wides)_mm512_maskz_compress_ps(mask, (__m512)x));
    return to + __builtin_popcount(mask);
#elif WIDE_LANES == 8 && defined(__AVX2__)
    static constexpr struct Orders {
        int32_t of[256][8];
        constexpr Orders() : of() {
            for (int mask = 0; mask < 256; ++mask)
                for (int lane = 0, place = 0; lane < 8; ++lane)
                    if (mask >> lane & 1) of[mask][place++] = lane;
        }
    } ORDERS;
    const int mask = _mm256_movemask_ps((__m256)lanes);
    const __m256i order = _mm256_loadu_si256((const __m256i*)ORDERS.of[mask]);
    store_wide(to, (Wides)_mm256_permutevar8x32_ps((__m256)x, order));
    return to + __builtin_popcount(unsigned(mask));
#else
    for (int lane = 0; lane < WIDE; ++lane) {
        *to = x[lane];
        to -= lanes[lane];
    }
    return to;
#endif
}

class CutFinder {
public:
    // Of the tokens from `floor` on, which the largest reaches, those that top_k, 1 to vocab_size, and top_p let stay.
    Cut find(const LogitsRow& row, int64_t vocab_size, float floor, int64_t top_k, double top_p) {
        row_ = &row;
        End end = {floor, 0, 0, 0};
        if (top_k <= int64_t(row.maxima().size()) / 4)
            end = end_of_few(floor, top_k, top_p);
        else {
            if (top_k < vocab_size) end = search<NUMBER>(floor, double(top_k), 0);
            if (top_p < 1.0) end = search<WEIGHT>(end.last, top_p, end.num_left_out * weight_of(end.last));
        }
        return {end.last, last_id(end), top_p < 1.0 ? end.measure : 0};
    }

private:
    enum Measure { NUMBER, WEIGHT };

    static constexpr int BUCKETS = 2048, BUCKETS_OF_UNIT = 64, CELLS = 1024;
    static constexpr float WEIGHTLESS = 28.0f;  // so far behind the largest a token weighs nothing
    static constexpr int SURE_SPANS = 128;      // whose largest tokens are all counted
    static constexpr int VECTORS = SPAN / LANES;

    struct End {
        float last;            // the value of the last token that stays
        int64_t num_last;      // tokens of this value that stay
        int64_t num_left_out;  // and that do not
        int64_t measure;       // of all that stay
    };

    struct Buckets {
        int first, last;
    };

    Floats weights(Floats x) const { return weights_of(x - splat(row_->largest)); }
    int64_t weight_of(float x) const { return int64_t(weights(splat(x))[0]); }

    // Where there are many more spans than top_k, the top_k-th of their maxima bounds what must be sorted.
    End end_of_few(float floor, int64_t top_k, double top_p) {
        floor = std::max(floor, large_maximum(top_k));
        sorted_.clear();
        row_->for_each(floor, [&](int64_t, Floats x) { take(x, x >= splat(floor)); });
        sort();
        const End end = walk<NUMBER>(0, double(top_k));
        if (!(top_p < 1.0)) return end;
        int64_t total = 0;
        for (int64_t i = 0; i < end.measure; ++i) total += weight_of(sorted_[size_t(i)]);
        return walk<WEIGHT>(0, double(total) * top_p);
    }

    // `wanted` is top_k or top_p; of the tokens with the value `floor` some that weigh `left_out` do not count.
    template <Measure MEASURE>
    End search(float floor, double wanted, int64_t left_out) {
        const End of_all = {floor, 0, 0, 0};
        Buckets left = {0, BUCKETS - 1}, buckets = guess<MEASURE>(floor, wanted);
        for (;;) {
            int64_t before, all;
            measure<MEASURE>(floor, buckets, &before, &all);
            const double enough = MEASURE == WEIGHT ? double(all - left_out) * wanted : wanted;
            const int more = 8 * (buckets.last + 1 - buckets.first);
            if (!(double(before) < enough)) {
                left.last = buckets.first - 1;
                buckets = {std::max(left.first, left.last + 1 - more), left.last};
            } else {
                End end;
                if (resolve<MEASURE>(buckets, before, enough, &end)) return end;
                left.first = buckets.last + 1;
                buckets = {left.first, std::min(left.first - 1 + more, left.last)};
            }
            if (left.first > left.last) return of_all;
        }
    }

    template <Measure MEASURE>
    Buckets guess(float floor, double wanted) {
        const std::vector<float>& maxima = row_->maxima();
        const float sure = maxima.size() > SURE_SPANS ? std::max(floor, large_maximum(SURE_SPANS)) : floor;
        counted_.assign(BUCKETS + 1, 0);
        sampled_.assign(BUCKETS + 1, 0);
        row_->for_each(sure, [&](int64_t, Floats x) { count(x, x >= splat(sure), &counted_); });
        if (sure > floor)
            for (size_t span = 0; span < maxima.size(); ++span)
                if (maxima[span] >= floor) {  // one of its vectors, each time another
                    const Floats x = load(row_->values() + span * SPAN + span % VECTORS * LANES);
                    count(x, (x >= splat(floor)) & (x < splat(sure)), &sampled_);
                }
        const double nearest = MEASURE == WEIGHT ? std::exp(-0.5 / BUCKETS_OF_UNIT) : 1.0;
        const double ratio = MEASURE == WEIGHT ? std::exp(-1.0 / BUCKETS_OF_UNIT) : 1.0;
        Estimate all, before;
        double each = nearest;  // the measure of a token in the middle of a bucket
        for (int b = 0; b < BUCKETS; ++b, each *= ratio) add_bucket(b, each, &all);
        // What comes before, less enough: by weight that is (1 - top_p) before - top_p (all - before).
        const double share = MEASURE == WEIGHT ? wanted : 0.0;
        const double enough = MEASURE == WEIGHT ? wanted * all.measure : wanted;
        const double rounding = 0.004 * share * (1.0 - share) * all.measure;  // to the middle
        Buckets buckets = {0, BUCKETS - 1};
        each = nearest;
        for (int b = 0; b < BUCKETS; ++b, each *= ratio) {
            const double beyond = before.measure - enough, behind = all.variance - before.variance;
            const double variance = (1.0 - share) * (1.0 - share) * before.variance + share * share * behind;
            if (beyond * beyond > 4.0 * 4.0 * variance + rounding * rounding) {  // surely so
                if (beyond > 0.0) {
                    buckets.last = b - 1;
                    break;
                }
                buckets.first = b;
            }
            add_bucket(b, each, &before);
        }
        return buckets;
    }

    void count(Floats x, Ints which, std::vector<int32_t>* counts) const {
        if (!any(which)) return;
        const Floats place = (splat(row_->largest) - x) * splat(float(BUCKETS_OF_UNIT)), last = splat(BUCKETS - 1.0f);
        const Ints buckets = which ? __builtin_convertvector(place < last ? place : last, Ints) : BUCKETS - Ints{};
        for (int lane = 0; lane < LANES; ++lane) ++(*counts)[size_t(buckets[lane])];
    }

    struct Estimate {
        double measure = 0.0, variance = 0.0;
    };

    // A token that was sampled stands for as many as a span has vectors.
    void add_bucket(int b, double each, Estimate* sum) const {
        const double sampled = sampled_[size_t(b)] * each;
        sum->measure += counted_[size_t(b)] * each + sampled * VECTORS;
        sum->variance += sampled * each * VECTORS * (VECTORS - 1);
    }

    // What values of this bucket, and of those behind it, lie below.
    float edge(int bucket) const {
        return bucket ? row_->largest - float(bucket) / float(BUCKETS_OF_UNIT) : INFINITY;
    }

    // The measure of the tokens from `floor` on, and of those before these buckets; those in them are set aside.
    template <Measure MEASURE>
    void measure(float floor, Buckets buckets, int64_t* before, int64_t* all) {
        const Wides largest = splat_wide(row_->largest), lowest = splat_wide(floor);
        const Wides start = buckets.last == BUCKETS - 1 ? lowest : splat_wide(std::max(floor, edge(buckets.last + 1)));
        const Wides end = splat_wide(edge(buckets.first));
        aside_.resize(row_->maxima().size() * SPAN + WIDE);
        float* free = aside_.data();
        Sum sum_before, sum_all;
        int num_spans = 0;
        const float least = MEASURE == WEIGHT ? std::max(floor, row_->largest - WEIGHTLESS) : floor;
        row_->for_each_span(least, [&](const float* values) {
            float exps[SPAN];
            if (MEASURE == WEIGHT)  // a loop of its own: more of these long chains of operations are under way at once
                for (int i = 0; i < SPAN; i += WIDE)
                    store_wide(exps + i, exp_rounded(load_wide(values + i) - largest));
            for (int i = 0; i < SPAN; i += WIDE) {
                const Wides x = load_wide(values + i);
                const WideInts stays = x >= lowest, is_before = stays & (x >= end);
                const Parts parts = MEASURE == WEIGHT ? Parts(load_wide(exps + i)) : Parts(1);
                sum_all.add(parts, stays);
                sum_before.add(parts, is_before);
                free = append(x, (x >= start) & ~is_before, free);
            }
            if (++num_spans % (Sum::MOST * WIDE / SPAN) == 0) {
                sum_before.settle();
                sum_all.settle();
            }
        });
        num_aside_ = free - aside_.data();
        store_wide(free, largest);  // into what is read with the last of them
        *before = sum_before.total();
        *all = sum_all.total();
    }

    // Whether enough is reached among what was set aside: where it is.
    template <Measure MEASURE>
    bool resolve(Buckets buckets, int64_t before, double enough, End* end) {
        const Floats first = splat(std::min(row_->largest, edge(buckets.first))), last = splat(CELLS - 1.0f);
        const Floats cells_of_unit = splat(float(CELLS * BUCKETS_OF_UNIT) / float(buckets.last + 1 - buckets.first));
        const auto cells_of = [&](Floats x) {
            const Floats place = (first - x) * cells_of_unit;
            return __builtin_convertvector(place < last ? place : last, Ints);
        };
        sums_.assign(CELLS + 1, 0);  // behind the cells what does not count
        for_each_aside([&](Floats x, Ints counts) {
            const Ints cells = counts ? cells_of(x) : CELLS - Ints{};
            const Floats measures = MEASURE == WEIGHT ? weights(x) : splat(1.0f);
            for (int lane = 0; lane < LANES; ++lane) sums_[size_t(cells[lane])] += int64_t(measures[lane]);
        });
        for (int cell = 0; cell < CELLS; ++cell) {
            const int64_t behind = before + sums_[size_t(cell)];
            if (!(double(behind) < enough)) {
                sorted_.clear();
                for_each_aside([&](Floats x, Ints counts) { take(x, counts & (cells_of(x) == cell)); });
                sort();
                *end = walk<MEASURE>(before, enough);
                return true;
            }
            before = behind;
        }
        return false;
    }

    template <typename F>
    void for_each_aside(const F& see) const {
        for (int64_t i = 0; i < num_aside_; i += LANES)
            see(load(aside_.data() + i), ids_from(i) < int32_t(num_aside_));
    }

    // The rank-th of the largest values of spans.
    float large_maximum(int64_t rank) {
        sorted_ = row_->maxima();
        std::nth_element(sorted_.begin(), sorted_.begin() + (rank - 1), sorted_.end(), std::greater<float>());
        return sorted_[size_t(rank - 1)];
    }

    void take(Floats x, Ints which) {
        if (!any(which)) return;
        for (int lane = 0; lane < LANES; ++lane)
            if (which[lane]) sorted_.push_back(x[lane]);
    }

    void sort() {
        const std::greater<float> order;
        if (!std::is_sorted(sorted_.begin(), sorted_.end(), order))  // as equals are
            std::sort(sorted_.begin(), sorted_.end(), order);
    }

    // The end among sorted values: a token stays while less than enough has come before it, and the first in any case.
    template <Measure MEASURE>
    End walk(int64_t before, double enough) const {
        for (size_t first = 0;;) {
            End end = {sorted_[first], 0, 0, before};
            const int64_t each = MEASURE == WEIGHT ? weight_of(end.last) : 1;
            size_t next = first;
            for (; next < sorted_.size() && sorted_[next] == end.last; ++next)
                if (next == 0 || double(end.measure) < enough) {
                    ++end.num_last;
                    end.measure += each;
                } else
                    ++end.num_left_out;
            if (next == sorted_.size() || !(double(end.measure) < enough)) return end;
            first = next;
            before = end.measure;
        }
    }

    // Of equals the first ones by id stay.
    int32_t last_id(End end) const {
        if (end.num_left_out == 0) return INT32_MAX;
        for (int64_t i = 0;; i += LANES) {
            const Ints equal = load(row_->values() + i) == splat(end.last);
            if (!any(equal)) continue;
            for (int lane = 0; lane < LANES; ++lane)
                if (equal[lane] && --end.num_last == 0) return int32_t(i + lane);
        }
    }

    const LogitsRow* row_ = nullptr;
    std::vector<int32_t> counted_, sampled_;  // [BUCKETS + 1] tokens; behind the buckets what does not count
    std::vector<float> aside_;                // [num_aside_], and room for a vector
    int64_t num_aside_ = 0;
    std::vector<int64_t> sums_;  // [CELLS + 1]
    std::vector<float> sorted_;
};

}  // namespace
