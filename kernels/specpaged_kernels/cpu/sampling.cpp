// Chooses a token of each row of logits, in one call: temperature, min-p, top-k, top-p, noise, and the largest.
//
// Operations and their order are those of specpaged.sampling, which rounds each of them, so that tokens are the same,
// bit for bit. Left out is what cannot matter:
//
//     top-k          the largest values of spans bound the k-th of all: what lies below the k-th of those is not sorted
//     top-p          tokens are counted and weighed by buckets of their distance from the largest; only the bucket in
//                    which the cut lies is sorted. Weights are integers, whose sums have no order
//     noise          is at most -ln w (see gumbel), and w at least its power of two: whose value with that stays below
//                    the best so far needs no logarithm, and whose value lies far below it no bits either

#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>
#include <vector>

#include "status.h"
#include "team.h"
#include "vectors.h"

namespace {

typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));

struct Choice {           // how a row's token is chosen; the struct of the same name in sampling.py
    float temperature;    // 0 and 1: none
    float log_min_p;      // -inf: none
    int64_t top_k;        // 1 .. V
    double top_p;         // above 0; 1: none
    uint32_t keys[3];     // of the noise
    uint32_t has_noise;
};

// The tokens that stay: of larger values than `last`, and those of this value with ids up to `last_id`.
struct Cut {
    float last;
    int32_t last_id;
};

constexpr int64_t SPAN = 64;  // values whose largest is known
constexpr int BUCKETS = 2048, BUCKETS_OF_UNIT = 64;
constexpr float WEIGHT_SCALE = 0x1p40f, WEIGHTLESS = 28.0f;  // so far behind the largest a token weighs nothing
constexpr float MOST_NOISE = 22.3f;  // and a little more

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

// e^x for x <= 0, operation by operation as specpaged.sampling.elementwise.exp_fp32.
inline Floats exp_rounded(Floats x) {
    const Floats lowest = splat(-87.0f), zero = splat(0.0f), magic = splat(12582912.0f);  // as in `exp`
    Floats r = x < lowest ? lowest : x;
    r = r > zero ? zero : r;
    const Floats n = (r * splat(1.44269504f) + magic) - magic;
    r = r - n * splat(0.693359375f);
    r = r - n * splat(-2.12194440e-4f);
    Floats y = r * splat(1.9875691500e-4f);
    y = (y + splat(1.3981999507e-3f)) * r;
    y = (y + splat(8.3334519073e-3f)) * r;
    y = (y + splat(4.1665795894e-2f)) * r;
    y = (y + splat(1.6666665459e-1f)) * r;
    y = (y + splat(0.5f)) * r * r + r + splat(1.0f);
    y = (Floats)((Ints)y + (__builtin_convertvector(n, Ints) << 23));
    return x >= lowest ? y : zero;
}

// ln x of normal x > 0, as log_fp32_ there.
inline Floats log_rounded(Floats x) {
    const Ints bits = (Ints)x, k = (bits - 0x3F3504F3) >> 23;
    x = (Floats)(bits - (k << 23));
    const Floats s = (x - splat(1.0f)) / (x + splat(1.0f)), z = s * s;
    Floats series = z * splat(float(1.0 / 9)) + splat(float(1.0 / 7));
    series = series * z + splat(float(1.0 / 5));
    series = series * z + splat(float(1.0 / 3));
    series = series * z * s + s;
    return series * splat(2.0f) + __builtin_convertvector(k, Floats) * splat(0.693147180559945309f);
}

inline Bits mix(Bits x) {  // the finaliser lowbias32
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ (x >> 16);
}

// 31 bits for each id.
inline Ints noise_bits(Ints ids, const uint32_t (&keys)[3]) {
    return (Ints)(mix(mix((Bits)ids ^ keys[0]) + keys[1]) ^ keys[2]) & 0x7FFFFFFF;
}

// The noise -ln(-ln(1 - w)), as specpaged.sampling.noise.gumbel_noise.
inline Floats gumbel(Ints bits) {
    const Floats largest = splat(1.0f - 0x1p-24f);
    Floats w = (__builtin_convertvector(bits, Floats) + splat(0.5f)) * splat(0x1p-31f);
    w = w > largest ? largest : w;
    const Floats u = splat(1.0f) - w;
    const Floats rounding = ((u - splat(1.0f)) + w) / u;
    return -log_rounded(rounding - log_rounded(u));
}

