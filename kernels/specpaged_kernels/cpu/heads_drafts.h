// Drafts of heads that read the target, within rounds: they run each token that stands, with the target's hidden state
// before it, whether or not its sequence wants drafts, and draft in the same call for those that do.
#pragma once

#include <algorithm>
#include <vector>

#include "decoding.h"
#include "model_drafts.h"

namespace {

class HeadsDrafts {
public:
    HeadsDrafts(const Model& heads, const StopRule* rule) : drafts_(heads, rule) {}

    // Not where nobody wants drafts, or all have a lookup's: what others have not been run for is kept. Nothing of
    // drafts stays in the heads' KV: a step behind the first one reads what the one before has left. Returns a Status.
    int make(std::vector<Decoding>* sequences) {
        std::vector<Decoding*> all = unread(sequences);
        const auto drafts = [](const Decoding* s) { return s->num_to_draft() > 0; };
        const std::vector<Decoding*> drafting(all.begin(), std::stable_partition(all.begin(), all.end(), drafts));
        if (drafting.empty()) return OK;
        int64_t num_steps = 0;
        const int status = run(all, drafting, &num_steps);
        if (status == OK) drafts_.take(drafting, num_steps);
        return status;
    }

    // Where the host is not to draft, as all that want drafts have some, or nobody does, heads read all that the target
    // has run; else what they have not read is the host's.
    void follow(bool drafts_wait, std::vector<Decoding>* sequences) {
        for (const Decoding& s : *sequences)
            if (!drafts_wait && s.num_wanted > 0 && !s.has_ended) return;
        int64_t num_steps;
        const std::vector<Decoding*> all = unread(sequences);
        if (!all.empty()) run(all, {}, &num_steps);
    }

private:
    static std::vector<Decoding*> unread(std::vector<Decoding>* sequences) {
        std::vector<Decoding*> all;
        for (Decoding& s : *sequences)
            if (!s.features.empty()) all.push_back(&s);
        return all;
    }

    // Over what they have not read of all of these; the first ones, `drafting`, have drafts found.
    int run(const std::vector<Decoding*>& all, const std::vector<Decoding*>& drafting, int64_t* num_steps) {
        drafts_.call.begin();
        features_.clear();
        int64_t num_found = 0;
        for (size_t i = 0; i < all.size(); ++i) {
            const Decoding& s = *all[i];
            const int64_t count = i < drafting.size() ? s.num_to_draft() : 0;
            // Behind `context` pairs, the next one's token is one further.
            const int64_t context = s.draft_context;
            drafts_.call.add(s, s.blocks, s.num_blocks, context, context + 1, {}, count > 0,
                             std::max<int64_t>(0, count - 1));
            features_.insert(features_.end(), s.features.begin(), s.features.end());
            num_found += count;
        }
        const int status = drafts_.run(drafting, all.size(), num_found, features_.data(), num_steps);
        if (status != OK) return status;
        for (Decoding* s : all) {
            s->draft_context = s->num_tokens() - 1;
            s->features.clear();
        }
        return OK;
    }

    ModelDrafts drafts_;
    std::vector<char> features_;
};

}  // namespace
