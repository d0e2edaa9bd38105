// The product with one matrix, which every model has, as a source of its own.

#define JAXSGL_ROWS_ONLY
#include "product.cc"
