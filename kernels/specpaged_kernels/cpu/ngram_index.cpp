// Prompt lookup: what followed the last n tokens of a text the last time that they stood there, n being the largest of
// shortest .. longest for which there is any. See drafting/ngram.py. A text of any length costs the same: of each n-gram
// that has a successor, the newest place is known, and a token that is appended makes these for those before it.
//
//     a b c d a b  <- c        n = 2:   a b at 2, b c at 3, c d at 4, d a at 5; and now a b at 6
//         2

#pragma once

#include "lookup.h"
#include "status.h"

namespace {

class NgramIndex : public Lookup {
public:
    NgramIndex(int64_t shortest, int64_t longest) {
        for (int64_t n = std::max<int64_t>(1, shortest); n <= longest; ++n) places_.emplace_back(n);
    }

    int64_t num_tokens() const override { return int64_t(tokens_.size()); }

    void append(const int64_t* token_ids, int64_t count) override {
        for (int64_t i = 0; i < count; ++i) {
            const int64_t end = num_tokens();
            tokens_.push_back(token_ids[i]);
            for (Places& places : places_)
                if (places.n <= end) places.put(tokens_, end);
        }
    }

    // All of them, or none. What reaches up to the end goes on with what it has found. The evidence is n.
    int64_t find(int64_t count, int64_t* drafts, float* evidence) const override {
        const int64_t end = num_tokens();
        for (size_t i = places_.size(); i-- > 0;) {
            const Places& places = places_[i];
            if (places.n >= end) continue;
            const int64_t start = places.newest(tokens_, tokens_.data() + end - places.n);
            if (!start) continue;
            for (int64_t j = 0; j < count; ++j) drafts[j] = tokens_[size_t(start + j % (end - start))];
            std::fill(evidence, evidence + count, float(places.n));
            return count;
        }
        return 0;
    }

    double logit_of(float evidence) const override { return std::min(double(evidence), 6.0) - 3.0; }

private:
    std::vector<int64_t> tokens_;
    std::vector<Places> places_;
};

}  // namespace

// Null where there is no memory.
extern "C" void* ngram_index_new(int64_t shortest, int64_t longest) {
    void* index = nullptr;
    guarded([&] {
        index = static_cast<Lookup*>(new NgramIndex(shortest, longest));
        return int(OK);
    });
    return index;
}
