// Rows times packed weights of 4 or 8 bits: registers along the outputs, four inputs of each to a lane.
//
// kSide outputs stand side by side (packed.py), four inputs of each in two lines of the cache; of 4 bits two such fours
// share a byte. They meet four inputs of a row at once, spread over a register: no lanes are added up, and memory is
// read from its first byte to its last. Weights are the side without a sign: sums begin with what stands for zero times
// the sum of the row's integers, taken off. Blocks, scales and the order of sums are those of product_int8.cc.
//
// `Kind` says what weights are:
//   kBits, kMiddle               bits of one; 2^kMiddle stands for zero, unless a group says otherwise
//   Fours(bytes, c)              the c-th four inputs of each lane, as bytes
// `Form` says what rows become:
//   Number, kInputs              its integers; how many inputs are rounded at once, unless weights have groups
//   Pack(x, depth, to)           rounds a block; returns its scale
//   Total(numbers, depth)        their sum
//   Inputs, Spread(numbers)      four inputs, spread over registers
//   Plus(sum, four, inputs)

#pragma once

#include <algorithm>
#include <cstring>

#include "product_dots.h"

namespace jaxsgl {
namespace {

constexpr int kSide = 32;                           // outputs that stand side by side, and are multiplied at a time
constexpr int kMostTile = kLanes == 16 ? 8 : 2;     // rows whose sums fit the registers
constexpr int kBytesAhead = 4096;
constexpr int kInputsAtATime = 16;

// y = x weights^T.
struct PackedProduct : ProductOf<uint8_t> {         // weights: [out / kSide, in * kSide * bits / 8]
  const float* scales;                              // [out / kSide, groups, kSide]
  const int8_t* zeros;                              // as scales, less what stands for zero; or null: 0
  int64_t groups, block;                            // block: inputs of a group, or those that are rounded at once
  int bits;

  int64_t blocks() const { return (in + block - 1) / block; }
  int depth(int64_t b) const { return int(std::min(block, in - b * block)); }
  const uint8_t* Strip(int64_t strip) const { return weights + strip * in * kSide * bits / 8; }
  void MoveToExpert(int64_t expert) {
    weights = Strip(expert * out / kSide);
    scales += expert * out * groups;
    if (zeros) zeros += expert * out * groups;
  }
  void MoveToUp() {
    MoveToExpert(1);
    is_up = true;
  }
};

struct FourBits {
  static constexpr int kBits = 4, kMiddle = 3;
  static Bits Fours(Bits bytes, int c) { return c ? HighHalves(bytes) : LowHalves(bytes); }
};

struct EightBits {
  static constexpr int kBits = 8, kMiddle = 7;
  static Bits Fours(Bits bytes, int) { return bytes; }
};

struct FourWords {
  using Number = int16_t;
  static constexpr int64_t kInputs = kMostInputs;
  struct Inputs {
    Bits even, odd;
  };

  // Of each four inputs the first and the third come first: pairs of them meet every other byte.
  static float Pack(const float* x, int depth, int16_t* to) {
    const float scale = PackWords(x, depth, to);
    for (int i = 0; i < depth; i += 4) std::swap(to[i + 1], to[i + 2]);
    return scale;
  }
  static int Total(const int16_t* numbers, int depth) {
    int total = 0;
    for (int i = 0; i < depth; ++i) total += numbers[i];
    return total;
  }
  static Inputs Spread(const int16_t* numbers) {
    int32_t pairs[2];
    std::memcpy(pairs, numbers, sizeof(pairs));
    return {AllIntegers(pairs[0]), AllIntegers(pairs[1])};
  }
  static Sums Plus(Sums sum, Bits four, const Inputs& inputs) {
    return PlusPairs(PlusPairs(sum, EvenBytes(four), inputs.even), OddBytes(four), inputs.odd);
  }
};

#ifdef JAXSGL_BYTES
struct FourBytes {
  using Number = int8_t;
  static constexpr int64_t kInputs = 128;
  using Inputs = Bits;

