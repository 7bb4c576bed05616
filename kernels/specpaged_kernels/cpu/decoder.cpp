// A whole pass of a decoder in one call: the operations of the other files, one after the other.
//
// What a pass costs beyond its matrix products and its attention is the calls between them; here there is one.

#pragma once

#include <algorithm>
#include <vector>

#include "linear.cpp"
#include "paged_attention.cpp"
#include "rowwise.cpp"

namespace {

struct Layer {
    Weight qkv, o, gate_up, down;
    const void *qkv_bias, *o_bias, *gate_up_bias, *down_bias;  // in the model's dtype, or null
    // Weights of norms, or null; heads [Hq + Hkv, D].
    const float *before_attention, *after_attention, *before_mlp, *after_mlp, *heads;
    const float *cosine, *sine;  // [positions, rope_half], or null: no RoPE
    int64_t rope_half;
    int64_t window;              // 0: none
};

struct Decoder {
    int64_t num_layers, num_positions, vocab_size, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim;
    int64_t gelu;                // 1: GELU by tanh, 0: SiLU
    float eps, residual_multiplier, embedding_multiplier;
    const Layer* layers;
    const void* embedding;       // [V, H]
    int64_t embedding_storage;
    Weight output;
    const float* final_norm;
};

// Hidden states that are asked for: the residual stream of some rows, where it enters some layers and the final norm.
struct HiddenStates {
    const int64_t* rows;          // [num_rows] of the pass
    int64_t num_rows;
    const int64_t* layers;        // [num_layers]
    int64_t num_layers;
    void* layer_inputs;           // [num_layers, num_rows, H]
    void* last;                   // [num_rows, H], or null: not asked for
    int64_t is_normed;            // 1: `last` is what the final norm puts out
};

// What enters the first layer in place of the tokens' embeddings.
template <typename T>
struct Entering {
    std::vector<T> x;       // [N, H]
    std::vector<T> normed;  // [N, any width], or none: the layer's own norm makes it of x
};

// What a pass writes on its way, of the thread that calls. It stays, as large as the largest pass was: the pages of
// memory that is new are zeroed, and what the C library keeps of one model's buffers would be held beside another's.
template <typename T>
struct Workspace {
    std::vector<T> x, normed, added, qkv, attended, gates, through, taken;
    std::vector<float> cosine, sine;
};

// At least so many elements, of any value.
template <typename T>
void fit(std::vector<T>& buffer, int64_t size) {
#ifdef __SANITIZE_ADDRESS__
    if (int64_t(buffer.size()) == size) return;  // so that what is beyond them is found
#else
    if (int64_t(buffer.size()) >= size) return;
#endif
    std::vector<T>().swap(buffer);  // first: both would be the peak
    buffer.resize(size_t(size));
}

template <typename T>
void gather(const std::vector<T>& rows, const int64_t* idx, int64_t count, int64_t size, T* taken) {
    for (int64_t i = 0; i < count; ++i) std::memcpy(taken + i * size, rows.data() + idx[i] * size, size * sizeof(T));
}

template <typename T>
std::vector<T> gather(const std::vector<T>& rows, const std::vector<int64_t>& idx, int64_t size) {
    std::vector<T> taken(idx.size() * size_t(size));
    gather(rows, idx.data(), int64_t(idx.size()), size, taken.data());
    return taken;
}

// The first rows of a buffer are now those of idx.
template <typename T>
void keep(std::vector<T>& rows, const std::vector<int64_t>& idx, int64_t size, std::vector<T>& taken) {
    fit(taken, int64_t(idx.size()) * size);
    gather(rows, idx.data(), int64_t(idx.size()), size, taken.data());
    std::copy_n(taken.begin(), idx.size() * size_t(size), rows.begin());
}

// The places that idx [count] have in rows, which ascend and hold them all.
inline std::vector<int64_t> places(const std::vector<int64_t>& rows, const int64_t* idx, int64_t count) {
    std::vector<int64_t> found(idx, idx + count);
    for (int64_t& row : found) row = std::lower_bound(rows.begin(), rows.end(), row) - rows.begin();
    return found;
}

// The embeddings [count, H] of tokens.
template <typename T>
void embed(const Decoder& decoder, const int64_t* token_ids, int64_t count, T* to) {
    const int64_t hidden = decoder.hidden_size;
    const auto convert = [&](const auto* embedding) {
        for (int64_t row = 0; row < count; ++row)
            for (int64_t i = 0; i < hidden; ++i)
                from_float(to_float(embedding[token_ids[row] * hidden + i]) * decoder.embedding_multiplier,
                           to + row * hidden + i);
    };
    if (decoder.embedding_storage == BFLOAT16) convert((const bfloat16*)decoder.embedding);
    else if (decoder.embedding_storage == FLOAT16) convert((const float16*)decoder.embedding);
    else convert((const float*)decoder.embedding);
}

// pools: by layer [P * S, 2, Hkv, D]; hidden_states and entering may be null.
template <typename T>
void forward(const Decoder& decoder, Pass pass, void* const* pools, const int64_t* token_ids,
             const int64_t* positions, const int64_t* logits_idx, int64_t num_logits, T* logits,
             const HiddenStates* hidden_states, Entering<T>* entering = nullptr) {
    const int64_t hidden = decoder.hidden_size, inner = decoder.intermediate_size, head_dim = decoder.head_dim;
    const int64_t q_size = decoder.num_heads * head_dim, qkv_size = q_size + 2 * decoder.num_kv_heads * head_dim;
    const int threads = int(pass.num_threads);
    int64_t num_rows = pass.num_rows;
    // The rows that the last layer runs for once it has stored its keys and values: from there on, no row is another
    // one's concern.
    const bool all_rows = !logits_idx && num_logits == num_rows;
    const bool wants_last = hidden_states && hidden_states->last;
    std::vector<int64_t> output_rows(logits_idx, logits_idx + (all_rows ? 0 : num_logits));
    if (wants_last && !all_rows) {
        output_rows.insert(output_rows.end(), hidden_states->rows, hidden_states->rows + hidden_states->num_rows);
        std::sort(output_rows.begin(), output_rows.end());
        output_rows.erase(std::unique(output_rows.begin(), output_rows.end()), output_rows.end());
    }
    std::vector<int64_t> attending_rows = output_rows;
    std::sort(attending_rows.begin(), attending_rows.end());
    attending_rows.erase(std::unique(attending_rows.begin(), attending_rows.end()), attending_rows.end());
    const int64_t num_outputs = all_rows ? num_rows : int64_t(output_rows.size());
    const int64_t most_rows = std::max({num_rows, num_outputs, num_logits});
    static thread_local Workspace<T> workspace;
    std::vector<T>&x = workspace.x, &normed = workspace.normed, &added = workspace.added, &qkv = workspace.qkv;
    std::vector<T>&attended = workspace.attended, &gates = workspace.gates, &through = workspace.through;
    std::vector<float>&cosine = workspace.cosine, &sine = workspace.sine;
    for (std::vector<T>* const buffer : {&x, &normed, &added}) fit(*buffer, most_rows * hidden);
    fit(qkv, num_rows * qkv_size);
    fit(attended, most_rows * q_size);
    fit(gates, most_rows * 2 * inner);
    fit(through, most_rows * inner);

    const auto apply = [&](const std::vector<T>& from, const Weight& weight, const void* bias, int64_t in, int64_t out,
                           T* to) {
        linear(from.data(), in, num_rows, weight, (const T*)bias, in, out, to, threads);
    };
    const auto by_rows = [&](const auto& body) { run_by_rows(num_rows, threads, body); };
    const auto norm = [&](std::vector<T>& from, const T* more, float multiplier, const float* weight) {
        by_rows([&](int64_t first, int64_t count) {
            rms_norm(&from[size_t(first * hidden)], hidden, more ? more + first * hidden : nullptr, multiplier, weight,
                     decoder.eps, count, hidden, &normed[size_t(first * hidden)]);
        });
    };
    const auto add_and_norm = [&](const T* more, const float* weight) {
        norm(x, more, decoder.residual_multiplier, weight);
    };
    const auto norm_added = [&](const float* weight) {  // what some families do before they add
        if (!weight) return;
        norm(added, nullptr, 1.0f, weight);
        std::swap(added, normed);
    };

    if (entering) std::copy(entering->x.begin(), entering->x.end(), x.begin());
    else
        by_rows([&](int64_t first, int64_t count) {
            embed(decoder, token_ids + first, count, &x[size_t(first * hidden)]);
        });
    for (int64_t layer_idx = 0; layer_idx < decoder.num_layers; ++layer_idx) {
        const Layer& layer = decoder.layers[layer_idx];
        const bool is_normed = layer_idx == 0 && entering && !entering->normed.empty();
        if (!is_normed) add_and_norm(layer_idx ? added.data() : nullptr, layer.before_attention);
        for (int64_t i = 0; hidden_states && i < hidden_states->num_layers; ++i)
            if (hidden_states->layers[i] == layer_idx)
                gather(x, hidden_states->rows, hidden_states->num_rows, hidden,
                       (T*)hidden_states->layer_inputs + i * hidden_states->num_rows * hidden);
        const std::vector<T>& read = is_normed ? entering->normed : normed;
        const int64_t width = is_normed ? int64_t(read.size()) / num_rows : hidden;
        apply(read, layer.qkv, layer.qkv_bias, width, qkv_size, qkv.data());
        const int64_t half = layer.cosine ? layer.rope_half : 0;
        fit(cosine, num_rows * half);
        fit(sine, num_rows * half);
        by_rows([&](int64_t first, int64_t count) {
            float *const cosines = cosine.data() + first * half, *const sines = sine.data() + first * half;
            for (int64_t i = 0; i < count; ++i) {
                std::copy_n(layer.cosine + positions[first + i] * half, half, cosines + i * half);
                std::copy_n(layer.sine + positions[first + i] * half, half, sines + i * half);
            }
            norm_and_rotate(&qkv[size_t(first * qkv_size)], qkv_size, layer.heads, decoder.eps, cosines, sines, half,
                            count, decoder.num_heads + decoder.num_kv_heads, head_dim);
        });
        const T* key = qkv.data() + q_size;
        const T* value = key + decoder.num_kv_heads * head_dim;
        pass.window = layer.window;
        const bool is_last = layer_idx + 1 == decoder.num_layers;
        attend(pass, pools[layer_idx], (const T*)qkv.data(), qkv_size, head_dim, key, qkv_size, head_dim, value,
               qkv_size, head_dim, attended.data(), is_last && !all_rows ? &attending_rows : nullptr);
        if (is_last && num_outputs == 0) return;
        if (is_last && !all_rows) {
            keep(x, output_rows, hidden, workspace.taken);
            keep(attended, output_rows, q_size, workspace.taken);
            num_rows = num_outputs;
        }
        apply(attended, layer.o, layer.o_bias, q_size, hidden, added.data());
        norm_added(layer.after_attention);
        add_and_norm(added.data(), layer.before_mlp);
        apply(normed, layer.gate_up, layer.gate_up_bias, hidden, 2 * inner, gates.data());
        by_rows([&](int64_t first, int64_t count) {
            const T* from = &gates[size_t(first * 2 * inner)];
            T* to = &through[size_t(first * inner)];
            if (decoder.gelu) gate<gelu_tanh>(from, count, inner, to);
            else gate<silu>(from, count, inner, to);
        });
        apply(through, layer.down, layer.down_bias, inner, hidden, added.data());
        norm_added(layer.after_mlp);
    }
    add_and_norm(added.data(), decoder.final_norm);
    if (wants_last) {
        const int64_t *rows = hidden_states->rows, count = hidden_states->num_rows;
        T* last = (T*)hidden_states->last;
        const std::vector<T>& from = hidden_states->is_normed ? normed : x;
        if (all_rows) {
            gather(from, rows, count, hidden, last);
        } else {
            gather(from, places(output_rows, rows, count).data(), count, hidden, last);
            keep(normed, places(output_rows, logits_idx, num_logits), hidden, workspace.taken);
            num_rows = num_logits;
            if (num_logits == 0) return;
        }
    }
    apply(normed, decoder.output, nullptr, hidden, decoder.vocab_size, logits);
}

// Whether all indices of a pass lie in their tables.
inline int outside(const Decoder& decoder, const Pass& pass, const int64_t* token_ids, const int64_t* positions,
                   const int64_t* logits_idx, int64_t num_logits, const HiddenStates* hidden_states) {
    const int status = outside(pass);
    if (status != OK) return status;
    if (!all_below(token_ids, pass.num_rows, decoder.vocab_size)) return TOKEN_IDS;
    if (!all_below(positions, pass.num_rows, decoder.num_positions)) return POSITIONS;
    if (logits_idx && !all_below(logits_idx, num_logits, pass.num_rows)) return LOGITS_IDX;
    if (!hidden_states) return OK;
    if (!all_below(hidden_states->rows, hidden_states->num_rows, pass.num_rows)) return HIDDEN_IDX;
    if (!all_below(hidden_states->layers, hidden_states->num_layers, decoder.num_layers)) return LAYER_INPUTS;
    return OK;
}

}  // namespace

// token_ids and positions [num_rows]; logits_idx [num_logits], or null where that is all rows; logits [num_logits, V];
// hidden_states may be null. Returns a Status.
#undef DEFINE
#define DEFINE(SUFFIX, TYPE)                                                                                          \
    extern "C" int decoder_##SUFFIX(const Decoder* decoder, const Pass* pass, void* const* pools,                     \
                                    const int64_t* token_ids, const int64_t* positions, const int64_t* logits_idx,    \
                                    int64_t num_logits, void* logits, const HiddenStates* hidden_states) {            \
        return guarded([&] {                                                                                          \
            const int status =                                                                                        \
                outside(*decoder, *pass, token_ids, positions, logits_idx, num_logits, hidden_states);                \
            if (status != OK) return status;                                                                          \
            forward(*decoder, *pass, pools, token_ids, positions, logits_idx, num_logits, (TYPE*)logits,              \
                    hidden_states);                                                                                   \
            return int(OK);                                                                                           \
        });                                                                                                           \
    }

DEFINE(float32, float)
DEFINE(bfloat16, bfloat16)
