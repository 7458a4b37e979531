// KV memory as attention reads it: which keys an item sees, where they lie, what it reads next, and panels of keys and values.
#pragma once

#include "api.h"
#include "gemm.h"

namespace {

using pds::Heads;
using pds::KvLayer;
using pds::Step;

constexpr int64_t kTileKeys = 128;
constexpr int64_t kRunKeys = 16;  // keys of one block that are read one after another

// `multiple` is a power of two.
PDS_INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) & -multiple; }
PDS_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Whether all block ids and slots of a step lie inside the pool.
PDS_INLINE bool fits(const Step& step, const KvLayer& kv) {
  bool inside = true;
  for (int64_t r = 0; r < step.num_requests; ++r) {
    const int64_t* blocks = step.block_table + r * step.table_stride;
    const int64_t count = (step.seq_lens[r] + (int64_t{1} << kv.block_shift) - 1) >> kv.block_shift;
    inside &= count <= step.table_stride;
    for (int64_t i = 0; inside && i < count; ++i) inside &= blocks[i] >= 0 && blocks[i] < kv.num_blocks;
  }
  const int64_t num_slots = kv.num_blocks << kv.block_shift;
  for (int64_t t = 0; t < step.num_tokens; ++t) inside &= step.slot_mapping[t] >= 0 && step.slot_mapping[t] < num_slots;
  return inside;
}

// Some tokens of one request and some KV heads: what one thread works on.
struct Item {
  int64_t request;
  int64_t first_token, last_token;  // packed tokens [first, last)
  int64_t first_head, last_head;    // KV heads [first, last)
};

struct AttentionCall {
  const uint16_t* q;  // [T, N, H], rotated
  uint16_t* out;      // [T, N, H]
  const Step* step;
  const KvLayer* kv;
  const Heads* heads;
  const Item* items;
  int64_t num_items;

  // The keys that an item's last token sees.
  int64_t num_keys(int64_t item) const {
    const Item& which = items[item];
    return step->seq_lens[which.request] - (step->query_start_loc[which.request + 1] - which.last_token);
  }
};

