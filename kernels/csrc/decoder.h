// The layers of a Llama-family model in one call: the same functions as one by one, without a caller between them.
//
// A layer is two stages, so that a connector can be called around its attention:
//   2 l       qkv, head norms, rotation, KV write, attention
//   2 l + 1   output projection, norm, feed-forward, the next layer's norm
//
// What surrounds attention goes block of rows by block of rows through all of its kernels: what one leaves for the next
// is still in the core's cache, and threads that have blocks of their own do not wait for one another.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "gated_linear.h"
#include "rows.h"

namespace {

struct Layer {
  const uint16_t* input_norm;
  const uint16_t* q_norm;  // or null, and k_norm too
  const uint16_t* k_norm;
  const uint16_t* post_attention_norm;
  Linear qkv, output, gate_up, down;
};

struct Decoder {
  const Layer* layers;
  int64_t num_layers;
  const uint16_t* final_norm;
  Heads heads;
  float eps;
  int64_t hidden_size;
  int64_t intermediate_size;
};

// Rows of a step that go through some kernels together, and the threads that each kernel has.
struct RowBlock {
  int64_t begin, rows;
  int64_t threads;
};

constexpr int64_t kBlockRows = 128;
constexpr int64_t kLeastBlockRows = 32;  // below, threads share the outputs of a product better than they share rows

// Calls body(block) for all rows: in blocks that as many threads work on as there are, or in one, if each would have few.
// False when one of the calls is.
template <class Body>
bool for_each_block(int64_t rows, int64_t threads, Body body) {
  const int64_t parts = ((rows + kBlockRows - 1) / kBlockRows + threads - 1) / threads * threads;
  if (threads > 1 && rows < parts * kLeastBlockRows) return body(RowBlock{0, rows, threads});
  struct Shared {
    Body* body;
    int64_t rows, parts;
    int failed;
  } shared{&body, rows, parts, 0};
  pds::parallel(
      threads, parts,
      [](void* context, int64_t part) {
        auto& own = *static_cast<Shared*>(context);
        const int64_t begin = own.rows * part / own.parts, end = own.rows * (part + 1) / own.parts;
        if (!(*own.body)(RowBlock{begin, end - begin, 1})) __atomic_store_n(&own.failed, 1, __ATOMIC_RELAXED);
      },
      &shared);
  return shared.failed == 0;
}

// A forward pass under way. `residual` and `hidden` are [T, D]; queries and what attention gives live in the workspace.
class Pass {
 public:
  Pass(const Decoder& decoder, const Step& step, const KvLayer& first_kv, int64_t layer_stride, uint16_t* residual,
       uint16_t* hidden, uint16_t* workspace)
      : decoder_(decoder),
        step_(step),
        kv_(first_kv),
        layer_stride_(layer_stride),
        residual_(residual),
        hidden_(hidden),
        q_(workspace),
        attended_(workspace + step.num_tokens * attention_width(decoder)) {}

  static int64_t workspace_elements(const Decoder& decoder, int64_t tokens) {
    return 2 * tokens * attention_width(decoder);
  }

  // False when there is no memory.
  bool run(int64_t stage) {
    const int64_t layer = stage / 2;
    if (stage % 2 != 0) return feed_forward(layer);
    if (layer == 0) {
      for_each_row(step_.num_tokens, step_.threads, [&](int64_t t) { norm(t, decoder_.layers[0].input_norm); });
    }
    return attend_layer(layer);
  }

 private:
  static int64_t attention_width(const Decoder& decoder) { return decoder.heads.num_heads * decoder.heads.head_dim; }

  // Memory of a block, null when there is none.
  static uint16_t* reserve(const RowBlock& block, int64_t width) {
    const size_t num_bytes = static_cast<size_t>(block.rows * width) * sizeof(uint16_t);
    return static_cast<uint16_t*>(pds::scratch(pds::kBlock, num_bytes));
  }

  static bool multiply(const RowBlock& block, const uint16_t* x, const Linear& layer, uint16_t* out) {
    return multiply_linear(x, layer.in_features, block.rows, layer, out, layer.out_features, block.threads);
  }

