// Rows of activations times a matrix of bfloat16 weights stored [out, in], or each times one of several matrices.
//
// The rows, rounded and packed, stay in the cache while the weights pass by, each read once for 64 rows and in order, at
// the speed of memory. What libraries do instead, packing the weights or treating them as the side to be blocked, costs
// more than the product of few rows, and gains nothing with many. Whatever the number of rows, each result is summed
// in one order.
// Compiled and called by library.py and product.py beside it: rows.cc and grouped.cc each take one half.

#include "product.h"

#include <string_view>

#ifndef JAXSGL_ROWS_ONLY
#include "grouped_product.h"
#include "product_float32.h"
#endif
#include "ways.h"

#ifdef __AVX512BF16__
#include "product_tiles.h"
#include "product_wide.h"
#else
#include "product_narrow.h"
#endif
#ifndef JAXSGL_ROWS_ONLY
#include "kept_weights.h"
#endif

namespace ffi = xla::ffi;

namespace jaxsgl {
namespace {

// The ways to multiply rows and weights of bfloat16: all rows with one matrix, or pieces of a grouped product.
struct Widened {
  using Part = Pieces<float>;
  static void Multiply(ffi::ThreadPool pool, const Product& p) { MultiplyAll<float>(pool, p); }
};

#ifdef __AVX512BF16__
struct Paired {
  using Part = Pieces<uint16_t>;
  static void Multiply(ffi::ThreadPool pool, const Product& p) { MultiplyAll<uint16_t>(pool, p); }
};
#endif

#ifdef JAXSGL_TILES
struct ByTiles {
  using Part = TilePieces;
  static void Multiply(ffi::ThreadPool pool, const Product& p) { MultiplyByTiles(pool, p); }
};
#endif

// Calls `work` with the way of this name.
template <typename Work>
ffi::Error InWay(std::string_view way, const Work& work) {
  if (const auto refused = RefuseWay(way)) return *refused;
#ifdef JAXSGL_TILES
  if (way == "tiles") return work(ByTiles()), ffi::Error::Success();
#endif
#ifdef __AVX512BF16__
  if (way == "paired") return work(Paired()), ffi::Error::Success();
#endif
  return work(Widened()), ffi::Error::Success();
}

#ifndef JAXSGL_GROUPED_ONLY
ffi::Error RowsProduct(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::BF16> weights,
                       std::string_view activation, std::string_view way, ffi::ResultBuffer<ffi::F32> y) {
  Product p{x.typed_data(), reinterpret_cast<const uint16_t*>(weights.untyped_data()), y->typed_data(),
            x.dimensions()[0], x.dimensions()[1], y->dimensions()[1]};
  const std::optional<Activation> gate = GateOf(activation, weights.dimensions()[0], p.out);
  if (!gate) return NoSuchGate();
  p.gate = *gate;
  return InWay(way, [&](auto how) { how.Multiply(pool, p); });
}
#endif

#ifndef JAXSGL_ROWS_ONLY
// y [M, out]: places sorted by expert times the weights [E, out, in] of their experts, the first sizes[0] of them times
// those of expert 0; zeros past the last expert's. Place i is row tokens[i] of x [T, in] with `of_tokens`, else row i.
ffi::Error GroupedProduct(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> tokens,
                          ffi::Buffer<ffi::S32> sizes, ffi::AnyBuffer weights, bool of_tokens, std::string_view way,
                          ffi::ResultBuffer<ffi::F32> y) {
  const Grouped g{x.typed_data(), of_tokens ? tokens.typed_data() : nullptr, sizes.typed_data(), y->typed_data(),
                  sizes.dimensions()[0], y->dimensions()[0], weights.dimensions()[2], weights.dimensions()[1]};
  if (!SizesFit(g)) return {ffi::ErrorCode::kInvalidArgument, "the experts' sizes exceed the places"};
  if (weights.element_type() == ffi::F32) {
    MultiplyGroups<FloatPieces>(pool, g, WithFirstExpert(g, static_cast<const float*>(weights.untyped_data())));
    return ffi::Error::Success();
  }
  const Product first = WithFirstExpert(g, static_cast<const uint16_t*>(weights.untyped_data()));
  return InWay(way, [&](auto how) { MultiplyGroups<typename decltype(how)::Part>(pool, g, first); });
}

// The same with weights that are kept in fewer bits than the way multiplies, or than float32's 32: numbers [E, out, in] of
// float8 with scales [E, out, groups], or [E, out, in / 2] of MXFP4 with bytes [E, out, in / 32].
ffi::Error GroupedKeptProduct(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> tokens,
                              ffi::Buffer<ffi::S32> sizes, ffi::AnyBuffer numbers, ffi::AnyBuffer scales,
                              bool of_tokens, int64_t group, std::string_view way, ffi::ResultBuffer<ffi::F32> y) {
  const bool is_float8 = scales.element_type() == ffi::F32;
  const Grouped g{x.typed_data(), of_tokens ? tokens.typed_data() : nullptr, sizes.typed_data(), y->typed_data(),
                  sizes.dimensions()[0], y->dimensions()[0], numbers.dimensions()[2] * (is_float8 ? 1 : 2),
                  numbers.dimensions()[1]};
  if (!SizesFit(g)) return {ffi::ErrorCode::kInvalidArgument, "the experts' sizes exceed the places"};
  if (g.in % 32 || g.out % 16 || group % 32)
    return {ffi::ErrorCode::kInvalidArgument, "weights have multiples of 16 by 32, groups of 32"};
  const void* const of_scales = scales.untyped_data();
  KeptWeights kept{is_float8};
  if (is_float8)
    kept.float8 = {static_cast<const Float8*>(numbers.untyped_data()), static_cast<const float*>(of_scales), group,
                   scales.dimensions()[2]};
  else
    kept.mxfp4 = {static_cast<const uint8_t*>(numbers.untyped_data()), static_cast<const uint8_t*>(of_scales)};
  if (way == "float32") {
    MultiplyGroups<OfKept<FloatPieces>>(pool, g, {WithFirstExpert<float>(g, nullptr), kept});
    return ffi::Error::Success();
  }
  return InWay(way, [&](auto how) {
    MultiplyGroups<OfKept<typename decltype(how)::Part>>(pool, g, {WithFirstExpert<uint16_t>(g, nullptr), kept});
  });
}
#endif

}  // namespace
}  // namespace jaxsgl

extern "C" int has_pairs() { return jaxsgl::kHasPairs; }

#ifndef JAXSGL_GROUPED_ONLY
XLA_FFI_DEFINE_HANDLER_SYMBOL(rows_product, jaxsgl::RowsProduct,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Attr<std::string_view>("activation")
                                  .Attr<std::string_view>("way")
                                  .Ret<ffi::Buffer<ffi::F32>>());
#endif

#ifndef JAXSGL_ROWS_ONLY
XLA_FFI_DEFINE_HANDLER_SYMBOL(grouped_product, jaxsgl::GroupedProduct,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Attr<bool>("of_tokens")
                                  .Attr<std::string_view>("way")
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(grouped_kept_product, jaxsgl::GroupedKeptProduct,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Attr<bool>("of_tokens")
                                  .Attr<int64_t>("group")
                                  .Attr<std::string_view>("way")
                                  .Ret<ffi::Buffer<ffi::F32>>());
#endif
