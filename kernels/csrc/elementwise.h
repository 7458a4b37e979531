// Norms, the gated nonlinearity, and the rotary embedding with the write to KV memory. float32 inside, rounded once.
#pragma once

#include "api.h"
#include "simd.h"

namespace {

using pds::Heads;
using pds::KvLayer;
using pds::Step;

// out = x / sqrt(mean(x^2) + eps) * weight, one row.
void rms_norm_row(const uint16_t* x, const uint16_t* weight, int64_t width, float eps, uint16_t* out) {
  Vec squares = splat(0.0f);
  for (int64_t i = 0; i < width; i += kWidth) {
    const Vec v = load_some(x + i, width - i);
    squares = fma(v, v, squares);
  }
  const float mean = sum_lanes(squares) / static_cast<float>(width);
  const Vec factor = splat(1.0f / __builtin_sqrtf(mean + eps));
  for (int64_t i = 0; i < width; i += kWidth) {
    const Vec v = load_some(x + i, width - i) * factor * load_some(weight + i, width - i);
    store_some(out + i, v, width - i);
  }
}

// residual += x, one row.
void add_row(const uint16_t* x, uint16_t* residual, int64_t width) {
  for (int64_t i = 0; i < width; i += kWidth) {
    const int64_t left = width - i;
    store_some(residual + i, load_some(residual + i, left) + load_some(x + i, left), left);
  }
}

PDS_INLINE Vec silu_mul(Vec gate, Vec up) {
  return gate / (splat(1.0f) + exp2(gate * splat(-1.44269504088896341f))) * up;
}

// out = silu(gate) * up, one row.
void silu_mul_row(const uint16_t* gate, const uint16_t* up, int64_t width, uint16_t* out) {
  for (int64_t i = 0; i < width; i += kWidth) {
    const int64_t left = width - i;
    store_some(out + i, silu_mul(load_some(gate + i, left), load_some(up + i, left)), left);
  }
}

// One head: out = x * cos + (x, its halves swapped) * sin.
template <class Out>
void rotate_head(const uint16_t* x, const float* cos, const float* sin, int64_t head_dim, Out* out) {
  const int64_t half = head_dim / 2;
  for (int64_t i = 0; i < half; i += kWidth) {
    const int64_t left = half - i;
    const Vec low = load_some(x + i, left), high = load_some(x + half + i, left);
    const Vec new_low = fma(low, load_some(cos + i, left), high * load_some(sin + i, left));
    const Vec new_high = fma(high, load_some(cos + half + i, left), low * load_some(sin + half + i, left));
    store_some(out + i, new_low, left);
    store_some(out + half + i, new_high, left);
  }
}

PDS_INLINE void copy_head(const uint16_t* from, int64_t head_dim, uint16_t* to) {
  memcpy(to, from, static_cast<size_t>(head_dim) * sizeof *to);
}
PDS_INLINE void copy_head(const uint16_t* from, int64_t head_dim, float* to) {
  for (int64_t i = 0; i < head_dim; ++i) to[i] = widen(from[i]);
}

// A step's queries, keys and values as a linear layer left them: heads adjacent, tokens `*_stride` apart.
struct Projected {
  const uint16_t* q;
  const uint16_t* k;
  const uint16_t* v;
  int64_t q_stride, k_stride, v_stride;
};

// Token t: rotated query heads to q_out [N, H], rotated keys and values to their slot.
template <class Kv>
void rotate_and_store_token(const Projected& in, const Step& step, const KvLayer& kv, const Heads& heads, int64_t t,
                            uint16_t* q_out) {
  const int64_t width = heads.head_dim;
  const float *cos = step.cos + t * width, *sin = step.sin + t * width;
  for (int64_t n = 0; n < heads.num_heads; ++n) {
    rotate_head(in.q + t * in.q_stride + n * width, cos, sin, width, q_out + n * width);
  }
  const int64_t block = step.slot_mapping[t] >> kv.block_shift, offset = step.slot_mapping[t] - (block << kv.block_shift);
  Kv* keys = static_cast<Kv*>(kv.base) + block * kv.block_stride + offset * width;
  for (int64_t k = 0; k < heads.num_kv_heads; ++k) {
    Kv* key = keys + k * kv.head_stride;
    rotate_head(in.k + t * in.k_stride + k * width, cos, sin, width, key);
    copy_head(in.v + t * in.v_stride + k * width, width, key + kv.value_stride);
  }
}

}  // namespace
