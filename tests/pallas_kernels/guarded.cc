// Calls the native kernels of a compiled library as XLA does, but with each buffer between pages that can't be touched.
//
//   guarded LIBRARY COUNT SEED WAY [FAULT]      WAY: "paired", "widened" or "tiles"
//
// Runs COUNT random cases of each kernel with the buffers at the ends of their pages, and again at their beginnings with
// another number of threads: an access outside ends the process by a signal, and so does a write to an input. The
// results of both runs must be the same bits, and every thread's floating-point environment must be what it was.
// FAULT commits one such mistake beside a kernel, for the test of this program. test_native_memory.py runs it.

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "fp_environment.h"
#include "xla/ffi/api/c_api.h"

namespace {

std::string fault;
void (*leave_tiles)() = nullptr;  // the fault "tiles", of a library that imitates them
std::atomic<int> num_changed{0};  // tasks and calls after which the environment was another

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

template <typename Work>
void Watched(const Work& work) {
  const FpEnvironment before = ReadFpEnvironment();
  work();
  if (!(ReadFpEnvironment() == before)) ++num_changed;
}

// Memory of whole pages between two that can't be touched.
class Guarded {
 public:
  Guarded(const void* content, size_t bytes, bool at_end) : bytes_(bytes) {
    const size_t page = sysconf(_SC_PAGESIZE);
    room_ = (std::max<size_t>(bytes, 1) + page - 1) / page * page;
    void* all = mmap(nullptr, room_ + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) Fail("no memory");
    mapping_ = static_cast<char*>(all), total_ = room_ + 2 * page, inside_ = mapping_ + page;
    mprotect(inside_, room_, PROT_READ | PROT_WRITE);
    std::memset(inside_, kFiller, room_);
    data_ = at_end ? inside_ + room_ - bytes : inside_;
    if (content) std::memcpy(data_, content, bytes);
  }
  Guarded(const Guarded&) = delete;
  ~Guarded() { munmap(mapping_, total_); }

  void MakeReadOnly() { mprotect(inside_, room_, PROT_READ); }
  char* data() const { return data_; }
  std::vector<char> content() const { return {data_, data_ + bytes_}; }

  // Whether the bytes beside the data, in its own pages, are as they were.
  bool IsUntouchedBeside() const {
    const auto is_filler = [](char c) { return c == kFiller; };
    return std::all_of(inside_, data_, is_filler) && std::all_of(data_ + bytes_, inside_ + room_, is_filler);
  }

 private:
  static constexpr char kFiller = 0x5a;
  char *mapping_, *inside_, *data_;
  size_t room_, total_, bytes_;
};

// Stands for XLA's pool of threads.
class Pool {
 public:
  explicit Pool(int num_threads) {
    for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { Run(); });
  }
  ~Pool() {
    Schedule(nullptr, nullptr);
    for (std::thread& thread : threads_) thread.join();
  }
  int size() const { return int(threads_.size()); }
  void Schedule(XLA_FFI_Task* task, void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.emplace_back(task, data);
    changed_.notify_all();
  }

 private:
  void Run() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      const auto [task, data] = tasks_.front();
      if (!task) return;  // stays for the other threads
      tasks_.pop_front();
      lock.unlock();
      Watched([task = task, data = data] {
        task(data);
        if (fault == "flush") _mm_setcsr(_mm_getcsr() | kFlushToZero);
      });
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<XLA_FFI_Task*, void*>> tasks_;
  std::vector<std::thread> threads_;
};

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) { Fail(std::string("the kernel says: ") + args->message); }
Pool* PoolOf(XLA_FFI_ExecutionContext* ctx) { return reinterpret_cast<Pool*>(ctx); }
XLA_FFI_Error* Schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  PoolOf(args->ctx)->Schedule(args->task, args->data);
  return nullptr;
}
XLA_FFI_Error* NumThreads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = PoolOf(args->ctx)->size();
  return nullptr;
}

struct Array {
  XLA_FFI_DataType type;
  std::vector<int64_t> dims;
  std::vector<char> bytes;  // of a result: only their number counts
};

template <typename Number>
Array MakeArray(XLA_FFI_DataType type, std::vector<int64_t> dims, const std::vector<Number>& numbers) {
  const char* begin = reinterpret_cast<const char*>(numbers.data());
  return {type, std::move(dims), {begin, begin + numbers.size() * sizeof(Number)}};
}

