// Rows times weights where registers have 256 bits, widened.
//
// 16 such registers hold sums of few weights and tokens, so both sides are cut as matrix libraries do it (Goto and van
// de Geijn, 2008): up to kDepth inputs of kStrip tokens stay in the first level of cache while kShare weight rows,
// widened once, pass by, 6 at a time. Tokens too few to fill a register become the left side instead.

#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "blocks.h"
#include "product.h"

namespace jaxsgl {
namespace {

constexpr int kShare = 12;      // weight rows
constexpr int kDepth = 128;     // inputs
constexpr int kStrip = 16;      // tokens: 2 registers
constexpr int kMaxTokens = 64;  // at a time
constexpr int kFew = 8;         // tokens that are multiplied one by one

struct ShareScratch {
  alignas(64) float weights[kShare][kDepth];
  alignas(64) float sums[kShare][kMaxTokens];
};

// sums [R, kStrip] += weights [R, depth] packed [depth, kStrip].
template <int R>
void AddProducts(const float (*weights)[kDepth], const float* packed, int depth, float (*sums)[kMaxTokens]) {
  Floats sum[R][2];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2; ++v) sum[r][v] = Load(sums[r] + kLanes * v);
  for (int i = 0; i < depth; ++i) {
    const Floats right[2] = {Load(packed + i * kStrip), Load(packed + i * kStrip + kLanes)};
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const Floats left = All(weights[r][i]);
      for (int v = 0; v < 2; ++v) sum[r][v] = TimesPlus(left, right[v], sum[r][v]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2; ++v) Store(sums[r] + kLanes * v, sum[r][v]);
}

// Widens inputs of `rows` weight rows to float32. Prefetches as many inputs of the rows that begin at `next`.
inline void WidenRows(const uint16_t* from, const uint16_t* next, int64_t in, int rows, int depth,
                      float (*to)[kDepth]) {
  for (int r = 0; r < rows; ++r) {
    for (int i = 0; i < depth; i += kLine) {
      Prefetch(next + r * in + i);
      for (int j = i; j < i + kLine; j += kLanes)
        Store(to[r] + j, Widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + r * in + j))));
    }
  }
}

// Multiplies weight rows begin .. begin + rows - 1 with the tokens first .. first + tokens - 1, packed [strips, in,
// kStrip].
void MultiplyShare(const Product& p, int64_t first, int tokens, int64_t begin, int rows, const float* packed) {
  thread_local ShareScratch scratch;
  std::memset(scratch.sums, 0, sizeof(scratch.sums));
  const uint16_t* weights = p.weights + begin * p.in;
  for (int64_t i = 0; i < p.in; i += kDepth) {
    const int depth = int(std::min<int64_t>(kDepth, p.in - i));
    WidenRows(weights + i, i + kDepth < p.in ? weights + i + kDepth : weights + rows * p.in, p.in, rows, depth,
              scratch.weights);
    for (int t = 0; t < tokens; t += kStrip) {
      const float* strip = packed + t * p.in + i * kStrip;
      const auto sums = reinterpret_cast<float(*)[kMaxTokens]>(scratch.sums[0] + t);
      int r = 0;
      for (; r + 6 <= rows; r += 6) AddProducts<6>(scratch.weights + r, strip, depth, sums + r);
      for (; r < rows; r += 2) AddProducts<2>(scratch.weights + r, strip, depth, sums + r);
    }
  }
  for (int t = 0; t < tokens; ++t)
    for (int r = 0; r < rows; ++r) p.PutOne(p.y + (first + t) * p.out + begin + r, scratch.sums[r][t]);
}

// Packs the tokens as [strips, in, kStrip]; zeros past the last.
void PackStrips(const Product& p, int64_t first, int tokens, float* packed) {
  for (int t = 0; t < tokens; t += kStrip) {
    for (int64_t i = 0; i < p.in; i += kLanes, packed += kLanes * kStrip) {
      for (int v = 0; v < kStrip; v += kLanes) {
        Bits block[kLanes];
        for (int j = 0; j < kLanes; ++j) {
          const bool is_token = t + v + j < tokens;
          block[j] = _mm256_castps_si256(is_token ? Rounded(Load(p.Row(first + t + v + j) + i)) : Zero());
        }
        Transpose(block);
        for (int j = 0; j < kLanes; ++j) StoreBits(packed + j * kStrip + v, block[j]);
      }
    }
  }
}

// Runs work(b) for all blocks of `block` weight rows, several at a time if there are many.
template <typename Work>
void ForBlocks(xla::ffi::ThreadPool pool, int64_t out, int64_t block, const Work& work) {
  const int64_t blocks = (out + block - 1) / block;
  const int64_t share = std::clamp<int64_t>(blocks / (8 * pool.num_threads()), 1, 16);
  InParallel(pool, int((blocks + share - 1) / share), [&](int i) {
    for (int64_t b = i * share; b < std::min((i + 1) * share, blocks); ++b) work(b * block);
  });
}

