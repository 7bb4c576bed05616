// Drafting without a model: what followed a sequence's newest tokens where they stood before.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

// An index of all known tokens of one sequence, which those that come are added to.
class Lookup {
public:
    virtual ~Lookup() = default;
    virtual int64_t num_tokens() const = 0;
    virtual void append(const int64_t* token_ids, int64_t count) = 0;
    // At most `count` tokens that may follow, and what is known of each, into drafts and evidence [count]; how many.
    virtual int64_t find(int64_t count, int64_t* drafts, float* evidence) const = 0;
    // What evidence says of a draft, in logits, as draft_planner.evidence_of has it.
    virtual double logit_of(float evidence) const = 0;
};

// Places in a text by the n tokens before them. A place is the index of a token, which follows these: 1 or more.
class Places {
public:
    explicit Places(int64_t n) : n(n) {}

    const int64_t n;

    // The newest place behind such tokens; 0 where there is none.
    int32_t newest(const std::vector<int64_t>& text, const int64_t* ngram) const {
        return slots_.empty() ? 0 : slots_[slot(text, ngram)];
    }

    // The newest one is now `place`. Returns the one that was.
    int32_t put(const std::vector<int64_t>& text, int64_t place) {
        if (2 * (count_ + 1) > slots_.size()) {
            std::vector<int32_t> before(std::max<size_t>(16, 2 * slots_.size()));
            before.swap(slots_);
            for (const int32_t at : before)
                if (at) slots_[slot(text, text.data() + at - n)] = at;
        }
        int32_t& at = slots_[slot(text, text.data() + place - n)];
        const int32_t before = at;
        count_ += !before;
        at = int32_t(place);
        return before;
    }

private:
    // The slot of these tokens: their own, or the empty one that would be. At most half of all are taken.
    size_t slot(const std::vector<int64_t>& text, const int64_t* ngram) const {
        uint64_t hash = 0;
        for (int64_t i = 0; i < n; ++i) {
            hash = (hash ^ uint64_t(ngram[i])) * 0x9e3779b97f4a7c15u;
            hash ^= hash >> 32;
        }
        size_t found = size_t(hash) & (slots_.size() - 1);
        while (slots_[found] && !std::equal(ngram, ngram + n, text.data() + slots_[found] - n))
            found = (found + 1) & (slots_.size() - 1);
        return found;
    }

    std::vector<int32_t> slots_;
    size_t count_ = 0;
};

}  // namespace