  static float Pack(const float* x, int depth, int8_t* to) {  // with zeros up to a whole register
    const Rounding rounding = RoundingOf(x, depth, 127);
    for (int i = 0; i < depth; i += kLanes) StoreBytes(Times(Load(x + i), rounding.inverse), to + i);
    std::memset(to + depth, 0, -depth & (kFours - 1));
    return rounding.scale;
  }
  static int Total(const int8_t* numbers, int depth) {
    Sums sum{};
    for (int i = 0; i < depth; i += kFours) sum = PlusFours(sum, AllBytes(1), LoadBits(numbers + i));
    int total = 0;
    for (int lane = 0; lane < kLanes; ++lane) total += sum[lane];
    return total;
  }
  static Bits Spread(const int8_t* numbers) {
    int32_t four;
    std::memcpy(&four, numbers, sizeof(four));
    Bits inputs = AllIntegers(four);
    asm("" : "+v"(inputs));  // into a register: GCC would read it from memory with each instruction
    return inputs;
  }
  static Sums Plus(Sums sum, Bits four, Bits inputs) { return PlusFours(sum, four, inputs); }
};
#endif

// Packed rows and one of zeros: integers [rows, width], and for each [block, row] a scale and what sums begin with.
template <typename Form>
struct PackedRows {
  int64_t rows, width;
  typename Form::Number* integers;
  float* scales;
  int* begins;

