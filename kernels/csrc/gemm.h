// Matrix products of rows with panels of 32 outputs.
//
// Each output has one accumulator that takes pairs of inputs in ascending order, whatever the number of rows: a row's
// result is the same alone, among others, and in any tile. Rows are worked on in tiles that fill the registers; a
// panel stays in the second-level cache while all rows pass over it.
#pragma once

#include "api.h"
#include "simd.h"

namespace {

constexpr int kPanel = 32;
constexpr int kVectors = 2;  // of outputs at once
#if PDS_LEVEL >= 2
constexpr int kTileRows = 14;
#elif PDS_LEVEL == 1
constexpr int kTileRows = 6;
#else
constexpr int kTileRows = 4;
#endif

// A vector's worth of a panel's pairs of weights as numbers that a product takes. Panels of bfloat16 are [pairs][32][2].
#if PDS_LEVEL == 3
PDS_INLINE __m512bh load_pairs(const uint16_t* panel) {
  __m512bh weights;
  memcpy(&weights, panel, sizeof weights);
  return weights;
}
#endif
PDS_INLINE void load_pairs(const uint16_t* panel, Vec& first, Vec& second) {
#if PDS_LEVEL >= 2
  const __m512i both = _mm512_loadu_si512(panel);
  first = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
  second = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
#elif PDS_LEVEL == 1
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel));
  first = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
  second = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
#else
  float low[kWidth], high[kWidth];
  for (int i = 0; i < kWidth; ++i) {
    low[i] = widen(panel[2 * i]);
    high[i] = widen(panel[2 * i + 1]);
  }
  first = load(low);
  second = load(high);
#endif
}

// Where a panel's vector of outputs begins within one pair's elements.
template <class Panel>
constexpr int kVectorStep = sizeof(Panel) == 2 ? 2 : 1;

// bfloat16 rows, multiplied in pairs by one instruction.
#if PDS_LEVEL == 3
struct PairMath {
  using Row = uint16_t;
  using Panel = uint16_t;
  template <int rows>
  PDS_INLINE void step(Vec (&acc)[rows][kVectors], const Row* x, int64_t stride, const Panel* panel) {
    __m512bh weight[kVectors];
    for (int v = 0; v < kVectors; ++v) weight[v] = load_pairs(panel + v * kVectorStep<Panel> * kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      int32_t pair;
      memcpy(&pair, x + r * stride, sizeof pair);
      const __m512i both = _mm512_set1_epi32(pair);
      __m512bh input;
      memcpy(&input, &both, sizeof input);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], input, weight[v]);
    }
  }
};
#endif

// float32 rows.
struct WideMath {
  using Row = float;
  using Panel = uint16_t;
  template <int rows>
  PDS_INLINE void step(Vec (&acc)[rows][kVectors], const Row* x, int64_t stride, const Panel* panel) {
    Vec first[kVectors], second[kVectors];
    for (int v = 0; v < kVectors; ++v) load_pairs(panel + v * kVectorStep<Panel> * kWidth, first[v], second[v]);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const Vec input = splat(x[r * stride]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(input, first[v], acc[r][v]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const Vec input = splat(x[r * stride + 1]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(input, second[v], acc[r][v]);
    }
  }
};

// float32 rows and panels; a panel is [pairs][2][32] here.
struct FloatMath {
  using Row = float;
  using Panel = float;
  template <int rows>
  PDS_INLINE void step(Vec (&acc)[rows][kVectors], const Row* x, int64_t stride, const Panel* panel) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      Vec weight[kVectors];
      for (int v = 0; v < kVectors; ++v) weight[v] = load(panel + half * kPanel + v * kWidth);
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        const Vec input = splat(x[r * stride + half]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(input, weight[v], acc[r][v]);
      }
    }
  }
};

// What to fetch while a tile is worked on: `step` bytes a pair (or quad), in two cache lines.
struct Ahead {
  const char* from;
  int64_t step;
};

// sums [rows, 32] (+)= x [rows, 2 * pairs] @ panel.
template <class Math, int rows>
void multiply_tile(const typename Math::Row* x, int64_t x_stride, const typename Math::Panel* panel, int64_t pairs,
                   float* sums, int64_t sums_stride, bool accumulate, Ahead ahead) {
  for (int column = 0; column < kPanel; column += kVectors * kWidth) {
    Vec acc[rows][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        acc[r][v] = accumulate ? load(sums + r * sums_stride + column + v * kWidth) : splat(0.0f);
      }
    }
    const typename Math::Panel* weight = panel + column * kVectorStep<typename Math::Panel>;
    const char* fetch = ahead.from;
    for (int64_t k = 0; k < pairs; ++k) {
      __builtin_prefetch(fetch, 0, 2);
      __builtin_prefetch(fetch + 64, 0, 2);
      fetch += ahead.step;
      Math::template step<rows>(acc, x + 2 * k, x_stride, weight + k * 2 * kPanel);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) store(sums + r * sums_stride + column + v * kWidth, acc[r][v]);
    }
  }
}

template <class Math>
using TileFunction = void (*)(const typename Math::Row*, int64_t, const typename Math::Panel*, int64_t, float*, int64_t,
                              bool, Ahead);

template <class Math>
TileFunction<Math> tile_function(int64_t rows) {
  static constexpr TileFunction<Math> functions[] = {
      multiply_tile<Math, 1>, multiply_tile<Math, 2>,  multiply_tile<Math, 3>,  multiply_tile<Math, 4>,
#if PDS_LEVEL >= 1
      multiply_tile<Math, 5>, multiply_tile<Math, 6>,
#endif
#if PDS_LEVEL >= 2
      multiply_tile<Math, 7>, multiply_tile<Math, 8>,  multiply_tile<Math, 9>,  multiply_tile<Math, 10>,
      multiply_tile<Math, 11>, multiply_tile<Math, 12>, multiply_tile<Math, 13>, multiply_tile<Math, 14>,
#endif
  };
  return functions[rows - 1];
}

// Cuts `total` into the fewest parts of at most `most`, as equal as can be.
struct Cut {
  int64_t total, parts;
  Cut(int64_t total, int64_t most) : total(total), parts((total + most - 1) / most) {}
  int64_t begin(int64_t part) const { return total * part / parts; }
};

}  // namespace
