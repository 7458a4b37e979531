// The float vector that one instruction set computes with, and what it does on its lanes.
//
// Contraction is off (-ffp-contract=off): a product and a sum are fused only where `fma` says so, so that a function
// gives the same bits wherever the compiler puts it.
#pragma once

#include <cstdint>
#include <cstring>

// PDS_LEVEL: 0 portable, 1 AVX2 + FMA, 2 AVX-512 (F, BW, VL, DQ), 3 AVX-512 + BF16 + VNNI.
#if PDS_LEVEL >= 1
// GCC 12 takes the intrinsics' deliberately undefined operands for mistakes (its bug 105593).
#pragma GCC diagnostic push
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#define PDS_INLINE static inline __attribute__((always_inline))

namespace {

#if PDS_LEVEL >= 2
using Vec = __m512;
constexpr int kWidth = 16;
PDS_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
PDS_INLINE void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
PDS_INLINE Vec splat(float x) { return _mm512_set1_ps(x); }
PDS_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
PDS_INLINE Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
PDS_INLINE Vec smaller(Vec a, Vec b) { return _mm512_min_ps(a, b); }
PDS_INLINE Vec zero_below(Vec v, Vec x, Vec limit) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), v);
}
PDS_INLINE Vec scale_by_bits(Vec v, Vec shifted) {
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(v), _mm512_slli_epi32(_mm512_castps_si512(shifted), 23)));
}
PDS_INLINE Vec load_bf16(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
#elif PDS_LEVEL == 1
using Vec = __m256;
constexpr int kWidth = 8;
PDS_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
PDS_INLINE void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
PDS_INLINE Vec splat(float x) { return _mm256_set1_ps(x); }
PDS_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
PDS_INLINE Vec larger(Vec a, Vec b) { return _mm256_max_ps(a, b); }
PDS_INLINE Vec smaller(Vec a, Vec b) { return _mm256_min_ps(a, b); }
PDS_INLINE Vec zero_below(Vec v, Vec x, Vec limit) { return _mm256_and_ps(v, _mm256_cmp_ps(x, limit, _CMP_NLT_UQ)); }
PDS_INLINE Vec scale_by_bits(Vec v, Vec shifted) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), _mm256_slli_epi32(_mm256_castps_si256(shifted), 23)));
}
PDS_INLINE Vec load_bf16(const uint16_t* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
#else
// The compiler's own vectors: four lanes, which every 64-bit processor has.
typedef float Vec __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef uint16_t Halves __attribute__((vector_size(8)));
constexpr int kWidth = 4;
PDS_INLINE Vec load(const float* p) {
  Vec v;
  memcpy(&v, p, sizeof v);
  return v;
}
PDS_INLINE void store(float* p, Vec v) { memcpy(p, &v, sizeof v); }
PDS_INLINE Vec splat(float x) { return Vec{x, x, x, x}; }
PDS_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }  // rounded twice
PDS_INLINE Vec choose(Ints which, Vec a, Vec b) { return (Vec)(((Ints)a & which) | ((Ints)b & ~which)); }
PDS_INLINE Vec larger(Vec a, Vec b) { return choose(a > b, a, b); }
PDS_INLINE Vec smaller(Vec a, Vec b) { return choose(a < b, a, b); }
PDS_INLINE Vec zero_below(Vec v, Vec x, Vec limit) { return choose(x < limit, splat(0.0f), v); }
PDS_INLINE Vec scale_by_bits(Vec v, Vec shifted) { return (Vec)((Ints)v + ((Ints)shifted << 23)); }
PDS_INLINE Vec load_bf16(const uint16_t* p) {
  Halves bits;
  memcpy(&bits, p, sizeof bits);
  return (Vec)(__builtin_convertvector(bits, Ints) << 16);
}
#endif

