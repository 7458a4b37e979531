// Rows rounded to int8, multiplied with panels of kInt8Inputs.
//
// A row's inputs share a scale in groups of 64, so that a large one costs only its neighbours their precision. A group's
// products are added as integers, exactly; groups are added in float32 in ascending order, whatever the number of rows.
#pragma once

#include "panels.h"
#include "rows.h"

namespace {

constexpr int64_t kGroup = 64;
constexpr int64_t kGroupQuads = kGroup / 4;

struct RowGroup {
  float scale;
  int32_t start;  // what takes the panels' offset out of the group's sum
};

struct Int8Rows {
  int8_t* data;  // [rows, stride], zeros behind a row's last input
  int64_t stride;
  RowGroup* groups;  // [rows, row_groups]
  int64_t row_groups;
};

// One group of `count` inputs.
RowGroup round_group(const uint16_t* x, int64_t count, int8_t* to) {
  Vec most = splat(0.0f), nothing = splat(0.0f);  // but NaN where an input is not finite
  for (int64_t i = 0; i < count; i += kWidth) {
    const Vec v = load_some(x + i, count - i);
    most = larger(most, larger(v, splat(0.0f) - v));
    nothing = nothing + (v - v);
  }
  const float scale = max_lanes(most) / kInt8Most + sum_lanes(nothing);
  const Vec steps = splat(scale > 0.0f ? 1.0f / scale : 0.0f), limit = splat(kInt8Most);
  Vec sum = splat(0.0f);
  for (int64_t i = 0; i < kGroup; i += kWidth) {
    const Vec v = i < count ? load_some(x + i, count - i) * steps : splat(0.0f);
    const Vec rounded = round_lanes(smaller(limit, larger(v, splat(0.0f) - limit)));
    store_int8(to + i, rounded);
    sum = sum + rounded;
  }
  return {scale, -kInt8Offset * static_cast<int32_t>(sum_lanes(sum))};
}

// Null data when there is no memory.
Int8Rows round_rows(const uint16_t* x, int64_t x_stride, int64_t rows, int64_t in_features, int64_t threads) {
  Int8Rows to;
  to.row_groups = (in_features + kGroup - 1) / kGroup;
  to.stride = to.row_groups * kGroup + 64;  // so that rows do not fall into the same sets of the first-level cache
  const size_t data_bytes = static_cast<size_t>(rows * to.stride);
  const size_t group_bytes = static_cast<size_t>(rows * to.row_groups) * sizeof(RowGroup);
  to.data = static_cast<int8_t*>(pds::scratch(pds::kRows, data_bytes + group_bytes));
  if (to.data == nullptr) return to;
  to.groups = reinterpret_cast<RowGroup*>(to.data + data_bytes);
  for_each_row(rows, threads, [=](int64_t r) {
    for (int64_t g = 0; g < to.row_groups; ++g) {
      const int64_t first = g * kGroup, left = in_features - first;
      to.groups[r * to.row_groups + g] =
          round_group(x + r * x_stride + first, left < kGroup ? left : kGroup, to.data + r * to.stride + first);
    }
  });
  return to;
}

// A lane holds the sum of an output, four weights of it without sign, or four inputs with one. Not __m512i, whose lanes
// are of 64 bits: GCC 12 keeps accumulators of that type in memory.
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));
PDS_INLINE Ints splat_int(int32_t x) { return Ints{} + x; }
PDS_INLINE Vec to_floats(Ints v) { return __builtin_convertvector(v, Vec); }
#if PDS_LEVEL == 3
using Quads = Ints;
PDS_INLINE Quads load_quads(const uint8_t* weights) {
  Quads lanes;
  memcpy(&lanes, weights, sizeof lanes);
  return lanes;
}
PDS_INLINE Quads splat_quad(const int8_t* inputs) {
  int32_t quad;
  memcpy(&quad, inputs, sizeof quad);
  return splat_int(quad);
}
PDS_INLINE Ints add_quads(Ints acc, Quads weights, Quads inputs) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)weights, (__m512i)inputs);
}
#else
struct Quads {
  Ints parts[4];
};
PDS_INLINE Quads load_quads(const uint8_t* weights) {
  Ints lanes;
  memcpy(&lanes, weights, sizeof lanes);
  return {{lanes & 255, (lanes >> 8) & 255, (lanes >> 16) & 255, (lanes >> 24) & 255}};
}
PDS_INLINE Quads splat_quad(const int8_t* inputs) {
  return {{splat_int(inputs[0]), splat_int(inputs[1]), splat_int(inputs[2]), splat_int(inputs[3])}};
}
PDS_INLINE Ints add_quads(Ints acc, const Quads& weights, const Quads& inputs) {
  for (int i = 0; i < 4; ++i) acc += weights.parts[i] * inputs.parts[i];
  return acc;
}
#endif

