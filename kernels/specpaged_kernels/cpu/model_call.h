// A model on its KV, as rounds ask it for the most likely tokens: see greedy.cpp.
#pragma once

#include <vector>

#include "decoding.h"
#include "greedy.cpp"

namespace {

// greedy.cpp's last argument says which hidden states of the first pass are wanted; heads.cpp's are features.
using Greedy = int (*)(const void*, const Pass*, void* const*, const int64_t*, int64_t, int64_t, int64_t, int,
                       const StopRule*, int64_t*, float*, int64_t*, const void*);

// A model on its KV, and what decodes it.
struct Model {
    Greedy greedy;
    const void* decoder;  // or Heads
    const Pass* geometry;
    void* const* pools;
    int64_t num_ids;  // that it may find, the first ones
    // Of heads, what they read of each token that the target has run.
    int64_t reads_last, num_layers;  // its last hidden state, or those that enter `layers`
    const int64_t* layers;
    int64_t hidden_bytes;  // of one

    bool reads() const { return reads_last || num_layers; }
    int64_t feature_bytes() const { return hidden_bytes * (reads_last + num_layers); }
};

// What a model is asked, sequence by sequence, and what it finds: one call after the other.
struct ModelCall {
    const Model& model;
    std::vector<int64_t> ints, token_ids;
    std::vector<float> logprobs;

    // The next one asks nothing so far.
    void begin() { ints.clear(); }

    // A greedy.cpp's Sequence behind so much context, in blocks of the target's or the draft's: its known tokens from
    // `first` on, and others behind them.
    void add(const Decoding& s, const int64_t* blocks, int64_t num_blocks, int64_t context_len, int64_t first,
             const std::vector<int64_t>& others, int64_t num_logits, int64_t num_steps) {
        const int64_t num_tokens = s.num_tokens() - first + int64_t(others.size());
        for (const int64_t value : {num_tokens, context_len, num_logits, num_steps, num_blocks})
            ints.push_back(value);
        ints.insert(ints.end(), s.known.begin() + (first - s.start), s.known.end());
        ints.insert(ints.end(), others.begin(), others.end());
        ints.insert(ints.end(), blocks, blocks + num_blocks);
    }

    // Finds so many tokens in all, in num_done passes. Returns a Status.
    int run(size_t num_seqs, int64_t num_found, bool wants_logprobs, const StopRule* rule, int64_t* num_done,
            const void* hidden_or_features) {
        token_ids.resize(size_t(num_found));
        logprobs.resize(size_t(num_found));
        return model.greedy(model.decoder, model.geometry, model.pools, ints.data(), int64_t(ints.size()),
                            int64_t(num_seqs), model.num_ids, wants_logprobs, rule, token_ids.data(), logprobs.data(),
                            num_done, hidden_or_features);
    }
};

}  // namespace
