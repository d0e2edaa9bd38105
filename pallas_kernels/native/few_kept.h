// Few rows times weights kept in 4 or 8 bits: transposed as they are kept, and widened in registers.
//
// A line of the cache has 64 or 128 inputs of a weight row. Lines of 16 rows are transposed by 32 bits, so that a
// register has 4 or 8 inputs of each output: half or a quarter of the work that bfloat16 takes (product_wide.h). Each
// pair of these becomes bfloat16 and meets the tokens' pair, in the order of sums of all other ways: results are those
// with weights that were widened before, to the bit. Since a sum waits for the one before, few tokens meet several
// blocks of rows at a time.
//
// `Few` brings the weights of N blocks of 16 rows:
//   kInputs, kUnit          inputs of a line, and of 32 bits
//   Line(n, i), stride      where the inputs from i on of block n lie; bytes from row to row
//   MoveTo(i)               goes on to the inputs i .. i + 31
//   Open(units)             32 bits of each of 16 outputs, as Pair takes them
//   Pair(n, opened, j)      the j-th pair of inputs of each

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "float4.h"
#include "float8.h"
#include "product.h"
#include "registers.h"

#ifdef JAXSGL_FLOAT8_TABLES
#define JAXSGL_FEW_KEPT

#include "product_wide.h"

namespace jaxsgl {
namespace {

constexpr int64_t kBytesOfLine = 64;
constexpr int64_t kFewRows = 64;  // weight rows that are multiplied so, or not

// The first `bytes` of a line of each of kBlock rows, transposed by 32 bits; zeros past them.
[[gnu::noinline]] void TransposeLines(const char* rows, int64_t stride, int64_t bytes, Bits to[kBlock]) {
  Bits lines[kBlock];
  const __mmask64 which = bytes >= kBytesOfLine ? ~uint64_t(0) : (uint64_t(1) << bytes) - 1;
  for (int r = 0; r < kBlock; ++r) lines[r] = _mm512_maskz_loadu_epi8(which, rows + r * stride);
  Transpose(lines);
#pragma GCC unroll 16  // else GCC stores them to copy them by memcpy
  for (int r = 0; r < kBlock; ++r) StoreBits(to + r, lines[r]);
}

// Where N blocks of rows begin, of those from `begin` to `end`: the last one several times if there are fewer.
template <int N>
struct BlocksOfRows {
  int64_t row[N];

  BlocksOfRows(int64_t begin, int64_t end) {
    for (int n = 0; n < N; ++n) row[n] = std::min(begin + n * kBlock, end - kBlock);
  }
};

// float8 times a scale that all rows share for a group of inputs, rounded once: looked up in tables of all magnitudes.
template <int N>
struct FewFloat8 {
  static constexpr int kInputs = 64, kUnit = 4;
  using Opened = Float8Tables::Bytes;

  const BlocksOfRows<N> blocks;
  const char* const numbers;
  const int64_t stride;
  const float* const scales;  // of groups of `group` inputs; or null: 1
  const int64_t group;
  int64_t next = 0;
  Float8Tables tables;

  const char* Line(int n, int64_t i) const { return numbers + blocks.row[n] * stride + i; }

  void MoveTo(int64_t i) {
    if (i < next) return;
    const float scale = scales ? scales[i / group] : 1.0f;
    next = scales ? next + group : stride;
    tables.Fill([&](const uint8_t* codes) {
      return Scaled(_mm256_load_si256(reinterpret_cast<const __m256i*>(codes)), scale);
    });
  }

  Opened Open(Bits four) const { return tables.Open(four); }

  // Byte b of a pair is the low or high byte of an input of the output.
  Bits Pair(int, Opened opened, int j) const {
    const Bits order = _mm512_add_epi8(_mm512_set1_epi32(0x41014000 + 0x02020202 * j), OfOutputs());
    return _mm512_permutex2var_epi8(opened.low, order, opened.high);
  }

 private:
  static Bits OfOutputs() {
    const Bits outputs = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_mullo_epi32(outputs, _mm512_set1_epi32(0x04040404));
  }

  // Codes' bits moved up are those of half precision but for the exponent's bias, 256 in all, and NaN.
  static Bits Scaled(__m256i codes, float scale) {
    const __mmask32 is_nan = _mm256_cmpeq_epi8_mask(codes, _mm256_set1_epi8(127));
    const Bits moved = _mm512_slli_epi16(_mm512_cvtepi8_epi16(codes), 7);
    const Floats by = All(scale * 256);
    const Floats first = Times(_mm512_cvtph_ps(_mm512_castsi512_si256(moved)), by);
    const Floats second = Times(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(moved, 1)), by);
    return _mm512_mask_mov_epi16((Bits)_mm512_cvtne2ps_pbh(second, first), is_nan, _mm512_set1_epi16(kNan));
  }
};

// MXFP4: a look into a table of 16, and the power of two of the output's block added to the exponent unless that is 0.
template <int N>
struct FewMxfp4 {
  static constexpr int kInputs = 128, kUnit = 8;
  static constexpr int kScales = 64;  // of a line
  using Opened = Bits;

