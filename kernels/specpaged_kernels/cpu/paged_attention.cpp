// Stores a pass's keys and values in their pages, then attends to the pages where they lie. Pages may be narrower than
// the pass: what is stored is rounded, and every query token reads what was stored, of its own pass, too.
//
// A program takes query tokens of one sequence, with all KV heads or with one; a row is a token and a head. It walks over
// the keys CHUNK absolute positions at a time, fetching the next chunk meanwhile:
//
//     scores of a row                 [CHUNK]  of each key a sum over D lane by lane, then of the lanes
//     running maximum, sum, output    as in online softmax, in order of position
//
// A row's operations and their order follow from its own position alone. C++ allows a compiler to vectorise them and
// not to reorder them (no -ffast-math, no contraction: FMAs are written out), so a row has the same bits in every batch,
// beside any neighbour, on any number of threads. What a row may not read is never loaded into its sums: a NaN there
// does not spoil it.

#pragma once

#include <algorithm>
#include <vector>

#include "packed_chunk.h"
#include "status.h"
#include "team.h"
#include "unpacked_chunk.h"

namespace {

constexpr int MAX_TILE_ROWS = 64;  // rows that share what they read of a chunk
constexpr int LEAST_PACKED = 4;    // from D / 4 rows on, packing takes less than they gain by it

struct Pass {
    int64_t num_seqs, num_tokens, num_rows, block_size, num_heads, num_kv_heads, head_dim, num_threads;
    int64_t num_slots;                   // of the pool
    int64_t table_width, table_stride;   // blocks of a sequence in the table; entries from one sequence to the next
    int64_t block_stride;                // slots from a block to the next one: block_size where blocks are pages
    int64_t kv_storage;                  // a Storage, of the pool
    const int64_t* slot_mapping;   // [num_tokens]
    const int32_t* page_table;     // [B, table_width]
    const int32_t* cu_query_lens;  // [B + 1]
    const int32_t* context_lens;   // [B]
    float scaling, softcap;        // softcap 0: none
    int64_t window;                // 0: none
    const float* sinks;            // [Hq] or null
};

// Whether a pass stays within its pool and its tables; no entry that it does not read is looked at.
inline int outside(const Pass& pass) {
    const int32_t* bounds = pass.cu_query_lens;
    if (bounds[0] != 0 || bounds[pass.num_seqs] != pass.num_tokens) return CU_QUERY_LENS;
    if (!std::is_sorted(bounds, bounds + pass.num_seqs + 1)) return CU_QUERY_LENS;
    for (int64_t seq = 0; seq < pass.num_seqs; ++seq) {
        const int64_t count = bounds[seq + 1] - bounds[seq];
        const int64_t end = pass.context_lens[seq] + count;
        if (pass.context_lens[seq] < 0 || end > INT32_MAX - 2 * CHUNK) return CONTEXT_LENS;
        const int32_t* table = pass.page_table + seq * pass.table_stride;
        for (int64_t start = 0, block = 0; count > 0 && start < end; start += pass.block_size, ++block) {
            if (block >= pass.table_width) return CONTEXT_LENS;
            const int64_t slot = int64_t(table[block]) * pass.block_stride;
            if (table[block] < 0 || slot + std::min(pass.block_size, end - start) > pass.num_slots) return PAGE_TABLE;
        }
    }
    return all_below(pass.slot_mapping, pass.num_tokens, pass.num_slots) ? OK : SLOT_MAPPING;
}

struct Tile {  // query tokens first .. last - 1 of a sequence
    int seq, first, last;
};

// Tiles of at most `most` tokens that cover all, or, where the outputs of some rows alone are wanted, those: consecutive
// ones of a sequence together. `wanted` ascends.
//
//     cu_query_lens 0 5 7, most 3   all: (0, 0..2) (0, 3..4) (1, 0..1)   wanted 1, 2, 4, 6: (0, 1..2) (0, 4) (1, 1)
inline void divide(const Pass& pass, const std::vector<int64_t>* wanted, int most, std::vector<Tile>& tiles) {
    tiles.clear();
    const auto add = [&](int seq, int first, int last) {
        for (; first < last; first += most) tiles.push_back({seq, first, std::min(first + most, last)});
    };
    size_t next = 0;
    for (int seq = 0; seq < pass.num_seqs; ++seq) {
        const int begin = pass.cu_query_lens[seq], end = pass.cu_query_lens[seq + 1];
        if (!wanted) add(seq, 0, end - begin);
        while (wanted && next < wanted->size() && (*wanted)[next] < end) {
            const size_t from = next;
            const auto consecutive = [&] {
                return next < wanted->size() && (*wanted)[next] < end &&
                       (*wanted)[next] == (*wanted)[from] + int64_t(next - from);
            };
            while (consecutive()) ++next;
            const int first = int((*wanted)[from]) - begin;
            add(seq, first, first + int(next - from));
        }
    }
}

// Slots of consecutive positions of a sequence: [2, Hkv, D] each.
template <typename T>
void locate(const Pass& pass, int seq, int start, int count, const T* pool, const T** slots) {
    const int32_t* table = pass.page_table + seq * pass.table_stride;
    const int64_t slot_size = 2 * pass.num_kv_heads * pass.head_dim;
    int64_t block = start / pass.block_size, offset = start % pass.block_size;
    for (int i = 0; i < count; ++i) {
        slots[i] = pool + (int64_t(table[block]) * pass.block_stride + offset) * slot_size;
        if (++offset == pass.block_size) {
            offset = 0;
            ++block;
        }
    }
}

struct Scratch {
    Lines queries, outputs;
    std::vector<Row> rows;
    std::vector<Row*> reading;
    PackedChunk chunk;
};

// Calls `attend` with so many rows at once, and with those that are left.
template <int ROWS, typename Attend>
void take_together(Row** rows, int count, const Attend& attend) {
    for (; count >= ROWS; rows += ROWS, count -= ROWS) {
        Row* taken[ROWS];
        std::copy_n(rows, ROWS, taken);
        attend(taken);
    }
    if constexpr (ROWS > 1)
        if (count > 0) take_together<ROWS - 1>(rows, count, attend);
}

// The KV heads first_head .. last_head - 1 of a tile, a chunk of all of them after the other: what lies together in
// memory is read together. Behind its last chunk the first one of `next_tile` is fetched.
template <bool WHOLE, typename KV, typename T>
void attend_tile(const Pass& pass, const Tile& tile, const Tile* next_tile, int first_head, int last_head,
                 const T* query, int64_t query_row, int64_t query_head, const KV* pool, T* output) {
    static thread_local Scratch scratch;
    const int head_dim = int(pass.head_dim), group = int(pass.num_heads / pass.num_kv_heads);
    const int num_heads = last_head - first_head;
    const int window = pass.window > 0 ? int(std::min<int64_t>(pass.window, INT32_MAX)) : INT32_MAX;
    const int rows_of_head = (tile.last - tile.first) * group, num_rows = rows_of_head * num_heads;
    float* const queries = scratch.queries.resized(size_t(num_rows) * head_dim);
    float* const outputs = scratch.outputs.resized(size_t(num_rows) * head_dim);
    std::fill_n(outputs, size_t(num_rows) * head_dim, 0.0f);
    scratch.rows.resize(num_rows);
    scratch.reading.resize(rows_of_head);
    Row** const reading = scratch.reading.data();
    const int64_t first_row = pass.cu_query_lens[tile.seq];
    const auto token_of = [&](int r) { return tile.first + r % rows_of_head / group; };
    const auto head_of = [&](int r) { return (first_head + r / rows_of_head) * group + r % group; };
    int nearest = INT32_MAX, farthest = 0;
    for (int r = 0; r < num_rows; ++r) {
        const int token = token_of(r), head = head_of(r);
        Row& row = scratch.rows[r];
        float* copy = queries + size_t(r) * head_dim;
        const T* from = query + (first_row + token) * query_row + head * query_head;
        for (int d = 0; d < head_dim; ++d) copy[d] = to_float(from[d]);
        row.query = copy;
        row.output = outputs + size_t(r) * head_dim;
        row.max = pass.sinks ? pass.sinks[head] : -INFINITY;
        row.sum = pass.sinks ? 1.0f : 0.0f;
        row.last = pass.context_lens[tile.seq] + token;
        row.first = std::max(0, row.last - window + 1);
        nearest = std::min(nearest, row.first);
        farthest = std::max(farthest, row.last);
    }
    const Scores scores{pass.scaling, pass.softcap};
    const int64_t values_behind = pass.num_kv_heads * head_dim;
    const KV* const first_pool = pool + first_head * head_dim;
    const int first_chunk = nearest / CHUNK * CHUNK;
    const KV *slots[CHUNK], *keys[CHUNK], *values[CHUNK];
    const auto count_at = [&](int start) { return std::max(0, std::min(CHUNK, farthest - start + 1)); };
    locate(pass, tile.seq, first_chunk, count_at(first_chunk), first_pool, slots);
    for (int start = first_chunk; start <= farthest; start += CHUNK) {
        const int count = count_at(start);
        Ahead<KV> ahead{{}, count_at(start + CHUNK), num_heads, head_dim, values_behind};
        if (ahead.count > 0) {
            locate(pass, tile.seq, start + CHUNK, ahead.count, first_pool, ahead.slots);
        } else if (next_tile) {
            const int position = pass.context_lens[next_tile->seq] + next_tile->first;
            const int from = std::max(0, position - window + 1) / CHUNK * CHUNK;
            ahead.count = std::min(CHUNK, position + 1 - from);
            locate(pass, next_tile->seq, from, ahead.count, first_pool, ahead.slots);
        }
        for (int first = 0; first < num_rows; first += rows_of_head) {  // of a head
            int num_read = 0;
            for (int r = first; r < first + rows_of_head; ++r) {
                Row& row = scratch.rows[r];
                if (row.last < start || row.first >= start + CHUNK) continue;
                row.from = std::max(0, row.first - start);
                row.to = std::min(CHUNK, row.last - start + 1);
                reading[num_read++] = &row;
            }
            const int64_t of_head = first / rows_of_head * head_dim;
            for (int i = 0; i < count; ++i) {
                keys[i] = slots[i] + of_head;
                values[i] = keys[i] + values_behind;
            }
            if (WHOLE && num_read * LEAST_PACKED >= head_dim) {
                scratch.chunk.pack(keys, values, count, head_dim, [&] {
                    ahead.fetch();
                    ahead.fetch();
                });
                take_together<TOGETHER>(reading, num_read, [&](const auto& rows) {
                    attend_packed(rows, scratch.chunk, scores);
                });
                continue;
            }
            for (int i = count; i % LANES; ++i) keys[i] = keys[count - 1];  // whose scores nobody reads
            Ahead<KV>* fetched = &ahead;  // once for each head
            take_together<2>(reading, num_read, [&](const auto& rows) {
                weigh<WHOLE>(rows, keys, fetched, scores, head_dim);
                add_all_values(rows, values, fetched, head_dim);
                fetched = nullptr;
            });
        }
        std::copy_n(ahead.slots, CHUNK, slots);
    }
    for (int r = 0; r < num_rows; ++r) {
        const Row& row = scratch.rows[r];
        T* to = output + ((first_row + token_of(r)) * pass.num_heads + head_of(r)) * head_dim;
        for (int d = 0; d < head_dim; ++d) from_float(row.output[d] / row.sum, to + d);
    }
}

inline void store_row(const float* from, int64_t count, float* to) { std::memcpy(to, from, count * sizeof(float)); }
inline void store_row(const bfloat16* from, int64_t count, bfloat16* to) { std::memcpy(to, from, count * 2); }
template <typename T, typename KV>
void store_row(const T* from, int64_t count, KV* to) {
    for (int64_t i = 0; i < count; ++i) from_float(to_float(from[i]), to + i);
}

template <typename KV, typename T>
void attend_in(KV* pool, const Pass& pass, const T* query, int64_t query_row, int64_t query_head, const T* key,
               int64_t key_row, int64_t key_head, const T* value, int64_t value_row, int64_t value_head, T* output,
               const std::vector<int64_t>* wanted) {
    const int head_dim = int(pass.head_dim), num_kv_heads = int(pass.num_kv_heads);
    const int num_threads = int(pass.num_threads);
    const int64_t kv_stride = pass.num_kv_heads * head_dim;
    run_by_rows(pass.num_tokens, num_threads, [&](int64_t first, int64_t count) {
        for (int64_t row = first; row < first + count; ++row) {
            KV* slot = pool + pass.slot_mapping[row] * 2 * kv_stride;
            for (int64_t head = 0; head < pass.num_kv_heads; ++head) {
                store_row(key + row * key_row + head * key_head, head_dim, slot + head * head_dim);
                store_row(value + row * value_row + head * value_head, head_dim, slot + kv_stride + head * head_dim);
            }
        }
    });
    static thread_local std::vector<Tile> list;
    std::vector<Tile>& tiles = list;  // of the thread that called
    divide(pass, wanted, std::max(1, MAX_TILE_ROWS / int(pass.num_heads / num_kv_heads)), tiles);
    // Heads of a tile stay together unless threads would go without work.
    const int parts = int(tiles.size()) < 4 * num_threads && num_threads > 1 ? num_kv_heads : 1;
    const int heads = num_kv_heads / parts, num_programs = int(tiles.size()) * parts;
    Team::run(num_programs, num_threads, [&](int64_t first, int64_t last) {
        for (int program = int(first); program < int(last); ++program) {
            const int first_head = program % parts * heads, next = program / parts + 1;
            const Tile* next_tile = next < int(tiles.size()) ? &tiles[next] : nullptr;
            (head_dim % LANES == 0 ? attend_tile<true, KV, T> : attend_tile<false, KV, T>)(
                pass, tiles[program / parts], next_tile, first_head, first_head + heads, query, query_row, query_head,
                pool, output);
        }
    });
    const int64_t row_size = pass.num_heads * head_dim;
    std::memset(output + pass.num_tokens * row_size, 0, (pass.num_rows - pass.num_tokens) * row_size * sizeof(T));
}

// `wanted`, ascending, or null: the rows whose outputs are; those of others are left as they are.
template <typename T, typename... Operands>
void attend(const Pass& pass, void* pool, const T* query, Operands... operands) {
    if (pass.kv_storage == BFLOAT16) attend_in((bfloat16*)pool, pass, query, operands...);
    else if (pass.kv_storage == FLOAT16) attend_in((float16*)pool, pass, query, operands...);
    else if (pass.kv_storage == FLOAT8) attend_in((float8*)pool, pass, query, operands...);
    else attend_in((float*)pool, pass, query, operands...);
}

}  // namespace

// query [num_rows, Hq, D], key and value [num_rows, Hkv, D]: strides in elements, D contiguous.
// pool [P * S, 2, Hkv, D], stored as the pass says, and output [num_rows, Hq, D]: contiguous. Rows from num_tokens on are filler: zeros.
// Returns a Status.
#undef DEFINE
#define DEFINE(NAME, TYPE)                                                                                            \
    extern "C" int NAME(const Pass* pass, const void* query, int64_t query_row, int64_t query_head, const void* key,  \
                        int64_t key_row, int64_t key_head, const void* value, int64_t value_row, int64_t value_head,  \
                        void* pool, void* output) {                                                                   \
        return guarded([&] {                                                                                          \
            const int status = outside(*pass);                                                                        \
            if (status != OK) return status;                                                                          \
            attend(*pass, pool, (const TYPE*)query, query_row, query_head, (const TYPE*)key, key_row, key_head,       \
                   (const TYPE*)value, value_row, value_head, (TYPE*)output, nullptr);                                         \
            return int(OK);                                                                                           \
        });                                                                                                           \
    }

DEFINE(paged_attention_float32, float)
DEFINE(paged_attention_bfloat16, bfloat16)
