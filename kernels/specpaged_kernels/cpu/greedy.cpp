// Decoding by the most likely tokens, of sequences that a host describes in ints: a pass over what each has to run, and
// one more over each token that is found, as many as it asks for; all in one call. What the passes read of page tables
// is made here. Two sequences of which the first asks for two more steps, the second for none:
//
//              pass 0        pass 1    pass 2
//   A          x y -> a      a -> b    b -> c        found: a u | b | c
//   B          z   -> u

#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include "decoder.cpp"

namespace {

// What a sequence runs first, in ints one after the other: these five, its tokens, and its blocks.
struct Sequence {
    int64_t num_tokens, context_len;
    int64_t num_logits;  // of its last tokens, of which the most likely successors are wanted
    int64_t num_steps;   // more, each of the token found last
    int64_t num_blocks;
    const int64_t *token_ids, *blocks;

    int64_t num_slots() const { return context_len + num_tokens + num_steps; }
};

// What a pass reads: the ints that a RaggedBatch has as tensors.
class Tables {
public:
    // Count tokens of a sequence that has so much context; of the last ones, logits.
    void add(const Sequence& sequence, const int64_t* token_ids, int64_t count, int64_t context_len,
             int64_t num_logits) {
        sequences_.push_back(&sequence);
        token_ids_.insert(token_ids_.end(), token_ids, token_ids + count);
        for (int64_t i = 0; i < count; ++i) positions_.push_back(context_len + i);
        cu_query_lens_.push_back(int32_t(token_ids_.size()));
        context_lens_.push_back(int32_t(context_len));
        for (int64_t i = count - num_logits; i < count; ++i)
            logits_idx_.push_back(int64_t(token_ids_.size()) - count + i);
    }

    // The pass, whose tables are ours, with the geometry of another one.
    Pass pass(const Pass& geometry) {
        Pass pass = geometry;
        pass.num_seqs = int64_t(sequences_.size());
        pass.num_tokens = pass.num_rows = int64_t(token_ids_.size());
        pass.table_width = 0;
        const auto blocks_of = [&](int64_t seq) {
            const int64_t end = context_lens_[seq] + cu_query_lens_[seq + 1] - cu_query_lens_[seq];
            return (end + pass.block_size - 1) / pass.block_size;
        };
        for (int64_t seq = 0; seq < pass.num_seqs; ++seq)
            pass.table_width = std::max(pass.table_width, blocks_of(seq));
        pass.table_stride = pass.table_width;
        page_table_.assign(size_t(pass.num_seqs * pass.table_width), 0);
        slots_.clear();
        for (int64_t seq = 0; seq < pass.num_seqs; ++seq) {
            const int64_t* blocks = sequences_[seq]->blocks;
            std::copy_n(blocks, blocks_of(seq), page_table_.data() + seq * pass.table_width);
            for (int64_t row = cu_query_lens_[seq]; row < cu_query_lens_[seq + 1]; ++row)
                slots_.push_back(blocks[positions_[row] / pass.block_size] * pass.block_stride +
                                 positions_[row] % pass.block_size);
        }
        pass.slot_mapping = slots_.data();
        pass.page_table = page_table_.data();
        pass.cu_query_lens = cu_query_lens_.data();
        pass.context_lens = context_lens_.data();
        return pass;
    }

