// Matrix products of a few rows on CPUs, as XLA FFI handlers: float32, bfloat16 and the packed formats of GGUF.
//
// The best instruction set of the processor is chosen when the library is loaded. A handler divides its outputs into
// pieces that the calling thread and XLA's own pool take in turn. It never waits: waiting for work that stands in the
// pool behind other waiting handlers is a deadlock.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

inline float bfloat16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}
inline float as_float(float value) { return value; }
inline float as_float(uint16_t bits) { return bfloat16(bits); }
inline float as_float(int8_t value) { return value; }

// Products over outputs [first, last): weights, rows, results; counts of rows, inputs, outputs; first, last.
using Product = void (*)(const void*, const float*, float*, int64_t, int64_t, int64_t, int64_t, int64_t);

// Attention over slots [first, last): queries, keys, values, the scales of the slots of both or null; scores (room),
// highest, total, mixed; heads, width, capacity, first, last.
using Piece = void (*)(const float*, const void*, const void*, const float*, const float*, float*, float*, float*, float*,
                       int64_t, int64_t, int64_t, int64_t, int64_t);

// Attention of a block of queries: queries, how many slots each sees and the most of these, keys, values, scales of both
// or null, room, mixed; rows, width, capacity.
using Block = void (*)(const float*, const int64_t*, int64_t, const void*, const void*, const float*, const float*, float*,
                       float*, int64_t, int64_t, int64_t);

struct Attention {
  Piece one;
  Block many;
};

struct PackedKernels {
  void (*matmul)(const uint8_t*, const int16_t*, const float*, float*, int64_t, int64_t, int64_t, int64_t, int64_t);
  Product many;
  int weights, bytes;  // of a block
};

constexpr int FORMATS = 8;  // in the order of jaxrt.native.FORMATS

struct Kernels {
  const char* name;
  int panel;  // outputs that products of many rows take at a time
  int lanes;
  struct {
    Product few, many;
  } float32, bfloat16;
  void (*quantize)(const float*, int16_t*, float*, int64_t);
  Attention attend_float32, attend_bfloat16, attend_int8;
  int64_t (*block_room)(int64_t, int64_t);  // for Block, by rows and width
  void (*norm)(const float*, const float*, float*, int64_t, float);
  PackedKernels packed[FORMATS];
};

#define JAXRT_TEXT(x) #x
#if defined(__clang__)
#define JAXRT_BEGIN(set) _Pragma(JAXRT_TEXT(clang attribute push(__attribute__((target(set))), apply_to = function)))
#define JAXRT_END _Pragma("clang attribute pop")
#else
#define JAXRT_PRAGMA(x) _Pragma(JAXRT_TEXT(x))
#define JAXRT_BEGIN(set) _Pragma("GCC push_options") JAXRT_PRAGMA(GCC target(set))
#define JAXRT_END _Pragma("GCC pop_options")
#endif

#if defined(__x86_64__)
#define JAXRT_AVX512 1
#define JAXRT_NAME "AVX-512"
JAXRT_BEGIN("avx2,fma,f16c,avx512f,avx512vl,avx512bw,avx512vnni")
namespace avx512 {
#include "simd.h"
#include "formats.h"
#include "matmul.h"
#include "attention.h"
#include "table.h"
}  // namespace avx512
JAXRT_END
#undef JAXRT_AVX512
#undef JAXRT_NAME
#define JAXRT_AVX2 1
#define JAXRT_NAME "AVX2"
JAXRT_BEGIN("avx2,fma,f16c")
namespace avx2 {
#include "simd.h"
#include "formats.h"
#include "matmul.h"
#include "attention.h"
#include "table.h"
}  // namespace avx2
JAXRT_END
#undef JAXRT_AVX2
#undef JAXRT_NAME
#elif defined(__aarch64__)
#define JAXRT_NEON 1
#define JAXRT_NAME "NEON"
namespace neon {
#include "simd.h"
#include "formats.h"
#include "matmul.h"
#include "attention.h"
#include "table.h"
}  // namespace neon
#undef JAXRT_NEON
#undef JAXRT_NAME
#endif
#define JAXRT_NAME "plain C++"
namespace plain {
#include "simd.h"
#include "formats.h"
#include "matmul.h"
#include "attention.h"
#include "table.h"
}  // namespace plain
#undef JAXRT_NAME