  void norm(int64_t t, const uint16_t* weight) const {
    const int64_t width = decoder_.hidden_size;
    rms_norm_row(residual_ + t * width, weight, width, decoder_.eps, hidden_ + t * width);
  }

  void add_and_norm(const RowBlock& block, const uint16_t* fed, const uint16_t* weight) const {
    const int64_t width = decoder_.hidden_size;
    for_each_row(block.rows, block.threads, [&](int64_t r) {
      add_row(fed + r * width, residual_ + (block.begin + r) * width, width);
      norm(block.begin + r, weight);
    });
  }

  void norm_heads(const RowBlock& block, const Layer& layer, uint16_t* qkv) const {
    const Heads& heads = decoder_.heads;
    for_each_row(block.rows, block.threads, [&](int64_t r) {
      uint16_t* head = qkv + r * layer.qkv.out_features;
      for (int64_t n = 0; n < heads.num_heads + heads.num_kv_heads; ++n, head += heads.head_dim) {
        rms_norm_row(head, n < heads.num_heads ? layer.q_norm : layer.k_norm, heads.head_dim, decoder_.eps, head);
      }
    });
  }

  // A block's tokens, as far as single tokens are concerned.
  Step cut_step(const RowBlock& block) const {
    Step part = step_;
    part.num_tokens = block.rows;
    part.slot_mapping += block.begin;
    part.cos += block.begin * decoder_.heads.head_dim;
    part.sin += block.begin * decoder_.heads.head_dim;
    part.threads = block.threads;
    return part;
  }

  bool project(const RowBlock& block, const Layer& layer, const KvLayer& kv) const {
    const Heads& heads = decoder_.heads;
    const int64_t width = layer.qkv.out_features, q_width = attention_width(decoder_);
    uint16_t* qkv = reserve(block, width);
    if (qkv == nullptr || !multiply(block, hidden_ + block.begin * decoder_.hidden_size, layer.qkv, qkv)) return false;
    if (layer.q_norm != nullptr) norm_heads(block, layer, qkv);
    const uint16_t* k = qkv + q_width;
    const Projected projected{qkv, k, k + heads.num_kv_heads * heads.head_dim, width, width, width};
    rotate_and_store(projected, cut_step(block), kv, heads, q_ + block.begin * q_width);
    return true;
  }

  bool attend_layer(int64_t index) const {
    const Layer& layer = decoder_.layers[index];
    KvLayer kv = kv_;
    kv.base = static_cast<char*>(kv_.base) + index * layer_stride_ * (kv.is_float ? 4 : 2);
    return for_each_block(step_.num_tokens, step_.threads, [&](const RowBlock& block) { return project(block, layer, kv); }) &&
           attend(q_, step_, kv, decoder_.heads, attended_);
  }

  bool feed_forward(int64_t index) const {
    const Layer& layer = decoder_.layers[index];
    const bool is_last = index + 1 == decoder_.num_layers;
    const uint16_t* next_norm = is_last ? decoder_.final_norm : decoder_.layers[index + 1].input_norm;
    return for_each_block(step_.num_tokens, step_.threads,
                          [&](const RowBlock& block) { return feed_block_forward(block, layer, next_norm); });
  }

  bool feed_block_forward(const RowBlock& block, const Layer& layer, const uint16_t* next_norm) const {
    uint16_t* fed = reserve(block, decoder_.hidden_size + decoder_.intermediate_size);
    if (fed == nullptr) return false;
    uint16_t* product = fed + block.rows * decoder_.hidden_size;
    if (!multiply(block, attended_ + block.begin * attention_width(decoder_), layer.output, fed)) return false;
    add_and_norm(block, fed, layer.post_attention_norm);
    const uint16_t* hidden = hidden_ + block.begin * decoder_.hidden_size;
    if (!multiply_gated(hidden, decoder_.hidden_size, block.rows, layer.gate_up, product, block.threads)) return false;
    if (!multiply(block, product, layer.down, fed)) return false;
    add_and_norm(block, fed, next_norm);
    return true;
  }

  const Decoder& decoder_;
  const Step& step_;
  const KvLayer& kv_;
  int64_t layer_stride_;
  uint16_t *residual_, *hidden_;
  uint16_t *q_, *attended_;  // [T, N, H]
};

}  // namespace
