// Loops that several threads share, and that wait for no thread which has nothing in hand.
//
// Whoever is free takes what lies next, a part of what is left; the thread that calls takes part, and returns when all
// is done. A helper whose core is busy with another process takes less or nothing, and delays nobody but by what it has
// taken already: milliseconds, if it is put aside just then. After that the caller goes on alone for a while, and for
// twice as long when it happens again soon. Which thread runs what changes no bit. Each calling thread has helpers of
// its own: they watch for the next loop a while, then sleep.
//
//     tasks      0 1 2 | 3 4 | 5 6 | 7 | 8 | 9 | 10 | 11        12 of them, two threads
//     taken by   caller  helper caller ...                      each a quarter of what is left, at least one

#pragma once

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "status.h"

namespace {

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

class Team {
public:
    // body(first, last) of ranges that are 0 .. count - 1 together. What a body throws is thrown behind the loop.
    template <typename F>
    static void run(int64_t count, int num_threads, const F& body) {
        if (count < 1) return;
        if (num_threads < 2 || count < 2 || count > int64_t(UINT32_MAX)) {
            body(int64_t(0), count);
            return;
        }
        const auto call = [](const void* body, int64_t first, int64_t last) { (*(const F*)body)(first, last); };
        ours(num_threads - 1).share(uint32_t(count), uint32_t(num_threads), call, &body);
    }

private:
    using clock = std::chrono::steady_clock;
    static constexpr std::chrono::microseconds WATCHES{200};  // about what lies between two passes
    static constexpr std::chrono::microseconds LATE{100};     // beyond as long as all that the caller did itself
    static constexpr std::chrono::milliseconds ALONE{5}, MOST_ALONE{640};

    // What belongs to a loop is written before its tasks can be taken, and read by those alone who have taken some:
    // the loop lasts until these are done. Only `parts_` may be of another loop, which does no harm.
    std::atomic<uint64_t> left_{0};  // the loop's number, in the upper half; and how many tasks nobody has taken
    std::atomic<uint32_t> parts_{1}, undone_{0};
    uint32_t count_ = 0;
    void (*call_)(const void*, int64_t, int64_t) = nullptr;
    const void* body_ = nullptr;
    std::atomic<int> status_{OK};

    clock::time_point alone_until_{};
    clock::duration alone_{};  // how long it was, or is, last

    int num_helpers_ = 0;  // that were started
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<int> num_asleep_{0};
    bool is_over_ = false;  // the calling thread has ended

    // Of the calling thread, with as many helpers at least, if so many threads can be had. A forked process inherits no
    // helpers, and a mutex in any state: it begins anew.
    static Team& ours(int num_helpers) {
        struct Owner {
            std::shared_ptr<Team> team;
            int forks = 0;
            ~Owner() {
                if (team && forks == num_forks()) team->end();
            }
        };
        static const int watches_forks = pthread_atfork(nullptr, nullptr, [] { ++num_forks(); });
        static thread_local Owner owner;
        (void)watches_forks;
        if (!owner.team || owner.forks != num_forks()) {
            if (owner.team) new std::shared_ptr<Team>(owner.team);  // never destroyed
            owner.team = std::make_shared<Team>();
            owner.forks = num_forks();
        }
        Team& team = *owner.team;
        try {
            for (; team.num_helpers_ < num_helpers; ++team.num_helpers_)
                std::thread([team = owner.team, helper = team.num_helpers_] { team->help(helper); }).detach();
        } catch (const std::system_error&) {  // those that there are will do
        }
        return team;
    }
    static int& num_forks() {
        static int count = 0;
        return count;
    }

    void share(uint32_t count, uint32_t num_threads, void (*call)(const void*, int64_t, int64_t), const void* body) {
        const auto start = clock::now();
        if (start < alone_until_) {
            call(body, 0, count);
            return;
        }
        count_ = count;
        call_ = call;
        body_ = body;
        status_.store(OK, std::memory_order_relaxed);
        undone_.store(count, std::memory_order_relaxed);
        parts_.store(2 * num_threads, std::memory_order_relaxed);
        const uint64_t number = (left_.load(std::memory_order_relaxed) >> 32) + 1;
        left_.store(number << 32 | count, std::memory_order_seq_cst);
        if (num_asleep_.load(std::memory_order_seq_cst)) {
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
        while (take()) {
        }
        wait(start);
        const int status = status_.load(std::memory_order_relaxed);
        if (status == OUT_OF_MEMORY) throw std::bad_alloc();
        if (status != OK) throw std::runtime_error("a task failed");
    }

    // Until helpers have done what they have taken of a loop that began then.
    void wait(clock::time_point start) {
        const auto is_done = [&] { return !undone_.load(std::memory_order_acquire); };
        for (int i = 0; i < 1000; ++i) {
            if (is_done()) return;
            pause();
        }
        const auto late = clock::now() + (clock::now() - start) + LATE;
        while (!is_done()) sched_yield();  // whoever has been put aside may be waiting for this core
        const auto now = clock::now();
        if (now <= late) return;
        const bool is_soon = now - alone_until_ < 4 * alone_;
        alone_ = is_soon ? std::min<clock::duration>(2 * alone_, MOST_ALONE) : clock::duration(ALONE);
        alone_until_ = now + alone_;
    }

    // Takes some tasks and does them; false if there are none.
    bool take() {
        uint64_t left = left_.load(std::memory_order_acquire);
        uint32_t waiting, taken;
        do {
            waiting = uint32_t(left);
            if (!waiting) return false;
            taken = std::max(1u, waiting / parts_.load(std::memory_order_relaxed));
        } while (!left_.compare_exchange_weak(left, left - taken, std::memory_order_acq_rel, std::memory_order_acquire));
        const int64_t first = count_ - waiting;
        const int status = guarded([&] {
            call_(body_, first, first + taken);
            return int(OK);
        });
        if (status != OK) status_.store(status, std::memory_order_relaxed);
        undone_.fetch_sub(taken, std::memory_order_acq_rel);
        return true;
    }

    void help(int helper) {
        // Not in a loop of fewer threads.
        const auto takes_part = [&] { return uint32_t(2 * (helper + 2)) <= parts_.load(std::memory_order_relaxed); };
        for (auto since = clock::now();;) {
            if (takes_part() && take()) {
                since = clock::now();
                continue;
            }
            for (int i = 0; i < 64 && !uint32_t(left_.load(std::memory_order_relaxed)); ++i) pause();
            if (clock::now() - since < WATCHES) continue;
            std::unique_lock<std::mutex> lock(mutex_);
            num_asleep_.fetch_add(1, std::memory_order_seq_cst);
            const uint64_t seen = left_.load(std::memory_order_seq_cst);
            if (!uint32_t(seen))  // woken by a loop that is over by now, it watches for the next one
                wake_.wait(lock, [&] { return is_over_ || left_.load(std::memory_order_seq_cst) >> 32 != seen >> 32; });
            num_asleep_.fetch_sub(1, std::memory_order_relaxed);
            if (is_over_) return;
            since = clock::now();
        }
    }

    void end() {
        std::lock_guard<std::mutex> lock(mutex_);
        is_over_ = true;
        wake_.notify_all();
    }
};

}  // namespace
