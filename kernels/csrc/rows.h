// Row-wise kernels over all rows of a step.
#pragma once

#include "elementwise.h"

namespace {

// Rows that are worth a thread of their own where a row is little work.
constexpr int64_t kRowsPerThread = 32;

// Runs body(row) for all rows, in ranges of rows on several threads where there are enough.
template <class Body>
void for_each_row(int64_t rows, int64_t threads, Body body) {
  struct Shared {
    Body* body;
    int64_t rows, parts;
  } shared{&body, rows, (rows + kRowsPerThread - 1) / kRowsPerThread};
  if (shared.parts > threads) shared.parts = threads;
  pds::parallel(
      threads, shared.parts,
      [](void* context, int64_t part) {
        const auto& own = *static_cast<Shared*>(context);
        const int64_t last = own.rows * (part + 1) / own.parts;
        for (int64_t row = own.rows * part / own.parts; row < last; ++row) (*own.body)(row);
      },
      &shared);
}

void silu_mul(const uint16_t* gate_up, int64_t rows, int64_t width, uint16_t* out, int64_t threads) {
  for_each_row(rows, threads, [=](int64_t r) {
    silu_mul_row(gate_up + 2 * r * width, gate_up + (2 * r + 1) * width, width, out + r * width);
  });
}

void rotate_and_store(const Projected& in, const Step& step, const KvLayer& kv, const Heads& heads, uint16_t* q_out) {
  for_each_row(step.num_tokens, step.threads, [&](int64_t t) {
    uint16_t* out = q_out + t * heads.num_heads * heads.head_dim;
    if (kv.is_float) {
      rotate_and_store_token<float>(in, step, kv, heads, t, out);
    } else {
      rotate_and_store_token<uint16_t>(in, step, kv, heads, t, out);
    }
  });
}

}  // namespace
