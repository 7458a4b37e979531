// Rows rounded to integers, multiplied with panels of int8 weights.
//
// A row's inputs share a scale in groups, so that a large one costs only its neighbours their precision. A group's
// products are added as integers, exactly; groups are added in float32 in ascending order, whatever the number of rows.
#pragma once

#include "panels.h"
#include "rows.h"

namespace {

// A lane holds the sum of an output, or four of its weights. Not __m512i, whose lanes are of 64 bits: GCC 12 keeps
// accumulators of that type in memory.
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));
typedef int16_t Shorts __attribute__((vector_size(4 * kWidth)));
PDS_INLINE Ints splat_int(int32_t x) { return Ints{} + x; }
PDS_INLINE Vec to_floats(Ints v) { return __builtin_convertvector(v, Vec); }
template <class Weight>
PDS_INLINE Ints load_ints(const Weight* weights) {
  Ints lanes;
  memcpy(&lanes, weights, sizeof lanes);
  return lanes;
}
// Two inputs of 16 bits, or four of 8.
template <class Input>
PDS_INLINE Ints splat_inputs(const Input* inputs) {
  int32_t together;
  memcpy(&together, inputs, sizeof together);
  return splat_int(together);
}

// --- kInt8: inputs of 16 bits ---

// acc + the products of two weights and two inputs in each lane.
PDS_INLINE Ints add_products(Ints acc, Shorts weights, Ints inputs) {
#if PDS_LEVEL == 3
  return (Ints)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)weights, (__m512i)inputs);
#elif PDS_LEVEL == 2
  return acc + (Ints)_mm512_madd_epi16((__m512i)weights, (__m512i)inputs);
#elif PDS_LEVEL == 1
  return acc + (Ints)_mm256_madd_epi16((__m256i)weights, (__m256i)inputs);
#else
  const Ints pairs = (Ints)weights;
  return acc + ((pairs << 16) >> 16) * ((inputs << 16) >> 16) + (pairs >> 16) * (inputs >> 16);
#endif
}

struct ShortMath {
  using Panel = int8_t;
  using Input = int16_t;
  static constexpr int64_t kGroup = 256;  // 32767 * 127 * 256 is below 2^31
  static constexpr int kMost = 32767, kOffset = 0;

  struct Weights {
    Shorts even, odd;  // of each four
  };
  PDS_INLINE Weights load_weights(const Panel* panel) {
    const auto four = (Shorts)load_ints(panel);
    return {(four << 8) >> 8, four >> 8};
  }
  // A quad's inputs lie in the order 0, 2, 1, 3.
  template <int chains>
  PDS_INLINE void add_quad(Ints (&acc)[chains], const Weights& weights, const Input* quad) {
    acc[0] = add_products(acc[0], weights.even, splat_inputs(quad));
    acc[chains - 1] = add_products(acc[chains - 1], weights.odd, splat_inputs(quad + 2));
  }
};

// --- kInt8Inputs: inputs of 8 bits, and weights without a sign ---

struct ByteMath {
  using Panel = uint8_t;
  using Input = int8_t;
  static constexpr int64_t kGroup = 64;
  static constexpr int kMost = 127, kOffset = kInt8Offset;

#if PDS_LEVEL == 3
  using Weights = Ints;
  PDS_INLINE Weights load_weights(const Panel* panel) { return load_ints(panel); }
  template <int chains>
  PDS_INLINE void add_quad(Ints (&acc)[chains], Weights weights, const Input* quad) {
    acc[0] = (Ints)_mm512_dpbusd_epi32((__m512i)acc[0], (__m512i)weights, (__m512i)splat_inputs(quad));
  }
#else
  struct Weights {
    Ints parts[4];
  };
  PDS_INLINE Weights load_weights(const Panel* panel) {
    const Ints four = load_ints(panel);
    return {{four & 255, (four >> 8) & 255, (four >> 16) & 255, (four >> 24) & 255}};
  }
  template <int chains>
  PDS_INLINE void add_quad(Ints (&acc)[chains], const Weights& weights, const Input* quad) {
    for (int i = 0; i < 4; ++i) acc[0] += weights.parts[i] * splat_int(quad[i]);
  }
#endif
};

