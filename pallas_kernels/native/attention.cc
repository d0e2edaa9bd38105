// Attention of a step's queries over the paged KV cache, for processors with AVX512_BF16, or with AVX2 and FMA.
//
// One function serves decode and extend: a sequence brings any number of new tokens, each a query. It owns the loop
// over tiles of KV and the running softmax; it never knows how pages are assigned or what a bucket is. Compiled and
// called by library.py and attention.py beside it.
//
// A unit of work is up to kMaxRows rows, a row being one query of one of the heads that share a kv head. Sequences whose
// page tables begin alike go into one unit while they fit: the pages that they share are then read and packed once for
// all (after Hydragen, arXiv 2402.05099). A thread takes several kv heads of a small unit and reads them tile by tile, as
// they lie in a page: memory gives what is read in order faster. Both products, queries with keys and weights with values,
// take the same small matrix kernel; its right side is packed in pairs of rows, as the instruction wants it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string_view>
#include <vector>

#include "activation.h"
#include "attention_tiles.h"
#include "blocks.h"
#include "float8.h"
#include "packed_pages.h"
#include "ways.h"

namespace ffi = xla::ffi;

namespace jaxsgl {
namespace {

constexpr int kMaxRows = 128;      // rows of a unit
constexpr int kMaxHeadDim = 512;   // as attention.py lets through
constexpr float kUnseen = -1e30f;  // below any score; finite, so that subtracting it from itself gives 0

struct Problem {
  const float* q;          // [T, N, H]
  const void* k;           // [num_pages, K, page_size, H], bits of bfloat16 (uint16_t) or Float8
  const void* v;
  const int32_t* table;    // [S, P]
  const int32_t* lengths;  // [S]
  const int32_t* offsets;  // [S + 1]: the queries of sequence s are offsets[s] .. offsets[s + 1] - 1
  const float* sinks;      // [N], or null
  const int32_t* seen;     // [T] of how many tokens a query sees none after, or null: of those up to itself
  const float* biases;     // [N, 2 reach + 1] added to scores by the distance of the key, or null
  float* out;              // [T, N, H]
  int reach;  // beyond it the outermost biases hold
  int num_seqs, table_width, num_kv_heads, group, head_dim, page_size;
  float sm_scale, soft_cap;  // soft_cap 0: none
  int64_t window;            // 0: none
};

// Queries of one sequence, all of one unit.
struct Span {
  int seq;
  int token;     // of the first query, in q
  int position;  // of the first query, in the sequence
  int count;
};

struct Unit {
  std::vector<Span> spans;
  int shared = 0;  // leading KV tokens that all spans see, in the same pages
};

// What a thread takes at a time: kv heads begin .. end - 1 of a unit.
struct Item {
  int unit, begin, end;
};

// KV tokens begin .. end - 1 of a sequence, seen by rows first_row .. end_row - 1 of a unit.
struct Tile {
  int seq, first_row, end_row, begin, end;
};

// The working memory of one thread: an item's kv heads one after the other, of each the rows of all spans of the unit in
// order, the heads of a query beside each other. Rows of smaller heads lie closer together, so that memory beyond them
// stays untouched. Left: see blocks.h.
template <typename Left>
struct Scratch {
  alignas(64) Left q[kMaxRows * kMaxHeadDim];        // [rows, H]
  alignas(64) float acc[kMaxRows * kMaxHeadDim];     // [rows, H]
  alignas(64) uint16_t keys[kTile * kMaxHeadDim];    // [H / 2, kTile, 2]
  alignas(64) uint16_t values[kTile * kMaxHeadDim];  // [kTile / 2, H, 2]
  alignas(64) float scores[kMaxRows * kTile];
  alignas(64) Left weights[kMaxRows * kTile];
  float top[kMaxRows], total[kMaxRows];
  int position[kMaxRows];
  int seen[kMaxRows];  // tokens from the sequence's first, of which a row sees none after
};

template <typename Left>
Scratch<Left>* ScratchOfThread() {
  thread_local const std::unique_ptr<Scratch<Left>> scratch = std::make_unique<Scratch<Left>>();
  return scratch.get();
}

// Scores become cap * tanh(score / cap), with tanh |x| = (1 - e) / (1 + e), e = exp(-2 |x|).
void SoftCap(float* scores, int count, float cap) {
  for (int i = 0; i < count; i += kLanes) {
    const Floats x = Load(scores + i), one = All(1.0f);
    const Floats e = Exp(Times(Absolute(x), All(-2.0f / cap)));
    const Floats tanh = Over(Subtract(one, e), Add(one, e));
    Store(scores + i, Times(WithSign(x, cap), tanh));
  }
}

// Adds a tile to one row: its tokens first .. end - 1 count. Updates top and total, writes weights, shrinks acc.
template <typename Left>
void Softmax(float* scores, int first, int end, Left* weights, float* top, float* total, float* acc, int head_dim) {
  const uint64_t seen = (end == kTile ? ~0ull : (1ull << end) - 1) & ~((1ull << first) - 1);
  Floats x[kTile / kLanes], high = All(*top);
  for (int i = 0; i < kTile / kLanes; ++i) {
    x[i] = Select(seen >> (kLanes * i), Load(scores + kLanes * i), All(kUnseen));
    high = Max(high, x[i]);
  }
  const float new_top = Largest(high);
  Floats sum = Zero();
  for (int i = 0; i < kTile / kLanes; ++i) {
    const Floats weight = Select(seen >> (kLanes * i), Exp(Subtract(x[i], All(new_top))), Zero());
    sum = Add(sum, weight);
    StoreRounded(weight, weights + kLanes * i);
  }
  if (new_top > *top) {
    const Floats shrink = Exp(All(*top - new_top));
    for (int h = 0; h < head_dim; h += kLanes) Store(acc + h, Times(Load(acc + h), shrink));
    *total *= FirstLane(shrink);
    *top = new_top;
  }
  *total += Sum(sum);
}

alignas(64) const uint16_t kZeros[kMaxHeadDim] = {};  // a row of zeros in either format

// How queries meet keys, and weights values: as blocks.h does, with rows of either type.
template <typename Number>
struct InRegisters {
  using Left = Number;
  static constexpr int kTokens = 2;  // of values that are multiplied at once
  template <typename... Arguments>
  static void Multiply(Arguments... arguments) {
    MultiplyTile(arguments...);
  }
};

#ifdef JAXSGL_TILES
struct InTiles {
  using Left = uint16_t;
  static constexpr int kTokens = kTileInputs;
  template <typename... Arguments>
  static void Multiply(Arguments... arguments) {
    MultiplyByTiles(arguments...);
  }
  const Tiles tiles;  // while a thread works
};
#endif

template <typename Way, typename Number>
class Worker {
  using Left = typename Way::Left;

