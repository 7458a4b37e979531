// Attention's products for few rows, as decode has them: keys and values are read where they lie, once, while what comes
// next is asked for at an even pace. The order of every sum is that of the packed panels in attention.h.
#pragma once

#include "kv_tiles.h"

namespace {

constexpr int64_t kFewRows = 8;

// --- scores ---

// Scores [rows, 32 keys] of the keys of two runs, transposed 16 words at a time between the products that use them.
template <class Math, class Kv, int rows>
void score_in_place(const typename Math::Row* queries, int64_t head_dim, const KeyRun<Kv>& low, const KeyRun<Kv>& high,
                    float* scores) {
  constexpr int kPairWords = sizeof(Kv) / 2;
  const int64_t words = head_dim * static_cast<int64_t>(sizeof(Kv)) / 4;
  Vec sums[rows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[r][v] = splat(0.0f);
  }
  alignas(64) uint32_t panel[16 * kPanel];
  for (int64_t word = 0; word < words; word += 16) {
    transpose_16(as_words(low.from) + word, words, panel);
    transpose_16(as_words(high.from) + word, words, panel + 16);
#pragma GCC unroll 16
    for (int64_t w = 0; w < 16; w += kPairWords) {
#pragma GCC unroll 2
      for (int64_t line = word + w; line < word + w + kPairWords; ++line) {
        __builtin_prefetch(as_words(low.ahead) + line * 16, 0, 2);
        __builtin_prefetch(as_words(high.ahead) + line * 16, 0, 2);
      }
      Math::template step<rows>(sums, queries + (word + w) / kPairWords * 2, head_dim,
                                reinterpret_cast<const Kv*>(panel + w * kPanel));
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(scores + r * kTileKeys + v * kWidth, sums[r][v]);
  }
}

template <class Math, class Kv>
using ScoreInPlace = void (*)(const typename Math::Row*, int64_t, const KeyRun<Kv>&, const KeyRun<Kv>&, float*);

// Null where keys have to be packed: for more rows, and where runs are not of 16 keys and whole vectors of words.
template <class Math, class Kv>
ScoreInPlace<Math, Kv> score_function(int64_t rows, int64_t head_dim, int64_t block_shift) {
  if constexpr (PDS_LEVEL >= 2) {
    static constexpr ScoreInPlace<Math, Kv> functions[kFewRows] = {
        score_in_place<Math, Kv, 1>, score_in_place<Math, Kv, 2>, score_in_place<Math, Kv, 3>,
        score_in_place<Math, Kv, 4>, score_in_place<Math, Kv, 5>, score_in_place<Math, Kv, 6>,
        score_in_place<Math, Kv, 7>, score_in_place<Math, Kv, 8>};
    const bool whole = int64_t{1} << block_shift >= kRunKeys && head_dim * static_cast<int64_t>(sizeof(Kv)) % 64 == 0;
    if (rows <= kFewRows && whole) return functions[rows - 1];
  }
  return nullptr;
}

// --- values ---

// Two vectors of a row of values, or of its sums, hold dims in the order that is the cheapest to load: of bfloat16 even
// ones and odd ones, where that takes a shift and a mask; else as they lie.
template <class Kv>
constexpr bool kEvenAndOdd = PDS_LEVEL >= 1 && sizeof(Kv) == 2;

PDS_INLINE void load_dims(const uint16_t* from, Vec& first, Vec& second) {
  if constexpr (kEvenAndOdd<uint16_t>) {
    load_pairs(from, first, second);
  } else {
    first = load_bf16(from);
    second = load_bf16(from + kWidth);
  }
}
PDS_INLINE void load_dims(const float* from, Vec& first, Vec& second) {
  first = load(from);
  second = load(from + kWidth);
}
// Only `left` of them exist.
template <class Kv>
PDS_INLINE void load_some_dims(const Kv* from, int64_t left, Vec& first, Vec& second) {
  if (left >= 2 * kWidth) return load_dims(from, first, second);
  Kv some[2 * kWidth] = {};
  memcpy(some, from, static_cast<size_t>(left) * sizeof *from);
  load_dims(some, first, second);
}

template <class Kv>
constexpr int place_of(int vector, int lane) {
  return kEvenAndOdd<Kv> ? 2 * lane + vector : vector * kWidth + lane;
}

template <class Kv>
PDS_INLINE void load_sums(const float* from, Vec& first, Vec& second) {
  float lanes[2][kWidth];
  for (int i = 0; i < kWidth; ++i) {
    lanes[0][i] = from[place_of<Kv>(0, i)];
    lanes[1][i] = from[place_of<Kv>(1, i)];
  }
  first = load(lanes[0]);
  second = load(lanes[1]);
}
template <class Kv>
PDS_INLINE void store_sums(float* to, Vec first, Vec second) {
  float lanes[2][kWidth];
  store(lanes[0], first);
  store(lanes[1], second);
  for (int i = 0; i < kWidth; ++i) {
    to[place_of<Kv>(0, i)] = lanes[0][i];
    to[place_of<Kv>(1, i)] = lanes[1][i];
  }
}

// The dims from `dim` on: one row of values at a time, in pairs of vectors. Only `left` dims exist where not all do.
template <class Kv, int rows, int pairs, bool whole>
PDS_INLINE void add_columns(const float* probabilities, const KeyRun<Kv>* run, int64_t num_keys, int64_t head_dim,
                            int64_t dim, int64_t left, float* acc, int64_t acc_width) {
  constexpr int kPair = 2 * kWidth;
  acc += dim;
  Vec sums[rows][2 * pairs];
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
    for (int p = 0; p < pairs; ++p) load_sums<Kv>(acc + r * acc_width + p * kPair, sums[r][2 * p], sums[r][2 * p + 1]);
  }
  for (int64_t left_keys = num_keys; left_keys > 0; left_keys -= run->count, ++run) {
    const float* probability = probabilities + run->key;
    const Kv *value = run->from + dim, *ahead = run->ahead + dim;
    for (int64_t k = 0; k < least(run->count, left_keys); ++k, ++probability, value += head_dim, ahead += head_dim) {
      Vec dims[2 * pairs];
#pragma GCC unroll 2
      for (int p = 0; p < pairs; ++p) {
        for (int byte = 0; byte < static_cast<int>(kPair * sizeof(Kv)); byte += 64) {
          __builtin_prefetch(reinterpret_cast<const char*>(ahead + p * kPair) + byte, 0, 2);
        }
        load_some_dims(value + p * kPair, whole ? kPair : left, dims[2 * p], dims[2 * p + 1]);
      }
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) {
        const Vec share = splat(probability[r * kTileKeys]);
#pragma GCC unroll 4
        for (int v = 0; v < 2 * pairs; ++v) sums[r][v] = fma(share, dims[v], sums[r][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
    for (int p = 0; p < pairs; ++p) store_sums<Kv>(acc + r * acc_width + p * kPair, sums[r][2 * p], sums[r][2 * p + 1]);
  }
}

// acc [rows, head_dim] += probabilities [rows, keys] @ values [keys, head_dim], key by key as FloatMath does.
template <class Kv, int rows>
void add_in_place(const float* probabilities, const KeyRun<Kv>* run, int64_t num_keys, int64_t head_dim, float* acc,
                  int64_t acc_width) {
  constexpr int pairs = PDS_LEVEL >= 2 && rows <= 5 ? 2 : 1, width = pairs * 2 * kWidth;
  int64_t dim = 0;
  for (; dim + width <= head_dim; dim += width) {
    add_columns<Kv, rows, pairs, true>(probabilities, run, num_keys, head_dim, dim, width, acc, acc_width);
  }
  for (; dim < head_dim; dim += 2 * kWidth) {
    add_columns<Kv, rows, 1, false>(probabilities, run, num_keys, head_dim, dim, head_dim - dim, acc, acc_width);
  }
}

template <class Kv>
using AddInPlace = void (*)(const float*, const KeyRun<Kv>*, int64_t, int64_t, float*, int64_t);

template <class Kv>
AddInPlace<Kv> add_function(int64_t rows) {
  static constexpr AddInPlace<Kv> functions[kFewRows] = {add_in_place<Kv, 1>, add_in_place<Kv, 2>, add_in_place<Kv, 3>,
                                                         add_in_place<Kv, 4>, add_in_place<Kv, 5>, add_in_place<Kv, 6>,
                                                         add_in_place<Kv, 7>, add_in_place<Kv, 8>};
  return functions[rows - 1];
}

}  // namespace
