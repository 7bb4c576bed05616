// A whole pass of a decoder in one call, and several of them: the operations of the other files, one after the other.
//
// What a pass costs beyond its matrix products and its attention is the calls between them; here there is one.

#include <algorithm>
#include <numeric>
#include <optional>
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
};

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

// The places that idx [count] have in rows, which ascend and hold them all.
inline std::vector<int64_t> places(const std::vector<int64_t>& rows, const int64_t* idx, int64_t count) {
    std::vector<int64_t> found(idx, idx + count);
    for (int64_t& row : found) row = std::lower_bound(rows.begin(), rows.end(), row) - rows.begin();
    return found;
}

// pools: by layer [P * S, 2, Hkv, D]; hidden_states may be null.
template <typename T>
void forward(const Decoder& decoder, Pass pass, void* const* pools, const int64_t* token_ids,
             const int64_t* positions, const int64_t* logits_idx, int64_t num_logits, T* logits,
             const HiddenStates* hidden_states) {
    const int64_t hidden = decoder.hidden_size, inner = decoder.intermediate_size, head_dim = decoder.head_dim;
    const int64_t q_size = decoder.num_heads * head_dim, qkv_size = q_size + 2 * decoder.num_kv_heads * head_dim;
    const int threads = int(pass.num_threads);
    int64_t num_rows = pass.num_rows;
    // The rows that the last layer runs for behind its attention: from there on, no row is another one's concern.
    const bool all_rows = !logits_idx && num_logits == num_rows;
    const bool wants_last = hidden_states && hidden_states->last;
    std::vector<int64_t> output_rows(logits_idx, logits_idx + (all_rows ? 0 : num_logits));
    if (wants_last && !all_rows) {
        output_rows.insert(output_rows.end(), hidden_states->rows, hidden_states->rows + hidden_states->num_rows);
        std::sort(output_rows.begin(), output_rows.end());
        output_rows.erase(std::unique(output_rows.begin(), output_rows.end()), output_rows.end());
    }
    const int64_t num_outputs = all_rows ? num_rows : int64_t(output_rows.size());
    const int64_t most_rows = std::max(num_rows, num_outputs);
    std::vector<T> x(size_t(num_rows * hidden)), normed(size_t(most_rows * hidden)), added(normed.size());
    std::vector<T> qkv(size_t(num_rows * qkv_size)), attended(size_t(num_rows * q_size));
    std::vector<T> gates(size_t(most_rows * 2 * inner)), through(size_t(most_rows * inner));
    std::vector<float> cosine, sine;

    const auto apply = [&](const std::vector<T>& from, const Weight& weight, const void* bias, int64_t in, int64_t out,
                           T* to) {
        linear(from.data(), in, num_rows, weight, (const T*)bias, in, out, to, threads);
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

    const auto embed = [&](const auto* embedding) {
        for (int64_t row = 0; row < num_rows; ++row)
            for (int64_t i = 0; i < hidden; ++i)
                from_float(to_float(embedding[token_ids[row] * hidden + i]) * decoder.embedding_multiplier,
                           &x[size_t(row * hidden + i)]);
    };
    if (decoder.embedding_storage == BFLOAT16) embed((const bfloat16*)decoder.embedding);
    else if (decoder.embedding_storage == FLOAT16) embed((const float16*)decoder.embedding);
    else embed((const float*)decoder.embedding);
    for (int64_t layer_idx = 0; layer_idx < decoder.num_layers; ++layer_idx) {
        const Layer& layer = decoder.layers[layer_idx];
        add_and_norm(layer_idx ? added.data() : nullptr, layer.before_attention);
        for (int64_t i = 0; hidden_states && i < hidden_states->num_layers; ++i)
            if (hidden_states->layers[i] == layer_idx)
                gather(x, hidden_states->rows, hidden_states->num_rows, hidden,
                       (T*)hidden_states->layer_inputs + i * hidden_states->num_rows * hidden);
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
        pass.window = layer.window;
        attend(pass, qkv.data(), qkv_size, head_dim, key, qkv_size, head_dim, value, qkv_size, head_dim,
               (T*)pools[layer_idx], attended.data());
        if (layer_idx + 1 == decoder.num_layers && num_outputs == 0) return;
        if (layer_idx + 1 == decoder.num_layers && !all_rows) {
            x = gather(x, output_rows, hidden);
            attended = gather(attended, output_rows, q_size);
            num_rows = num_outputs;
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
    if (wants_last) {
        const int64_t *rows = hidden_states->rows, count = hidden_states->num_rows;
        T* last = (T*)hidden_states->last;
        if (all_rows) {
            gather(x, rows, count, hidden, last);
        } else {
            gather(x, places(output_rows, rows, count).data(), count, hidden, last);
            normed = gather(normed, places(output_rows, logits_idx, num_logits), hidden);
            num_rows = num_logits;
            if (num_logits == 0) return;
        }
    }
    apply(normed, decoder.output, nullptr, hidden, decoder.vocab_size, logits);
}

struct Step {
    Pass call;
    const int64_t *positions, *logits_idx;  // [num_rows]; [num_logits], or null where that is all rows
    const int64_t* source_idx;              // [num_rows]: the logits of the step before that a row continues; null: row
    int64_t num_logits;
    int64_t* token_ids;                     // [num_logits]: found, the most likely ones
    float* logprobs;                        // [num_logits]: found, their log-softmax
};

// Whether all indices of a pass lie in their tables; token_ids may be null, where they are a pass's own.
inline int outside(const Decoder& decoder, const Pass& pass, const int64_t* token_ids, const int64_t* positions,
                   const int64_t* logits_idx, int64_t num_logits, const HiddenStates* hidden_states) {
    const int status = outside(pass);
    if (status != OK) return status;
    if (token_ids && !all_below(token_ids, pass.num_rows, decoder.vocab_size)) return TOKEN_IDS;
    if (!all_below(positions, pass.num_rows, decoder.num_positions)) return POSITIONS;
    if (logits_idx && !all_below(logits_idx, num_logits, pass.num_rows)) return LOGITS_IDX;
    if (!hidden_states) return OK;
    if (!all_below(hidden_states->rows, hidden_states->num_rows, pass.num_rows)) return HIDDEN_IDX;
    if (!all_below(hidden_states->layers, hidden_states->num_layers, decoder.num_layers)) return LAYER_INPUTS;
    return OK;
}

// Where the largest of values [size] is; of equals the first, 0 where all are -inf. NaN is passed over.
template <typename T>
int64_t largest(const T* values, int64_t size) {
    Floats best = splat(-INFINITY);  // of each lane
    Ints starts = {};                // of the vector that it comes from
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const Floats x = load(values + i);
        const Ints more = x > best;
        best = more ? x : best;
        starts = more ? Ints{} + int32_t(i) : starts;
    }
    float most = -INFINITY;
    int64_t found = 0;
    for (int lane = 0; lane < LANES; ++lane) {
        const int64_t idx = starts[lane] + lane;
        if (best[lane] > most || (best[lane] == most && idx < found)) {
            most = best[lane];
            found = idx;
        }
    }
    for (; i < size; ++i)
        if (to_float(values[i]) > most) {
            most = to_float(values[i]);
            found = i;
        }
    return found;
}

// The log-softmax of the largest of logits [size].
template <typename T>
float largest_logprob(const T* logits, int64_t size, float largest) {
    Floats sums = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) sums += exp(load(logits + i) - splat(largest));
    float total = sum(sums);
    for (; i < size; ++i) total += exp(to_float(logits[i]) - largest);
    return -std::log(total);
}

// No step follows that is not worth its time. Chance i: that all tokens found so far stand, from rule row i on, which
// is row i of the first step's logits. The next step is worth it while the sum over its rows of
// max(0, chance * expected - row_tokens) is above pass_tokens.
struct StopRule {
    double slope, row_tokens, pass_tokens;
    const double* intercepts;  // [num_intercepts] by step; the last one serves for all further ones
    int64_t num_intercepts;
    const double *leads, *expected;  // [num_rows]
    int64_t num_rows;
};

class Stopping {
public:
    explicit Stopping(const StopRule& rule)
        : rule(rule), chances(size_t(rule.num_rows), 1.0), owners(size_t(rule.num_rows)) {
        std::iota(owners.begin(), owners.end(), 0);
    }

    // Whether step s + 1 is worth it, now that step s is done.
    bool goes_on(const Step* steps, int64_t s) {
        const double intercept = rule.intercepts[std::min(s, rule.num_intercepts - 1)];
        for (size_t row = 0; row < owners.size(); ++row) {
            const int64_t owner = owners[row];
            const double x = logit(double(steps[s].logprobs[row]));
            const double value = rule.slope * x + intercept + rule.leads[owner];
            chances[size_t(owner)] *= x == x ? 1.0 / (1.0 + std::exp(-value)) : 0.0;
        }
        const Step& next = steps[s + 1];
        std::vector<int64_t> going(size_t(next.call.num_rows)), found(size_t(next.num_logits));
        for (size_t row = 0; row < going.size(); ++row)
            going[row] = owners[size_t(next.source_idx ? next.source_idx[row] : int64_t(row))];
        double gain = 0.0;
        for (const int64_t owner : going)
            gain += std::max(0.0, chances[size_t(owner)] * rule.expected[owner] - rule.row_tokens);
        for (size_t row = 0; row < found.size(); ++row)
            found[row] = going[size_t(next.logits_idx ? next.logits_idx[row] : int64_t(row))];
        owners.swap(found);
        return gain > rule.pass_tokens;
    }

private:
    // log(p / (1 - p)) of the logarithm of p, cut off at +-6; NaN of NaN.
    static double logit(double logprob) {
        if (logprob != logprob) return logprob;
        const double p = std::exp(std::min(0.0, logprob));
        if (!(p > 0.00248 && p < 0.99752)) return p < 0.5 ? -6.0 : 6.0;
        return std::log(p / (1.0 - p));
    }

    const StopRule& rule;
    std::vector<double> chances;
    std::vector<int64_t> owners;  // of the rows of logits of the last step: rows of the rule
};

// Each step runs the most likely tokens of the step before; the first one runs token_ids. With a rule there may be
// fewer than num_steps: num_done says how many.
template <typename T>
int greedy_steps(const Decoder& decoder, const Step* steps, int64_t num_steps, void* const* pools,
                 const int64_t* token_ids, int64_t num_ids, const StopRule* rule, int64_t* num_done) {
    if (num_ids < 1 || num_ids > decoder.vocab_size) return VOCAB_SIZE;
    if (rule && (rule->num_intercepts < 1 || num_steps < 1 || rule->num_rows > steps[0].num_logits)) return SOURCE_IDX;
    for (int64_t s = 0; s < num_steps; ++s) {
        const Step& step = steps[s];
        const int64_t num_rows = step.call.num_rows;
        const int64_t num_sources = s == 1 && rule ? rule->num_rows : s ? steps[s - 1].num_logits : num_rows;
        if (step.source_idx ? !all_below(step.source_idx, num_rows, num_sources) : num_rows != num_sources)
            return SOURCE_IDX;
        const int status = outside(decoder, step.call, s ? nullptr : token_ids, step.positions, step.logits_idx,
                                   step.num_logits, nullptr);
        if (status != OK) return status;
    }
    std::vector<int64_t> continued;
    std::vector<T> logits;
    std::optional<Stopping> stopping;
    if (rule) stopping.emplace(*rule);
    *num_done = num_steps;
    for (int64_t s = 0; s < num_steps; ++s) {
        const Step& step = steps[s];
        if (s) {
            const Step& before = steps[s - 1];
            const int64_t num_rows = step.call.num_rows, *source_idx = step.source_idx;
            continued.resize(size_t(num_rows));
            for (int64_t row = 0; row < num_rows; ++row)
                continued[size_t(row)] = before.token_ids[source_idx ? source_idx[row] : row];
            token_ids = continued.data();
        }
        logits.resize(size_t(step.num_logits * decoder.vocab_size));
        forward(decoder, step.call, pools, token_ids, step.positions, step.logits_idx, step.num_logits, logits.data(),
                nullptr);
        for (int64_t row = 0; row < step.num_logits; ++row) {
            const T* values = logits.data() + row * decoder.vocab_size;
            const int64_t best = largest(values, num_ids);
            step.token_ids[row] = best;
            step.logprobs[row] = largest_logprob(values, num_ids, to_float(values[best]));
        }
        if (stopping && s + 1 < num_steps && !stopping->goes_on(steps, s)) {
            *num_done = s + 1;
            return OK;
        }
    }
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
    }                                                                                                                 \
    extern "C" int greedy_steps_##SUFFIX(const Decoder* decoder, const Step* steps, int64_t num_steps,                \
                                         void* const* pools, const int64_t* token_ids, int64_t num_ids,               \
                                         const StopRule* rule, int64_t* num_done) {                                   \
        return guarded([&] {                                                                                          \
            return greedy_steps<TYPE>(*decoder, steps, num_steps, pools, token_ids, num_ids, rule, num_done);         \
        });                                                                                                           \
    }

DEFINE(float32, float)
DEFINE(bfloat16, bfloat16)
