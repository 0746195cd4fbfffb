// What the CPU entries share: threads, vectors, and the product of keys with a strip of queries.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "rows.h"

namespace kvb {

constexpr int64_t SMALL_WORK = 1 << 18;  // operations below which a second thread costs more

// The host program's OpenMP team, if it gave one (kvb_use_team).
inline kvb_team& team() {
  static kvb_team own = nullptr;
  return own;
}

// Runs body(i) for i in [0, items) on up to `threads` threads; `work` is operations in all.
template <class Body>
void parallel_for(int64_t items, int64_t work, int32_t threads, const Body& body) {
  const int64_t count = work < SMALL_WORK ? 1 : smaller(threads, items);
  std::atomic<int64_t> next{0};
  auto loop = [&] {
    for (int64_t i; (i = next.fetch_add(1)) < items;) body(i);
  };
  if (team() && count > 1) {
    team()([](void* each) { (*static_cast<decltype(loop)*>(each))(); }, &loop,
           static_cast<unsigned>(count), 0);
    return;
  }
  std::vector<std::thread> others;
  for (int64_t i = 1; i < count; ++i) others.emplace_back(loop);
  loop();
  for (auto& other : others) other.join();
}

// ---- vectors ----

// Queries are taken in strips of some vectors. A wide strip reads the keys half as often as a narrow
// one, which has fewer empty lanes for few queries. TOTALS sums leave registers for their operands.
#ifdef __AVX512F__
constexpr int LANES = 16, TOTALS = 24, WIDE = 4;
#else
constexpr int LANES = 8, TOTALS = 12, WIDE = 2;
#endif
constexpr int NARROW = 2;

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));

constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

inline Floats all(float x) { return Floats{} + x; }
inline Ints all(int32_t x) { return Ints{} + x; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

typedef float Four __attribute__((vector_size(16)));

// By halves, so that additions do not wait for one another.
inline float sum(Floats x) {
  Four part[LANES / 4];
  memcpy(part, &x, sizeof part);
  for (int step = LANES / 8; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) part[i] += part[i + step];
  }
  return (part[0][0] + part[0][1]) + (part[0][2] + part[0][3]);
}

typedef int32_t FourInts __attribute__((vector_size(16)));

inline int32_t maximum(Ints x) {
  FourInts part[LANES / 4];
  memcpy(part, &x, sizeof part);
  for (int step = LANES / 8; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) part[i] = part[i] > part[i + step] ? part[i] : part[i + step];
  }
  return std::max(std::max(part[0][0], part[0][1]), std::max(part[0][2], part[0][3]));
}

// e^x for x <= 0, relative error below 2e-7; 0 for x below -87.
__attribute__((always_inline)) inline Floats exponential(Floats x) {
  const Floats bounded = larger(x, all(-87.0f));
  // Adding and taking 1.5 * 2^23 rounds to the nearest integer.
  const Floats shifted = bounded * 1.44269504f + 12582912.0f;
  const Floats whole = shifted - 12582912.0f;
  Floats rest = bounded - whole * 0.693359375f;
  rest = rest - whole * -2.12194440e-4f;
  Floats p = all(1.0f / 5040);
  p = p * rest + 1.0f / 720;
  p = p * rest + 1.0f / 120;
  p = p * rest + 1.0f / 24;
  p = p * rest + 1.0f / 6;
  p = p * rest + 0.5f;
  p = p * rest + 1.0f;
  p = p * rest + 1.0f;
  const Ints power = ((Ints)shifted - 0x4b400000 + 127) << 23;
  return x < -87.0f ? Floats{} : p * (Floats)power;
}

// ---- rows as floats ----

inline void to_floats(const void* from, int32_t dtype, int64_t n, float* to) {
  const uint16_t* half = static_cast<const uint16_t*>(from);
  int64_t i = 0;
  if (dtype == KVB_F32) {
    memcpy(to, from, n * sizeof(float));
    return;
  }
  if (dtype == KVB_BF16) {
    for (; i < n; ++i) to[i] = from_bf16(half[i]);
    return;
  }
#ifdef __F16C__
  for (; i + 8 <= n; i += 8) {
    const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(half + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(eight));
  }
#endif
  for (; i < n; ++i) to[i] = from_f16(half[i]);
}