struct Attribute {  // a call's must be in the order of their names
  const char* name;
  XLA_FFI_DataType type;
  int64_t bits;
  const char* text = nullptr;  // instead of a number
};

Attribute Float(const char* name, float value) {
  Attribute attribute{name, XLA_FFI_DataType_F32, 0};
  std::memcpy(&attribute.bits, &value, sizeof(value));
  return attribute;
}

struct Call {
  XLA_FFI_Handler* handler;
  std::vector<Array> arguments;
  std::vector<Attribute> attributes;
  Array result;
  std::vector<Array> others = {};  // results besides
};

// The results' bytes.
std::vector<char> Run(Call& call, Pool& pool, bool at_end) {
  std::deque<Guarded> buffers;
  std::deque<XLA_FFI_Buffer> described;
  const auto describe = [&](Array& array, const void* content) {
    buffers.emplace_back(content, array.bytes.size(), at_end);
    described.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, array.type, buffers.back().data(),
                         int64_t(array.dims.size()), array.dims.data()});
    return static_cast<void*>(&described.back());
  };
  std::vector<void*> arguments, attributes;
  for (Array& array : call.arguments) {
    arguments.push_back(describe(array, array.bytes.data()));
    buffers.back().MakeReadOnly();
  }
  std::vector<void*> results{describe(call.result, nullptr)};
  const size_t first_result = buffers.size() - 1;
  for (Array& array : call.others) results.push_back(describe(array, nullptr));
  std::vector<XLA_FFI_ArgType> argument_types(arguments.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_AttrType> attribute_types;
  std::vector<XLA_FFI_RetType> result_types(results.size(), XLA_FFI_RetType_BUFFER);
  std::deque<XLA_FFI_ByteSpan> spans;
  std::deque<XLA_FFI_Scalar> scalars;
  std::vector<XLA_FFI_ByteSpan*> names;
  for (Attribute& attribute : call.attributes) {
    names.push_back(&spans.emplace_back(XLA_FFI_ByteSpan{attribute.name, std::strlen(attribute.name)}));
    attribute_types.push_back(attribute.text ? XLA_FFI_AttrType_STRING : XLA_FFI_AttrType_SCALAR);
    if (attribute.text)
      attributes.push_back(&spans.emplace_back(XLA_FFI_ByteSpan{attribute.text, std::strlen(attribute.text)}));
    else
      attributes.push_back(&scalars.emplace_back(XLA_FFI_Scalar{attribute.type, &attribute.bits}));
  }
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = CreateError;
  api.XLA_FFI_ThreadPool_Schedule = Schedule;
  api.XLA_FFI_ThreadPool_NumThreads = NumThreads;
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.ctx = reinterpret_cast<XLA_FFI_ExecutionContext*>(&pool);
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, int64_t(arguments.size()), argument_types.data(), arguments.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, int64_t(results.size()), result_types.data(), results.data()};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, int64_t(attributes.size()), attribute_types.data(), names.data(),
                 attributes.data()};
  const Guarded& out = buffers[first_result];
  Watched([&] {
    call.handler(&frame);
    if (fault == "write after") out.data()[call.result.bytes.size()] = 0;
    if (fault == "write before") out.data()[-1] = 0;
    if (fault == "write to an input") buffers.front().data()[0] = 0;
    if (fault == "random bits") out.data()[0] = char(at_end);
    if (fault == "round") _mm_setcsr(_mm_getcsr() | kRoundUp);
    if (fault == "tiles") leave_tiles();
    if (fault == "x87") asm volatile("fldz" ::: "st");
  });
  for (const Guarded& buffer : buffers)
    if (!buffer.IsUntouchedBeside()) Fail("memory beside a buffer was written");
  std::vector<char> contents;
  for (size_t i = first_result; i < buffers.size(); ++i) {
    const std::vector<char> content = buffers[i].content();
    contents.insert(contents.end(), content.begin(), content.end());
  }
  return contents;
}

using Random = std::mt19937;

int OneOf(Random& random, std::vector<int> choices) { return choices[random() % choices.size()]; }
int Below(Random& random, int limit) { return int(random() % limit); }

std::vector<float> Floats(Random& random, int64_t count) {
  std::vector<float> numbers(count);
  for (float& x : numbers) x = float(int(random() % 2001) - 1000) / 500;
  return numbers;
}