const Kernels* const known[] = {
#if defined(__x86_64__)
    &avx512::kernels, &avx2::kernels,
#elif defined(__aarch64__)
    &neon::kernels,
#endif
    &plain::kernels};

bool runs_here(const Kernels* kernels) {
#if defined(__x86_64__)
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (kernels == &avx2::kernels) return avx2;
  if (kernels == &avx512::kernels)
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni");
#endif
  return true;
}

const Kernels* best() {
  for (const Kernels* each : known)
    if (runs_here(each)) return each;
  return &plain::kernels;
}

std::atomic<const Kernels*> chosen{best()};

// Run work(first, last) over [0, count) in pieces of `piece`, on this thread and the pool's, and finish() after the last
// of them. Both must own all that they need beside the buffers of the call, which live until the future is ready.
template <typename Work, typename Finish>
ffi::Future in_parallel(ffi::ThreadPool& pool, int64_t count, int64_t piece, Work work, Finish finish) {
  struct State {
    Work work;
    Finish finish;
    int64_t count, piece, pieces;
    std::atomic<int64_t> next{0}, left;
    ffi::Promise promise;
    State(Work w, Finish f, int64_t c, int64_t p)
        : work(std::move(w)), finish(std::move(f)), count(c), piece(p), pieces((c + p - 1) / p), left(pieces) {}
    void run() {
      for (int64_t at; (at = next.fetch_add(1)) < pieces;) {
        work(at * piece, std::min(count, (at + 1) * piece));
        if (left.fetch_sub(1) == 1) {
          finish();
          promise.SetAvailable();
        }
      }
    }
  };
  auto state = std::make_shared<State>(std::move(work), std::move(finish), count, piece);
  ffi::Future done(state->promise);
  const int64_t others = std::min<int64_t>(pool.num_threads() - 1, state->pieces - 1);
  for (int64_t i = 0; i < others; ++i) pool.Schedule([state] { state->run(); });
  state->run();
  return done;
}

template <typename Work>
ffi::Future in_parallel(ffi::ThreadPool& pool, int64_t count, int64_t piece, Work work) {
  return in_parallel(pool, count, piece, std::move(work), [] {});
}

ffi::Future failed(const char* message) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(ffi::Error::InvalidArgument(message));
  return future;
}

ffi::Future finished() {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetAvailable();
  return future;
}

// Up to so many rows weights are multiplied as they stand, packed ones as integers; beyond, panel by panel.
constexpr int64_t FEW_ROWS = 8;

// How many outputs a thread takes at a time, in fours: so many bytes of weights. Measured at one row.
constexpr int64_t FLOAT_PIECE = 1 << 18, PACKED_PIECE = 1 << 16;
int64_t outputs_in(int64_t piece, int64_t row_bytes) {
  return std::max<int64_t>(4, piece / std::max<int64_t>(1, row_bytes) / 4 * 4);
}

template <ffi::DataType TYPE>
ffi::Future float_matmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<TYPE> weights,
                         ffi::ResultBuffer<ffi::F32> y) {
  auto xs = x.dimensions(), ws = weights.dimensions(), ys = y->dimensions();
  if (xs.size() != 2 || ws.size() != 2 || ys.size() != 2 || xs[1] != ws[1] || ys[0] != xs[0] || ys[1] != ws[0])
    return failed("shapes of a product must be [rows, inputs], [outputs, inputs], [rows, outputs]");
  const int64_t rows = xs[0], inputs = xs[1], outputs = ws[0];
  if (!rows || !outputs) return finished();
  const Kernels* all = chosen.load();
  const auto& kernels = TYPE == ffi::F32 ? all->float32 : all->bfloat16;
  const bool many = rows > FEW_ROWS;
  auto* kernel = many ? kernels.many : kernels.few;
  const float* from = x.typed_data();
  const void* w = weights.untyped_data();
  float* to = y->typed_data();
  const int64_t piece = many ? 2 * all->panel : outputs_in(FLOAT_PIECE, inputs * (TYPE == ffi::F32 ? 4 : 2));
  return in_parallel(pool, outputs, piece, [=](int64_t first, int64_t last) {
    kernel(w, from, to, rows, inputs, outputs, first, last);
  });
}

