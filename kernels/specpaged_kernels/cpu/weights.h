// What tokens weigh: floor(2^40 e^(x - largest)), integers, whose sums have no order.

#pragma once

#include "vectors.h"

namespace {

typedef int32_t WideInts __attribute__((vector_size(WIDE * 4)));

// e^x for x <= 0, operation by operation as specpaged.sampling.elementwise.exp_fp32; below -87 that of -87, which weighs
// nothing either.
template <typename Vector>
Vector exp_rounded(Vector x) {
    typedef decltype(x < x) Integers;
    const auto splat = [](float value) { return value - Vector{}; };
    const Vector lowest = splat(-87.0f), magic = splat(12582912.0f);  // as in `exp`
    Vector r = x > lowest ? x : lowest;
    const Vector shifted = r * splat(1.44269504f) + magic, n = shifted - magic;
    r = r - n * splat(0.693359375f);
    r = r - n * splat(-2.12194440e-4f);
    Vector y = r * splat(1.9875691500e-4f);
    y = (y + splat(1.3981999507e-3f)) * r;
    y = (y + splat(8.3334519073e-3f)) * r;
    y = (y + splat(4.1665795894e-2f)) * r;
    y = (y + splat(1.6666665459e-1f)) * r;
    y = (y + splat(0.5f)) * r * r + r + splat(1.0f);
    return (Vector)((Integers)y + ((Integers)shifted << 23));  // the last bits of `shifted` are n
}

inline Floats weights_of(Floats behind) { return exp_rounded(behind) * splat(0x1p40f); }

// Weights of lanes, in two parts of 20 bits: there are no conversions to 64.
struct Parts {
    WideInts high, low;

    explicit Parts(Wides exps) {
        const Wides unit = splat_wide(0x1p20f), scaled = exps * unit;
        high = __builtin_convertvector(scaled, WideInts);
        low = __builtin_convertvector((scaled - __builtin_convertvector(high, Wides)) * unit, WideInts);
    }
    explicit Parts(int32_t each) : high{}, low(each - WideInts{}) {}
};

class Sum {
public:
    static constexpr int MOST = 2047;  // that are added before they settle

    void add(const Parts& parts, WideInts where) {
        high_ += parts.high & where;
        low_ += parts.low & where;
    }

    void settle() {
        for (int lane = 0; lane < WIDE; ++lane) total_ += (int64_t(high_[lane]) << 20) + low_[lane];
        high_ = low_ = WideInts{};
    }

    int64_t total() {
        settle();
        return total_;
    }

private:
    WideInts high_ = {}, low_ = {};
    int64_t total_ = 0;
};

}  // namespace
