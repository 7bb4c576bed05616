// What the host asks of any Lookup.

#pragma once

#include "lookup.h"
#include "status.h"

extern "C" void lookup_delete(void* index) { delete (Lookup*)index; }

extern "C" int64_t lookup_num_tokens(const void* index) { return ((const Lookup*)index)->num_tokens(); }

// Appends so many token_ids, and finds at most `count` that may follow, and what is known of each, into drafts and
// evidence [count]. Returns a Status.
extern "C" int lookup_find(void* index, const int64_t* token_ids, int64_t num_new, int64_t count, int64_t* drafts,
                           float* evidence, int64_t* num_found) {
    return guarded([&] {
        Lookup& of = *(Lookup*)index;
        of.append(token_ids, num_new);
        *num_found = count ? of.find(count, drafts, evidence) : 0;  // to append is all that was asked
        return int(OK);
    });
}