ffi::Future packed_matmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::U8> weights,
                          ffi::ResultBuffer<ffi::F32> y, int64_t format) {
  auto xs = x.dimensions(), ws = weights.dimensions(), ys = y->dimensions();
  if (format < 0 || format >= FORMATS) return failed("no such format");
  const Kernels* all = chosen.load();
  const PackedKernels& kernel = all->packed[format];
  if (xs.size() != 2 || ws.size() != 2 || ys.size() != 2 || xs[1] % kernel.weights ||
      ws[1] != xs[1] / kernel.weights * kernel.bytes || ys[0] != xs[0] || ys[1] != ws[0])
    return failed("shapes of a packed product must be [rows, inputs], [outputs, bytes], [rows, outputs]");
  const int64_t rows = xs[0], inputs = xs[1], outputs = ws[0], parts = inputs / 32;
  if (!rows || !outputs) return finished();
  const uint8_t* w = weights.typed_data();
  float* to = y->typed_data();
  if (rows > FEW_ROWS) {
    const float* from = x.typed_data();
    auto* many = kernel.many;
    return in_parallel(pool, outputs, 2 * all->panel, [=](int64_t first, int64_t last) {
      many(w, from, to, rows, inputs, outputs, first, last);
    });
  }
  struct Activations {
    std::vector<int16_t> quants;
    std::vector<float> scales;  // and sums, in turn
  };
  auto given = std::make_shared<Activations>();
  given->quants.resize(rows * inputs);
  given->scales.resize(2 * rows * parts);
  for (int64_t r = 0; r < rows; ++r)
    all->quantize(x.typed_data() + r * inputs, given->quants.data() + r * inputs, given->scales.data() + 2 * r * parts,
                  inputs);
  auto* matmul = kernel.matmul;
  return in_parallel(pool, outputs, outputs_in(PACKED_PIECE, ws[1]), [=](int64_t first, int64_t last) {
    matmul(w, given->quants.data(), given->scales.data(), to, rows, inputs, outputs, first, last);
  });
}

// Slots of one piece of attention: a few thousand products are not worth another thread.
constexpr int64_t SLOTS_PIECE = 512;

// Queries times the heads that share a key head, of one task: enough that copying keys and values is little beside
// multiplying them, and few enough that their scores stay in the second cache.
constexpr int64_t BLOCK_ROWS = 96;

