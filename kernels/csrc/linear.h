// Linear layers: rows multiplied with packed weights.
#pragma once

#include "int8_rows.h"
#include "panels.h"

namespace {

#if PDS_LEVEL == 3
using LinearMath = PairMath;
#else
using LinearMath = WideMath;
#endif
using LinearRow = LinearMath::Row;

constexpr int64_t kRowBlockBytes = 384 << 10;  // of rows and of panels that share the second-level cache
constexpr int64_t kPartBytes = 256 << 10;

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

// --- what is multiplied with what: rows in one form, panels in one format ---

// Panels of pairs of bfloat16.
struct PairProduct {
  using Panel = uint16_t;
  Rows x;
  int64_t steps;  // pairs

  int64_t row_bytes() const { return steps * 2 * static_cast<int64_t>(sizeof(LinearRow)); }
  int64_t panel_bytes() const { return steps * 2 * kPanel * static_cast<int64_t>(sizeof(Panel)); }

  void multiply(int64_t row, int64_t rows, const Panel* panel, float* sums, Ahead ahead) const {
    tile_function<LinearMath>(rows)(x.data + row * x.stride, x.stride, panel, steps, sums, kPanel, false, ahead);
  }
};

// Panels of quads of int8.
template <class Math>
struct QuadProduct {
  using Panel = typename Math::Panel;
  IntegerRows<Math> x;
  int64_t steps;  // quads

  int64_t row_bytes() const { return steps * 4 * static_cast<int64_t>(sizeof(typename Math::Input)); }
  int64_t panel_bytes() const { return steps * 4 * kPanel; }

  void multiply(int64_t row, int64_t rows, const Panel* panel, float* sums, Ahead ahead) const {
    integer_tile_function<Math>(rows)(x, row, panel, steps, sums, ahead);
  }
};

// What a vector of sums becomes before it is rounded: scaled, where the weights are integers, plus the bias.
struct Finish {
  bool has_scale, has_bias;
  Vec scale, bias;

  // Of the outputs from `first` on, `left` of which exist.
  Finish(const Linear& layer, int64_t first, int64_t left)
      : has_scale(layer.format != pds::kBfloat16),
        has_bias(layer.bias != nullptr),
        scale(has_scale ? load(layer.scales + first) : splat(1.0f)),
        bias(has_bias ? load_some(layer.bias + first, left) : splat(0.0f)) {}

  Vec of(Vec sum) const {
    if (has_scale) sum = sum * scale;
    return has_bias ? sum + bias : sum;
  }
};

// A product whose outputs are stored as they are.
template <class Out>
struct LinearCall {
  static constexpr int kStreams = 1;  // panels whose outputs are finished together
  int64_t rows;
  const Linear* layer;
  Out* out;
  int64_t out_stride;
  int64_t threads;

  int64_t num_panels() const { return (layer->out_features + kPanel - 1) / kPanel; }

