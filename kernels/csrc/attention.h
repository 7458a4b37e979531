// Paged attention: online softmax over key tiles of a fixed size (https://arxiv.org/abs/2205.14135), blocks read where
// they lie, prefill and decode alike.
//
// An item is some tokens of one request and some KV heads. For each tile of 128 keys, from position 0, and each head
//
//   keys    -> panels of 32 keys, values -> panels of 32 dims, zeros where a key does not exist
//   rows    query heads that share the KV head, token-major: row = token * G + head of the group
//   scores  = rows @ keys;  M = max(M, scores);  p = 2^(scores - M), float32
//   sum     = sum * 2^(M_old - M) + sum(p);  acc = acc * 2^(M_old - M) + p @ values
//
// A row's arithmetic is fixed by its position: panels and pairs of keys that it does not see are skipped or have p = 0,
// which changes nothing. What stands in memory behind a request's last key is never read into a product.
#pragma once

#include "elementwise.h"
#include "gemm.h"

namespace {

constexpr int64_t kTileKeys = 128;
constexpr int64_t kItemRows = 384;  // so that rows and sums fit the second-level cache, and packing a tile pays
constexpr float kMinusInfinity = -__builtin_inff();

PDS_INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
PDS_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

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
};

// How scores and outputs are computed for a KV element type. Queries and keys of bfloat16 have exact products;
// probabilities would lose three digits in bfloat16, so they stay float32.
template <class Kv>
struct KvMath;
template <>
struct KvMath<uint16_t> {
#if PDS_LEVEL == 3
  using Scores = PairMath;
#else
  using Scores = WideMath;
#endif
  using Values = WideMath;
};
template <>
struct KvMath<float> {
  using Scores = FloatMath;
  using Values = FloatMath;
};

// --- packing: n keys or values of one head, in blocks, become panels ---

