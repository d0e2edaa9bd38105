// Rows times weights where registers have 512 bits: 4 to 16 weight rows at a time pass by up to 64 tokens.
//
// With few tokens the processor could not spread single weights over registers as fast as memory brings them. So pairs
// are transposed, 16 weight rows at a time, and each token's pair is spread instead.

#pragma once

#include <type_traits>

#include "blocks.h"
#include "product.h"

namespace jaxsgl {
namespace {

constexpr int kBlock = 16;      // weight rows of a block: a register of results for each token
constexpr int kMaxColumns = 64; // tokens at a time, 4 registers
constexpr int kFew = 8;         // tokens that are multiplied one by one
constexpr int kFewPairs = 12;   // the same, paired

// c [R, 16 * V] = weights [R, in] packed [in / 2, 16 * V, 2]. Prefetches the R rows that follow, in the order of memory.
template <int R, int V>
void WeightsTimesRows(const uint16_t* weights, int64_t in, const uint16_t* packed, float* c) {
  __m512 sum[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = _mm512_setzero_ps();
  for (int64_t line = 0; line < in; line += 32) {
    for (int r = 0; r < R; ++r)
      _mm_prefetch(reinterpret_cast<const char*>(weights + R * in + R * line + kLine * r), _MM_HINT_T0);
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

// Multiplies kBlock weight rows from `begin` on, transposed in registers, with T tokens, packed [in / 2, T, 2], into y.
// Each token's sum is added up in the same order as above. Prefetches the rows that follow.
template <int T>
void MultiplyFewPairs(const Product& p, int64_t begin, const uint16_t* packed) {
  const uint16_t* const rows = p.weights + begin * p.in;
  __m512 sum[T];
  for (int t = 0; t < T; ++t) sum[t] = _mm512_setzero_ps();
  for (int64_t i = 0; i < p.in; i += kLine) {
    const uint16_t* const behind = LinesBehind<kBlock>(rows, p.in, i / kLine);
    Bits block[kBlock];
    for (int r = 0; r < kBlock; ++r) {
      block[r] = LoadBits(rows + r * p.in + i);
      Prefetch(behind + r / kStretch * p.in + r % kStretch * kLine);
    }
    Transpose(block);
#pragma GCC unroll 16
    for (int j = 0; j < kLine / 2; ++j) {
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) {
        int32_t pair;
        std::memcpy(&pair, packed + (i + 2 * j) * T + 2 * t, 4);
        sum[t] = _mm512_dpbf16_ps(sum[t], (__m512bh)_mm512_set1_epi32(pair), (__m512bh)block[j]);
      }
    }
  }
  for (int t = 0; t < T && t < p.tokens; ++t) p.Put(p.y + t * p.out + begin, sum[t]);
}

// Calls `work` with the number of tokens that are multiplied one by one, some of them zeros.
template <typename Work>
void WithFewPairs(const Product& p, const Work& work) {
  if (p.tokens <= 1) return work(std::integral_constant<int, 1>());
  if (p.tokens <= 2) return work(std::integral_constant<int, 2>());
  if (p.tokens <= 4) return work(std::integral_constant<int, 4>());
  if (p.tokens <= 6) return work(std::integral_constant<int, 6>());
  if (p.tokens <= 8) return work(std::integral_constant<int, 8>());
  if (p.tokens <= 10) return work(std::integral_constant<int, 10>());
  work(std::integral_constant<int, kFewPairs>());
}

// Widened (see blocks.h): packed [in, 16 * V]. A line of the weights, widened once, serves all columns.
template <int R, int V>
void WeightsTimesRows(const uint16_t* weights, int64_t in, const float* packed, float* c) {
  alignas(64) float left[R][32];
  __m512 sum[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = _mm512_setzero_ps();
  for (int64_t line = 0; line < in; line += 32) {
    for (int r = 0; r < R; ++r) {
      _mm_prefetch(reinterpret_cast<const char*>(weights + (R + r) * in + line), _MM_HINT_T1);
      const __m512i row = LoadBits(weights + r * in + line);
      _mm512_store_ps(left[r], Widen(_mm512_castsi512_si256(row)));
      _mm512_store_ps(left[r] + 16, Widen(_mm512_extracti64x4_epi64(row, 1)));
    }
    for (int i = 0; i < 32; ++i) {
      __m512 right[V];
      for (int v = 0; v < V; ++v) {
        right[v] = _mm512_load_ps(packed + (line + i) * 16 * V + 16 * v);
        asm("" : "+v"(right[v]));  // into a register: GCC would read it from memory R times
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sum[r][v] = _mm512_fmadd_ps(_mm512_set1_ps(left[r][i]), right[v], sum[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) _mm512_store_ps(c + (r * V + v) * 16, sum[r][v]);
}

// Widened, for kFew tokens: packed [in, 8, 2], each number twice. A register holds two weight rows' sums, in turns.
template <int R>
void WeightsTimesFew(const uint16_t* weights, int64_t in, const float* packed, float* c) {
  const __m512i first_half = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i second_half = _mm512_add_epi32(first_half, _mm512_set1_epi32(8));
  alignas(64) float left[R / 2][32][2];
  __m512 sum[R / 2];
#pragma GCC unroll 8
  for (int r = 0; r < R / 2; ++r) sum[r] = _mm512_setzero_ps();
  for (int64_t line = 0; line < in; line += 32) {
    for (int r = 0; r < R / 2; ++r) {
      for (int i = 0; i < 32; i += 16) {
        const uint16_t* row = weights + 2 * r * in + line + i;
        _mm_prefetch(reinterpret_cast<const char*>(row + (R + i / 16) * in), _MM_HINT_T1);
        const __m512 a = Widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row)));
        const __m512 b = Widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + in)));
        _mm512_store_ps(left[r][i], _mm512_permutex2var_ps(a, first_half, b));
        _mm512_store_ps(left[r][i + 8], _mm512_permutex2var_ps(a, second_half, b));
      }
    }
    for (int i = 0; i < 32; ++i) {
      const __m512 right = _mm512_load_ps(packed + (line + i) * 16);
#pragma GCC unroll 8
      for (int r = 0; r < R / 2; ++r) {
        double pair;
        std::memcpy(&pair, left[r][i], 8);
        sum[r] = _mm512_fmadd_ps(_mm512_castpd_ps(_mm512_set1_pd(pair)), right, sum[r]);
      }
    }
  }
  const __m512i apart = _mm512_set_epi32(15, 13, 11, 9, 7, 5, 3, 1, 14, 12, 10, 8, 6, 4, 2, 0);
#pragma GCC unroll 8
  for (int r = 0; r < R / 2; ++r) {
    const __m512 rows = _mm512_permutexvar_ps(apart, sum[r]);
    _mm256_store_ps(c + 2 * r * 16, _mm512_castps512_ps256(rows));
    _mm256_store_ps(c + (2 * r + 1) * 16, _mm512_extractf32x8_ps(rows, 1));
  }
}

// A register of one token's inputs, rounded to bfloat16: 16 pairs, or 16 numbers widened.
inline __m512i Rounded(const float* x, uint16_t) {
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + 16), _mm512_loadu_ps(x));
}
inline __m512i Rounded(const float* x, float) {
  return _mm512_castps_si512(Widen((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x))));
}

