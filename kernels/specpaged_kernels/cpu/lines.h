// Scratch memory that begins with a line of the caches.
#pragma once

#include <cstddef>
#include <vector>

namespace {

constexpr int LINE = 64;  // bytes: a vector that lies across two lines is read twice

// Floats, of which there are never fewer again. What they were is lost where they become more.
class Lines {
public:
    float* resized(size_t count) {
        const size_t wanted = count / FLOATS + 1;
        if (lines.size() < wanted) lines = std::vector<Line>(wanted);
        return data();
    }
    float* data() { return lines.data()->values; }
    const float* data() const { return lines.data()->values; }

private:
    static constexpr size_t FLOATS = LINE / sizeof(float);
    struct alignas(LINE) Line {
        float values[FLOATS];
    };
    std::vector<Line> lines;
};

}  // namespace
