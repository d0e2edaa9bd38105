// Products with one of several matrices, and with weights that are kept in fewer bits, as a source of its own.

#define JAXSGL_GROUPED_ONLY
#include "product.cc"
