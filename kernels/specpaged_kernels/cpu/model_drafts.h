// Drafts of a draft model, within rounds: of those who want some it runs what it lacks, and then, step by step, what it
// has found.
#pragma once

#include <algorithm>
#include <vector>

#include "decoding.h"
#include "model_call.h"

namespace {

class ModelDrafts {
public:
    // `rule`, or null, has a row for each sequence that has a rule_row.
    ModelDrafts(const Model& model, const StopRule* rule) : call{model, {}, {}, {}}, rule_(rule) {}

    ModelCall call;

    // For those that want drafts, and have none of a lookup's. Returns a Status.
    int make(std::vector<Decoding>* sequences) {
        std::vector<Decoding*> drafting;
        call.begin();
        int64_t num_found = 0, num_steps = 0;  // which may be fewer than are wanted
        for (Decoding& s : *sequences) {
            const int64_t count = s.num_to_draft();
            if (count < 1) continue;
            drafting.push_back(&s);
            call.add(s, s.draft_blocks, s.num_draft_blocks, s.draft_context - s.num_skipped, s.draft_context, {}, 1,
                     count - 1);
            num_found += count;
        }
        if (drafting.empty()) return OK;
        const int status = run(drafting, drafting.size(), num_found, nullptr, &num_steps);
        if (status != OK) return status;
        for (auto* s : drafting) s->draft_context = s->num_tokens() + std::min(num_steps, s->num_to_draft()) - 1;
        take(drafting, num_steps);
        return OK;
    }

    // Runs what has been added to the call, by the rule if there is one. Those who draft are the first ones of it, of
    // which some may have ended. Returns a Status.
    int run(const std::vector<Decoding*>& drafting, size_t num_seqs, int64_t num_found, const void* features,
            int64_t* num_steps) {
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
        return call.run(num_seqs, num_found, true, has_rule ? &rule : nullptr, num_steps, features);
    }

    // The drafts that the steps have found.
    void take(const std::vector<Decoding*>& drafting, int64_t num_steps) const {
        std::vector<int64_t> counts;
        for (const auto* s : drafting) counts.push_back(s->num_to_draft());
        size_t next = 0;
        for (int64_t step = 0; step < num_steps; ++step)
            for (size_t i = 0; i < drafting.size(); ++i)
                if (step < counts[i]) {
                    drafting[i]->drafts.push_back(call.token_ids[next]);
                    drafting[i]->evidence.push_back(call.logprobs[next++]);
                }
    }

private:
    const StopRule* const rule_;
};

}  // namespace
