// Rows times packed weights with AMX tiles of bytes: the same sums to the bit as without them (product_packed.h).
//
// Packed weights lie in memory as the instruction wants its right side: a line of the cache has four inputs of 16
// outputs. Rows in bytes, as they were packed, are the left side. Two tiles hold a block's sums of 16 rows and a strip of
// outputs, exact, which are then scaled and added up in float32 as any others while the tiles of the next block are
// multiplied. Memory is read for the next strip meanwhile. Why so few tiles at once: product_tiles.h.

#pragma once

#include "product_packed.h"
#include "tiles.h"

#if defined(JAXSGL_TILES) && defined(JAXSGL_BYTES)
#define JAXSGL_TILES_OF_BYTES

namespace jaxsgl {
namespace {

constexpr int kTileBytes = 64;               // of a row
constexpr int kLeastForTiles = 9;            // rows; fewer are as fast as memory without
constexpr int64_t kMostRowsByTiles = 512;    // for which weights are read once
constexpr int64_t kMostRowBytes = 1 << 20;   // of these rows, which stay in the second level of cache

// Tiles of `depth` inputs, 64 or 32: sums 0 and 1, rows 2, weights 3.
template <int depth>
alignas(64) inline constexpr TileConfig kTilesOfBytes = {
    1, 0, {}, {64, 64, depth, 64}, {kTileRows, kTileRows, kTileRows, depth / 4}};

// dots [2, 16, 16], tiles of 16 rows by 16 outputs, = rows [16, depth], `width` apart, times weights [depth / 4, kSide, 4].
template <int line>
[[gnu::always_inline]] inline void DotsOfTiles(const int8_t* rows, int64_t width, const uint8_t* weights, int depth,
                                               int32_t* dots) {
  constexpr int row = 64;  // bytes
  _tile_zero(0);
  _tile_zero(1);
  for (int i = 0; i < depth; i += line) {
    _tile_loadd(2, rows + i, width);
    _tile_loadd(3, weights + i * kSide, 2 * row);
    _tile_dpbsud(0, 2, 3);
    _tile_loadd(3, weights + i * kSide + row, 2 * row);
    _tile_dpbsud(1, 2, 3);
  }
  _tile_stored(0, dots, row);
  _tile_stored(1, dots + kTileNumbers, row);
}

// A strip of kSide outputs times packed rows from `t` on.
struct StripOfTiles {
  const PackedProduct& p;
  const PackedRows<FourBytes>& packed;
  const uint8_t* weights;  // a byte each
  const float* of_group;
  const int8_t* zeros;     // or null
  float* y;                // of the first row
  int t, count;

  // sums [count, kSide] += a block's dots, scaled.
  template <typename Kind>
  [[gnu::always_inline]] void AddBlock(int64_t b, const int32_t* dots, float* sums) const {
    constexpr int N = kSide / kLanes;
    const float* const of_rows = packed.scales + b * packed.rows + t;
    const int* const begins = packed.begins + b * packed.rows + t;
    const bool has_groups = p.groups > 1;
    Floats scales[N];
    for (int n = 0; n < N; ++n) scales[n] = has_groups ? Load(of_group + b * kSide + n * kLanes) : Zero();
    const auto add = [&](auto begin_of, auto factor) __attribute__((always_inline)) {
      for (int r = 0; r < count; ++r) {
        const Bits begin = AllIntegers(begins[r]);
        const Floats of_row = All(of_rows[r]);
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) {
          const Bits dot = LoadBits(dots + n * kTileNumbers + r * kTileRows);
          const Floats before = b == 0 ? Zero() : Load(sums + r * kSide + n * kLanes);
          const Floats sum = ToFloats(AddIntegers(dot, begin_of(begin, n)));
          Store(sums + r * kSide + n * kLanes, TimesPlus(factor(of_row, n), sum, before));
        }
      }
    };
    if (zeros)
      add([&](Bits begin, int n) { return LessZeros<Kind>(begin, zeros + b * kSide * has_groups + n * kLanes); },
          [&](Floats x, int n) { return has_groups ? Times(x, scales[n]) : x; });
    else if (has_groups)
      add([](Bits begin, int) { return begin; }, [&](Floats x, int n) { return Times(x, scales[n]); });
    else
      add([](Bits begin, int) { return begin; }, [](Floats x, int) { return x; });
  }

