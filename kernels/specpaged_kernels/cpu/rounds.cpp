// Rounds of sequences that decode by the most likely tokens: several in one call, between two decisions of the host,
// which describes the sequences in ints. A round runs the target over each one's last known token and its drafts, and
// keeps the drafts that are the target's own tokens, with the token that follows them. In front of every round but the
// first, whose drafts the host brings, a draft model drafts for those that want drafts, or a lookup in their own tokens,
// or heads that read the target: these run each token that stands, with the target's hidden state before it, whether or
// not its sequence wants drafts; and the host gets the hidden states that they have not read.
// Lookups may be asked first, and what they have found be taken where it promises enough: see Choices.
// With a rule, those that are not worth verifying are left out; of the first one of these it is told what it was, as
// whether it would have stood is known where all before it do.
// Two sequences, of which the first wants two:
//
//              known   drafts    the target finds    it keeps
//   round 0    x       a b       a c ?               a c
//              y                 z                   z
//   round 1    c       d e       d e f               d e f
//              z                 w                   w

#pragma once

#include <chrono>

#include "greedy.cpp"
#include "lookup.h"

namespace {

// See greedy.cpp, whose last argument says which hidden states of the first pass are wanted; heads.cpp's are features.
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

// Lookups that draft in place of a model, or beside each other. A draft promises the sum over its tokens of chance -
// row_tokens, as long as a token's chance, that it stands and all before it, is not below row_tokens, by its lookup's own
// rule. The one that promises most, the first of equals, is taken up to there, if that is more than `least`.
struct Choices {
    int64_t num_lookups;
    const StopRule* rules;       // [num_lookups]
    const int64_t *rows, *most;  // [num_seqs]: the sequence's row in each rule, and the tokens that may be found
    const double* least;         // [num_seqs]
    Lookup* const* indexes;      // [num_seqs, num_lookups], as Decoding has one; null where none may be found
};

// In ints one after the other: these eleven, its last known tokens, its drafts, its stop ids, its blocks, and the draft
// model's.
struct Decoding {
    int64_t num_known;      // of the tokens that come along, those from `start` on, which some model has not run
    int64_t start;          // the position of the first one; the target has run all of them but the last
    int64_t draft_context;  // tokens that the draft model has run, drafts among them; `start` at least
    int64_t num_drafts;     // that wait for the first round
    int64_t num_wanted;     // drafts, for each further round
    int64_t most;           // tokens that may come, 1 at least: slots reach up to the last but one
    int64_t num_stop_ids, num_blocks;
    Lookup* index;  // its address: of all known tokens, to which those that come are added; it drafts if no model does
    int64_t num_draft_blocks;  // 0: the draft model's KV lies in the same blocks as the target's
    int64_t num_skipped;      // tokens before draft_context that the draft model does not read, in the places of which
                               // it has those behind them

    std::vector<int64_t> known, drafts;
    std::vector<char> features;   // of heads: of the tokens that the target has run, and they have not
    std::vector<float> evidence;  // of each draft, if they were made here, and of the one that was left out
    std::vector<int64_t> left_out;  // the first draft that was, if any
    const int64_t *stop_ids, *blocks, *draft_blocks;
    int64_t num_drafted = 0;  // of which the drafts are what is left
    int64_t rule_row = -1;    // its own in the rule, if it has one
    bool has_ended = false;  // no more may come, or a stop id has
    // With Choices: of the sequence; and of its drafts whose they are, 1 and more for a lookup, and how many are worth it.
    Lookup* const* indexes = nullptr;
    int64_t choice_row = 0, most_found = 0, drafter = 0, num_taken = 0;
    double least = 0.0;

    // Of each round so far: drafts that were made for it, those that it had, whether one more was left out, tokens that
    // it got. And all these drafts, with those that were left out.
    std::vector<int64_t> made, had, missed, got, whose, told;
    std::vector<float> evidence_of_told;

