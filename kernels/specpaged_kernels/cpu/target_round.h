// The target's part of a round: it runs each sequence's last known token and its drafts, and what stands is kept.
#pragma once

#include <vector>

#include "decoding.h"
#include "model_call.h"

namespace {

class TargetRound {
public:
    // `heads`, or null, read what the target runs: their sequences get those hidden states.
    TargetRound(const Model& target, const Model* heads, std::vector<Decoding>* sequences)
        : target_{target, {}, {}, {}}, heads_(heads), sequences_(*sequences) {}

    // Not where a row has no most likely token: `is_ok` is false then, and all is as it was. Returns a Status.
    int run(bool* is_ok) {
        target_.begin();
        int64_t num_rows = 0;
        for (const Decoding& s : sequences_) {
            const int64_t count = 1 + int64_t(s.drafts.size());
            target_.add(s, s.blocks, s.num_blocks, s.num_tokens() - 1, s.num_tokens() - 1, s.drafts, count, 0);
            num_rows += count;
        }
        int64_t num_passes;
        const HiddenStates hidden = heads_ ? wanted(num_rows) : HiddenStates();
        const int status =
            target_.run(sequences_.size(), num_rows, false, nullptr, &num_passes, heads_ ? &hidden : nullptr);
        if (status != OK || !(*is_ok = count_accepted())) return status;
        int64_t row = 0;
        for (size_t i = 0; i < sequences_.size(); ++i) {
            Decoding& s = sequences_[i];
            const int64_t of_sequence = 1 + int64_t(s.drafts.size());
            if (heads_) read(&s, row, num_accepted_[i] + 1, num_rows);
            s.keep(&target_.token_ids[size_t(row)], num_accepted_[i]);
            row += of_sequence;
        }
        return OK;
    }

private:
    // The hidden states of all rows, in a buffer of ours.
    HiddenStates wanted(int64_t num_rows) {
        for (int64_t row = int64_t(rows_.size()); row < num_rows; ++row) rows_.push_back(row);
        hidden_.resize(size_t(num_rows * heads_->feature_bytes()));
        void* const last = hidden_.data() + num_rows * heads_->num_layers * heads_->hidden_bytes;
        return {rows_.data(), num_rows, heads_->layers, heads_->num_layers, hidden_.data(),
                heads_->reads_last ? last : nullptr, 0};
    }

    // Of each sequence, the drafts that are the target's own tokens; false where a row that counts has none.
    bool count_accepted() {
        const auto row_is_ok = [&](int64_t row) {
            return target_.logprobs[size_t(row)] == target_.logprobs[size_t(row)];
        };
        num_accepted_.clear();
        int64_t row = 0;
        for (const Decoding& s : sequences_) {
            const int64_t count = int64_t(s.drafts.size());
            int64_t accepted = 0;
            while (accepted < count && row_is_ok(row + accepted) &&
                   target_.token_ids[size_t(row + accepted)] == s.drafts[size_t(accepted)])
                ++accepted;
            if (!row_is_ok(row + accepted)) return false;
            num_accepted_.push_back(accepted);
            row += 1 + count;
        }
        return true;
    }

    // Keeps the hidden states of the first `count` rows of a sequence, of a pass over num_rows, row by row.
    void read(Decoding* s, int64_t first, int64_t count, int64_t num_rows) const {
        const int64_t size = heads_->hidden_bytes, num_states = heads_->num_layers + heads_->reads_last;
        if (s->draft_context + int64_t(s->features.size()) / heads_->feature_bytes() < s->num_tokens() - 1)
            return;  // it lacks those before
        for (int64_t row = first; row < first + count; ++row)
            for (int64_t i = 0; i < num_states; ++i) {
                const char* const state = hidden_.data() + (i * num_rows + row) * size;
                s->features.insert(s->features.end(), state, state + size);
            }
    }

    ModelCall target_;
    const Model* const heads_;
    std::vector<Decoding>& sequences_;
    std::vector<int64_t> rows_, num_accepted_;
    std::vector<char> hidden_;
};

}  // namespace