// No less than that: w is at least its power of two.
inline Floats most_noise(Ints bits) {
    const Ints exponent = ((Ints)(__builtin_convertvector(bits, Floats) + splat(0.5f)) >> 23) - 127;
    return __builtin_convertvector(31 - exponent, Floats) * splat(0.6931472f) + splat(1e-3f);
}

// One row after the other, in memory that is kept.
class Chooser {
public:
    void choose(const float* logits, int64_t vocab_size, const Choice& choice, bool wants_logprob, int64_t* token_id,
                uint8_t* ok, float* logprob) {
        const int64_t likeliest = read(logits, vocab_size, choice.temperature);
        *token_id = std::max<int64_t>(0, likeliest);
        *ok = likeliest >= 0;
        *logprob = *ok ? 0.0f : NAN;
        if (!*ok || !(choice.has_noise || wants_logprob)) return;
        Cut cut = {-FLT_MAX, INT32_MAX};
        if (choice.log_min_p > -INFINITY) cut.last = std::max(cut.last, largest_ + choice.log_min_p);
        if (choice.top_k < int64_t(maxima_.size()))
            cut = cut_of_top(cut.last, choice);
        else if (choice.top_k < vocab_size || choice.top_p < 1.0)
            cut = cut_by_buckets(cut.last, choice, vocab_size);
        if (choice.has_noise) *token_id = noisiest(cut, likeliest, choice.keys);
        if (wants_logprob) *logprob = -distance(splat(values_[size_t(*token_id)]))[0] - std::log(weight_of_all(cut));
    }

private:
    // The token of the largest value, of equals the first; -1 where a value is NaN, or all are -inf.
    int64_t read(const float* logits, int64_t vocab_size, float temperature) {
        const int64_t num_spans = (vocab_size + SPAN - 1) / SPAN;
        values_.resize(size_t(num_spans * SPAN));
        maxima_.resize(size_t(num_spans));
        const Floats divisor = splat(temperature == 0.0f ? 1.0f : temperature);
        Ints nans = {};
        largest_ = -INFINITY;
        int64_t of_largest = 0;  // its span
        for (int64_t span = 0; span < num_spans; ++span) {
            Floats most = splat(-INFINITY);
            for (int64_t i = span * SPAN; i < (span + 1) * SPAN; i += LANES) {
                Floats x = splat(-INFINITY);
                if (i + LANES <= vocab_size)
                    x = load(logits + i);
                else
                    for (int64_t id = i; id < vocab_size; ++id) x[id - i] = logits[id];
                x = x / divisor;
                nans |= x != x;
                most = x > most ? x : most;
                store(values_.data() + i, x);
            }
            float largest = most[0];
            for (int lane = 1; lane < LANES; ++lane) largest = most[lane] > largest ? most[lane] : largest;
            maxima_[size_t(span)] = largest;
            if (largest > largest_) {
                largest_ = largest;
                of_largest = span;
            }
        }
        if (any(nans) || largest_ == -INFINITY) return -1;
        int64_t id = of_largest * SPAN;
        while (values_[size_t(id)] != largest_) ++id;
        return id;
    }

    // Calls see(i, values) for vectors of spans that reach `floor`, as it is then; in order.
    template <typename F>
    void for_each(const float& floor, const F& see) const {
        for (size_t span = 0; span < maxima_.size(); ++span)
            if (maxima_[span] >= floor)
                for (int64_t i = int64_t(span) * SPAN; i < int64_t(span + 1) * SPAN; i += LANES)
                    see(i, load(values_.data() + i));
    }

    static Ints staying(Floats x, Ints ids, Cut cut) {
        return (x > splat(cut.last)) | ((x == splat(cut.last)) & (ids <= cut.last_id));
    }

    // How far behind the largest, which may be infinite.
    Floats distance(Floats x) const { return x == splat(largest_) ? splat(0.0f) : splat(largest_) - x; }

    Ints bucket(Floats x) const {
        const Floats place = distance(x) * splat(float(BUCKETS_OF_UNIT)), last = splat(float(BUCKETS - 1));
        return __builtin_convertvector(place < last ? place : last, Ints);
    }

    Floats weight(Floats x) const { return exp_rounded(-distance(x)) * splat(WEIGHT_SCALE); }

