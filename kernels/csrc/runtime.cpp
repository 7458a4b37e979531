// The compute threads, and scratch memory.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "api.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// How long a thread looks for the next work before it sleeps. A layer's kernels follow one another within this time;
// waking takes longer than most of them.
constexpr auto kPatience = std::chrono::microseconds(50);
constexpr int kSpins = 1000;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Threads beside the caller's. They live as long as the process; one caller at a time has them.
class Pool {
 public:
  void run(int64_t threads, int64_t count, void (*work)(void*, int64_t), void* context) {
    const std::lock_guard<std::mutex> only(callers_);
    while (static_cast<int64_t>(threads_.size()) + 1 < threads) {
      const size_t index = threads_.size();
      const uint64_t seen = generation_.load(std::memory_order_relaxed);
      threads_.emplace_back([this, index, seen] { serve(index, seen); });
    }
    work_ = work;
    context_ = context;
    count_ = count;
    helpers_ = threads - 1;
    next_.store(0, std::memory_order_relaxed);
    busy_.store(threads_.size(), std::memory_order_relaxed);
    {
      const std::lock_guard<std::mutex> guard(sleepers_);
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    drain();
    for (int spins = 0; busy_.load(std::memory_order_acquire) != 0; ++spins) {
      if (spins < kSpins) {
        relax();
      } else {
        std::this_thread::yield();  // a helper may be waiting for this very core
      }
    }
  }

 private:
  void drain() {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) work_(context_, i);
  }

  void serve(size_t index, uint64_t seen) {
    for (;;) {
      wait_for_work(seen);
      seen = generation_.load(std::memory_order_acquire);
      if (static_cast<int64_t>(index) < helpers_) drain();
      busy_.fetch_sub(1, std::memory_order_release);
    }
  }

  void wait_for_work(uint64_t seen) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    do {
      for (int i = 0; i < 64; ++i, relax()) {
        if (generation_.load(std::memory_order_acquire) != seen) return;
      }
    } while (std::chrono::steady_clock::now() < until);
    std::unique_lock<std::mutex> guard(sleepers_);
    wake_.wait(guard, [&] { return generation_.load(std::memory_order_acquire) != seen; });
  }

  std::mutex callers_, sleepers_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int64_t> next_{0};
  std::atomic<size_t> busy_{0};
  void (*work_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  int64_t count_ = 0, helpers_ = 0;
};

// Never destroyed: its threads would have to end first, and the process is ending anyway.
Pool& pool() {
  static Pool* const only = new Pool;
  return *only;
}

struct Buffer {
  void* data = nullptr;
  size_t size = 0;
  ~Buffer() { std::free(data); }
};

}  // namespace

namespace pds {

void parallel(int64_t threads, int64_t count, void (*work)(void*, int64_t), void* context) {
  if (threads > 1 && count > 1) {
    pool().run(threads, count, work, context);
    return;
  }
  for (int64_t i = 0; i < count; ++i) work(context, i);
}

void* scratch(ScratchSlot slot, size_t num_bytes) {
  static thread_local Buffer buffers[kNumSlots];
  Buffer& buffer = buffers[slot];
  if (buffer.size < num_bytes) {
    std::free(buffer.data);
    buffer.size = (num_bytes + 4095) / 4096 * 4096;
    buffer.data = std::aligned_alloc(64, buffer.size);
    if (buffer.data == nullptr) buffer.size = 0;
  }
  return buffer.data;
}

}  // namespace pds