// --- rows ---

struct RowGroup {
  float scale;
  int32_t start;  // what takes the panels' offset out of the group's sum
};

template <class Math>
struct IntegerRows {
  typename Math::Input* data;  // [rows, stride], zeros behind a row's last input
  int64_t stride;
  RowGroup* groups;  // [rows, row_groups]
  int64_t row_groups;
};

PDS_INLINE void store_inputs(int8_t* to, Vec integers) { store_int8(to, integers); }
PDS_INLINE void store_inputs(int16_t* to, Vec integers) {
  constexpr int order = 0xd8;  // 0, 2, 1, 3
#if PDS_LEVEL >= 2
  __m256i shorts = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(integers));
  shorts = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(shorts, order), order);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), shorts);
#elif PDS_LEVEL == 1
  const __m256i ints = _mm256_cvtps_epi32(integers);
  __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(ints), _mm256_extracti128_si256(ints, 1));
  shorts = _mm_shufflehi_epi16(_mm_shufflelo_epi16(shorts, order), order);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), shorts);
#else
  for (int i = 0; i < kWidth; ++i) to[i] = static_cast<int16_t>(integers[order >> 2 * i & 3]);
#endif
}

// One group of `count` inputs.
template <class Math>
RowGroup round_group(const uint16_t* x, int64_t count, typename Math::Input* to) {
  Vec most = splat(0.0f), nothing = splat(0.0f);  // but NaN where an input is not finite
  for (int64_t i = 0; i < count; i += kWidth) {
    const Vec v = load_some(x + i, count - i);
    most = larger(most, larger(v, splat(0.0f) - v));
    nothing = nothing + (v - v);
  }
  const float scale = max_lanes(most) / Math::kMost + sum_lanes(nothing);
  const Vec steps = splat(scale > 0.0f ? 1.0f / scale : 0.0f), limit = splat(Math::kMost);
  Vec sum = splat(0.0f);
  for (int64_t i = 0; i < Math::kGroup; i += kWidth) {
    const Vec v = i < count ? load_some(x + i, count - i) * steps : splat(0.0f);
    const Vec rounded = round_lanes(smaller(limit, larger(v, splat(0.0f) - limit)));
    store_inputs(to + i, rounded);
    sum = sum + rounded;
  }
  return {scale, -Math::kOffset * static_cast<int32_t>(sum_lanes(sum))};
}

// Null data when there is no memory.
template <class Math>
IntegerRows<Math> round_rows(const uint16_t* x, int64_t x_stride, int64_t rows, int64_t in_features, int64_t threads) {
  using Input = typename Math::Input;
  constexpr int64_t kGroup = Math::kGroup;
  IntegerRows<Math> to;
  to.row_groups = (in_features + kGroup - 1) / kGroup;
  to.stride = to.row_groups * kGroup + 64;  // so that rows do not fall into the same sets of the first-level cache
  const size_t data_bytes = static_cast<size_t>(rows * to.stride) * sizeof(Input);
  const size_t group_bytes = static_cast<size_t>(rows * to.row_groups) * sizeof(RowGroup);
  auto* memory = static_cast<char*>(pds::scratch(pds::kRows, data_bytes + group_bytes));
  to.data = reinterpret_cast<Input*>(memory);
  if (memory == nullptr) return to;
  to.groups = reinterpret_cast<RowGroup*>(memory + data_bytes);
  for_each_row(rows, threads, [=](int64_t r) {
    for (int64_t g = 0; g < to.row_groups; ++g) {
      const int64_t first = g * kGroup, left = in_features - first;
      to.groups[r * to.row_groups + g] =
          round_group<Math>(x + r * x_stride + first, left < kGroup ? left : kGroup, to.data + r * to.stride + first);
    }
  });
  return to;
}

