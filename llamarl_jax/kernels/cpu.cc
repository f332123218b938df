// Two kernels of the decoder for CPUs, in float32, called from XLA programs through its foreign function interface.
//
// A decode step multiplies few rows (one for each slot) with every weight, so its time is that of reading the weights once. XLA runs a
// product with one row on one core, and copies the weights into panels for more rows; these kernels read each weight once, on all cores,
// and fetch the next block of weights from memory while the present one is in use.
//
// The result of a row does not depend on what else is computed with it: with fewer than kLeastPackedRows rows every sum is made in one
// order, with that many and more in another one, and `multiply_add` rounds once or twice alike in all of them. Compilers must not choose
// (-ffp-contract=off): GCC for AMD's Zen fuses products and sums in a loop with several sums, and not in one with a single sum.
//
// Vectors are the compilers' own (GCC, Clang), as wide as the machine's registers; only `multiply_add` is specific to a processor.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// The tile's sums, its weights and one value of x fill the vector registers: 32 of AVX-512 and ARM, 16 of AVX2 and SSE.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kTileRows = 4, kTileOutputs = 6, kPackedOutputs = 12, kOneVecOutputs = 6;
#elif defined(__AVX__)
constexpr int kLanes = 8, kTileRows = 2, kTileOutputs = 6, kPackedOutputs = 6, kOneVecOutputs = 12;
#elif defined(__ARM_NEON)
constexpr int kLanes = 4, kTileRows = 4, kTileOutputs = 6, kPackedOutputs = 12, kOneVecOutputs = 12;
#else
constexpr int kLanes = 4, kTileRows = 2, kTileOutputs = 4, kPackedOutputs = 6, kOneVecOutputs = 12;
#endif
constexpr int kMaxTileRows = 4;
constexpr int64_t kTaskOutputs = 48;
constexpr int64_t kBlockInputs = 768;     // inputs of 64 rows that are read again for each tile of outputs stay in the second-level cache
constexpr int kPackedVecs = 2;
constexpr int64_t kStreams = 4;           // rows of weights that a single row of x is multiplied with at once
constexpr int64_t kLeastPackedRows = std::max(8, kLanes);
constexpr int kLine = 16;                 // numbers in a cache line
constexpr int64_t kBlockRows = 64;  // rows of x that are read again and again, so they should stay in the second-level cache
constexpr int kHeadVecs = 4;        // vectors of a head that are summed at once

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef float UnalignedVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

#if defined(__clang__) || __GNUC__ >= 12
#define LLAMARL_PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define LLAMARL_PICK(a, b, ...) __builtin_shuffle(a, b, IntVec{__VA_ARGS__})
#endif

inline Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<UnalignedVec*>(p) = v; }
template <size_t... L> inline Vec splat_lanes(float x, std::index_sequence<L...>) { return Vec{(static_cast<void>(L), x)...}; }
inline Vec splat(float x) { return splat_lanes(x, std::make_index_sequence<kLanes>()); }  // `Vec{} + x` would be an addition
inline Vec multiply_add(Vec a, Vec b, Vec c) {  // a · b + c
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__) && defined(__AVX__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}
inline Vec greater(Vec a, Vec b) { return a > b ? a : b; }

// Adds each lane of `a` to the one at distance S, keeps the sums in the lanes whose bit S is clear, and those of `b` in the others.
template <int S, size_t... L> inline Vec fold_lanes(Vec a, Vec b, std::index_sequence<L...>) {
  return LLAMARL_PICK(a, b, (L & S ? kLanes + (L ^ S) : L)...) + LLAMARL_PICK(a, b, (L & S ? kLanes + L : L ^ S)...);
}
template <int S> inline Vec fold(Vec a, Vec b) { return fold_lanes<S>(a, b, std::make_index_sequence<kLanes>()); }

// Adds the lanes of a vector in the order in which `fold` adds them.
template <int S = kLanes / 2> inline float sum_lanes(Vec v) {
  if constexpr (S == 0) return v[0];
  else return sum_lanes<S / 2>(fold<S>(v, v));
}

