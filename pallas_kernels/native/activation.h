// exp, and what a gated MLP does to its gate (arXiv 2002.05202).
//
// A gated product has two halves of one matrix: the gate's results are stored in y first, then those of `up`, times the
// activation of what lies there. Owns the functions; product.h calls them.

#pragma once

#include <optional>
#include <string_view>

#include "registers.h"

namespace jaxsgl {

// exp of numbers <= 0, to about 2 units in the last place; 0 below -87, NaN of NaN. 2^n times the Taylor series of the
// rest, which is at most log(2) / 2; log(2) is subtracted in two parts, the first exact.
inline Floats Exp(Floats x) {
  const Floats n = Round(Times(x, All(1.44269504f)));
  Floats rest = MinusProduct(n, All(0.693359375f), x);
  rest = MinusProduct(n, All(-2.12194440e-4f), rest);
  Floats sum = All(1.0f / 720);
  for (float factor : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) sum = TimesPlus(sum, rest, All(factor));
  return ScaledUnlessLess(sum, n, x, -87.0f);
}

// 1 / (1 + exp(-x)).
inline Floats Sigmoid(Floats x) {
  const Floats one = All(1.0f), e = Exp(Times(Absolute(x), All(-1.0f)));
  return Over(WhereNegative(x, e, one), Add(one, e));
}

enum class Activation { kNone, kSilu, kGeluTanh };

// The activation of this name; "" is kNone.
inline std::optional<Activation> ActivationOf(std::string_view name) {
  if (name.empty()) return Activation::kNone;
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  return std::nullopt;
}

// silu(x) = x sigmoid(x), or x (1 + tanh(u)) / 2 = x sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3).
inline Floats Activated(Activation activation, Floats x) {
  if (activation == Activation::kSilu) return Times(x, Sigmoid(x));
  const Floats inner = TimesPlus(Times(All(0.044715f), Times(x, x)), x, x);
  return Times(x, Sigmoid(Times(All(1.59576912f), inner)));
}

}  // namespace jaxsgl