    int64_t num_tokens() const { return start + int64_t(known.size()); }
    int64_t num_new() const { return int64_t(known.size()) - num_known; }
};

inline int read_decoding(const int64_t* ints, int64_t num_ints, int64_t num_seqs, std::vector<Decoding>* sequences) {
    constexpr int64_t HEAD = 11;
    const int64_t* const end = ints + num_ints;
    for (int64_t seq = 0; seq < num_seqs; ++seq) {
        if (end - ints < HEAD) return TOKEN_IDS;
        Decoding s = {ints[0], ints[1], ints[2], ints[3], ints[4], ints[5], ints[6], ints[7],
                      (Lookup*)ints[8], ints[9], ints[10], {}, {}, {}, {}, {}, {}, {}, {}};
        ints += HEAD;
        if (s.num_known < 1 || s.num_known > end - ints) return TOKEN_IDS;
        s.known.assign(ints, ints + s.num_known);
        ints += s.num_known;
        if (s.start < 0 || s.start > INT32_MAX) return POSITIONS;
        if (s.num_drafts < 0 || s.num_drafts > end - ints) return TOKEN_IDS;
        s.drafts.assign(ints, ints + s.num_drafts);
        ints += s.num_drafts;
        if (s.draft_context < s.start || s.draft_context > s.num_tokens() + s.num_drafts) return CONTEXT_LENS;
        if (s.num_wanted < 0 || s.num_wanted > INT32_MAX || s.most < 1 || s.num_drafts >= s.most) return CONTEXT_LENS;
        if (s.num_stop_ids < 0 || s.num_stop_ids > end - ints) return TOKEN_IDS;
        s.stop_ids = ints;
        ints += s.num_stop_ids;
        if (s.num_blocks < 0 || s.num_blocks > end - ints) return PAGE_TABLE;
        s.blocks = ints;
        ints += s.num_blocks;
        if (s.num_draft_blocks < 0 || s.num_draft_blocks > end - ints) return PAGE_TABLE;
        s.draft_blocks = s.num_draft_blocks ? ints : s.blocks;
        ints += s.num_draft_blocks;
        if (!s.num_draft_blocks) s.num_draft_blocks = s.num_blocks;
        if (s.num_skipped < 0 || s.num_skipped > s.draft_context) return CONTEXT_LENS;
        sequences->push_back(std::move(s));
    }
    return ints == end ? OK : TOKEN_IDS;
}

class Rounds {
public:
    Rounds(const Model& target, const Model* draft, const StopRule* rule, const Choices* choices,
           std::vector<Decoding>* sequences)
        : target_(target), draft_(draft), rule_(rule), choices_(choices), sequences_(*sequences) {
        for (size_t i = 0; choices && i < sequences_.size(); ++i) {
            Decoding& s = sequences_[i];
            s.choice_row = choices->rows[i];
            s.most_found = choices->most[i];
            s.least = choices->least[i];
            s.indexes = choices->indexes + i * size_t(choices->num_lookups);
        }
        // The rule's rows are those of all who want drafts; else it was made for others.
        int64_t num_wanting = 0;
        for (const Decoding& s : sequences_) num_wanting += s.num_wanted > 0;
        if (rule_ && (rule_->num_seqs != num_wanting || rule_->num_intercepts < 1)) rule_ = nullptr;
        int64_t row = 0;
        for (Decoding& s : sequences_)
            if (rule_ && s.num_wanted > 0) s.rule_row = row++;
    }