// Runs body(0) … body(count − 1) on the threads that XLA has, this one included, which takes what no other one takes. Each thread that
// finds something to do calls prepare() before.
template <typename Prepare, typename Body>
void parallel_for(ffi::ThreadPool& pool, int64_t count, const Prepare& prepare, const Body& body) {
  struct Progress {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto progress = std::make_shared<Progress>();  // a thread may come to its task when all is done and this call is over
  auto work = [progress, &prepare, &body, count] {
    int64_t i = progress->next.fetch_add(1);
    if (i < count) prepare();
    for (; i < count; i = progress->next.fetch_add(1)) {
      body(i);
      progress->done.fetch_add(1);
    }
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([work] { work(); });
  work();
  while (progress->done.load() < count) std::this_thread::yield();
}

// y[r, o] = Σ_i x[r, i] · w[o, i] for R rows and O outputs; meanwhile P cache lines a step are fetched from `ahead` on.
template <int R, int O, int P>
inline __attribute__((always_inline)) void tile(const float* x, const float* w, float* y, int64_t in, int64_t stride, const float* ahead) {
  Vec sums[R][O] = {};
  for (int64_t i = 0; i < in; i += kLanes) {
    Vec weights[O];
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) weights[o] = load(w + o * in + i);
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) __builtin_prefetch(ahead + P * i + p * kLanes, 0, 2);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec value = load(x + r * in + i);
#pragma GCC unroll 8
      for (int o = 0; o < O; ++o) sums[r][o] = multiply_add(value, weights[o], sums[r][o]);
    }
  }
  if constexpr (kLanes == 16 && R == 4 && O == 6) {  // two rows at once: half the work of adding up 12 vectors one by one
#pragma GCC unroll 2
    for (int r = 0; r < R; r += 2) {
      Vec half[O];
#pragma GCC unroll 8
      for (int o = 0; o < O; ++o) half[o] = fold<8>(sums[r][o], sums[r + 1][o]);
      const Vec outputs04 = fold<4>(half[0], half[4]), outputs15 = fold<4>(half[1], half[5]);
      const Vec outputs2 = fold<4>(half[2], half[2]), outputs3 = fold<4>(half[3], half[3]);
      float all[kLanes];
      store(all, fold<1>(fold<2>(outputs04, outputs2), fold<2>(outputs15, outputs3)));
      std::memcpy(y + r * stride, all, O * sizeof(float));
      std::memcpy(y + (r + 1) * stride, all + 8, O * sizeof(float));
    }
  } else if constexpr (kLanes == 8 && R == 2 && O == 6) {  // the same with vectors of half the size
    Vec half[O];
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) half[o] = fold<4>(sums[0][o], sums[1][o]);
    float first[kLanes], last[kLanes];
    store(first, fold<1>(fold<2>(half[0], half[2]), fold<2>(half[1], half[3])));
    store(last, fold<1>(fold<2>(half[4], half[4]), fold<2>(half[5], half[5])));
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
      std::memcpy(y + r * stride, first + 4 * r, 4 * sizeof(float));
      std::memcpy(y + r * stride + 4, last + 4 * r, 2 * sizeof(float));
    }
  } else {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int o = 0; o < O; ++o) y[r * stride + o] = sum_lanes(sums[r][o]);
  }
}

template <int R, int P = 0>
inline void tile_outputs(const float* x, const float* w, float* y, int64_t in, int64_t outputs, int64_t stride, const float* ahead) {
  if (outputs == kTileOutputs) return tile<R, kTileOutputs, P>(x, w, y, in, stride, ahead);
  for (int64_t o = 0; o < outputs; ++o) tile<R, 1, 0>(x, w + o * in, y + o, in, stride, ahead);
}

