// Stores a pass's keys and values in their pages, then attends to the pages where they lie.
//
// A program takes the rows of one sequence and one KV head, a row being a query token and one of the heads that share
// the KV head. It walks over the keys CHUNK absolute positions at a time (64, or 32 where keys are long):
//
//     keys of the chunk, transposed   [D, SLICE] ...  in cache, shared by all rows
//     scores of a row                 [CHUNK]         sums over D in order, one lane per key
//     running maximum, sum, output    as in online softmax, in order of position
//
// A row's operations and their order follow from its own position alone. C++ allows a compiler to vectorise them and
// not to reorder them (no -ffast-math, no contraction: FMAs are written out), so a row has the same bits in every batch,
// beside any neighbour, on any number of threads. What a row may not read is never loaded into its sums: a NaN there
// does not spoil it.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "vectors.h"

namespace {

constexpr int SLICE = 32;          // keys whose scores of two rows fit into registers
constexpr int LONG_HEAD = 64;      // up to this head_dim a chunk is of two slices, else of one
constexpr int MAX_TILE_ROWS = 64;  // rows that share a transposed chunk

#if __has_builtin(__builtin_shufflevector)
inline void transpose(Floats (&r)[LANES]) {
#define SHUFFLE __builtin_shufflevector
    Floats a[LANES], b[LANES];
    for (int i = 0; i < LANES; i += 2) {
        a[i] = SHUFFLE(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        a[i + 1] = SHUFFLE(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int i = 0; i < LANES; i += 4) {
        for (int j = 0; j < 2; ++j) {
            b[i + 2 * j] = SHUFFLE(a[i + j], a[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            b[i + 2 * j + 1] = SHUFFLE(a[i + j], a[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    }
    for (int i = 0; i < 4; ++i) {
        r[i] = SHUFFLE(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        r[i + 4] = SHUFFLE(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
#undef SHUFFLE
}
#else
inline void transpose(Floats (&r)[LANES]) {
    for (int i = 0; i < LANES; ++i)
        for (int j = 0; j < i; ++j) {
            float x = r[i][j];
            r[i][j] = r[j][i];
            r[j][i] = x;
        }
}
#endif

// keys[i] [D], i < count <= SLICE -> transposed [D, SLICE], zeros behind count.
template <typename T>
void transpose_keys(const T* const* keys, int count, int head_dim, float* transposed) {
    int whole = count / LANES * LANES, d = 0;
    for (; d + LANES <= head_dim; d += LANES)
        for (int i = 0; i < whole; i += LANES) {
            Floats block[LANES];
            for (int j = 0; j < LANES; ++j) block[j] = load(keys[i + j] + d);
            transpose(block);
            for (int j = 0; j < LANES; ++j) store(transposed + (d + j) * SLICE + i, block[j]);
        }
    for (int e = 0; e < head_dim; ++e) {
        for (int i = e < d ? whole : 0; i < count; ++i) transposed[e * SLICE + i] = to_float(keys[i][e]);
        for (int i = count; i < SLICE; ++i) transposed[e * SLICE + i] = 0.0f;
    }
}

struct Row {
    const float* query;   // [D]
    float* output;        // [D], the sum of weighted values so far
    float max, sum;
    int first, last;      // positions that it reads
    int from, to;         // of the current chunk: keys from .. to - 1
    float weights[2 * SLICE];
};

template <int ROWS>
void form_scores(Row* const (&rows)[ROWS], const float* keys, int head_dim, int slice) {
    Floats total[ROWS][SLICE / LANES] = {};
    for (int d = 0; d < head_dim; ++d) {
        Floats key[SLICE / LANES];
        for (int c = 0; c < SLICE / LANES; ++c) key[c] = load(keys + d * SLICE + c * LANES);
        for (int r = 0; r < ROWS; ++r) {
            Floats query = splat(rows[r]->query[d]);
            for (int c = 0; c < SLICE / LANES; ++c) total[r][c] = fma(query, key[c], total[r][c]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < SLICE / LANES; ++c) store(rows[r]->weights + slice * SLICE + c * LANES, total[r][c]);
}

// Scores become weights e^(score - max), and the sums so far are rescaled to the new maximum.
template <int SLICES>
void update_softmax(Row& row, float scaling, float softcap, int head_dim) {
    constexpr int CHUNK = SLICES * SLICE;
    const Floats hidden = splat(-INFINITY), lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    const bool reads_all = row.from == 0 && row.to == CHUNK;
    Floats scores[CHUNK / LANES], largest = hidden;
    for (int c = 0; c < CHUNK / LANES; ++c) {
        Floats x = load(row.weights + c * LANES) * splat(scaling);
        if (softcap > 0) x = tanh(x / splat(softcap)) * splat(softcap);
        if (!reads_all) {
            Floats key = lanes + splat(float(c * LANES));
            x = (key < splat(float(row.from))) | (key >= splat(float(row.to))) ? hidden : x;
        }
        scores[c] = x;
        largest = x > largest ? x : largest;
    }
    float max = row.max;
    for (int i = 0; i < LANES; ++i) max = largest[i] > max ? largest[i] : max;
    Floats total = splat(0.0f);
    for (int c = 0; c < CHUNK / LANES; ++c) {
        Floats weight = exp(scores[c] - splat(max));
        store(row.weights + c * LANES, weight);
        total = total + weight;
    }
    float rescale = row.max == max ? 1.0f : exp(row.max - max);
    row.sum = fma(row.sum, rescale, sum(total));
    row.max = max;
    if (rescale != 1.0f)
        for (int d = 0; d < head_dim; ++d) row.output[d] *= rescale;
}

template <int ROWS, int VECTORS, typename T>
void add_values(Row* const (&rows)[ROWS], const T* const* values, int from, int to, int d) {
    Floats total[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) total[r][v] = load(rows[r]->output + d + v * LANES);
    for (int i = from; i < to; ++i) {
        Floats value[VECTORS];
        for (int v = 0; v < VECTORS; ++v) value[v] = load(values[i] + d + v * LANES);
        for (int r = 0; r < ROWS; ++r) {
            Floats weight = splat(rows[r]->weights[i]);
            for (int v = 0; v < VECTORS; ++v) total[r][v] = fma(weight, value[v], total[r][v]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) store(rows[r]->output + d + v * LANES, total[r][v]);
}

template <int ROWS, typename T>
void add_values(Row* const (&rows)[ROWS], const T* const* values, int from, int to, int head_dim, int) {
    if (from >= to) return;
    int d = 0;
    for (; d + 4 * LANES <= head_dim; d += 4 * LANES) add_values<ROWS, 4>(rows, values, from, to, d);
    for (; d + LANES <= head_dim; d += LANES) add_values<ROWS, 1>(rows, values, from, to, d);
    for (; d < head_dim; ++d)
        for (int r = 0; r < ROWS; ++r)
            for (int i = from; i < to; ++i)
                rows[r]->output[d] = fma(rows[r]->weights[i], to_float(values[i][d]), rows[r]->output[d]);
}

struct Pass {
    int num_seqs, num_tokens, num_rows, block_size, num_heads, num_kv_heads, head_dim, num_threads;
    int64_t table_stride;
    const int64_t* slot_mapping;   // [num_tokens]
    const int32_t* page_table;     // [B, table_stride]
    const int32_t* cu_query_lens;  // [B + 1]
    const int32_t* context_lens;   // [B]
    float scaling, softcap;        // softcap 0: none
    int window;                    // 0: none
    const float* sinks;            // [Hq] or null
};

struct Tile {  // query tokens first .. last - 1 of a sequence
    int seq, first, last;
};

// Where keys of `head_dim` values lie, and that they and their values will be wanted: a KV head's part of a slot is two
// lines far from the next, which no hardware foresees.
template <typename T>
void locate(const Pass& pass, const int32_t* table, int start, int count, const T* pool, int64_t kv_stride,
            const T** keys) {
    const int lines = int(pass.head_dim * sizeof(T) + 63) / 64;
    int block = start / pass.block_size, offset = start % pass.block_size;
    for (int i = 0; i < count; ++i) {
        keys[i] = pool + (int64_t(table[block]) * pass.block_size + offset) * 2 * kv_stride;
        for (int line = 0; line < lines; ++line) {
            __builtin_prefetch((const char*)keys[i] + 64 * line);
            __builtin_prefetch((const char*)(keys[i] + kv_stride) + 64 * line);
        }
        if (++offset == pass.block_size) {
            offset = 0;
            ++block;
        }
    }
}

struct Scratch {
    std::vector<float> keys, queries, outputs;
    std::vector<Row> rows;
};

template <int SLICES, typename T>
void attend_tile(const Pass& pass, const Tile& tile, int kv_head, const T* query, int64_t query_row, int64_t query_head,
                 const T* pool, T* output) {
    constexpr int CHUNK = SLICES * SLICE;
    static thread_local Scratch scratch;
    const int head_dim = pass.head_dim, group = pass.num_heads / pass.num_kv_heads;
    const int num_rows = (tile.last - tile.first) * group;
    scratch.keys.resize(size_t(head_dim) * CHUNK);
    scratch.queries.resize(size_t(num_rows) * head_dim);
    scratch.outputs.assign(size_t(num_rows) * head_dim, 0.0f);
    scratch.rows.resize(num_rows);
    const int64_t first_row = pass.cu_query_lens[tile.seq];
    int nearest = INT32_MAX, farthest = 0;
    for (int r = 0; r < num_rows; ++r) {
        const int token = tile.first + r / group, head = kv_head * group + r % group;
        Row& row = scratch.rows[r];
        float* copy = scratch.queries.data() + size_t(r) * head_dim;
        const T* from = query + (first_row + token) * query_row + head * query_head;
        for (int d = 0; d < head_dim; ++d) copy[d] = to_float(from[d]);
        row.query = copy;
        row.output = scratch.outputs.data() + size_t(r) * head_dim;
        row.max = pass.sinks ? pass.sinks[head] : -INFINITY;
        row.sum = pass.sinks ? 1.0f : 0.0f;
        row.last = pass.context_lens[tile.seq] + token;
        row.first = pass.window > 0 ? std::max(0, row.last - pass.window + 1) : 0;
        nearest = std::min(nearest, row.first);
        farthest = std::max(farthest, row.last);
    }
    const int32_t* table = pass.page_table + tile.seq * pass.table_stride;
    const int64_t kv_stride = int64_t(pass.num_kv_heads) * head_dim;
    const T *located[2][CHUNK], *values[CHUNK];
    const auto locate_chunk = [&](int start) {
        if (start <= farthest)
            locate(pass, table, start, std::min(CHUNK, farthest - start + 1), pool + kv_head * head_dim, kv_stride,
                   located[start / CHUNK % 2]);
    };
    locate_chunk(nearest / CHUNK * CHUNK);
    for (int start = nearest / CHUNK * CHUNK; start <= farthest; start += CHUNK) {
        const int count = std::min(CHUNK, farthest - start + 1);
        locate_chunk(start + CHUNK);
        const T* const* keys = located[start / CHUNK % 2];
        for (int i = 0; i < count; ++i) values[i] = keys[i] + kv_stride;
        for (int slice = 0; slice * SLICE < count; ++slice)
            transpose_keys(keys + slice * SLICE, std::min(SLICE, count - slice * SLICE), head_dim,
                           scratch.keys.data() + slice * SLICE * head_dim);
        auto reads = [&](int r) {
            return r < num_rows && scratch.rows[r].last >= start && scratch.rows[r].first < start + CHUNK;
        };
        for (int r = 0; r < num_rows;) {
            if (!reads(r)) {
                ++r;
                continue;
            }
            Row* pair[2] = {&scratch.rows[r], &scratch.rows[r]};
            const int taken = reads(r + 1) ? 2 : 1;
            if (taken == 2) pair[1] = &scratch.rows[r + 1];
            for (int slice = 0; slice * SLICE < count; ++slice) {
                const float* slice_keys = scratch.keys.data() + slice * SLICE * head_dim;
                if (taken == 2)
                    form_scores<2>(pair, slice_keys, head_dim, slice);
                else
                    form_scores<1>({pair[0]}, slice_keys, head_dim, slice);
            }
            for (int i = 0; i < taken; ++i) {
                pair[i]->from = std::max(0, pair[i]->first - start);
                pair[i]->to = std::min(CHUNK, pair[i]->last - start + 1);
                update_softmax<SLICES>(*pair[i], pass.scaling, pass.softcap, head_dim);
            }
            // Each row adds the keys that it reads, in order; those that both read, together.
            const int from = std::max(pair[0]->from, pair[1]->from);
            const int to = std::max(from, std::min(pair[0]->to, pair[1]->to));
            for (int i = 0; i < taken; ++i)
                add_values<1>({pair[i]}, values, pair[i]->from, std::min(from, pair[i]->to), head_dim, 0);
            if (taken == 2)
                add_values<2>(pair, values, from, to, head_dim, 0);
            else
                add_values<1>({pair[0]}, values, from, to, head_dim, 0);
            for (int i = 0; i < taken; ++i)
                add_values<1>({pair[i]}, values, std::max(to, pair[i]->from), pair[i]->to, head_dim, 0);
            r += taken;
        }
    }
    for (int r = 0; r < num_rows; ++r) {
        const Row& row = scratch.rows[r];
        const int token = tile.first + r / group, head = kv_head * group + r % group;
        T* to = output + ((first_row + token) * pass.num_heads + head) * head_dim;
        for (int d = 0; d < head_dim; ++d) from_float(row.output[d] / row.sum, to + d);
    }
}

template <typename T>
void attend(const Pass& pass, const T* query, int64_t query_row, int64_t query_head, const T* key, int64_t key_row,
            int64_t key_head, const T* value, int64_t value_row, int64_t value_head, T* pool, T* output) {
    const int head_dim = pass.head_dim, group = pass.num_heads / pass.num_kv_heads;
    const int64_t kv_stride = int64_t(pass.num_kv_heads) * head_dim;
    for (int64_t row = 0; row < pass.num_tokens; ++row) {
        T* slot = pool + pass.slot_mapping[row] * 2 * kv_stride;
        for (int64_t head = 0; head < pass.num_kv_heads; ++head) {
            std::memcpy(slot + head * head_dim, key + row * key_row + head * key_head, head_dim * sizeof(T));
            std::memcpy(slot + kv_stride + head * head_dim, value + row * value_row + head * value_head,
                        head_dim * sizeof(T));
        }
    }
    static thread_local std::vector<Tile> list;
    std::vector<Tile>& tiles = list;  // of the thread that called
    tiles.clear();
    const int tokens = std::max(1, MAX_TILE_ROWS / group);
    for (int seq = 0; seq < pass.num_seqs; ++seq) {
        const int count = pass.cu_query_lens[seq + 1] - pass.cu_query_lens[seq];
        for (int first = 0; first < count; first += tokens)
            tiles.push_back({seq, first, std::min(first + tokens, count)});
    }
    const int num_programs = int(tiles.size()) * pass.num_kv_heads;
#pragma omp parallel for schedule(dynamic) num_threads(pass.num_threads) if (pass.num_threads > 1)
    for (int program = 0; program < num_programs; ++program)
        (head_dim <= LONG_HEAD ? attend_tile<2, T> : attend_tile<1, T>)(
            pass, tiles[program / pass.num_kv_heads], program % pass.num_kv_heads, query, query_row, query_head, pool,
            output);
    const int64_t row_size = int64_t(pass.num_heads) * head_dim;
    std::memset(output + pass.num_tokens * row_size, 0, (pass.num_rows - pass.num_tokens) * row_size * sizeof(T));
}

}  // namespace

// query [num_rows, Hq, D], key and value [num_rows, Hkv, D]: strides in elements, D contiguous.
// pool [P * S, 2, Hkv, D] and output [num_rows, Hq, D]: contiguous. Rows from num_tokens on are filler: zeros.
#undef DEFINE
#define DEFINE(NAME, TYPE)                                                                                             \
    extern "C" void NAME(const Pass* pass, const void* query, int64_t query_row, int64_t query_head, const void* key, \
                         int64_t key_row, int64_t key_head, const void* value, int64_t value_row, int64_t value_head, \
                         void* pool, void* output) {                                                                   \
        attend(*pass, (const TYPE*)query, query_row, query_head, (const TYPE*)key, key_row, key_head,                  \
               (const TYPE*)value, value_row, value_head, (TYPE*)pool, (TYPE*)output);                                 \
    }

DEFINE(paged_attention_float32, float)
DEFINE(paged_attention_bfloat16, bfloat16)