    // Runs the target, and keeps what stands; not where a row has no most likely token: `is_ok` is false then, and all
    // is as it was.
    int verify(bool* is_ok) {
        ints_.clear();
        int64_t num_rows = 0;
        for (const Decoding& s : sequences_) {
            const int64_t count = 1 + int64_t(s.drafts.size());
            describe(s, s.num_tokens() - 1, 0, count, count, 0, s.num_blocks);
            ints_.insert(ints_.end(), s.drafts.begin(), s.drafts.end());
            ints_.insert(ints_.end(), s.blocks, s.blocks + s.num_blocks);
            num_rows += count;
        }
        int64_t num_passes;
        HiddenStates hidden = {};
        const bool reads = draft_ && draft_->reads();
        if (reads) {
            for (int64_t row = int64_t(rows_.size()); row < num_rows; ++row) rows_.push_back(row);
            hidden_.resize(size_t(num_rows * draft_->feature_bytes()));
            void* const buffer = hidden_.data();
            hidden = {rows_.data(), num_rows, draft_->layers, draft_->num_layers, buffer, nullptr, 0};
            if (draft_->reads_last) hidden.last = hidden_.data() + num_rows * draft_->num_layers * draft_->hidden_bytes;
        }
        const int status =
            run(target_, sequences_.size(), num_rows, false, nullptr, &num_passes, reads ? &hidden : nullptr);
        if (status != OK) return status;
        std::vector<int64_t> num_kept;
        const auto row_is_ok = [&](int64_t row) { return logprobs_[size_t(row)] == logprobs_[size_t(row)]; };
        int64_t row = 0;
        for (const Decoding& s : sequences_) {
            const int64_t count = int64_t(s.drafts.size());
            int64_t kept = 0;
            while (kept < count && row_is_ok(row + kept) && token_ids_[size_t(row + kept)] == s.drafts[size_t(kept)])
                ++kept;
            if (!(*is_ok = row_is_ok(row + kept))) return OK;
            num_kept.push_back(kept);
            row += 1 + count;
        }
        row = 0;
        for (size_t i = 0; i < sequences_.size(); ++i) {
            const int64_t of_sequence = 1 + int64_t(sequences_[i].drafts.size());
            if (reads) read(&sequences_[i], row, num_kept[i] + 1, num_rows);
            keep(&sequences_[i], &token_ids_[size_t(row)], num_kept[i]);
            row += of_sequence;
        }
        return OK;
    }

    // Drafts as many as are wanted, but none that could not come, and leaves out what is not worth verifying.
    int draft() {
        const int status = make_drafts();
        for (Decoding& s : sequences_) {
            s.num_drafted = int64_t(s.drafts.size());
            if (s.rule_row < 0 && !s.drafter) continue;
            const size_t count = s.drafter ? size_t(s.num_taken) : num_worth(s);
            if (count < s.drafts.size()) s.left_out.push_back(s.drafts[count]);
            s.drafts.resize(count);
            s.evidence.resize(count + s.left_out.size());
        }
        return status;
    }

    bool has_one_ended() const {
        return std::any_of(sequences_.begin(), sequences_.end(), [](const Decoding& s) { return s.has_ended; });
    }
    bool wants_drafts_of_nobody() const {
        return std::any_of(sequences_.begin(), sequences_.end(),
                           [](const Decoding& s) { return s.num_wanted > 0 && !s.index; });
    }
    // Whether each sequence's choice is one of what is there.
    bool choices_lead_outside() const {
        if (!choices_) return false;
        for (const Decoding& s : sequences_)
            for (int64_t i = 0; s.most_found > 0 && i < choices_->num_lookups; ++i) {
                const StopRule& rule = choices_->rules[i];
                if (!s.indexes[i] || rule.num_intercepts < 1) return true;
                if (s.choice_row < 0 || s.choice_row >= rule.num_seqs) return true;
            }
        return false;
    }
    // Where the host is not to draft, as all that want drafts have some, or nobody does, heads read all that the target
    // has run; else what they have not read is the host's.
    void follow(bool drafts_wait) {
        std::vector<Decoding*> all;
        for (Decoding& s : sequences_) {
            if (!drafts_wait && s.num_wanted > 0 && !s.has_ended) return;
            if (!s.features.empty()) all.push_back(&s);
        }
        int64_t num_steps;
        if (!all.empty()) run_heads(all, [](const Decoding*) { return int64_t(0); }, {}, &num_steps);
    }
    // Drafts for the round that would be next, of those who go on. Where that fails, there are none.
    int draft_ahead() {
        for (Decoding& s : sequences_)
            if (s.has_ended) s.num_wanted = s.most_found = 0;
        return draft();
    }
    // Behind the last round: drafts wait, or there are none.
    void leave(bool drafts_wait) {
        for (Decoding& s : sequences_) {
            if (!drafts_wait) drop_drafts(&s);
            s.evidence.resize(s.drafts.size());
            s.draft_context = std::min(s.draft_context, s.num_tokens() - 1 + int64_t(s.drafts.size()));
        }
    }

private:
    int make_drafts() {
        if (choices_) look_up();
        const auto num_useful = [](const Decoding& s) { return s.drafter ? 0 : std::min(s.num_wanted, s.most - 1); };
        if (!draft_) {
            for (Decoding& s : sequences_) {
                if (num_useful(s) < 1) continue;
                s.drafts.resize(size_t(num_useful(s)));
                s.evidence.resize(s.drafts.size());
                s.drafts.resize(size_t(s.index->find(num_useful(s), s.drafts.data(), s.evidence.data())));
                s.evidence.resize(s.drafts.size());
            }
            return OK;
        }
        if (draft_->reads()) return make_drafts_of_heads();
        std::vector<Decoding*> drafting;
        ints_.clear();
        int64_t num_found = 0, num_steps = 0;  // which may be fewer than are useful
        for (Decoding& s : sequences_) {
            const int64_t count = num_useful(s);
            if (count < 1) continue;
            drafting.push_back(&s);
            describe(s, s.draft_context, s.num_skipped, s.num_tokens() - s.draft_context, 1, count - 1,
                     s.num_draft_blocks);
            ints_.insert(ints_.end(), s.draft_blocks, s.draft_blocks + s.num_draft_blocks);
            num_found += count;
        }
        if (drafting.empty()) return OK;
        const int status = run_draft(drafting, drafting.size(), num_found, &num_steps, nullptr);
        if (status != OK) return status;
        for (auto* s : drafting) s->draft_context = s->num_tokens() + std::min(num_steps, num_useful(*s)) - 1;
        take(drafting, num_steps);
        return OK;
    }

