// What a call for several rounds gives back to the host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "decoding.h"

namespace {

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
//   [sequences, rounds, lookups]   tokens that each lookup has found besides, as far as their outcome is known; if
//                         Choices tells
//   [...]                 of each sequence the tokens that came, then of each the drafts that its rounds had, round by
//                         round with the one that was left out, then of each those that wait, then of each what was
//                         found besides
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
        for (const Decoding& s : sequences) add(s.num_found);
        for (const Decoding& s : sequences)
            for (size_t i = size_t(s.num_known); i < s.known.size(); ++i) add(s.known[i]);
        for (const Decoding& s : sequences) add(s.told, s.evidence_of_told);
        for (const Decoding& s : sequences) add(s.drafts, s.evidence);
        for (const Decoding& s : sequences) add(s.found, s.evidence_of_found);
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
