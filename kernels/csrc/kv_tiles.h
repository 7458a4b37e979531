// KV memory as attention reads it: which keys an item sees, where they lie, and their transposition into panels.
#pragma once

#include "api.h"
#include "gemm.h"

namespace {

using pds::Heads;
using pds::KvLayer;
using pds::Step;

constexpr int64_t kTileKeys = 128;

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
// to[c * kPanel + r] = from[r * stride + c], 16 x 16 words; asks for as many at `ahead`. The stride is `fixed` unless 0.
template <int fixed>
__attribute__((noinline)) void transpose_16(const uint32_t* from, int64_t any, const uint32_t* ahead, uint32_t* to) {
  const int64_t stride = fixed != 0 ? fixed : any;
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i, from += stride, ahead += stride) {
    a[i] = _mm512_loadu_si512(from);
    __builtin_prefetch(ahead, 0, 2);
  }
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
PDS_INLINE void transpose_keys(const uint32_t* keys, int64_t words, int64_t count, const uint32_t* ahead, uint32_t* to) {
  int64_t done = 0;
#if PDS_LEVEL >= 2
  // Heads of 64 and 128 elements of two bytes.
  const auto transpose = words == 32 ? transpose_16<32> : words == 64 ? transpose_16<64> : transpose_16<0>;
  for (; count - done >= 16; done += 16, keys += 16 * words, ahead += 16 * words) {
    int64_t whole = 0;
    for (; whole + 16 <= words; whole += 16) transpose(keys + whole, words, ahead + whole, to + whole * kPanel + done);
    for (int64_t w = whole; w < words; ++w) {
      for (int64_t r = 0; r < 16; ++r) to[w * kPanel + done + r] = keys[r * words + w];
    }
  }
#endif
  for (; done < count; ++done, keys += words, ahead += words) {
    __builtin_prefetch(ahead, 0, 2);
    for (int64_t w = 0; w < words; ++w) to[w * kPanel + done] = keys[w];
  }
}

PDS_INLINE void widen_row(const uint16_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = widen(from[i]);
}
PDS_INLINE void widen_row(const float* from, int64_t count, float* to) {
  memcpy(to, from, static_cast<size_t>(count) * sizeof *to);
}

// Keys or values that lie side by side.
template <class Kv>
struct KeyRun {
  const Kv* from;
  int64_t key, count;  // counted from the tile's first
  const Kv* ahead;     // what is read a tile's length later, as long
};

// Keys [first_key, first_key + num_keys) of an item.
template <class Kv>
struct KeyTile {
  const AttentionCall* call;
  int64_t item;
  int64_t first_key, num_keys;

  // Calls visit(run) for each run of keys (part 0) or values (part 1). What is ahead may be a later item's: asked for
  // line by line as this run's lines are read it arrives in time; asked for all at once, or left to the processor,
  // most of it does not (measured: a third of the rate).
  template <class Visit>
  void for_each_run(int64_t head, int64_t part, Visit visit) const {
    const int64_t block_size = int64_t{1} << call->kv->block_shift, offset = part * call->kv->value_stride;
    for (int64_t key = 0; key < num_keys;) {
      const int64_t position = first_key + key;
      const int64_t count = least(block_size - (position & (block_size - 1)), num_keys - key);
      const Kv* from = find(item, head, position) + offset;
      const Kv* ahead = find_ahead(head, position);
      visit(KeyRun<Kv>{from, key, count, ahead == nullptr ? from : ahead + offset});
      key += count;
    }
  }

  // Panels of 32 keys, each [words of a key][32], zeros behind the last key.
  void pack_keys(int64_t head, Kv* panels) const {
    const int64_t head_dim = call->heads->head_dim;
    const int64_t words = head_dim * static_cast<int64_t>(sizeof(Kv)) / 4, panel_words = words * kPanel;
    auto* to = reinterpret_cast<uint32_t*>(panels);
    if (num_keys % kPanel != 0) memset(to + num_keys / kPanel * panel_words, 0, static_cast<size_t>(panel_words) * 4);
    for_each_run(head, 0, [&](const KeyRun<Kv>& run) {
      for (int64_t done = 0, part; done < run.count; done += part) {
        const int64_t column = (run.key + done) % kPanel;
        part = least(kPanel - column, run.count - done);
        // What is ahead of a panel's first keys is asked for later, see `scores_ahead`: all of it here is more than
        // memory gives in the time.
        const Kv* ahead = column < kPanel / 2 ? run.from : run.ahead;
        transpose_keys(as_words(run.from + done * head_dim), words, part, as_words(ahead + done * head_dim),
                       to + (run.key + done) / kPanel * panel_words + column);
      }
    });
  }

  // Panels of 32 dims, each [kTileKeys][32], zeros for one key behind the last.
  void pack_values(int64_t head, float* panels) const {
    const int64_t head_dim = call->heads->head_dim;
    for_each_run(head, 1, [&](const KeyRun<Kv>& run) {
      for (int64_t k = 0; k < run.count; ++k) {
        float* to = panels + (run.key + k) * kPanel;
        for (int64_t dim = 0; dim < head_dim; dim += kPanel, to += kTileKeys * kPanel) {
          widen_row(run.from + k * head_dim + dim, least(kPanel, head_dim - dim), to);
        }
      }
    });
    for (int64_t dim = 0; num_keys < kTileKeys && dim < head_dim; dim += kPanel) {
      memset(panels + dim * kTileKeys + num_keys * kPanel, 0, kPanel * sizeof(float));
    }
  }

  // What is ahead of a panel's first keys, asked for while its scores are computed.
  Ahead scores_ahead(int64_t head, int64_t key) const {
    const Kv* ahead = find_ahead(head, first_key + key);
    if (ahead == nullptr) ahead = find(item, head, first_key + key);
    return {reinterpret_cast<const char*>(ahead), 64};
  }

 private:
  static const uint32_t* as_words(const Kv* keys) { return reinterpret_cast<const uint32_t*>(keys); }

  const Kv* find(int64_t which, int64_t head, int64_t position) const {
    const KvLayer& kv = *call->kv;
    const int64_t* blocks = call->step->block_table + call->items[which].request * call->step->table_stride;
    const int64_t block = position >> kv.block_shift, offset = position - (block << kv.block_shift);
    return static_cast<const Kv*>(kv.base) + blocks[block] * kv.block_stride + head * kv.head_stride +
           offset * call->heads->head_dim;
  }

  // A tile's length behind `position`, in the items that follow if this one ends before; null if it is not near.
  const Kv* find_ahead(int64_t head, int64_t position) const {
    constexpr int64_t max_items = 8;
    position += kTileKeys;
    const int64_t last = least(call->num_items, item + max_items);
    for (int64_t which = item; which < last; ++which) {
      const int64_t keys = call->num_keys(which);
      if (position < keys) return find(which, head - call->items[item].first_head + call->items[which].first_head, position);
      position -= round_up(keys, int64_t{1} << call->kv->block_shift);
      if (position < 0) position = 0;
    }
    return nullptr;
  }
};

}  // namespace
