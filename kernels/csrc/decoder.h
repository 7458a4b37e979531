// The layers of a Llama-family model in one call: the same functions as one by one, without a caller between them.
//
// A layer is two stages, so that a connector can be called around its attention:
//   2 l       qkv, head norms, rotation, KV write, attention
//   2 l + 1   output projection, norm, feed-forward, the next layer's norm
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
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

// A forward pass under way. `residual` and `hidden` are [T, D]; the rest lives in the workspace.
class Pass {
 public:
  Pass(const Decoder& decoder, const Step& step, const KvLayer& first_kv, int64_t layer_stride, uint16_t* residual,
       uint16_t* hidden, uint16_t* workspace)
      : decoder_(decoder), step_(step), kv_(first_kv), layer_stride_(layer_stride), residual_(residual), hidden_(hidden) {
    const int64_t tokens = step.num_tokens, heads = decoder.heads.num_heads * decoder.heads.head_dim;
    qkv_ = workspace;
    q_ = qkv_ + tokens * qkv_width(decoder);
    attended_ = q_ + tokens * heads;
    gate_up_ = attended_ + tokens * heads;
    product_ = gate_up_ + tokens * 2 * decoder.intermediate_size;
    fed_ = product_ + tokens * decoder.intermediate_size;
  }

  static int64_t workspace_elements(const Decoder& decoder, int64_t tokens) {
    const int64_t heads = decoder.heads.num_heads * decoder.heads.head_dim;
    return tokens * (qkv_width(decoder) + 2 * heads + 3 * decoder.intermediate_size + decoder.hidden_size);
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
  static int64_t qkv_width(const Decoder& decoder) {
    return (decoder.heads.num_heads + 2 * decoder.heads.num_kv_heads) * decoder.heads.head_dim;
  }

  bool multiply(const uint16_t* x, const Linear& layer, uint16_t* out) const {
    return multiply_linear(x, layer.in_features, step_.num_tokens, layer, out, layer.out_features, step_.threads);
  }

  void norm(int64_t t, const uint16_t* weight) const {
    const int64_t width = decoder_.hidden_size;
    rms_norm_row(residual_ + t * width, weight, width, decoder_.eps, hidden_ + t * width);
  }

  void add_and_norm(const uint16_t* weight) const {
    for_each_row(step_.num_tokens, step_.threads, [&](int64_t t) {
      add_row(fed_ + t * decoder_.hidden_size, residual_ + t * decoder_.hidden_size, decoder_.hidden_size);
      norm(t, weight);
    });
  }

  void norm_heads(const Layer& layer) const {
    const Heads& heads = decoder_.heads;
    for_each_row(step_.num_tokens, step_.threads, [&](int64_t t) {
      uint16_t* head = qkv_ + t * qkv_width(decoder_);
      for (int64_t n = 0; n < heads.num_heads + heads.num_kv_heads; ++n, head += heads.head_dim) {
        rms_norm_row(head, n < heads.num_heads ? layer.q_norm : layer.k_norm, heads.head_dim, decoder_.eps, head);
      }
    });
  }

  bool attend_layer(int64_t index) const {
    const Layer& layer = decoder_.layers[index];
    const Heads& heads = decoder_.heads;
    KvLayer kv = kv_;
    kv.base = static_cast<char*>(kv_.base) + index * layer_stride_ * (kv.is_float ? 4 : 2);
    if (!multiply(hidden_, layer.qkv, qkv_)) return false;
    if (layer.q_norm != nullptr) norm_heads(layer);
    const int64_t width = qkv_width(decoder_);
    const uint16_t* k = qkv_ + heads.num_heads * heads.head_dim;
    const Projected projected{qkv_, k, k + heads.num_kv_heads * heads.head_dim, width, width, width};
    rotate_and_store(projected, step_, kv, heads, q_);
    return attend(q_, step_, kv, heads, attended_);
  }

  bool feed_forward(int64_t index) const {
    const Layer& layer = decoder_.layers[index];
    if (!multiply(attended_, layer.output, fed_)) return false;
    add_and_norm(layer.post_attention_norm);
    if (!multiply(hidden_, layer.gate_up, gate_up_)) return false;
    silu_mul(gate_up_, step_.num_tokens, decoder_.intermediate_size, product_, step_.threads);
    if (!multiply(product_, layer.down, fed_)) return false;
    add_and_norm(index + 1 < decoder_.num_layers ? decoder_.layers[index + 1].input_norm : decoder_.final_norm);
    return true;
  }

  const Decoder& decoder_;
  const Step& step_;
  const KvLayer& kv_;
  int64_t layer_stride_;
  uint16_t *residual_, *hidden_;
  uint16_t *qkv_, *q_, *attended_, *gate_up_, *product_, *fed_;
};

}  // namespace