// Multiplies 8 weight rows from `begin` on, transposed in registers, with T tokens, packed [in, T].
template <int T>
void MultiplyFew(const Product& p, int64_t begin, const float* packed) {
  Floats sum[T];
  for (int t = 0; t < T; ++t) sum[t] = Zero();
  for (int64_t i = 0; i < p.in; i += 2 * kLanes) {
    const uint16_t* weights = p.weights + begin * p.in + i;
    Bits block[kLanes];
    for (int j = 0; j < kLanes; ++j) {
      block[j] = LoadBits(weights + j * p.in);
      if (i % kLine == 0) Prefetch(weights + (kLanes + j) * p.in);
    }
    Transpose(block);
#pragma GCC unroll 8
    for (int j = 0; j < kLanes; ++j) {
      const float* left = packed + (i + 2 * j) * T;
      for (int t = 0; t < T; ++t) sum[t] = TimesPlus(All(left[t]), FirstOfPairs(block[j]), sum[t]);
      for (int t = 0; t < T; ++t) sum[t] = TimesPlus(All(left[T + t]), SecondOfPairs(block[j]), sum[t]);
    }
  }
  for (int t = 0; t < T && t < p.tokens; ++t) p.Put(p.y + t * p.out + begin, sum[t]);
}

template <int T>
void PackFew(const Product& p, float* packed) {
  for (int t = 0; t < T; ++t) {
    for (int64_t i = 0; i < p.in; i += kLanes) {
      alignas(32) float rounded[kLanes];
      Store(rounded, t < p.tokens ? Rounded(Load(p.Row(t) + i)) : Zero());
      for (int j = 0; j < kLanes; ++j) packed[(i + j) * T + t] = rounded[j];
    }
  }
}

// Calls `work` with the number of tokens that are multiplied one by one: a power of two.
template <typename Work>
void WithFew(const Product& p, const Work& work) {
  if (p.tokens <= 1) return work(std::integral_constant<int, 1>());
  if (p.tokens <= 2) return work(std::integral_constant<int, 2>());
  if (p.tokens <= 4) return work(std::integral_constant<int, 4>());
  work(std::integral_constant<int, kFew>());
}

template <typename Number>
void MultiplyAll(xla::ffi::ThreadPool pool, const Product& p) {
  static_assert(std::is_same_v<Number, float>, "there is no other way with these registers");
  if (p.tokens <= kFew) {
    return WithFew(p, [&](auto tokens) {
      constexpr int T = decltype(tokens)::value;
      float* const packed = Packed<float>(p.in * T);
      PackFew<T>(p, packed);
      ForBlocks(pool, p.out, kLanes, [&](int64_t begin) {
        WithGate(p, [&](const Product& half) { MultiplyFew<T>(half, begin, packed); });
      });
    });
  }
  for (int64_t first = 0; first < p.tokens; first += kMaxTokens) {
    const int tokens = int(std::min<int64_t>(kMaxTokens, p.tokens - first));
    float* const packed = Packed<float>((tokens + kStrip - 1) / kStrip * kStrip * p.in);
    PackStrips(p, first, tokens, packed);
    ForBlocks(pool, p.out, kShare, [&](int64_t begin) {
      const int rows = int(std::min<int64_t>(kShare, p.out - begin));
      WithGate(p, [&](const Product& half) { MultiplyShare(half, first, tokens, begin, rows, packed); });
    });
  }
}

// The same as pieces of a grouped product (grouped_product.h).
template <typename Number>
struct Pieces {
  using Product = jaxsgl::Product;
  static constexpr int64_t kMost = kMaxTokens, kRows = 4 * kShare;

  static int64_t Most(const Product&) { return kMost; }

  static int64_t PackedBytes(const Product& p, int64_t first) {
    const int64_t tokens = std::min(kMost, p.tokens - first);
    return p.in * (p.tokens <= kFew ? kFew : (tokens + kStrip - 1) / kStrip * kStrip) * int64_t(sizeof(float));
  }

  static void PackRows(const Product& p, int64_t first, void* packed) {
    float* const to = static_cast<float*>(packed);
    if (p.tokens <= kFew) return WithFew(p, [&](auto tokens) { PackFew<decltype(tokens)::value>(p, to); });
    PackStrips(p, first, int(std::min(kMost, p.tokens - first)), to);
  }

  static void Multiply(const Product& p, int64_t first, int64_t begin, int64_t rows, const void* packed) {
    const float* const from = static_cast<const float*>(packed);
    const int64_t end = begin + rows;
    if (p.tokens <= kFew) {
      return WithFew(p, [&](auto tokens) {
        for (int64_t b = begin; b < end; b += kLanes) MultiplyFew<decltype(tokens)::value>(p, b, from);
      });
    }
    for (; begin < end; begin += kShare)
      MultiplyShare(p, first, int(std::min(kMost, p.tokens - first)), begin, int(std::min<int64_t>(kShare, end - begin)),
                    from);
  }
};

}  // namespace
}  // namespace jaxsgl
