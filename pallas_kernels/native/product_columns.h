// Many rows times int8 weights as bytes: registers along the rows, four inputs of one to a lane.
//
// The rows are packed so and stay in the second level of cache while the weights pass by, 16 weight rows at a time: four
// weights spread over a register meet 16 rows with each instruction, and sums leave the registers once a block. Weights
// are the side without a sign: 128 is added to them as they are spread, and 128 times the rows' sums is taken off first.

#pragma once

#include "product_dots.h"

#ifdef JAXSGL_BYTES

namespace jaxsgl {
namespace {

constexpr int kMostStrips = kLanes == 16 ? 4 : 2;  // of kLanes rows, that are multiplied at a time
constexpr int kSumsAtATime = kLanes == 16 ? 16 : 8;  // they, a line of the rows and four weights fit the registers
constexpr int kMostWeightRows = 8;                   // at a time: the processor has 16 registers for addresses
constexpr int64_t kPackedBytes = 1 << 19;          // of rows that stay in the cache
constexpr int64_t kMostColumns = 256;

// Rows that are multiplied at a time: `strips` times kLanes of them from `first` on, the last ones maybe zeros.
struct Columns {
  int first, strips;

  Columns(int first, int tokens) : first(first), strips((tokens - first + kLanes - 1) / kLanes) {
    strips = strips >= kMostStrips ? kMostStrips : strips > 1 ? 2 : 1;
  }
};

template <typename Work>
void ForColumns(int tokens, const Work& work) {
  for (Columns c(0, tokens); c.first < tokens; c = Columns(c.first + c.strips * kLanes, tokens)) work(c);
}

// Packed rows: for each Columns and block, integers [depth / 4, strips, kLanes, 4], and [strips, kLanes] of scales and
// of what sums begin with.
struct PackedColumns {
  int8_t* integers;
  float* scales;
  int* begins;

  PackedColumns(char* begin, const Int8Product& p, int tokens)
      : integers(reinterpret_cast<int8_t*>(begin)),
        scales(reinterpret_cast<float*>(begin + Padded(tokens) * p.in)),
        begins(reinterpret_cast<int*>(scales + Padded(tokens) * p.blocks())) {}

  static int64_t Padded(int64_t tokens) { return (tokens + kLanes - 1) / kLanes * kLanes; }
  static int64_t NumBytes(const Int8Product& p, int64_t tokens) {
    return Padded(tokens) * (p.in + p.blocks() * (sizeof(float) + sizeof(int)));
  }
  int8_t* IntegersOf(const Int8Product& p, const Columns& c, int64_t b) const {
    return integers + c.first * p.in + b * p.block * c.strips * kLanes;
  }
  // Where the scales and begins of a block's rows lie.
  int64_t RowsOf(const Int8Product& p, const Columns& c, int64_t b) const {
    return c.first * p.blocks() + b * c.strips * kLanes;
  }
};

// Packs the rows first + c.first .. of a piece of `tokens` rows.
void PackColumns(const Int8Product& p, int64_t first, int tokens, const Columns& c, const PackedColumns& to) {
  alignas(64) int8_t rows[kLanes][kMostInputs + kFours];
  for (int64_t b = 0; b < p.blocks(); ++b) {
    const int depth = p.depth(b);
    for (int s = 0; s < c.strips; ++s) {
      for (int j = 0; j < kLanes; ++j) {
        const int token = c.first + s * kLanes + j;
        float scale = 0;
        if (token < tokens)
          scale = Bytes::Pack(p.Row(first + token) + b * p.block, depth, rows[j]);
        else
          std::memset(rows[j], 0, depth + kFours);
        to.scales[to.RowsOf(p, c, b) + s * kLanes + j] = scale;
      }
      int8_t* const integers = to.IntegersOf(p, c, b) + s * kFours;
      Sums sum{};
      for (int i = 0; i < depth; i += kFours) {
        Bits lines[kLanes];
        for (int j = 0; j < kLanes; ++j) lines[j] = LoadBits(rows[j] + i);
        Transpose(lines);
        for (int j = 0; j < kLanes && i + 4 * j < depth; ++j) {
          StoreBits(integers + (i + 4 * j) * c.strips * kLanes, lines[j]);
          sum = PlusFours(sum, AllBytes(1), lines[j]);
        }
      }
      StoreBits(to.begins + to.RowsOf(p, c, b) + s * kLanes, SubtractIntegers(Bits{}, TimesPowerOfTwo(Bits(sum), 7)));
    }
  }
}

// sums [R, kLanes * V] += a block of R weight rows times packed rows, whose integers' sums begin at begins [kLanes * V],
// times the scales of rows [kLanes * V] and of weight rows [R], which may be null: 1. The first block's are not added to
// anything, since 4 KiB of zeros take as long as a tenth of a product (`rep stos`). Prefetches as many weights at `ahead`.
// Not inlined: GCC would keep sums in memory.
template <int R, int V>
[[gnu::noinline]] void AddColumns(const int8_t* weights, const int8_t* ahead, int64_t in, const int8_t* packed,
                                  int depth, const int* begins, const float* scales, const float* of_rows, bool is_first,
                                  float* sums) {
  constexpr int kStep = 64 / R;  // inputs of R weight rows that fill a line of the cache
  Sums sum[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = Sums(LoadBits(begins + v * kLanes));
#pragma GCC unroll 1
  for (int step = 0; step < depth; step += kStep) {
    PrefetchSoon(ahead + step * R);
#pragma GCC unroll 8
    for (int i = step; i < step + kStep; i += 4) {
      Bits right[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        right[v] = LoadBits(packed + i * V * kLanes + v * kFours);
        asm("" : "+v"(right[v]));  // into a register: GCC would read it from memory R times
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        int32_t four;
        std::memcpy(&four, weights + r * in + i, 4);
        const Bits left = Xor(AllIntegers(four), AllBytes(-128));
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sum[r][v] = PlusFours(sum[r][v], left, right[v]);
      }
    }
  }
  Floats scale[V];  // loaded before sums are stored: GCC can't know that these don't change them
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) scale[v] = Load(scales + v * kLanes);
  const auto add = [&](auto of_row) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        float* const to = sums + (r * V + v) * kLanes;
        Store(to, TimesPlus(of_row(r, scale[v]), ToFloats(Bits(sum[r][v])), is_first ? Zero() : Load(to)));
      }
    }
  };
  if (of_rows)
    add([&](int r, Floats x) { return Times(x, All(of_rows[r])); });
  else
    add([](int, Floats x) { return x; });
}