    // Those of top-k and top-p among the values from `floor` on, where there are more spans than top_k.
    Cut cut_of_top(float floor, const Choice& choice) {
        sorted_ = maxima_;
        std::nth_element(sorted_.begin(), sorted_.begin() + (choice.top_k - 1), sorted_.end(), std::greater<float>());
        floor = std::max(floor, sorted_[size_t(choice.top_k - 1)]);
        sort_if(floor, [&](Floats x) { return x >= splat(floor); });
        const int64_t most = std::min<int64_t>(choice.top_k, int64_t(sorted_.size()));
        double enough = INFINITY;
        if (choice.top_p < 1.0) {
            int64_t total = 0;
            for (int64_t i = 0; i < most; ++i) total += weight_of(sorted_[size_t(i)]);
            enough = double(total) * choice.top_p;
        }
        return cut_within(most, 0, enough);
    }

    // The same, however many top_k are.
    Cut cut_by_buckets(float floor, const Choice& choice, int64_t vocab_size) {
        const bool weighs = choice.top_p < 1.0;
        double enough = INFINITY;
        if (weighs && choice.top_k == vocab_size) {
            // Of tokens that lie so far behind, all together weigh less than half of what is left out.
            const double total = double(weight_from(floor)), left_out = (1.0 - choice.top_p) * total / WEIGHT_SCALE;
            const double distance = std::log(2.0 * double(vocab_size) / left_out);
            enough = total * choice.top_p;
            if (distance < WEIGHTLESS) floor = std::max(floor, largest_ - float(distance) - 1e-3f);
        }
        counts_.assign(BUCKETS + 1, 0);
        weights_.assign(BUCKETS + 1, 0);
        for_each(floor, [&](int64_t, Floats x) {
            const Ints stays = x >= splat(floor);
            if (!any(stays)) return;
            const Ints buckets = stays ? bucket(x) : Ints{} + BUCKETS;  // a bucket of those that do not count
            for (int lane = 0; lane < LANES; ++lane) ++counts_[size_t(buckets[lane])];
            if (!weighs) return;
            const Floats weights = weight(x);
            for (int lane = 0; lane < LANES; ++lane) weights_[size_t(buckets[lane])] += int64_t(weights[lane]);
        });
        if (weighs && choice.top_k < vocab_size) enough = double(weight_of_top(floor, choice.top_k)) * choice.top_p;
        int64_t rank = 0, before = 0;  // of a bucket's first token
        for (int b = 0; b < BUCKETS; ++b) {
            const int64_t end = rank + counts_[size_t(b)], behind = before + weights_[size_t(b)];
            if (end >= choice.top_k || (end > rank && !(double(behind) < enough))) {
                sort_bucket(floor, b);
                return cut_within(choice.top_k - rank, before, enough);
            }
            rank = end;
            before = behind;
        }
        return {floor, INT32_MAX};
    }

    int64_t weight_of(float x) const { return int64_t(weight(splat(x))[0]); }

    // The sum of the weights of the first top_k tokens.
    int64_t weight_of_top(float floor, int64_t top_k) {
        int64_t total = 0, rank = 0;
        for (int b = 0; b < BUCKETS; ++b) {
            if (rank + counts_[size_t(b)] > top_k) {
                sort_bucket(floor, b);
                for (int64_t i = 0; i < top_k - rank; ++i) total += weight_of(sorted_[size_t(i)]);
                break;
            }
            rank += counts_[size_t(b)];
            total += weights_[size_t(b)];
        }
        return total;
    }

    // The sum of the weights of all from `floor` on: halves of 20 bits each, as there are no conversions to 64.
    int64_t weight_from(float floor) const {
        const Floats half = splat(0x1p20f);
        int64_t total = 0;
        for_each(std::max(floor, largest_ - WEIGHTLESS), [&](int64_t, Floats x) {
            const Floats scaled = exp_rounded(-distance(x)) * half;
            const Ints stays = x >= splat(floor), high = __builtin_convertvector(scaled, Ints) & stays;
            const Floats rest = (scaled - __builtin_convertvector(high, Floats)) * half;
            const Ints low = __builtin_convertvector(rest, Ints) & stays;
            total += (int64_t(sum_of(high)) << 20) + sum_of(low);
        });
        return total;
    }

    static int32_t sum_of(Ints x) {
        int32_t total = 0;
        for (int lane = 0; lane < LANES; ++lane) total += x[lane];
        return total;
    }

    void sort_bucket(float floor, int wanted) {
        sort_if(floor, [&](Floats x) { return (x >= splat(floor)) & (bucket(x) == wanted); });
    }

