// Rows times int8 weights in tiles of 1 to 4 rows, registers along the inputs, as integers of 16 bits.
//
// A register takes a row's inputs as they lie in memory, and its lanes are added up at the end of each block. The
// largest number is 32767: a row is rounded less than to bfloat16.

#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "blocks.h"
#include "product_int8.h"

namespace jaxsgl {
namespace {

// Rounds a block, in whole registers; returns its scale.
inline float PackWords(const float* x, int depth, int16_t* to) {
  const Rounding rounding = RoundingOf(x, depth, 32767);
  for (int i = 0; i < depth; i += kPairs)
    StoreIntegers(Times(Load(x + i), rounding.inverse), Times(Load(x + i + kLanes), rounding.inverse), to + i);
  return rounding.scale;
}

// Packed rows in tiles of T: integers [tiles, blocks, T, depth], and for each of [tiles, blocks, kLanes] a scale, lane
// l's being that of row l % T.
struct Tokens {
  int16_t* integers;
  float* scales;

  // Where `tokens` rows lie, in tiles of T, from `begin` on.
  template <int T>
  static Tokens At(char* begin, const Int8Product& p, int64_t tokens) {
    const int64_t tiles = (tokens + T - 1) / T;
    return {reinterpret_cast<int16_t*>(begin),
            reinterpret_cast<float*>(begin + tiles * T * p.in * sizeof(int16_t))};
  }