template <int V>
void MultiplyColumns(const Int8Product& p, int64_t begin, int64_t first, int tokens, const Columns& c,
                     const PackedColumns& packed) {
  constexpr int R = std::min(kSumsAtATime / V, kMostWeightRows);
  alignas(64) float sums[kRows][kLanes * V];
  for (int64_t b = 0; b < p.blocks(); ++b) {
    const int64_t rows = packed.RowsOf(p, c, b);
    const int depth = p.depth(b);
    float of_rows[kRows];
    if (p.groups > 1)
      for (int r = 0; r < kRows; ++r) of_rows[r] = p.ScaleOfBlock(begin + r, b);
    for (int r = 0; r < kRows; r += R) {
      const int8_t* const weights = p.weights + (begin + r) * p.in + b * p.block;
      // The first columns fetch the next rows, in the order of memory.
      const int8_t* const ahead =
          c.first ? weights : p.weights + (begin + kRows) * p.in + b * p.block * kRows + r * depth;
      AddColumns<R, V>(weights, ahead, p.in, packed.IntegersOf(p, c, b), depth, packed.begins + rows,
                       packed.scales + rows, p.groups > 1 ? of_rows + r : nullptr, b == 0, sums[r]);
    }
  }
  for (int r = 0; r < kRows; r += kLanes) {
    for (int v = 0; v < V; ++v) {
      Bits lines[kLanes];
      for (int l = 0; l < kLanes; ++l)
        lines[l] = (Bits)Times(Load(sums[r + l] + v * kLanes), All(p.ScaleOfRow(begin + r + l)));
      Transpose(lines);
      for (int j = 0; j < kLanes && c.first + v * kLanes + j < tokens; ++j)
        p.Put(p.y + (first + c.first + v * kLanes + j) * p.out + begin + r, AsFloats(lines[j]));
    }
  }
}

// Rows as bytes, up to kFewBytes in tiles, more in columns: as PiecesOfTiles.
struct PiecesOfBytes {
  using Product = Int8Product;
  static constexpr int64_t kRows = jaxsgl::kRows;
  using Few = PiecesOfTiles<Bytes>;
  static constexpr int64_t kFewBytes = 8;
  // As those who round to float8 have it: an input far larger than the others, as models have them, spoils fewer.
  static constexpr int64_t kInputs = 128;

  static int64_t Most(const Int8Product& p) {
    constexpr int64_t step = kMostStrips * kLanes;
    return std::clamp(kPackedBytes / p.in / step * step, step, kMostColumns);
  }
  static int TokensFrom(const Int8Product& p, int64_t first) { return int(std::min(Most(p), p.tokens - first)); }

  static int64_t PackedBytes(const Int8Product& p, int64_t first) {
    return p.tokens <= kFewBytes ? Few::PackedBytes(p, first) : PackedColumns::NumBytes(p, TokensFrom(p, first));
  }

  static int Parts(const Int8Product& p, int64_t first) {
    if (p.tokens <= kFewBytes) return Few::Parts(p, first);
    int parts = 0;
    ForColumns(TokensFrom(p, first), [&](const Columns&) { ++parts; });
    return parts;
  }

  static void PackPart(const Int8Product& p, int64_t first, int part, char* packed) {
    if (p.tokens <= kFewBytes) return Few::PackPart(p, first, part, packed);
    const int tokens = TokensFrom(p, first);
    const PackedColumns to(packed, p, tokens);
    ForColumns(tokens, [&](const Columns& c) {
      if (part-- == 0) PackColumns(p, first, tokens, c, to);
    });
  }

  static void Multiply(const Int8Product& p, int64_t first, int64_t begin, int64_t rows, char* packed) {
    if (p.tokens <= kFewBytes) return Few::Multiply(p, first, begin, rows, packed);
    const int tokens = TokensFrom(p, first);
    const PackedColumns from(packed, p, tokens);
    for (int64_t row = begin; row < begin + rows; row += kRows) {
      ForColumns(tokens, [&](const Columns& c) {
        const auto multiply = c.strips == 1 ? MultiplyColumns<1> : c.strips == 2 ? MultiplyColumns<2>
                                                                                 : MultiplyColumns<kMostStrips>;
        multiply(p, row, first, tokens, c, from);
      });
    }
  }
};

}  // namespace
}  // namespace jaxsgl

#endif