std::vector<uint16_t> Bfloats(Random& random, int64_t count) {
  const std::vector<float> numbers = Floats(random, count);
  std::vector<uint16_t> bits(count);
  for (int64_t i = 0; i < count; ++i) {
    uint32_t whole;
    std::memcpy(&whole, &numbers[i], 4);
    bits[i] = uint16_t(whole >> 16);
  }
  return bits;
}

// Codes of float8, NaN among them.
std::vector<uint8_t> Codes(Random& random, int64_t count) {
  std::vector<uint8_t> codes(count);
  for (uint8_t& code : codes) code = uint8_t(random());
  return codes;
}

// Of a product: "" as often as a gate's, whose weights have twice as many rows as there are results.
const char* AnyActivation(Random& random) {
  const char* const all[] = {"", "", "silu", "gelu_tanh"};
  return all[Below(random, 4)];
}
int64_t WeightRows(int64_t results, const char* activation) { return (*activation ? 2 : 1) * results; }

Call Product(Random& random, XLA_FFI_Handler* handler, const char* way) {
  const int64_t tokens = OneOf(random, {1, 2, 3, 5, 8, 9, 15, 16, 17, 31, 33, 48, 63, 64, 65, 100, 130, 520});
  const bool is_large = tokens > 500;  // then blocks of inputs count too
  const int64_t in = 32 * (is_large ? 29 : 1 + Below(random, 6));
  const int64_t out = 16 * (is_large ? 1 + Below(random, 4) : OneOf(random, {1, 2, 3, 5, 8, 17, 33, 65}));
  const char* const activation = AnyActivation(random);
  const int64_t rows = WeightRows(out, activation);
  return {handler,
          {MakeArray(XLA_FFI_DataType_F32, {tokens, in}, Floats(random, tokens * in)),
           MakeArray(XLA_FFI_DataType_BF16, {rows, in}, Bfloats(random, rows * in))},
          {{"activation", XLA_FFI_DataType_INVALID, 0, activation}, {"way", XLA_FFI_DataType_INVALID, 0, way}},
          {XLA_FFI_DataType_F32, {tokens, out}, std::vector<char>(4 * tokens * out)}};
}

Call Int8Product(Random& random, XLA_FFI_Handler* handler) {
  const int64_t tokens = OneOf(random, {1, 2, 3, 5, 8, 9, 17, 33, 49, 63, 64, 65, 130, 300});
  const int64_t group = 32 * OneOf(random, {1, 2, 4, 16}), in = 32 * (1 + Below(random, 40));
  const int64_t out = 16 * OneOf(random, {1, 2, 3, 17, 65}), groups = Below(random, 2) ? 1 : (in + group - 1) / group;
  const char* const activation = AnyActivation(random);
  const int64_t rows = WeightRows(out, activation);
  return {handler,
          {MakeArray(XLA_FFI_DataType_F32, {tokens, in}, Floats(random, tokens * in)),
           MakeArray(XLA_FFI_DataType_S8, {rows, in}, Codes(random, rows * in)),
           MakeArray(XLA_FFI_DataType_F32, {rows, groups}, Floats(random, rows * groups))},
          {{"activation", XLA_FFI_DataType_INVALID, 0, activation}, {"group", XLA_FFI_DataType_S64, group}},
          {XLA_FFI_DataType_F32, {tokens, out}, std::vector<char>(4 * tokens * out)}};
}

// With one expert, or several of which some have no rows; with zeros or without.
Call PackedProduct(Random& random, XLA_FFI_Handler* handler, int64_t row_bits, int64_t bits) {
  const int64_t experts = OneOf(random, {1, 1, 3}), group = 32 * OneOf(random, {1, 2, 4, 16}), in = 32 * (1 + Below(random, 40));
  const int64_t out = 32 * OneOf(random, {1, 2, 3, 9, 33}), groups = Below(random, 2) ? 1 : (in + group - 1) / group;
  std::vector<int> sizes(experts);
  for (int& size : sizes) size = OneOf(random, {0, 1, 2, 3, 5, 8, 9, 17, 33, 130, 300});
  int64_t places = std::accumulate(sizes.begin(), sizes.end(), int64_t(1)) - Below(random, 2);
  const char* const activation = experts == 1 ? AnyActivation(random) : "";
  if (*activation) places = sizes[0];  // a gated product has one matrix for all rows
  const int64_t rows = WeightRows(out, activation), zeros = Below(random, 2) ? experts * rows * groups : 0;
  return {handler,
          {MakeArray(XLA_FFI_DataType_F32, {places, in}, Floats(random, places * in)),
           MakeArray(XLA_FFI_DataType_S32, {1}, std::vector<int>(1)),
           MakeArray(XLA_FFI_DataType_S32, {experts}, sizes),
           MakeArray(XLA_FFI_DataType_U8, {experts, rows / 32, 4 * bits * in}, Codes(random, experts * rows * in * bits / 8)),
           MakeArray(XLA_FFI_DataType_F32, {experts, rows / 32, 32 * groups}, Floats(random, experts * rows * groups)),
           MakeArray(XLA_FFI_DataType_S8, {zeros, 1, 1}, Codes(random, zeros))},
          {{"activation", XLA_FFI_DataType_INVALID, 0, activation}, {"group", XLA_FFI_DataType_S64, group},
           {"of_tokens", XLA_FFI_DataType_PRED, 0}, {"row_bits", XLA_FFI_DataType_S64, row_bits},
           {"weight_bits", XLA_FFI_DataType_S64, bits}},
          {XLA_FFI_DataType_F32, {places, out}, std::vector<char>(4 * places * out)}};
}

