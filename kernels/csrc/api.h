// What the library and its caller agree on. Plain C; sizes are elements unless they say bytes.
// T packed tokens, R requests, N query heads, K KV heads, H head dim, D model dim, I feed-forward dim, S block size.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pds {

// One step; see AttentionMetadata in base.py.
struct Step {
  int64_t num_tokens;
  int64_t num_requests;
  const int64_t* query_start_loc;  // [R + 1]
  const int64_t* seq_lens;         // [R]
  const int64_t* block_table;      // [R, table_stride]
  int64_t table_stride;
  const int64_t* slot_mapping;  // [T]
  const float* cos;             // [T, H]
  const float* sin;             // [T, H], the first half negated
  int64_t threads;
};

// One layer of KV memory, [B, 2, K, S, H] with strides of its own.
struct KvLayer {
  void* base;
  int64_t block_stride;
  int64_t value_stride;  // from a block's keys to its values
  int64_t head_stride;
  int64_t block_shift;  // S = 2^block_shift
  int64_t num_blocks;
  int64_t is_float;  // 1 float32, 0 bfloat16
};

struct Heads {
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  float scale;
};

// How a linear layer's weights are kept, in panels of 32 outputs, zeros where a panel, pair or quad of inputs is not full.
enum WeightFormat : int64_t {
  kBfloat16,    // [pairs][32][2] bfloat16
  kInt8,        // [quads][32][4] int8, times the output's scale; inputs are rounded to 16 bits
  kInt8Inputs,  // [quads][32][4] uint8, 128 above the int8 that kInt8 has; inputs are rounded to int8
};

struct Linear {
  void* panels;
  float* scales;         // [panels * 32], of the int8 formats
  const uint16_t* bias;  // or null
  int64_t in_features;
  int64_t out_features;
  int64_t format;
};

// Runs work(context, item) for each item of [0, count), on up to `threads` threads, the caller's included.
// Items are independent, so who runs which changes no result.
void parallel(int64_t threads, int64_t count, void (*work)(void* context, int64_t item), void* context);

// Memory of the calling thread, 64-byte aligned, kept for its next call with the same slot. Null when there is none.
enum ScratchSlot { kRows, kItems, kAttention, kSearch, kSlots, kGateUp, kBlock, kNumSlots };
void* scratch(ScratchSlot slot, size_t num_bytes);

}  // namespace pds
