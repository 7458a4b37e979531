// The first half of a gated feed-forward: silu(x @ gate.T) * (x @ up.T) without the two products in memory.
//
// A layer's outputs are the gate's, then the up projection's. Their panels of the same place are multiplied one after the
// other, and finished together; each product is rounded as it would be on its way through memory.
#pragma once

#include "linear.h"

namespace {

struct GatedCall {
  static constexpr int kStreams = 2;
  int64_t rows;
  const Linear* layer;
  uint16_t* out;  // [rows, out_features / 2]
  int64_t threads;

  int64_t width() const { return layer->out_features / 2; }
  int64_t num_panels() const { return width() / kPanel; }

  void finish(const float* sums, int64_t row, int64_t num_rows, int64_t panel) const {
    const float* up_sums = sums + kTileRows * kPanel;
    for (int64_t column = 0; column < kPanel; column += kWidth) {
      const int64_t first = panel * kPanel + column;
      const Finish gate(*layer, first, kWidth), up(*layer, width() + first, kWidth);
      uint16_t* to = out + row * width() + first;
      for (int64_t r = 0; r < num_rows; ++r, to += width()) {
        const Vec gate_rounded = round_bf16(gate.of(load(sums + r * kPanel + column)));
        store_bf16(to, silu_mul(gate_rounded, round_bf16(up.of(load(up_sums + r * kPanel + column)))));
      }
    }
  }
};

// out [rows, out_features / 2]. False when there is no memory.
bool multiply_gated(const uint16_t* x, int64_t x_stride, int64_t rows, const Linear& layer, uint16_t* out, int64_t threads) {
  const GatedCall call{rows, &layer, out, threads};
  // A single tile passes over weights that come from memory, which are read best from the first to the last.
  if (rows > kTileRows && call.width() % kPanel == 0) {
    return with_product(x, x_stride, rows, layer, threads,
                        [&](const auto& product) { multiply_on_threads(product, call); });
  }
  const size_t num_bytes = static_cast<size_t>(rows * layer.out_features) * sizeof(uint16_t);
  auto* gate_up = static_cast<uint16_t*>(pds::scratch(pds::kGateUp, num_bytes));
  if (gate_up == nullptr || !multiply_linear(x, x_stride, rows, layer, gate_up, layer.out_features, threads)) return false;
  silu_mul(gate_up, rows, call.width(), out, threads);
  return true;
}

}  // namespace