// Scales [rows, groups], sometimes the same for all rows.
std::vector<float> Scales(Random& random, int64_t rows, int64_t groups) {
  std::vector<float> scales = Floats(random, rows * groups);
  if (Below(random, 2))
    for (size_t i = groups; i < scales.size(); ++i) scales[i] = scales[i - groups];
  return scales;
}

// Rows of tokens, which may stand at several places, times experts' float8 in groups or MXFP4.
Call KeptProduct(Random& random, XLA_FFI_Handler* handler, const char* way) {
  const int64_t experts = OneOf(random, {1, 2, 4}), tokens = OneOf(random, {1, 2, 7, 40}), in = 32 * (1 + Below(random, 12));
  const int64_t out = 16 * OneOf(random, {1, 2, 3, 9}), group = 32 * OneOf(random, {1, 2, 4}), groups = (in + group - 1) / group;
  const bool is_float8 = Below(random, 2);
  std::vector<int> sizes(experts), of_place;
  for (int& size : sizes) size = OneOf(random, {0, 1, 2, 5, 17, 70});
  const int64_t places = std::accumulate(sizes.begin(), sizes.end(), int64_t(1)) - Below(random, 2);
  for (int i = 0; i < places; ++i) of_place.push_back(Below(random, int(tokens)));
  if (of_place.empty()) of_place.push_back(0);
  std::vector<uint8_t> numbers = Codes(random, experts * out * in / (is_float8 ? 1 : 2));
  return {handler,
          {MakeArray(XLA_FFI_DataType_F32, {tokens, in}, Floats(random, tokens * in)),
           MakeArray(XLA_FFI_DataType_S32, {int64_t(of_place.size())}, of_place),
           MakeArray(XLA_FFI_DataType_S32, {experts}, sizes),
           MakeArray(XLA_FFI_DataType_U8, {experts, out, in / (is_float8 ? 1 : 2)}, numbers),
           is_float8 ? MakeArray(XLA_FFI_DataType_F32, {experts, out, groups}, Scales(random, experts * out, groups))
                     : MakeArray(XLA_FFI_DataType_U8, {experts, out, in / 32}, Codes(random, experts * out * in / 32))},
          {{"group", XLA_FFI_DataType_S64, is_float8 ? group : 32}, {"of_tokens", XLA_FFI_DataType_PRED, 1},
           {"way", XLA_FFI_DataType_INVALID, 0, Below(random, 3) ? way : "float32"}},
          {XLA_FFI_DataType_F32, {places, out}, std::vector<char>(4 * places * out)}};
}

Call RowSums(Random& random, XLA_FFI_Handler* handler) {
  const int64_t rows = OneOf(random, {0, 1, 2, 3, 7, 33, 64, 200});
  const int64_t n = OneOf(random, {1, 2, 7, 8, 15, 16, 17, 63, 64, 65, 127, 128, 192, 1000, 1024, 40000});
  const char* const ways[] = {"sum", "squares", "top"};
  return {handler,
          {MakeArray(XLA_FFI_DataType_F32, {rows, n}, Floats(random, rows * n))},
          {{"what", XLA_FFI_DataType_INVALID, 0, ways[Below(random, 3)]}},
          {XLA_FFI_DataType_F32, {rows}, std::vector<char>(4 * rows)}};
}