// --- products ---

// sums [rows, kVectors * kWidth] (+)= x [rows, 4 * quads] @ weights, of one group.
template <class Math, int rows>
void multiply_group(const typename Math::Input* x, int64_t x_stride, const RowGroup* groups, int64_t groups_stride,
                    const typename Math::Panel* panel, int64_t quads, float* sums, bool accumulate, Ahead ahead) {
  // Few rows have too few sums to keep the processor busy with one chain of additions for each.
  constexpr int chains = rows <= 2 ? 2 : 1;
  Ints acc[rows][kVectors][chains] = {};
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) acc[r][v][0] = splat_int(groups[r * groups_stride].start);
  }
  const char* fetch = ahead.from;
  for (int64_t k = 0; k < quads; ++k) {
    __builtin_prefetch(fetch, 0, 2);
    __builtin_prefetch(fetch + 64, 0, 2);
    fetch += ahead.step;
    typename Math::Weights weight[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) weight[v] = Math::load_weights(panel + (k * kPanel + v * kWidth) * 4);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const typename Math::Input* quad = x + r * x_stride + 4 * k;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) Math::add_quad(acc[r][v], weight[v], quad);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
    const Vec scale = splat(groups[r * groups_stride].scale);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* sum = sums + r * kPanel + v * kWidth;
      const Ints exact = chains == 1 ? acc[r][v][0] : acc[r][v][0] + acc[r][v][chains - 1];
      store(sum, fma(to_floats(exact), scale, accumulate ? load(sum) : splat(0.0f)));
    }
  }
}

// sums [rows, 32] = x [rows, 4 * quads] @ panel.
template <class Math, int rows>
void multiply_integer_tile(const IntegerRows<Math>& x, int64_t first_row, const typename Math::Panel* panel,
                           int64_t quads, float* sums, Ahead ahead) {
  constexpr int64_t kGroupQuads = Math::kGroup / 4;
  const typename Math::Input* data = x.data + first_row * x.stride;
  const RowGroup* groups = x.groups + first_row * x.row_groups;
  for (int64_t first = 0; first < quads; first += kGroupQuads, ++groups) {
    const int64_t count = quads - first < kGroupQuads ? quads - first : kGroupQuads;
    for (int column = 0; column < kPanel; column += kVectors * kWidth) {
      multiply_group<Math, rows>(data + 4 * first, x.stride, groups, x.row_groups, panel + (first * kPanel + column) * 4,
                                 count, sums + column, first > 0, {ahead.from + first * ahead.step, ahead.step});
    }
  }
}

template <class Math>
using IntegerTileFunction = void (*)(const IntegerRows<Math>&, int64_t, const typename Math::Panel*, int64_t, float*,
                                     Ahead);

template <class Math>
IntegerTileFunction<Math> integer_tile_function(int64_t rows) {
  static constexpr IntegerTileFunction<Math> functions[] = {
      multiply_integer_tile<Math, 1>,  multiply_integer_tile<Math, 2>,  multiply_integer_tile<Math, 3>,
      multiply_integer_tile<Math, 4>,
#if PDS_LEVEL >= 1
      multiply_integer_tile<Math, 5>,  multiply_integer_tile<Math, 6>,
#endif
#if PDS_LEVEL >= 2
      multiply_integer_tile<Math, 7>,  multiply_integer_tile<Math, 8>,  multiply_integer_tile<Math, 9>,
      multiply_integer_tile<Math, 10>, multiply_integer_tile<Math, 11>, multiply_integer_tile<Math, 12>,
      multiply_integer_tile<Math, 13>, multiply_integer_tile<Math, 14>,
#endif
  };
  return functions[rows - 1];
}

}  // namespace