 public:
  explicit Worker(const Problem& p) : p_(p), s_(ScratchOfThread<Left>()) {}

  void Run(const Unit& unit, int begin, int end) {
    int loaded = 0;
    for (int head = begin; head < end; ++head)
      for (const Span& span : unit.spans) loaded += LoadRows(span, head, loaded);
    const int rows = loaded / (end - begin);
    ListTiles(unit, rows);
    Rows<Number> keys, values, next_keys, next_values;
    Find(tiles_[0], begin, next_keys, next_values);
    for (size_t i = 0; i < tiles_.size(); ++i) {
      const int count = tiles_[i].end - tiles_[i].begin;
      for (int head = begin; head < end; ++head) {
        keys = next_keys, values = next_values;
        if (head + 1 < end)
          Find(tiles_[i], head + 1, next_keys, next_values);
        else if (i + 1 < tiles_.size())
          Find(tiles_[i + 1], begin, next_keys, next_values);
        PackKeys(keys, next_keys, count, p_.head_dim, s_->keys);
        PackValues(values, next_values, Whole(count), p_.head_dim, s_->values);
        Add(tiles_[i], head, (head - begin) * rows);
      }
    }
    int stored = 0;
    for (int head = begin; head < end; ++head)
      for (const Span& span : unit.spans) stored += StoreRows(span, head, stored);
  }