// Packs T tokens as [in / 2, T, 2]; zeros past the last.
template <int T>
void PackFewPairs(const Product& p, uint16_t* packed) {
  for (int t = 0; t < T; ++t) {
    for (int64_t i = 0; i < p.in; i += kLine) {
      alignas(64) int32_t pairs[kLine / 2];
      StoreBits(pairs, t < p.tokens ? Rounded(p.Row(t) + i, uint16_t()) : _mm512_setzero_si512());
      for (int j = 0; j < kLine / 2; ++j) std::memcpy(packed + (i + 2 * j) * T + 2 * t, pairs + j, 4);
    }
  }
}

// Packs the tokens first .. first + 16 * V - 1 as [in / 2, 16 * V, 2], or as [in, 16 * V] if Number is float; zeros
// past the last. With V = 0, kFew tokens as [in, 8, 2], or as many as `MultiplyFewPairs` takes.
template <typename Number, int V>
void Pack(const Product& p, int64_t first, Number* packed) {
  if constexpr (V == 0 && std::is_same_v<Number, uint16_t>)
    return WithFewPairs(p, [&](auto tokens) { PackFewPairs<decltype(tokens)::value>(p, packed); });
  const __m512i twice = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  constexpr int step = 64 / sizeof(Number);  // inputs of a register
  for (int v = 0; v < std::max(V, 1); ++v) {
    for (int64_t i = 0; i < p.in; i += step) {
      __m512i block[16];
      for (int t = 0; t < 16; ++t) {
        const int64_t token = first + 16 * v + t;
        block[t] = token < p.tokens ? Rounded(p.Row(token) + i, Number()) : _mm512_setzero_si512();
      }
      Transpose(block);
      for (int j = 0; j < 16; ++j) {
        const int64_t line = i / step * 16 + j;
        if constexpr (V > 0)
          _mm512_store_si512(packed + (line * V + v) * step, block[j]);
        else
          _mm512_store_si512(packed + line * step, _mm512_permutexvar_epi32(twice, block[j]));
      }
    }
  }
}