template <ffi::DataType TYPE>
ffi::Future attend_over(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> queries, ffi::Buffer<TYPE> keys,
                        ffi::Buffer<TYPE> values, ffi::Buffer<ffi::S32> positions, ffi::ResultBuffer<ffi::F32> out,
                        const float* key_scales, const float* value_scales) {
  auto qs = queries.dimensions(), ks = keys.dimensions(), vs = values.dimensions();
  if (qs.size() != 4 || ks.size() != 4 || vs.size() != 4 || ks[0] != qs[0] || vs[0] != qs[0] ||
      ks[1] != vs[1] || ks[2] != qs[3] || vs[3] != qs[3] || ks[3] != vs[2] || !ks[1] || qs[2] % ks[1] ||
      (int64_t)positions.element_count() != qs[0] * qs[1])
    return failed("shapes of attention must be [B, T, N, H], [B, K, H, S], [B, K, S, H], [B, T]");
  const int64_t rows = qs[0], queries_each = qs[1], heads = qs[2], width = qs[3], groups = ks[1], capacity = ks[3], each = heads / groups;
  const Kernels* all = chosen.load();
  if (width % all->lanes) return failed("the width of a head must be a multiple of the vector length");
  if (!rows || !queries_each || !heads || !capacity) return finished();
  const Attention& kernel =
      TYPE == ffi::F32 ? all->attend_float32 : TYPE == ffi::BF16 ? all->attend_bfloat16 : all->attend_int8;
  const float* q = queries.typed_data();
  const int32_t* at = positions.typed_data();
  const auto *k = keys.typed_data(), *v = values.typed_data();
  float* to = out->typed_data();
  const float scale = 1 / std::sqrt((float)width);
  auto seen_from = [=](int32_t position) { return std::clamp<int64_t>((int64_t)position + 1, 1, capacity); };
  if (queries_each > 1) {
    // a task is a row, a key head and a block of queries
    const int64_t block = std::max<int64_t>(1, BLOCK_ROWS / each), blocks = (queries_each + block - 1) / block;
    return in_parallel(pool, rows * groups * blocks, 1, [=, many = kernel.many, room = all->block_room](int64_t task, int64_t) {
      thread_local std::vector<float> memory;
      thread_local std::vector<int64_t> seen;
      const int64_t first = task % blocks * block, count = std::min(block, queries_each - first) * each;
      const int64_t row = task / blocks / groups, group = task / blocks % groups;
      memory.resize(std::max<size_t>(memory.size(), room(count, width) + 2 * count * width));
      seen.resize(count);
      float *scaled = memory.data(), *mixed = scaled + count * width;
      int64_t most = 0;
      auto place = [=](int64_t i) { return (((row * queries_each + first + i / each) * groups + group) * each + i % each) * width; };
      for (int64_t i = 0; i < count; ++i) {
        seen[i] = seen_from(at[row * queries_each + first + i / each]);
        most = std::max(most, seen[i]);
        for (int64_t h = 0; h < width; ++h) scaled[i * width + h] = q[place(i) + h] * scale;
      }
      const int64_t slots = (row * groups + group) * capacity;
      many(scaled, seen.data(), most, k + slots * width, v + slots * width, key_scales ? key_scales + slots : nullptr,
           value_scales ? value_scales + slots : nullptr, mixed + count * width, mixed, count, width, capacity);
      for (int64_t i = 0; i < count; ++i) std::copy_n(mixed + i * width, width, to + place(i));
    });
  }
  // a task is a row, a key head and a piece of the slots in use
  struct Partial {
    std::vector<float> highest, total, mixed;
  };
  struct Task {
    int64_t row, group, first, last;
  };
  auto tasks = std::make_shared<std::vector<Task>>();
  int64_t longest = 0;
  for (int64_t b = 0; b < rows; ++b) {
    const int64_t used = seen_from(at[b]);
    longest = std::max(longest, used);
    for (int64_t k = 0; k < groups; ++k)
      for (int64_t s = 0; s < used; s += SLOTS_PIECE) tasks->push_back({b, k, s, std::min(used, s + SLOTS_PIECE)});
  }
  auto partial = std::make_shared<Partial>();
  partial->highest.resize(tasks->size() * each);
  partial->total.resize(tasks->size() * each);
  partial->mixed.resize(tasks->size() * each * width);
  auto work = [=, piece = kernel.one](int64_t first, int64_t last) {
    thread_local std::vector<float> room;
    room.resize(std::max<size_t>(room.size(), 3 * SLOTS_PIECE + each * width));
    for (int64_t t = first; t < last; ++t) {
      const Task& task = (*tasks)[t];
      float* scaled = room.data() + 3 * SLOTS_PIECE;
      const float* from = q + (task.row * heads + task.group * each) * width;
      for (int64_t i = 0; i < each * width; ++i) scaled[i] = from[i] * scale;
      const int64_t slots = (task.row * groups + task.group) * capacity;
      piece(scaled, k + slots * width, v + slots * width, key_scales ? key_scales + slots : nullptr,
            value_scales ? value_scales + slots : nullptr, room.data(), &partial->highest[t * each], &partial->total[t * each],
            &partial->mixed[t * each * width], each, width, capacity, task.first, task.last);
    }
  };
  auto finish = [=] {
    for (size_t t = 0; t < tasks->size();) {
      size_t end = t;
      while (end < tasks->size() && (*tasks)[end].row == (*tasks)[t].row && (*tasks)[end].group == (*tasks)[t].group) ++end;
      for (int64_t g = 0; g < each; ++g) {
        float most = partial->highest[t * each + g], total = 0;
        for (size_t p = t; p < end; ++p) most = std::max(most, partial->highest[p * each + g]);
        float* result = to + ((*tasks)[t].row * heads + (*tasks)[t].group * each + g) * width;
        std::fill(result, result + width, 0.0f);
        for (size_t p = t; p < end; ++p) {
          const float share = std::exp(partial->highest[p * each + g] - most);
          total += partial->total[p * each + g] * share;
          const float* mixed = &partial->mixed[(p * each + g) * width];
          for (int64_t h = 0; h < width; ++h) result[h] += mixed[h] * share;
        }
        for (int64_t h = 0; h < width; ++h) result[h] /= total;
      }
      t = end;
    }
  };
  // all at once where it is little
  const int64_t count = (int64_t)tasks->size(), alone = SLOTS_PIECE * 4 / std::max<int64_t>(1, std::min(longest, SLOTS_PIECE));
  return in_parallel(pool, count, count <= alone ? count : 1, work, finish);
}