 private:
  // So many tokens, and those of no weight that are multiplied with them.
  static int Whole(int tokens) { return (tokens + Way::kTokens - 1) / Way::kTokens * Way::kTokens; }

  // The tiles of a unit, each kv head of which has so many rows.
  void ListTiles(const Unit& unit, int rows) {
    for (int begin = 0; begin < unit.shared; begin += kTile)
      tiles_.push_back({unit.spans[0].seq, 0, rows, begin, begin + kTile});
    int row = 0;
    for (const Span& span : unit.spans) {
      const int end_row = row + span.count * p_.group, end = s_->seen[end_row - 1];  // it grows from row to row
      int begin = unit.shared;
      if (p_.window > 0) begin = int(std::max<int64_t>(begin, (span.position - p_.window + 1) / kTile * kTile));
      for (; begin < end; begin += kTile) {
        while (s_->seen[row] <= begin) ++row;  // queries that see nothing of the tile
        tiles_.push_back({span.seq, row, end_row, begin, std::min(begin + kTile, end)});
      }
      row = end_row;
    }
  }

  int LoadRows(const Span& span, int head, int row) {
    const int num_heads = p_.num_kv_heads * p_.group;
    for (int i = 0; i < span.count * p_.group; ++i, ++row) {
      const float* from =
          p_.q + (int64_t(span.token + i / p_.group) * num_heads + head * p_.group + i % p_.group) * p_.head_dim;
      for (int h = 0; h < p_.head_dim; h += kLanes)
        StoreRounded(Times(Load(from + h), All(p_.sm_scale)), s_->q + row * p_.head_dim + h);
      std::memset(s_->acc + row * p_.head_dim, 0, p_.head_dim * sizeof(float));
      s_->top[row] = kUnseen;
      s_->total[row] = 0;
      s_->position[row] = span.position + i / p_.group;
      s_->seen[row] = p_.seen ? p_.seen[span.token + i / p_.group] : s_->position[row] + 1;
    }
    return span.count * p_.group;
  }

  int StoreRows(const Span& span, int head, int row) {
    const int num_heads = p_.num_kv_heads * p_.group;
    for (int i = 0; i < span.count * p_.group; ++i, ++row) {
      float* to =
          p_.out + (int64_t(span.token + i / p_.group) * num_heads + head * p_.group + i % p_.group) * p_.head_dim;
      float total = s_->total[row];
      if (p_.sinks) total += std::exp(p_.sinks[head * p_.group + i % p_.group] - s_->top[row]);
      const Floats factor = All(1.0f / total);
      for (int h = 0; h < p_.head_dim; h += kLanes)
        Store(to + h, Times(Load(s_->acc + row * p_.head_dim + h), factor));
    }
    return span.count * p_.group;
  }

  void Find(const Tile& tile, int head, Rows<Number>& keys, Rows<Number>& values) const {
    const int32_t* pages = p_.table + int64_t(tile.seq) * p_.table_width + tile.begin / p_.page_size;
    int slot = tile.begin % p_.page_size, t = 0;
    for (const int count = tile.end - tile.begin; t < count; ++pages, slot = 0) {
      const int64_t row = (int64_t(*pages) * p_.num_kv_heads + head) * p_.page_size + slot;
      int64_t at = row * p_.head_dim;
      for (const int end = std::min(count, t + p_.page_size - slot); t < end; ++t, at += p_.head_dim) {
        keys.at[t] = static_cast<const Number*>(p_.k) + at;
        values.at[t] = static_cast<const Number*>(p_.v) + at;
      }
    }
    for (; t < kTile; ++t) keys.at[t] = values.at[t] = reinterpret_cast<const Number*>(kZeros);
  }