    int64_t num_logits() const { return int64_t(logits_idx_.size()); }
    const int64_t* token_ids() const { return token_ids_.data(); }
    const int64_t* positions() const { return positions_.data(); }
    // Null where all rows have logits.
    const int64_t* logits_idx() const { return logits_idx_.size() == token_ids_.size() ? nullptr : logits_idx_.data(); }

private:
    std::vector<const Sequence*> sequences_;
    std::vector<int64_t> token_ids_, positions_, slots_, logits_idx_;
    std::vector<int32_t> page_table_, cu_query_lens_ = {0}, context_lens_;
};

// The sequences that `ints` describe; a Status where one leads outside of what it names.
inline int read(const int64_t* ints, int64_t num_ints, int64_t num_seqs, int64_t num_positions, int64_t num_tokens,
                const Pass& geometry, std::vector<Sequence>* sequences) {
    constexpr int64_t HEAD = 5;
    const int64_t* const end = ints + num_ints;
    for (int64_t seq = 0; seq < num_seqs; ++seq) {
        if (end - ints < HEAD) return TOKEN_IDS;
        Sequence s = {ints[0], ints[1], ints[2], ints[3], ints[4], ints + HEAD, nullptr};
        ints += HEAD;
        if (s.num_tokens < 1 || s.num_tokens > end - ints) return TOKEN_IDS;
        ints += s.num_tokens;
        if (s.num_blocks < 0 || s.num_blocks > end - ints) return PAGE_TABLE;
        s.blocks = ints;
        ints += s.num_blocks;
        if (s.num_logits < 0 || s.num_logits > s.num_tokens || s.num_steps < 0 || (s.num_steps && !s.num_logits))
            return LOGITS_IDX;
        const int64_t most = std::min<int64_t>(num_positions, INT32_MAX - 2 * CHUNK);
        if (s.context_len < 0 || s.context_len > most) return CONTEXT_LENS;
        if (s.num_steps > most || s.num_slots() > most) return POSITIONS;
        if (s.num_slots() > s.num_blocks * geometry.block_size) return CONTEXT_LENS;
        if (!all_below(s.token_ids, s.num_tokens, num_tokens)) return TOKEN_IDS;
        for (int64_t start = 0, block = 0; start < s.num_slots(); start += geometry.block_size, ++block) {
            const int64_t number = s.blocks[block], count = std::min(geometry.block_size, s.num_slots() - start);
            if (number < 0 || number > geometry.num_slots) return PAGE_TABLE;
            if (number * geometry.block_stride + count > geometry.num_slots) return PAGE_TABLE;
        }
        sequences->push_back(s);
    }
    return ints == end ? OK : TOKEN_IDS;
}

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

// log(p / (1 - p)) of the logarithm of p, cut off at +-6; NaN of NaN.
inline double logit(double logprob) {
    if (logprob != logprob) return logprob;
    const double p = std::exp(std::min(0.0, logprob));
    if (!(p > 0.00248 && p < 0.99752)) return p < 0.5 ? -6.0 : 6.0;
    return std::log(p / (1.0 - p));
}

// No step follows that is not worth its time. Chance i: that all tokens that sequence i has found so far stand. The
// rule is for the first num_seqs sequences, and no others ask for steps. The next step is worth it while the sum over
// its sequences of max(0, chance * expected - row_tokens) is above pass_tokens. And a token that was found is worth
// verifying while its chance is not below row_tokens.
struct StopRule {
    double slope, row_tokens, pass_tokens;
    const double* intercepts;  // [num_intercepts] by step; the last one serves for all further ones
    int64_t num_intercepts;
    const double *leads, *expected;  // [num_seqs]
    int64_t num_seqs;

    // That a token stands, if all before it do, of which there is this evidence.
    double chance(int64_t seq, int64_t step, double x) const {
        const double value = slope * x + intercepts[std::min(step, num_intercepts - 1)] + leads[seq];
        return x == x ? 1.0 / (1.0 + std::exp(-value)) : 0.0;
    }
};

class Stopping {
public:
    explicit Stopping(const StopRule& rule) : rule_(rule), chances_(size_t(rule.num_seqs), 1.0) {}

    // A sequence has found a token in this step.
    void found(int64_t seq, int64_t step, float logprob) {
        chances_[size_t(seq)] *= rule_.chance(seq, step, logit(double(logprob)));
    }

    // Whether a step of these sequences is worth it.
    bool goes_on(const std::vector<int64_t>& seqs) const {
        double gain = 0.0;
        for (const int64_t seq : seqs)
            gain += std::max(0.0, chances_[size_t(seq)] * rule_.expected[seq] - rule_.row_tokens);
        return gain > rule_.pass_tokens;
    }

private:
    const StopRule& rule_;
    std::vector<double> chances_;
};

// What is found of all logits of a pass. Logprobs are NaN where a row has no most likely token, and 0 elsewhere unless
// they are wanted.
template <typename T>
void find(const T* logits, int64_t num_logits, int64_t vocab_size, int64_t num_ids, bool wants_logprobs,
          int64_t* token_ids, float* logprobs, int num_threads) {
    Team::run(num_logits, num_threads, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            const T* values = logits + row * vocab_size;
            const Largest best = largest(values, num_ids);
            token_ids[row] = best.idx;
            logprobs[row] = !best.ok         ? NAN
                            : wants_logprobs ? largest_logprob(values, num_ids, to_float(values[best.idx]))
                                             : 0.0f;
        }
    });
}

// A decoder's passes. Others have these members, too, and need not hold to one kind of pass.
template <typename T>
struct DecoderPasses {
    const Decoder& decoder;
    const Pass& geometry;
    void* const* pools;
    const HiddenStates* hidden_states;  // of the first pass, or null

