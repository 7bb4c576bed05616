// Loops that several threads share, and that wait for no thread which has nothing in hand.
//
// Whoever is free takes what lies next, a part of what is left; the thread that calls takes part, and returns when all
// is done. A helper whose core is busy with another process takes less or nothing, and delays nobody but by what it has
// taken already: milliseconds, if it is put aside just then. After that the caller goes on alone for a while, and for
// four times as long when it happens again soon. Which thread runs what changes no bit. Each calling thread has helpers
// of its own, on the cores that OpenMP's places name if there are any: they watch for the next loop a while, then sleep.
//
//     tasks      0 1 2 | 3 4 | 5 6 | 7 | 8 | 9 | 10 | 11        12 of them, two threads
//     taken by   caller  helper caller ...                      each a quarter of what is left, at least one

#pragma once

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "status.h"

namespace {

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// How long to go on alone, by times alone.
class Solitude {
public:
    using time = std::chrono::nanoseconds;
    static constexpr std::chrono::microseconds LATE{100};
    static constexpr std::chrono::milliseconds LEAST{20}, MOST{640};

    bool lasts(time now) const { return now < until_; }

    // A wait for tasks is over, after `waited`, in which one of the threads concerned ran for `ran` and none for less.
    // Where one did not run for half of it, there are not enough cores just now; tasks that take long, and are worked
    // at, are no reason to go on alone.
    void judge(time now, time waited, time ran) {
        if (waited < LATE || ran >= waited / 2) return;
        const bool is_soon = now - until_ < 4 * length_;
        length_ = is_soon ? std::min<time>(4 * length_, MOST) : time(LEAST);
        until_ = now + length_;
    }

private:
    time until_{}, length_{};  // of the last one
};

class Team {
public:
    // body(first, last) of ranges that are 0 .. count - 1 together. What a body throws is thrown behind the loop. A loop
    // within a body is its thread's own.
    template <typename F>
    static void run(int64_t count, int num_threads, const F& body) {
        if (count < 1) return;
        if (num_threads < 2 || count < 2 || count > int64_t(UINT32_MAX)) {
            body(int64_t(0), count);
            return;
        }
        const auto call = [](const void* body, int64_t first, int64_t last) { (*(const F*)body)(first, last); };
        ours(num_threads).share(uint32_t(count), uint32_t(num_threads), call, &body);
    }

private:
    using clock = std::chrono::steady_clock;
    static constexpr std::chrono::microseconds WATCHES{200};  // about what lies between two passes

    // What belongs to a loop is written before its tasks can be taken, and read by those alone who have taken some:
    // the loop lasts until these are done. Only `parts_` may be of another loop, which does no harm.
    std::atomic<uint64_t> left_{0};  // the loop's number, in the upper half; and how many tasks nobody has taken
    std::atomic<uint32_t> parts_{1}, undone_{0};
    uint32_t count_ = 0;
    void (*call_)(const void*, int64_t, int64_t) = nullptr;
    const void* body_ = nullptr;
    std::atomic<int> status_{OK};

    bool is_sharing_ = false;
    Solitude solitude_;

    struct Helper {
        int number;
        clockid_t clock;  // of the time that it has run
        std::atomic<bool> has_task{false};
        bool is_waited_for = false;  // and how long it had run when that began; the calling thread's
        Solitude::time had_run{};
    };
    std::deque<Helper> helpers_;
    int most_threads_ = most_threads();
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<int> num_asleep_{0};
    bool is_over_ = false;  // the calling thread has ended

    // Of the calling thread, with helpers for so many threads at least, if they can be had. A forked process inherits
    // no helpers, and a mutex in any state: it begins anew.
    static Team& ours(int num_threads) {
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
        num_threads = std::min(num_threads, team.most_threads_);
        while (int(team.helpers_.size()) + 1 < num_threads) {
            Helper& helper = team.helpers_.emplace_back();
            helper.number = int(team.helpers_.size()) - 1;
            const int place = calling_place();
            try {
                std::thread([team = owner.team, &helper, place] {
                    guarded([&] {
                        bind(place + 1 + helper.number);
                        return int(OK);
                    });
                    team->help(helper);
                }).detach();
            } catch (const std::exception&) {  // those that there are will do
                team.helpers_.pop_back();
                team.most_threads_ = int(team.helpers_.size()) + 1;
                break;
            }
        }
        return team;
    }

    // OpenMP's places, if it is in this process and binds threads to cores: the calling thread's own core alone is then
    // what a new thread would inherit.
    template <typename F>
    static F* openmp(const char* name) {
        return (F*)dlsym(RTLD_DEFAULT, name);
    }
    static int num_places() {
        const auto count = openmp<int()>("omp_get_num_places");
        return count && openmp<int(int)>("omp_get_place_num_procs") ? count() : 0;
    }
    static int calling_place() {
        const auto place = openmp<int()>("omp_get_place_num");
        return place && num_places() > 1 ? std::max(0, place()) : 0;
    }
    static void bind(int place) {
        const int count = num_places();
        const auto size = openmp<int(int)>("omp_get_place_num_procs");
        const auto fill = openmp<void(int, int*)>("omp_get_place_proc_ids");
        if (count < 2 || !size || !fill) return;
        std::vector<int> cores(size_t(std::max(0, size(place % count))));
        fill(place % count, cores.data());
#if defined(__linux__)
        cpu_set_t set;
        CPU_ZERO(&set);
        for (const int core : cores)
            if (core >= 0 && core < CPU_SETSIZE) CPU_SET(core, &set);
        if (CPU_COUNT(&set)) pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#endif
    }
    // More would take turns on a core.
    static int most_threads() {
        if (const int places = num_places(); places > 1) return places;
#if defined(__linux__)
        cpu_set_t set;
        CPU_ZERO(&set);
        if (!pthread_getaffinity_np(pthread_self(), sizeof set, &set) && CPU_COUNT(&set)) return CPU_COUNT(&set);
#endif
        return std::max(1, int(std::thread::hardware_concurrency()));
    }
    static int& num_forks() {
        static int count = 0;
        return count;
    }

