// All kernels, as one source: each header is read once, which is a third of the compiler's time.

#include "attention.cc"
#include "product.cc"
#include "product_int8.cc"
#include "sums.cc"
