// The small products of attention with AMX tiles, whose right side is packed as that of blocks.h.

#pragma once

#include <algorithm>
#include <cstring>

#include "tiles.h"

#ifdef JAXSGL_TILES

namespace jaxsgl {
namespace {

constexpr int kPartColumns = 2 * kTileRows;  // two tiles of sums: why so few at once, product_tiles.h says

// c [kTileRows, kPartColumns] (+)= a [kTileRows, 2 * pairs] b [pairs, kPartColumns, 2]; strides in elements.
inline void MultiplyPart(const uint16_t* a, int a_stride, const uint16_t* b, int b_stride, int pairs, float* c,
                         int c_stride, bool add) {
  if (add) {
    _tile_loadd(0, c, 4 * c_stride);
    _tile_loadd(1, c + kTileRows, 4 * c_stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  for (int i = 0; i < pairs; i += kTileRows) {
    const uint16_t* const right = b + i * b_stride;
    _tile_loadd(2, a + 2 * i, 2 * a_stride);
    _tile_loadd(3, right, 2 * b_stride);
    _tile_dpbf16ps(0, 2, 3);
    _tile_loadd(3, right + kTileInputs, 2 * b_stride);
    _tile_dpbf16ps(1, 2, 3);
  }
  _tile_stored(0, c, 4 * c_stride);
  _tile_stored(1, c + kTileRows, 4 * c_stride);
}

// c [rows, columns] (+)= a [rows, 2 * pairs] b [pairs, columns, 2]; `columns` is a multiple of 32, `pairs` of 16. Up to
// 15 rows of a past the last are read.
inline void MultiplyByTiles(int rows, int columns, const uint16_t* a, int a_stride, const uint16_t* b, int b_stride,
                            int pairs, float* c, int c_stride, bool add) {
  int r = 0;
  for (; r + kTileRows <= rows; r += kTileRows)
    for (int column = 0; column < columns; column += kPartColumns)
      MultiplyPart(a + r * a_stride, a_stride, b + 2 * column, b_stride, pairs, c + r * c_stride + column, c_stride, add);
  if (r == rows) return;
  alignas(64) float part[kTileRows * kPartColumns];  // of which only the rows that there are go back
  for (int column = 0; column < columns; column += kPartColumns) {
    float* const to = c + r * c_stride + column;
    for (int i = 0; add && i < rows - r; ++i)
      std::memcpy(part + i * kPartColumns, to + i * c_stride, sizeof(float) * kPartColumns);
    MultiplyPart(a + r * a_stride, a_stride, b + 2 * column, b_stride, pairs, part, kPartColumns, add);
    for (int i = 0; i < rows - r; ++i)
      std::memcpy(to + i * c_stride, part + i * kPartColumns, sizeof(float) * kPartColumns);
  }
}

}  // namespace
}  // namespace jaxsgl

#endif
