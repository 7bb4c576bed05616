// Chooses a token of each row of logits, in one call: temperature, min-p, top-k, top-p, noise, and the largest.
//
// Operations and their order are those of specpaged.sampling, which rounds each of them, so that tokens are the same,
// bit for bit. Left out is what cannot matter:
//
//     top-k, top-p   only values near to the last one that stays are sorted (see cut.h)
//     noise          has a bound that needs no logarithm (see gumbel.h), and none is made of what stays below the best so
//                    far even with that; spans that lie far below the best have no noise at all

#pragma once

#include "cut.h"
#include "gumbel.h"
#include "logits_row.h"
#include "status.h"
#include "team.h"

namespace {

struct Choice {         // how a row's token is chosen; the struct of the same name in sampling.py
    float temperature;  // 0 and 1: none
    float log_min_p;    // -inf: none
    int64_t top_k;      // 1 .. V
    double top_p;       // above 0; 1: none
    uint32_t keys[3];   // of the noise
    uint32_t has_noise;
};

// One row after the other, in memory that is kept.
class Chooser {
public:
    void choose(const float* logits, int64_t vocab_size, const Choice& choice, bool wants_logprob, int64_t* token_id,
                uint8_t* ok, float* logprob) {
        const int64_t likeliest = row_.read(logits, vocab_size, choice.temperature);
        *token_id = std::max<int64_t>(0, likeliest);
        *ok = likeliest >= 0;
        *logprob = *ok ? 0.0f : NAN;
        if (!*ok || !(choice.has_noise || wants_logprob)) return;
        const float floor = std::max(-FLT_MAX, row_.largest + choice.log_min_p);
        const Cut cut = finder_.find(row_, vocab_size, floor, choice.top_k, choice.top_p);
        if (choice.has_noise && !row_.is_infinite) *token_id = noisiest(cut, likeliest, choice.keys);
        if (!wants_logprob) return;
        const double weight = cut.weight ? double(cut.weight) * 0x1p-40 : weight_of_all(cut);
        *logprob = (row_[*token_id] - row_.largest) - float(std::log(weight));
    }

private:
    static Ints staying(Floats x, Ints ids, Cut cut) {
        return (x > splat(cut.last)) | ((x == splat(cut.last)) & (ids <= cut.last_id));
    }

    // The token of the largest value with noise, of equals the first; a token with the largest value itself is known.
    int64_t noisiest(Cut cut, int64_t likeliest, const uint32_t (&keys)[3]) const {
        float best = -INFINITY, floor = cut.last;
        int64_t best_id = likeliest;
        const auto look = [&](int64_t i, Floats x) {
            const Ints ids = ids_from(i), bits = noise_bits(ids, keys);
            Ints candidates = (x >= splat(floor)) & (x + most_noise(bits) >= splat(best));
            if (!any(candidates)) return;
            candidates &= staying(x, ids, cut);
            const Floats noisy = x + gumbel(bits);
            for (int lane = 0; lane < LANES; ++lane)
                if (candidates[lane] && (noisy[lane] > best || (noisy[lane] == best && i + lane < best_id))) {
                    best = noisy[lane];
                    best_id = i + lane;
                }
            // And a little less, as sums are rounded.
            floor = std::max(cut.last, best - MOST_NOISE - 0.1f - std::fabs(best) * 0x1p-22f);
        };
        const int64_t first = likeliest / LANES * LANES;
        look(first, load(row_.values() + first));
        row_.for_each(floor, look);
        return best_id;
    }

    // Of the tokens that stay, over the largest one's.
    float weight_of_all(Cut cut) const {
        Floats sums = {};
        row_.for_each(cut.last, [&](int64_t i, Floats x) {
            const Ints stays = staying(x, ids_from(i), cut);
            if (any(stays)) sums += stays ? exp(x - splat(row_.largest)) : splat(0.0f);
        });
        return sum(sums);
    }

    LogitsRow row_;
    CutFinder finder_;
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
            static thread_local Chooser of_thread;
            Chooser* chooser = &of_thread;
            __asm__("" : "+r"(chooser));  // a plain address: GCC would ask for that of the thread in each inner loop
            for (int64_t row = first; row < last; ++row)
                chooser->choose(logits + row * row_stride, vocab_size, choices[row], wants_logprobs, token_ids + row,
                                ok + row, logprobs + row);
        });
        return int(OK);
    });
}