  static int64_t Width(const PackedProduct& p) { return p.in + kFours; }  // `Pack` may write zeros after the last block
  static int64_t NumBytes(const PackedProduct& p, int64_t tokens) {
    return (tokens + 1) * (Width(p) * sizeof(typename Form::Number) + p.blocks() * 8);
  }
  PackedRows(char* begin, const PackedProduct& p, int64_t tokens)
      : rows(tokens + 1),
        width(Width(p)),
        integers(reinterpret_cast<typename Form::Number*>(begin)),
        scales(reinterpret_cast<float*>(integers + rows * width)),
        begins(reinterpret_cast<int*>(scales + rows * p.blocks())) {}
};

// What sums of a register of outputs begin with, less a group's zeros times the sum of the row's integers.
template <typename Kind>
inline Bits LessZeros(Bits begin, const int8_t* zeros) {
  return AddIntegers(begin, TimesIntegers(PlusBytes(Bits{}, zeros), DividedByPowerOfTwo(begin, Kind::kMiddle)));
}

// What a tile fetches: from `next` on, so many quarters of as many lines as it reads.
struct Fetched {
  const uint8_t* next;
  int quarters;
};

// One tile of rows fetches weights a little ahead of their use. Of several only the first waits for memory, so two or
// four share what is fetched for the next outputs; else the first would have to read as fast as all multiply.
inline Fetched WhatTileFetches(const PackedProduct& p, int64_t strip, int tile, int tiles) {
  if (tiles == 1) return {p.Strip(strip) + kBytesAhead, 4};
  const int sharing = tiles < 4 ? 2 : 4;
  if (tile >= sharing) return {p.weights, 0};
  const uint8_t* const next = p.Strip(strip + 1);
  return {next + (p.Strip(strip + 2) - next) / sharing * tile, 4 / sharing};
}

// dots [T][N] += a block of a strip's weights times T rows, `width` apart. Fetches weights meanwhile.
template <typename Kind, typename Form, int T, int N>
[[gnu::always_inline]] inline void AddBlock(const uint8_t* weights, const typename Form::Number* numbers, int64_t width,
                                            int depth, Fetched& fetched, Sums (&dots)[T][N]) {
  constexpr int kFoursOfByte = 8 / Kind::kBits, kUnits = kInputsAtATime / 4 / kFoursOfByte;
  constexpr int kQuarter = kUnits * 4 * kSide / 64 / 4;  // of the lines that a step reads
#pragma GCC unroll 1
  for (int i = 0; i < depth; i += kInputsAtATime) {
    if (fetched.quarters) {
#pragma GCC unroll 2
      for (int line = 0; line < kQuarter; ++line) PrefetchSoon(fetched.next + 64 * line);
      if (fetched.quarters > 1)
#pragma GCC unroll 2
        for (int line = kQuarter; line < 2 * kQuarter; ++line) PrefetchSoon(fetched.next + 64 * line);
      if (fetched.quarters > 2)
#pragma GCC unroll 4
        for (int line = 2 * kQuarter; line < 4 * kQuarter; ++line) PrefetchSoon(fetched.next + 64 * line);
      fetched.next += 64 * kQuarter * fetched.quarters;
    }
#pragma GCC unroll 4
    for (int u = 0; u < kUnits; ++u, weights += 4 * kSide) {
      Bits bytes[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        Bits line = LoadBits(weights + 4 * n * kLanes);
        asm("" : "+v"(line));  // into a register: GCC would read it from memory T times
        bytes[n] = line;
      }
#pragma GCC unroll 2
      for (int c = 0; c < kFoursOfByte; ++c, numbers += 4) {
        Bits fours[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) fours[n] = Kind::Fours(bytes[n], c);
#pragma GCC unroll 8
        for (int r = 0; r < T; ++r) {
          const auto inputs = Form::Spread(numbers + r * width);
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) dots[r][n] = Form::Plus(dots[r][n], fours[n], inputs);
        }
      }
    }
  }
}

// Multiplies a strip of kSide outputs with T packed rows, from `t` on; results of `count` of them, T or T - 1, go into y's
// rows from first + t on.
template <typename Kind, typename Form, int T>
[[gnu::noinline]] void MultiplyTile(const PackedProduct& p, int64_t strip, int64_t first, int t, int count,
                                    const PackedRows<Form>& packed, Fetched fetched) {
  constexpr int N = kSide / kLanes;  // registers of outputs
  const int64_t width = packed.width, rows = packed.rows, blocks = p.blocks(), groups = p.groups, out = p.out;
  const auto* numbers = packed.integers + t * width;
  const float* of_rows = packed.scales + t;
  const int* begins = packed.begins + t;
  const uint8_t* weights = p.Strip(strip);
  const float* of_group = p.scales + strip * groups * kSide;
  const int8_t* zeros = p.zeros ? p.zeros + strip * groups * kSide : nullptr;
  float* const y = p.y + (first + t) * out + strip * kSide;
  alignas(64) float sums[T][N][kLanes];
#pragma GCC unroll 8
  for (int r = 0; r < T; ++r) PrefetchToWrite(y + r * out), PrefetchToWrite(y + r * out + kSide / 2);
  for (int64_t b = 0; b < blocks; ++b, begins += rows, of_rows += rows) {
    Sums dots[T][N];
#pragma GCC unroll 8
    for (int r = 0; r < T; ++r)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const Bits begin = AllIntegers(begins[r]);
        dots[r][n] = Sums(zeros ? LessZeros<Kind>(begin, zeros + n * kLanes) : begin);
      }
    const int depth = p.depth(b);
    AddBlock<Kind, Form>(weights, numbers, width, depth, fetched, dots);
    weights += depth * kSide * Kind::kBits / 8, numbers += depth;
    const bool is_first = b == 0;
    const auto add = [&](auto factor) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int r = 0; r < T; ++r) {
        const Floats of_row = All(of_rows[r]);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
          const Floats before = is_first ? Zero() : Load(sums[r][n]);
          Store(sums[r][n], TimesPlus(factor(of_row, n), ToFloats(Bits(dots[r][n])), before));
        }
      }
    };
    if (groups == 1) {
      add([](Floats x, int) { return x; });
    } else {
      add([&](Floats x, int n) { return Times(x, Load(of_group + n * kLanes)); });
      of_group += kSide;
      if (zeros) zeros += kSide;
    }
  }