// The weights of the next outputs lie right behind these. Each tile of rows fetches P rows of them, until they are there: what is fetched
// further ahead takes the place of rows of x.
template <int P> void product_ahead(const float* x, const float* w, float* y, int64_t rows, int64_t in, int64_t outputs, int64_t stride) {
  for (int64_t o = 0; o < outputs; o += kTileOutputs) {
    const int64_t n = std::min<int64_t>(kTileOutputs, outputs - o);
    const float *weights = w + o * in, *ahead = weights + kTileOutputs * in, *end = ahead + kTileOutputs * in;
    int64_t r = 0;
    for (; r + kTileRows <= rows && ahead < end; r += kTileRows, ahead += P * in)
      tile_outputs<kTileRows, P>(x + r * in, weights, y + r * stride + o, in, n, stride, ahead);
    for (; r + kTileRows <= rows; r += kTileRows) tile_outputs<kTileRows>(x + r * in, weights, y + r * stride + o, in, n, stride, ahead);
    const float* rest = x + r * in;
    float* out = y + r * stride + o;
    static_assert(kTileRows <= kMaxTileRows);
    const auto last = [&](auto outputs) { outputs(rest, weights, out, in, n, stride, ahead); };
    const bool is_all = r == 0;
    switch (rows - r) {
      case 3: is_all ? last(tile_outputs<3, kTileOutputs>) : last(tile_outputs<3>); break;
      case 2: is_all ? last(tile_outputs<2, kTileOutputs>) : last(tile_outputs<2>); break;
      case 1: is_all ? last(tile_outputs<1, kTileOutputs>) : last(tile_outputs<1>); break;
      default: break;
    }
  }
}

void product(const float* x, const float* w, float* y, int64_t rows, int64_t in, int64_t outputs, int64_t stride) {
  const int64_t tiles = rows / kTileRows;  // that share the fetching of kTileOutputs rows of weights
  if (tiles < 2) product_ahead<kTileOutputs>(x, w, y, rows, in, outputs, stride);
  else if (tiles < 3) product_ahead<3>(x, w, y, rows, in, outputs, stride);
  else if (tiles < 6) product_ahead<2>(x, w, y, rows, in, outputs, stride);
  else product_ahead<1>(x, w, y, rows, in, outputs, stride);
}

// Products with many rows. The dot products above keep numbers of one row in a vector; here a vector has one number of each of kLanes rows.
// So a weight is read once for all of them, nothing is added up across lanes at the end, and from the second-level cache come a third of the
// bytes. The price is that x is transposed first, by each thread for itself.

// Transposes a square of kLanes × kLanes numbers.
template <int S, size_t... L> inline void exchange(Vec& a, Vec& b, std::index_sequence<L...>) {
  const Vec first = LLAMARL_PICK(a, b, (L & S ? kLanes + (L ^ S) : L)...);
  b = LLAMARL_PICK(a, b, (L & S ? kLanes + L : L ^ S)...);
  a = first;
}
template <int S = kLanes / 2> inline void transpose(Vec (&square)[kLanes]) {
  if constexpr (S > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i)
      if (!(i & S)) exchange<S>(square[i], square[i | S], std::make_index_sequence<kLanes>());
    transpose<S / 2>(square);
  }
}

// x [rows, in] → groups of `most` vectors of rows, the last one of a single vector if that will do; in each group [in, its rows], with 0 for
// rows that are not there.
void pack(const float* x, float* packed, int64_t rows, int64_t in, int64_t most) {
  for (int64_t first = 0; first < rows; first += kLanes) {
    const int64_t group = first / (most * kLanes) * (most * kLanes), width = rows - group <= kLanes ? kLanes : most * kLanes;
    float* to = packed + group * in + first - group;
    for (int64_t i = 0; i < in; i += kLanes) {
      Vec square[kLanes];
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) square[r] = first + r < rows ? load(x + (first + r) * in + i) : Vec{};
      transpose(square);
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) store(to + (i + r) * width, square[r]);
    }
  }
}

