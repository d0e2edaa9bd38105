// Rows times weights with AMX tiles.
//
// A tile of weights is 16 rows by 32 inputs as they lie in memory; a tile of tokens is 16 pairs of inputs by 16 tokens,
// packed once per call. Two by two of them make four tiles of sums: four loads for four products. Weights are read from
// memory once for up to kMostTokens tokens. `depth` inputs of all these tokens stay in the second level of cache while
// the weight rows of a task pass by, 32 at a time; if there are more inputs, sums of the task's rows wait in that
// cache too.

#pragma once

#include "product_wide.h"
#include "tiles.h"

#ifdef JAXSGL_TILES

namespace jaxsgl {
namespace {

constexpr int kPair = 2 * kTile;          // weight rows, or tokens, that are multiplied at once
constexpr int kMostTokens = 512;          // for which weights are read once
constexpr int64_t kBlockNumbers = 1 << 18;  // inputs times tokens that stay in the cache: 512 KB
constexpr int64_t kMostSums = 1 << 16;      // weight rows times tokens of a task: 256 KB
constexpr int64_t kMostPairs = 16;          // of weight rows in a task

// Lines of 32 inputs that are prefetched: begin .. end - 1 of each of kPair rows.
struct Ahead {
  const uint16_t* rows;
  int begin, end;
};

// sums [A, B] of tiles (+)= weights [A, kTile, kTileInputs * lines] tokens [B] of tiles. Strides in numbers.
template <int A, int B>
void AddTiles(const uint16_t* weights, int64_t in, const uint16_t* tokens, int lines, float* sums, int64_t sums_stride,
              bool add, Ahead ahead) {
  constexpr int row = 64;  // bytes
  if (add) {
    _tile_loadd(0, sums, row);
    if constexpr (B > 1) _tile_loadd(1, sums + kTileNumbers, row);
    if constexpr (A > 1) _tile_loadd(2, sums + sums_stride, row);
    if constexpr (A > 1 && B > 1) _tile_loadd(3, sums + sums_stride + kTileNumbers, row);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int i = 0; i < lines; ++i) {
    const uint16_t* left = weights + i * kTileInputs;
    const uint16_t* right = tokens + i * 2 * kTileNumbers;
    _tile_loadd(4, left, 2 * in);
    _tile_loadd(6, right, row);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (B > 1) {
      _tile_loadd(7, right + in * kTile, row);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (A > 1) {
      _tile_loadd(5, left + in * kTile, 2 * in);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (A > 1 && B > 1) _tile_dpbf16ps(3, 5, 7);
    if (ahead.begin + i < ahead.end)
      for (int r = 0; r < kPair; ++r) Prefetch(ahead.rows + r * in + (ahead.begin + i) * kTileInputs);
  }
  _tile_stored(0, sums, row);
  if constexpr (B > 1) _tile_stored(1, sums + kTileNumbers, row);
  if constexpr (A > 1) _tile_stored(2, sums + sums_stride, row);
  if constexpr (A > 1 && B > 1) _tile_stored(3, sums + sums_stride + kTileNumbers, row);
}

// Multiplies weight rows begin .. begin + rows - 1 with the packed tokens first .. first + count - 1, into y.
void MultiplyTask(const Product& p, int64_t first, int count, int64_t begin, int rows, const uint16_t* packed) {
  const Tiles tiles;
  const int strips = (count + kTile - 1) / kTile, pairs = (strips + 1) / 2;
  const int64_t depth = std::min(kBlockNumbers / (strips * kTile) / kTileInputs * kTileInputs, p.in);
  const bool is_whole = depth == p.in;  // then no sum waits for more inputs
  const int64_t stride = is_whole ? 2 * kTileNumbers : strips * kTileNumbers;
  float* const waiting = Packed<float>(stride * (is_whole ? 2 : (rows + kTile - 1) / kTile));
  for (int64_t i = 0; i < p.in; i += depth) {
    const bool is_last = i + depth >= p.in;
    const int lines = int(std::min(depth, p.in - i) / kTileInputs);
    for (int r = 0; r < rows; r += kPair) {
      const uint16_t* const weights = p.weights + (begin + r) * p.in + i;
      const uint16_t* next = nullptr;  // what the thread reads after these rows; another task's may be another thread's
      int next_lines = lines;
      if (r + kPair < rows)
        next = weights + kPair * p.in;
      else if (!is_last)
        next = p.weights + begin * p.in + i + depth, next_lines = int(std::min(depth, p.in - i - depth) / kTileInputs);
      for (int t = 0; t < strips; t += 2) {
        const int done = t / 2;
        const Ahead ahead{next, next ? next_lines * done / pairs : 0, next ? next_lines * (done + 1) / pairs : 0};
        const uint16_t* const tokens = packed + (t * p.in + i) * kTile;
        float* const sums = is_whole ? waiting : waiting + r / kTile * stride + t * kTileNumbers;
        const bool two_rows = r + kTile < rows, two_strips = t + 1 < strips;
        const auto add = two_rows ? two_strips ? AddTiles<2, 2> : AddTiles<2, 1>
                                  : two_strips ? AddTiles<1, 2> : AddTiles<1, 1>;
        add(weights, p.in, tokens, lines, sums, stride, i > 0, ahead);
        if (!is_last) continue;
        for (int a = 0; a <= two_rows; ++a)
          for (int b = 0; b <= two_strips; ++b)
            StoreTokens<kTile>(p, first + (t + b) * kTile, begin + r + a * kTile, sums + a * stride + b * kTileNumbers);
      }
    }
  }
}

// Multiplies in the order of tiles' sums, whatever the number of tokens: few of them without tiles, as fast as memory.
void MultiplyByTiles(xla::ffi::ThreadPool pool, const Product& p) {
  if (p.tokens <= kFew) return MultiplyColumns<float, 0, true>(pool, p, 0);
  const int64_t parts = (p.tokens + kMostTokens - 1) / kMostTokens;
  const int64_t part = ((p.tokens + parts - 1) / parts + kPair - 1) / kPair * kPair;
  for (int64_t first = 0; first < p.tokens; first += part) {
    const int count = int(std::min(part, p.tokens - first)), strips = (count + kTile - 1) / kTile;
    uint16_t* const packed = Packed<uint16_t>(strips * kTile * p.in);
    InParallel(pool, strips, [&](int s) { Pack<uint16_t, 1>(p, first + s * kTile, packed + s * kTile * p.in); });
    const int64_t pairs = (p.out + kPair - 1) / kPair;
    const int64_t most = std::min(kMostPairs, kMostSums / (strips * kTile * kPair));
    const int64_t rows = kPair * std::clamp<int64_t>(pairs / (4 * pool.num_threads()), 1, most);
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
  static constexpr int64_t kMost = kMostTokens, kRows = kPair;

  static int64_t Most(const Product&) { return kMost; }

  static int64_t Strips(const Product& p, int64_t first) {
    return (std::min(kMost, p.tokens - first) + kTile - 1) / kTile;
  }

  static int64_t PackedBytes(const Product& p, int64_t first) {
    return p.tokens <= kFew ? p.in * 16 * int64_t(sizeof(float)) : Strips(p, first) * kTile * p.in * 2;
  }

  static void PackRows(const Product& p, int64_t first, void* packed) {
    if (p.tokens <= kFew) return Pack<float, 0>(p, first, static_cast<float*>(packed));
    for (int64_t s = 0; s < Strips(p, first); ++s)
      Pack<uint16_t, 1>(p, first + s * kTile, static_cast<uint16_t*>(packed) + s * kTile * p.in);
  }

  static void Multiply(const Product& p, int64_t first, int64_t begin, int64_t rows, const void* packed) {
    const int64_t end = begin + rows;
    if (p.tokens <= kFew) {
      for (; begin < end; begin += kBlock)
        AddBlock<float, 0, true>(p, first, begin, static_cast<const float*>(packed));
      return;
    }
    const int count = int(std::min(kMost, p.tokens - first));
    const int64_t most = kPair * std::min(kMostPairs, kMostSums / (Strips(p, first) * kTile * kPair));
    for (; begin < end; begin += most)
      MultiplyTask(p, first, count, begin, int(std::min(most, end - begin)), static_cast<const uint16_t*>(packed));
  }
};

}  // namespace
}  // namespace jaxsgl

#endif
