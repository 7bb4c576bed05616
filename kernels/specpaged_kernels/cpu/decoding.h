// A sequence that decodes in rounds, as the host describes it and as it goes on: see rounds.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lookup.h"
#include "status.h"

namespace {

// What a lookup has found: tokens, and what is known of each.
struct Find {
    std::vector<int64_t> token_ids;
    std::vector<float> evidence;
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
    int64_t num_skipped;  // tokens before draft_context that the draft model does not read, in the places of which it
                          // has those behind them

    std::vector<int64_t> known, drafts;
    const int64_t *stop_ids = nullptr, *blocks = nullptr, *draft_blocks = nullptr;
    std::vector<float> evidence;    // of each draft, if they were made here, and of the one that was left out
    std::vector<int64_t> left_out;  // the first draft that was, if any
    std::vector<char> features;     // of heads: of the tokens that the target has run, and they have not
    int64_t num_drafted = 0;        // of which the drafts are what is left
    int64_t rule_row = -1;          // its own in the rule, if it has one
    bool has_ended = false;         // no more may come, or a stop id has
    // With Choices: its indexes, if it may take what they find, and how much; whose its drafts are, 1 and more for a
    // lookup, and how many of them are worth it.
    Lookup* const* indexes = nullptr;
    int64_t num_indexes = 0, choice_row = 0, most_found = 0, drafter = 0, num_taken = 0;
    double least = 0.0;
    // Of each lookup, for the round that comes, what it has found and was not taken; none unless Choices tells.
    std::vector<Find> finds;

    // Of each round so far: drafts that were made for it, those that it had, whether one more was left out, tokens that
    // it got, and whose the drafts were. And all these drafts, with those that were left out.
    std::vector<int64_t> made, had, missed, got, whose, told;
    std::vector<float> evidence_of_told;
    // And of each round and lookup the finds, as far as it is known whether they would have stood.
    std::vector<int64_t> num_found, found;
    std::vector<float> evidence_of_found;

    int64_t num_tokens() const { return start + int64_t(known.size()); }
    int64_t num_new() const { return int64_t(known.size()) - num_known; }
    // Drafts that are wanted of who drafts where no lookup's were taken, and that could come.
    int64_t num_to_draft() const { return drafter ? 0 : std::max<int64_t>(0, std::min(num_wanted, most - 1)); }

    // Appends what was found: the drafts that stand, and the token behind them.
    void keep(const int64_t* found_ids, int64_t num_accepted) {
        const int64_t count = num_accepted + 1;
        made.push_back(num_drafted);
        had.push_back(int64_t(drafts.size()));
        got.push_back(count);
        missed.push_back(int64_t(left_out.size()));
        whose.push_back(drafter);
        told.insert(told.end(), drafts.begin(), drafts.end());
        told.insert(told.end(), left_out.begin(), left_out.end());
        evidence.resize(drafts.size() + left_out.size());  // the host keeps that of its own drafts
        evidence_of_told.insert(evidence_of_told.end(), evidence.begin(), evidence.end());
        for (Find& find : finds) {
            num_found.push_back(std::min(count, int64_t(find.token_ids.size())));
            found.insert(found.end(), find.token_ids.begin(), find.token_ids.begin() + num_found.back());
            const auto first = find.evidence.begin();
            evidence_of_found.insert(evidence_of_found.end(), first, first + num_found.back());
        }
        drop_drafts();
        if (index) index->append(found_ids, count);
        for (int64_t i = 0; i < num_indexes; ++i) indexes[i]->append(found_ids, count);
        for (int64_t i = 0; i < count; ++i) {
            known.push_back(found_ids[i]);
            has_ended |= std::count(stop_ids, stop_ids + num_stop_ids, found_ids[i]) > 0;
        }
        draft_context = std::min(draft_context, num_tokens() - 1);
        most -= count;
        has_ended |= most < 1;
    }

    void drop_drafts() {
        drafts.clear();
        evidence.clear();
        left_out.clear();
        finds.assign(finds.size(), {});
        num_drafted = drafter = 0;
    }
};

inline int read_decoding(const int64_t* ints, int64_t num_ints, int64_t num_seqs, std::vector<Decoding>* sequences) {
    constexpr int64_t HEAD = 11;
    const int64_t* const end = ints + num_ints;
    for (int64_t seq = 0; seq < num_seqs; ++seq) {
        if (end - ints < HEAD) return TOKEN_IDS;
        Decoding s = {ints[0], ints[1], ints[2], ints[3], ints[4], ints[5], ints[6], ints[7], (Lookup*)ints[8],
                      ints[9], ints[10]};
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

}  // namespace
