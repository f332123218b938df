// Kernels of the decoder for CPUs, in float32, called from XLA programs through its foreign function interface.
//
// A decode step multiplies few rows (one for each slot) with every weight, so its time is that of reading the weights once. XLA runs a
// product with one row on one core, and copies the weights into panels for more rows; these kernels read each weight once, on all cores,
// in the order in which memory gives them fastest, and fetch what comes next while they compute.
//
// The result of a row does not depend on what else is computed with it: alone, every sum is made in one order, with other rows in another
// one, and `multiply_add` rounds once or twice alike in all of them. Compilers must not choose (-ffp-contract=off): GCC for AMD's Zen fuses
// products and sums in a loop with several sums, and not in one with a single sum.
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

// Outputs of a tile of two vectors of rows and of one: its sums, its weights and its values of x have room in the vector registers, 32 of
// AVX-512 and ARM, 16 of AVX2 and SSE.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kPackedOutputs = 8, kOneVecOutputs = 8;
#elif defined(__AVX__)
constexpr int kLanes = 8, kPackedOutputs = 6, kOneVecOutputs = 12;
#elif defined(__ARM_NEON)
constexpr int kLanes = 4, kPackedOutputs = 12, kOneVecOutputs = 12;
#else
constexpr int kLanes = 4, kPackedOutputs = 6, kOneVecOutputs = 12;
#endif
constexpr int kPackedVecs = 2;
constexpr int kMostRows = 4, kHeadVecs = 4;  // of attention: queries at once, vectors of a head that are mixed at once
constexpr int64_t kOneRowOutputs = 4;        // rows of weights that a single row of x is multiplied with at once
constexpr int64_t kLeastOutputs = 24, kMostOutputs = 96;    // of a part of a product: whole tiles of each kind
constexpr int64_t kPartsPerThread = 4, kLeastPart = 8'192;  // numbers in a part of what is computed row by row
constexpr int64_t kBlockRows = 64, kBlockInputs = 768;      // this much of x is read again for each tile: it should stay in the second-level cache
constexpr int64_t kLine = 16;                               // numbers in a cache line

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

// Adds the lanes of each vector: the result's lane n is the sum of vectors[n].
template <int S = kLanes / 2> inline Vec sum_each(Vec (&vectors)[kLanes]) {
  if constexpr (S == 0) return vectors[0];
#pragma GCC unroll 8
  for (int n = 0; n < S; ++n) vectors[n] = fold<S>(vectors[n], vectors[n + S]);
  if constexpr (S > 0) return sum_each<S / 2>(vectors);
}

// Adds the lanes of a vector in the same order.
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

// y[r, o] = Σ_i x[r, i] · w[o, i] for R rows and O outputs, no more than there are lanes; meanwhile as much is fetched from `ahead` on.
template <int R, int O>
inline __attribute__((always_inline)) void tile(const float* x, const float* w, float* y, int64_t in, int64_t stride, const float* ahead) {
  static_assert(R * O <= kLanes);
  Vec sums[kLanes] = {};
  for (int64_t i = 0; i < in; i += kLanes) {
    Vec weights[O];
#pragma GCC unroll 16
    for (int o = 0; o < O; ++o) weights[o] = load(w + o * in + i);
#pragma GCC unroll 16
    for (int o = 0; o < O; ++o) __builtin_prefetch(ahead + o * in + i, 0, 2);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec value = load(x + r * in + i);
#pragma GCC unroll 16
      for (int o = 0; o < O; ++o) sums[r * O + o] = multiply_add(value, weights[o], sums[r * O + o]);
    }
  }
  float all[kLanes];
  store(all, sum_each(sums));
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) std::memcpy(y + r * stride, all + r * O, O * sizeof(float));
}

