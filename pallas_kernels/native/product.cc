// Few rows of activations times a matrix of bfloat16 weights stored [out, in], for processors with AVX512_BF16.
//
// Reads each weight once, in order, at the speed of memory; the rows, packed, stay in the cache. What libraries do
// instead, packing the weights or treating them as the side to be blocked for many rows, costs more than the product.
// Compiled and called by library.py and product.py beside it.

#include <vector>

#include "blocks.h"

namespace ffi = xla::ffi;

namespace jaxsgl {
namespace {

constexpr int kBlock = 16;      // weight rows of a block: a register of results for each token
constexpr int kMaxColumns = 64; // tokens at a time, 4 registers
constexpr int kFew = 8;         // tokens that fit half a register

// c [R, 16 * V] = weights [R, in] packed [in / 2, 16 * V, 2]. Asks for the R rows that follow, line by line.
template <int R, int V>
void WeightsTimesRows(const uint16_t* weights, int64_t in, const uint16_t* packed, float* c) {
  __m512 sum[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = _mm512_setzero_ps();
  for (int64_t line = 0; line < in; line += 32) {
    for (int r = 0; r < R; ++r)
      _mm_prefetch(reinterpret_cast<const char*>(weights + (R + r) * in + line), _MM_HINT_T1);
    for (int64_t i = line; i < line + 32; i += 2) {
      __m512bh right[V];
      for (int v = 0; v < V; ++v) right[v] = (__m512bh)_mm512_load_si512(packed + i * 16 * V + 32 * v);
      for (int r = 0; r < R; ++r) {
        int32_t pair;
        std::memcpy(&pair, weights + r * in + i, 4);
        const __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
        for (int v = 0; v < V; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], left, right[v]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) _mm512_store_ps(c + (r * V + v) * 16, sum[r][v]);
}

// The same for kFew tokens: c [R, 16], of which the first 8 are written. The processor multiplies twice as many half
// registers as whole ones; with those it would be slower than memory. Each token's sum is added up in the same order.
template <int R>
void WeightsTimesFew(const uint16_t* weights, int64_t in, const uint16_t* packed, float* c) {
  __m256 sum[R];
  for (int r = 0; r < R; ++r) sum[r] = _mm256_setzero_ps();
  for (int64_t line = 0; line < in; line += 32) {
    for (int r = 0; r < R; ++r)
      _mm_prefetch(reinterpret_cast<const char*>(weights + (R + r) * in + line), _MM_HINT_T1);
    for (int64_t i = line; i < line + 32; i += 2) {
      const __m256bh right = (__m256bh)_mm256_load_si256(reinterpret_cast<const __m256i*>(packed + i * 8));
      for (int r = 0; r < R; ++r) {
        int32_t pair;
        std::memcpy(&pair, weights + r * in + i, 4);
        sum[r] = _mm256_dpbf16_ps(sum[r], (__m256bh)_mm256_set1_epi32(pair), right);
      }
    }
  }
  for (int r = 0; r < R; ++r) _mm256_store_ps(c + r * 16, sum[r]);
}

struct alignas(64) Line {
  uint16_t numbers[32];
};

struct Problem {
  const float* x;           // [T, in]
  const uint16_t* weights;  // [out, in]
  float* y;                 // [T, out]
  int64_t tokens, in, out;
};

// The tokens first .. first + 16 * V - 1 as [in / 2, 16 * V, 2]; zeros past the last. With V = 0, kFew tokens.
template <int V>
void Pack(const Problem& p, int64_t first, uint16_t* packed) {
  for (int v = 0; v < std::max(V, 1); ++v) {
    for (int64_t i = 0; i < p.in; i += 32) {
      __m512i block[16];
      for (int t = 0; t < 16; ++t) {
        const int64_t token = first + 16 * v + t;
        if (token < p.tokens) {
          const float* x = p.x + token * p.in + i;
          block[t] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + 16), _mm512_loadu_ps(x));
        } else {
          block[t] = _mm512_setzero_si512();
        }
      }
      Transpose(block);
      for (int j = 0; j < 16; ++j) {
        if constexpr (V == 0)
          _mm256_store_si256(reinterpret_cast<__m256i*>(packed + (i / 2 + j) * 16), _mm512_castsi512_si256(block[j]));
        else
          _mm512_store_si512(packed + ((i / 2 + j) * V + v) * 32, block[j]);
      }
    }
  }
}

// Weight rows begin .. begin + 15 times the packed tokens from `first` on, into y.
template <int V>
void AddBlock(const Problem& p, int64_t first, int64_t begin, const uint16_t* packed) {
  constexpr int R = V == 4 ? 4 : 8;  // sums, a line of `packed` and a weight fit the 32 registers
  constexpr int lines = std::max(V, 1);
  alignas(64) float c[kBlock * 16 * lines];
  for (int r = 0; r < kBlock; r += R) {
    const uint16_t* weights = p.weights + (begin + r) * p.in;
    if constexpr (V == 0)
      WeightsTimesFew<R>(weights, p.in, packed, c + r * 16);
    else
      WeightsTimesRows<R, V>(weights, p.in, packed, c + r * 16 * V);
  }
  for (int v = 0; v < lines; ++v) {
    __m512i block[16];
    for (int r = 0; r < 16; ++r) block[r] = _mm512_load_si512(c + (r * lines + v) * 16);
    Transpose(block);
    for (int t = 0; t < 16 && first + 16 * v + t < p.tokens; ++t)
      _mm512_storeu_si512(p.y + (first + 16 * v + t) * p.out + begin, block[t]);
  }
}

template <int V>
void MultiplyColumns(ffi::ThreadPool pool, const Problem& p, int64_t first) {
  thread_local std::vector<Line> lines;  // kept: fresh memory costs the system's time at each call
  const size_t needed = p.in / 2 * std::max(V, 1);
  if (lines.size() < needed) lines.resize(needed);
  uint16_t* const packed = lines[0].numbers;
  Pack<V>(p, first, packed);
  const int64_t blocks = p.out / kBlock, share = std::clamp<int64_t>(blocks / (8 * pool.num_threads()), 1, 16);
  InParallel(pool, int((blocks + share - 1) / share), [&](int i) {
    for (int64_t b = i * share; b < std::min((i + 1) * share, blocks); ++b)
      AddBlock<V>(p, first, b * kBlock, packed);
  });
}

ffi::Error FewRowsProduct(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::BF16> weights,
                          ffi::ResultBuffer<ffi::F32> y) {
  const Problem p{x.typed_data(), reinterpret_cast<const uint16_t*>(weights.untyped_data()), y->typed_data(),
                  x.dimensions()[0], x.dimensions()[1], weights.dimensions()[0]};
  if (p.tokens <= kFew) {
    MultiplyColumns<0>(pool, p, 0);
    return ffi::Error::Success();
  }
  for (int64_t first = 0; first < p.tokens; first += kMaxColumns) {
    switch ((std::min<int64_t>(p.tokens - first, kMaxColumns) + 15) / 16) {
      case 1: MultiplyColumns<1>(pool, p, first); break;
      case 2: MultiplyColumns<2>(pool, p, first); break;
      case 3: MultiplyColumns<3>(pool, p, first); break;
      case 4: MultiplyColumns<4>(pool, p, first); break;
    }
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxsgl

XLA_FFI_DEFINE_HANDLER_SYMBOL(few_rows_product, jaxsgl::FewRowsProduct,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