  // Adds the packed tile to the softmaxes of its rows of the kv head whose first row is `of_head`.
  void Add(const Tile& tile, int head, int of_head) {
    const int h = p_.head_dim, rows = tile.end_row - tile.first_row, first_row = of_head + tile.first_row;
    const Left* q = s_->q + first_row * h;
    Way::Multiply(rows, kTile, q, h, s_->keys, 2 * kTile, h / 2, s_->scores, kTile, false);
    if (p_.soft_cap > 0) SoftCap(s_->scores, rows * kTile, p_.soft_cap);
    if (p_.biases) AddBiases(tile, head, of_head);
    for (int r = 0; r < rows; ++r) {
      const int row = first_row + r, position = s_->position[row];
      const int end = std::min(s_->seen[row] - tile.begin, kTile);
      const int first = p_.window > 0 ? int(std::clamp<int64_t>(position - p_.window + 1 - tile.begin, 0, kTile)) : 0;
      if (first < end) {
        Softmax(s_->scores + r * kTile, first, end, s_->weights + r * kTile, s_->top + row, s_->total + row,
                s_->acc + row * h, h);
      } else {
        std::memset(s_->weights + r * kTile, 0, kTile * sizeof(Left));
      }
    }
    float* acc = s_->acc + first_row * h;
    const int pairs = Whole(tile.end - tile.begin) / 2;  // beyond them the values are some other tile's
    Way::Multiply(rows, h, s_->weights, kTile, s_->values, 2 * h, pairs, acc, h, true);
  }

  // The heads of a query lie beside each other among the rows of a kv head.
  void AddBiases(const Tile& tile, int head, int of_head) {
    for (int r = 0; r < tile.end_row - tile.first_row; ++r) {
      const int row = tile.first_row + r;
      const float* const biases = p_.biases + (int64_t(head) * p_.group + row % p_.group) * (2 * p_.reach + 1) + p_.reach;
      const int distance = tile.begin - s_->position[of_head + row];
      float* const scores = s_->scores + r * kTile;
      for (int i = 0; i < kTile; ++i) scores[i] += biases[std::clamp(distance + i, -p_.reach, p_.reach)];
    }
  }

  const Way way_{};
  const Problem& p_;
  Scratch<Left>* const s_;
  std::vector<Tile> tiles_;
};

// KV tokens in whole pages that two sequences share from the start, all seen by their first queries.
int SharedTokens(const Problem& p, const Span& a, const Span& b) {
  const int most = (std::min(a.position, b.position) + 1) / p.page_size;
  const int32_t *x = p.table + int64_t(a.seq) * p.table_width, *y = p.table + int64_t(b.seq) * p.table_width;
  int pages = 0;
  while (pages < most && x[pages] == y[pages]) ++pages;
  return pages * p.page_size / kTile * kTile;
}

std::vector<Unit> MakeUnits(const Problem& p) {
  std::vector<int> order(p.num_seqs);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return p.table[int64_t(a) * p.table_width] < p.table[int64_t(b) * p.table_width];
  });
  const int most = std::max(1, kMaxRows / p.group);  // queries of a unit
  std::vector<Unit> units;
  int room = 0;
  for (int seq : order) {
    int count = p.offsets[seq + 1] - p.offsets[seq];
    if (p.lengths[seq] == 0) continue;
    Span span{seq, p.offsets[seq], p.lengths[seq] - count, 0};
    for (int parts = (count + most - 1) / most; parts > 0; count -= span.count, --parts) {
      span.token += span.count;
      span.position += span.count;
      span.count = (count + parts - 1) / parts;
      const bool may_share = !units.empty() && p.window == 0 && span.count <= room;
      const int shared = may_share ? SharedTokens(p, units.back().spans[0], span) : 0;
      if (shared > 0) {
        Unit& unit = units.back();
        unit.shared = unit.spans.size() == 1 ? shared : std::min(unit.shared, shared);
        unit.spans.push_back(span);
        room -= span.count;
      } else {
        units.push_back({{span}, 0});
        room = most - span.count;
      }
    }
  }
  return units;
}

