// The arguments of both ways to cut a product of rows and weights into blocks.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "activation.h"

namespace jaxsgl {

// y = x weights^T.
template <typename Weight>
struct ProductOf {
  const float* x;           // rows of `in` numbers
  const Weight* weights;    // [out, in]
  float* y;                 // [T, out]
  int64_t tokens, in, out;
  const int32_t* rows = nullptr;  // [T], the rows of x that are multiplied; null: the first T
  Activation gate = Activation::kNone;  // else a gated product's: weights are [2 * out, in], the gate's and then up's
  bool is_up = false;

  const float* Row(int64_t token) const { return x + (rows ? rows[token] : token) * in; }
  void MoveToExpert(int64_t expert) { weights += expert * out * in; }
  void MoveToUp() { weights += out * in, is_up = true; }

  // Results go to `to`, in y.
  void Put(float* to, Floats results) const {
    Store(to, is_up ? Times(Activated(gate, Load(to)), results) : results);
  }
  void PutOne(float* to, float result) const {
    *to = is_up ? FirstLane(Times(Activated(gate, All(*to)), All(result))) : result;
  }
};

// The activation of this name, if so many weight rows make so many results with it.
inline std::optional<Activation> GateOf(std::string_view name, int64_t weight_rows, int64_t results) {
  const std::optional<Activation> gate = ActivationOf(name);
  const bool fits = gate && weight_rows == (*gate == Activation::kNone ? 1 : 2) * results;
  return fits ? gate : std::nullopt;
}

// work(p), and after it, if p is a gated product, work(the product with `up`).
template <typename Product, typename Work>
void WithGate(const Product& p, const Work& work) {
  work(p);
  if (p.gate == Activation::kNone) return;
  Product up = p;
  up.MoveToUp();
  work(up);
}

using Product = ProductOf<uint16_t>;  // weights are bits of bfloat16; `in` is a multiple of 32, `out` of 16

constexpr int kStretch = 8;  // lines of the cache

// The first of the lines that are prefetched beside line `line` of `rows` weight rows, which begin at `block`: kStretch
// lines each of rows / kStretch rows behind them. Memory gives lines that follow each other faster than one of each row.
template <int rows, typename Weight>
[[gnu::always_inline]] inline const Weight* LinesBehind(const Weight* block, int64_t in, int64_t line) {
  constexpr int64_t numbers = 64 / sizeof(Weight);
  return block + (rows + line % kStretch * (rows / kStretch)) * in + line / kStretch * kStretch * numbers;
}

// Memory for `count` numbers at a multiple of 64 bytes, the calling thread's until its next call. It is kept, since
// fresh memory costs system time at each call.
template <typename Number>
Number* Packed(int64_t count) {
  struct alignas(64) Line {
    char bytes[64];
  };
  thread_local std::vector<Line> lines;
  const size_t needed = (count * sizeof(Number) + 63) / 64;
  if (lines.size() < needed) lines.resize(needed);
  return reinterpret_cast<Number*>(lines.data());
}

}  // namespace jaxsgl
