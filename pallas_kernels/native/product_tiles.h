// Rows times weights with AMX tiles.
//
// A tile of weights is 16 rows by 32 inputs as they lie in memory; a tile of tokens is 16 pairs of inputs by 16 tokens,
// packed once per call. Weights are read from memory once for up to kMostTokens tokens. Of these a group of kGroup tiles
// and kDepth inputs stays in the first level of cache while the weight rows of a task pass by, 16 at a time; sums of the
// task's rows wait in the second level for more inputs.
//
// One tile of weights meets a group, so 5 of the 8 tiles are in use. Two by two tiles would load less, but two threads
// that share a core also share what its tiles are kept in, and with all 8 in use each load then waits for the product
// before it: a product takes 27 ns instead of 15, and 6 in both forms where the core has one such thread (a Xeon of 2023).

#pragma once

#include "product_wide.h"
#include "tiles.h"

#ifdef JAXSGL_TILES

namespace jaxsgl {
namespace {

constexpr int kGroup = 3;               // tiles of tokens that are multiplied at once
constexpr int64_t kDepth = 256;         // inputs of a group, if there are more groups
constexpr int kMostTokens = 512;        // for which weights are read once
constexpr int64_t kMostSums = 1 << 16;  // weight rows times tokens of a task: 256 KB
constexpr int64_t kMostBlocks = 32;     // of 16 weight rows in a task

// Lines of the cache that are prefetched, begin .. end - 1 of 16 weight rows, in the order of `LinesBehind`.
struct Ahead {
  const uint16_t* rows;
  int begin, end;
};

// sums [B] of tiles (+)= weights [kTileRows, kTileInputs * lines] tokens [B] of tiles. Strides in numbers.
template <int B>
void AddTiles(const uint16_t* weights, int64_t in, const uint16_t* tokens, int lines, float* sums, bool add,
              Ahead ahead) {
  constexpr int row = 64;  // bytes
  if (add) {
    _tile_loadd(0, sums, row);
    if constexpr (B > 1) _tile_loadd(1, sums + kTileNumbers, row);
    if constexpr (B > 2) _tile_loadd(2, sums + 2 * kTileNumbers, row);
  } else {
    _tile_zero(0);
    if constexpr (B > 1) _tile_zero(1);
    if constexpr (B > 2) _tile_zero(2);
  }
  for (int i = 0; i < lines; ++i) {
    const uint16_t* right = tokens + i * 2 * kTileNumbers;
    _tile_loadd(3, weights + i * kTileInputs, 2 * in);
    _tile_loadd(4, right, row);
    _tile_dpbf16ps(0, 3, 4);
    if constexpr (B > 1) {
      _tile_loadd(4, right + in * kTileRows, row);
      _tile_dpbf16ps(1, 3, 4);
    }
    if constexpr (B > 2) {
      _tile_loadd(4, right + 2 * in * kTileRows, row);
      _tile_dpbf16ps(2, 3, 4);
    }
    if (const int line = ahead.begin + i; line < ahead.end) {
      const uint16_t* const next = ahead.rows + line % kStretch * 2 * in + line / kStretch * kStretch * kTileInputs;
      for (int r = 0; r < kTileRows; ++r) Prefetch(next + r / kStretch * in + r % kStretch * kTileInputs);
    }
  }
  _tile_stored(0, sums, row);
  if constexpr (B > 1) _tile_stored(1, sums + kTileNumbers, row);
  if constexpr (B > 2) _tile_stored(2, sums + 2 * kTileNumbers, row);
}

// Multiplies weight rows begin .. begin + rows - 1 with the packed tokens first .. first + count - 1, into y.
void MultiplyTask(const Product& p, int64_t first, int count, int64_t begin, int rows, const uint16_t* packed) {
  const Tiles tiles;
  const int strips = (count + kTileRows - 1) / kTileRows, groups = (strips + kGroup - 1) / kGroup;
  const int64_t depth = groups == 1 ? p.in : std::min(p.in, kDepth);
  float* const waiting = Packed<float>(int64_t(strips) * rows * kTileRows);
  for (int64_t i = 0; i < p.in; i += depth) {
    const bool is_last = i + depth >= p.in;
    const int lines = int(std::min(depth, p.in - i) / kTileInputs);
    for (int group = 0, strip = 0; group < groups; ++group) {
      const int width = (strips - strip + groups - group - 1) / (groups - group);  // as even as may be
      const uint16_t* const tokens = packed + (strip * p.in + i) * kTileRows;
      for (int r = 0; r < rows; r += kTileRows) {
        const uint16_t* const weights = p.weights + (begin + r) * p.in + i;
        // What the thread reads after these inputs, or these rows; another task's may be another thread's.
        const bool is_ahead = groups == 1 ? r + kTileRows < rows : !is_last;
        const Ahead ahead{weights + (groups == 1 ? kTileRows * p.in : depth), is_ahead ? lines * group / groups : 0,
                          is_ahead ? lines * (group + 1) / groups : 0};
        float* const sums = waiting + (int64_t(r) * strips + strip * kTileRows) * kTileRows;
        const auto add = width == 1 ? AddTiles<1> : width == 2 ? AddTiles<2> : AddTiles<3>;
        add(weights, p.in, tokens, lines, sums, i > 0, ahead);
        if (!is_last) continue;
        for (int t = 0; t < width; ++t)
          StoreTokens<kTileRows>(p, first + (strip + t) * kTileRows, begin + r, sums + t * kTileNumbers);
      }
      strip += width;
    }
  }
}

inline int Strips(const Product& p, int64_t first) {
  return int((std::min<int64_t>(kMostTokens, p.tokens - first) + kTileRows - 1) / kTileRows);
}

// Weight rows of a task at most.
inline int64_t MostRows(int strips) { return kTileRows * std::min(kMostBlocks, kMostSums / (strips * kTileRows * kTileRows)); }

void MultiplyByTiles(xla::ffi::ThreadPool pool, const Product& p) {
  const int64_t parts = (p.tokens + kMostTokens - 1) / kMostTokens;
  const int64_t part = ((p.tokens + parts - 1) / parts + kTileRows - 1) / kTileRows * kTileRows;
  for (int64_t first = 0; first < p.tokens; first += part) {
    const int count = int(std::min(part, p.tokens - first)), strips = (count + kTileRows - 1) / kTileRows;
    uint16_t* const packed = Packed<uint16_t>(strips * kTileRows * p.in);
    const auto pack = [&](int s) { Pack<uint16_t, 1>(p, first + s * kTileRows, packed + s * kTileRows * p.in); };
    if (strips == 1)
      pack(0);
    else
      InParallel(pool, strips, pack);
    const int64_t blocks = p.out / kTileRows;
    const int64_t rows = std::clamp<int64_t>(blocks / (8 * pool.num_threads()) * kTileRows, kTileRows, MostRows(strips));
    InParallel(pool, int((p.out + rows - 1) / rows), [&](int i) {
      WithGate(p, [&](const Product& half) {
        MultiplyTask(half, first, count, i * rows, int(std::min(rows, p.out - i * rows)), packed);
      });
    });
  }
}

// The same as pieces of a grouped product (grouped_product.h).
struct TilePieces {
  using Product = jaxsgl::Product;
  static constexpr int64_t kMost = kMostTokens, kRows = 2 * kTileRows;

  static int64_t Most(const Product&) { return kMost; }

  static int64_t PackedBytes(const Product& p, int64_t first) { return Strips(p, first) * kTileRows * p.in * 2; }

  static void PackRows(const Product& p, int64_t first, void* packed) {
    for (int64_t s = 0; s < Strips(p, first); ++s)
      Pack<uint16_t, 1>(p, first + s * kTileRows, static_cast<uint16_t*>(packed) + s * kTileRows * p.in);
  }

  static void Multiply(const Product& p, int64_t first, int64_t begin, int64_t rows, const void* packed) {
    const int count = int(std::min(kMost, p.tokens - first));
    const int64_t end = begin + rows, most = MostRows(Strips(p, first));
    for (; begin < end; begin += most)
      MultiplyTask(p, first, count, begin, int(std::min(most, end - begin)), static_cast<const uint16_t*>(packed));
  }
};

}  // namespace
}  // namespace jaxsgl

#endif