// y[r, o] = Σ_i x[r, i] · w[o, i] for R rows that are short, as those of a head.
template <int R> void dot_products_of(const float* x, const float* w, float* y, int64_t in, int64_t outputs, int64_t stride, const float* ahead) {
  constexpr int kOutputs = kLanes / R;
  int64_t o = 0;
  for (; o + kOutputs <= outputs; o += kOutputs) tile<R, kOutputs>(x, w + o * in, y + o, in, stride, ahead + o * in);
  for (; o < outputs; ++o) tile<R, 1>(x, w + o * in, y + o, in, stride, ahead + o * in);
}

void dot_products(const float* x, const float* w, float* y, int64_t rows, int64_t in, int64_t outputs, int64_t stride, const float* ahead) {
  int64_t r = 0;
  const auto some = [&](auto of_rows) { of_rows(x + r * in, w, y + r * stride, in, outputs, stride, ahead); };
  for (; r + kMostRows <= rows; r += kMostRows) some(dot_products_of<kMostRows>);
  switch (rows - r) {
    case 3: some(dot_products_of<3>); break;
    case 2: some(dot_products_of<2>); break;
    case 1: some(dot_products_of<1>); break;
    default: break;
  }
}

// Products with several rows. The dot products above keep numbers of one row in a vector; here a vector has one number of each of kLanes
// rows. So a weight is read once for all of them, nothing is added up across lanes at the end, and from the second-level cache come a third
// of the bytes. The price is that x is transposed first, by each thread for itself.

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

// sums[o, :] += Σ_i packed[i, :] · w[o, i] for V vectors of rows, `count` inputs and O outputs that lie `between` rows of weights apart;
// meanwhile as many numbers of P rows, `ahead` and those that lie as far apart, are fetched from memory.
template <int V, int O, int P>
inline __attribute__((always_inline)) void packed_tile(const float* packed, const float* w, float* sums, int64_t in, int64_t between,
                                                       int64_t count, const float* ahead) {
  Vec totals[O][V];
#pragma GCC unroll 12
  for (int o = 0; o < O; ++o)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) totals[o][v] = load(sums + (o * between * V + v) * kLanes);
  for (int64_t i = 0; i < count; i += kLanes) {
#pragma GCC unroll 12
    for (int p = 0; p < P; ++p) __builtin_prefetch(ahead + p * between * in + i, 0, 2);
#pragma GCC unroll 16
    for (int l = 0; l < kLanes; ++l) {
      Vec values[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) values[v] = load(packed + ((i + l) * V + v) * kLanes);
#pragma GCC unroll 12
      for (int o = 0; o < O; ++o) {
        const Vec weight = splat(w[o * between * in + i + l]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) totals[o][v] = multiply_add(values[v], weight, totals[o][v]);
      }
    }
  }
#pragma GCC unroll 12
  for (int o = 0; o < O; ++o)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(sums + (o * between * V + v) * kLanes, totals[o][v]);
}

// The tile of one group of rows, of several that are multiplied with the same weights. The first two share the fetching of the rows that
// follow these: a processor waits for 10 to 16 lines at once, and a single group would ask for more of them than arrive in its time.
template <int V, int O>
inline void group_tile(const float* packed, const float* w, float* sums, int64_t in, int64_t between, int64_t count, int64_t group, int64_t groups) {
  const float* next = w + in;
  if (groups == 1) return packed_tile<V, O, O>(packed, w, sums, in, between, count, next);
  if (group < 2) return packed_tile<V, O, O / 2>(packed, w, sums, in, between, count, next + group * (O / 2) * between * in);
  packed_tile<V, O, 0>(packed, w, sums, in, between, count, next);
}

