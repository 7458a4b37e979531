// Linear layers: weights packed once, rows multiplied with them.
#pragma once

#include "gemm.h"

namespace {

using pds::Linear;

#if PDS_LEVEL == 3
using LinearMath = PairMath;
#else
using LinearMath = WideMath;
#endif
using LinearRow = LinearMath::Row;

constexpr int64_t kRowBlockBytes = 384 << 10;  // of rows and of panels that share the second-level cache
constexpr int64_t kPartBytes = 256 << 10;
constexpr int64_t kAheadBytes = 4096;          // how far ahead of a single pass over the weights memory is read

PDS_INLINE int64_t pairs_of(int64_t count) { return (count + 1) / 2; }

void pack_linear(const uint16_t* weight, int64_t weight_stride, int64_t out_features, int64_t in_features,
                 uint16_t* panels) {
  const int64_t pairs = pairs_of(in_features);
  for (int64_t first = 0; first < out_features; first += kPanel, panels += pairs * kPanel * 2) {
    for (int64_t k = 0; k < pairs; ++k) {
      uint16_t* to = panels + k * kPanel * 2;
      for (int64_t o = 0; o < kPanel; ++o) {
        const bool exists = first + o < out_features;
        const uint16_t* from = weight + (first + o) * weight_stride + 2 * k;
        to[2 * o] = exists ? from[0] : 0;
        to[2 * o + 1] = exists && 2 * k + 1 < in_features ? from[1] : 0;
      }
    }
  }
}

struct Rows {
  const LinearRow* data;
  int64_t stride;
};

// Rows in the form that tiles read: pairs, and not all of them in the same sets of the first-level cache.
// Null data when there is no memory.
Rows prepare_rows(const uint16_t* x, int64_t x_stride, int64_t rows, int64_t in_features) {
  const bool aliased = rows > 4 && (x_stride * static_cast<int64_t>(sizeof(uint16_t))) % 2048 == 0;
  if (sizeof(LinearRow) == 2 && in_features % 2 == 0 && !aliased) {
    return {reinterpret_cast<const LinearRow*>(x), x_stride};
  }
  const int64_t stride = 2 * pairs_of(in_features) + 32;
  auto* copy = static_cast<LinearRow*>(pds::scratch(pds::kRows, static_cast<size_t>(rows * stride) * sizeof(LinearRow)));
  if (copy == nullptr) return {nullptr, 0};
  for (int64_t r = 0; r < rows; ++r) {
    LinearRow* to = copy + r * stride;
    const uint16_t* from = x + r * x_stride;
    if constexpr (sizeof(LinearRow) == 2) {
      memcpy(to, from, static_cast<size_t>(in_features) * sizeof *to);
    } else {
      for (int64_t i = 0; i < in_features; ++i) to[i] = widen(from[i]);
    }
    if (in_features % 2 != 0) to[in_features] = 0;
  }
  return {copy, stride};
}

// Adds the bias to a tile's sums, rounds them once and puts them in their place.
template <class Out>
void finish_tile(const float* sums, int64_t rows, int64_t first, const Linear& layer, Out* out, int64_t out_stride) {
  for (int64_t column = 0; column < kPanel && first + column < layer.out_features; column += kWidth) {
    const int64_t left = layer.out_features - first - column;
    const bool has_bias = layer.bias != nullptr;
    const Vec bias = has_bias ? load_some(layer.bias + first + column, left) : splat(0.0f);
    for (int64_t r = 0; r < rows; ++r) {
      const Vec sum = load(sums + r * kPanel + column);
      store_some(out + r * out_stride + first + column, has_bias ? sum + bias : sum, left);
    }
  }
}

template <class Out>
struct LinearCall {
  Rows x;
  int64_t rows;
  const Linear* layer;
  Out* out;
  int64_t out_stride;
  int64_t threads;
};

// A part of the panels that stays in the second-level cache while rows pass over it: tile by tile, so that a tile's rows
// stay in the first-level cache while all panels of the part pass over them.
template <class Out>
void multiply_part(const LinearCall<Out>& call, int64_t first_panel, int64_t num_panels, const Cut& tiles, int64_t begin) {
  const int64_t pairs = pairs_of(call.layer->in_features), panel_elements = pairs * kPanel * 2;
  const int64_t panel_bytes = panel_elements * static_cast<int64_t>(sizeof(uint16_t));
  const uint16_t* panels = call.layer->panels + first_panel * panel_elements;
  const auto* next = reinterpret_cast<const char*>(panels + num_panels * panel_elements);
  float sums[kTileRows * kPanel];
  for (int64_t t = 0; t < tiles.parts; ++t) {
    const int64_t row = begin + tiles.begin(t), rows = begin + tiles.begin(t + 1) - row;
    for (int64_t p = 0; p < num_panels; ++p) {
      const uint16_t* panel = panels + p * panel_elements;
      const int64_t fetched = (t * num_panels + p) * panel_bytes / tiles.parts;
      const Ahead ahead = tiles.parts == 1 ? Ahead{reinterpret_cast<const char*>(panel) + kAheadBytes, 128}
                                           : Ahead{next + fetched, 128 / tiles.parts + 1};
      tile_function<LinearMath>(rows)(call.x.data + row * call.x.stride, call.x.stride, panel, pairs, sums, kPanel, false,
                                      ahead);
      finish_tile(sums, rows, (first_panel + p) * kPanel, *call.layer, call.out + row * call.out_stride, call.out_stride);
    }
  }
}

// All rows times the panels [first_panel, last_panel).
template <class Out>
void multiply_panels(const LinearCall<Out>& call, int64_t first_panel, int64_t last_panel) {
  const int64_t pairs = pairs_of(call.layer->in_features);
  const int64_t row_bytes = 2 * pairs * static_cast<int64_t>(sizeof(LinearRow));
  const int64_t panel_bytes = 2 * pairs * kPanel * static_cast<int64_t>(sizeof(uint16_t));
  const Cut blocks(call.rows, (kRowBlockBytes / row_bytes / kTileRows + 1) * kTileRows);
  const Cut parts(last_panel - first_panel, kPartBytes / panel_bytes + 1);
  for (int64_t b = 0; b < blocks.parts; ++b) {
    const int64_t begin = blocks.begin(b);
    const Cut tiles(blocks.begin(b + 1) - begin, kTileRows);
    for (int64_t p = 0; p < parts.parts; ++p) {
      const int64_t first = first_panel + parts.begin(p);
      multiply_part(call, first, first_panel + parts.begin(p + 1) - first, tiles, begin);
    }
  }
}

// out [rows, out_features] = x [rows, in_features] @ weight.T + bias. False when there is no memory.
template <class Out>
bool multiply_linear(const uint16_t* x, int64_t x_stride, int64_t rows, const Linear& layer, Out* out,
                     int64_t out_stride, int64_t threads) {
  LinearCall<Out> call{prepare_rows(x, x_stride, rows, layer.in_features), rows, &layer, out, out_stride, threads};
  if (call.x.data == nullptr) return false;
  pds::parallel(
      threads, threads,
      [](void* context, int64_t part) {
        const auto& own = *static_cast<LinearCall<Out>*>(context);
        const int64_t panels = (own.layer->out_features + kPanel - 1) / kPanel;
        multiply_panels(own, panels * part / own.threads, panels * (part + 1) / own.threads);
      },
      &call);
  return true;
}

}  // namespace