// sums[o, :] += Σ_i packed[i, :] · w[o, i] for O outputs, V vectors of rows and `count` inputs; P cache lines a step are fetched from `ahead` on.
template <int V, int O, int P>
inline __attribute__((always_inline)) void packed_tile(const float* packed, const float* w, float* sums, int64_t in, int64_t count, const float* ahead) {
  Vec totals[O][V];
#pragma GCC unroll 12
  for (int o = 0; o < O; ++o)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) totals[o][v] = load(sums + (o * V + v) * kLanes);
  for (int64_t i = 0; i < count; i += kLanes) {
#pragma GCC unroll 12
    for (int p = 0; p < P; ++p) __builtin_prefetch(ahead + (i / kLanes * P + p) * kLine, 0, 2);
#pragma GCC unroll 16
    for (int l = 0; l < kLanes; ++l) {
      Vec values[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) values[v] = load(packed + ((i + l) * V + v) * kLanes);
#pragma GCC unroll 12
      for (int o = 0; o < O; ++o) {
        const Vec weight = splat(w[o * in + i + l]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) totals[o][v] = multiply_add(values[v], weight, totals[o][v]);
      }
    }
  }
#pragma GCC unroll 12
  for (int o = 0; o < O; ++o)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(sums + (o * V + v) * kLanes, totals[o][v]);
}

template <int V, int O, int P>
inline void packed_outputs(const float* packed, const float* w, float* sums, int64_t in, int64_t count, int64_t outputs, const float* ahead) {
  if (outputs >= O) return packed_tile<V, O, P>(packed, w, sums, in, count, ahead);
  for (int64_t o = 0; o < outputs; ++o) packed_tile<V, 1, 0>(packed, w + o * in, sums + o * V * kLanes, in, count, ahead);
}

// y[r, o] = Σ_i x[r, i] · w[o, i] for at most kBlockRows rows, packed in groups of V vectors, and at most kTaskOutputs outputs.
template <int V, int O> void packed_product(const float* packed, const float* w, float* y, int64_t rows, int64_t in, int64_t outputs, int64_t stride) {
  constexpr int64_t kGroup = V * kLanes;
  constexpr int kFetched = O * kLanes / kLine;  // of the next outputs' weights, while O · kLanes of these are used
  alignas(64) float sums[(kBlockRows + kGroup - 1) / kGroup * kGroup * kTaskOutputs] = {};
  for (int64_t i = 0; i < in; i += kBlockInputs) {
    const int64_t count = std::min(kBlockInputs, in - i);
    for (int64_t o = 0; o < outputs; o += O) {
      const float *weights = w + o * in + i, *ahead = weights + O * in;
      for (int64_t first = 0; first < rows; first += kGroup) {
        const bool is_one = rows - first <= kLanes;
        const int64_t width = is_one ? kLanes : kGroup;
        const float* group = packed + first * in + i * width;
        float* to = sums + first * kTaskOutputs + o * width;
        if (is_one && V > 1) packed_outputs<1, O, 0>(group, weights, to, in, count, outputs - o, ahead);
        else if (first == 0) packed_outputs<V, O, kFetched>(group, weights, to, in, count, outputs - o, ahead);
        else packed_outputs<V, O, 0>(group, weights, to, in, count, outputs - o, ahead);
      }
    }
  }
  for (int64_t r = 0; r < rows; r += kLanes) {
    const int64_t first = r / kGroup * kGroup, width = rows - first <= kLanes ? kLanes : kGroup, n = std::min<int64_t>(kLanes, rows - r);
    for (int64_t o = 0; o < outputs; o += kLanes) {
      Vec square[kLanes];
#pragma GCC unroll 16
      for (int l = 0; l < kLanes; ++l) square[l] = load(sums + first * kTaskOutputs + (o + l) * width + r - first);
      transpose(square);
      for (int64_t l = 0; l < n; ++l)
        std::memcpy(y + (r + l) * stride + o, &square[l], std::min<int64_t>(kLanes, outputs - o) * sizeof(float));
    }
  }
}