// All kv heads of all units: several to an item while an item's rows fit and each thread gets some items.
std::vector<Item> MakeItems(const Problem& p, const std::vector<Unit>& units, int64_t threads) {
  constexpr int kOfThread = 4;  // items, so that threads end at about the same time
  const int64_t fair = int64_t(units.size()) * p.num_kv_heads / (kOfThread * threads);
  std::vector<Item> items;
  for (int unit = 0; unit < int(units.size()); ++unit) {
    int rows = 0;
    for (const Span& span : units[unit].spans) rows += span.count * p.group;
    const int heads = int(std::clamp<int64_t>(fair, 1, std::max(1, kMaxRows / rows)));
    for (int begin = 0; begin < p.num_kv_heads; begin += heads)
      items.push_back({unit, begin, std::min(begin + heads, p.num_kv_heads)});
  }
  return items;
}

template <typename Way>
void RunItems(ffi::ThreadPool pool, const Problem& p, bool is_float8) {
  const std::vector<Unit> units = MakeUnits(p);
  const std::vector<Item> items = MakeItems(p, units, pool.num_threads());
  InParallel(pool, int(items.size()), [&](int i) {
    const Unit& unit = units[items[i].unit];
    if (is_float8) return Worker<Way, Float8>(p).Run(unit, items[i].begin, items[i].end);
    Worker<Way, uint16_t>(p).Run(unit, items[i].begin, items[i].end);
  });
}

ffi::Error RunInWay(std::string_view way, ffi::ThreadPool pool, const Problem& p, bool is_float8) {
  if (const auto refused = RefuseWay(way)) return *refused;
#ifdef JAXSGL_TILES
  if (way == "tiles") return RunItems<InTiles>(pool, p, is_float8), ffi::Error::Success();
#endif
#ifdef __AVX512BF16__
  if (way == "paired") return RunItems<InRegisters<uint16_t>>(pool, p, is_float8), ffi::Error::Success();
#endif
  return RunItems<InRegisters<float>>(pool, p, is_float8), ffi::Error::Success();
}

ffi::Error PagedAttention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                          ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::S32> offsets,
                          ffi::RemainingArgs optional, float sm_scale, float soft_cap, std::string_view way,
                          int64_t window, ffi::ResultBuffer<ffi::F32> out) {
  const auto pages = k.dimensions();
  const float* sinks = nullptr;
  const float* biases = nullptr;
  int reach = 0;
  const int32_t* seen = nullptr;
  for (size_t i = 0; i < optional.size(); ++i) {
    const ffi::AnyBuffer each = *optional.get<ffi::AnyBuffer>(i);
    if (each.element_type() == ffi::F32 && each.dimensions().size() == 1) sinks = each.typed_data<float>();
    if (each.element_type() == ffi::F32 && each.dimensions().size() == 2) {
      biases = each.typed_data<float>();
      reach = int(each.dimensions()[1] / 2);
    }
    if (each.element_type() == ffi::S32) seen = each.typed_data<int32_t>();
  }
  const Problem p{q.typed_data(), k.untyped_data(), v.untyped_data(), table.typed_data(), lengths.typed_data(),
                  offsets.typed_data(), sinks, seen, biases, out->typed_data(), reach, int(lengths.element_count()), int(table.dimensions()[1]),
                  int(pages[1]), int(q.dimensions()[1] / pages[1]), int(pages[3]), int(pages[2]),
                  sm_scale, soft_cap, window};
  const int64_t row = q.dimensions()[1] * q.dimensions()[2], num_tokens = q.dimensions()[0];
  for (int s = 0; s < p.num_seqs; ++s)
    if (p.lengths[s] == 0) std::fill_n(p.out + p.offsets[s] * row, (p.offsets[s + 1] - p.offsets[s]) * row, 0.0f);
  std::fill(p.out + p.offsets[p.num_seqs] * row, p.out + num_tokens * row, 0.0f);

  return RunInWay(way, pool, p, k.element_type() == ffi::U8);
}

}  // namespace
}  // namespace jaxsgl

XLA_FFI_DEFINE_HANDLER_SYMBOL(paged_attention, jaxsgl::PagedAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()  // sinks, what is seen, and biases, if there are any
                                  .Attr<float>("sm_scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<std::string_view>("way")
                                  .Attr<int64_t>("window")
                                  .Ret<ffi::Buffer<ffi::F32>>());
