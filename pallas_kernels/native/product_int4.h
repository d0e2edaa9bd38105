// Rows times weights of 4 bits: registers along the outputs, four inputs of each to a lane.
//
// 16 outputs stand side by side (packed.py): a line of 64 bytes has eight inputs of each, the first four in the low
// halves of four bytes. Its halves meet four inputs of a row at once, spread over a register; no lanes are added up, and
// memory is read from its first byte to its last. Weights are the side without a sign: once a block, what stands for
// zero times the sum of the row's integers is taken off first. Blocks, scales and the order of sums are those of int8
// (product_int8.cc).

#pragma once

#include <algorithm>
#include <cstring>

#include "product_dots.h"

namespace jaxsgl {
namespace {

constexpr int kSide = 16;                           // outputs that stand side by side
constexpr int kMiddle = 8;                          // what stands for zero, unless a group says otherwise
constexpr int kMostTile = kLanes == 16 ? 8 : 2;     // rows whose sums fit the registers
constexpr int kBytesAhead = 2048;
constexpr int kRowsOfInt4 = 2 * kSide;              // outputs that are multiplied at a time

// y = x weights^T.
struct Int4Product : ProductOf<uint8_t> {           // weights: [out / 16, in / 8, 64]
  const float* scales;                              // [out / 16, groups, 16]
  const int8_t* zeros;                              // as scales, less kMiddle; or null: 0
  int64_t groups, block;                            // block: inputs of a group, or those that are rounded at once

  int64_t blocks() const { return (in + block - 1) / block; }
  int depth(int64_t b) const { return int(std::min(block, in - b * block)); }
  void MoveToExpert(int64_t expert) {
    weights += expert * out * in / 2;
    scales += expert * out * groups;
    if (zeros) zeros += expert * out * groups;
  }
  void MoveToUp() {
    MoveToExpert(1);
    is_up = true;
  }
};

// What rows become: eight inputs, as `Plus` meets them with the halves of a line.
struct EightWords {
  using Number = int16_t;
  static constexpr int64_t kInputs = kMostInputs;

  // Of each four inputs the first and the third come first: pairs of them meet every other byte.
  static float Pack(const float* x, int depth, int16_t* to) {
    const float scale = Words::Pack(x, depth, to);
    for (int i = 0; i < depth; i += 4) std::swap(to[i + 1], to[i + 2]);
    return scale;
  }
  static Sums Plus(Sums sum, Bits four, const int16_t* numbers) {
    int32_t pairs[2];
    std::memcpy(pairs, numbers, sizeof(pairs));
    sum = PlusPairs(sum, EvenBytes(four), AllIntegers(pairs[0]));
    return PlusPairs(sum, OddBytes(four), AllIntegers(pairs[1]));
  }
};

#ifdef JAXSGL_BYTES
struct EightBytes {
  using Number = int8_t;
  static constexpr int64_t kInputs = 128;

  static float Pack(const float* x, int depth, int8_t* to) { return Bytes::Pack(x, depth, to); }
  static Sums Plus(Sums sum, Bits four, const int8_t* numbers) {
    int32_t all;
    std::memcpy(&all, numbers, sizeof(all));
    return PlusFours(sum, four, AllIntegers(all));
  }
};
#endif

// Packed rows: integers [tokens, width], and for each row and block a scale and the integers' sum.
template <typename Form>
struct PackedRows {
  typename Form::Number* integers;
  float* scales;
  int* totals;

