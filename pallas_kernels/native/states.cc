// The states of gated delta-nets and of Mamba-2, moved over the tokens of a step, and the convolution before that, which
// is all of some layers.
//
// A state is a matrix [h, v] of each value head, and its columns know nothing of each other. So a thread takes some
// columns of one head through all tokens of a sequence: they stay in its cache, and what is read of them in registers.
// A sequence of one token, as in a decode, reads a state from memory once and writes it once. Nothing depends on which
// tokens come in one step: a state is moved by one token after the other. Compiled and called by library.py and
// states.py beside it.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "activation.h"
#include "blocks.h"

namespace ffi = xla::ffi;

namespace jaxsgl {
namespace {

constexpr int kMaxKeySize = 256;             // as states.py lets through
constexpr int kMost = kLanes == 16 ? 4 : 2;  // registers of columns: twice as many add up, and others hold what is written

constexpr int kMostTaps = 8;                 // likewise
constexpr int kNowhere = -1;                 // in the place of a place: what is kept of the sequence stays as it is
constexpr int kTokens = 4;                   // that a thread convolves at a time

// Whose tokens these are, and where what is kept of them lies, of `num_places` places.
struct Sequences {
  const int32_t* offsets;  // [S + 1]: the tokens of sequence s are offsets[s] .. offsets[s + 1] - 1
  const int32_t* starts;   // [S] the position of the first one; at 0 there is nothing before it
  const int32_t* source;   // [S]
  const int32_t* place;    // [S], or kNowhere
  const int32_t* kept_at;  // [N, S] after how many tokens a state is kept besides; 0: not at all
  const int32_t* kept_to;  // [N, S]
  int count, num_kept;

  int NumTokens() const { return offsets[count]; }  // those after them are padding

  // What is wrong with them.
  ffi::Error Check(int64_t num_places) const {
    const auto is_wrong = [=](int place) { return place < 0 || place >= num_places; };
    int wrong = 0;
    for (int s = 0; s < count; ++s) {
      if (starts[s] > 0 && is_wrong(source[s])) wrong = source[s];
      if (place[s] != kNowhere && is_wrong(place[s])) wrong = place[s];
      for (int i = s; i < num_kept * count; i += count)
        if (kept_at[i] > 0 && is_wrong(kept_to[i])) wrong = kept_to[i];
    }
    if (!is_wrong(wrong)) return ffi::Error::Success();
    return {ffi::ErrorCode::kInvalidArgument, "there is no place " + std::to_string(wrong) + " of states"};
  }
};

Sequences SequencesOf(ffi::Buffer<ffi::S32> offsets, ffi::Buffer<ffi::S32> starts, ffi::Buffer<ffi::S32> source,
                      ffi::Buffer<ffi::S32> place, ffi::Buffer<ffi::S32> kept_at, ffi::Buffer<ffi::S32> kept_to) {
  return {offsets.typed_data(), starts.typed_data(),  source.typed_data(),           place.typed_data(),
          kept_at.typed_data(), kept_to.typed_data(), int(starts.element_count()), int(kept_at.dimensions()[0])};
}

struct Problem {
  Sequences seqs;
  const float *q, *k;         // [T, K, h]
  const float* v;             // [T, K, r, v]
  const float* decay;         // [T, K, r, num_decays]: of a value head, or of each number of its key
  const float* beta;          // [T, K, r]
  float* states;              // [P, K, r, h, v]
  float* out;                 // [T, K, r, v]
  int num_heads, group, key_size, value_size, num_decays;

