// Heads that draft from a target's hidden states, greedily, in one call: a pass over what the target has just run, then
// one token after the other, each behind the hidden state that the step before has left. See greedy.cpp for what a call
// asks and finds; here a row is a token, and beside it comes the hidden state of the position before that token.
//
// EAGLE-3: one layer reads the token's embedding and the features side by side; each step is a pass of it.
//
//   features -> fc -> g --+-------------- g + attention + mlp --> final norm --> logits
//                         |                        ^         \--> the next step's g
//   token -> embedding -> norm | norm of g --------+
//
// Clover: what a token's embedding gives to the hidden state, then layers; further steps have no attention.
//
//   x --> x + cos(q(x), k(e)) v(e) --> layers --> norm = h --> first  --> head norm --> logits
//   h --> h + cos(q(h), k(e)) v(e) = h' ----------> later(h', e) -------> head norm --> logits

#pragma once

#include <cmath>
#include <vector>

#include "greedy.cpp"

namespace {

// Clover's attention between a hidden state and a token's embedding.
struct ResAttention {
    const float* norm;
    Weight query, key_value;
    const void *query_bias, *key_value_bias;  // in the model's dtype
};

struct Heads {
    Decoder decoder;  // their layers, embedding and final norm, and the output layer of what they may draft
    int64_t num_embeddings;
    int64_t num_features;      // that come with a token
    int64_t is_clover;
    // EAGLE-3's
    Weight fc;
    const float *norm_before_fc, *fc_norms;  // [F], and [hidden states, their width]: or null
    int64_t feature_size;                    // of one hidden state
    const float *token_norm, *feature_norm;
    int64_t norm_before_residual, norm_output;
    const int64_t* target_ids;  // [V]: what the target calls what is drafted, or null
    // Clover's
    ResAttention regressive, recurrent;
    Weight first, later;
    const void *first_bias, *later_bias;  // in the model's dtype
    const float* head_norm;
};

template <typename T>
class HeadsPasses {
public:
    // features: [rows of the first pass, F]
    HeadsPasses(const Heads& heads, const Pass& geometry, void* const* pools, const T* features)
        : geometry(geometry), heads_(heads), pools_(pools), features_(features) {}

    const Pass& geometry;

    int64_t num_positions() const { return heads_.decoder.num_positions; }
    int64_t num_tokens() const { return heads_.num_embeddings; }
    int64_t vocab_size() const { return heads_.decoder.vocab_size; }

    void run(Tables& tables, int64_t step, T* logits) {
        if (heads_.is_clover) run_clover(tables, step, logits);
        else run_eagle3(tables, step, logits);
    }
    void rename(int64_t* token_ids, int64_t count) const {
        if (!heads_.target_ids) return;
        for (int64_t i = 0; i < count; ++i) token_ids[i] = heads_.target_ids[token_ids[i]];
    }
    void keep(const std::vector<int64_t>& rows) { hidden_ = gather(hidden_, rows, heads_.decoder.hidden_size); }

private:
    void run_eagle3(Tables& tables, int64_t step, T* logits) {
        const int64_t hidden = heads_.decoder.hidden_size;
        const Pass pass = tables.pass(geometry);
        const int64_t count = pass.num_rows;
        Entering<T> entering;
        if (step) entering.x.swap(hidden_);
        else combine(count, &entering.x);
        std::vector<T> normed(size_t(count * hidden)), tokens(normed.size());
        embed(heads_.decoder, tables.token_ids(), count, tokens.data());
        entering.normed.resize(size_t(2 * count * hidden));
        norm(entering.x.data(), hidden, heads_.feature_norm, count, hidden, normed.data());
        for (int64_t row = 0; row < count; ++row) {
            T* const both = &entering.normed[size_t(2 * row * hidden)];
            norm(&tokens[size_t(row * hidden)], hidden, heads_.token_norm, 1, hidden, both);
            std::copy_n(&normed[size_t(row * hidden)], hidden, both + hidden);
        }
        if (heads_.norm_before_residual) entering.x.swap(normed);
        pass_over(tables, pass, logits, heads_.norm_output, &entering);
    }

    // The target's hidden states, side by side, as one.
    void combine(int64_t count, std::vector<T>* to) const {
        const int64_t hidden = heads_.decoder.hidden_size, width = heads_.num_features, part = heads_.feature_size;
        std::vector<T> features(features_, features_ + count * width), normed;
        if (heads_.norm_before_fc) {
            normed.resize(features.size());
            norm(features.data(), width, heads_.norm_before_fc, count, width, normed.data());
            features.swap(normed);
        }
        if (heads_.fc_norms) {
            normed.resize(features.size());
            for (int64_t i = 0; i < count * (width / part); ++i)
                norm(&features[size_t(i * part)], part, heads_.fc_norms + i % (width / part) * part, 1, part,
                     &normed[size_t(i * part)]);
            features.swap(normed);
        }
        to->resize(size_t(count * hidden));
        linear(features.data(), width, count, heads_.fc, (const T*)nullptr, width, hidden, to->data(), threads());
    }