  const BlocksOfRows<N> blocks;
  const char *const numbers, *const scales;
  const int64_t stride, groups;
  Bits lines[N][kBlock], power[N], sevens[N];

  const char* Line(int n, int64_t i) const { return numbers + blocks.row[n] * stride + i / 2; }

  void MoveTo(int64_t i) {
    const int64_t g = i / 32;
    for (int n = 0; n < N && g % kScales == 0; ++n)
      TransposeLines(scales + blocks.row[n] * groups + g, groups, groups - g, lines[n]);
    const __m128i shift = _mm_cvtsi32_si128(int(g % 4 * 8));
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const Bits scale = _mm512_and_si512(_mm512_srl_epi32(lines[n][g % kScales / 4], shift), _mm512_set1_epi32(255));
      const Bits twice = _mm512_or_si512(scale, _mm512_slli_epi32(scale, 16));
      power[n] = _mm512_slli_epi16(_mm512_sub_epi16(twice, _mm512_set1_epi16(127)), 7);
      sevens[n] = _mm512_maskz_set1_epi16(_mm512_cmpgt_epi16_mask(twice, _mm512_set1_epi16(1)), 7);
    }
  }

  Bits Open(Bits eight) const { return eight; }

  Bits Pair(int n, Bits eight, int j) const {
    const Bits begins = _mm512_set1_epi64(0x0024002000040000 + 0x0808080808080808 * j);  // bits of each 64
    const Bits codes = _mm512_multishift_epi64_epi8(begins, eight);  // 4 bits; the look takes a 5th, any
    const __mmask32 is_number = _mm512_test_epi16_mask(codes, sevens[n]);
    return _mm512_maskz_add_epi16(is_number, _mm512_permutexvar_epi16(codes, Float4Table()), power[n]);
  }
};

// Multiplies N blocks of weight rows, from `begin` on, with T tokens, packed [in / 2, T, 2], into y.
template <int T, int N, typename Few>
void MultiplyFewKept(const Product& p, Few weights, const uint16_t* packed) {
  Bits lines[N][kBlock];
  Floats sum[T][N];
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t)
    for (int n = 0; n < N; ++n) sum[t][n] = Zero();
  const char* behind = weights.Line(0, 0) + N * kBlock * weights.stride;  // what follows, in the order of memory
  for (int64_t first = 0; first < p.in; first += Few::kInputs) {
    for (int n = 0; n < N; ++n) {
      for (int r = 0; r < kBlock; ++r, behind += kBytesOfLine) _mm_prefetch(behind, _MM_HINT_T1);
      TransposeLines(weights.Line(n, first), weights.stride, (p.in - first) * kBytesOfLine / Few::kInputs, lines[n]);
    }
    for (int64_t i = first; i < std::min(p.in, first + Few::kInputs); i += kLine) {
      weights.MoveTo(i);
      for (int u = 0; u < kLine; u += Few::kUnit) {
        typename Few::Opened opened[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) opened[n] = weights.Open(lines[n][(i - first + u) / Few::kUnit]);
#pragma GCC unroll 4
        for (int j = 0; j < Few::kUnit / 2; ++j) {
          Bits pair[N];
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) pair[n] = weights.Pair(n, opened[n], j);
#pragma GCC unroll 16
          for (int t = 0; t < T; ++t) {
            int32_t of_token;
            std::memcpy(&of_token, packed + (i + u + 2 * j) * T + 2 * t, 4);
            const __m512bh left = (__m512bh)_mm512_set1_epi32(of_token);
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) sum[t][n] = _mm512_dpbf16_ps(sum[t][n], left, (__m512bh)pair[n]);
          }
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t)
    for (int n = 0; n < N && t < p.tokens; ++n) Store(p.y + t * p.out + weights.blocks.row[n], sum[t][n]);
}

// Multiplies `rows` weight rows from `begin` on with kFewPairs tokens at most, packed as for bfloat16.
template <typename Kept>
void MultiplyFewKept(const Product& p, int64_t begin, int64_t rows, const uint16_t* packed, const Kept& kept) {
  WithFewPairs(p, [&](auto tokens) {
    constexpr int T = decltype(tokens)::value, N = T == 1 ? 4 : T <= 4 ? 2 : 1;
    for (int64_t b = begin; b < begin + rows; b += N * kBlock)
      MultiplyFewKept<T, N>(p, kept.template FewFrom<N>({b, begin + rows}, p.in), packed);
  });
}

}  // namespace
}  // namespace jaxsgl

#endif