    // Gives each sequence the draft of the lookup that promises most, if that is enough.
    void look_up() {
        std::vector<int64_t> found;
        std::vector<float> evidence;
        for (Decoding& s : sequences_) {
            const int64_t room = std::min(s.most_found, s.most - 1);
            double most = s.least;
            for (int64_t i = 0; room > 0 && i < choices_->num_lookups; ++i) {
                found.resize(size_t(room));
                evidence.resize(size_t(room));
                const int64_t count = s.indexes[i]->find(room, found.data(), evidence.data());
                const StopRule& rule = choices_->rules[i];
                double chance = 1.0, promised = 0.0;
                int64_t worth = 0;
                for (; worth < count; ++worth) {
                    chance *= rule.chance(s.choice_row, worth, s.indexes[i]->logit_of(evidence[size_t(worth)]));
                    if (!(chance >= rule.row_tokens)) break;
                    promised += chance - rule.row_tokens;
                }
                if (!worth || !(promised > most)) continue;
                most = promised;
                s.drafter = 1 + i;
                s.num_taken = worth;
                s.drafts.assign(found.begin(), found.begin() + count);
                s.evidence.assign(evidence.begin(), evidence.begin() + count);
            }
        }
    }

    // Nothing of drafts stays in their KV: a step behind the first one reads what the one before has left.
    int make_drafts_of_heads() {
        const auto num_useful = [](const Decoding* s) {
            return s->features.empty() || s->drafter ? 0 : std::max<int64_t>(0, std::min(s->num_wanted, s->most - 1));
        };
        std::vector<Decoding*> all;
        for (Decoding& s : sequences_)
            if (!s.features.empty()) all.push_back(&s);
        const auto middle = std::stable_partition(all.begin(), all.end(), num_useful);
        if (middle == all.begin()) return OK;  // others wait, too: their hidden states are kept
        int64_t num_steps = 0;
        const std::vector<Decoding*> drafting(all.begin(), middle);
        const int status = run_heads(all, num_useful, drafting, &num_steps);
        if (status == OK) take(drafting, num_steps);
        return status;
    }