// Sequences of random lengths, some empty, some on the pages of the one before; the last page ends with the buffer.
Call Attention(Random& random, XLA_FFI_Handler* handler, const char* way) {
  const int num_kv_heads = 1 + Below(random, 3), group = OneOf(random, {1, 2, 3, 8, 128});
  const int head_dim = 32 * (1 + Below(random, 8)), page_size = OneOf(random, {1, 3, 16, 64});
  const int num_seqs = 1 + Below(random, 6), longest = OneOf(random, {1, 64, 65, 200});
  const bool is_decode = Below(random, 2), shares = Below(random, 2);
  std::vector<int> lengths(num_seqs), offsets(num_seqs + 1);
  for (int s = 0; s < num_seqs; ++s) {
    lengths[s] = Below(random, 4) ? 1 + Below(random, longest) : 0;
    const int most = std::min(lengths[s], group > 8 ? 3 : 150);
    offsets[s + 1] = offsets[s] + (is_decode ? 1 : most == 0 ? 0 : Below(random, most + 1));
  }
  const int width = (longest + page_size - 1) / page_size;
  const int num_pages = 1 + num_seqs * width;
  std::vector<int> pages(num_pages - 1), table(num_seqs * width);
  std::iota(pages.begin(), pages.end(), 1);
  std::shuffle(pages.begin(), pages.end(), random);
  for (int s = 0; s < num_seqs; ++s) {
    for (int i = 0; i * page_size < lengths[s]; ++i) table[s * width + i] = pages[s * width + i];
    const int common = s > 0 && shares ? std::min(lengths[s - 1], lengths[s]) / page_size : 0;
    for (int i = 0; i < Below(random, common + 1); ++i) table[s * width + i] = table[(s - 1) * width + i];
  }
  const int64_t tokens = offsets[num_seqs] + Below(random, 3) * !is_decode + (offsets[num_seqs] == 0);
  const int64_t queries = tokens * num_kv_heads * group, cache = int64_t(num_pages) * num_kv_heads * page_size;
  const bool is_float8 = Below(random, 2);
  const auto pages_of_k_or_v = [&] {
    const std::vector<int64_t> shape = {num_pages, num_kv_heads, page_size, head_dim};
    return is_float8 ? MakeArray(XLA_FFI_DataType_U8, shape, Codes(random, cache * head_dim))
                     : MakeArray(XLA_FFI_DataType_U16, shape, Bfloats(random, cache * head_dim));
  };
  Call call{handler,
          {MakeArray(XLA_FFI_DataType_F32, {tokens, num_kv_heads * group, head_dim}, Floats(random, queries * head_dim)),
           pages_of_k_or_v(), pages_of_k_or_v(),
           MakeArray(XLA_FFI_DataType_S32, {num_seqs, width}, table),
           MakeArray(XLA_FFI_DataType_S32, {num_seqs}, lengths),
           MakeArray(XLA_FFI_DataType_S32, {num_seqs + 1}, offsets)},
          {Float("sm_scale", 0.1f), Float("soft_cap", Below(random, 3) ? 0.0f : 2.0f),
           {"way", XLA_FFI_DataType_INVALID, 0, way},
           {"window", XLA_FFI_DataType_S64, OneOf(random, {0, 0, 0, 1, 9, 64, 70})}},
          {XLA_FFI_DataType_F32, {tokens, num_kv_heads * group, head_dim}, std::vector<char>(4 * queries * head_dim)}};
  if (Below(random, 2))  // sinks
    call.arguments.push_back(MakeArray(XLA_FFI_DataType_F32, {num_kv_heads * group}, Floats(random, num_kv_heads * group)));
  if (!is_decode && Below(random, 2)) {  // what queries see: now and then all of their sequence
    std::vector<int> seen(tokens);
    for (int s = 0; s < num_seqs; ++s)
      for (int i = offsets[s], position = lengths[s] - (offsets[s + 1] - i); i < offsets[s + 1]; ++i, ++position)
        seen[i] = std::max(i > offsets[s] ? seen[i - 1] : 0, Below(random, 4) ? position + 1 : lengths[s]);
    call.arguments.push_back(MakeArray(XLA_FFI_DataType_S32, {tokens}, seen));
  }
  if (!is_decode && Below(random, 2)) {  // biases by distance
    const int64_t distances = 2 * OneOf(random, {0, 1, 7, 128}) + 1;
    const int64_t biases = num_kv_heads * group * distances;
    call.arguments.push_back(MakeArray(XLA_FFI_DataType_F32, {num_kv_heads * group, distances}, Floats(random, biases)));
  }
  return call;
}