inline void from_floats(const float* from, int32_t dtype, int64_t n, void* to) {
  uint16_t* half = static_cast<uint16_t*>(to);
  int64_t i = 0;
  if (dtype == KVB_F32) {
    memcpy(to, from, n * sizeof(float));
    return;
  }
  if (dtype == KVB_BF16) {
    for (; i < n; ++i) half[i] = to_bf16(from[i]);
    return;
  }
#ifdef __F16C__
  for (; i + 8 <= n; i += 8) {
    const __m128i eight = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(half + i), eight);
  }
#endif
  for (; i < n; ++i) half[i] = to_f16(from[i]);
}

// ---- memory ----

// Asks for a row that is wanted soon: which one comes next is nothing the processor foresees.
inline void fetch(const void* row, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(row) + at);
}

struct Block {
  void* data;
  size_t size;
};

inline void release(Block block) { ::operator delete(block.data, std::align_val_t(64)); }

// A thread's blocks that are not in use. They stay for its next call: the first touch of a megabyte
// from the system takes longer than all that is then done with it.
class Spare {
 public:
  ~Spare() {
    for (const Block& block : blocks_) release(block);
  }

  // The smallest block that is large enough, or a new one.
  Block take(size_t size) {
    auto best = blocks_.end();
    for (auto it = blocks_.begin(); it != blocks_.end(); ++it) {
      if (it->size >= size && (best == blocks_.end() || it->size < best->size)) best = it;
    }
    if (best == blocks_.end()) return {::operator new(size, std::align_val_t(64)), size};
    const Block block = *best;
    blocks_.erase(best);
    return block;
  }

  // Of more than COUNT blocks the smallest goes.
  void put(Block block) {
    blocks_.push_back(block);
    if (blocks_.size() <= COUNT) return;
    const auto least = std::min_element(blocks_.begin(), blocks_.end(),
                                        [](Block a, Block b) { return a.size < b.size; });
    release(*least);
    blocks_.erase(least);
  }

 private:
#ifdef __SANITIZE_ADDRESS__
  static constexpr size_t COUNT = 0;  // a block that is larger than asked for would hide overruns
#else
  static constexpr size_t COUNT = 8;
#endif
  std::vector<Block> blocks_;
};

inline Spare& spare() {
  static thread_local Spare own;
  return own;
}

// An array aligned for vectors, not initialised.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t n) : block_(spare().take(larger(n, 1) * sizeof(T))) {}
  ~Buffer() { spare().put(block_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* get() const { return static_cast<T*>(block_.data); }
  T& operator[](int64_t i) const { return get()[i]; }

 private:
  Block block_;
};

// ---- products ----

// Channels one by one.
struct Singles {
  typedef float Key;
  typedef Floats Query;
  static constexpr int32_t CHANNELS = 1;
  static constexpr int64_t STEP = 1;  // rows of values that are weighed together
  static void add(Floats& total, Key key, Query query) { total += key * query; }

  // Rows of `width` vectors of values, and weights [row][V], as they are multiplied.
  static void together(const void* row, const void*, int64_t width, Query* to) {
    const float* values = static_cast<const float*>(row);
    for (int64_t c = 0; c < width; ++c) memcpy(to + c, values + c * LANES, sizeof *to);
  }
  template <int V>
  static const Key* as_weights(const Floats* weights, int64_t, Query*) {
    return reinterpret_cast<const Key*>(weights);
  }
};

#ifdef __AVX512BF16__
// Two bf16 channels, or rows, at a time; products are exact, sums are floats.
struct Pairs {
  typedef uint32_t Key;
  typedef Ints Query;
  static constexpr int32_t CHANNELS = 2;
  static constexpr int64_t STEP = 2;
  static void add(Floats& total, Key key, Query query) {
    const __m512i both = _mm512_set1_epi32(static_cast<int32_t>(key));
    total = (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)both, (__m512bh)query);
  }

  static __m512i both(__m256i low, __m256i high) {
    const __m512i above = _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16);
    return _mm512_or_si512(_mm512_cvtepu16_epi32(low), above);
  }

  // Two rows of bf16 values, channel by channel.
  static void together(const void* first, const void* second, int64_t width, Query* to) {
    for (int64_t c = 0; c < width; ++c) {
      const __m256i* low = static_cast<const __m256i*>(first) + c;
      const __m256i* high = static_cast<const __m256i*>(second) + c;
      to[c] = (Query)both(_mm256_loadu_si256(low), _mm256_loadu_si256(high));
    }
  }

  // Weights of two rows, lane by lane, rounded to bf16.
  template <int V>
  static const Key* as_weights(const Floats* weights, int64_t steps, Query* to) {
    for (int64_t s = 0; s < steps; ++s) {
      for (int v = 0; v < V; ++v) {
        const __m512 first = (__m512)weights[2 * s * V + v];
        const __m512 second = (__m512)weights[(2 * s + 1) * V + v];
        to[s * V + v] = (Query)both((__m256i)_mm512_cvtneps_pbh(first),
                                    (__m256i)_mm512_cvtneps_pbh(second));
      }
    }
    return reinterpret_cast<const Key*>(to);
  }
};
#endif

