// A tile of keys or values out of their pages, as the products of blocks.h want their right side: in pairs of numbers.
//
// Owns the layout of a packed tile, and how the next one is fetched meanwhile. attention.cc says where its tokens lie.

#pragma once

#include <cstdint>

#include "blocks.h"
#include "float8.h"

namespace jaxsgl {
namespace {

constexpr int kTile = 64;  // tokens of a tile

// A tile's K or V: where the row of each of its tokens lies, zeros past its end. Number: uint16_t or Float8.
template <typename Number>
struct Rows {
  static constexpr int kLine = 64 / sizeof(Number);  // numbers in a line of the cache
  const Number* at[kTile];
};

// Packs the first `count` keys, rounded up to kLanes, as [H / 2, kTile, 2]. Meanwhile prefetches keys of the next tile
// into the second cache level, as the first has no room for both; all at once they would wait for each other.
template <typename Number>
void PackKeys(const Rows<Number>& rows, const Rows<Number>& next, int count, int head_dim, uint16_t* packed) {
  for (int h = 0; h < head_dim; h += 2 * kLanes) {
    for (int t = 0; t < count; t += kLanes) {
      Bits block[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        block[i] = LoadBits(rows.at[t + i] + h);
        if (h % rows.kLine == 0) Prefetch(next.at[t + i] + h);
      }
      Transpose(block);
      for (int i = 0; i < kLanes; ++i) StoreBits(packed + ((h / 2 + i) * kTile + t) * 2, block[i]);
    }
  }
}

// Packs the first `count` values, rounded up to 2, as [kTile / 2, H, 2], and prefetches the next tile's, as above.
template <typename Number>
void PackValues(const Rows<Number>& rows, const Rows<Number>& next, int count, int head_dim, uint16_t* packed) {
  for (int t = 0; t < count; t += 2) {
    for (int h = 0; h < head_dim; h += 2 * kLanes) {
      if (h % rows.kLine == 0) {
        Prefetch(next.at[t] + h);
        Prefetch(next.at[t + 1] + h);
      }
      StoreInterleaved(LoadBits(rows.at[t] + h), LoadBits(rows.at[t + 1] + h), packed + (t / 2 * head_dim + h) * 2);
    }
  }
}

#ifdef JAXSGL_FLOAT8_TABLES

inline const Float8Tables& TablesOfPages() {
  static const Float8Tables tables = [] {
    Float8Tables filled;
    filled.Fill([](const uint8_t* codes) { return LoadBits(reinterpret_cast<const Float8*>(codes)); });
    return filled;
  }();
  return tables;
}

// 64 numbers of a key at a time: they are transposed by fours and widened afterwards.
inline void PackKeys(const Rows<Float8>& rows, const Rows<Float8>& next, int count, int head_dim, uint16_t* packed) {
  if (head_dim % (4 * kLanes)) return PackKeys<Float8>(rows, next, count, head_dim, packed);
  const Float8Tables& tables = TablesOfPages();
  const Bits pairs = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  for (int h = 0; h < head_dim; h += 4 * kLanes) {
    for (int t = 0; t < count; t += kLanes) {
      Bits block[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        block[i] = _mm512_loadu_si512(rows.at[t + i] + h);
        Prefetch(next.at[t + i] + h);
      }
      Transpose(block);
      for (int i = 0; i < kLanes; ++i) {
        const Float8Tables::Bytes four = tables.Open(_mm512_shuffle_epi8(block[i], pairs));
        StoreBits(packed + ((h / 2 + 2 * i) * kTile + t) * 2, four.First());
        StoreBits(packed + ((h / 2 + 2 * i + 1) * kTile + t) * 2, four.Last());
      }
    }
  }
}

// 64 numbers of a value at a time.
inline void PackValues(const Rows<Float8>& rows, const Rows<Float8>& next, int count, int head_dim, uint16_t* packed) {
  if (head_dim % (4 * kLanes)) return PackValues<Float8>(rows, next, count, head_dim, packed);
  const Float8Tables& tables = TablesOfPages();
  // Interleaved within 16 bytes, they end up in their order.
  const Bits order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const auto open = [&](const Float8* p) {
    return tables.Open(_mm512_permutexvar_epi32(order, _mm512_loadu_si512(p)));
  };
  for (int t = 0; t < count; t += 2) {
    for (int h = 0; h < head_dim; h += 4 * kLanes) {
      Prefetch(next.at[t] + h);
      Prefetch(next.at[t + 1] + h);
      const Float8Tables::Bytes a = open(rows.at[t] + h), b = open(rows.at[t + 1] + h);
      uint16_t* const to = packed + (t / 2 * head_dim + h) * 2;
      StoreBits(to, _mm512_unpacklo_epi16(a.First(), b.First()));
      StoreBits(to + 2 * kLanes, _mm512_unpackhi_epi16(a.First(), b.First()));
      StoreBits(to + 4 * kLanes, _mm512_unpacklo_epi16(a.Last(), b.Last()));
      StoreBits(to + 6 * kLanes, _mm512_unpackhi_epi16(a.Last(), b.Last()));
    }
  }
}

#endif

}  // namespace
}  // namespace jaxsgl