  float* State(int at, int head) const {
    return states + (int64_t(at) * num_heads + head) * key_size * value_size;
  }
};

// Some columns of a state [h, ..], `stride` numbers from one row to the next.
struct Columns {
  float* numbers;
  int stride;
};

// Which rule it is: that of Mamba-2, which corrects nothing, or the delta rule, whose rows may have decays of their own.
enum class Rule { kMamba, kDelta, kDeltaByChannel };

// One token: what it reads, and the columns after it. Without a state before it, `from` is not read.
template <Rule rule, int V, bool has_state>
[[gnu::always_inline]] inline void Move(int key_size, const float* q, const float* k, const float* values,
                                        const float* decay, float beta, Columns from, Columns to, float* out) {
  constexpr bool corrects = rule != Rule::kMamba, by_channel = rule == Rule::kDeltaByChannel;
  Floats written[V], read[2][V];
  for (int v = 0; v < V; ++v) written[v] = Load(values + kLanes * v), read[0][v] = read[1][v] = Zero();
  if (corrects && has_state) {
    Floats found[2][V];
    for (int v = 0; v < V; ++v) found[0][v] = found[1][v] = Zero();
    for (int i = 0; i < key_size; i += 2)
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const Floats key = All(by_channel ? k[i + half] * decay[i + half] : k[i + half]);
        const float* const row = from.numbers + int64_t(i + half) * from.stride;
        for (int v = 0; v < V; ++v) found[half][v] = TimesPlus(key, Load(row + kLanes * v), found[half][v]);
      }
    const Floats left = All(by_channel ? 1.0f : *decay);
    for (int v = 0; v < V; ++v) written[v] = MinusProduct(left, Add(found[0][v], found[1][v]), written[v]);
  }
  for (int v = 0; v < V; ++v) written[v] = Times(written[v], All(beta));
  for (int i = 0; i < key_size; i += 2)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const Floats key = All(k[i + half]), query = All(q[i + half]), left = All(decay[by_channel ? i + half : 0]);
      const float* const row = from.numbers + int64_t(i + half) * from.stride;
      float* const next = to.numbers + int64_t(i + half) * to.stride;
      for (int v = 0; v < V; ++v) {
        const Floats before = has_state ? Times(Load(row + kLanes * v), left) : Zero();
        const Floats after = TimesPlus(key, written[v], before);
        Store(next + kLanes * v, after);
        read[half][v] = TimesPlus(query, after, read[half][v]);
      }
    }
  for (int v = 0; v < V; ++v) Store(out + kLanes * v, Add(read[0][v], read[1][v]));
}

struct alignas(64) Scratch {
  float numbers[kMaxKeySize * kMost * kLanes];
};

// V registers of columns from `column` on, of one head, through the tokens of one sequence.
template <Rule rule, int V>
void MoveColumns(const Problem& p, int seq, int head, int column) {
  thread_local const std::unique_ptr<Scratch> scratch = std::make_unique<Scratch>();
  const Sequences& seqs = p.seqs;
  const int first = seqs.offsets[seq], count = seqs.offsets[seq + 1] - first, key_head = head / p.group;
  const int key_heads = p.num_heads / p.group;
  const Columns between{scratch->numbers, V * kLanes};
  const int place = seqs.place[seq];
  const Columns last = place == kNowhere ? between : Columns{p.State(place, head) + column, p.value_size};
  Columns from{p.State(seqs.source[seq], head) + column, p.value_size};
  for (int t = 0; t < count; ++t) {
    const int64_t token = first + t;
    const float* const q = p.q + (token * key_heads + key_head) * p.key_size;
    const float* const k = p.k + (token * key_heads + key_head) * p.key_size;
    const int64_t of_head = token * p.num_heads + head, at = of_head * p.value_size + column;
    const Columns to = t + 1 == count ? last : between;
    const auto move = t > 0 || seqs.starts[seq] > 0 ? Move<rule, V, true> : Move<rule, V, false>;
    move(p.key_size, q, k, p.v + at, p.decay + of_head * p.num_decays, p.beta[of_head], from, to, p.out + at);
    for (int n = seq; n < seqs.num_kept * seqs.count; n += seqs.count) {
      if (seqs.kept_at[n] != t + 1) continue;
      float* const kept = p.State(seqs.kept_to[n], head) + column;
      for (int i = 0; i < p.key_size; ++i)
        std::memcpy(kept + int64_t(i) * p.value_size, to.numbers + int64_t(i) * to.stride, V * kLanes * sizeof(float));
    }
    from = to;
  }
}

template <Rule rule>
void MoveHead(const Problem& p, int seq, int head) {
  int column = 0;
  for (; column + kMost * kLanes <= p.value_size; column += kMost * kLanes)
    MoveColumns<rule, kMost>(p, seq, head, column);
  if constexpr (kMost > 2)
    for (; column + 2 * kLanes <= p.value_size; column += 2 * kLanes) MoveColumns<rule, 2>(p, seq, head, column);
  for (; column < p.value_size; column += kLanes) MoveColumns<rule, 1>(p, seq, head, column);
}

