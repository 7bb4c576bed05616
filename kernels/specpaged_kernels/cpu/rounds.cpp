// Rounds of sequences that decode by the most likely tokens: several in one call, between two decisions of the host,
// which describes the sequences in ints. A round runs the target over each one's last known token and its drafts, and
// keeps the drafts that are the target's own tokens, with the token that follows them (target_round.h). In front of
// every round but the first, whose drafts the host brings, a draft model drafts for those that want drafts, or a lookup
// in their own tokens, or heads that read the target; lookups may be asked first, and what they have found be taken
// where it promises enough (round_drafts.h). The host gets the hidden states that heads have not read.
// Two sequences, of which the first wants two:
//
//              known   drafts    the target finds    it keeps
//   round 0    x       a b       a c ?               a c
//              y                 z                   z
//   round 1    c       d e       d e f               d e f
//              z                 w                   w

#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

#include "choices.h"
#include "decoding.h"
#include "model_call.h"
#include "round_drafts.h"
#include "rounds_found.h"
#include "target_round.h"

// As many rounds as `num_rounds`, or fewer: up to the one in which a sequence ends, or before one in which a row has no
// most likely token. Nobody wants drafts, or `draft` makes them, with a rule if there is one, for those that want
// drafts, or each one's index; with `choices`, what lookups have found may come in place of that. If the host
// `goes_on`, those of the round that would be next are made as well, for the sequences that have not ended. Written are
// `num_done`; what rounds come to, as Found says, into `found` and `beside` [room], of which `num_written` are ints;
// the hidden states that heads have not read, of at most all tokens that may come, into `features`, row by row; and
// `seconds` [num_rounds + 1, 2] of the target's passes and of the drafting before them. Returns a Status: of what the
// first round lacks.
extern "C" int rounds(const Model* target, const Model* draft, const StopRule* rule, const Choices* choices,
                      int64_t num_rounds, int64_t goes_on, const int64_t* ints, int64_t num_ints, int64_t num_seqs,
                      int64_t* found, float* beside, int64_t room, char* features, double* seconds, int64_t* num_done,
                      int64_t* num_written) {
    return guarded([&]() -> int {
        std::vector<Decoding> sequences;
        int status = read_decoding(ints, num_ints, num_seqs, &sequences);
        if (status == OK && choices) status = choices->give(&sequences);
        if (status != OK) return status;
        RoundDrafts drafts(draft, rule, choices, &sequences);
        if (drafts.lack_a_drafter()) return CONTEXT_LENS;
        TargetRound of_target(*target, draft && draft->reads() ? draft : nullptr, &sequences);
        const auto has_one_ended = [&] {
            return std::any_of(sequences.begin(), sequences.end(), [](const Decoding& s) { return s.has_ended; });
        };
        const auto timed = [](double* taken, auto&& run) {
            const auto start = std::chrono::steady_clock::now();
            const int status = run();
            *taken = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
            return status;
        };
        for (*num_done = 0; *num_done < num_rounds && !has_one_ended(); ++*num_done) {
            double* const taken = seconds + 2 * *num_done;
            const auto drafting = [&] { return *num_done ? drafts.make() : int(OK); };
            if (timed(taken + 1, drafting) != OK) break;  // the host's own drafting will say why
            bool is_ok = false;
            status = timed(taken, [&] { return of_target.run(&is_ok); });
            if (status != OK && !*num_done) return status;
            if (status != OK || !is_ok) break;
        }
        const bool is_whole = *num_done == num_rounds || has_one_ended();
        const auto drafting = [&] { return drafts.make_ahead(); };
        const bool drafts_wait = goes_on && is_whole && timed(seconds + 2 * *num_done + 1, drafting) == OK;
        drafts.leave(drafts_wait);
        return Found(found, beside, room)
            .write(sequences, *num_done, drafts_wait, draft ? draft->feature_bytes() : 0, features, num_written);
    });
}
