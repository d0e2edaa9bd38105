// The small kernels, as one source: their headers are read once. Products are compiled next to it, at the same time.

#include "attention.cc"
#include "sums.cc"