// y[r, o] = Σ_i x[r, i] · w[o, i] for at most kBlockRows rows, packed in groups of V vectors, and at most kMostOutputs outputs.
//
// The weights are read as O streams, each through its own part of them from one row right on to the next. Processors fetch such streams ahead
// by themselves, with more requests under way than a program can have; the streams of O rows side by side would end after each tile.
template <int V, int O> void packed_product(const float* packed, const float* w, float* y, int64_t rows, int64_t in, int64_t outputs, int64_t stride) {
  constexpr int64_t kGroup = V * kLanes;
  alignas(64) float sums[(kBlockRows + kGroup - 1) / kGroup * kGroup * kMostOutputs] = {};
  const int64_t groups = (rows + kGroup - 1) / kGroup, each = outputs / O;
  for (int64_t i = 0; i < in; i += kBlockInputs) {
    const int64_t count = std::min(kBlockInputs, in - i);
    const auto all_groups = [&](auto of_vecs, auto of_one_vec, int64_t o, int64_t between) {
      for (int64_t g = 0; g < groups; ++g) {
        const bool is_one = rows - g * kGroup <= kLanes;
        const int64_t width = is_one ? kLanes : kGroup;
        (is_one ? of_one_vec : of_vecs)(packed + g * kGroup * in + i * width, w + o * in + i, sums + g * kGroup * kMostOutputs + o * width, in,
                                        between, count, g, groups);
      }
    };
    for (int64_t o = 0; o < each; ++o) all_groups(group_tile<V, O>, group_tile<1, O>, o, each);
    for (int64_t o = each * O; o < outputs; ++o) all_groups(group_tile<V, 1>, group_tile<1, 1>, o, 0);
  }
  for (int64_t r = 0; r < rows; r += kLanes) {
    const int64_t first = r / kGroup * kGroup, width = rows - first <= kLanes ? kLanes : kGroup, n = std::min<int64_t>(kLanes, rows - r);
    for (int64_t o = 0; o < outputs; o += kLanes) {
      Vec square[kLanes];
#pragma GCC unroll 16
      for (int l = 0; l < kLanes; ++l) square[l] = load(sums + first * kMostOutputs + (o + l) * width + r - first);
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

// out = silu(gate) · up, with e^−|gate|, so that nothing overflows.
inline Vec gated(Vec gate, Vec up) {
  const Vec e = exp_of_negative(-greater(gate, -gate)), one = splat(1.0f);
  return gate * (gate > Vec{} ? one : e) / (one + e) * up;
}

// Row of pairs [2 · size], in turns `block` gates and as many ups → out [size]; a block is a multiple of a vector.
void gate_blocks(const float* pairs, float* out, int64_t size, int64_t block) {
  for (int64_t first = 0; first < size; first += block)
    for (int64_t i = first; i < first + block; i += kLanes) store(out + i, gated(load(pairs + first + i), load(pairs + first + block + i)));
}

// The same with several blocks in a vector.
template <int B, size_t... L> void gate_small_blocks(const float* pairs, float* out, int64_t size, std::index_sequence<L...>) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec a = load(pairs + 2 * i), b = load(pairs + 2 * i + kLanes);
    store(out + i, gated(LLAMARL_PICK(a, b, (L / B * 2 * B + L % B)...), LLAMARL_PICK(a, b, (L / B * 2 * B + B + L % B)...)));
  }
}

void gate_row(const float* pairs, float* out, int64_t size, int64_t block) {
  constexpr auto lanes = std::make_index_sequence<kLanes>();
  if (block == 1) gate_small_blocks<1>(pairs, out, size, lanes);
  else if (block == 2) gate_small_blocks<2>(pairs, out, size, lanes);
  else if (block == 4 && kLanes > 4) gate_small_blocks<std::min(4, kLanes / 2)>(pairs, out, size, lanes);
  else if (block == 8 && kLanes > 8) gate_small_blocks<std::min(8, kLanes / 2)>(pairs, out, size, lanes);
  else gate_blocks(pairs, out, size, block);
}

// y = x / √(mean(x²) + ε) · scale for one row.
void normalise_row(const float* x, const float* scale, float* y, int64_t size, float epsilon) {
  Vec squares{};
  for (int64_t i = 0; i < size; i += kLanes) squares = multiply_add(load(x + i), load(x + i), squares);
  const Vec factor = splat(1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(size) + epsilon));
  for (int64_t i = 0; i < size; i += kLanes) store(y + i, load(x + i) * factor * load(scale + i));
}