#ifdef __AVX512F__
// Lane i of vector j becomes lane j of vector i.
__attribute__((always_inline)) inline void turn(Ints (&words)[16]) {
  __m512i a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32((__m512i)words[i], (__m512i)words[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32((__m512i)words[i], (__m512i)words[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + 2 + j]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + 2 + j]);
    }
  }
  // Now a[4 * i + j] has, in each quarter q, the words that vectors 4i to 4i + 3 have in lane 4q + j.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i front = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);
    const __m512i front_odd = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
    const __m512i back = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
    const __m512i back_odd = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
    words[j] = (Ints)_mm512_shuffle_i32x4(front, back, 0x88);
    words[4 + j] = (Ints)_mm512_shuffle_i32x4(front_odd, back_odd, 0x88);
    words[8 + j] = (Ints)_mm512_shuffle_i32x4(front, back, 0xdd);
    words[12 + j] = (Ints)_mm512_shuffle_i32x4(front_odd, back_odd, 0xdd);
  }
}
#endif

// out[k][v] = scale * (keys[k] . queries[v]), or its maximum with what is there. Queries are laid
// out channel by channel, V vectors each.
template <class Kind, int V, int N, bool MERGE>
inline void products(const typename Kind::Key* const* keys, const typename Kind::Query* queries,
                     int64_t depth, float scale, Floats* out) {
  Floats total[N][V] = {};
  for (int64_t c = 0; c < depth; ++c) {
#pragma GCC unroll 24
    for (int k = 0; k < N; ++k) {
      typename Kind::Key key;  // copied: a pair of halves need not lie at a multiple of 4
      memcpy(&key, keys[k] + c, sizeof key);
      for (int v = 0; v < V; ++v) Kind::add(total[k][v], key, queries[c * V + v]);
    }
  }
  for (int k = 0; k < N; ++k) {
    for (int v = 0; v < V; ++v) {
      Floats& place = out[k * V + v];
      place = MERGE ? larger(place, total[k][v] * scale) : total[k][v] * scale;
    }
  }
}

// The same for any number of keys.
template <class Kind, int V, bool MERGE>
inline void all_products(const typename Kind::Key* const* keys, int64_t count,
                         const typename Kind::Query* queries, int64_t depth, float scale,
                         Floats* out) {
  constexpr int KEYS = V > 1 ? TOTALS / V : TOTALS / 2;  // a dozen chains of sums hide the latency
  int64_t k = 0;
  for (; k + KEYS <= count; k += KEYS) {
    const int64_t next = smaller(count, k + 2 * KEYS);
    for (int64_t i = k + KEYS; i < next; ++i) fetch(keys[i], depth * sizeof(**keys));
    products<Kind, V, KEYS, MERGE>(keys + k, queries, depth, scale, out + k * V);
  }
  for (; k + 3 <= count; k += 3) {
    products<Kind, V, 3, MERGE>(keys + k, queries, depth, scale, out + k * V);
  }
  for (; k < count; ++k) {
    products<Kind, V, 1, MERGE>(keys + k, queries, depth, scale, out + k * V);
  }
}

}  // namespace kvb
