// Drafts for a round: those of a lookup that promises enough, of a sequence's own index, of a draft model, or of heads.
// With a rule, those that are not worth verifying are left out; of the first one of these it is told what it was, as
// whether it would have stood is known where all before it do.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "choices.h"
#include "decoding.h"
#include "heads_drafts.h"
#include "model_drafts.h"

namespace {

class RoundDrafts {
public:
    // `model` may be null: then each one's index drafts. So may be the rule, and the choices.
    RoundDrafts(const Model* model, const StopRule* rule, const Choices* choices, std::vector<Decoding>* sequences)
        : rule_(rule), choices_(choices), sequences_(*sequences) {
        // The rule's rows are those of all who want drafts; else it was made for others.
        const int64_t num_wanting = std::count_if(sequences_.begin(), sequences_.end(),
                                                  [](const Decoding& s) { return s.num_wanted > 0; });
        if (rule_ && (rule_->num_seqs != num_wanting || rule_->num_intercepts < 1)) rule_ = nullptr;
        int64_t row = 0;
        for (Decoding& s : sequences_)
            if (rule_ && s.num_wanted > 0) s.rule_row = row++;
        if (model && model->reads()) heads_.emplace(*model, rule_);
        else if (model) model_.emplace(*model, rule_);
    }

    // Whether someone wants drafts of nobody.
    bool lack_a_drafter() const {
        return !model_ && !heads_ &&
               std::any_of(sequences_.begin(), sequences_.end(),
                           [](const Decoding& s) { return s.num_wanted > 0 && !s.index; });
    }

    // As many as are wanted, but none that could not come, and without what is not worth verifying. Returns a Status.
    int make() {
        const int status = make_all();
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

    // For the round that would be next, of those who go on. Where that fails, there are none.
    int make_ahead() {
        for (Decoding& s : sequences_)
            if (s.has_ended) s.num_wanted = s.most_found = 0;
        return make();
    }

    // Behind the last round: drafts wait, or there are none, and heads have run what they can.
    void leave(bool drafts_wait) {
        if (heads_) heads_->follow(drafts_wait, &sequences_);
        for (Decoding& s : sequences_) {
            if (!drafts_wait) s.drop_drafts();
            s.evidence.resize(s.drafts.size());
            s.draft_context = std::min(s.draft_context, s.num_tokens() - 1 + int64_t(s.drafts.size()));
        }
    }

private:
    int make_all() {
        if (choices_) choices_->choose(&sequences_);
        if (heads_) return heads_->make(&sequences_);
        if (model_) return model_->make(&sequences_);
        for (Decoding& s : sequences_) {
            const int64_t count = s.num_to_draft();
            if (count < 1) continue;
            s.drafts.resize(size_t(count));
            s.evidence.resize(size_t(count));
            s.drafts.resize(size_t(s.index->find(count, s.drafts.data(), s.evidence.data())));
            s.evidence.resize(s.drafts.size());
        }
        return OK;
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

    const StopRule* rule_;
    const Choices* const choices_;
    std::vector<Decoding>& sequences_;
    std::optional<ModelDrafts> model_;
    std::optional<HeadsDrafts> heads_;
};

}  // namespace
