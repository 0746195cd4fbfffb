// Compaction: kept rows into the first rows of the cache, in place.

namespace kvb {

struct Move {
  int64_t from, to;
};

}  // namespace kvb

#ifndef KVB_DEVICE

namespace kvb {

typedef uint64_t Eight __attribute__((vector_size(64)));
typedef uint8_t EightBytes __attribute__((vector_size(8)));

// A bit for each of 64 kept rows: whether it does not follow the kept row before it.
inline uint64_t gaps_before(const int64_t* kept) {
  uint64_t gaps = 0;
  for (int i = 0; i < 64; i += 8) {
    Eight these, previous;
    memcpy(&these, kept + i, sizeof these);
    memcpy(&previous, kept + i - 1, sizeof previous);
    // The sign of a difference, not a comparison: with that, a table that is never read may be read.
    const EightBytes apart = __builtin_convertvector((previous + 1 - these) >> 63, EightBytes);
    uint64_t bytes;
    memcpy(&bytes, &apart, sizeof bytes);
    gaps |= (bytes * 0x0102040810204080u >> 56) << i;  // the lowest bits of all bytes
  }
  return gaps;
}

// Moves rows from `late` on into the holes, which lie between the first `stay` rows and after them.
inline std::vector<Move> fill_holes(const int64_t* kept, int64_t count, int64_t stay) {
  constexpr int64_t AHEAD = 512;  // the processor foresees too little of so fast a walk
  std::vector<Move> moves(count - stay);
  Move* move = moves.data();
  const int64_t* late = kept + stay;
  auto fill = [&](int64_t row, int64_t end) {
    for (; row < end && late < kept + count; ++row) *move++ = {*late++, row};
  };
  if (stay == 0) {
    fill(0, count);
    return moves;
  }
  fill(0, kept[0]);
  int64_t i = 1;
  for (; i + 64 <= stay; i += 64) {
    for (int64_t j = i; j < i + 64; j += 8) __builtin_prefetch(kept + j + AHEAD);
    for (uint64_t gaps = gaps_before(kept + i); gaps; gaps &= gaps - 1) {
      const int64_t at = i + __builtin_ctzll(gaps);
      fill(kept[at - 1] + 1, kept[at]);
    }
  }
  for (; i < stay; ++i) fill(kept[i - 1] + 1, kept[i]);
  fill(kept[stay - 1] + 1, count);
  return moves;
}

// The moves of one place, in order.
inline std::vector<Move> moves_of(const int64_t* kept, int64_t count, bool sorted) {
  if (!sorted) return fill_holes(kept, count, count_below(kept, count, count));
  std::vector<Move> moves;
  // kept[i] >= i: a row is read before anything later is written over it.
  for (int64_t i = 0; i < count; ++i) {
    if (kept[i] != i) moves.push_back({kept[i], i});
  }
  return moves;
}

// Copies a row, whole cache lines past the cache: the place of a row is not read before it is written,
// which halves what a scattered write costs.
inline void move_row(char* to, const char* from, int64_t bytes) {
#ifdef __AVX512F__
  if ((reinterpret_cast<uint64_t>(to) | static_cast<uint64_t>(bytes)) % 64 == 0) {
    for (int64_t at = 0; at < bytes; at += 64) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_loadu_si512(from + at));
    }
    return;
  }
#endif
  memcpy(to, from, bytes);
}

inline void move_rows(const Rows& rows, const std::vector<Move>& moves) {
  constexpr size_t AHEAD = 16;
  for (size_t i = 0; i < moves.size(); ++i) {
    if (i + AHEAD < moves.size()) {
      const Move next = moves[i + AHEAD];
      fetch(rows.at(next.from), rows.bytes);
      __builtin_prefetch(rows.at(next.to), 1);  // for the translation of its page, above all
    }
    move_row(rows.at(moves[i].to), rows.at(moves[i].from), rows.bytes);
  }
}

inline int64_t compact_place(const kvb_rows* tensors, int32_t n_tensors, kvb_table table, Place p,
                             const int64_t* kept, int64_t count, bool sorted) {
  const std::vector<Move> moves = moves_of(kept, count, sorted);
  for (int32_t t = 0; t < n_tensors; ++t) move_rows(rows_of(tensors[t], table, p), moves);
#ifdef __AVX512F__
  _mm_sfence();  // streamed rows, before another thread is told
#endif
  return static_cast<int64_t>(moves.size());
}

}  // namespace kvb

extern "C" int kvb_compact(const kvb_rows* tensors, int32_t n_tensors, kvb_table table,
                           kvb_shape shape, const int64_t* kept, int64_t budget,
                           const int64_t* counts, int32_t sorted, int64_t* moved,
                           int32_t threads, void*) {
  std::atomic<int64_t> total{0};
  const int64_t items = kvb::places(shape);
  kvb::parallel_for(items, items * budget * 64, threads, [&](int64_t i) {
    const kvb::Place p = kvb::place(shape, i);
    const int64_t count = kvb::length_of(counts, budget, p.session);
    total += kvb::compact_place(tensors, n_tensors, table, p, kept + i * budget, count, sorted);
  });
  *moved += total;
  return 0;
}

