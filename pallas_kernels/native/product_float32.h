// Rows times float32 weights, as pieces of a grouped product: for models in float32, mostly small ones and tests.
//
// Up to kFewFloats rows are multiplied one by one with kLanes weight rows, transposed in registers. More are packed in
// strips, as a register's lanes, and weights become the left side. Each result is summed over the inputs in order in
// both. XLA multiplies single matrices in float32; it can't choose among several without copying them.

#pragma once

#include <algorithm>
#include <type_traits>

#include "blocks.h"
#include "product.h"

namespace jaxsgl {
namespace {

using FloatProduct = ProductOf<float>;  // `in` and `out` are multiples of 16

constexpr int kFewFloats = 4;  // rows

// Multiplies kLanes weight rows from `begin` on with T rows, packed [in, T].
template <int T>
void MultiplyFewFloats(const FloatProduct& p, int64_t begin, const float* packed) {
  Floats sum[T];
  for (int t = 0; t < T; ++t) sum[t] = Zero();
  for (int64_t i = 0; i < p.in; i += kLanes) {
    const float* const behind = LinesBehind<kLanes>(p.weights + begin * p.in, p.in, i / 16);
    Bits block[kLanes];
    for (int j = 0; j < kLanes; ++j) {
      block[j] = LoadBits(p.weights + (begin + j) * p.in + i);
      if (i % 16 == 0) Prefetch(behind + j / kStretch * p.in + j % kStretch * 16);
    }
    Transpose(block);
#pragma GCC unroll 16
    for (int j = 0; j < kLanes; ++j)
      for (int t = 0; t < T; ++t) sum[t] = TimesPlus(All(packed[(i + j) * T + t]), AsFloats(block[j]), sum[t]);
  }
  for (int t = 0; t < T && t < p.tokens; ++t) Store(p.y + t * p.out + begin, sum[t]);
}

// Weight rows that are multiplied with a strip of V registers. At most 8: rows often begin 4096 bytes apart, and the
// nearest cache keeps only 8 to 12 lines of such addresses.
template <int V>
constexpr int kStripRows = std::min(8, kLanes / V);

// Multiplies kStripRows weight rows from `begin` on with up to kLanes * V rows from `first` on, packed [in, kLanes * V].
// Prefetches as many weight rows behind these.
template <int V>
void MultiplyFloatStrip(const FloatProduct& p, int64_t first, int64_t begin, const float* packed) {
  constexpr int R = kStripRows<V>;
  const float* const weights = p.weights + begin * p.in;
  Floats sum[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = Zero();
  for (int64_t line = 0; line < p.in; line += 16) {
    for (int r = 0; r < R; ++r) Prefetch(weights + (R + r) * p.in + line);
    for (int64_t i = line; i < line + 16; ++i) {
      Floats right[V];
      for (int v = 0; v < V; ++v) right[v] = Load(packed + (i * V + v) * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const Floats left = All(weights[r * p.in + i]);
        for (int v = 0; v < V; ++v) sum[r][v] = TimesPlus(left, right[v], sum[r][v]);
      }
    }
  }
  alignas(64) float sums[R][V * kLanes];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) Store(sums[r] + v * kLanes, sum[r][v]);
  for (int t = 0; t < V * kLanes && first + t < p.tokens; ++t)
    for (int r = 0; r < R; ++r) p.y[(first + t) * p.out + begin + r] = sums[r][t];
}

// Calls `work` with the number of rows that are multiplied one by one. A single one takes longer than with zeros beside
// it: each of its sums waits for the one before.
template <typename Work>
void WithFewFloats(const FloatProduct& p, const Work& work) {
  if (p.tokens <= 2) return work(std::integral_constant<int, 2>());
  work(std::integral_constant<int, kFewFloats>());
}

struct FloatPieces {
  using Product = FloatProduct;
  static constexpr int64_t kMost = 64, kRows = 16;

  static int64_t Most(const FloatProduct&) { return kMost; }

  // Rows of a strip: a register of them if the piece has no more, else two.
  static int64_t Strip(const FloatProduct& p, int64_t first) { return p.tokens - first <= kLanes ? kLanes : 2 * kLanes; }

  static int64_t Strips(const FloatProduct& p, int64_t first) {
    return (std::min(kMost, p.tokens - first) + Strip(p, first) - 1) / Strip(p, first);
  }

  static int64_t PackedBytes(const FloatProduct& p, int64_t first) {
    return p.in * (p.tokens <= kFewFloats ? kFewFloats : Strips(p, first) * Strip(p, first)) * int64_t(sizeof(float));
  }

  static void PackRows(const FloatProduct& p, int64_t first, void* packed) {
    float* to = static_cast<float*>(packed);
    if (p.tokens <= kFewFloats) {
      return WithFewFloats(p, [&](auto few) {
        constexpr int T = decltype(few)::value;
        for (int t = 0; t < T; ++t)
          for (int64_t i = 0; i < p.in; ++i) to[i * T + t] = t < p.tokens ? p.Row(t)[i] : 0;
      });
    }
    const int64_t strip = Strip(p, first);
    for (const int64_t end = first + Strips(p, first) * strip; first < end; first += strip) {
      for (int64_t i = 0; i < p.in; i += kLanes, to += kLanes * strip) {
        for (int64_t v = 0; v < strip; v += kLanes) {
          Bits block[kLanes];
          for (int j = 0; j < kLanes; ++j) {
            const bool is_row = first + v + j < p.tokens;
            block[j] = is_row ? LoadBits(p.Row(first + v + j) + i) : Bits{};
          }
          Transpose(block);
          for (int j = 0; j < kLanes; ++j) StoreBits(to + j * strip + v, block[j]);
        }
      }
    }
  }

  static void Multiply(const FloatProduct& p, int64_t first, int64_t begin, int64_t rows, const void* packed) {
    const float* const from = static_cast<const float*>(packed);
    const int64_t end = begin + rows, strip = Strip(p, first);
    if (p.tokens <= kFewFloats) {
      return WithFewFloats(p, [&](auto few) {
        for (int64_t b = begin; b < end; b += kLanes) MultiplyFewFloats<decltype(few)::value>(p, b, from);
      });
    }
    if (strip == kLanes) {
      for (; begin < end; begin += kStripRows<1>) MultiplyFloatStrip<1>(p, first, begin, from);
      return;
    }
    for (; begin < end; begin += kStripRows<2>)
      for (int64_t i = 0; i < Strips(p, first); ++i)
        MultiplyFloatStrip<2>(p, first + i * strip, begin, from + i * strip * p.in);
  }
};

}  // namespace
}  // namespace jaxsgl