// e^x for x ≤ 0, to about 1 unit in the last place: 2^n · e^r with |r| ≤ ln 2 / 2 and the polynomial of Cephes' expf
// (netlib.org/cephes); below −87, where the result is no longer a normal number, 0.
inline Vec exp_of_negative(Vec x) {
  const Vec clamped = greater(x, splat(-87.0f));
  const Vec shifted = multiply_add(clamped, splat(1.44269504088896341f), splat(12582912.0f));  // 1.5 · 2^23: the sum's lowest bits are the rounded product
  const Vec n = shifted - 12582912.0f;
  const Vec r = multiply_add(n, splat(2.12194440e-4f), multiply_add(n, splat(-0.693359375f), clamped));
  Vec p = splat(1.9875691500e-4f);
  for (const float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = multiply_add(p, r, splat(coefficient));
  p = multiply_add(p, r * r, r) + 1.0f;
  const IntVec power = (__builtin_convertvector(n, IntVec) + 127) << 23;
  Vec scale;
  std::memcpy(&scale, &power, sizeof(scale));
  const Vec result = p * scale;
  return x < splat(-87.0f) ? Vec{} : result;
}

// Makes softmax numerators of `count` scores in place and returns their sum; `scores` has room for whole vectors.
float exponentials(float* scores, int64_t count, float factor) {
  float peak = scores[0];
  for (int64_t c = 1; c < count; ++c) peak = std::max(peak, scores[c]);
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  for (int64_t c = count; c < padded; ++c) scores[c] = -1e30f;
  Vec total{};
  for (int64_t c = 0; c < padded; c += kLanes) {
    const Vec e = exp_of_negative((load(scores + c) - peak) * factor);
    store(scores + c, e);
    total += e;
  }
  return sum_lanes(total);
}

// out[g, :] = (first[g, :] + Σ_c weights[g, c] · values[c, :]) / totals[g] for G queries and N vectors of the head.
template <int G, int N>
void mix(const float* weights, int64_t stride, const float* values, int64_t count, int64_t dim, const float* first, const float* totals, float* out) {
  Vec sums[G][N];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[g][n] = first ? load(first + g * dim + n * kLanes) : Vec{};
  for (int64_t c = 0; c < count; ++c) {
    Vec row[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) row[n] = load(values + c * dim + n * kLanes);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[g][n] = multiply_add(splat(weights[g * stride + c]), row[n], sums[g][n]);
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(out + g * dim + n * kLanes, totals ? sums[g][n] / totals[g] : sums[g][n]);
}

template <int N> void mix_vectors(int64_t queries, const float* weights, int64_t stride, const float* values, int64_t count, int64_t dim,
                                  const float* first, const float* totals, float* out) {
  int64_t g = 0;
  const auto some = [&](auto mix) {
    mix(weights + g * stride, stride, values, count, dim, first ? first + g * dim : nullptr, totals ? totals + g : nullptr, out + g * dim);
  };
  for (; g + kMaxTileRows <= queries; g += kMaxTileRows) some(mix<kMaxTileRows, N>);
  switch (queries - g) {
    case 3: some(mix<3, N>); break;
    case 2: some(mix<2, N>); break;
    case 1: some(mix<1, N>); break;
    default: break;
  }
}

void mix_queries(int64_t queries, const float* weights, int64_t stride, const float* values, int64_t count, int64_t dim, const float* first,
                 const float* totals, float* out) {
  int64_t d = 0;
  const auto part = [&](auto mix) { mix(queries, weights, stride, values + d, count, dim, first ? first + d : nullptr, totals, out + d); };
  for (; d + kHeadVecs * kLanes <= dim; d += kHeadVecs * kLanes) part(mix_vectors<kHeadVecs>);
  for (; d < dim; d += kLanes) part(mix_vectors<1>);
}

// One key-value head of a cache: `count` keys and values behind each other.
struct Head {
  const float *keys, *values;
  int64_t count;
};

// All query heads that read one key-value head of a prompt, those of each slot in a group of their own, with what each slot has of its own.
// The more queries read it, the more a cache's bytes are worth.
void attend(const float* const* queries, const Head* own, int64_t slots, int64_t group, Head prompt, int64_t dim, float factor, float* const* out) {
  thread_local std::vector<float> scratch;
  int64_t longest = 0;
  for (int64_t s = 0; s < slots; ++s) longest = std::max(longest, own[s].count);
  const int64_t rows = slots * group, stride = (prompt.count + longest + kLanes - 1) / kLanes * kLanes;
  scratch.resize(rows * (stride + 2 * dim + 1));
  float *scores = scratch.data(), *gathered = scores + rows * stride, *mixed = gathered + rows * dim, *totals = mixed + rows * dim;
  for (int64_t s = 0; s < slots; ++s) std::memcpy(gathered + s * group * dim, queries[s], group * dim * sizeof(float));
  for (int64_t r = 0; r < rows; r += kBlockRows)
    product(gathered + r * dim, prompt.keys, scores + r * stride, std::min(kBlockRows, rows - r), dim, prompt.count, stride);
  for (int64_t s = 0; s < slots; ++s) {
    float* of_slot = scores + s * group * stride;
    product(queries[s], own[s].keys, of_slot + prompt.count, group, dim, own[s].count, stride);
    for (int64_t g = 0; g < group; ++g) totals[s * group + g] = exponentials(of_slot + g * stride, prompt.count + own[s].count, factor);
  }
  mix_queries(rows, scores, stride, prompt.values, prompt.count, dim, nullptr, nullptr, mixed);
  for (int64_t s = 0; s < slots; ++s)
    mix_queries(group, scores + s * group * stride + prompt.count, stride, own[s].values, own[s].count, dim, mixed + s * group * dim,
                totals + s * group, out[s]);
}

using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;
using F32Result = ffi::Result<F32>;

template <typename Prepare, typename Body>
void for_outputs(ffi::ThreadPool& pool, int64_t outputs, const Prepare& prepare, const Body& body) {
  parallel_for(pool, (outputs + kTaskOutputs - 1) / kTaskOutputs, prepare, [&](int64_t task) {
    body(task * kTaskOutputs, std::min(kTaskOutputs, outputs - task * kTaskOutputs));
  });
}

// y[o] = Σ_i x[i] · w[o, i] for one row, in the order of `tile`. The weights are read as kStreams streams, each from one row right on to the
// next, which processors fetch ahead by themselves; the short rows of a tile begin a stream anew each time, and take 1.2 to 1.5 times as long.
void one_row(const float* x, const float* w, float* y, int64_t in, int64_t outputs) {
  const int64_t each = outputs / kStreams;
  for (int64_t o = 0; o < each; ++o) {
    const float* weights = w + o * in;
    Vec sums[kStreams] = {};
    for (int64_t i = 0; i < in; i += kLanes) {
      const Vec value = load(x + i);
#pragma GCC unroll 4
      for (int64_t s = 0; s < kStreams; ++s) sums[s] = multiply_add(value, load(weights + s * each * in + i), sums[s]);
    }
#pragma GCC unroll 4
    for (int64_t s = 0; s < kStreams; ++s) y[s * each + o] = sum_lanes(sums[s]);
  }
  for (int64_t o = each * kStreams; o < outputs; ++o) tile<1, 1, 0>(x, w + o * in, y + o, in, 0, nullptr);
}

void linear_by_dots(ffi::ThreadPool& pool, const float* x, const float* w, float* y, int64_t rows, int64_t in, int64_t outputs) {
  for_outputs(pool, outputs, [] {}, [&](int64_t o, int64_t n) {
    rows == 1 ? one_row(x, w + o * in, y + o, in, n) : product(x, w + o * in, y + o, rows, in, n, outputs);
  });
}

// Room for the packed rows of a block, at the start of a cache line. A function, so that each thread makes its own at first use.
float* packed_rows(int64_t in) {
  thread_local std::vector<float> room;
  room.resize((kBlockRows + kPackedVecs * kLanes) * in + kLine);
  return room.data() + (-reinterpret_cast<uintptr_t>(room.data()) % 64) / sizeof(float);
}

void linear_by_rows(ffi::ThreadPool& pool, const float* x, const float* w, float* y, int64_t all, int64_t in, int64_t outputs) {
  for (int64_t r = 0; r < all; r += kBlockRows) {
    const int64_t rows = std::min(kBlockRows, all - r);
    const bool is_one = rows <= kLanes;
    const auto prepare = [&] { pack(x + r * in, packed_rows(in), rows, in, is_one ? 1 : kPackedVecs); };
    for_outputs(pool, outputs, prepare, [&](int64_t o, int64_t n) {
      const auto block = is_one ? packed_product<1, kOneVecOutputs> : packed_product<kPackedVecs, kPackedOutputs>;
      block(packed_rows(in), w + o * in, y + r * outputs + o, rows, in, n, outputs);
    });
  }
}

// x [B, I], kernel [O, I] → y [B, O].
ffi::Error linear(ffi::ThreadPool pool, F32 x, F32 kernel, F32Result y) {
  const int64_t rows = x.dimensions()[0], in = x.dimensions()[1], outputs = kernel.dimensions()[0];
  if (in % kLanes || kernel.dimensions()[1] != in) return ffi::Error::InvalidArgument("llamarl_linear: inputs are not whole vectors");
  // How a row is summed follows from the number of all rows, so that it is the same in every block.
  rows < kLeastPackedRows ? linear_by_dots(pool, x.typed_data(), kernel.typed_data(), y->typed_data(), rows, in, outputs)
                          : linear_by_rows(pool, x.typed_data(), kernel.typed_data(), y->typed_data(), rows, in, outputs);
  return ffi::Error::Success();
}

// queries [S, K, G, Q], keys and values of this token [S, K, Q], own caches [S, K, C, Q], prompts [R, K, P, Q], positions in the own caches
// [S], lengths of the prompts [R], their members [R, M] → mixed [S, K, G, Q], and the own caches, which are written in place.
ffi::Error decode_attention(ffi::ThreadPool pool, F32 queries, F32 new_keys, F32 new_values, F32, F32, F32 prompt_keys, F32 prompt_values,
                            S32 positions, S32 lengths, S32 members, F32Result mixed, F32Result keys, F32Result values) {
  const auto sizes = queries.dimensions();
  const int64_t slots = sizes[0], heads = sizes[1], group = sizes[2], dim = sizes[3], length = keys->dimensions()[2];
  const int64_t prompts = prompt_keys.dimensions()[0], most = members.dimensions()[1], prompt_length = prompt_keys.dimensions()[2];
  if (dim % kLanes) return ffi::Error::InvalidArgument("llamarl_decode_attention: heads are not whole vectors");
  const float factor = 1.0f / std::sqrt(static_cast<float>(dim));
  std::memset(mixed->typed_data(), 0, mixed->size_bytes());
  parallel_for(pool, prompts * heads, [] {}, [&](int64_t task) {
    thread_local std::vector<const float*> read;
    thread_local std::vector<float*> written;
    thread_local std::vector<Head> own;
    read.clear(), written.clear(), own.clear();
    const int64_t prompt = task / heads, head = task % heads;
    for (int64_t m = 0; m < most; ++m) {
      const int64_t slot = members.typed_data()[prompt * most + m], at = slot * heads + head;
      if (slot < 0 || slot >= slots) continue;
      // As XLA's dynamic_update_slice does, a position outside of the cache is moved to its end.
      const int64_t position = std::clamp<int64_t>(positions.typed_data()[slot], 0, length - 1);
      float *k = keys->typed_data() + at * length * dim, *v = values->typed_data() + at * length * dim;
      std::memcpy(k + position * dim, new_keys.typed_data() + at * dim, dim * sizeof(float));
      std::memcpy(v + position * dim, new_values.typed_data() + at * dim, dim * sizeof(float));
      read.push_back(queries.typed_data() + at * group * dim);
      written.push_back(mixed->typed_data() + at * group * dim);
      own.push_back({k, v, position + 1});
    }
    const int64_t offset = task * prompt_length * dim, count = std::clamp<int64_t>(lengths.typed_data()[prompt], 0, prompt_length);
    const Head shared{prompt_keys.typed_data() + offset, prompt_values.typed_data() + offset, count};
    if (!own.empty()) attend(read.data(), own.data(), own.size(), group, shared, dim, factor, written.data());
  });
  return ffi::Error::Success();
}

}  // namespace

extern "C" int llamarl_lanes() { return kLanes; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(llamarl_linear, linear, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(llamarl_decode_attention, decode_attention,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>()
                                  .Arg<S32>().Arg<S32>().Arg<S32>().Ret<F32>().Ret<F32>().Ret<F32>());