#else

namespace kvb {

constexpr int MAX_TENSORS = 8;
constexpr int64_t STAGED_BYTES = 48 << 10;  // of shared memory for the sorted variant

struct Tensors {
  kvb_rows each[MAX_TENSORS];
  int32_t count;
};

// Copies a row with the threads of one warp, in the widest words its addresses allow.
__device__ __forceinline__ void copy_row(char* to, const char* from, int64_t bytes, int lane) {
  const uint64_t mix = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) |
                       static_cast<uint64_t>(bytes);
  if (mix % 16 == 0) {
    for (int64_t i = lane; i < bytes / 16; i += 32) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
  } else if (mix % 4 == 0) {
    for (int64_t i = lane; i < bytes / 4; i += 32) {
      reinterpret_cast<uint32_t*>(to)[i] = reinterpret_cast<const uint32_t*>(from)[i];
    }
  } else {
    for (int64_t i = lane; i < bytes; i += 32) to[i] = from[i];
  }
}

// One warp a move, over the places along y and z.
__global__ void fill_holes(Tensors tensors, kvb_table table, kvb_shape shape, const int64_t* kept,
                           int64_t budget, const int64_t* counts, unsigned long long* moved) {
  const int64_t number = blockIdx.x;
  const Place p = place(shape, number);
  const int64_t count = length_of(counts, budget, p.session);
  const int64_t* own = kept + number * budget;
  const int64_t stay = count_below(own, count, count);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int64_t first = blockIdx.y * static_cast<int64_t>(warps) + warp;
  if (first == 0 && lane == 0) atomicAdd(moved, static_cast<unsigned long long>(count - stay));
  for (int64_t i = first; i < count - stay; i += static_cast<int64_t>(warps) * gridDim.y) {
    const Move move = {own[stay + i], hole(own, stay, i)};
    for (int32_t t = 0; t < tensors.count; ++t) {
      const Rows rows = rows_of(tensors.each[t], table, p);
      copy_row(rows.at(move.to), rows.at(move.from), rows.bytes, lane);
    }
  }
}

// One block a place and tensor. Rows go through shared memory, `group` at a time: as kept[i] >= i, no
// later group reads what an earlier one wrote.
__global__ void sort_rows(Tensors tensors, kvb_table table, kvb_shape shape, const int64_t* kept,
                          int64_t budget, const int64_t* counts, int64_t group,
                          unsigned long long* moved) {
  char* staged = dynamic_shared();
  const int64_t number = blockIdx.x;
  const Place p = place(shape, number);
  const int64_t count = length_of(counts, budget, p.session);
  const int64_t* own = kept + number * budget;
  const Rows rows = rows_of(tensors.each[blockIdx.y], table, p);
  const int64_t room = (rows.bytes + 15) / 16 * 16;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  unsigned long long mine = 0;
  for (int64_t first = 0; first < count; first += group) {
    const int64_t end = smaller(first + group, count);
    for (int64_t i = first + warp; i < end; i += warps) {
      copy_row(staged + (i - first) * room, rows.at(own[i]), rows.bytes, lane);
    }
    __syncthreads();
    for (int64_t i = first + warp; i < end; i += warps) {
      if (own[i] == i) continue;
      copy_row(rows.at(i), staged + (i - first) * room, rows.bytes, lane);
      ++mine;
    }
    __syncthreads();
  }
  if (blockIdx.y == 0 && lane == 0 && mine) atomicAdd(moved, mine);
}

}  // namespace kvb

extern "C" int kvb_compact(const kvb_rows* tensors, int32_t n_tensors, kvb_table table,
                           kvb_shape shape, const int64_t* kept, int64_t budget,
                           const int64_t* counts, int32_t sorted, int64_t* moved, int32_t,
                           void* stream) {
  using namespace kvb;
  if (n_tensors > MAX_TENSORS) return cudaErrorInvalidValue;
  const int64_t count = places(shape);
  if (count == 0 || budget == 0) return 0;
  Tensors all;
  all.count = n_tensors;
  int64_t widest = 16;
  for (int32_t t = 0; t < n_tensors; ++t) {
    all.each[t] = tensors[t];
    widest = larger(widest, (tensors[t].bytes + 15) / 16 * 16);
  }
  auto* total = reinterpret_cast<unsigned long long*>(moved);
  const auto queue = static_cast<cudaStream_t>(stream);
  if (sorted) {
    const dim3 grid(static_cast<unsigned>(count), n_tensors);
    const int64_t group = smaller(32, STAGED_BYTES / widest);
    if (group == 0) return cudaErrorInvalidValue;
    KVB_LAUNCH(sort_rows, grid, 256, widest * group, queue, all, table, shape, kept, budget, counts,
               group, total);
  } else {
    // A warp a move, eight to a block; blocks without a move end at once.
    const dim3 grid(static_cast<unsigned>(count),
                    static_cast<unsigned>(smaller(ceil_div(budget, 8), 32)));
    KVB_LAUNCH(fill_holes, grid, 256, 0, queue, all, table, shape, kept, budget, counts, total);
  }
  return cudaGetLastError();
}

#endif
