// Paged attention: online softmax over key tiles of a fixed size (https://arxiv.org/abs/2205.14135), blocks read where
// they lie, prefill and decode alike.
//
// An item is some tokens of one request and some KV heads. For each tile of 128 keys, from position 0, and each head
//
//   keys    -> panels of 32 keys, zeros where a key does not exist
//   values  -> panels of 32 dims in float32; few rows read both where they lie, in the same order (few_rows.h)
//   rows    query heads that share the KV head, token-major: row = token * G + head of the group
//   scores  = rows @ keys;  M = max(M, scores);  p = 2^(scores - M), float32
//   sum     = sum * 2^(M_old - M) + sum(p);  acc = acc * 2^(M_old - M) + p @ values
//
// A row's arithmetic is fixed by its position: panels and pairs of keys that it does not see are skipped or have p = 0,
// which changes nothing. What stands in memory behind a request's last key is never read into a product.
#pragma once

#include "elementwise.h"
#include "few_rows.h"
#include "kv_tiles.h"

namespace {

constexpr int64_t kItemRows = 384;  // so that rows and sums fit the second-level cache, and packing a tile pays
constexpr float kMinusInfinity = -__builtin_inff();

// How scores are computed for a KV element type. Queries and keys of bfloat16 have exact products; probabilities would
// lose three digits in bfloat16, so outputs are computed in float32 for both types.
template <class Kv>
struct KvMath;
template <>
struct KvMath<uint16_t> {
#if PDS_LEVEL == 3
  using Scores = PairMath;
#else
  using Scores = WideMath;
#endif
};
template <>
struct KvMath<float> {
  using Scores = FloatMath;
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
  Vec most = splat(kMinusInfinity);
  for (int64_t i = 0; i < width; i += kWidth) most = larger(most, load(scores + i));
  const float tile_most = max_lanes(most) * scale;
  const float new_most = tile_most > state.most ? tile_most : state.most;
  const Vec factor = splat(scale), shift = splat(-new_most);
  Vec sum = splat(0.0f);
  for (int64_t i = 0; i < width; i += kWidth) {
    const Vec p = exp2(fma(load(scores + i), factor, shift));
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
  using Row = typename Scores::Row;

 public:
  ItemWork(const AttentionCall& call, int64_t index)
      : call_(call),
        item_(call.items[index]),
        index_(index),
        head_dim_(call.heads->head_dim),
        group_(call.heads->num_heads / call.heads->num_kv_heads),
        rows_((item_.last_token - item_.first_token) * group_),
        acc_width_(round_up(head_dim_, kPanel)),
        num_keys_(call.num_keys(index)),
        first_position_(num_keys_ - (item_.last_token - item_.first_token)),
        score_in_place_(score_function<Scores, Kv>(rows_, head_dim_, call.kv->block_shift)) {}

  // False when there is no memory.
  bool run() {
    if (!reserve()) return false;
    load_queries();
    KeysAhead<Kv> ahead(call_, index_);
    for (int64_t first_key = 0; first_key < num_keys_; first_key += kTileKeys) {
      const KeyTile<Kv> tile{&call_, index_, first_key, least(kTileKeys, num_keys_ - first_key)};
      for (int64_t head = item_.first_head; head < item_.last_head; ++head) {
        tile.list_runs(head, 0, ahead, key_runs_);
        tile.list_runs(head, 1, ahead, value_runs_);
        if (score_in_place_ == nullptr) tile.pack_keys(key_runs_, key_panels_);
        if (rows_ > kFewRows) tile.pack_values(value_runs_, value_panels_);
        attend_tile(head, tile);
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
    const int64_t num_bytes = 4 * (all_rows * (head_dim_ + acc_width_ + 2) + kTileKeys * (head_dim_ + acc_width_) +
                                   kTileRows * kTileKeys) + 8 * 64;
    auto* memory = static_cast<char*>(pds::scratch(pds::kAttention, static_cast<size_t>(num_bytes)));
    if (memory == nullptr) return false;
    queries_ = take<Row>(memory, all_rows * head_dim_);
    key_panels_ = take<Kv>(memory, kTileKeys * head_dim_);
    value_panels_ = take<float>(memory, kTileKeys * acc_width_);
    acc_ = take<float>(memory, all_rows * acc_width_);
    states_ = take<RowState>(memory, all_rows);
    scores_ = take<float>(memory, kTileRows * kTileKeys);
    // Columns of a value panel that hold no dim are multiplied too; their results are not used.
    if (acc_width_ != head_dim_) memset(value_panels_, 0, static_cast<size_t>(kTileKeys * acc_width_) * sizeof(float));
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

  void attend_tile(int64_t head, const KeyTile<Kv>& tile) {
    const Cut cut(rows_, kTileRows);
    for (int64_t t = 0; t < cut.parts; ++t) {
      const int64_t row = cut.begin(t), count = cut.begin(t + 1) - row;
      const int64_t seen = least(tile.num_keys, position_of(row + count - 1) + 1 - tile.first_key);
      if (seen <= 0) continue;
      const int64_t index = (head - item_.first_head) * rows_ + row;
      score_rows(index, row, count, seen, tile);
      float* acc = acc_ + index * acc_width_;
      if (rows_ > kFewRows) {
        add_packed_values(acc, count, seen);
      } else {
        add_function<Kv>(count)(scores_, value_runs_, seen, head_dim_, acc, acc_width_);
      }
    }
  }

  // Probabilities of the `seen` first keys of a tile, for `count` rows.
  void score_rows(int64_t index, int64_t row, int64_t count, int64_t seen, const KeyTile<Kv>& tile) {
    const Row* queries = queries_ + index * head_dim_;
    if (score_in_place_ == nullptr) {
      score_packed_keys(queries, count, seen);
    } else {
      score_keys_in_place(queries, seen);
    }
    const int64_t width = round_up(seen, kPanel);
    const float scale = call_.heads->scale * 1.44269504088896341f;
    for (int64_t r = 0; r < count; ++r) {
      update_row(scores_ + r * kTileKeys, least(seen, position_of(row + r) + 1 - tile.first_key), width, scale,
                 states_[index + r], acc_ + (index + r) * acc_width_, acc_width_);
    }
  }

  void score_packed_keys(const Row* queries, int64_t count, int64_t seen) {
    const TileFunction<Scores> multiply = tile_function<Scores>(count);
    for (int64_t key = 0; key < seen; key += kPanel) {
      multiply(queries, head_dim_, key_panels_ + key * head_dim_, head_dim_ / 2, scores_ + key, kTileKeys, false,
               nothing_ahead());
    }
  }

  void score_keys_in_place(const Row* queries, int64_t seen) {
    for (int64_t key = 0; key < seen; key += kPanel) {
      const KeyRun<Kv>& low = key_runs_[key / kRunKeys];
      score_in_place_(queries, head_dim_, low, key + kRunKeys < seen ? (&low)[1] : low, scores_ + key);
    }
  }

  void add_packed_values(float* acc, int64_t count, int64_t seen) {
    const TileFunction<FloatMath> multiply = tile_function<FloatMath>(count);
    for (int64_t dim = 0; dim < acc_width_; dim += kPanel) {
      multiply(scores_, kTileKeys, value_panels_ + dim * kTileKeys, (seen + 1) / 2, acc + dim, acc_width_, true,
               nothing_ahead());
    }
  }

  Ahead nothing_ahead() const { return {reinterpret_cast<const char*>(scores_), 0}; }

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
  int64_t index_, head_dim_, group_, rows_, acc_width_, num_keys_, first_position_;
  ScoreInPlace<Scores, Kv> score_in_place_;  // or null
  KeyRun<Kv> key_runs_[kTileKeys], value_runs_[kTileKeys];  // of the tile under way
  Row* queries_;
  Kv* key_panels_;
  float *value_panels_, *acc_, *scores_;
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
        const bool done = own.call.kv->is_float ? ItemWork<float>(own.call, index).run() : ItemWork<uint16_t>(own.call, index).run();
        if (!done) __atomic_store_n(&own.failed, 1, __ATOMIC_RELAXED);
      },
      &shared);
  return shared.failed == 0;
}

}  // namespace