template <ffi::DataType TYPE>
ffi::Future attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> queries, ffi::Buffer<TYPE> keys, ffi::Buffer<TYPE> values,
                   ffi::Buffer<ffi::S32> positions, ffi::ResultBuffer<ffi::F32> out) {
  return attend_over<TYPE>(pool, queries, keys, values, positions, out, nullptr, nullptr);
}

ffi::Future attend_scaled(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> queries, ffi::Buffer<ffi::S8> keys,
                          ffi::Buffer<ffi::S8> values, ffi::Buffer<ffi::S32> positions,
                          ffi::Buffer<ffi::F32> key_scales, ffi::Buffer<ffi::F32> value_scales,
                          ffi::ResultBuffer<ffi::F32> out) {
  auto ks = keys.dimensions();
  if (ks.size() != 4 || (int64_t)key_scales.element_count() != ks[0] * ks[1] * ks[3] ||
      value_scales.element_count() != key_scales.element_count())
    return failed("scales of a cache must be [B, K, 1, S] and [B, K, S, 1]");
  return attend_over<ffi::S8>(pool, queries, keys, values, positions, out, key_scales.typed_data(),
                              value_scales.typed_data());
}

ffi::Future norm(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> weight, ffi::ResultBuffer<ffi::F32> y,
                 float eps) {
  auto xs = x.dimensions();
  const int64_t width = weight.element_count();
  if (xs.size() != 2 || xs[1] != width) return failed("shapes of a norm must be [rows, width], [width]");
  if (!xs[0] || !width) return finished();
  const float *from = x.typed_data(), *w = weight.typed_data();
  float* to = y->typed_data();
  auto* run = chosen.load()->norm;
  return in_parallel(pool, xs[0], std::max<int64_t>(1, (1 << 14) / width), [=](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) run(from + r * width, w, to + r * width, width, eps);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxrt_matmul_float32, float_matmul<ffi::F32>,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxrt_matmul_bfloat16, float_matmul<ffi::BF16>,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::Buffer<ffi::BF16>>().Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxrt_matmul_packed, packed_matmul,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::Buffer<ffi::U8>>().Ret<ffi::Buffer<ffi::F32>>().Attr<int64_t>("format"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxrt_attend_float32, attend<ffi::F32>,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::Buffer<ffi::S32>>().Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxrt_attend_bfloat16, attend<ffi::BF16>,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::Buffer<ffi::BF16>>().Arg<ffi::Buffer<ffi::BF16>>().Arg<ffi::Buffer<ffi::S32>>().Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxrt_attend_int8, attend_scaled,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::Buffer<ffi::S8>>().Arg<ffi::Buffer<ffi::S8>>().Arg<ffi::Buffer<ffi::S32>>().Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxrt_norm, norm,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>().Attr<float>("eps"));

// The instruction set in use, by name; and choosing another that runs here, by name, for tests. 0 when it does not.
extern "C" const char* jaxrt_instruction_set() { return chosen.load()->name; }
extern "C" const char* jaxrt_sources() { return JAXRT_SOURCES; }
extern "C" int jaxrt_choose(const char* name) {
  for (const Kernels* each : known)
    if (runs_here(each) && !std::strcmp(each->name, name)) {
      chosen.store(each);
      return 1;
    }
  return 0;
}