    template <typename NumUseful>
    int run_heads(const std::vector<Decoding*>& all, const NumUseful& num_useful,
                  const std::vector<Decoding*>& drafting, int64_t* num_steps) {
        ints_.clear();
        features_.clear();
        int64_t num_found = 0;
        for (const Decoding* s : all) {
            const int64_t num_rows = s->num_tokens() - 1 - s->draft_context, count = num_useful(s);
            for (const int64_t value : {num_rows, s->draft_context, int64_t(count > 0), std::max<int64_t>(0, count - 1)})
                ints_.push_back(value);
            ints_.push_back(s->num_blocks);
            ints_.insert(ints_.end(), s->known.end() - num_rows, s->known.end());
            ints_.insert(ints_.end(), s->blocks, s->blocks + s->num_blocks);
            features_.insert(features_.end(), s->features.begin(), s->features.end());
            num_found += count;
        }
        const int status = run_draft(drafting, all.size(), num_found, num_steps, features_.data());
        if (status != OK) return status;
        for (Decoding* s : all) {
            s->draft_context = s->num_tokens() - 1;
            s->features.clear();
        }
        return OK;
    }

    // Runs what ints_ describe, by the rule if there is one; of those who draft, the first ones, some may have ended.
    int run_draft(const std::vector<Decoding*>& drafting, size_t num_seqs, int64_t num_found, int64_t* num_steps,
                  const void* features) {
        std::vector<double> leads, expected;
        StopRule rule = {};
        if (rule_) {
            for (const auto* s : drafting) {
                leads.push_back(rule_->leads[s->rule_row]);
                expected.push_back(rule_->expected[s->rule_row]);
            }
            rule = *rule_;
            rule.leads = leads.data();
            rule.expected = expected.data();
            rule.num_seqs = int64_t(drafting.size());
        }
        const bool has_rule = rule_ && !drafting.empty();
        return run(*draft_, num_seqs, num_found, true, has_rule ? &rule : nullptr, num_steps, features);
    }

    // The drafts that the steps have found.
    void take(const std::vector<Decoding*>& drafting, int64_t num_steps) {
        std::vector<int64_t> counts;
        for (const auto* s : drafting) counts.push_back(std::min(s->num_wanted, s->most - 1));
        size_t next = 0;
        for (int64_t step = 0; step < num_steps; ++step)
            for (size_t i = 0; i < drafting.size(); ++i)
                if (step < counts[i]) {
                    drafting[i]->drafts.push_back(token_ids_[next]);
                    drafting[i]->evidence.push_back(logprobs_[next++]);
                }
    }

    // Keeps the hidden states of the first `count` rows of a sequence, of a pass over num_rows, row by row.
    void read(Decoding* s, int64_t first, int64_t count, int64_t num_rows) const {
        const int64_t size = draft_->hidden_bytes, num_states = draft_->num_layers + draft_->reads_last;
        if (s->draft_context + int64_t(s->features.size()) / draft_->feature_bytes() < s->num_tokens() - 1)
            return;  // it lacks those before
        for (int64_t row = first; row < first + count; ++row)
            for (int64_t i = 0; i < num_states; ++i) {
                const char* const state = hidden_.data() + (i * num_rows + row) * size;
                s->features.insert(s->features.end(), state, state + size);
            }
    }

    // How many of its drafts are. What a match of n tokens says is told as draft_planner.evidence_of has it.
    size_t num_worth(const Decoding& s) const {
        double chance = 1.0;
        for (size_t i = 0; i < s.drafts.size(); ++i) {
            const double x = s.index ? s.index->logit_of(s.evidence[i]) : logit(double(s.evidence[i]));
            chance *= rule_->chance(s.rule_row, int64_t(i), x);
            if (!(chance >= rule_->row_tokens)) return i;
        }
        return s.drafts.size();
    }

    // Appends what was found: the drafts that stand, and the token behind them.
    void keep(Decoding* s, const int64_t* found_ids, int64_t num_accepted) const {
        const int64_t count = num_accepted + 1, num_lookups = choices_ ? choices_->num_lookups : 0;
        s->made.push_back(s->num_drafted);
        s->had.push_back(int64_t(s->drafts.size()));
        s->got.push_back(count);
        s->missed.push_back(int64_t(s->left_out.size()));
        s->whose.push_back(s->drafter);
        s->told.insert(s->told.end(), s->drafts.begin(), s->drafts.end());
        s->told.insert(s->told.end(), s->left_out.begin(), s->left_out.end());
        s->evidence.resize(s->drafts.size() + s->left_out.size());  // the host keeps that of its own drafts
        s->evidence_of_told.insert(s->evidence_of_told.end(), s->evidence.begin(), s->evidence.end());
        drop_drafts(s);
        if (s->index) s->index->append(found_ids, count);
        for (int64_t i = 0; s->most_found > 0 && i < num_lookups; ++i) s->indexes[i]->append(found_ids, count);
        for (int64_t i = 0; i < count; ++i) {
            s->known.push_back(found_ids[i]);
            s->has_ended |= std::count(s->stop_ids, s->stop_ids + s->num_stop_ids, found_ids[i]) > 0;
        }
        s->draft_context = std::min(s->draft_context, s->num_tokens() - 1);
        s->most -= count;
        s->has_ended |= s->most < 1;
    }

