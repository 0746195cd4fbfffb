// Products of bf16 matrices on tiles (Intel's AMX): registers of 16 rows of 64 bytes. Linux only.
#pragma once
#include "host.h"

#if defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define KVB_TILES
#include <sys/syscall.h>
#include <unistd.h>

namespace kvb {

constexpr int64_t SIDE = 16;  // rows of a tile, and its 32-bit columns

// Whether the system gives this process tiles: it saves their registers for those that asked alone.
inline bool may_use_tiles() {
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of arch_prctl(2)
  static const bool may = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return may;
}

// All tiles of this thread as 16 rows of 64 bytes. Who had shapes of its own gets them back.
class UseTiles {
 public:
  UseTiles() {
    Shapes shapes;
    std::fill_n(shapes.bytes, 8, 64);
    std::fill_n(shapes.rows, 8, SIDE);
    _tile_storeconfig(&before_);
    _tile_loadconfig(&shapes);
  }
  ~UseTiles() {
    if (before_.palette) {
      _tile_loadconfig(&before_);
    } else {
      _tile_release();
    }
  }
  UseTiles(const UseTiles&) = delete;
  UseTiles& operator=(const UseTiles&) = delete;

 private:
  struct Shapes {
    uint8_t palette = 1, start = 0, none[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  };
  Shapes before_;
};

// The compiler does not know that tiles are read from memory.
inline void settle_memory() { asm volatile("" ::: "memory"); }

// out[k][v] = keys[k] . queries[v] for 16 keys, `stride` bytes from one to the next. Queries are laid
// out channel pair by channel pair, V vectors each; `depth` is a multiple of 16 pairs.
template <int V>
inline void tile_products(const char* keys, int64_t stride, const Ints* queries, int64_t depth,
                          Floats* out) {
  constexpr int64_t ROW = V * sizeof(Ints);
  settle_memory();
  _tile_zero(0);
  if constexpr (V > 1) _tile_zero(1);
  if constexpr (V > 2) _tile_zero(2);
  if constexpr (V > 2) _tile_zero(3);
  for (int64_t c = 0; c < depth; c += SIDE, queries += SIDE * V) {
    _tile_loadd(4, keys + c * 4, stride);
    _tile_loadd(5, queries, ROW);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (V > 1) {
      _tile_loadd(6, queries + 1, ROW);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (V > 2) {
      _tile_loadd(5, queries + 2, ROW);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(6, queries + 3, ROW);
      _tile_dpbf16ps(3, 4, 6);
    }
  }
  _tile_stored(0, out, ROW);
  if constexpr (V > 1) _tile_stored(1, out + 1, ROW);
  if constexpr (V > 2) _tile_stored(2, out + 2, ROW);
  if constexpr (V > 2) _tile_stored(3, out + 3, ROW);
  settle_memory();
}

// sums[r][c] += sum over pairs of rows of weights[r][pair] * values[pair][c], for 16 rows and C of
// `width` vectors of channels. Rows of weights are `stride` bytes apart; `pairs` is a multiple of 16.
template <int C>
inline void tile_sums(const uint32_t* weights, int64_t stride, const Ints* values, int64_t width,
                      int64_t pairs, Floats* sums) {
  const int64_t row = width * sizeof(Ints);
  settle_memory();
  _tile_loadd(0, sums, row);
  if constexpr (C > 1) _tile_loadd(1, sums + 1, row);
  for (int64_t s = 0; s < pairs; s += SIDE, values += SIDE * width) {
    _tile_loadd(4, weights + s, stride);
    _tile_loadd(5, values, row);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (C > 1) {
      _tile_loadd(6, values + 1, row);
      _tile_dpbf16ps(1, 4, 6);
    }
  }
  _tile_stored(0, sums, row);
  if constexpr (C > 1) _tile_stored(1, sums + 1, row);
  settle_memory();
}

// Turns 16 vectors, `step` from one to the next, so that lanes become rows of `stride` 32-bit words.
inline void transpose(const Ints* from, int64_t step, uint32_t* to, int64_t stride) {
  Ints words[SIDE];
  for (int i = 0; i < SIDE; ++i) words[i] = from[i * step];
  turn(words);
  for (int i = 0; i < SIDE; ++i) _mm512_storeu_si512(to + i * stride, (__m512i)words[i]);
}

// Pairs of bf16 whose matrices are multiplied on tiles.
struct Tiles : Pairs {
  static constexpr int64_t STEP = 2 * SIDE;
};

// Bytes from each of 16 rows to the next; 0 if they do not lie at equal distances.
inline int64_t spacing(const uint32_t* const* rows) {
  const int64_t stride = rows[1] - rows[0];
  for (int64_t i = 2; i < SIDE; ++i) {
    if (rows[i] - rows[i - 1] != stride) return 0;
  }
  return stride * static_cast<int64_t>(sizeof **rows);
}

// all_products on tiles. `few` has room for 16 keys, where those go that do not lie in a row; what the
// room holds beyond them is multiplied, too, and left out.
template <int V, bool MERGE>
inline void all_tile_products(const uint32_t* const* keys, int64_t count, const Ints* queries,
                              int64_t depth, float scale, uint32_t* few, Floats* out) {
  Floats products[SIDE * V];
  for (int64_t k = 0; k < count; k += SIDE) {
    const int64_t here = smaller(SIDE, count - k);
    const char* rows = reinterpret_cast<const char*>(keys[k]);
    int64_t stride = here == SIDE ? spacing(keys + k) : 0;
    if (!stride) {
      for (int64_t i = 0; i < here; ++i) memcpy(few + i * depth, keys[k + i], depth * 4);
      rows = reinterpret_cast<const char*>(few);
      stride = depth * 4;
    }
    tile_products<V>(rows, stride, queries, depth, products);
    for (int64_t i = 0; i < here * V; ++i) {
      Floats& place = out[k * V + i];
      place = MERGE ? larger(place, products[i] * scale) : products[i] * scale;
    }
  }
}

}  // namespace kvb

#endif

namespace kvb {

// What a thread holds while it multiplies by a kind.
template <class Kind>
struct Using {
  Using() {}
};
#ifdef KVB_TILES
template <>
struct Using<Tiles> : UseTiles {};
#endif

// all_products of whichever kind; `few` as above.
template <class Kind, int V, bool MERGE>
inline void products_of_kind(const typename Kind::Key* const* keys, int64_t count,
                             const typename Kind::Query* queries, int64_t depth, float scale,
                             [[maybe_unused]] void* few, Floats* out) {
#ifdef KVB_TILES
  if constexpr (std::is_same<Kind, Tiles>::value) {
    all_tile_products<V, MERGE>(keys, count, queries, depth, scale, static_cast<uint32_t*>(few),
                                out);
    return;
  }
#endif
  all_products<Kind, V, MERGE>(keys, count, queries, depth, scale, out);
}

}  // namespace kvb