  static int64_t Width(const Int4Product& p) { return p.in + kFours; }  // `Pack` may write zeros after the last block
  static int64_t NumBytes(const Int4Product& p, int64_t tokens) {
    return tokens * (Width(p) * sizeof(typename Form::Number) + p.blocks() * 8);
  }
  PackedRows(char* begin, const Int4Product& p, int64_t tokens)
      : integers(reinterpret_cast<typename Form::Number*>(begin)),
        scales(reinterpret_cast<float*>(integers + tokens * Width(p))),
        totals(reinterpret_cast<int*>(scales + tokens * p.blocks())) {}
};

// What stands for zero in a register of outputs, of which a group's begin at `group`, times a row's sum.
inline Bits TimesZero(const Int4Product& p, int64_t group, int total) {
  static_assert(kMiddle == 8);
  if (!p.zeros) return TimesPowerOfTwo(AllIntegers(total), 3);
  return TimesIntegers(PlusBytes(AllIntegers(kMiddle), p.zeros + group), AllIntegers(total));
}

// Multiplies kRows outputs from `begin` on with T of `tokens` packed rows, from `t` on, into y's rows from first + t on.
// One tile of rows fetches weights just ahead of their use. Of several only the first waits for memory, so two share what
// is fetched for the next outputs, half of it each; else the first would have to read as fast as all multiply.
template <typename Form, int T>
void MultiplyTile(const Int4Product& p, int64_t begin, int64_t first, int t, int tokens,
                  const PackedRows<Form>& packed) {
  constexpr int kStrips = kRowsOfInt4 / kSide, kHalf = kSide / kLanes, N = kStrips * kHalf;  // registers of outputs
  constexpr int kChains = T == 1 ? 2 : 1;  // sums of one row would wait for each other
  const int64_t width = PackedRows<Form>::Width(p), blocks = p.blocks(), strip = begin / kSide;
  const auto* const rows = packed.integers + t * width;
  const int64_t near = t == 0 ? kBytesAhead : 0;
  const bool fetches_next = tokens > kMostTile;
  const uint8_t* next = p.weights + (strip + kStrips + t / kMostTile % 2) * (kSide / 2) * p.in;
  Floats sums[T][N];
  for (int r = 0; r < T; ++r)
    for (int n = 0; n < N; ++n) sums[r][n] = Zero();
  for (int64_t b = 0; b < blocks; ++b) {
    const uint8_t* weights = p.weights + strip * kSide / 2 * p.in + b * p.block * (kSide / 2);
    const auto* numbers = rows + b * p.block;
    const auto group_of = [&](int n) {
      return ((strip + n / kHalf) * p.groups + (p.groups > 1 ? b : 0)) * kSide + n % kHalf * kLanes;
    };
    const auto zeros_of = [&](int r, int n) { return TimesZero(p, group_of(n), packed.totals[(t + r) * blocks + b]); };
    Sums dots[kChains][T][N];
#pragma GCC unroll 16
    for (int c = 0; c < kChains; ++c)
      for (int r = 0; r < T; ++r)
        for (int n = 0; n < N; ++n) dots[c][r][n] = c ? Sums{} : Sums(SubtractIntegers(Bits{}, zeros_of(r, n)));
    for (int i = 0; i < p.depth(b); i += 8, weights += 64, numbers += 8) {
      Bits low[N], high[N];
      if (fetches_next) _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T1), next += 64;
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const uint8_t* const line = weights + n / kHalf * (kSide / 2) * p.in;
        if (n % kHalf == 0) _mm_prefetch(reinterpret_cast<const char*>(line + near), _MM_HINT_T0);
        const Bits bytes = LoadBits(line + n % kHalf * 4 * kLanes);
        low[n] = LowHalves(bytes), high[n] = HighHalves(bytes);
      }
#pragma GCC unroll 8
      for (int r = 0; r < T; ++r) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) dots[0][r][n] = Form::Plus(dots[0][r][n], low[n], numbers + r * width);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n)
          dots[kChains - 1][r][n] = Form::Plus(dots[kChains - 1][r][n], high[n], numbers + r * width + 4);
      }
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const Floats scale = p.groups > 1 ? Load(p.scales + group_of(n)) : All(1.0f);
#pragma GCC unroll 8
      for (int r = 0; r < T; ++r) {
        const int64_t block = (t + r) * blocks + b;
        Bits dot = Bits(dots[0][r][n]);
        if (kChains > 1) dot = AddIntegers(dot, Bits(dots[kChains - 1][r][n]));
        sums[r][n] = TimesPlus(Times(All(packed.scales[block]), scale), ToFloats(dot), sums[r][n]);
      }
    }
  }
  for (int r = 0; r < T; ++r) {
    for (int n = 0; n < N; ++n) {
      const int64_t output = (strip + n / kHalf) * kSide + n % kHalf * kLanes;
      p.Put(p.y + (first + t + r) * p.out + output,
            p.groups > 1 ? sums[r][n] : Times(sums[r][n], Load(p.scales + output)));
    }
  }
}

// As pieces of a grouped product (grouped_product.h) are, but packed in `Parts`, by several threads.
template <typename Form>
struct PiecesOfInt4 {
  using Product = Int4Product;
  static constexpr int64_t kRows = kRowsOfInt4, kInputs = Form::kInputs;
  static constexpr int kPart = 16;  // rows

  static int64_t Most(const Int4Product& p) {
    return std::clamp<int64_t>((1 << 19) / (p.in * sizeof(typename Form::Number)) / kPart * kPart, kPart, 256);
  }
  static int TokensFrom(const Int4Product& p, int64_t first) { return int(std::min(Most(p), p.tokens - first)); }
  static int64_t PackedBytes(const Int4Product& p, int64_t first) {
    return PackedRows<Form>::NumBytes(p, TokensFrom(p, first));
  }
  static int Parts(const Int4Product& p, int64_t first) { return (TokensFrom(p, first) + kPart - 1) / kPart; }

  static void PackPart(const Int4Product& p, int64_t first, int part, char* packed) {
    const int tokens = TokensFrom(p, first);
    const PackedRows<Form> to(packed, p, tokens);
    for (int t = part * kPart; t < std::min((part + 1) * kPart, tokens); ++t) {
      for (int64_t b = 0; b < p.blocks(); ++b) {
        auto* const integers = to.integers + t * to.Width(p) + b * p.block;
        to.scales[t * p.blocks() + b] = Form::Pack(p.Row(first + t) + b * p.block, p.depth(b), integers);
        int total = 0;
        for (int i = 0; i < p.depth(b); ++i) total += integers[i];
        to.totals[t * p.blocks() + b] = total;
      }
    }
  }

  static void Multiply(const Int4Product& p, int64_t first, int64_t begin, int64_t rows, char* packed) {
    const int tokens = TokensFrom(p, first);
    const PackedRows<Form> from(packed, p, tokens);
    for (int64_t row = begin; row < begin + rows; row += kRows) {
      int t = 0;
      for (; t + kMostTile <= tokens; t += kMostTile) MultiplyTile<Form, kMostTile>(p, row, first, t, tokens, from);
      if (kMostTile > 4 && t + 4 <= tokens) MultiplyTile<Form, 4>(p, row, first, t, tokens, from), t += 4;
      if (kMostTile > 2 && t + 2 <= tokens) MultiplyTile<Form, 2>(p, row, first, t, tokens, from), t += 2;
      if (t < tokens) MultiplyTile<Form, 1>(p, row, first, t, tokens, from);
    }
  }
};

}  // namespace
}  // namespace jaxsgl
