// Suffix decoding (G. Oliaro et al., "SuffixDecoding", 2411.04975): what mostly followed a sequence's newest tokens,
// where they stood before in its own text, or in those of others that have ended. See drafting/suffix.py.
//
// The paper counts in trees of suffixes. Here a text is an array, and of each place the one before behind the same 1, 2,
// 4 and 8 tokens is known: the newest places behind the longest suffixes are found along these chains, and what follows
// is counted there. Behind "b c" in  a b c d  b c e  b c e  b c, if no longer suffix is looked for:
//
//     places   3 6 9     d e e       ->   e, 2 of 3; then of the places 6 and 9 the next: b, 2 of 2; c, 2 of 2; ..
//
// Texts that are forgotten are the oldest; now and then the array is made anew without them.

#pragma once

#include <cmath>
#include <deque>

#include "lookup.h"
#include "status.h"

namespace {

constexpr int NEWEST = 32;  // places of a chain that are looked at
constexpr int64_t MOST_TOKENS = 1 << 22;  // of all texts that have ended, at some 60 bytes each
constexpr int64_t NO_TOKEN = -1;  // between two texts

// A place, and how many tokens before it are those that are asked for.
struct Place {
    int32_t at, length;
};

class Texts {
public:
    Texts() {
        for (int64_t n = 1; n <= 8; n *= 2) places_.emplace_back(n);
        before_.resize(places_.size());
    }

    int64_t size() const { return int64_t(tokens_.size()); }
    const std::vector<int64_t>& tokens() const { return tokens_; }

    void append(int64_t token) {
        const int64_t end = size();
        tokens_.push_back(token);
        for (size_t i = 0; i < places_.size(); ++i)
            before_[i].push_back(token != NO_TOKEN && end - begins_ >= places_[i].n ? places_[i].put(tokens_, end) : 0);
        if (token == NO_TOKEN) begins_ = size();
    }

    // One more, that has ended. Of all, `most` are kept, or as many as have MOST_TOKENS; where there is no memory, none.
    void add(const int64_t* token_ids, int64_t count, size_t most) {
        try {
            add_to_others(token_ids, count, most);
        } catch (...) {
            *this = Texts();
            throw;
        }
    }

    // The newest places behind the longest suffixes of the tokens before `end`, of which so many may be read.
    std::vector<Place> places(const int64_t* end, int64_t most) const {
        std::vector<Place> found;
        int64_t longer = most + 1;  // what is as long was found along a chain before
        for (size_t i = places_.size(); i-- > 0;) {
            const int64_t n = places_[i].n;
            if (n > most) continue;
            int32_t at = places_[i].newest(tokens_, end - n);
            for (int num = 0; at > first_ && num < NEWEST; at = before_[i][size_t(at)], ++num) {
                int64_t length = n;
                while (length < most && at - length > first_ && tokens_[size_t(at - length - 1)] == end[-length - 1])
                    ++length;
                if (length < longer && at - n >= first_) found.push_back({at, int32_t(length)});
            }
            longer = n;
        }
        return found;
    }

private:
    void add_to_others(const int64_t* token_ids, int64_t count, size_t most) {
        ends_.push_back(size() + count + 1);
        for (int64_t i = 0; i < count; ++i) append(token_ids[i]);
        append(NO_TOKEN);
        while (ends_.size() > most || (size() - first_ > MOST_TOKENS && ends_.size() > 1)) {
            first_ = ends_.front();
            ends_.pop_front();
        }
        if (2 * first_ > size()) compact();
    }

    void compact() {
        Texts kept;
        for (int64_t i = first_; i < size(); ++i) kept.append(tokens_[size_t(i)]);
        for (const int64_t end : ends_) kept.ends_.push_back(end - first_);
        std::swap(*this, kept);
    }

    std::vector<int64_t> tokens_;
    std::vector<Places> places_;
    std::vector<std::vector<int32_t>> before_;  // [n][place]: the place before, behind the same n tokens; or 0
    std::deque<int64_t> ends_;                  // of the texts that are kept
    int64_t first_ = 0, begins_ = 0;            // of what is kept, and of the newest text
};

// Drafts, and how likely each one is where all before it stand: counted, and as `evidence` has it.
struct Speculation {
    std::vector<int64_t> drafts;
    std::vector<float> evidence;
    double score = 0.0;  // the number of drafts that are expected to stand
};

class Speculator {
public:
    Speculator(double max_factor, double min_probability) : max_factor_(max_factor), min_probability_(min_probability) {}