    void share(uint32_t count, uint32_t num_threads, void (*call)(const void*, int64_t, int64_t), const void* body) {
        if (helpers_.empty() || is_sharing_ || solitude_.lasts(now())) {
            call(body, 0, count);
            return;
        }
        is_sharing_ = true;
        count_ = count;
        call_ = call;
        body_ = body;
        status_.store(OK, std::memory_order_relaxed);
        undone_.store(count, std::memory_order_relaxed);
        parts_.store(2 * num_threads, std::memory_order_relaxed);
        const uint64_t number = (left_.load(std::memory_order_relaxed) >> 32) + 1;
        left_.store(number << 32 | count, std::memory_order_seq_cst);
        if (num_asleep_.load(std::memory_order_seq_cst)) {
            // Who has it may be put aside. A helper that sleeps on is woken by the next loop.
            const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
            if (lock) wake_.notify_all();
        }
        while (take(nullptr)) {
        }
        wait();
        is_sharing_ = false;
        const int status = status_.load(std::memory_order_relaxed);
        if (status == OUT_OF_MEMORY) throw std::bad_alloc();
        if (status != OK) throw std::runtime_error("a task failed");
    }

    static Solitude::time now() { return clock::now().time_since_epoch(); }
    static Solitude::time has_run(clockid_t of) {
        timespec time{};
        clock_gettime(of, &time);
        return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
    }

    // Until helpers have done what they have taken.
    void wait() {
        const auto is_done = [&] { return !undone_.load(std::memory_order_acquire); };
        for (int i = 0; i < 1000; ++i) {
            if (is_done()) return;
            pause();
        }
        const auto begun = now();
        const auto had_run = has_run(CLOCK_THREAD_CPUTIME_ID);
        for (Helper& helper : helpers_) {
            helper.is_waited_for = helper.has_task.load(std::memory_order_acquire);
            if (helper.is_waited_for) helper.had_run = has_run(helper.clock);
        }
        while (!is_done()) sched_yield();  // whoever has been put aside may be waiting for this core
        const auto over = now();
        if (over - begun < Solitude::LATE) return;  // no need to ask for clocks
        auto least = has_run(CLOCK_THREAD_CPUTIME_ID) - had_run;
        for (const Helper& helper : helpers_)
            if (helper.is_waited_for) least = std::min(least, has_run(helper.clock) - helper.had_run);
        solitude_.judge(over, over - begun, least);
    }

    // Takes some tasks and does them; false if there are none. By a helper, or null: by the calling thread.
    bool take(Helper* helper) {
        uint64_t left = left_.load(std::memory_order_acquire);
        uint32_t waiting, taken;
        do {
            waiting = uint32_t(left);
            if (!waiting) return false;
            taken = std::max(1u, waiting / parts_.load(std::memory_order_relaxed));
        } while (!left_.compare_exchange_weak(left, left - taken, std::memory_order_acq_rel, std::memory_order_acquire));
        if (helper) helper->has_task.store(true, std::memory_order_release);
        const int64_t first = count_ - waiting;
        const int status = guarded([&] {
            call_(body_, first, first + taken);
            return int(OK);
        });
        if (status != OK) status_.store(status, std::memory_order_relaxed);
        if (helper) helper->has_task.store(false, std::memory_order_relaxed);
        undone_.fetch_sub(taken, std::memory_order_acq_rel);
        return true;
    }

    void help(Helper& helper) {
        if (pthread_getcpuclockid(pthread_self(), &helper.clock)) return;
        const auto has_work = [&](uint64_t left) {  // not in a loop of fewer threads
            return uint32_t(left) && uint32_t(2 * (helper.number + 2)) <= parts_.load(std::memory_order_relaxed);
        };
        for (auto since = clock::now();;) {
            if (has_work(left_.load(std::memory_order_acquire)) && take(&helper)) {
                since = clock::now();
                continue;
            }
            for (int i = 0; i < 64 && !has_work(left_.load(std::memory_order_relaxed)); ++i) pause();
            if (clock::now() - since < WATCHES) continue;
            std::unique_lock<std::mutex> lock(mutex_);
            num_asleep_.fetch_add(1, std::memory_order_seq_cst);
            const uint64_t seen = left_.load(std::memory_order_seq_cst);
            if (!has_work(seen))  // woken by a loop that is over by now, it watches for the next one
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

// body(first, count) of ranges that are `num_rows` rows together: of as many as are worth a thread each.
template <typename F>
void run_by_rows(int64_t num_rows, int num_threads, const F& body) {
    constexpr int64_t EACH = 32;
    Team::run((num_rows + EACH - 1) / EACH, num_threads, [&](int64_t first, int64_t last) {
        body(first * EACH, std::min(last * EACH, num_rows) - first * EACH);
    });
}

}  // namespace
