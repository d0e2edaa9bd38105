// Rows of activations times a matrix of int8 weights stored [out, in], with scales [out, groups of inputs].
//
// Each block of up to 512 inputs of a row becomes 16 bit integers, its largest number 32767, so that a row is rounded
// less than to bfloat16. Products with a block are summed in 32 bits without rounding: 512 * 128 * 32767 < 2^31. So
// they are the same in any order, and a row's result depends neither on the rows beside it nor on the processor. The
// blocks' sums, times their scales, are added up in float32 from the first block to the last.
// Compiled and called by library.py and product.py beside it.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "blocks.h"
#include "grouped_product.h"
#include "integers.h"
#include "product.h"

namespace ffi = xla::ffi;

namespace jaxsgl {
namespace {

constexpr int kRows = kLanes;         // weight rows of a task's step
constexpr int kMostTokens = 64;       // that are packed at a time
constexpr int64_t kMostInputs = 512;  // of a block
constexpr float kLargest = 32767;     // of a packed number
constexpr float kLeast = 1e-30f;      // blocks of smaller numbers are zeros: their scale has no inverse

// y = x weights^T.
struct Int8Product : ProductOf<int8_t> {
  const float* scales;          // [out, groups], or null: 1
  int64_t groups = 1;
  int64_t block = kMostInputs;  // inputs: those of a group, or kMostInputs if there is one group