// What `move_states` and `convolve_tokens` take last: some sequences with tokens and one without, places of their own,
// states that come from others or are kept besides; and the states, `sizes` numbers each, for a result in their place.
void AddStates(Random& random, Call& call, const std::vector<int32_t>& counts, std::vector<int64_t> sizes) {
  const int64_t num_seqs = counts.size(), num_places = 4 * num_seqs;
  std::vector<int32_t> offsets{0}, starts, source, place, kept_at, kept_to;
  for (int i = 0; i < num_seqs; ++i) {
    offsets.push_back(offsets.back() + counts[i]);
    starts.push_back(OneOf(random, {0, 0, 1, 2, 3, 64}));
    place.push_back(i);
    source.push_back(Below(random, 3) ? i : int(num_seqs) + i);
  }
  for (int n = 0; n < 2; ++n)
    for (int i = 0; i < num_seqs; ++i) {
      kept_at.push_back(Below(random, 2) ? 0 : Below(random, counts[i] + 1));
      kept_to.push_back(int(num_seqs) * (2 + n) + i);
    }
  for (const auto& [dims, numbers] :
       {std::pair(std::vector<int64_t>{num_seqs + 1}, offsets), std::pair(std::vector<int64_t>{num_seqs}, starts),
        std::pair(std::vector<int64_t>{num_seqs}, source), std::pair(std::vector<int64_t>{num_seqs}, place),
        std::pair(std::vector<int64_t>{2, num_seqs}, kept_at), std::pair(std::vector<int64_t>{2, num_seqs}, kept_to)})
    call.arguments.push_back(MakeArray(XLA_FFI_DataType_S32, dims, numbers));
  sizes.insert(sizes.begin(), num_places);
  int64_t total = 1;
  for (const int64_t size : sizes) total *= size;
  call.arguments.push_back(MakeArray(XLA_FFI_DataType_F32, sizes, Floats(random, total)));
  call.others.push_back({XLA_FFI_DataType_F32, sizes, std::vector<char>(4 * total)});
}

std::vector<int32_t> Counts(Random& random, int64_t* num_tokens) {
  std::vector<int32_t> counts(1 + Below(random, 4));
  for (int32_t& count : counts) count = OneOf(random, {1, 1, 2, 5, 40});
  *num_tokens = Below(random, 4);  // padding
  for (const int32_t count : counts) *num_tokens += count;
  counts.push_back(0);
  return counts;
}

Call States(Random& random, XLA_FFI_Handler* handler) {
  const int64_t heads = 1 + Below(random, 2), group = 1 + Below(random, 3), keys = 8 * OneOf(random, {1, 2, 3, 32});
  const int64_t values = 16 * OneOf(random, {1, 2, 3, 4, 5, 8});
  int64_t tokens;
  const std::vector<int32_t> counts = Counts(random, &tokens);
  const int64_t of_keys = tokens * heads * keys, of_heads = tokens * heads * group;
  const int64_t corrects = Below(random, 2), decays = corrects && Below(random, 2) ? keys : 1;
  std::vector<float> decay(of_heads * decays);
  for (float& x : decay) x = float(random() % 1000) / 1000;  // so that states stay finite
  Call call{handler,
            {MakeArray(XLA_FFI_DataType_F32, {tokens, heads, keys}, Floats(random, of_keys)),
             MakeArray(XLA_FFI_DataType_F32, {tokens, heads, keys}, Floats(random, of_keys)),
             MakeArray(XLA_FFI_DataType_F32, {tokens, heads, group, values}, Floats(random, of_heads * values)),
             MakeArray(XLA_FFI_DataType_F32, {tokens, heads, group, decays}, decay),
             MakeArray(XLA_FFI_DataType_F32, {tokens, heads, group}, Floats(random, of_heads))},
            {{"corrects", XLA_FFI_DataType_PRED, corrects}},
            {XLA_FFI_DataType_F32, {tokens, heads, group, values}, std::vector<char>(4 * of_heads * values)}};
  AddStates(random, call, counts, {heads, group, keys, values});
  return call;
}