// sums [rows, kVectors * kWidth] (+)= x [rows, 4 * quads] @ weights, of one group.
template <int rows>
void multiply_group(const int8_t* x, int64_t x_stride, const RowGroup* groups, int64_t groups_stride,
                    const uint8_t* weights, int64_t quads, float* sums, bool accumulate, Ahead ahead) {
  Ints acc[rows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) acc[r][v] = splat_int(groups[r * groups_stride].start);
  }
  const char* fetch = ahead.from;
  for (int64_t k = 0; k < quads; ++k) {
    __builtin_prefetch(fetch, 0, 2);
    __builtin_prefetch(fetch + 64, 0, 2);
    fetch += ahead.step;
    Quads weight[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) weight[v] = load_quads(weights + (k * kPanel + v * kWidth) * 4);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const Quads input = splat_quad(x + r * x_stride + 4 * k);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[r][v] = add_quads(acc[r][v], weight[v], input);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
    const Vec scale = splat(groups[r * groups_stride].scale);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* sum = sums + r * kPanel + v * kWidth;
      store(sum, fma(to_floats(acc[r][v]), scale, accumulate ? load(sum) : splat(0.0f)));
    }
  }
}

// sums [rows, 32] = x [rows, 4 * quads] @ panel.
template <int rows>
void multiply_int8_tile(const Int8Rows& x, int64_t first_row, const uint8_t* panel, int64_t quads, float* sums, Ahead ahead) {
  const int8_t* data = x.data + first_row * x.stride;
  const RowGroup* groups = x.groups + first_row * x.row_groups;
  for (int64_t first = 0; first < quads; first += kGroupQuads, ++groups) {
    const int64_t count = quads - first < kGroupQuads ? quads - first : kGroupQuads;
    for (int column = 0; column < kPanel; column += kVectors * kWidth) {
      multiply_group<rows>(data + 4 * first, x.stride, groups, x.row_groups, panel + (first * kPanel + column) * 4, count,
                           sums + column, first > 0, {ahead.from + first * ahead.step, ahead.step});
    }
  }
}

using Int8TileFunction = void (*)(const Int8Rows&, int64_t, const uint8_t*, int64_t, float*, Ahead);

Int8TileFunction int8_tile_function(int64_t rows) {
  static constexpr Int8TileFunction functions[] = {
      multiply_int8_tile<1>,  multiply_int8_tile<2>,  multiply_int8_tile<3>,  multiply_int8_tile<4>,
#if PDS_LEVEL >= 1
      multiply_int8_tile<5>,  multiply_int8_tile<6>,
#endif
#if PDS_LEVEL >= 2
      multiply_int8_tile<7>,  multiply_int8_tile<8>,  multiply_int8_tile<9>,  multiply_int8_tile<10>,
      multiply_int8_tile<11>, multiply_int8_tile<12>, multiply_int8_tile<13>, multiply_int8_tile<14>,
#endif
  };
  return functions[rows - 1];
}

}  // namespace
