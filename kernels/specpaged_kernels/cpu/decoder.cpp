// A whole pass of a decoder in one call, and several of them: the operations of the other files, one after the other.
//
// What a pass costs beyond its matrix products and its attention is the calls between them; here there is one.

#include <algorithm>
#include <vector>

#include "linear.cpp"
#include "paged_attention.cpp"
#include "rowwise.cpp"

namespace {

struct Layer {
    // Packed weights and biases (or null), in the model's dtype.
    const void *qkv, *qkv_bias, *o, *o_bias, *gate_up, *gate_up_bias, *down, *down_bias;
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
    const void *embedding, *output;  // [V, H] and packed
    const float* final_norm;
};

template <typename T>
std::vector<T> gather(const std::vector<T>& rows, const int64_t* idx, int64_t count, int64_t size) {
    std::vector<T> taken(size_t(count * size));
    for (int64_t i = 0; i < count; ++i)
        std::memcpy(taken.data() + i * size, rows.data() + idx[i] * size, size * sizeof(T));
    return taken;
}

inline bool all_below(const int64_t* values, int64_t count, int64_t end) {
    return std::all_of(values, values + count, [end](int64_t value) { return value >= 0 && value < end; });
}

// pools: by layer [P * S, 2, Hkv, D].
template <typename T>
void forward(const Decoder& decoder, Pass pass, void* const* pools, const int64_t* token_ids,
             const int64_t* positions, const int64_t* logits_idx, int64_t num_logits, T* logits) {
    const int64_t hidden = decoder.hidden_size, inner = decoder.intermediate_size, head_dim = decoder.head_dim;
    const int64_t q_size = decoder.num_heads * head_dim, qkv_size = q_size + 2 * decoder.num_kv_heads * head_dim;
    const int threads = pass.num_threads;
    int64_t num_rows = pass.num_rows;
    const int64_t most_rows = std::max(num_rows, num_logits);
    std::vector<T> x(size_t(num_rows * hidden)), normed(size_t(most_rows * hidden)), added(normed.size());
    std::vector<T> qkv(size_t(num_rows * qkv_size)), attended(size_t(num_rows * q_size));
    std::vector<T> gates(size_t(most_rows * 2 * inner)), through(size_t(most_rows * inner));
    std::vector<float> cosine, sine;

    const auto apply = [&](const std::vector<T>& from, const void* weight, const void* bias, int64_t in, int64_t out,
                           T* to) {
        linear(from.data(), in, num_rows, (const T*)weight, (const T*)bias, in, out, to, threads);
    };
    const auto add_and_norm = [&](const T* more, const float* weight) {
        rms_norm(x.data(), hidden, more, decoder.residual_multiplier, weight, decoder.eps, num_rows, hidden,
                 normed.data());
    };
    const auto norm_added = [&](const float* weight) {  // what some families do before they add
        if (!weight) return;
        rms_norm(added.data(), hidden, (const T*)nullptr, 1.0f, weight, decoder.eps, num_rows, hidden, normed.data());
        std::swap(added, normed);
    };

    const T* embedding = (const T*)decoder.embedding;
    for (int64_t row = 0; row < num_rows; ++row)
        for (int64_t i = 0; i < hidden; ++i)
            from_float(to_float(embedding[token_ids[row] * hidden + i]) * decoder.embedding_multiplier,
                       &x[size_t(row * hidden + i)]);
    for (int64_t layer_idx = 0; layer_idx < decoder.num_layers; ++layer_idx) {
        const Layer& layer = decoder.layers[layer_idx];
        add_and_norm(layer_idx ? added.data() : nullptr, layer.before_attention);
        apply(normed, layer.qkv, layer.qkv_bias, hidden, qkv_size, qkv.data());
        const int64_t half = layer.cosine ? layer.rope_half : 0;
        cosine.resize(size_t(num_rows * half));
        sine.resize(cosine.size());
        for (int64_t row = 0; row < num_rows; ++row) {
            std::copy_n(layer.cosine + positions[row] * half, half, cosine.data() + row * half);
            std::copy_n(layer.sine + positions[row] * half, half, sine.data() + row * half);
        }
        norm_and_rotate(qkv.data(), qkv_size, layer.heads, decoder.eps, cosine.data(), sine.data(), half, num_rows,
                        decoder.num_heads + decoder.num_kv_heads, head_dim);
        const T* key = qkv.data() + q_size;
        const T* value = key + decoder.num_kv_heads * head_dim;
        pass.window = int(layer.window);
        attend(pass, qkv.data(), qkv_size, head_dim, key, qkv_size, head_dim, value, qkv_size, head_dim,
               (T*)pools[layer_idx], attended.data());
        if (layer_idx + 1 == decoder.num_layers && num_logits == 0) return;
        if (layer_idx + 1 == decoder.num_layers && logits_idx) {  // from here on, no row is another one's concern
            x = gather(x, logits_idx, num_logits, hidden);
            attended = gather(attended, logits_idx, num_logits, q_size);
            num_rows = num_logits;
        }
        apply(attended, layer.o, layer.o_bias, q_size, hidden, added.data());
        norm_added(layer.after_attention);
        add_and_norm(added.data(), layer.before_mlp);
        apply(normed, layer.gate_up, layer.gate_up_bias, hidden, 2 * inner, gates.data());
        if (decoder.gelu)
            gate<gelu_tanh>(gates.data(), num_rows, inner, through.data());
        else
            gate<silu>(gates.data(), num_rows, inner, through.data());
        apply(through, layer.down, layer.down_bias, inner, hidden, added.data());
        norm_added(layer.after_mlp);
    }
    add_and_norm(added.data(), decoder.final_norm);
    apply(normed, decoder.output, nullptr, hidden, decoder.vocab_size, logits);
}

struct Step {
    Pass call;
    const int64_t *positions, *logits_idx;  // [num_rows]; [num_logits], or null where that is all rows
    const int64_t* kept;                    // [num_rows]: rows of what the step before has found; null: all
    int64_t num_logits;
    int64_t* found;                         // [num_logits]: the most likely token ids
};

inline int outside(const Decoder& decoder, const Pass& pass, const int64_t* token_ids, const int64_t* positions,
                   const int64_t* logits_idx, int64_t num_logits) {
    if (!all_below(token_ids, pass.num_rows, decoder.vocab_size)) return 1;
    if (!all_below(positions, pass.num_rows, decoder.num_positions)) return 2;
    if (logits_idx && !all_below(logits_idx, num_logits, pass.num_rows)) return 3;
    return 0;
}

// Each step runs what the step before has found; the first one runs token_ids.
template <typename T>
int greedy_steps(const Decoder& decoder, const Step* steps, int64_t num_steps, void* const* pools,
                 const int64_t* token_ids, int64_t num_ids) {
    if (num_ids < 1 || num_ids > decoder.vocab_size) return 5;
    std::vector<int64_t> taken;
    std::vector<T> logits;
    for (int64_t s = 0; s < num_steps; ++s) {
        const Step& step = steps[s];
        if (s) {
            const int64_t *found = steps[s - 1].found, num_found = steps[s - 1].num_logits;
            if (step.kept ? !all_below(step.kept, step.call.num_rows, num_found) : step.call.num_rows != num_found)
                return 4;
            taken.resize(size_t(step.call.num_rows));
            for (size_t row = 0; row < taken.size(); ++row) taken[row] = found[step.kept ? step.kept[row] : row];
            token_ids = taken.data();
        }
        const int problem = outside(decoder, step.call, token_ids, step.positions, step.logits_idx, step.num_logits);
        if (problem) return problem;
        logits.resize(size_t(step.num_logits * decoder.vocab_size));
        forward(decoder, step.call, pools, token_ids, step.positions, step.logits_idx, step.num_logits, logits.data());
        for (int64_t row = 0; row < step.num_logits; ++row) {
            const T* values = logits.data() + row * decoder.vocab_size;
            int64_t best = 0;
            for (int64_t id = 1; id < num_ids; ++id)
                if (to_float(values[id]) > to_float(values[best])) best = id;
            step.found[row] = best;
        }
    }
    return 0;
}

}  // namespace