    static void drop_drafts(Decoding* s) {
        s->drafts.clear();
        s->evidence.clear();
        s->left_out.clear();
        s->num_drafted = s->drafter = 0;
    }

    // The head of a greedy.cpp's Sequence, and those of its tokens that are known, from position `start` on, which is
    // `num_skipped` less to the model.
    void describe(const Decoding& s, int64_t start, int64_t num_skipped, int64_t num_tokens, int64_t num_logits,
                  int64_t num_steps, int64_t num_blocks) {
        for (const int64_t value : {num_tokens, start - num_skipped, num_logits, num_steps, num_blocks})
            ints_.push_back(value);
        ints_.insert(ints_.end(), s.known.begin() + (start - s.start), s.known.end());
    }

    int run(const Model& model, size_t num_seqs, int64_t num_found, bool wants_logprobs, const StopRule* rule,
            int64_t* num_done, const void* hidden_or_features) {
        token_ids_.resize(size_t(num_found));
        logprobs_.resize(size_t(num_found));
        return model.greedy(model.decoder, model.geometry, model.pools, ints_.data(), int64_t(ints_.size()),
                            int64_t(num_seqs), model.num_ids, wants_logprobs, rule, token_ids_.data(),
                            logprobs_.data(), num_done, hidden_or_features);
    }

    const Model& target_;
    const Model* draft_;
    const StopRule* rule_;
    const Choices* const choices_;
    std::vector<Decoding>& sequences_;
    std::vector<int64_t> ints_, token_ids_, rows_;
    std::vector<char> hidden_, features_;
    std::vector<float> logprobs_;
};

// What rounds come to, in ints one after the other:
//
//   [1]                   whether drafts for the next round were made, and wait
//   [sequences]           tokens that came
//   [sequences]           tokens that the draft model has run
//   [sequences]           drafts that wait
//   [sequences]           tokens that the target has run and heads have not, of which hidden states come along
//   [sequences]           whose the drafts are that wait: 0 the model's, 1 and more a lookup's, with Choices
//   [rounds + 1]          drafts that were made in front of each, and behind the last one, for all sequences together
//   [sequences, rounds]   drafts that a round had
//   [sequences, rounds]   whether one more was left out
//   [sequences, rounds]   tokens that it got
//   [sequences, rounds]   whose the drafts were, if they were made here
//   [...]                 of each sequence the tokens that came, then of each the drafts that its rounds had, round by
//                         round with the one that was left out, then of each those that wait
//
// and of all these drafts what was known, in floats: the log-softmax, or how long the match was.
class Found {
public:
    Found(int64_t* ints, float* floats, int64_t room) : first_(ints), ints_(ints), floats_(floats), room_(room) {}