#if PDS_LEVEL >= 2
// to[c * kPanel + r] = from[r * stride + c], 16 x 16 words.
__attribute__((noinline)) void transpose_16(const uint32_t* from, int64_t stride, uint32_t* to) {
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(from + i * stride);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  // a[4 g + c] holds, in its 128-bit quarter q, column 4 q + c of rows 4 g to 4 g + 3.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    b[c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
    b[4 + c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
    b[8 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
    b[12 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    _mm512_storeu_si512(to + (0 + c) * kPanel, _mm512_shuffle_i32x4(b[c], b[8 + c], 0x88));
    _mm512_storeu_si512(to + (8 + c) * kPanel, _mm512_shuffle_i32x4(b[c], b[8 + c], 0xdd));
    _mm512_storeu_si512(to + (4 + c) * kPanel, _mm512_shuffle_i32x4(b[4 + c], b[12 + c], 0x88));
    _mm512_storeu_si512(to + (12 + c) * kPanel, _mm512_shuffle_i32x4(b[4 + c], b[12 + c], 0xdd));
  }
}
#endif

// Puts `count` keys of `words` 32-bit words each, one after another, at `to` in a panel.
PDS_INLINE void transpose_keys(const uint32_t* keys, int64_t words, int64_t count, uint32_t* to) {
  int64_t whole = 0;
#if PDS_LEVEL >= 2
  for (; count == 16 && whole + 16 <= words; whole += 16) transpose_16(keys + whole, words, to + whole * kPanel);
#endif
  for (int64_t key = 0; key < count; ++key, keys += words) {
    for (int64_t w = whole; w < words; ++w) to[w * kPanel + key] = keys[w];
  }
}

PDS_INLINE void widen_row(const uint16_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = widen(from[i]);
}
PDS_INLINE void widen_row(const float* from, int64_t count, float* to) {
  memcpy(to, from, static_cast<size_t>(count) * sizeof *to);
}

// Up to kRunKeys keys or values of one block and head, which lie side by side.
template <class Kv>
struct KeyRun {
  const Kv* from;
  int64_t key, count;  // counted from the tile's first
  const Kv* ahead;     // what to ask for meanwhile, as long
};

template <class Kv>
PDS_INLINE const uint32_t* as_words(const Kv* keys) {
  return reinterpret_cast<const uint32_t*>(keys);
}

// Where a head's keys from `position` on lie, up to the end of their block.
template <class Kv>
PDS_INLINE const Kv* find_keys(const AttentionCall& call, int64_t item, int64_t head, int64_t position) {
  const KvLayer& kv = *call.kv;
  const int64_t* blocks = call.step->block_table + call.items[item].request * call.step->table_stride;
  const int64_t block = position >> kv.block_shift, offset = position - (block << kv.block_shift);
  return static_cast<const Kv*>(kv.base) + blocks[block] * kv.block_stride + head * kv.head_stride +
         offset * call.heads->head_dim;
}

// Walks a tile's length ahead of what is read, over an item and those that follow, run by run in the order in which
// they lie in memory. Asked for line by line, at the pace of reading, what is ahead arrives in time; asked for all at
// once, or left to the processor, most of it does not (measured: half the rate).
template <class Kv>
class KeysAhead {
 public:
  KeysAhead(const AttentionCall& call, int64_t item) : call_(call), item_(item) { skip(kTileKeys); }

  // The next run, or null behind the last.
  const Kv* next() {
    if (item_ == call_.num_items) return nullptr;
    const Item& item = call_.items[item_];
    const Kv* run = find_keys<Kv>(call_, item_, head_ + item.first_head, position_) + part_ * call_.kv->value_stride;
    if (++head_ == item.last_head - item.first_head) {
      head_ = 0;
      if (++part_ == 2) {
        part_ = 0;
        skip(least(kRunKeys, block_size()));
      }
    }
    return run;
  }

 private:
  int64_t block_size() const { return int64_t{1} << call_.kv->block_shift; }

  void skip(int64_t keys) {
    position_ += keys;
    for (; item_ < call_.num_items; ++item_) {
      const int64_t num_keys = call_.num_keys(item_);
      if (position_ < num_keys) return;
      position_ -= least(position_, round_up(num_keys, block_size()));
    }
  }

  const AttentionCall& call_;
  int64_t item_, position_ = 0;
  int64_t part_ = 0, head_ = 0;
};

// Keys [first_key, first_key + num_keys) of an item.
template <class Kv>
struct KeyTile {
  const AttentionCall* call;
  int64_t item;
  int64_t first_key, num_keys;

  // Fills `runs` with the tile's runs of keys (part 0) or values (part 1).
  void list_runs(int64_t head, int64_t part, KeysAhead<Kv>& next, KeyRun<Kv>* runs) const {
    const int64_t size = least(kRunKeys, int64_t{1} << call->kv->block_shift);
    for (int64_t key = 0; key < num_keys; key += size, ++runs) {
      const Kv* from = find_keys<Kv>(*call, item, head, first_key + key) + part * call->kv->value_stride;
      const Kv* ahead = next.next();
      *runs = {from, key, least(size, num_keys - key), ahead == nullptr ? from : ahead};
    }
  }

  // Panels of 32 keys, each [words of a key][32], zeros behind the last key.
  void pack_keys(const KeyRun<Kv>* run, Kv* panels) const {
    const int64_t words = call->heads->head_dim * static_cast<int64_t>(sizeof(Kv)) / 4, panel_words = words * kPanel;
    auto* to = reinterpret_cast<uint32_t*>(panels);
    if (num_keys % kPanel != 0) memset(to + num_keys / kPanel * panel_words, 0, static_cast<size_t>(panel_words) * 4);
    for (int64_t key = 0; key < num_keys; key += run->count, ++run) {
      for (int64_t line = 0; line < run->count * words; line += 16) __builtin_prefetch(as_words(run->ahead) + line, 0, 2);
      transpose_keys(as_words(run->from), words, run->count, to + run->key / kPanel * panel_words + run->key % kPanel);
    }
  }

  // Panels of 32 dims, each [kTileKeys][32], zeros for one key behind the last.
  void pack_values(const KeyRun<Kv>* run, float* panels) const {
    const int64_t head_dim = call->heads->head_dim;
    for (int64_t key = 0; key < num_keys; key += run->count, ++run) {
      for (int64_t k = 0; k < run->count; ++k) {
        float* to = panels + (run->key + k) * kPanel;
        for (int64_t dim = 0; dim < head_dim; dim += kPanel, to += kTileKeys * kPanel) {
          widen_row(run->from + k * head_dim + dim, least(kPanel, head_dim - dim), to);
        }
      }
    }
    for (int64_t dim = 0; num_keys < kTileKeys && dim < head_dim; dim += kPanel) {
      memset(panels + dim * kTileKeys + num_keys * kPanel, 0, kPanel * sizeof(float));
    }
  }
};

}  // namespace
