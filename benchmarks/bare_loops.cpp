// What one thread reads and multiplies at its best, with nothing else to do: see bare_loops.py.

#include "../kernels/specpaged_kernels/cpu/vectors.h"

namespace {

constexpr int STREAMS = 4;  // that are read side by side: of fewer the hardware fetches less in advance
constexpr int LINE = 64 / sizeof(float), PER_LINE = LINE / WIDE;
constexpr int SUMS = 12;  // of products: as many as a multiplication's duration takes

float sum_of(const Wides* sums, int count) {
    float total = 0;
    for (int i = 0; i < count; ++i)
        for (int lane = 0; lane < WIDE; ++lane) total += sums[i][lane];
    return total;
}

}  // namespace

// The sum of `count` floats, a multiple of STREAMS * LINE, read `times` over.
extern "C" float read_floats(const float* from, int64_t count, int64_t times) {
    Wides sums[STREAMS * PER_LINE] = {};
    const int64_t of_stream = count / STREAMS;
    for (; times > 0; --times)
        for (int64_t i = 0; i < of_stream; i += LINE)
            for (int stream = 0; stream < STREAMS; ++stream) {
                const float* line = from + stream * of_stream + i;
                for (int v = 0; v < PER_LINE; ++v) sums[stream * PER_LINE + v] += load_wide(line + v * WIDE);
            }
    return sum_of(sums, STREAMS * PER_LINE);
}

// Multiplies and adds `times` over; how many operations that were goes to `flops`, two for each product.
extern "C" float multiply_floats(int64_t times, int64_t* flops) {
    Wides sums[SUMS];
    for (Wides& sum : sums) sum = in_register(Wides{});  // a compiler must not see that they are alike
    const Wides factor = in_register(splat_wide(0.5f)), other = in_register(splat_wide(1e-3f));
    for (int64_t i = 0; i < times; ++i)
        for (Wides& sum : sums) sum = fma_wide(factor, other, sum);
    *flops = 2 * times * SUMS * WIDE;
    return sum_of(sums, SUMS);
}