  template <int T>
  static int64_t NumBytes(const Int8Product& p, int64_t tokens) {
    const int64_t tiles = (tokens + T - 1) / T;
    return tiles * (T * p.in * sizeof(int16_t) + p.blocks() * kLanes * sizeof(float));
  }
};

template <int T>
void PackTokens(const Int8Product& p, int64_t first, int tokens, const Tokens& to) {
  for (int tile = 0; tile * T < tokens; ++tile) {
    for (int64_t b = 0; b < p.blocks(); ++b) {
      const int depth = p.depth(b);
      int16_t* const integers = to.integers + tile * T * p.in + b * p.block * T;
      const int64_t lanes = (tile * p.blocks() + b) * kLanes;
      for (int t = 0; t < T; ++t) {
        float scale = 0;
        if (tile * T + t < tokens)
          scale = PackWords(p.Row(first + tile * T + t) + b * p.block, depth, integers + t * depth);
        else
          std::memset(integers + t * depth, 0, depth * sizeof(*integers));
        for (int lane = t; lane < kLanes; lane += T) to.scales[lanes + lane] = scale;
      }
    }
  }
}

// Lane r * T + t: the sum of products of weight row r with token t. Prefetches as many weights at `ahead`.
// Not inlined: it's long, and there are two calls.
template <int T>
[[gnu::noinline]] Bits Dots(const int8_t* weights, const int8_t* ahead, int64_t in, const int16_t* tokens, int depth) {
  constexpr int R = kLanes / T;
  constexpr int kAhead = std::max(1, R * kPairs / 64);  // lines that a step reads, and prefetches
  Sums sum[kLanes];
#pragma GCC unroll 16
  for (int l = 0; l < kLanes; ++l) sum[l] = Sums{};
  for (int i = 0; i < depth; i += kPairs) {  // blocks are whole: multiples of 32
    const int line = i / kPairs * kAhead;
#pragma GCC unroll 16
    for (int j = 0; j < kAhead; ++j) PrefetchSoon(ahead + (line + j) * 64);
    Bits right[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      right[t] = LoadBits(tokens + t * depth + i);
      asm("" : "+v"(right[t]));  // into a register: GCC would read it from memory R times
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Bits left = WidenBytes(weights + r * in + i);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) sum[r * T + t] = PlusPairs(sum[r * T + t], left, right[t]);
    }
  }
  Bits bits[kLanes];
#pragma GCC unroll 16
  for (int l = 0; l < kLanes; ++l) bits[l] = Bits(sum[l]);
  return SumsOfLanes(bits);
}

constexpr int kMostInTiles = 64;  // rows that are packed at a time

// Multiplies weight rows begin .. begin + kRows - 1 with packed rows, into y.
template <int T>
void MultiplyTiles(const Int8Product& p, int64_t begin, int64_t first, int tokens, const Tokens& packed) {
  constexpr int R = kLanes / T, G = kRows / R;    // G groups of R weight rows
  alignas(64) float sums[kMostInTiles / T][G][kLanes];
  const int tiles = (tokens + T - 1) / T;
  std::memset(sums, 0, tiles * sizeof(sums[0]));
  for (int64_t b = 0; b < p.blocks(); ++b) {
    const int depth = p.depth(b);
    alignas(64) float of_rows[G][kLanes];
    for (int g = 0; g < G; ++g)
      for (int l = 0; l < kLanes; ++l) of_rows[g][l] = p.ScaleOfBlock(begin + g * R + l / T, b);
    for (int tile = 0; tile < tiles; ++tile) {
      const int16_t* const integers = packed.integers + tile * T * p.in + b * p.block * T;
      const int64_t lanes = (tile * p.blocks() + b) * kLanes;
      const Floats of_tokens = Load(packed.scales + lanes);
      for (int g = 0; g < G; ++g) {
        const int8_t* const weights = p.weights + (begin + g * R) * p.in + b * p.block;
        // The first tile fetches the next rows, in the order of memory.
        const int8_t* const ahead =
            tile ? weights : p.weights + (begin + kRows) * p.in + b * p.block * kRows + g * R * depth;
        const Bits dots = Dots<T>(weights, ahead, p.in, integers, depth);
        const Floats scale = Times(of_tokens, Load(of_rows[g]));
        Store(sums[tile][g], TimesPlus(scale, ToFloats(dots), Load(sums[tile][g])));
      }
    }
  }
  for (int t = 0; t < tokens; ++t) {
    float* const y = p.y + (first + t) * p.out + begin;
    alignas(64) float line[kRows];
    for (int r = 0; r < kRows; ++r) line[r] = sums[t / T][r / R][r % R * T + t % T] * p.ScaleOfRow(begin + r);
    for (int r = 0; r < kRows; r += kLanes) p.Put(y + r, Load(line + r));
  }
}

// Calls f with the number of rows in a tile, as a constant: no sum depends on it.
template <typename Function>
void WithTile(int64_t tokens, const Function& f) {
  if (tokens == 1)
    f(std::integral_constant<int, 1>());
  else if (tokens == 2)
    f(std::integral_constant<int, 2>());
  else
    f(std::integral_constant<int, 4>());
}

// Rows in tiles. As pieces of a grouped product (grouped_product.h) are, but packed in `Parts`, by several threads.
struct PiecesOfTiles {
  using Product = Int8Product;
  static constexpr int64_t kRows = jaxsgl::kRows;
  static constexpr int64_t kInputs = kMostInputs;  // of a block, unless the weights have groups

  static int64_t Most(const Int8Product&) { return kMostInTiles; }
  static int64_t TokensFrom(const Int8Product& p, int64_t first) { return std::min(Most(p), p.tokens - first); }

  static int64_t PackedBytes(const Int8Product& p, int64_t first) {
    int64_t bytes = 0;
    const int64_t tokens = TokensFrom(p, first);
    WithTile(tokens, [&](auto t) { bytes = Tokens::NumBytes<t()>(p, tokens); });
    return bytes;
  }

  static int Parts(const Int8Product&, int64_t) { return 1; }

  static void PackPart(const Int8Product& p, int64_t first, int, char* packed) {
    const int tokens = int(TokensFrom(p, first));
    WithTile(tokens, [&](auto t) {
      PackTokens<t()>(p, first, tokens, Tokens::At<t()>(packed, p, tokens));
    });
  }

  static void Multiply(const Int8Product& p, int64_t first, int64_t begin, int64_t rows, char* packed) {
    const int tokens = int(TokensFrom(p, first));
    WithTile(tokens, [&](auto t) {
      const auto at = Tokens::At<t()>(packed, p, tokens);
      for (int64_t row = begin; row < begin + rows; row += kRows) MultiplyTiles<t()>(p, row, first, tokens, at);
    });
  }
};

}  // namespace
}  // namespace jaxsgl
