// Lookups that draft in place of a model, or beside each other: whose draft a sequence takes, and how much of it.
//
//   the sequence's least is 0.4, a row costs 0.1 tokens
//
//   lookup 1 finds   a    b     chances 0.6 0.3    0.5 + 0.2       = 0.7
//   lookup 2 finds   a    c  d          0.9 0.5 0  0.8 + 0.4       = 1.2    taken: a c
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "decoding.h"
#include "greedy.cpp"

namespace {

// A draft promises the sum over its tokens of chance - row_tokens, as long as a token's chance, that it stands and all
// before it, is not below row_tokens, by its lookup's own rule. The one that promises most, the first of equals, is
// taken up to there, if that is more than `least`.
struct Choices {
    int64_t num_lookups;
    const StopRule* rules;       // [num_lookups]
    const int64_t *rows, *most;  // [num_seqs]: the sequence's row in each rule, and the tokens that may be found
    const double* least;         // [num_seqs]
    Lookup* const* indexes;      // [num_seqs, num_lookups], as Decoding has one; null where none may be found
    int64_t tells;               // whether what is found and not taken comes back to the host

    // Tells each sequence what is its own. Returns a Status, of what leads outside of what is there.
    int give(std::vector<Decoding>* sequences) const {
        for (size_t seq = 0; seq < sequences->size(); ++seq) {
            Decoding& s = (*sequences)[seq];
            s.choice_row = rows[seq];
            s.most_found = most[seq];
            s.least = least[seq];
            s.indexes = indexes + seq * size_t(num_lookups);
            s.num_indexes = s.most_found > 0 ? num_lookups : 0;
            if (tells) s.finds.resize(size_t(num_lookups));
            for (int64_t i = 0; i < s.num_indexes; ++i)
                if (!s.indexes[i] || rules[i].num_intercepts < 1 || s.choice_row < 0 ||
                    s.choice_row >= rules[i].num_seqs)
                    return STOP_RULE;
        }
        return OK;
    }

    // Gives each sequence the draft of the lookup that promises most, if that is enough, and says how much of it is
    // worth its rows.
    void choose(std::vector<Decoding>* sequences) const {
        Find find;
        for (Decoding& s : *sequences) {
            const int64_t room = std::min(s.most_found, s.most - 1);
            double most_promised = s.least;
            for (int64_t i = 0; room > 0 && i < num_lookups; ++i) {
                look_up(*s.indexes[i], room, &find);
                double promised = 0.0;
                const int64_t worth = num_worth(s, i, find, &promised);
                if (tells) s.finds[size_t(i)] = find;
                if (!worth || !(promised > most_promised)) continue;
                most_promised = promised;
                s.drafter = 1 + i;
                s.num_taken = worth;
                s.drafts = find.token_ids;
                s.evidence = find.evidence;
            }
            if (tells && s.drafter) s.finds[size_t(s.drafter - 1)] = {};  // it is told as a draft
        }
    }

private:
    static void look_up(const Lookup& index, int64_t room, Find* find) {
        find->token_ids.resize(size_t(room));
        find->evidence.resize(size_t(room));
        const size_t count = size_t(index.find(room, find->token_ids.data(), find->evidence.data()));
        find->token_ids.resize(count);
        find->evidence.resize(count);
    }

    // How many tokens are, and what they promise together.
    int64_t num_worth(const Decoding& s, int64_t lookup, const Find& find, double* promised) const {
        const StopRule& rule = rules[lookup];
        double chance = 1.0;
        int64_t worth = 0;
        for (; worth < int64_t(find.token_ids.size()); ++worth) {
            const double x = s.indexes[lookup]->logit_of(find.evidence[size_t(worth)]);
            chance *= rule.chance(s.choice_row, worth, x);
            if (!(chance >= rule.row_tokens)) break;
            *promised += chance - rule.row_tokens;
        }
        return worth;
    }
};

}  // namespace