// Arguments and results as in `Problem`; `before` and `after` lie in the same memory, if nobody else needs `before`.
ffi::Error MoveStates(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k, ffi::Buffer<ffi::F32> v,
                      ffi::Buffer<ffi::F32> decay, ffi::Buffer<ffi::F32> beta, ffi::Buffer<ffi::S32> offsets,
                      ffi::Buffer<ffi::S32> starts, ffi::Buffer<ffi::S32> source, ffi::Buffer<ffi::S32> place,
                      ffi::Buffer<ffi::S32> kept_at, ffi::Buffer<ffi::S32> kept_to, ffi::Buffer<ffi::F32> before,
                      bool corrects, ffi::ResultBuffer<ffi::F32> out, ffi::ResultBuffer<ffi::F32> after) {
  const auto sizes = before.dimensions();  // [P, K, r, h, v]
  const Sequences seqs = SequencesOf(offsets, starts, source, place, kept_at, kept_to);
  const Problem p{seqs,
                  q.typed_data(),
                  k.typed_data(),
                  v.typed_data(),
                  decay.typed_data(),
                  beta.typed_data(),
                  after->typed_data(),
                  out->typed_data(),
                  int(sizes[1] * sizes[2]),
                  int(sizes[2]),
                  int(sizes[3]),
                  int(sizes[4]),
                  int(decay.dimensions()[3])};
  const bool by_channel = p.num_decays == p.key_size;
  if (p.key_size % 2 || p.key_size > kMaxKeySize || p.value_size % kLanes || (by_channel && !corrects))
    return {ffi::ErrorCode::kInvalidArgument, "states of these sizes are not supported"};
  if (ffi::Error error = seqs.Check(sizes[0]); error.failure()) return error;
  if (before.typed_data() != after->typed_data()) std::memcpy(p.states, before.typed_data(), before.size_bytes());
  const int64_t row = int64_t(p.num_heads) * p.value_size, num_tokens = v.dimensions()[0];
  std::fill(p.out + seqs.NumTokens() * row, p.out + num_tokens * row, 0.0f);
  const auto move = !corrects ? MoveHead<Rule::kMamba> : by_channel ? MoveHead<Rule::kDeltaByChannel>
                                                                    : MoveHead<Rule::kDelta>;
  const auto work = [p, move](int i) {
    move(p, i / p.num_heads, i % p.num_heads);
  };
  InParallel(pool, seqs.count * p.num_heads, work);
  return ffi::Error::Success();
}

struct Convolution {
  Sequences seqs;
  const float* product;  // [T, K, R]: each key head's C channels, then what is not convolved
  const float* taps;     // [taps, K, C]
  const float* bias;     // [K, C]
  float* inputs;         // [P, taps, K, C]: of the last tokens, that at position p in slot p modulo taps
  float* out;            // [T, K, C]
  int key_heads, channels, row, num_taps;
  bool activates;        // silu

  float* Slot(int place, int position) const {
    return inputs + (int64_t(place) * num_taps + position % num_taps) * key_heads * channels;
  }

  void CopyToken(int64_t token, float* to) const {
    for (int head = 0; head < key_heads; ++head)
      std::memcpy(to + int64_t(head) * channels, product + (token * key_heads + head) * row, channels * sizeof(float));
  }
};

// One token's channels after the convolution, or silu of them.
void Convolve(const Convolution& p, int seq, int token) {
  const Sequences& seqs = p.seqs;
  const int place = token - seqs.offsets[seq], position = seqs.starts[seq] + place;
  const int num_back = std::min(p.num_taps, position + 1);
  for (int head = 0; head < p.key_heads; ++head) {
    const float* from[kMostTaps];
    for (int back = 0; back < num_back; ++back)
      from[back] = back <= place ? p.product + (int64_t(token - back) * p.key_heads + head) * p.row
                                 : p.Slot(seqs.source[seq], position - back) + int64_t(head) * p.channels;
    const int64_t first = int64_t(head) * p.channels, all = int64_t(p.key_heads) * p.channels;
    for (int c = 0; c < p.channels; c += kLanes) {
      Floats sum = Load(p.bias + first + c);
      for (int back = 0; back < num_back; ++back)
        sum = TimesPlus(Load(from[back] + c), Load(p.taps + (p.num_taps - 1 - back) * all + first + c), sum);
      Store(p.out + token * all + first + c, p.activates ? Activated(Activation::kSilu, sum) : sum);
    }
  }
}