PDS_INLINE float widen(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// To the nearest, ties to even; a NaN stays one.
PDS_INLINE uint16_t narrow(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

PDS_INLINE void store_bf16(uint16_t* p, Vec v) {
#if PDS_LEVEL == 3
  const __m256bh half = _mm512_cvtneps_pbh(v);
  memcpy(p, &half, sizeof half);
#elif PDS_LEVEL == 2
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  sum = _mm512_mask_or_epi32(sum, nan, bits, _mm512_set1_epi32(0x400000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16)));
#else
  float lanes[kWidth];
  store(lanes, v);
  for (int i = 0; i < kWidth; ++i) p[i] = narrow(lanes[i]);
#endif
}

// Rounded as `store_bf16` rounds.
PDS_INLINE Vec round_bf16(Vec v) {
  uint16_t lanes[kWidth];
  store_bf16(lanes, v);
  return load_bf16(lanes);
}

// The same for the last n < kWidth elements of a row; lanes beyond are 0.
PDS_INLINE Vec load_some(const float* p, int64_t n) {
  if (n >= kWidth) return load(p);
  float lanes[kWidth] = {};
  memcpy(lanes, p, static_cast<size_t>(n) * sizeof(float));
  return load(lanes);
}
PDS_INLINE Vec load_some(const uint16_t* p, int64_t n) {
  if (n >= kWidth) return load_bf16(p);
  uint16_t lanes[kWidth] = {};
  memcpy(lanes, p, static_cast<size_t>(n) * sizeof(uint16_t));
  return load_bf16(lanes);
}
PDS_INLINE void store_some(float* p, Vec v, int64_t n) {
  if (n >= kWidth) return store(p, v);
  float lanes[kWidth];
  store(lanes, v);
  memcpy(p, lanes, static_cast<size_t>(n) * sizeof(float));
}
PDS_INLINE void store_some(uint16_t* p, Vec v, int64_t n) {
  if (n >= kWidth) return store_bf16(p, v);
  uint16_t lanes[kWidth];
  store_bf16(lanes, v);
  memcpy(p, lanes, static_cast<size_t>(n) * sizeof(uint16_t));
}

// Lanes of integers between -127 and 127 as int8.
PDS_INLINE void store_int8(int8_t* p, Vec v) {
#if PDS_LEVEL >= 2
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
#else
  float lanes[kWidth];
  store(lanes, v);
  for (int i = 0; i < kWidth; ++i) p[i] = static_cast<int8_t>(lanes[i]);
#endif
}

// To the nearest integer, ties to even; for numbers up to 2^22.
PDS_INLINE Vec round_lanes(Vec v) {
  const Vec rounder = splat(12582912.0f);  // 1.5 * 2^23
  return (v + rounder) - rounder;
}

// Over the lanes, as a tree of a fixed shape: halves are folded onto each other.
#if PDS_LEVEL >= 1
#if PDS_LEVEL >= 2
PDS_INLINE __m256 lower_half(Vec v) { return _mm512_castps512_ps256(v); }
PDS_INLINE __m256 upper_half(Vec v) { return _mm512_extractf32x8_ps(v, 1); }
PDS_INLINE float sum_lanes(__m256 v);
PDS_INLINE float max_lanes(__m256 v);
PDS_INLINE float sum_lanes(Vec v) { return sum_lanes(_mm256_add_ps(lower_half(v), upper_half(v))); }
PDS_INLINE float max_lanes(Vec v) { return max_lanes(_mm256_max_ps(lower_half(v), upper_half(v))); }
#endif
PDS_INLINE float sum_lanes(__m256 v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
PDS_INLINE float max_lanes(__m256 v) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#else
PDS_INLINE float sum_lanes(Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }
PDS_INLINE float max_lanes(Vec v) {
  float most = v[0];
  for (int i = 1; i < kWidth; ++i) most = v[i] > most ? v[i] : most;
  return most;
}
#endif

// 2^x to about 1e-7; 0 below -125, exactly 1 at 0. x above 127 counts as 127; NaN stays NaN.
PDS_INLINE Vec exp2(Vec x) {
  const Vec rounder = splat(12582912.0f);  // 1.5 * 2^23: its sum with x holds x's nearest integer in the low bits
  const Vec bounded = larger(splat(-126.0f), smaller(splat(127.0f), x));
  const Vec shifted = bounded + rounder;
  const Vec rest = bounded - (shifted - rounder);
  Vec power = splat(0.001326472032815218f);
  power = fma(power, rest, splat(0.009671512991189957f));
  power = fma(power, rest, splat(0.05550733581185341f));
  power = fma(power, rest, splat(0.24022242426872253f));
  power = fma(power, rest, splat(0.6931470036506653f));
  power = fma(power, rest, splat(1.0f));
  return zero_below(scale_by_bits(power, shifted), x, splat(-125.0f));
}

}  // namespace