  int64_t blocks() const { return (in + block - 1) / block; }
  int depth(int64_t b) const { return int(std::min(block, in - b * block)); }
};

// Packed tokens in tiles of T: integers [tiles, blocks, T, block], and their scales [tiles, blocks, kLanes], whose lane
// l is that of token l % T.
struct Tokens {
  int16_t* integers;
  float* scales;
};

// Rounds one block of a token to integers; returns their scale. NaN and infinity make it NaN.
float PackBlock(const float* x, int depth, int16_t* to) {
  Floats largest = Zero(), spoiled = Zero();
  for (int i = 0; i < depth; i += kLanes) {
    const Floats numbers = Load(x + i);
    largest = Max(largest, Absolute(numbers));
    spoiled = TimesPlus(numbers, Zero(), spoiled);
  }
  const float most = Largest(largest), nan = Sum(spoiled);
  const Floats inverse = All(most < kLeast ? 0.0f : kLargest / most);
  for (int i = 0; i < depth; i += kPairs)
    StoreIntegers(Times(Load(x + i), inverse), Times(Load(x + i + kLanes), inverse), to + i);
  return (most < kLeast ? 0.0f : most / kLargest) + nan;
}

template <int T>
void PackTokens(const Int8Product& p, int64_t first, int tokens, const Tokens& to) {
  for (int tile = 0; tile * T < tokens; ++tile) {
    for (int64_t b = 0; b < p.blocks(); ++b) {
      const int depth = p.depth(b);
      int16_t* const integers = to.integers + tile * T * p.in + b * p.block * T;
      float* const scales = to.scales + (tile * p.blocks() + b) * kLanes;
      for (int t = 0; t < T; ++t) {
        float scale = 0;
        if (tile * T + t < tokens)
          scale = PackBlock(p.Row(first + tile * T + t) + b * p.block, depth, integers + t * depth);
        else
          std::memset(integers + t * depth, 0, depth * sizeof(int16_t));
        for (int lane = t; lane < kLanes; lane += T) scales[lane] = scale;
      }
    }
  }
}

// Lane r * T + t: the sum of products of weight row r with token t. Prefetches the weights kRows rows further if asked.
template <int T, bool prefetches>
Bits Dots(const int8_t* weights, int64_t in, const int16_t* tokens, int depth) {
  constexpr int R = kLanes / T;
  Sums sum[kLanes];
#pragma GCC unroll 16
  for (int l = 0; l < kLanes; ++l) sum[l] = Sums{};
  for (int i = 0; i < depth; i += kPairs) {
    if constexpr (prefetches)  // each line twice: a condition would make GCC copy the sums
      for (int r = 0; r < R; ++r)
        _mm_prefetch(reinterpret_cast<const char*>(weights + (kRows + r) * in + i), _MM_HINT_T1);
    Bits right[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      right[t] = LoadBits(tokens + t * depth + i);
      asm("" : "+v"(right[t]));  // into a register: GCC would read it from memory R times
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Bits left = WidenBytes(weights + r * in + i);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) sum[r * T + t] = PlusPairs(sum[r * T + t], left, right[t]);
    }
  }
  Bits bits[kLanes];
#pragma GCC unroll 16
  for (int l = 0; l < kLanes; ++l) bits[l] = Bits(sum[l]);
  return SumsOfLanes(bits);
}

// Multiplies weight rows begin .. begin + kRows - 1 with packed tokens, into y.
template <int T>
void MultiplyRows(const Int8Product& p, int64_t begin, int64_t first, int tokens, const Tokens& packed) {
  constexpr int R = kLanes / T;
  alignas(64) float sums[kMostTokens / T][T][kLanes];  // of each tile: T registers of R weight rows
  const int tiles = (tokens + T - 1) / T;
  std::memset(sums, 0, tiles * sizeof(sums[0]));
  alignas(64) int rows_of[T][kLanes];  // the weight row of each lane
  for (int g = 0; g < T; ++g)
    for (int l = 0; l < kLanes; ++l) rows_of[g][l] = g * R + l / T;
  for (int64_t b = 0; b < p.blocks(); ++b) {
    const int depth = p.depth(b);
    alignas(64) float of_rows[kRows];
    for (int r = 0; r < kRows; ++r) of_rows[r] = p.groups == 1 ? 1.0f : p.scales[(begin + r) * p.groups + b];
    for (int tile = 0; tile < tiles; ++tile) {
      const int16_t* const integers = packed.integers + tile * T * p.in + b * p.block * T;
      const Floats of_tokens = Load(packed.scales + (tile * p.blocks() + b) * kLanes);
      for (int g = 0; g < T; ++g) {
        const int8_t* const weights = p.weights + (begin + g * R) * p.in + b * p.block;
        const Bits dots = tile ? Dots<T, false>(weights, p.in, integers, depth)
                               : Dots<T, true>(weights, p.in, integers, depth);
        const Floats scale = Times(of_tokens, Permuted(Load(of_rows), LoadBits(rows_of[g])));
        Store(sums[tile][g], TimesPlus(scale, ToFloats(dots), Load(sums[tile][g])));
      }
    }
  }
  for (int t = 0; t < tokens; ++t) {
    float* const y = p.y + (first + t) * p.out + begin;
    for (int r = 0; r < kRows; ++r)
      y[r] = sums[t / T][r / R][r % R * T + t % T] * (p.groups == 1 && p.scales ? p.scales[begin + r] : 1.0f);
  }
}

// Calls f with the number of tokens in a tile, as a constant: no sum depends on it.
template <typename Function>
void WithTile(int64_t tokens, const Function& f) {
  if (tokens == 1)
    f(std::integral_constant<int, 1>());
  else if (tokens == 2)
    f(std::integral_constant<int, 2>());
  else
    f(std::integral_constant<int, 4>());
}

// Where `tokens` packed tokens lie, in tiles of T, from `begin` on.
template <int T>
Tokens TokensAt(char* begin, const Int8Product& p, int64_t tokens) {
  const int64_t tiles = (tokens + T - 1) / T;
  return {reinterpret_cast<int16_t*>(begin), reinterpret_cast<float*>(begin + tiles * T * p.in * sizeof(int16_t))};
}

template <int T>
int64_t BytesOfTokens(const Int8Product& p, int64_t tokens) {
  const int64_t tiles = (tokens + T - 1) / T;
  return tiles * (T * p.in * sizeof(int16_t) + p.blocks() * kLanes * sizeof(float));
}

// Rows of experts; their results aren't scaled.
struct IntegerPieces {
  using Weight = int8_t;
  static constexpr int64_t kMost = kMostTokens, kRows = jaxsgl::kRows;

  static int64_t TokensFrom(const ProductOf<int8_t>& p, int64_t first) { return std::min(kMost, p.tokens - first); }

