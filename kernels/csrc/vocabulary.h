// A model's two ends: what it looks up for each token, and which token its last hidden state stands for.
#pragma once

#include "linear.h"
#include "rows.h"

namespace {

// What a model looks up. The embedding is [V, D] in panels of bfloat16: the same as the output head's, where both are one.
struct Tables {
  Linear embedding;
  const float* cos;  // [positions, H]
  const float* sin;  // [positions, H], the first half negated
  int64_t num_positions;
  int64_t head_dim;
};

// One output's weights as they were before they were packed.
void unpack_row(const Linear& layer, int64_t row, uint16_t* out) {
  const int64_t pairs = layer.in_features / 2, panel = row / kPanel;
  const uint16_t* from = static_cast<const uint16_t*>(layer.panels) + panel * pairs_of(layer.in_features) * 2 * kPanel;
  from += row % kPanel * 2;
  for (int64_t i = 0; i < pairs; ++i) memcpy(out + 2 * i, from + i * 2 * kPanel, 2 * sizeof *out);
  if (layer.in_features % 2 != 0) out[2 * pairs] = from[pairs * 2 * kPanel];
}

bool are_in_tables(const Tables& tables, const int64_t* token_ids, const int64_t* positions, int64_t tokens) {
  bool inside = true;
  for (int64_t t = 0; t < tokens; ++t) {
    inside &= token_ids[t] >= 0 && token_ids[t] < tables.embedding.out_features;
    inside &= positions[t] >= 0 && positions[t] < tables.num_positions;
  }
  return inside;
}

// Embeddings [T, D], and the tokens' rows of both rotation tables [T, H].
void look_up(const Tables& tables, const int64_t* token_ids, const int64_t* positions, int64_t tokens,
             uint16_t* embedded, float* cos, float* sin, int64_t threads) {
  const int64_t width = tables.head_dim;
  const size_t bytes = static_cast<size_t>(width) * sizeof(float);
  for_each_row(tokens, threads, [=, &tables](int64_t t) {
    unpack_row(tables.embedding, token_ids[t], embedded + t * tables.embedding.in_features);
    memcpy(cos + t * width, tables.cos + positions[t] * width, bytes);
    memcpy(sin + t * width, tables.sin + positions[t] * width, bytes);
  });
}

// A row's largest output and the first that has it. A NaN counts as the largest.
struct Largest {
  float value;
  int64_t index;
};

constexpr Largest kNothing{-__builtin_inff(), 0};

// Takes in `count` outputs that stand behind those seen so far, the first of them number `first`.
void update_largest(const float* outputs, int64_t count, int64_t first, Largest& largest) {
  typedef int32_t Mask __attribute__((vector_size(4 * kWidth)));
  Vec most = splat(-__builtin_inff());
  Mask unordered = {};
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const Vec v = load(outputs + i);
    most = larger(v, most);  // the second where one is a NaN
    unordered |= (Mask)(v != v);
  }
  float value = max_lanes(most);
  bool has_nan = false;
  for (int lane = 0; lane < kWidth; ++lane) has_nan |= unordered[lane] != 0;
  for (; i < count; ++i) {
    value = outputs[i] > value ? outputs[i] : value;
    has_nan |= outputs[i] != outputs[i];
  }
  if (has_nan) largest.value = __builtin_nanf("");
  if (!(value > largest.value)) return;
  int64_t index = 0;
  while (outputs[index] != value) ++index;
  largest = {value, first + index};
}

// The same layer with the outputs [first, first + count) only; `first` begins a panel of `panel_bytes`.
Linear cut_outputs(const Linear& layer, int64_t first, int64_t count, int64_t panel_bytes) {
  Linear part = layer;
  part.panels = static_cast<char*>(layer.panels) + first / kPanel * panel_bytes;
  if (layer.scales != nullptr) part.scales = layer.scales + first;
  if (layer.bias != nullptr) part.bias = layer.bias + first;
  part.out_features = count;
  return part;
}

constexpr int64_t kSearchedPanels = 8;  // whose outputs are searched while they are in the cache
constexpr int64_t kSearchedOutputs = kSearchedPanels * kPanel;

// Rows times the panels [first_panel, last_panel), each row's largest output. `outputs` is memory for
// [rows, kSearchedOutputs].
template <class Product>
void search_panels(const Product& product, int64_t rows, const Linear& layer, int64_t first_panel, int64_t last_panel,
                   float* outputs, Largest* largest) {
  for (int64_t r = 0; r < rows; ++r) largest[r] = kNothing;
  for (int64_t panel = first_panel; panel < last_panel; panel += kSearchedPanels) {
    const int64_t panels = panel + kSearchedPanels < last_panel ? kSearchedPanels : last_panel - panel;
    const int64_t first = panel * kPanel, left = layer.out_features - first;
    const int64_t count = panels * kPanel < left ? panels * kPanel : left;
    const Linear part = cut_outputs(layer, first, count, product.panel_bytes());
    multiply_panels(product, LinearCall<float>{rows, &part, outputs, kSearchedOutputs, 1}, 0, panels);
    for (int64_t r = 0; r < rows; ++r) update_largest(outputs + r * kSearchedOutputs, count, first, largest[r]);
  }
}

// Each row's largest output of `multiply_linear`, without the outputs in memory. False when there is no memory.
bool find_largest(const uint16_t* x, int64_t x_stride, int64_t rows, const Linear& layer, int64_t threads, int64_t* indices,
                  float* values) {
  const size_t row_bytes = kSearchedOutputs * sizeof(float) + sizeof(Largest), part_bytes = static_cast<size_t>(rows) * row_bytes;
  auto* const memory = static_cast<char*>(pds::scratch(pds::kSearch, static_cast<size_t>(threads) * part_bytes));
  if (memory == nullptr) return false;
  const auto found_by = [=](int64_t part) { return reinterpret_cast<Largest*>(memory + static_cast<size_t>(part) * part_bytes); };
  const int64_t panels = (layer.out_features + kPanel - 1) / kPanel;
  const bool done = with_product(x, x_stride, rows, layer, threads, [&](const auto& product) {
    auto search = [&](int64_t part) {
      Largest* const largest = found_by(part);
      search_panels(product, rows, layer, panels * part / threads, panels * (part + 1) / threads,
                    reinterpret_cast<float*>(largest + rows), largest);
    };
    pds::parallel(
        threads, threads, [](void* context, int64_t part) { (*static_cast<decltype(search)*>(context))(part); }, &search);
  });
  for (int64_t r = 0; done && r < rows; ++r) {
    Largest largest = kNothing;
    for (int64_t part = 0; part < threads; ++part) {
      const Largest& other = found_by(part)[r];
      if (other.value > largest.value || other.value != other.value) largest = other;
    }
    indices[r] = largest.index;
    values[r] = largest.value;
  }
  return done;
}

}  // namespace
