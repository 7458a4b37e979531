// The library's functions. Compiled once for each instruction set, with -DPDS_LEVEL=n and its -m flags.
#include "attention.h"
#include "decoder.h"
#include "exchange.h"
#include "linear.h"
#include "rows.h"
#include "vocabulary.h"

#define PDS_API __attribute__((visibility("default")))

namespace {

// The slots of a step's tokens, by its block table. False where a request's tokens lie outside its row of the table.
bool find_slots(const Step& step, const KvLayer& kv, int64_t* slots) {
  for (int64_t r = 0; r < step.num_requests; ++r) {
    const int64_t first = step.query_start_loc[r], last = step.query_start_loc[r + 1], seq_len = step.seq_lens[r];
    if (last - first > seq_len || seq_len > step.table_stride << kv.block_shift) return false;
    const int64_t* blocks = step.block_table + r * step.table_stride;
    for (int64_t t = first; t < last; ++t) {
      const int64_t position = seq_len - (last - t), index = position >> kv.block_shift;
      slots[t] = blocks[index] * (int64_t{1} << kv.block_shift) + position - (index << kv.block_shift);
    }
  }
  return true;
}

enum Status : int { kDone = 0, kNoMemory = 1, kOutsidePool = 2, kOutsideTables = 3, kNobodyCame = 4 };

}  // namespace

extern "C" {

PDS_API void pds_pack_linear(const uint16_t* weight, int64_t weight_stride, const Linear* layer) {
  pack_linear(weight, weight_stride, *layer);
}

PDS_API int pds_linear(const uint16_t* x, int64_t x_stride, int64_t rows, const Linear* layer, uint16_t* out,
                       int64_t threads) {
  return multiply_linear(x, x_stride, rows, *layer, out, layer->out_features, threads) ? kDone : kNoMemory;
}

PDS_API int pds_linear_float32(const uint16_t* x, int64_t x_stride, int64_t rows, const Linear* layer, float* out,
                               int64_t threads) {
  return multiply_linear(x, x_stride, rows, *layer, out, layer->out_features, threads) ? kDone : kNoMemory;
}

// Each row's largest output, with the lowest index among equals.
PDS_API int pds_linear_argmax(const uint16_t* x, int64_t x_stride, int64_t rows, const Linear* layer, int64_t* indices,
                              float* values, int64_t threads) {
  return find_largest(x, x_stride, rows, *layer, threads, indices, values) ? kDone : kNoMemory;
}

PDS_API int pds_look_up(const Tables* tables, const int64_t* token_ids, const int64_t* positions, int64_t tokens,
                        uint16_t* embedded, float* cos, float* sin, int64_t threads) {
  if (!are_in_tables(*tables, token_ids, positions, tokens)) return kOutsideTables;
  look_up(*tables, token_ids, positions, tokens, embedded, cos, sin, threads);
  return kDone;
}

PDS_API void pds_rms_norm(const uint16_t* x, int64_t rows, int64_t width, const uint16_t* weight, float eps,
                          uint16_t* out, int64_t threads) {
  for_each_row(rows, threads, [=](int64_t r) { rms_norm_row(x + r * width, weight, width, eps, out + r * width); });
}

PDS_API void pds_add_rms_norm(const uint16_t* x, uint16_t* residual, int64_t rows, int64_t width,
                              const uint16_t* weight, float eps, uint16_t* out, int64_t threads) {
  for_each_row(rows, threads, [=](int64_t r) {
    add_row(x + r * width, residual + r * width, width);
    rms_norm_row(residual + r * width, weight, width, eps, out + r * width);
  });
}

PDS_API void pds_silu_mul(const uint16_t* gate_up, int64_t rows, int64_t width, uint16_t* out, int64_t threads) {
  silu_mul(gate_up, rows, width, out, threads);
}

PDS_API int pds_rotate_and_store(const Projected* in, const Step* step, const KvLayer* kv, const Heads* heads,
                                 uint16_t* q_out) {
  if (!fits(*step, *kv)) return kOutsidePool;
  rotate_and_store(*in, *step, *kv, *heads, q_out);
  return kDone;
}

PDS_API int pds_attend(const uint16_t* q, const Step* step, const KvLayer* kv, const Heads* heads, uint16_t* out) {
  if (!fits(*step, *kv)) return kOutsidePool;
  return attend(q, *step, *kv, *heads, out) ? kDone : kNoMemory;
}

PDS_API int64_t pds_workspace_elements(const Decoder* decoder, int64_t num_tokens) {
  return Pass::workspace_elements(*decoder, num_tokens);
}

// Runs stages [first_stage, last_stage) of a step; `kv` is the first layer's, the others follow `layer_stride` apart.
// The step's slots are found here.
PDS_API int pds_decode_layers(const Decoder* decoder, const Step* step, const KvLayer* kv, int64_t layer_stride,
                              uint16_t* residual, uint16_t* hidden, uint16_t* workspace, int64_t first_stage,
                              int64_t last_stage) {
  Step whole = *step;
  auto* slots = static_cast<int64_t*>(pds::scratch(pds::kSlots, static_cast<size_t>(step->num_tokens) * sizeof(int64_t)));
  if (slots == nullptr) return kNoMemory;
  whole.slot_mapping = slots;
  if (!find_slots(*step, *kv, slots) || !fits(whole, *kv)) return kOutsidePool;
  Pass pass(*decoder, whole, *kv, layer_stride, residual, hidden, workspace);
  for (int64_t stage = first_stage; stage < last_stage; ++stage) {
    if (!pass.run(stage)) return kNoMemory;
  }
  return kDone;
}

PDS_API int64_t pds_exchange_bytes(int64_t ranks) { return Exchange::num_bytes(ranks); }

PDS_API int pds_gather(void* memory, int64_t rank, int64_t ranks, int64_t timeout_ms, const void* columns, int64_t rows,
                       int64_t row_bytes, void* out) {
  if (row_bytes > kSlotBytes) return kNoMemory;
  Exchange exchange(memory, rank, ranks, timeout_ms);
  const bool done = exchange.gather(static_cast<const char*>(columns), rows, row_bytes, static_cast<char*>(out));
  return done ? kDone : kNobodyCame;
}

}  // extern "C"