// Makes softmax numerators of `count` scores in place and returns their sum; `scores` has room for whole vectors.
float exponentials(float* scores, int64_t count, float factor) {
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  for (int64_t c = count; c < padded; ++c) scores[c] = -1e30f;
  Vec peaks = load(scores);
  for (int64_t c = kLanes; c < padded; c += kLanes) peaks = greater(peaks, load(scores + c));
  float peak = peaks[0];
  for (int l = 1; l < kLanes; ++l) peak = std::max(peak, peaks[l]);
  Vec total{};
  for (int64_t c = 0; c < padded; c += kLanes) {
    const Vec e = exp_of_negative((load(scores + c) - peak) * factor);
    store(scores + c, e);
    total += e;
  }
  return sum_lanes(total);
}

// out[g, :] = (first[g, :] + Σ_c weights[g, c] · values[c, :]) / totals[g] for G queries and N vectors of the head; meanwhile as much is
// fetched from `ahead` on.
template <int G, int N>
void mix(const float* weights, int64_t stride, const float* values, int64_t count, int64_t dim, const float* first, const float* totals,
         const float* ahead, float* out) {
  Vec sums[G][N];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[g][n] = first ? load(first + g * dim + n * kLanes) : Vec{};
  for (int64_t c = 0; c < count; ++c) {
    Vec row[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      row[n] = load(values + c * dim + n * kLanes);
      __builtin_prefetch(ahead + c * dim + n * kLanes, 0, 2);
    }
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
                                  const float* first, const float* totals, const float* ahead, float* out) {
  int64_t g = 0;
  const auto some = [&](auto mix) {
    mix(weights + g * stride, stride, values, count, dim, first ? first + g * dim : nullptr, totals ? totals + g : nullptr, ahead, out + g * dim);
  };
  for (; g + kMostRows <= queries; g += kMostRows) some(mix<kMostRows, N>);
  switch (queries - g) {
    case 3: some(mix<3, N>); break;
    case 2: some(mix<2, N>); break;
    case 1: some(mix<1, N>); break;
    default: break;
  }
}

void mix_queries(int64_t queries, const float* weights, int64_t stride, const float* values, int64_t count, int64_t dim, const float* first,
                 const float* totals, const float* ahead, float* out) {
  int64_t d = 0;
  const auto part = [&](auto mix) {
    mix(queries, weights, stride, values + d, count, dim, first ? first + d : nullptr, totals, ahead + d, out + d);
  };
  for (; d + kHeadVecs * kLanes <= dim; d += kHeadVecs * kLanes) part(mix_vectors<kHeadVecs>);
  for (; d < dim; d += kLanes) part(mix_vectors<1>);
}

// One key-value head of a cache: `count` keys and values behind each other, and where the keys of the next one are.
struct Head {
  const float *keys, *values, *next_keys;
  int64_t count;
};

// All query heads that read one key-value head of a prompt, those of each slot in a group of their own, with what each slot has of its own.
// The more queries read it, the more a cache's bytes are worth. Values are fetched from memory while scores are computed, and the keys of
// the next head, which this thread is likely to read next, while values are mixed.
void attend(const float* const* queries, const Head* own, int64_t slots, int64_t group, Head prompt, int64_t dim, float factor, float* const* out) {
  thread_local std::vector<float> scratch;
  int64_t longest = 0;
  for (int64_t s = 0; s < slots; ++s) longest = std::max(longest, own[s].count);
  const int64_t rows = slots * group, stride = (prompt.count + longest + kLanes - 1) / kLanes * kLanes;
  scratch.resize(rows * (stride + 2 * dim + 1));
  float *scores = scratch.data(), *gathered = scores + rows * stride, *mixed = gathered + rows * dim, *totals = mixed + rows * dim;
  for (int64_t s = 0; s < slots; ++s) std::memcpy(gathered + s * group * dim, queries[s], group * dim * sizeof(float));
  dot_products(gathered, prompt.keys, scores, rows, dim, prompt.count, stride, prompt.values);
  for (int64_t s = 0; s < slots; ++s) {
    float* of_slot = scores + s * group * stride;
    dot_products(queries[s], own[s].keys, of_slot + prompt.count, group, dim, own[s].count, stride, own[s].values);
    for (int64_t g = 0; g < group; ++g) totals[s * group + g] = exponentials(of_slot + g * stride, prompt.count + own[s].count, factor);
  }
  mix_queries(rows, scores, stride, prompt.values, prompt.count, dim, nullptr, nullptr, prompt.next_keys, mixed);
  for (int64_t s = 0; s < slots; ++s)
    mix_queries(group, scores + s * group * stride + prompt.count, stride, own[s].values, own[s].count, dim, mixed + s * group * dim,
                totals + s * group, own[s].next_keys, out[s]);
}

using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;
using F32Result = ffi::Result<F32>;

// Cuts 0 … count into parts of whole units, but no more than `most` (at least one unit), small enough that each thread has several, and runs
// body(first, n) on each, in parallel.
template <typename Prepare, typename Body>
void for_each_part(ffi::ThreadPool& pool, int64_t count, int64_t unit, int64_t most, const Prepare& prepare, const Body& body) {
  const int64_t parts = kPartsPerThread * std::max<int64_t>(1, pool.num_threads());
  const int64_t each = std::max(unit, std::min(most, (count / unit + parts - 1) / parts * unit));
  parallel_for(pool, (count + each - 1) / each, prepare, [&](int64_t part) { body(part * each, std::min(each, count - part * each)); });
}

// y[o] = Σ_i x[i] · w[o, i] for one row: here reading the weights is all that counts. They are read as streams, as above.
void one_row(const float* x, const float* w, float* y, int64_t in, int64_t outputs) {
  const int64_t each = outputs / kOneRowOutputs;
  for (int64_t o = 0; o < each; ++o) {
    const float* weights = w + o * in;
    Vec sums[kOneRowOutputs] = {};
    for (int64_t i = 0; i < in; i += kLanes) {
      const Vec value = load(x + i);
#pragma GCC unroll 4
      for (int64_t s = 0; s < kOneRowOutputs; ++s) sums[s] = multiply_add(value, load(weights + s * each * in + i), sums[s]);
    }
#pragma GCC unroll 4
    for (int64_t s = 0; s < kOneRowOutputs; ++s) y[s * each + o] = sum_lanes(sums[s]);
  }
  for (int64_t o = each * kOneRowOutputs; o < outputs; ++o) tile<1, 1>(x, w + o * in, y + o, in, 0, w + o * in);
}

void linear_of_one(ffi::ThreadPool& pool, const float* x, const float* w, float* y, int64_t in, int64_t outputs) {
  for_each_part(pool, outputs, kLeastOutputs, kMostOutputs, [] {}, [&](int64_t o, int64_t n) { one_row(x, w + o * in, y + o, in, n); });
}

// Room for the packed rows of a block, at the start of a cache line. A function, so that each thread makes its own at first use.
float* packed_rows(int64_t in) {
  thread_local std::vector<float> room;
  room.resize((kBlockRows + kPackedVecs * kLanes) * in + kLine);
  return room.data() + (-reinterpret_cast<uintptr_t>(room.data()) % 64) / sizeof(float);
}

void linear_of_many(ffi::ThreadPool& pool, const float* x, const float* w, float* y, int64_t all, int64_t in, int64_t outputs) {
  for (int64_t r = 0; r < all; r += kBlockRows) {
    const int64_t rows = std::min(kBlockRows, all - r);
    const bool is_one = rows <= kLanes;
    const auto prepare = [&] { pack(x + r * in, packed_rows(in), rows, in, is_one ? 1 : kPackedVecs); };
    for_each_part(pool, outputs, kLeastOutputs, kMostOutputs, prepare, [&](int64_t o, int64_t n) {
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
  if (rows == 1) linear_of_one(pool, x.typed_data(), kernel.typed_data(), y->typed_data(), in, outputs);
  else linear_of_many(pool, x.typed_data(), kernel.typed_data(), y->typed_data(), rows, in, outputs);
  return ffi::Error::Success();
}

// Runs body(row) for each row; a part has as many rows of `size` numbers as it takes to be worth a thread.
template <typename Body> void for_each_row(ffi::ThreadPool& pool, int64_t rows, int64_t size, const Body& body) {
  for_each_part(pool, rows, std::max<int64_t>(1, kLeastPart / size), rows, [] {}, [&](int64_t first, int64_t n) {
    for (int64_t row = first; row < first + n; ++row) body(row);
  });
}

// pairs [B, 2 · F], in turns `block` gates and as many ups → out [B, F].
ffi::Error swiglu(ffi::ThreadPool pool, F32 pairs, F32Result out, int64_t block) {
  const int64_t rows = out->dimensions()[0], size = out->dimensions()[1];
  if (size % kLanes || block < 1 || size % block || (block % kLanes && kLanes % block))
    return ffi::Error::InvalidArgument("llamarl_swiglu: blocks are not whole vectors or whole parts of one");
  for_each_row(pool, rows, size, [&](int64_t row) { gate_row(pairs.typed_data() + row * 2 * size, out->typed_data() + row * size, size, block); });
  return ffi::Error::Success();
}

// x [B, D], scale [D] → y [B, D].
ffi::Error rms_norm(ffi::ThreadPool pool, F32 x, F32 scale, F32Result y, float epsilon) {
  const int64_t rows = x.dimensions()[0], size = x.dimensions()[1];
  if (size % kLanes) return ffi::Error::InvalidArgument("llamarl_rms_norm: rows are not whole vectors");
  for_each_row(pool, rows, size, [&](int64_t row) {
    normalise_row(x.typed_data() + row * size, scale.typed_data(), y->typed_data() + row * size, size, epsilon);
  });
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
  const auto attend_pair = [&](int64_t pair) {
    thread_local std::vector<const float*> read;
    thread_local std::vector<float*> written;
    thread_local std::vector<Head> own;
    read.clear(), written.clear(), own.clear();
    const int64_t prompt = pair / heads, head = pair % heads;
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
      own.push_back({k, v, k + length * dim, position + 1});
    }
    const int64_t offset = pair * prompt_length * dim, count = std::clamp<int64_t>(lengths.typed_data()[prompt], 0, prompt_length);
    const float* shared_keys = prompt_keys.typed_data() + offset;
    const Head shared{shared_keys, prompt_values.typed_data() + offset, shared_keys + prompt_length * dim, count};
    if (!own.empty()) attend(read.data(), own.data(), own.size(), group, shared, dim, factor, written.data());
  };
  for_each_part(pool, prompts * heads, 1, prompts * heads, [] {}, [&](int64_t first, int64_t n) {
    for (int64_t pair = first; pair < first + n; ++pair) attend_pair(pair);
  });
  return ffi::Error::Success();
}

}  // namespace

extern "C" int llamarl_lanes() { return kLanes; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(llamarl_linear, linear, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(llamarl_swiglu, swiglu, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Ret<F32>().Attr<int64_t>("block"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(llamarl_rms_norm, rms_norm,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Ret<F32>().Attr<float>("epsilon"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(llamarl_decode_attention, decode_attention,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>()
                                  .Arg<S32>().Arg<S32>().Arg<S32>().Ret<F32>().Ret<F32>().Ret<F32>());
