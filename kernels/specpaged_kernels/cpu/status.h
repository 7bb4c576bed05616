// What a kernel returns, of which library.py makes an exception. No C++ exception crosses over to Python.
#pragma once

#include <algorithm>
#include <cstdint>
#include <new>
#include <stdexcept>

namespace {

// The numbers of library.py. All but the last two name an argument that leads outside of its table; they come before
// anything is written.
enum Status : int {
    OK = 0,
    TOKEN_IDS = 1,
    POSITIONS = 2,
    LOGITS_IDX = 3,
    STOP_RULE = 4,
    VOCAB_SIZE = 5,
    HIDDEN_IDX = 6,
    LAYER_INPUTS = 7,
    SLOT_MAPPING = 8,
    PAGE_TABLE = 9,
    CU_QUERY_LENS = 10,
    CONTEXT_LENS = 11,
    OUT_OF_MEMORY = 12,
    FAILED = 13,
};

template <typename F>
int guarded(F&& run) noexcept {
    try {
        return run();
    } catch (const std::bad_alloc&) {
        return OUT_OF_MEMORY;
    } catch (const std::length_error&) {  // of a vector that no memory could hold
        return OUT_OF_MEMORY;
    } catch (...) {
        return FAILED;
    }
}

inline bool all_below(const int64_t* values, int64_t count, int64_t end) {
    return std::all_of(values, values + count, [end](int64_t value) { return value >= 0 && value < end; });
}

}  // namespace
