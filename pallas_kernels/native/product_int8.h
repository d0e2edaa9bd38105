// Rows of activations that become integers, and int8 weights with scales: what all ways to multiply them share.

#pragma once

#include <algorithm>
#include <cstdint>

#include "blocks.h"
#include "integers.h"
#include "product.h"

namespace jaxsgl {
namespace {

constexpr int kRows = 16;             // weight rows of a task's step
constexpr int64_t kMostInputs = 512;  // of a block
constexpr float kLeast = 1e-30f;      // blocks of smaller numbers are zeros: their scale has no inverse

// y = x weights^T.
struct Int8Product : ProductOf<int8_t> {
  const float* scales;          // [out, groups], or null: 1
  int64_t groups = 1;
  int64_t block = 0;            // inputs: those of a group, or if there is one group, what rows are rounded in

  int64_t blocks() const { return (in + block - 1) / block; }
  int depth(int64_t b) const { return int(std::min(block, in - b * block)); }

  // Of a block's sums of row `row`; the scale of a row's only group is applied to the sum of all blocks.
  float ScaleOfBlock(int64_t row, int64_t b) const { return groups == 1 ? 1.0f : scales[row * groups + b]; }
  float ScaleOfRow(int64_t row) const { return groups == 1 && scales ? scales[row] : 1.0f; }
  void MoveToUp() {
    ProductOf::MoveToUp();
    if (scales) scales += out * groups;
  }
};

// Packs the rows of a product and multiplies them, in pieces that threads share.
template <typename Pieces>
void MultiplyAll(xla::ffi::ThreadPool pool, const typename Pieces::Product& p) {
  constexpr int64_t kRows = Pieces::kRows;
  for (int64_t first = 0; first < p.tokens; first += Pieces::Most(p)) {
    char* const packed = Packed<char>(Pieces::PackedBytes(p, first));
    const int parts = Pieces::Parts(p, first);
    const auto pack = [=](int i) { Pieces::PackPart(p, first, i, packed); };
    if (parts == 1)
      pack(0);
    else
      InParallel(pool, parts, pack);
    const int64_t steps = p.out / kRows, share = std::clamp<int64_t>(steps / (8 * pool.num_threads()), 1, 16);
    InParallel(pool, int((steps + share - 1) / share), [&](int i) {
      const int64_t end = std::min((i + 1) * share, steps), most = p.gate == Activation::kNone ? share : 1;
      for (int64_t step = i * share; step < end; step += most) {
        const int64_t rows = std::min(most, end - step) * kRows;
        WithGate(p, [&](const auto& half) { Pieces::Multiply(half, first, step * kRows, rows, packed); });
      }
    });
  }
}

// Pieces that are packed in parts as those of a grouped product (grouped_product.h).
template <typename Pieces>
struct OfExperts : Pieces {
  static void PackRows(const typename Pieces::Product& p, int64_t first, char* packed) {
    for (int i = 0; i < Pieces::Parts(p, first); ++i) Pieces::PackPart(p, first, i, packed);
  }
};

// To the first level of cache. Lines should follow each other: the processor then reads ahead by itself, and these find
// them in the second level. In any other order they wait for memory in the few places that loads need, too.
[[gnu::always_inline]] inline void PrefetchSoon(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}

// Results that will be written.
[[gnu::always_inline]] inline void PrefetchToWrite(const float* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_ET0);
}

// What makes a block of a row of activations integers up to `range`.
struct Rounding {
  Floats inverse;
  float scale;  // NaN and infinity make it NaN
};

inline Rounding RoundingOf(const float* x, int depth, float range) {
  Floats largest = Zero(), spoiled = Zero();
  for (int i = 0; i < depth; i += kLanes) {
    const Floats numbers = Load(x + i);
    largest = Max(largest, Absolute(numbers));
    spoiled = TimesPlus(numbers, Zero(), spoiled);
  }
  const float most = Largest(largest), nan = Sum(spoiled);
  return {All(most < kLeast ? 0.0f : range / most), (most < kLeast ? 0.0f : most / range) + nan};
}

}  // namespace
}  // namespace jaxsgl