#if PDS_LEVEL >= 2
// to[c * kPanel + r] = from[r * stride + c], 16 x 16 words.
PDS_INLINE void transpose_16(const uint32_t* from, int64_t stride, uint32_t* to) {
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

// Puts `count` keys of `words` 32-bit words each, one after another, at `column` of a panel.
PDS_INLINE void transpose_keys(const void* keys, int64_t words, int64_t count, uint32_t* to) {
  const auto* from = static_cast<const unsigned char*>(keys);
  int64_t done = 0;
#if PDS_LEVEL >= 2
  for (; count - done >= 16; done += 16) {
    const auto* base = reinterpret_cast<const uint32_t*>(from) + done * words;
    int64_t w = 0;
    for (; w + 16 <= words; w += 16) transpose_16(base + w, words, to + w * kPanel + done);
    for (int64_t r = 0; r < 16; ++r) {
      for (int64_t rest = w; rest < words; ++rest) {
        memcpy(to + rest * kPanel + done + r, base + r * words + rest, sizeof(uint32_t));
      }
    }
  }
#endif
  for (; done < count; ++done) {
    for (int64_t w = 0; w < words; ++w) {
      memcpy(to + w * kPanel + done, from + (done * words + w) * 4, sizeof(uint32_t));
    }
  }
}

PDS_INLINE void pack_value_pair(const uint16_t* first, const uint16_t* second, int64_t dims, uint16_t* to) {
  for (int64_t i = 0; i < dims; ++i) {
    const uint32_t pair = first[i] | static_cast<uint32_t>(second[i]) << 16;
    memcpy(to + 2 * i, &pair, sizeof pair);
  }
}
PDS_INLINE void pack_value_pair(const float* first, const float* second, int64_t dims, float* to) {
  memcpy(to, first, static_cast<size_t>(dims) * sizeof(float));
  memcpy(to + kPanel, second, static_cast<size_t>(dims) * sizeof(float));
}

// One head's part of a key tile.
template <class Kv>
struct TilePacker {
  const KvLayer& kv;
  const int64_t* blocks;  // of the request
  int64_t head_dim;
  int64_t first_key, num_keys;

  const Kv* find(int64_t head, int64_t key) const {
    const int64_t position = first_key + key;
    return static_cast<const Kv*>(kv.base) + blocks[position / kv.block_size] * kv.block_stride +
           head * kv.head_stride + position % kv.block_size * head_dim;
  }

  void pack_keys(int64_t head, Kv* panels) const {
    const int64_t words = head_dim * static_cast<int64_t>(sizeof(Kv)) / 4, panel_words = words * kPanel;
    auto* to = reinterpret_cast<uint32_t*>(panels);
    if (num_keys % kPanel != 0) memset(to + num_keys / kPanel * panel_words, 0, static_cast<size_t>(panel_words) * 4);
    for (int64_t key = 0; key < num_keys;) {
      const int64_t in_block = kv.block_size - (first_key + key) % kv.block_size;
      const int64_t in_panel = kPanel - key % kPanel;
      const int64_t count = least(least(in_block, in_panel), num_keys - key);
      transpose_keys(find(head, key), words, count, to + key / kPanel * panel_words + key % kPanel);
      key += count;
    }
  }

  // Panels of 32 dims, each [kTileKeys / 2][32][2] or [kTileKeys / 2][2][32].
  void pack_values(int64_t head, Kv* panels, const Kv* zeros) const {
    for (int64_t key = 0; key < num_keys; key += 2) {
      const Kv* first = find(head, key) + kv.value_stride;
      const Kv* second = key + 1 < num_keys ? find(head, key + 1) + kv.value_stride : zeros;
      for (int64_t dim = 0; dim < head_dim; dim += kPanel) {
        Kv* to = panels + dim * kTileKeys + key * kPanel;
        pack_value_pair(first + dim, second + dim, least(kPanel, head_dim - dim), to);
      }
    }
  }

  // Asks for one block's keys and values of `head`; the block may be anywhere.
  void prefetch_block(int64_t head, int64_t key) const {
    const auto* keys = reinterpret_cast<const char*>(find(head, key));
    const auto* values = keys + kv.value_stride * static_cast<int64_t>(sizeof(Kv));
    const int64_t num_bytes = least(kv.block_size, num_keys - key) * head_dim * static_cast<int64_t>(sizeof(Kv));
    for (int64_t i = 0; i < num_bytes; i += 64) {
      __builtin_prefetch(keys + i, 0, 2);
      __builtin_prefetch(values + i, 0, 2);
    }
  }
};

// --- one row ---

struct RowState {
  float most, sum;
};

// Scores [width], of which the first `seen` count, become probabilities; sums so far are scaled to the new maximum.
PDS_INLINE void update_row(float* scores, int64_t seen, int64_t width, float scale, RowState& state, float* acc,
                           int64_t acc_width) {
  if (seen <= 0) {
    memset(scores, 0, static_cast<size_t>(width) * sizeof *scores);
    return;
  }
  for (int64_t i = seen; i < width; ++i) scores[i] = kMinusInfinity;
  const Vec factor = splat(scale);
  Vec most = splat(kMinusInfinity);
  for (int64_t i = 0; i < width; i += kWidth) {
    const Vec scaled = load(scores + i) * factor;
    store(scores + i, scaled);
    most = larger(most, scaled);
  }
  const float tile_most = max_lanes(most);
  const float new_most = tile_most > state.most ? tile_most : state.most;
  const Vec shift = splat(new_most);
  Vec sum = splat(0.0f);
  for (int64_t i = 0; i < width; i += kWidth) {
    const Vec p = exp2(load(scores + i) - shift);
    store(scores + i, p);
    sum = sum + p;
  }
  float decay = 1.0f;
  if (new_most != state.most) {
    float lanes[kWidth];
    store(lanes, exp2(splat(state.most - new_most)));
    decay = lanes[0];
    for (int64_t i = 0; i < acc_width; i += kWidth) store(acc + i, load(acc + i) * splat(decay));
  }
  state.sum = state.sum * decay + sum_lanes(sum);
  state.most = new_most;
}

// --- one item ---

template <class Kv>
class ItemWork {
  using Scores = typename KvMath<Kv>::Scores;
  using Values = typename KvMath<Kv>::Values;
  using Row = typename Scores::Row;

 public:
  ItemWork(const AttentionCall& call, const Item& item)
      : call_(call),
        item_(item),
        head_dim_(call.heads->head_dim),
        group_(call.heads->num_heads / call.heads->num_kv_heads),
        rows_((item.last_token - item.first_token) * group_),
        acc_width_(round_up(head_dim_, kPanel)),
        blocks_(call.step->block_table + item.request * call.step->table_stride) {
    const int64_t behind = call.step->query_start_loc[item.request + 1] - item.first_token;
    first_position_ = call.step->seq_lens[item.request] - behind;
  }

  // False when there is no memory.
  bool run() {
    if (!reserve()) return false;
    load_queries();
    const int64_t num_keys = first_position_ + item_.last_token - item_.first_token;
    for (int64_t first_key = 0; first_key < num_keys; first_key += kTileKeys) {
      const TilePacker<Kv> packer{*call_.kv, blocks_, head_dim_, first_key, least(kTileKeys, num_keys - first_key)};
      const TilePacker<Kv> next{*call_.kv, blocks_, head_dim_, first_key + kTileKeys,
                                least(kTileKeys, num_keys - first_key - kTileKeys)};
      for (int64_t head = item_.first_head; head < item_.last_head; ++head) {
        for (int64_t key = 0; key < next.num_keys; key += call_.kv->block_size) next.prefetch_block(head, key);
        packer.pack_keys(head, key_panels_);
        packer.pack_values(head, value_panels_, zeros_);
        attend_tile(head - item_.first_head, packer);
      }
    }
    store_results();
    return true;
  }

 private:
  template <class T>
  T* take(char*& memory, int64_t count) {
    T* taken = reinterpret_cast<T*>(memory);
    memory += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return taken;
  }

  bool reserve() {
    const int64_t all_rows = rows_ * (item_.last_head - item_.first_head);
    const int64_t num_bytes = (all_rows * head_dim_ + kTileKeys * (head_dim_ + acc_width_) + acc_width_) * 4 +
                              all_rows * (acc_width_ + 2) * 4 + kTileRows * kTileKeys * 4 + 16 * 64;
    auto* memory = static_cast<char*>(pds::scratch(pds::kAttention, static_cast<size_t>(num_bytes)));
    if (memory == nullptr) return false;
    queries_ = take<Row>(memory, all_rows * head_dim_);
    key_panels_ = take<Kv>(memory, kTileKeys * head_dim_);
    value_panels_ = take<Kv>(memory, kTileKeys * acc_width_);
    zeros_ = take<Kv>(memory, acc_width_);
    acc_ = take<float>(memory, all_rows * acc_width_);
    states_ = take<RowState>(memory, all_rows);
    scores_ = take<float>(memory, kTileRows * kTileKeys);
    memset(zeros_, 0, static_cast<size_t>(acc_width_) * sizeof(Kv));
    // Columns of a value panel that hold no dim are multiplied too; their results are not used.
    if (acc_width_ != head_dim_) memset(value_panels_, 0, static_cast<size_t>(kTileKeys * acc_width_) * sizeof(Kv));
    memset(acc_, 0, static_cast<size_t>(all_rows * acc_width_) * sizeof(float));
    for (int64_t r = 0; r < all_rows; ++r) states_[r] = {kMinusInfinity, 0.0f};
    return true;
  }

  void load_queries() {
    Row* to = queries_;
    for (int64_t head = item_.first_head; head < item_.last_head; ++head) {
      for (int64_t token = item_.first_token; token < item_.last_token; ++token) {
        const uint16_t* from = call_.q + (token * call_.heads->num_heads + head * group_) * head_dim_;
        copy_head(from, group_ * head_dim_, to);
        to += group_ * head_dim_;
      }
    }
  }

  int64_t position_of(int64_t row) const { return first_position_ + row / group_; }

  void attend_tile(int64_t head, const TilePacker<Kv>& packer) {
    const Cut tiles(rows_, kTileRows);
    for (int64_t t = 0; t < tiles.parts; ++t) {
      const int64_t row = tiles.begin(t), count = tiles.begin(t + 1) - row;
      const int64_t seen = least(packer.num_keys, position_of(row + count - 1) + 1 - packer.first_key);
      if (seen > 0) attend_rows(head * rows_ + row, row, count, seen, packer.first_key);
    }
  }

  // `count` rows against the `seen` first keys of the tile at `first_key`.
  void attend_rows(int64_t index, int64_t row, int64_t count, int64_t seen, int64_t first_key) {
    const TileFunction<Scores> multiply = tile_function<Scores>(count);
    const TileFunction<Values> add_values = tile_function<Values>(count);
    const Row* queries = queries_ + index * head_dim_;
    float* acc = acc_ + index * acc_width_;
    const Ahead nothing{reinterpret_cast<const char*>(queries), 0};
    for (int64_t key = 0; key < seen; key += kPanel) {
      multiply(queries, head_dim_, key_panels_ + key * head_dim_, head_dim_ / 2, scores_ + key, kTileKeys, false, nothing);
    }
    const int64_t width = round_up(seen, kPanel);
    const float scale = call_.heads->scale * 1.44269504088896341f;
    for (int64_t r = 0; r < count; ++r) {
      update_row(scores_ + r * kTileKeys, least(seen, position_of(row + r) + 1 - first_key), width, scale,
                 states_[index + r], acc + r * acc_width_, acc_width_);
    }
    for (int64_t dim = 0; dim < acc_width_; dim += kPanel) {
      add_values(scores_, kTileKeys, value_panels_ + dim * kTileKeys, (seen + 1) / 2, acc + dim, acc_width_, true,
                 nothing);
    }
  }

  void store_results() {
    for (int64_t head = item_.first_head; head < item_.last_head; ++head) {
      for (int64_t row = 0; row < rows_; ++row) {
        const int64_t index = (head - item_.first_head) * rows_ + row;
        const int64_t token = item_.first_token + row / group_;
        uint16_t* out = call_.out + (token * call_.heads->num_heads + head * group_ + row % group_) * head_dim_;
        const Vec sum = splat(states_[index].sum);
        for (int64_t i = 0; i < head_dim_; i += kWidth) {
          store_some(out + i, load(acc_ + index * acc_width_ + i) / sum, head_dim_ - i);
        }
      }
    }
  }

  const AttentionCall& call_;
  const Item& item_;
  int64_t head_dim_, group_, rows_, acc_width_, first_position_;
  const int64_t* blocks_;
  Row* queries_;
  Kv *key_panels_, *value_panels_, *zeros_;
  float *acc_, *scores_;
  RowState* states_;
};

// --- a step ---

// Items of a step: a prompt's chunk by head and by tokens, a single token by request (all heads of a block lie side by
// side in memory), or by head where there are fewer requests than threads. Returns their number; fills `items` if given.
int64_t list_items(const Step& step, const Heads& heads, Item* items) {
  const int64_t group = heads.num_heads / heads.num_kv_heads;
  const int64_t max_tokens = kItemRows / group > 0 ? kItemRows / group : 1;
  int64_t count = 0;
  for (int64_t r = 0; r < step.num_requests; ++r) {
    const int64_t begin = step.query_start_loc[r], tokens = step.query_start_loc[r + 1] - begin;
    const bool by_head = tokens > 1 || step.num_requests < step.threads;
    const int64_t head_step = by_head ? 1 : heads.num_kv_heads;
    const Cut cut(tokens, max_tokens);
    for (int64_t head = 0; head < heads.num_kv_heads; head += head_step) {
      for (int64_t c = 0; c < cut.parts; ++c, ++count) {
        if (items != nullptr) items[count] = {r, begin + cut.begin(c), begin + cut.begin(c + 1), head, head + head_step};
      }
    }
  }
  return count;
}

// False when there is no memory.
bool attend(const uint16_t* q, const Step& step, const KvLayer& kv, const Heads& heads, uint16_t* out) {
  const int64_t count = list_items(step, heads, nullptr);
  auto* items = static_cast<Item*>(pds::scratch(pds::kItems, static_cast<size_t>(count) * sizeof(Item)));
  if (items == nullptr) return false;
  list_items(step, heads, items);
  struct Shared {
    AttentionCall call;
    int failed;
  } shared{{q, out, &step, &kv, &heads, items, count}, 0};
  pds::parallel(
      step.threads, count,
      [](void* context, int64_t index) {
        auto& own = *static_cast<Shared*>(context);
        const Item& item = own.call.items[index];
        const bool done = own.call.kv->is_float ? ItemWork<float>(own.call, item).run()
                                                : ItemWork<uint16_t>(own.call, item).run();
        if (!done) __atomic_store_n(&own.failed, 1, __ATOMIC_RELAXED);
      },
      &shared);
  return shared.failed == 0;
}

}  // namespace