    // Keeps those values, the largest first.
    template <typename F>
    void sort_if(float floor, const F& wanted) {
        sorted_.clear();
        for_each(floor, [&](int64_t, Floats x) {
            const Ints in = wanted(x);
            if (!any(in)) return;
            for (int lane = 0; lane < LANES; ++lane)
                if (in[lane]) sorted_.push_back(x[lane]);
        });
        std::sort(sorted_.begin(), sorted_.end(), std::greater<float>());
    }

    // At most so many tokens of the sorted bucket stay, and those alone before which less than enough has come.
    Cut cut_within(int64_t most, int64_t before, double enough) const {
        most = std::min(most, int64_t(sorted_.size()));
        int64_t num_kept = 1;  // the first one follows less than enough, or it would be in no cut
        for (; num_kept < most; ++num_kept) {
            if (enough < INFINITY) before += weight_of(sorted_[size_t(num_kept - 1)]);
            if (!(double(before) < enough)) break;
        }
        const float last = sorted_[size_t(num_kept - 1)];
        const auto equals = std::equal_range(sorted_.begin(), sorted_.end(), last, std::greater<float>());
        if (equals.second - sorted_.begin() == num_kept) return {last, INT32_MAX};
        int64_t num_left = num_kept - (equals.first - sorted_.begin());  // of these equals, the first ones by id
        for (int64_t i = 0;; i += LANES) {
            const Ints equal = load(values_.data() + i) == splat(last);
            if (!any(equal)) continue;
            for (int lane = 0; lane < LANES; ++lane)
                if (equal[lane] && --num_left == 0) return {last, int32_t(i + lane)};
        }
    }

    // The token of the largest value with noise, of equals the first; a token with the largest value itself is known.
    int64_t noisiest(Cut cut, int64_t likeliest, const uint32_t (&keys)[3]) const {
        float best = -INFINITY, floor = cut.last;
        int64_t best_id = likeliest;
        const auto look = [&](int64_t i, Floats x) {
            const Ints ids = ids_from(i);
            Ints candidates = staying(x, ids, cut) & (x + splat(MOST_NOISE) >= splat(best));
            if (!any(candidates)) return;
            const Ints bits = noise_bits(ids, keys);
            candidates &= x + most_noise(bits) >= splat(best);
            if (!any(candidates)) return;
            const Floats noisy = x + gumbel(bits);
            for (int lane = 0; lane < LANES; ++lane)
                if (candidates[lane] && (noisy[lane] > best || (noisy[lane] == best && i + lane < best_id))) {
                    best = noisy[lane];
                    best_id = i + lane;
                }
            floor = std::max(cut.last, best - MOST_NOISE - 0.1f);
        };
        const int64_t first = likeliest / LANES * LANES;
        look(first, load(values_.data() + first));
        for_each(floor, look);
        return best_id;
    }

    // Of the tokens that stay, over the largest one's.
    float weight_of_all(Cut cut) const {
        Floats sums = {};
        for_each(cut.last, [&](int64_t i, Floats x) {
            const Ints stays = staying(x, ids_from(i), cut);
            if (any(stays)) sums += stays ? exp(-distance(x)) : splat(0.0f);
        });
        return sum(sums);
    }

    std::vector<float> values_;  // of a row, divided by its temperature; -inf behind them, up to whole spans
    std::vector<float> maxima_;  // of spans
    float largest_ = 0.0f;
    std::vector<int32_t> counts_;   // [BUCKETS + 1] tokens
    std::vector<int64_t> weights_;  // [BUCKETS + 1]
    std::vector<float> sorted_;
};

}  // namespace

// logits [num_rows, V] float32, row_stride elements from row to row; choices [num_rows]. Found are, of each row, the
// token, whether there is one (no logit is NaN, not all are -inf), and, if wanted, its log-softmax of those that stay;
// NaN of a row that has none, whose token is 0. Returns a Status.
extern "C" int choose(const float* logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size,
                      const Choice* choices, int wants_logprobs, int num_threads, int64_t* token_ids, uint8_t* ok,
                      float* logprobs) {
    return guarded([&] {
        Team::run(num_rows, num_threads, [&](int64_t first, int64_t last) {
            static thread_local Chooser chooser;
            for (int64_t row = first; row < last; ++row)
                chooser.choose(logits + row * row_stride, vocab_size, choices[row], wants_logprobs, token_ids + row,
                               ok + row, logprobs + row);
        });
        return int(OK);
    });
}