Call Convolution(Random& random, XLA_FFI_Handler* handler) {
  const int64_t heads = 1 + Below(random, 2), channels = 16 * OneOf(random, {1, 2, 3, 17}), taps = 2 + Below(random, 7);
  const int64_t row = channels + Below(random, 20);
  int64_t tokens;
  const std::vector<int32_t> counts = Counts(random, &tokens);
  Call call{handler,
            {MakeArray(XLA_FFI_DataType_F32, {tokens, heads, row}, Floats(random, tokens * heads * row)),
             MakeArray(XLA_FFI_DataType_F32, {taps, heads, channels}, Floats(random, taps * heads * channels)),
             MakeArray(XLA_FFI_DataType_F32, {heads, channels}, Floats(random, heads * channels))},
            {{"activates", XLA_FFI_DataType_PRED, Below(random, 2)}},
            {XLA_FFI_DataType_F32, {tokens, heads, channels}, std::vector<char>(4 * tokens * heads * channels)}};
  AddStates(random, call, counts, {taps, heads, channels});
  return call;
}

// The libraries whose paths are given, between colons.
std::vector<void*> Libraries(const std::string& paths) {
  std::vector<void*> libraries;
  for (size_t from = 0, to; from <= paths.size(); from = to + 1) {
    to = std::min(paths.find(':', from), paths.size());
    libraries.push_back(dlopen(paths.substr(from, to - from).c_str(), RTLD_NOW));
    if (!libraries.back()) Fail(dlerror());
  }
  return libraries;
}

// The function of that name, of the first library that has one.
template <typename Function>
Function Find(const std::vector<void*>& libraries, const char* name) {
  for (void* library : libraries)
    if (void* const found = dlsym(library, name)) return reinterpret_cast<Function>(found);
  return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) Fail("guarded LIBRARY[:LIBRARY..] COUNT SEED WAY [FAULT]");
  const std::vector<void*> libraries = Libraries(argv[1]);
  const int count = std::atoi(argv[2]);
  const char* const way = argv[4];
  imitated_palette = Find<int (*)()>(libraries, "imitated_palette");
  leave_tiles = Find<void (*)()>(libraries, "imitated_leave_tiles");
  for (void* library : libraries) {  // each asks for tiles on its own
    const auto refuse_tiles = Find<const char* (*)()>({library}, "refuse_tiles");
    if (!std::strcmp(way, "tiles") && refuse_tiles && refuse_tiles()) Fail(refuse_tiles());
  }
  const auto multiplies_bytes = Find<int (*)()>(libraries, "multiplies_bytes");
  if (argc > 5) fault = argv[5];
  Random random(std::atoi(argv[3]));
  {
    Pool few(2), more(5);
    for (int i = 0; i < count; ++i) {
      for (const std::string kernel : {"rows_product", "grouped_kept_product", "paged_attention", "int8_product",
                                       "grouped_packed_product of words", "grouped_packed_product of bytes",
                                       "grouped_packed_product of int8", "row_sums", "move_states", "convolve_tokens"}) {
        const bool is_packed = kernel.rfind("grouped_packed_product", 0) == 0;
        const bool of_words = kernel.find(" of words") != std::string::npos;
        if (is_packed && !of_words && !multiplies_bytes()) continue;
        XLA_FFI_Handler* const handler = Find<XLA_FFI_Handler*>(libraries, kernel.substr(0, kernel.find(' ')).c_str());
        if (!handler) Fail("no library has " + kernel);
        Call call = kernel == "paged_attention" ? Attention(random, handler, way)
                    : kernel == "int8_product"  ? Int8Product(random, handler)
                    : is_packed ? PackedProduct(random, handler, of_words ? 16 : 8, kernel.find("int8") == std::string::npos ? 4 : 8)
                    : kernel == "grouped_kept_product" ? KeptProduct(random, handler, way)
                    : kernel == "row_sums"      ? RowSums(random, handler)
                    : kernel == "move_states"   ? States(random, handler)
                    : kernel == "convolve_tokens" ? Convolution(random, handler)
                                                : Product(random, handler, way);
        const std::string which = kernel + " of case " + std::to_string(i);
        const std::vector<char> first = Run(call, few, true), second = Run(call, more, false);
        if (num_changed) Fail(which + " left another floating-point environment");
        if (first != second) Fail(which + " depends on memory or on the threads");
      }
    }
  }
  if (num_changed) Fail("a task that ran late left another floating-point environment");
  std::printf("%d cases of each, tiles %s\n", count, imitated_palette ? "imitated" : HasTiles() ? "seen" : "not there");
}