  // Rounds a tile's sums once and puts them in their place.
  void finish(const float* sums, int64_t row, int64_t num_rows, int64_t panel) const {
    const int64_t first = panel * kPanel;
    for (int64_t column = 0; column < kPanel && first + column < layer->out_features; column += kWidth) {
      const int64_t left = layer->out_features - first - column;
      const Finish finish(*layer, first + column, left);
      Out* to = out + row * out_stride + first + column;
      for (int64_t r = 0; r < num_rows; ++r, to += out_stride) {
        store_some(to, finish.of(load(sums + r * kPanel + column)), left);
      }
    }
  }
};

// How far ahead of a single pass over the weights memory is asked for. Up to kLightRows rows take less time than memory
// does: the processor's own prefetching then comes first, and asking far ahead disturbs it. Measured with bfloat16: 4
// rows take a fifth less with 256 than with 4096 bytes, 8 rows a tenth less with 8192. A single row is best with 2048: with
// int8 weights it takes a quarter less than with 4096.
inline int64_t ahead_bytes(int64_t rows) {
  constexpr int64_t kLightRows = 5;
  if (rows > kLightRows) return 8192;
  return rows > 1 ? 256 : 2048;
}

// A part of the panels that stays in the second-level cache while rows pass over it: tile by tile, so that a tile's rows
// stay in the first-level cache while all panels of the part pass over them.
template <class Product, class Call>
void multiply_part(const Product& product, const Call& call, int64_t first_panel, int64_t num_panels, const Cut& tiles,
                   int64_t begin) {
  const int64_t panel_bytes = product.panel_bytes(), step_bytes = panel_bytes / product.steps;
  const int64_t stream_bytes = call.num_panels() * panel_bytes;
  const auto* panels = static_cast<const char*>(call.layer->panels) + first_panel * panel_bytes;
  float sums[Call::kStreams * kTileRows * kPanel];
  for (int64_t t = 0; t < tiles.parts; ++t) {
    const int64_t row = begin + tiles.begin(t), rows = begin + tiles.begin(t + 1) - row;
    for (int64_t p = 0; p < num_panels; ++p) {
      const int64_t fetched = (t * num_panels + p) * panel_bytes / tiles.parts;
      for (int stream = 0; stream < Call::kStreams; ++stream) {
        const char* panel = panels + stream * stream_bytes + p * panel_bytes;
        const char* next = panels + stream * stream_bytes + num_panels * panel_bytes;
        const Ahead ahead = tiles.parts == 1 ? Ahead{panel + ahead_bytes(rows), step_bytes}
                                             : Ahead{next + fetched, step_bytes / tiles.parts + 1};
        product.multiply(row, rows, reinterpret_cast<const typename Product::Panel*>(panel),
                         sums + stream * kTileRows * kPanel, ahead);
      }
      call.finish(sums, row, rows, first_panel + p);
    }
  }
}

// All rows times the panels [first_panel, last_panel) of each stream.
template <class Product, class Call>
void multiply_panels(const Product& product, const Call& call, int64_t first_panel, int64_t last_panel) {
  const Cut blocks(call.rows, (kRowBlockBytes / product.row_bytes() / kTileRows + 1) * kTileRows);
  const Cut parts(last_panel - first_panel, kPartBytes / (Call::kStreams * product.panel_bytes()) + 1);
  for (int64_t b = 0; b < blocks.parts; ++b) {
    const int64_t begin = blocks.begin(b);
    const Cut tiles(blocks.begin(b + 1) - begin, kTileRows);
    for (int64_t p = 0; p < parts.parts; ++p) {
      const int64_t first = first_panel + parts.begin(p);
      multiply_part(product, call, first, first_panel + parts.begin(p + 1) - first, tiles, begin);
    }
  }
}

template <class Product, class Call>
void multiply_on_threads(const Product& product, const Call& call) {
  struct Shared {
    const Product* product;
    const Call* call;
  } shared{&product, &call};
  pds::parallel(
      call.threads, call.threads,
      [](void* context, int64_t part) {
        const auto& own = *static_cast<Shared*>(context);
        const int64_t panels = own.call->num_panels(), threads = own.call->threads;
        multiply_panels(*own.product, *own.call, panels * part / threads, panels * (part + 1) / threads);
      },
      &shared);
}

// Calls use(product) with rows rounded to integers. False when there is no memory.
template <class Math, class Use>
bool with_integers(const uint16_t* x, int64_t x_stride, int64_t rows, const Linear& layer, int64_t threads, Use use) {
  const auto rounded = round_rows<Math>(x, x_stride, rows, layer.in_features, threads);
  if (rounded.data == nullptr) return false;
  use(QuadProduct<Math>{rounded, quads_of(layer.in_features)});
  return true;
}

// Calls use(product) with the rows in the form that the layer's weights are multiplied with. False when there is no memory.
template <class Use>
bool with_product(const uint16_t* x, int64_t x_stride, int64_t rows, const Linear& layer, int64_t threads, Use use) {
  if (layer.format == pds::kInt8) return with_integers<ShortMath>(x, x_stride, rows, layer, threads, use);
  if (layer.format == pds::kInt8Inputs) return with_integers<ByteMath>(x, x_stride, rows, layer, threads, use);
  const Rows prepared = prepare_rows(x, x_stride, rows, layer.in_features);
  if (prepared.data == nullptr) return false;
  use(PairProduct{prepared, pairs_of(layer.in_features)});
  return true;
}

// out [rows, out_features] = x [rows, in_features] @ weight.T + bias. False when there is no memory.
template <class Out>
bool multiply_linear(const uint16_t* x, int64_t x_stride, int64_t rows, const Linear& layer, Out* out,
                     int64_t out_stride, int64_t threads) {
  const LinearCall<Out> call{rows, &layer, out, out_stride, threads};
  return with_product(x, x_stride, rows, layer, threads,
                      [&](const auto& product) { multiply_on_threads(product, call); });
}

}  // namespace