    // Returns a Status.
    int write(const std::vector<Decoding>& sequences, int64_t num_rounds, bool drafts_wait, int64_t feature_bytes,
              char* features, int64_t* num_written) {
        add(drafts_wait);
        for (const Decoding& s : sequences) add(s.num_new());
        for (const Decoding& s : sequences) add(s.draft_context);
        for (const Decoding& s : sequences) add(int64_t(s.drafts.size()));
        for (const Decoding& s : sequences) {
            add(feature_bytes ? int64_t(s.features.size()) / feature_bytes : 0);
            features = std::copy(s.features.begin(), s.features.end(), features);
        }
        for (const Decoding& s : sequences) add(s.drafter);
        for (size_t i = 0; i < size_t(num_rounds); ++i) {
            int64_t num_made = 0;
            for (const Decoding& s : sequences) num_made += s.made[i];
            add(num_made);
        }
        int64_t num_made = 0;
        for (const Decoding& s : sequences) num_made += s.num_drafted;
        add(num_made);
        for (const Decoding& s : sequences) add(s.had);
        for (const Decoding& s : sequences) add(s.missed);
        for (const Decoding& s : sequences) add(s.got);
        for (const Decoding& s : sequences) add(s.whose);
        for (const Decoding& s : sequences)
            for (size_t i = size_t(s.num_known); i < s.known.size(); ++i) add(s.known[i]);
        for (const Decoding& s : sequences) add(s.told, s.evidence_of_told);
        for (const Decoding& s : sequences) add(s.drafts, s.evidence);
        *num_written = ints_ - first_;
        return room_ < 0 ? TOKEN_IDS : OK;
    }

private:
    void add(int64_t value) {
        if (--room_ >= 0) *ints_++ = value;
    }
    void add(const std::vector<int64_t>& values) {
        for (const int64_t value : values) add(value);
    }
    void add(const std::vector<int64_t>& drafts, const std::vector<float>& evidence) {
        add(drafts);
        if (room_ >= 0) floats_ = std::copy(evidence.begin(), evidence.end(), floats_);
    }

    int64_t *const first_, *ints_;
    float* floats_;
    int64_t room_;
};

}  // namespace

// As many rounds as `num_rounds`, or fewer: up to the one in which a sequence ends, or before one in which a row has no
// most likely token. Nobody wants drafts, or `draft` makes them, with a rule if there is one, for those that want
// drafts, or each one's index; with `choices`, what lookups have found may come in place of that. If the host `goes_on`, those of the round that would be next are made
// as well, for the sequences that have not ended. Written are `num_done`; what rounds come to, as Found says, into
// `found` and `beside` [room], of which `num_written` are ints, and the hidden states that heads have not read, of at
// most all tokens that may come, into `features`, row by row; and `seconds` [num_rounds + 1, 2] of the target's passes
// and of the drafting before them. Returns a Status: of what the first round lacks.
extern "C" int rounds(const Model* target, const Model* draft, const StopRule* rule, const Choices* choices,
                      int64_t num_rounds, int64_t goes_on, const int64_t* ints, int64_t num_ints, int64_t num_seqs, int64_t* found,
                      float* beside, int64_t room, char* features, double* seconds, int64_t* num_done,
                      int64_t* num_written) {
    return guarded([&]() -> int {
        std::vector<Decoding> sequences;
        const int status = read_decoding(ints, num_ints, num_seqs, &sequences);
        if (status != OK) return status;
        Rounds rounds(*target, draft, rule, choices, &sequences);
        if (rounds.choices_lead_outside()) return STOP_RULE;
        if (!draft && rounds.wants_drafts_of_nobody()) return CONTEXT_LENS;
        const auto timed = [](double* taken, auto&& run) {
            const auto start = std::chrono::steady_clock::now();
            const int status = run();
            *taken = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
            return status;
        };
        for (*num_done = 0; *num_done < num_rounds && !rounds.has_one_ended(); ++*num_done) {
            double* const taken = seconds + 2 * *num_done;
            const auto drafting = [&] { return *num_done ? rounds.draft() : int(OK); };
            if (timed(taken + 1, drafting) != OK) break;  // the host's own drafting will say why
            bool is_ok = false;
            const int status = timed(taken, [&] { return rounds.verify(&is_ok); });
            if (status != OK && !*num_done) return status;
            if (status != OK || !is_ok) break;
        }
        const bool is_whole = *num_done == num_rounds || rounds.has_one_ended();
        const auto drafting = [&] { return rounds.draft_ahead(); };
        const bool drafts_wait = goes_on && is_whole && timed(seconds + 2 * *num_done + 1, drafting) == OK;
        if (draft && draft->reads()) rounds.follow(drafts_wait);
        rounds.leave(drafts_wait);
        const int64_t feature_bytes = draft ? draft->feature_bytes() : 0;
        return Found(found, beside, room)
            .write(sequences, *num_done, drafts_wait, feature_bytes, features, num_written);
    });
}
