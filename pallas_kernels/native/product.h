// The arguments of both ways to cut a product of rows and weights into blocks.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace jaxsgl {

// y = x weights^T.
template <typename Weight>
struct ProductOf {
  const float* x;           // rows of `in` numbers
  const Weight* weights;    // [out, in]
  float* y;                 // [T, out]
  int64_t tokens, in, out;
  const int32_t* rows = nullptr;  // [T], the rows of x that are multiplied; null: the first T

  const float* Row(int64_t token) const { return x + (rows ? rows[token] : token) * in; }
  void MoveToExpert(int64_t expert) { weights += expert * out * in; }
};

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