// Transposes sums c [16 weight rows, 16 tokens], whose rows are `stride` numbers apart, into y.
template <int stride>
[[gnu::always_inline]] inline void StoreTokens(const Product& p, int64_t first, int64_t begin, const float* c) {
  __m512i block[16];
  for (int r = 0; r < 16; ++r) block[r] = _mm512_load_si512(c + r * stride);
  Transpose(block);
  for (int t = 0; t < 16 && first + t < p.tokens; ++t)
    p.Put(p.y + (first + t) * p.out + begin, AsFloats(block[t]));
}

// Multiplies weight rows begin .. begin + 15 with the packed tokens from `first` on, into y.
template <typename Number, int V>
void AddBlock(const Product& p, int64_t first, int64_t begin, const Number* packed) {
  if constexpr (V == 0 && std::is_same_v<Number, uint16_t>) {
    WithFewPairs(p, [&](auto tokens) { MultiplyFewPairs<decltype(tokens)::value>(p, begin, packed); });
  } else {
    // Sums, a line of `packed` and a weight fit the 32 registers.
    constexpr int R = V == 4 ? 4 : V <= 1 && std::is_same_v<Number, float> ? 16 : 8;
    constexpr int lines = std::max(V, 1);
    alignas(64) float c[kBlock * 16 * lines];
    for (int r = 0; r < kBlock; r += R) {
      const uint16_t* weights = p.weights + (begin + r) * p.in;
      if constexpr (V == 0) {
        WeightsTimesFew<R>(weights, p.in, packed, c + r * 16);
      } else {
        WeightsTimesRows<R, V>(weights, p.in, packed, c + r * 16 * V);
      }
    }
    for (int v = 0; v < lines; ++v) StoreTokens<16 * lines>(p, first + 16 * v, begin, c + 16 * v);
  }
}

template <typename Number, int V>
void MultiplyColumns(xla::ffi::ThreadPool pool, const Product& p, int64_t first) {
  Number* const packed = Packed<Number>(p.in * 16 * std::max(V, 1));
  Pack<Number, V>(p, first, packed);
  const int64_t blocks = p.out / kBlock, share = std::clamp<int64_t>(blocks / (8 * pool.num_threads()), 1, 16);
  InParallel(pool, int((blocks + share - 1) / share), [&](int i) {
    for (int64_t b = i * share; b < std::min((i + 1) * share, blocks); ++b)
      WithGate(p, [&](const Product& half) { AddBlock<Number, V>(half, first, b * kBlock, packed); });
  });
}

// Calls `work` with the registers of columns that the rows from `first` on fill, kMaxColumns at most; 0 for kFew or less,
// or kFewPairs or less.
template <typename Number, typename Work>
void WithColumns(const Product& p, int64_t first, const Work& work) {
  constexpr int few = std::is_same_v<Number, float> ? kFew : kFewPairs;
  if (p.tokens <= few) return work(std::integral_constant<int, 0>());
  switch ((std::min<int64_t>(p.tokens - first, kMaxColumns) + 15) / 16) {
    case 1: return work(std::integral_constant<int, 1>());
    case 2: return work(std::integral_constant<int, 2>());
    case 3: return work(std::integral_constant<int, 3>());
    case 4: return work(std::integral_constant<int, 4>());
  }
}

template <typename Number>
void MultiplyAll(xla::ffi::ThreadPool pool, const Product& p) {
  for (int64_t first = 0; first < p.tokens; first += kMaxColumns)
    WithColumns<Number>(p, first, [&](auto v) { MultiplyColumns<Number, decltype(v)::value>(pool, p, first); });
}

// The same as pieces of a grouped product (grouped_product.h).
template <typename Number>
struct Pieces {
  using Product = jaxsgl::Product;
  static constexpr int64_t kMost = kMaxColumns, kRows = kBlock;

  static int64_t Most(const Product&) { return kMost; }

  static int64_t PackedBytes(const Product& p, int64_t first) {
    int64_t columns = 0;
    WithColumns<Number>(p, first, [&](auto v) { columns = 16 * std::max(decltype(v)::value, 1); });
    return p.in * columns * int64_t(sizeof(Number));
  }

  static void PackRows(const Product& p, int64_t first, void* packed) {
    WithColumns<Number>(p, first, [&](auto v) { Pack<Number, decltype(v)::value>(p, first, static_cast<Number*>(packed)); });
  }

  static void Multiply(const Product& p, int64_t first, int64_t begin, int64_t rows, const void* packed) {
    WithColumns<Number>(p, first, [&](auto v) {
      for (int64_t b = begin; b < begin + rows; b += kBlock)
        AddBlock<Number, decltype(v)::value>(p, first, b, static_cast<const Number*>(packed));
    });
  }
};

}  // namespace
}  // namespace jaxsgl
