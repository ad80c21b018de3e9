// A team of threads that walks through many short stages inside one parallel region.
//
// Items of a stage are handed out one by one, so that a thread whose core is taken away costs one item and not its
// share. Between stages stands a barrier that spins for a moment and then sleeps: other processes need the cores too.
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

namespace loraplex {

class Team {
 public:
  // Called by one thread before any other joins: how many there are.
  void gather(int threads) { threads_ = threads; }

  int threads() const { return threads_; }

  // Calls work(i) for each i in [0, items), by whichever thread is free, and waits for all. Every thread of the team
  // calls it with the same number. `stage` is the caller's own count of stages.
  template <class Work> void each(int64_t items, int64_t& stage, Work work) {
    if (threads_ == 1) {
      for (int64_t i = 0; i < items; ++i) work(i);
      return;
    }
    std::atomic<int64_t>& next = next_[stage % 3].value;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) work(i);
    wait(stage);
    ++stage;
  }

 private:
  static constexpr int kSpins = 400;  // about 10 us

  void wait(int64_t stage) {
    const int phase = phase_.value.load(std::memory_order_acquire);
    if (arrived_.value.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      arrived_.value.store(0, std::memory_order_relaxed);
      next_[(stage + 2) % 3].value.store(0, std::memory_order_relaxed);  // the stage before: everybody has left it
      phase_.value.store(phase + 1, std::memory_order_seq_cst);
      if (sleepers_.value.load(std::memory_order_seq_cst)) wake();
      return;
    }
    for (int spin = 0; spin < kSpins; ++spin) {
      if (phase_.value.load(std::memory_order_acquire) != phase) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    sleepers_.value.fetch_add(1, std::memory_order_seq_cst);
    while (phase_.value.load(std::memory_order_seq_cst) == phase) sleep(phase);
    sleepers_.value.fetch_sub(1, std::memory_order_relaxed);
  }

#if defined(__linux__)
  void sleep(int phase) {
    syscall(SYS_futex, reinterpret_cast<int*>(&phase_.value), FUTEX_WAIT_PRIVATE, phase, nullptr, nullptr, 0);
  }
  void wake() {
    syscall(SYS_futex, reinterpret_cast<int*>(&phase_.value), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }
#else
  void sleep(int) { std::this_thread::yield(); }
  void wake() {}
#endif

  template <class V> struct alignas(64) Apart { std::atomic<V> value{0}; };
  int threads_ = 1;
  Apart<int64_t> next_[3];
  Apart<int> arrived_, phase_, sleepers_;
};

}  // namespace loraplex
