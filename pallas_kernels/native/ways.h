// The ways to multiply numbers of bfloat16, by their names: "widened" and "paired" (blocks.h), and "tiles" (tiles.h).

#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "blocks.h"
#include "tiles.h"

namespace jaxsgl {

// Why this library can't multiply in the way of this name, if so. library.py chooses one.
inline std::optional<xla::ffi::Error> RefuseWay(std::string_view way) {
  using xla::ffi::Error, xla::ffi::ErrorCode;
  if (way == "widened") return std::nullopt;
  if (way == "paired") {
    if (kHasPairs) return std::nullopt;
    return Error(ErrorCode::kUnimplemented, "these kernels were compiled without products of pairs");
  }
  if (way != "tiles") return Error(ErrorCode::kInvalidArgument, "there is no such way to multiply: " + std::string(way));
#ifdef JAXSGL_TILES
  if (tiles_are_granted) return std::nullopt;
  return Error(ErrorCode::kFailedPrecondition, "this process was not granted tiles");
#else
  return Error(ErrorCode::kUnimplemented, "these kernels were compiled without tiles");
#endif
}

}  // namespace jaxsgl
