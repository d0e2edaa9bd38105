// Rows sorted by expert, times the weights of their experts.
//
// Owns the cut into pieces and tasks. A piece is some rows of one expert; how its rows are packed and multiplied is
// that of a plain product, so a row's result is the same as with its expert's weights alone, whatever is computed
// beside it. Weights are read in place, and those of experts without rows are not read. Called by product.cc.
//
// `Pieces` says how rows and weights are multiplied:
//   Product                                         a product with an expert; MoveToExpert(expert) on that of the first one
//   Most(product), kRows                            the most rows of a piece; weight rows that a task is cut into
//   PackedBytes(product, first)                     of the piece that begins at row `first`
//   PackRows(product, first, packed)
//   Multiply(product, first, begin, rows, packed)   by weight rows begin .. begin + rows - 1

#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "blocks.h"
#include "product.h"

namespace jaxsgl {
namespace {

constexpr int64_t kMostPackedBytes = 1 << 24;  // more rows are packed and multiplied after these
constexpr int64_t kFewPackedBytes = 1 << 17;   // are packed before another thread has woken up

struct Grouped {
  const float* x;         // [T, in] if there are tokens, else [places, in]
  const int32_t* tokens;  // [places], or null
  const int32_t* sizes;   // [experts]
  float* y;               // [places, out]
  int64_t experts, places, in, out;
};

// A product of no rows with the first expert.
template <typename Weight>
ProductOf<Weight> WithFirstExpert(const Grouped& g, const Weight* weights) {
  return {nullptr, weights, nullptr, 0, g.in, g.out};
}

inline bool SizesFit(const Grouped& g) {
  int64_t left = g.places;
  for (int64_t e = 0; e < g.experts; ++e) {
    if (g.sizes[e] < 0 || g.sizes[e] > left) return false;
    left -= g.sizes[e];
  }
  return true;
}

template <typename Product>
struct Piece {
  Product product;  // of all rows of the expert
  int64_t first;    // row of them
  int64_t packed;   // where its packed rows begin
};

// Packs the rows of some pieces, `bytes` in all, then multiplies them; each step is spread over the threads.
template <typename Pieces>
void MultiplyPieces(xla::ffi::ThreadPool pool, const std::vector<Piece<typename Pieces::Product>>& pieces, int64_t out,
                    int64_t bytes) {
  char* const packed = Packed<char>(bytes);
  const auto pack = [&](int i) { Pieces::PackRows(pieces[i].product, pieces[i].first, packed + pieces[i].packed); };
  if (bytes <= kFewPackedBytes)
    for (int i = 0; i < int(pieces.size()); ++i) pack(i);
  else
    InParallel(pool, int(pieces.size()), pack);
  const int64_t blocks = (out + Pieces::kRows - 1) / Pieces::kRows;  // of each piece
  const int64_t most = std::min<int64_t>(blocks, 16);
  const int64_t share = std::clamp<int64_t>(blocks * pieces.size() / (8 * pool.num_threads()), 1, most);
  const int64_t shares = (blocks + share - 1) / share;
  InParallel(pool, int(pieces.size() * shares), [&](int i) {
    const Piece<typename Pieces::Product>& piece = pieces[i / shares];
    const int64_t begin = i % shares * share * Pieces::kRows, end = std::min(begin + share * Pieces::kRows, out);
    Pieces::Multiply(piece.product, piece.first, begin, end - begin, packed + piece.packed);
  });
}

// `first` is a product with the first expert, of no rows.
template <typename Pieces>
void MultiplyGroups(xla::ffi::ThreadPool pool, const Grouped& g, const typename Pieces::Product& first) {
  std::vector<Piece<typename Pieces::Product>> pieces;
  int64_t place = 0, bytes = 0;
  const auto finish = [&] {
    MultiplyPieces<Pieces>(pool, pieces, g.out, bytes);
    pieces.clear();
    bytes = 0;
  };
  for (int64_t e = 0; e < g.experts; place += g.sizes[e++]) {
    typename Pieces::Product product = first;
    product.MoveToExpert(e);
    product.x = g.tokens ? g.x : g.x + place * g.in;
    product.rows = g.tokens ? g.tokens + place : nullptr;
    product.y = g.y + place * g.out;
    product.tokens = g.sizes[e];
    for (int64_t row = 0; row < product.tokens; row += Pieces::Most(product)) {
      if (bytes >= kMostPackedBytes) finish();
      pieces.push_back({product, row, bytes});
      bytes += (Pieces::PackedBytes(product, row) + 63) / 64 * 64;
    }
  }
  finish();
  std::memset(g.y + place * g.out, 0, (g.places - place) * g.out * sizeof(float));
}

}  // namespace
}  // namespace jaxsgl