    int64_t num_positions() const { return decoder.num_positions; }
    int64_t num_tokens() const { return decoder.vocab_size; }  // that may be run
    int64_t vocab_size() const { return decoder.vocab_size; }  // columns of logits
    // The pass of a step over these tables: logits [tables' own, V].
    void run(Tables& tables, int64_t step, T* logits) {
        const Pass pass = tables.pass(geometry);
        forward(decoder, pass, pools, tables.token_ids(), tables.positions(), tables.logits_idx(), tables.num_logits(),
                logits, step ? nullptr : hidden_states);
    }
    // What a token is called by whoever asked, of the first `count` that a step has found.
    void rename(int64_t*, int64_t) const {}
    // Of those who had logits, these go on.
    void keep(const std::vector<int64_t>&) {}
};

template <typename T, typename Passes>
int greedy(Passes passes, const int64_t* ints, int64_t num_ints, int64_t num_seqs, int64_t num_ids,
           bool wants_logprobs, const StopRule* rule, int64_t* token_ids, float* logprobs, int64_t* num_done) {
    const int64_t vocab_size = passes.vocab_size();
    const Pass& geometry = passes.geometry;
    if (num_ids < 1 || num_ids > vocab_size) return VOCAB_SIZE;
    std::vector<Sequence> sequences;
    const int status =
        read(ints, num_ints, num_seqs, passes.num_positions(), passes.num_tokens(), geometry, &sequences);
    if (status != OK) return status;
    std::optional<Stopping> stopping;
    if (rule) {
        if (rule->num_intercepts < 1 || rule->num_seqs > num_seqs) return STOP_RULE;
        for (int64_t seq = 0; seq < num_seqs; ++seq)
            if (seq < rule->num_seqs ? !sequences[seq].num_logits : sequences[seq].num_steps) return STOP_RULE;
        stopping.emplace(*rule);
    }

    Tables tables;
    std::vector<int64_t> seqs(size_t(num_seqs), 0), last;  // the sequences of a step, and what each has found last
    std::iota(seqs.begin(), seqs.end(), 0);
    for (const Sequence& s : sequences) tables.add(s, s.token_ids, s.num_tokens, s.context_len, s.num_logits);
    std::unique_ptr<T[]> logits;  // not a vector, which would fill megabytes with zeros
    int64_t room = 0;
    for (*num_done = 0;;) {
        const int64_t step = (*num_done)++, num_logits = tables.num_logits();
        if (num_logits > room) logits.reset(new T[size_t((room = num_logits) * vocab_size)]);
        passes.run(tables, step, logits.get());
        find(logits.get(), num_logits, vocab_size, num_ids, wants_logprobs, token_ids, logprobs,
             int(geometry.num_threads));
        passes.rename(token_ids, num_logits);
        std::vector<int64_t> going_on, rows;  // by their logits
        int64_t row = 0;
        last.clear();
        for (const int64_t seq : seqs) {
            const int64_t num_found = step ? 1 : sequences[size_t(seq)].num_logits;
            token_ids += num_found;
            logprobs += num_found;
            row += num_found;
            if (rule && seq < rule->num_seqs) stopping->found(seq, step, logprobs[-1]);
            if (sequences[size_t(seq)].num_steps > step) {
                going_on.push_back(seq);
                rows.push_back(row - 1);
                last.push_back(token_ids[-1]);
            }
        }
        seqs.swap(going_on);
        if (seqs.empty() || (rule && !stopping->goes_on(seqs))) return OK;
        passes.keep(rows);
        tables = Tables();
        for (size_t i = 0; i < seqs.size(); ++i) {
            const Sequence& s = sequences[size_t(seqs[i])];
            tables.add(s, &last[i], 1, s.context_len + s.num_tokens + step, 1);
        }
    }
}

}  // namespace

// `ints` [num_ints] are the Sequences; of `geometry` all is read but what a Tables has. Found are, step by step, the
// most likely of the first num_ids ids, and their log-softmax, as many as sequences ask for: steps of which num_done
// were made, fewer than that with a rule (or null). hidden_states (or null) are the first pass's. Returns a Status.
#undef DEFINE
#define DEFINE(SUFFIX, TYPE)                                                                                          \
    extern "C" int greedy_##SUFFIX(const Decoder* decoder, const Pass* geometry, void* const* pools,                  \
                                   const int64_t* ints, int64_t num_ints, int64_t num_seqs, int64_t num_ids,          \
                                   int wants_logprobs, const StopRule* rule, int64_t* token_ids, float* logprobs,     \
                                   int64_t* num_done, const HiddenStates* hidden_states) {                            \
        return guarded([&] {                                                                                          \
            const DecoderPasses<TYPE> passes = {*decoder, *geometry, pools, hidden_states};                           \
            return greedy<TYPE>(passes, ints, num_ints, num_seqs, num_ids, wants_logprobs, rule, token_ids, logprobs, \
                                num_done);                                                                            \
        });                                                                                                           \
    }

DEFINE(float32, float)
DEFINE(bfloat16, bfloat16)