#pragma GCC unroll 1
  for (int r = 0; r < count; ++r) {
#pragma GCC unroll 1
    for (int n = 0; n < N; ++n) {
      const Floats sum = Load(sums[r][n]);
      p.Put(y + r * out + n * kLanes, groups == 1 ? Times(sum, Load(of_group + n * kLanes)) : sum);
    }
  }
}

// As pieces of a grouped product (grouped_product.h) are, but packed in `Parts`, by several threads. Weights are read once
// for up to kMostRows rows, of kMostBytes together.
template <typename Kind, typename Form, int64_t kMostRows = 256, int64_t kMostBytes = 1 << 19>
struct PiecesOfPacked {
  using Product = PackedProduct;
  static constexpr int64_t kRows = kSide, kInputs = Form::kInputs;
  static constexpr int kBits = Kind::kBits, kPart = 16;  // kPart: rows

  static int64_t Most(const PackedProduct& p) {
    return std::clamp<int64_t>(kMostBytes / (p.in * sizeof(typename Form::Number)) / kPart * kPart, kPart, kMostRows);
  }
  static int TokensFrom(const PackedProduct& p, int64_t first) { return int(std::min(Most(p), p.tokens - first)); }
  static int64_t PackedBytes(const PackedProduct& p, int64_t first) {
    return PackedRows<Form>::NumBytes(p, TokensFrom(p, first));
  }
  static int Parts(const PackedProduct& p, int64_t first) { return (TokensFrom(p, first) + kPart - 1) / kPart; }

  static void PackPart(const PackedProduct& p, int64_t first, int part, char* packed) {
    const int tokens = TokensFrom(p, first);
    const PackedRows<Form> to(packed, p, tokens);
    for (int t = part * kPart; t < std::min((part + 1) * kPart, tokens); ++t) {
      for (int64_t b = 0; b < p.blocks(); ++b) {
        auto* const integers = to.integers + t * to.width + b * p.block;
        to.scales[b * to.rows + t] = Form::Pack(p.Row(first + t) + b * p.block, p.depth(b), integers);
        to.begins[b * to.rows + t] = -Form::Total(integers, p.depth(b)) * (1 << Kind::kMiddle);
      }
    }
    if (part > 0) return;
    std::memset(to.integers + tokens * to.width, 0, to.width * sizeof(*to.integers));
    for (int64_t b = 0; b < p.blocks(); ++b) to.scales[b * to.rows + tokens] = 0, to.begins[b * to.rows + tokens] = 0;
  }

  static void Multiply(const PackedProduct& p, int64_t first, int64_t begin, int64_t rows, char* packed) {
    const int tokens = TokensFrom(p, first), tiles = (tokens + kMostTile - 1) / kMostTile;
    const PackedRows<Form> from(packed, p, tokens);
    for (int64_t strip = begin / kSide; strip < (begin + rows) / kSide; ++strip) {
      for (int tile = 0, t = 0; tile < tiles; ++tile) {
        const int count = (tokens - t + tiles - tile - 1) / (tiles - tile);  // as even as may be
        const Fetched fetched = WhatTileFetches(p, strip, tile, tiles);
        WithTileOf<1>(count, [&](auto of) { MultiplyTile<Kind, Form, of()>(p, strip, first, t, count, from, fetched); });
        t += count;
      }
    }
  }

 private:
  // Calls `work` with `count` as a constant; with one more if it is odd, which saves the time of compiling these.
  template <int T, typename Work>
  static void WithTileOf(int count, const Work& work) {
    if constexpr (T < kMostTile)
      if (T < count) return WithTileOf<T == 1 ? 2 : T + 2>(count, work);
    work(std::integral_constant<int, T>());
  }
};

}  // namespace
}  // namespace jaxsgl
