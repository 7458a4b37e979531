// Ranks that share a model put their columns together, through memory that their processes share.
//
// A rank writes its columns to its slot and says so; when all have, each reads the slots of all. There are two sets of
// slots, in turn: who writes to a set again knows that all others have come to the one between, and so have read it.
// Nobody sleeps: the others need microseconds, and whoever waits longer lets other threads have the core.
#pragma once

#include <sched.h>
#include <time.h>

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "api.h"

namespace {

constexpr int64_t kSlotBytes = 4 << 20;  // taken from the system as far as it is used
constexpr int kSpins = 200;  // a few microseconds, then the core is offered to others
constexpr int kYieldsPerLook = 256;

// Each on a cache line of its own: one rank writes it, the others look at it all the time.
struct alignas(64) Arrival {
  uint64_t count;  // of the exchanges that the rank has come to
};

class Exchange {
 public:
  Exchange(void* memory, int64_t rank, int64_t ranks, int64_t timeout_ms)
      : arrivals_(static_cast<Arrival*>(memory)),
        slots_(static_cast<char*>(memory) + ranks * static_cast<int64_t>(sizeof(Arrival))),
        rank_(rank),
        ranks_(ranks),
        timeout_ms_(timeout_ms) {}

  static int64_t num_bytes(int64_t ranks) { return ranks * (static_cast<int64_t>(sizeof(Arrival)) + 2 * kSlotBytes); }

  // out [rows, ranks, row_bytes] = all ranks' columns [rows, row_bytes]. False when another rank does not come in time.
  bool gather(const char* columns, int64_t rows, int64_t row_bytes, char* out) {
    const int64_t most = kSlotBytes / row_bytes;
    for (int64_t first = 0; first < rows; first += most) {
      const int64_t count = rows - first < most ? rows - first : most;
      if (!gather_rows(columns + first * row_bytes, count, row_bytes, out + first * ranks_ * row_bytes)) return false;
    }
    return true;
  }

 private:
  char* slot(uint64_t count, int64_t rank) const {
    return slots_ + (static_cast<int64_t>(count % 2) * ranks_ + rank) * kSlotBytes;
  }

  bool gather_rows(const char* columns, int64_t rows, int64_t row_bytes, char* out) {
    const uint64_t count = arrivals_[rank_].count + 1;
    memcpy(slot(count, rank_), columns, static_cast<size_t>(rows * row_bytes));
    __atomic_store_n(&arrivals_[rank_].count, count, __ATOMIC_RELEASE);
    for (int64_t r = 0; r < ranks_; ++r) {
      if (!wait_for(r, count)) return false;
      const char* from = slot(count, r);
      for (int64_t t = 0; t < rows; ++t) {
        memcpy(out + (t * ranks_ + r) * row_bytes, from + t * row_bytes, static_cast<size_t>(row_bytes));
      }
    }
    return true;
  }

  bool wait_for(int64_t rank, uint64_t count) const {
    int64_t deadline_ms = 0;
    for (int turns = 0; __atomic_load_n(&arrivals_[rank].count, __ATOMIC_ACQUIRE) < count; ++turns) {
      if (turns < kSpins) {
        relax();
        continue;
      }
      sched_yield();
      if (turns % kYieldsPerLook != 0) continue;
      const int64_t now_ms = read_clock_ms();
      if (deadline_ms == 0) deadline_ms = now_ms + timeout_ms_;
      if (now_ms > deadline_ms) return false;
    }
    return true;
  }

  static void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  static int64_t read_clock_ms() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<int64_t>(now.tv_sec) * 1000 + now.tv_nsec / 1000000;
  }

  Arrival* arrivals_;
  char* slots_;
  int64_t rank_, ranks_, timeout_ms_;
};

}  // namespace