// token_ids and positions [num_rows]; logits_idx [num_logits], or null where that is all rows; logits [num_logits, V].
// Returns 0, or which index leads outside of its table: 1 a token id, 2 a position, 3 an entry of logits_idx, 4 of kept,
// 5 the number of ids to choose from.
#undef DEFINE
#define DEFINE(SUFFIX, TYPE)                                                                                          \
    extern "C" int decoder_##SUFFIX(const Decoder* decoder, const Pass* pass, void* const* pools,                     \
                                    const int64_t* token_ids, const int64_t* positions, const int64_t* logits_idx,    \
                                    int64_t num_logits, void* logits) {                                               \
        const int problem = outside(*decoder, *pass, token_ids, positions, logits_idx, num_logits);                   \
        if (!problem) forward(*decoder, *pass, pools, token_ids, positions, logits_idx, num_logits, (TYPE*)logits);   \
        return problem;                                                                                               \
    }                                                                                                                 \
    extern "C" int greedy_steps_##SUFFIX(const Decoder* decoder, const Step* steps, int64_t num_steps,                \
                                         void* const* pools, const int64_t* token_ids, int64_t num_ids) {             \
        return greedy_steps<TYPE>(*decoder, steps, num_steps, pools, token_ids, num_ids);                             \
    }

DEFINE(float32, float)
DEFINE(bfloat16, bfloat16)