    // The better of `best` and what these places of a text say. Behind a match of m tokens, m * max_factor may follow.
    void improve(const Texts& texts, std::vector<Place> places, int64_t count, Speculation* best) const {
        std::stable_sort(places.begin(), places.end(), [](Place a, Place b) { return a.length > b.length; });
        for (size_t last = 0; last < places.size(); ++last) {
            if (last + 1 < places.size() && places[last + 1].length == places[last].length) continue;
            const int64_t budget = int64_t(std::min(double(count), places[last].length * max_factor_));
            if (double(budget) <= best->score) break;  // nor can those of shorter matches be better
            Speculation found = follow(texts, {places.begin(), places.begin() + int64_t(last) + 1}, budget);
            if (found.score > best->score) *best = std::move(found);
        }
    }

private:
    // From places on, along the token that is most often next, and of equals the one that is next at the first place.
    Speculation follow(const Texts& texts, std::vector<Place> places, int64_t count) const {
        Speculation found;
        const std::vector<int64_t>& tokens = texts.tokens();
        std::vector<int64_t> next;
        double chance = 1.0;
        for (int64_t depth = 0; depth < count; ++depth) {
            next.clear();
            for (const Place& place : places)
                next.push_back(place.at + depth < texts.size() ? tokens[size_t(place.at + depth)] : NO_TOKEN);
            int64_t most = 0, token = NO_TOKEN;
            for (size_t i = 0; i < next.size(); ++i) {
                if (next[i] == NO_TOKEN || std::find(next.begin(), next.begin() + int64_t(i), next[i]) !=
                                               next.begin() + int64_t(i))
                    continue;  // counted
                const int64_t num = std::count(next.begin() + int64_t(i), next.end(), next[i]);
                if (num > most) most = num, token = next[i];
                if (2 * most >= int64_t(next.size())) break;
            }
            if (!most) break;
            chance *= double(most) / double(places.size());
            if (chance < min_probability_) break;
            found.drafts.push_back(token);
            found.evidence.push_back(float(std::log(double(most) / double(places.size() + 1))));
            found.score += chance;
            size_t kept = 0;
            for (size_t i = 0; i < places.size(); ++i)
                if (next[i] == token) places[kept++] = places[i];
            places.resize(kept);
        }
        return found;
    }

    double max_factor_, min_probability_;
};

class SuffixIndex : public Lookup {
public:
    SuffixIndex(const Texts* others, int64_t depth, double max_factor, double min_probability)
        : others_(others), depth_(depth), speculator_(max_factor, min_probability) {}

    int64_t num_tokens() const override { return own_.size(); }

    void append(const int64_t* token_ids, int64_t count) override {
        for (int64_t i = 0; i < count; ++i) own_.append(token_ids[i]);
    }

    int64_t find(int64_t count, int64_t* drafts, float* evidence) const override {
        const int64_t* const end = own_.tokens().data() + own_.size();
        const int64_t most = std::min(depth_, own_.size());
        Speculation best;
        speculator_.improve(own_, own_.places(end, most), count, &best);
        if (others_) speculator_.improve(*others_, others_->places(end, most), count, &best);
        std::copy(best.drafts.begin(), best.drafts.end(), drafts);
        std::copy(best.evidence.begin(), best.evidence.end(), evidence);
        return int64_t(best.drafts.size());
    }

    double logit_of(float evidence) const override { return logit(double(evidence)); }

private:
    Texts own_;
    const Texts* others_;
    int64_t depth_;
    Speculator speculator_;
};

}  // namespace

// Texts that have ended, of which all indexes may draft. Null where there is no memory.
extern "C" void* suffix_texts_new() {
    void* texts = nullptr;
    guarded([&] {
        texts = new Texts();
        return int(OK);
    });
    return texts;
}

extern "C" void suffix_texts_delete(void* texts) { delete (Texts*)texts; }

extern "C" int suffix_texts_add(void* texts, const int64_t* token_ids, int64_t count, int64_t most) {
    return guarded([&] {
        ((Texts*)texts)->add(token_ids, count, size_t(most));
        return int(OK);
    });
}

// `others` are Texts that live as long, or null. Null where there is no memory.
extern "C" void* suffix_index_new(const void* others, int64_t depth, double max_factor, double min_probability) {
    void* index = nullptr;
    guarded([&] {
        index = static_cast<Lookup*>(new SuffixIndex((const Texts*)others, depth, max_factor, min_probability));
        return int(OK);
    });
    return index;
}