    void run_clover(Tables& tables, int64_t step, T* logits) {
        const int64_t hidden = heads_.decoder.hidden_size, num_logits = tables.num_logits();
        std::vector<T> read(size_t(num_logits * hidden));
        if (step) {
            std::vector<T> both(size_t(num_logits * 2 * hidden)), tokens(read.size());
            embed(heads_.decoder, tables.token_ids(), num_logits, tokens.data());
            attend_to(heads_.recurrent, tokens, num_logits, &hidden_);
            for (int64_t row = 0; row < num_logits; ++row) {
                std::copy_n(&hidden_[size_t(row * hidden)], hidden, &both[size_t(2 * row * hidden)]);
                std::copy_n(&tokens[size_t(row * hidden)], hidden, &both[size_t((2 * row + 1) * hidden)]);
            }
            linear(both.data(), 2 * hidden, num_logits, heads_.later, (const T*)heads_.later_bias, 2 * hidden, hidden,
                   read.data(), threads());
        } else {
            const Pass pass = tables.pass(geometry);
            Entering<T> entering;
            entering.x.assign(features_, features_ + pass.num_rows * hidden);
            std::vector<T> tokens(entering.x.size());
            embed(heads_.decoder, tables.token_ids(), pass.num_rows, tokens.data());
            attend_to(heads_.regressive, tokens, pass.num_rows, &entering.x);
            pass_over(tables, pass, nullptr, true, &entering);
            linear(hidden_.data(), hidden, num_logits, heads_.first, (const T*)heads_.first_bias, hidden, hidden,
                   read.data(), threads());
        }
        std::vector<T> normed(read.size());
        norm(read.data(), hidden, heads_.head_norm, num_logits, hidden, normed.data());
        linear(normed.data(), hidden, num_logits, heads_.decoder.output, (const T*)nullptr, hidden, vocab_size(),
               logits, threads());
    }

    // Leaves the hidden states of the rows that have logits, which are made where somebody wants them.
    void pass_over(Tables& tables, const Pass& pass, T* logits, bool is_normed, Entering<T>* entering) {
        const int64_t num_logits = tables.num_logits();
        std::vector<int64_t> rows(size_t(num_logits), 0);
        if (tables.logits_idx()) std::copy_n(tables.logits_idx(), num_logits, rows.data());
        else std::iota(rows.begin(), rows.end(), 0);
        hidden_.assign(size_t(num_logits * heads_.decoder.hidden_size), T{});
        // A vector of no rows has no address, and rows that are not asked for are none at all.
        const HiddenStates last = {rows.data(), num_logits, nullptr, 0, nullptr, hidden_.data(), is_normed};
        const bool wants_logits = logits || !num_logits;
        const int64_t none = 0;
        forward(heads_.decoder, pass, pools_, tables.token_ids(), tables.positions(),
                wants_logits ? tables.logits_idx() : &none, wants_logits ? num_logits : 0, logits,
                num_logits ? &last : nullptr, entering);
    }

    void attend_to(const ResAttention& attention, const std::vector<T>& tokens, int64_t count, std::vector<T>* x) const {
        const int64_t hidden = heads_.decoder.hidden_size, num_heads = heads_.decoder.num_heads;
        const int64_t width = hidden / num_heads;
        std::vector<T> normed(x->size()), query(x->size()), key_value(2 * x->size());
        norm(x->data(), hidden, attention.norm, count, hidden, normed.data());
        linear(normed.data(), hidden, count, attention.query, (const T*)attention.query_bias, hidden, hidden,
               query.data(), threads());
        linear(tokens.data(), hidden, count, attention.key_value, (const T*)attention.key_value_bias, hidden,
               2 * hidden, key_value.data(), threads());
        for (int64_t i = 0; i < count * num_heads; ++i) {
            const int64_t row = i / num_heads, head = i % num_heads;
            const T* const q = &query[size_t(row * hidden + head * width)];
            const T* const k = &key_value[size_t(2 * row * hidden + head * width)];
            const T* const v = k + hidden;
            float of_both = 0.0f, of_query = 0.0f, of_key = 0.0f;
            for (int64_t j = 0; j < width; ++j) {
                const float a = to_float(q[j]), b = to_float(k[j]);
                of_both += a * b;
                of_query += a * a;
                of_key += b * b;
            }
            const float eps = heads_.decoder.eps;
            const float cosine = of_both / (std::max(std::sqrt(of_query), eps) * std::max(std::sqrt(of_key), eps));
            T* const values = x->data() + row * hidden + head * width;
            for (int64_t j = 0; j < width; ++j) from_float(to_float(values[j]) + cosine * to_float(v[j]), values + j);
        }
    }

    void norm(const T* x, int64_t stride, const float* weight, int64_t count, int64_t size, T* to) const {
        rms_norm(const_cast<T*>(x), stride, (const T*)nullptr, 1.0f, weight, heads_.decoder.eps, count, size, to);
    }
    int threads() const { return int(geometry.num_threads); }

    const Heads& heads_;
    void* const* pools_;
    const T* features_;
    std::vector<T> hidden_;  // of the rows that had logits in the step before
};

}  // namespace

// As greedy.cpp's, with `features` [rows of the first pass, F] in the model's dtype. Returns a Status.
#undef DEFINE
#define DEFINE(SUFFIX, TYPE)                                                                                          \
    extern "C" int heads_##SUFFIX(const Heads* heads, const Pass* geometry, void* const* pools, const int64_t* ints,  \
                                  int64_t num_ints, int64_t num_seqs, int64_t num_ids, int wants_logprobs,            \
                                  const StopRule* rule, int64_t* token_ids, float* logprobs, int64_t* num_done,       \
                                  const void* features) {                                                             \
        return guarded([&] {                                                                                          \
            const HeadsPasses<TYPE> passes(*heads, *geometry, pools, (const TYPE*)features);                          \
            return greedy<TYPE>(passes, ints, num_ints, num_seqs, num_ids, wants_logprobs, rule, token_ids, logprobs, \
                                num_done);                                                                            \
        });                                                                                                           \
    }

DEFINE(float32, float)
DEFINE(bfloat16, bfloat16)
