"""Loops that threads share: each task is done once, whoever comes, goes or is put aside."""

import ctypes
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specpaged_kernels.cpu.build import CACHE, load
from specpaged_kernels.cpu.library import SOURCE

LOOP = """
#include "team.h"

// Counts what is done of each task, and notes by whom; one of the caller's and one of a helper's takes so long, asleep,
// or at work if it is negative. Task `failing` throws.
extern "C" int loop(int64_t count, int num_threads, int64_t failing, int microseconds, int helper_microseconds,
                    int32_t* done, int64_t* threads) {
    const auto caller = pthread_self();
    return guarded([&] {
        Team::run(count, num_threads, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; ++i) {
                ++done[i];
                threads[i] = int64_t(pthread_self());
                const bool is_helper = !pthread_equal(pthread_self(), caller);
                const int pause = is_helper ? helper_microseconds : microseconds;
                if (pause > 0) std::this_thread::sleep_for(std::chrono::microseconds(pause));
                const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(-pause);
                while (pause < 0 && std::chrono::steady_clock::now() < until) {  // at work
                }
                if (i == failing) throw std::bad_alloc();
            }
        });
        return int(OK);
    });
}

// Solitude of these waits: until when, or 0 where it does not last behind the wait. In nanoseconds.
extern "C" void judge(int64_t count, const int64_t* now, const int64_t* waited, const int64_t* ran, int64_t* until) {
    using time = Solitude::time;
    Solitude solitude;
    for (int64_t i = 0; i < count; ++i) {
        solitude.judge(time(now[i]), time(waited[i]), time(ran[i]));
        until[i] = 0;
        for (int64_t at = now[i]; solitude.lasts(time(at)); at += 1000000) until[i] = at + 1000000;
    }
}
"""
OUT_OF_MEMORY = 12


has_helpers = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this process has one core: loops stay alone")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("team")
    for path in SOURCE.parent.glob("*.h"):
        shutil.copy(path, folder)
    (folder / "loop.cpp").write_text(LOOP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, str(folder / "built"))
        return load(folder / "loop.cpp")


def run(library, count: int, num_threads: int, failing: int = -1, pauses: tuple[int, int] = (0, 0)):
    """What was returned, how often each task was done, and by how many threads."""
    done, threads = torch.zeros(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int64)
    status = library.loop(
        ctypes.c_int64(count), num_threads, ctypes.c_int64(failing), *pauses,
        ctypes.c_void_p(done.data_ptr()), ctypes.c_void_p(threads.data_ptr()),
    )  # fmt: skip
    return status, done.tolist(), len(set(threads.tolist()))


@settings(max_examples=60)
@given(loops=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 6)), min_size=1, max_size=30))
def test_every_task_is_done_once(library, loops):
    for count, num_threads in loops:
        assert run(library, count, num_threads)[:2] == (0, [1] * count)


@has_helpers
def test_helpers_take_part_until_they_are_late_and_then_the_caller_goes_on_alone(library):
    def of_a_thread_of_its_own() -> None:  # whose team knows nothing yet
        for _ in range(1000):  # until a helper is there
            if run(library, 40, 2, pauses=(1000, 1000))[2] == 2:
                break
        else:
            raise AssertionError("no helper came")
        for _ in range(8):  # this thread may be put aside itself, for as long as it would go on alone
            while run(library, 40, 2, pauses=(1000, 50_000))[2] == 1:  # a helper sleeps with a task in hand
                pass
            seen.append(run(library, 20, 2, pauses=(1000, 1000))[2])
        while run(library, 40, 2, pauses=(1000, 1000))[2] == 1:  # until that is over
            pass

    seen: list[int] = []
    thread = threading.Thread(target=of_a_thread_of_its_own)
    thread.start()
    thread.join()
    assert 1 in seen


MS = 1_000_000


def judge(library, waits: list[tuple[int, int, int]]) -> list[float]:
    """How long, in milliseconds, it goes on alone behind each wait (its end, its length, how long who ran least)."""
    columns = [torch.tensor(column) for column in zip(*waits, strict=True)]
    until = torch.zeros(len(waits), dtype=torch.int64)
    pointers = [ctypes.c_void_p(column.data_ptr()) for column in [*columns, until]]
    library.judge(ctypes.c_int64(len(waits)), *pointers)
    return [max(0, int(t) - now) / MS for t, (now, _, _) in zip(until, waits, strict=True)]


def test_who_is_at_work_is_waited_for_and_blamed_for_nothing(library):
    assert judge(library, [(1000 * MS, 5 * MS, 5 * MS), (2000 * MS, 5 * MS, 3 * MS)]) == [0, 0]
    assert judge(library, [(1000 * MS, 5 * MS, 2 * MS)]) == [20]


def test_a_short_wait_is_nobodys_fault(library):
    assert judge(library, [(1000 * MS, MS // 11, 0), (1000 * MS, MS // 9, 0)]) == [0, 20]


def test_the_caller_goes_on_alone_for_longer_where_it_must_again_soon(library):
    now, waits = 1000, []
    for alone in [20, 80, 320, 640, 640]:
        waits.append((now * MS, MS, 0))
        now += alone + 10
    assert judge(library, waits) == [20, 80, 320, 640, 640]
    later = (now + 4 * 640) * MS
    assert judge(library, [*waits, (later, MS, 0)])[-1] == 20


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("failing", [0, 7, 19])
def test_what_a_task_throws_is_thrown_behind_the_loop(library, failing, num_threads):
    assert run(library, 20, num_threads, failing)[0] == OUT_OF_MEMORY
    assert run(library, 20, num_threads)[:2] == (0, [1] * 20)


def test_calling_threads_have_helpers_of_their_own_which_end_with_them(library):
    def call() -> None:
        for count in range(1, 200):
            assert run(library, count, 3)[:2] == (0, [1] * count)
        counted.append(count)

    def num_tasks() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before, counted = num_tasks(), []
    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted == [199] * 6
    for _ in range(500):  # helpers that were asleep go when they are awake
        if num_tasks() <= before:
            return
        time.sleep(0.01)
    raise AssertionError(f"{num_tasks()} threads, {before} before")


@has_helpers
def test_a_forked_process_goes_on_with_helpers_of_its_own(library):
    assert run(library, 50, 3)[1] == [1] * 50
    child = os.fork()
    if child == 0:
        status = 1
        try:
            good = all(run(library, count, 3, pauses=(20, 20))[:2] == (0, [1] * count) for count in range(1, 60))
            helped = any(run(library, 100, 3, pauses=(1000, 1000))[2] > 1 for _ in range(50))
            status = 0 if good and helped else 1
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert run(library, 50, 3)[1] == [1] * 50
