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

constexpr int kFewFloats = 8;             // rows
constexpr int kFloatStrip = 2 * kLanes;   // rows
constexpr int kFloatRows = kLanes / 2;    // weight rows at once: sums fill half of the registers

// Multiplies kLanes weight rows from `begin` on with T rows, packed [in, T].
template <int T>
void MultiplyFewFloats(const FloatProduct& p, int64_t begin, const float* packed) {
  Floats sum[T];
  for (int t = 0; t < T; ++t) sum[t] = Zero();
  for (int64_t i = 0; i < p.in; i += kLanes) {
    Bits block[kLanes];
    for (int j = 0; j < kLanes; ++j) {
      const float* const weights = p.weights + (begin + j) * p.in + i;
      block[j] = LoadBits(weights);
      if (i % 16 == 0) Prefetch(reinterpret_cast<const uint16_t*>(weights + kLanes * p.in));
    }
    Transpose(block);
#pragma GCC unroll 16
    for (int j = 0; j < kLanes; ++j)
      for (int t = 0; t < T; ++t) sum[t] = TimesPlus(All(packed[(i + j) * T + t]), AsFloats(block[j]), sum[t]);
  }
  for (int t = 0; t < T && t < p.tokens; ++t) Store(p.y + t * p.out + begin, sum[t]);
}

// Multiplies kFloatRows weight rows from `begin` on with up to kFloatStrip rows from `first` on, packed [in, strip].
inline void MultiplyFloatStrip(const FloatProduct& p, int64_t first, int64_t begin, const float* packed) {
  const float* const weights = p.weights + begin * p.in;
  Floats sum[kFloatRows][2];
#pragma GCC unroll 8
  for (int r = 0; r < kFloatRows; ++r) sum[r][0] = sum[r][1] = Zero();
  for (int64_t i = 0; i < p.in; ++i) {
    const Floats right[2] = {Load(packed + i * kFloatStrip), Load(packed + i * kFloatStrip + kLanes)};
#pragma GCC unroll 8
    for (int r = 0; r < kFloatRows; ++r) {
      const Floats left = All(weights[r * p.in + i]);
      for (int v = 0; v < 2; ++v) sum[r][v] = TimesPlus(left, right[v], sum[r][v]);
    }
  }
  alignas(64) float sums[kFloatRows][kFloatStrip];
#pragma GCC unroll 8
  for (int r = 0; r < kFloatRows; ++r)
    for (int v = 0; v < 2; ++v) Store(sums[r] + v * kLanes, sum[r][v]);
  for (int t = 0; t < kFloatStrip && first + t < p.tokens; ++t)
    for (int r = 0; r < kFloatRows; ++r) p.y[(first + t) * p.out + begin + r] = sums[r][t];
}

// Calls `work` with the number of rows that are multiplied one by one: a power of two.
template <typename Work>
void WithFewFloats(const FloatProduct& p, const Work& work) {
  if (p.tokens <= 1) return work(std::integral_constant<int, 1>());
  if (p.tokens <= 2) return work(std::integral_constant<int, 2>());
  if (p.tokens <= 4) return work(std::integral_constant<int, 4>());
  work(std::integral_constant<int, kFewFloats>());
}

struct FloatPieces {
  using Weight = float;
  static constexpr int64_t kMost = 64, kRows = 16;

  static int64_t Strips(const FloatProduct& p, int64_t first) {
    return (std::min(kMost, p.tokens - first) + kFloatStrip - 1) / kFloatStrip;
  }

  static int64_t PackedBytes(const FloatProduct& p, int64_t first) {
    return p.in * (p.tokens <= kFewFloats ? kFewFloats : Strips(p, first) * kFloatStrip) * int64_t(sizeof(float));
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
    for (const int64_t end = first + Strips(p, first) * kFloatStrip; first < end; first += kFloatStrip) {
      for (int64_t i = 0; i < p.in; i += kLanes, to += kLanes * kFloatStrip) {
        for (int v = 0; v < kFloatStrip; v += kLanes) {
          Bits block[kLanes];
          for (int j = 0; j < kLanes; ++j) {
            const bool is_row = first + v + j < p.tokens;
            block[j] = is_row ? LoadBits(p.Row(first + v + j) + i) : Bits{};
          }
          Transpose(block);
          for (int j = 0; j < kLanes; ++j) StoreBits(to + j * kFloatStrip + v, block[j]);
        }
      }
    }
  }

  static void Multiply(const FloatProduct& p, int64_t first, int64_t begin, int64_t rows, const void* packed) {
    const float* const from = static_cast<const float*>(packed);
    const int64_t end = begin + rows, strips = Strips(p, first);
    if (p.tokens <= kFewFloats) {
      return WithFewFloats(p, [&](auto few) {
        for (int64_t b = begin; b < end; b += kLanes) MultiplyFewFloats<decltype(few)::value>(p, b, from);
      });
    }
    for (; begin < end; begin += kFloatRows)
      for (int64_t s = 0; s < strips; ++s)
        MultiplyFloatStrip(p, first + s * kFloatStrip, begin, from + s * kFloatStrip * p.in);
  }
};

}  // namespace
}  // namespace jaxsgl
