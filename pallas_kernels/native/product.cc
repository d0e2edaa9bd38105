// Rows of activations times a matrix of bfloat16 weights stored [out, in].
//
// The rows, rounded and packed, stay in the cache while the weights pass by, each read once for 64 rows and in order, at
// the speed of memory. What libraries do instead, packing the weights or treating them as the side to be blocked, costs
// more than the product of few rows, and gains nothing with many. Whatever the number of rows, each result is summed
// in the order of its inputs.
// Compiled and called by library.py and product.py beside it.

#include "product.h"

#ifdef __AVX512BF16__
#include "product_wide.h"
#else
#include "product_narrow.h"
#endif

namespace ffi = xla::ffi;

namespace jaxsgl {
namespace {

ffi::Error RowsProduct(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::BF16> weights, bool widened,
                       ffi::ResultBuffer<ffi::F32> y) {
  if (!widened && !kHasPairs) return NoPairs();
  const Product p{x.typed_data(), reinterpret_cast<const uint16_t*>(weights.untyped_data()), y->typed_data(),
                  x.dimensions()[0], x.dimensions()[1], weights.dimensions()[0]};
#ifdef __AVX512BF16__
  if (!widened) {
    MultiplyAll<uint16_t>(pool, p);
    return ffi::Error::Success();
  }
#endif
  MultiplyAll<float>(pool, p);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxsgl

extern "C" int has_pairs() { return jaxsgl::kHasPairs; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(rows_product, jaxsgl::RowsProduct,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Attr<bool>("widened")
                                  .Ret<ffi::Buffer<ffi::F32>>());