  static int64_t PackedBytes(const ProductOf<int8_t>& p, int64_t first) {
    int64_t bytes = 0;
    WithTile(TokensFrom(p, first), [&](auto t) { bytes = BytesOfTokens<t()>({p, nullptr}, TokensFrom(p, first)); });
    return bytes;
  }

  static void PackRows(const ProductOf<int8_t>& of, int64_t first, char* packed) {
    const Int8Product p{of, nullptr};
    const int tokens = int(TokensFrom(of, first));
    WithTile(tokens, [&](auto t) { PackTokens<t()>(p, first, tokens, TokensAt<t()>(packed, p, tokens)); });
  }

  static void Multiply(const ProductOf<int8_t>& of, int64_t first, int64_t begin, int64_t rows, char* packed) {
    const Int8Product p{of, nullptr};
    const int tokens = int(TokensFrom(of, first));
    WithTile(tokens, [&](auto t) {
      for (int64_t row = begin; row < begin + rows; row += kRows)
        MultiplyRows<t()>(p, row, first, tokens, TokensAt<t()>(packed, p, tokens));
    });
  }
};

template <int T>
void MultiplyTokens(ffi::ThreadPool pool, const Int8Product& p, int64_t first, int tokens) {
  const Tokens packed = TokensAt<T>(Packed<char>(BytesOfTokens<T>(p, tokens)), p, tokens);
  PackTokens<T>(p, first, tokens, packed);
  const int64_t steps = p.out / kRows, share = std::clamp<int64_t>(steps / (8 * pool.num_threads()), 1, 16);
  InParallel(pool, int((steps + share - 1) / share), [&](int i) {
    for (int64_t s = i * share; s < std::min((i + 1) * share, steps); ++s)
      MultiplyRows<T>(p, s * kRows, first, tokens, packed);
  });
}

ffi::Error MultiplyInt8(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S8> weights,
                        ffi::Buffer<ffi::F32> scales, int64_t group, ffi::ResultBuffer<ffi::F32> y) {
  const int64_t groups = scales.dimensions()[1];
  const Int8Product p{{x.typed_data(), weights.typed_data(), y->typed_data(), x.dimensions()[0], x.dimensions()[1],
                       weights.dimensions()[0]},
                      scales.typed_data(),
                      groups,
                      groups == 1 ? kMostInputs : group};
  if (p.block > kMostInputs || p.block % 32 || p.in % 32 || p.out % 16)
    return {ffi::ErrorCode::kInvalidArgument, "groups have 32 to 512 inputs, weights multiples of 32 by 16"};
  WithTile(p.tokens, [&](auto t) {
    for (int64_t first = 0; first < p.tokens; first += kMostTokens)
      MultiplyTokens<t()>(pool, p, first, int(std::min<int64_t>(kMostTokens, p.tokens - first)));
  });
  return ffi::Error::Success();
}

// As GroupedProduct of product.cc, with int8 weights [E, out, in].
ffi::Error GroupedInt8Product(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> tokens,
                              ffi::Buffer<ffi::S32> sizes, ffi::Buffer<ffi::S8> weights, bool of_tokens,
                              ffi::ResultBuffer<ffi::F32> y) {
  const Grouped g{x.typed_data(), of_tokens ? tokens.typed_data() : nullptr, sizes.typed_data(), y->typed_data(),
                  sizes.dimensions()[0], y->dimensions()[0], weights.dimensions()[2], weights.dimensions()[1]};
  if (!SizesFit(g)) return {ffi::ErrorCode::kInvalidArgument, "the experts' sizes exceed the places"};
  if (g.in % 32 || g.out % 16) return {ffi::ErrorCode::kInvalidArgument, "weights have multiples of 16 by 32"};
  MultiplyGroups<IntegerPieces>(pool, g, weights.typed_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxsgl

XLA_FFI_DEFINE_HANDLER_SYMBOL(int8_product, jaxsgl::MultiplyInt8,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("group")
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(grouped_int8_product, jaxsgl::GroupedInt8Product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S8>>()
                                  .Attr<bool>("of_tokens")
                                  .Ret<ffi::Buffer<ffi::F32>>());
