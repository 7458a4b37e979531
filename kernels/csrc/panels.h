// Weights brought into panels, once at load.
#pragma once

#include "gemm.h"

namespace {

using pds::Linear;

PDS_INLINE int64_t pairs_of(int64_t count) { return (count + 1) / 2; }
PDS_INLINE int64_t quads_of(int64_t count) { return (count + 3) / 4; }

constexpr int kInt8Most = 127;
constexpr int kInt8Offset = 128;  // what kInt8Inputs adds to weights, which its instruction takes without a sign

// Calls put(panel, o, row) for the outputs of each panel; row is null for those that do not exist.
template <class Put>
void for_each_output(const uint16_t* weight, int64_t weight_stride, int64_t out_features, Put put) {
  for (int64_t o = 0; o < (out_features + kPanel - 1) / kPanel * kPanel; ++o) {
    put(o / kPanel, o % kPanel, o < out_features ? weight + o * weight_stride : nullptr);
  }
}

void pack_bfloat16(const uint16_t* weight, int64_t weight_stride, const Linear& layer) {
  const int64_t in = layer.in_features, pairs = pairs_of(in);
  for_each_output(weight, weight_stride, layer.out_features, [&](int64_t panel, int64_t o, const uint16_t* row) {
    uint16_t* to = static_cast<uint16_t*>(layer.panels) + panel * pairs * 2 * kPanel + 2 * o;
    for (int64_t i = 0; i < 2 * pairs; ++i) to[i / 2 * 2 * kPanel + i % 2] = row != nullptr && i < in ? row[i] : 0;
  });
}

// What one step of an output's int8 weights stands for: its largest is 127 steps.
float int8_scale(const uint16_t* row, int64_t in_features) {
  float most = 0.0f;
  for (int64_t i = 0; i < in_features; ++i) {
    const float size = __builtin_fabsf(widen(row[i]));
    if (size > most || size != size) most = size;  // a NaN stays
  }
  return most / kInt8Most;
}

// The nearest number of steps; 0 where there is none because the scale is 0 or not finite.
PDS_INLINE int int8_steps(uint16_t weight, float scale) {
  const float steps = __builtin_rintf(widen(weight) / scale);
  return steps >= -kInt8Most && steps <= kInt8Most ? static_cast<int>(steps) : 0;
}

// Panels of quads of integers, `offset` above the weights' steps.
template <class Weight>
void pack_int8(const uint16_t* weight, int64_t weight_stride, const Linear& layer, int offset) {
  const int64_t quads = quads_of(layer.in_features);
  auto* panels = static_cast<Weight*>(layer.panels);
  for_each_output(weight, weight_stride, layer.out_features, [=](int64_t panel, int64_t o, const uint16_t* row) {
    const float scale = row != nullptr ? int8_scale(row, layer.in_features) : 0.0f;
    layer.scales[panel * kPanel + o] = scale;
    for (int64_t i = 0; i < 4 * quads; ++i) {
      const int steps = row != nullptr && i < layer.in_features ? int8_steps(row[i], scale) : 0;
      panels[((panel * quads + i / 4) * kPanel + o) * 4 + i % 4] = static_cast<Weight>(steps + offset);
    }
  });
}

void pack_linear(const uint16_t* weight, int64_t weight_stride, const Linear& layer) {
  switch (layer.format) {
    case pds::kInt8: return pack_int8<int8_t>(weight, weight_stride, layer, 0);
    case pds::kInt8Inputs: return pack_int8<uint8_t>(weight, weight_stride, layer, kInt8Offset);
    default: return pack_bfloat16(weight, weight_stride, layer);
  }
}

}  // namespace