// The inputs of a sequence's last tokens before the one `end` in this step, to a place. Slots of no token stay as they are.
void Keep(const Convolution& p, int seq, int end, int place) {
  const Sequences& seqs = p.seqs;
  const int64_t all = int64_t(p.key_heads) * p.channels;
  for (int t = end - std::min(p.num_taps, seqs.starts[seq] + end); t < end; ++t) {
    const int position = seqs.starts[seq] + t;
    if (t >= 0) {
      p.CopyToken(seqs.offsets[seq] + t, p.Slot(place, position));
    } else if (place != seqs.source[seq]) {
      std::memcpy(p.Slot(place, position), p.Slot(seqs.source[seq], position), all * sizeof(float));
    }
  }
}

ffi::Error ConvolveTokens(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> product, ffi::Buffer<ffi::F32> taps,
                          ffi::Buffer<ffi::F32> bias, ffi::Buffer<ffi::S32> offsets, ffi::Buffer<ffi::S32> starts,
                          ffi::Buffer<ffi::S32> source, ffi::Buffer<ffi::S32> place, ffi::Buffer<ffi::S32> kept_at,
                          ffi::Buffer<ffi::S32> kept_to, ffi::Buffer<ffi::F32> before, bool activates,
                          ffi::ResultBuffer<ffi::F32> out, ffi::ResultBuffer<ffi::F32> after) {
  const auto sizes = before.dimensions();  // [P, taps, K, C]
  const Sequences seqs = SequencesOf(offsets, starts, source, place, kept_at, kept_to);
  const Convolution p{seqs,
                      product.typed_data(),
                      taps.typed_data(),
                      bias.typed_data(),
                      after->typed_data(),
                      out->typed_data(),
                      int(sizes[2]),
                      int(sizes[3]),
                      int(product.dimensions()[2]),
                      int(sizes[1]),
                      activates};
  if (p.channels % kLanes || p.num_taps > kMostTaps)
    return {ffi::ErrorCode::kInvalidArgument, "convolutions of these sizes are not supported"};
  if (ffi::Error error = seqs.Check(sizes[0]); error.failure()) return error;
  if (before.typed_data() != after->typed_data()) std::memcpy(p.inputs, before.typed_data(), before.size_bytes());
  const int num_tokens = seqs.NumTokens();
  const int64_t all = int64_t(p.key_heads) * p.channels;
  std::fill(p.out + num_tokens * all, p.out + product.dimensions()[0] * all, 0.0f);
  InParallel(pool, (num_tokens + kTokens - 1) / kTokens, [p, num_tokens](int i) {
    const int32_t* const offsets = p.seqs.offsets;
    for (int token = i * kTokens; token < std::min((i + 1) * kTokens, num_tokens); ++token)
      Convolve(p, int(std::upper_bound(offsets, offsets + p.seqs.count, token) - offsets) - 1, token);
  });
  // After all have read what was kept. What is kept of the middle of a chunk comes first: the end writes over its source.
  InParallel(pool, seqs.count, [p](int seq) {
    const Sequences& seqs = p.seqs;
    const int count = seqs.offsets[seq + 1] - seqs.offsets[seq];
    for (int n = seq; n < seqs.num_kept * seqs.count; n += seqs.count)
      if (seqs.kept_at[n] > 0) Keep(p, seq, seqs.kept_at[n], seqs.kept_to[n]);
    if (count > 0 && seqs.place[seq] != kNowhere) Keep(p, seq, count, seqs.place[seq]);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxsgl

XLA_FFI_DEFINE_HANDLER_SYMBOL(convolve_tokens, jaxsgl::ConvolveTokens,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("activates")
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(move_states, jaxsgl::MoveStates,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("corrects")
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