  template <typename Kind, int line>
  [[gnu::always_inline]] void Multiply(const uint8_t* ahead, int64_t bytes_ahead) const {
    alignas(64) float sums[kTileRows * kSide];
    alignas(64) int32_t dots[2][kSide * kTileRows];
    const int64_t blocks = p.blocks();
    const int8_t* const rows = packed.integers + t * packed.width;
    for (int64_t b = 0; b <= blocks; ++b) {
      if (b < blocks) {
        const int64_t begin = b * p.block;
        DotsOfTiles<line>(rows + begin, packed.width, weights + begin * kSide, p.depth(b), dots[b % 2]);
      }
      for (int64_t i = bytes_ahead * b / (blocks + 1) / 64; i < bytes_ahead * (b + 1) / (blocks + 1) / 64; ++i)
        Prefetch(ahead + 64 * i);
      if (b > 0) AddBlock<Kind>(b - 1, dots[(b - 1) % 2], sums);
    }
    for (int r = 0; r < count; ++r) {
      for (int n = 0; n < kSide / kLanes; ++n) {
        const Floats sum = Load(sums + r * kSide + n * kLanes);
        p.Put(y + r * p.out + n * kLanes, p.groups == 1 ? Times(sum, Load(of_group + n * kLanes)) : sum);
      }
    }
  }
};

// `bytes` [in / 4, kSide, 4] are weights of 4 bits, packed.
inline void OpenHalves(const uint8_t* packed, int64_t in, uint8_t* bytes) {
  for (int64_t i = 0; i < in; i += 8, packed += 4 * kSide, bytes += 8 * kSide) {
    for (int n = 0; n < 4 * kSide; n += 64) {
      const Bits both = LoadBits(packed + n);
      StoreBits(bytes + n, LowHalves(both));
      StoreBits(bytes + 4 * kSide + n, HighHalves(both));
    }
  }
}

template <typename Kind, int line>
void MultiplyStripsByTiles(const PackedProduct& p, int64_t first, int tokens, int64_t strip, int64_t end,
                           const PackedRows<FourBytes>& packed) {
  struct Opened {
    uint8_t byte;
  };
  const Tiles tiles(kTilesOfBytes<line>);
  const int64_t strip_bytes = p.Strip(1) - p.Strip(0);
  const int steps = (tokens + kTileRows - 1) / kTileRows;
  uint8_t* const opened = Kind::kBits == 4 ? &Packed<Opened>(p.in * kSide)->byte : nullptr;
  for (; strip < end; ++strip) {
    if (opened) OpenHalves(p.Strip(strip), p.in, opened);
    StripOfTiles of{p, packed, opened ? opened : p.Strip(strip), p.scales + strip * p.groups * kSide,
                    p.zeros ? p.zeros + strip * p.groups * kSide : nullptr};
    for (int step = 0; step < steps; ++step) {
      of.t = step * kTileRows, of.count = std::min(kTileRows, tokens - of.t);
      of.y = p.y + (first + of.t) * p.out + strip * kSide;
      const int64_t ahead = strip_bytes * step / steps, bytes = strip_bytes * (step + 1) / steps - ahead;
      const uint8_t* const next = p.Strip(strip + 1) + ahead;
      of.template Multiply<Kind, line>(next, bytes);
    }
  }
}

// Pieces of packed weights that meet rows of bytes, with tiles where there are enough rows.
template <typename Kind>
struct PiecesByTiles : PiecesOfPacked<Kind, FourBytes, kMostRowsByTiles, kMostRowBytes> {
  using Base = PiecesOfPacked<Kind, FourBytes, kMostRowsByTiles, kMostRowBytes>;

  static int64_t PackedBytes(const PackedProduct& p, int64_t first) {  // the last tile reads past the last row
    return Base::PackedBytes(p, first) + kTileRows * PackedRows<FourBytes>::Width(p);
  }

  static void Multiply(const PackedProduct& p, int64_t first, int64_t begin, int64_t rows, char* packed) {
    const int tokens = Base::TokensFrom(p, first);
    if (tokens < kLeastForTiles) return Base::Multiply(p, first, begin, rows, packed);
    const PackedRows<FourBytes> from(packed, p, tokens);
    const bool whole = p.block % kTileBytes == 0 && p.in % kTileBytes == 0;
    (whole ? MultiplyStripsByTiles<Kind, kTileBytes> : MultiplyStripsByTiles<Kind, kTileBytes / 2>)(
        p, first, tokens, begin / kSide, (begin + rows) / kSide, from);
  }
};

}  // namespace
}  // namespace jaxsgl

#endif
