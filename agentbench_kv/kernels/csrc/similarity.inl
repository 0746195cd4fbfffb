// R-KV's redundancy: column means of the keys' cosines, one column of every row exempted.
//
// The cosines are symmetric, so the sum over a column is the sum over a row: row `a` sums its
// cosines with all keys and remembers its last column above the threshold (column 0 if there is
// none). What the rows exempted is then taken off the columns. The CPU makes each pair's cosine
// once and adds it to both rows.

#ifndef KVB_DEVICE

namespace kvb {

constexpr int STRIP_KEYS = WIDE * LANES;

// What a row of cosines comes to: its sum, its last column above the threshold (-1: none), that
// column's cosine, and the one of column 0.
struct RowSums {
  float sum, exempted, first;
  int32_t column;
};

inline void unit_rows(const void* keys, int32_t dtype, int64_t key_row, int64_t tokens,
                      int64_t head_dim, float* units) {
  for (int64_t t = 0; t < tokens; ++t) {
    float* to = units + t * head_dim;
    const char* from = static_cast<const char*>(keys) + t * key_row * size_of(dtype);
    to_floats(from, dtype, head_dim, to);
    float squares = 0;
    for (int64_t c = 0; c < head_dim; ++c) squares += to[c] * to[c];
    const float norm = std::sqrt(squares) + 1e-8f;
    for (int64_t c = 0; c < head_dim; ++c) to[c] /= norm;
  }
}

// A strip of keys as vectors, channel by channel.
inline void pack_strip(const float* units, int64_t count, int64_t head_dim, Floats* packed) {
  std::fill_n(packed, head_dim * WIDE, Floats{});
  float* lanes = reinterpret_cast<float*>(packed);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t c = 0; c < head_dim; ++c) lanes[c * STRIP_KEYS + i] = units[i * head_dim + c];
  }
}

// The rows of one strip, a lane each, as columns come by in ascending order.
struct LaneSums {
  Floats sum[WIDE], exempted[WIDE], first[WIDE];
  Ints column[WIDE];

  void read(const RowSums* rows, int64_t count) {
    for (int64_t i = 0; i < STRIP_KEYS; ++i) {
      const RowSums row = i < count ? rows[i] : RowSums{0, 0, 0, -1};
      sum[i / LANES][i % LANES] = row.sum;
      exempted[i / LANES][i % LANES] = row.exempted;
      first[i / LANES][i % LANES] = row.first;
      column[i / LANES][i % LANES] = row.column;
    }
  }

  void add(const Floats* cosines, int64_t from, float threshold) {
    for (int v = 0; v < WIDE; ++v) {
      const Ints above = cosines[v] > threshold;
      sum[v] += cosines[v];
      column[v] = above ? all(static_cast<int32_t>(from)) : column[v];
      exempted[v] = above ? cosines[v] : exempted[v];
      if (from == 0) first[v] = cosines[v];
    }
  }

  void write(RowSums* rows, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t v = i / LANES, lane = i % LANES;
      rows[i] = {sum[v][lane], exempted[v][lane], first[v][lane], column[v][lane]};
    }
  }
};

// The same cosines seen from the other side: one row meets the columns of a whole strip.
inline void add_strip(const Floats* cosines, int64_t strip, float threshold, RowSums* row) {
  Floats total = cosines[0];
  for (int v = 1; v < WIDE; ++v) total += cosines[v];
  row->sum += sum(total);
  if (strip == 0) row->first = cosines[0][0];
  Ints lane, highest = all(-1);
  for (int i = 0; i < LANES; ++i) lane[i] = i;
  for (int v = 0; v < WIDE; ++v) {
    const Ints above = cosines[v] > threshold;
    highest = above ? lane + v * LANES : highest;
  }
  const int32_t last = maximum(highest);
  if (last < 0) return;
  row->column = static_cast<int32_t>(strip) + last;
  row->exempted = cosines[last / LANES][last % LANES];
}

// Every pair of a head's keys once: a strip meets itself and all later keys.
inline void similarity_head(const float* units, int64_t tokens, int64_t head_dim, float threshold,
                            RowSums* rows) {
  constexpr int64_t tile = 96;
  Buffer<Floats> packed(head_dim * WIDE), cosines(tile * WIDE);
  const float* keys[tile];
  std::fill_n(rows, tokens, RowSums{0, 0, 0, -1});
  for (int64_t strip = 0; strip < tokens; strip += STRIP_KEYS) {
    const int64_t count = smaller(STRIP_KEYS, tokens - strip);
    pack_strip(units + strip * head_dim, count, head_dim, packed.get());
    LaneSums lanes;
    lanes.read(rows + strip, count);
    for (int64_t begin = strip; begin < tokens; begin += tile) {
      const int64_t size = smaller(tile, tokens - begin);
      for (int64_t k = 0; k < size; ++k) keys[k] = units + (begin + k) * head_dim;
      all_products<Singles, WIDE, false>(keys, size, packed.get(), head_dim, 1.0f, cosines.get());
      for (int64_t k = 0; k < size; ++k) {
        Floats* row = cosines.get() + k * WIDE;
        const int64_t own = begin + k - strip;
        if (own < count) row[own / LANES][own % LANES] = 0;
        lanes.add(row, begin + k, threshold);
        if (own >= STRIP_KEYS) add_strip(row, strip, threshold, rows + begin + k);
      }
    }
    lanes.write(rows + strip, count);
  }
}

}  // namespace kvb

extern "C" int64_t kvb_similarity_workspace(int64_t heads, int64_t tokens, int64_t head_dim) {
  return heads * tokens * (head_dim * 4 + static_cast<int64_t>(sizeof(kvb::RowSums)));
}

extern "C" int kvb_similarity(const void* keys, int32_t dtype, int64_t key_head, int64_t key_row,
                              int64_t heads, int64_t tokens, int64_t head_dim, float threshold,
                              float* means, void* workspace, int32_t threads, void*) {
  using namespace kvb;
  float* units = static_cast<float*>(workspace);
  auto* rows = reinterpret_cast<RowSums*>(units + heads * tokens * head_dim);
  parallel_for(heads, heads * tokens * head_dim, threads, [&](int64_t h) {
    const char* from = static_cast<const char*>(keys) + h * key_head * size_of(dtype);
    unit_rows(from, dtype, key_row, tokens, head_dim, units + h * tokens * head_dim);
  });
  parallel_for(heads, heads * tokens * tokens * head_dim, threads, [&](int64_t h) {
    RowSums* own = rows + h * tokens;
    similarity_head(units + h * tokens * head_dim, tokens, head_dim, threshold, own);
    std::vector<double> off(tokens, 0.0);
    for (int64_t t = 0; t < tokens; ++t) {
      const bool none = own[t].column < 0;
      off[none ? 0 : own[t].column] += none ? own[t].first : own[t].exempted;
    }
    for (int64_t t = 0; t < tokens; ++t) {
      means[h * tokens + t] = static_cast<float>((own[t].sum - off[t]) / tokens);
    }
  });
  return 0;
}

#else

namespace kvb {

// Exempted cosines are summed as integers, whose sum does not depend on the order.
constexpr double FIXED_POINT = 1099511627776.0;  // 2^40

struct SimilarityJob {
  const void* keys;
  int32_t dtype;
  int64_t key_head, key_row, tokens, head_dim;
  float threshold;
  float *scales, *sums;
  unsigned long long* exempted;
};

// The reciprocal of every key's norm; one warp a key.
__global__ void key_scales(SimilarityJob job) {
  const int64_t t = blockIdx.x * static_cast<int64_t>(blockDim.x / 32) + threadIdx.x / 32;
  if (t >= job.tokens) return;
  const int64_t start = blockIdx.y * job.key_head + t * job.key_row;
  float squares = 0;
  for (int64_t c = threadIdx.x % 32; c < job.head_dim; c += 32) {
    const float value = load(job.keys, start + c, job.dtype);
    squares += value * value;
  }
  for (int step = 1; step < 32; step *= 2) squares += __shfl_xor_sync(0xffffffffu, squares, step);
  if (threadIdx.x % 32 == 0) {
    job.scales[blockIdx.y * job.tokens + t] = 1.0f / (sqrtf(squares) + 1e-8f);
    job.exempted[blockIdx.y * job.tokens + t] = 0;
  }
}

__global__ void __launch_bounds__(TILE_THREADS) similarity_rows(SimilarityJob job, int32_t kind) {
  __shared__ AnyStage stage;
  __shared__ float cosines[TILE_ROWS][TILE_KEYS + 1];
  const int64_t first = blockIdx.x * static_cast<int64_t>(TILE_ROWS), head = blockIdx.y;
  const float* scales = job.scales + head * job.tokens;
  const auto start = [&](int64_t t) { return head * job.key_head + t * job.key_row; };
  const auto unit = [&](int64_t t, int c) -> float {
    return t < job.tokens ? load(job.keys, start(t) + c, job.dtype) * scales[t] : 0.0f;
  };
  const auto halves = [&](int64_t t) -> const uint16_t* {
    return t < job.tokens ? static_cast<const uint16_t*>(job.keys) + start(t) : nullptr;
  };
  const auto scale = [&](int64_t t) { return t < job.tokens ? scales[t] : 0.0f; };
  const int row = threadIdx.x / QUADS, part = threadIdx.x % QUADS;
  const int64_t a = first + row;
  float total = 0, value = 0;
  int column = -1;
  for (int64_t begin = 0; begin < job.tokens; begin += TILE_KEYS) {
    const auto depth = static_cast<int32_t>(job.head_dim);
    if (kind == KVB_F32) {
      tile_products(
          depth, [&](int r, int c) { return unit(first + r, c); },
          [&](int k, int c) { return unit(begin + k, c); },
          [&](int r, int k, float x) { cosines[r][k] = first + r == begin + k ? 0.0f : x; },
          stage.floats);
    } else {
      half_products(
          kind, depth, [&](int r) { return halves(first + r); },
          [&](int k) { return halves(begin + k); },
          [&](int r, int k, float x) {
            x *= scale(first + r) * scale(begin + k);
            cosines[r][k] = first + r == begin + k ? 0.0f : x;
          },
          stage.halves);
    }
    __syncthreads();
    for (int k = part; k < TILE_KEYS && begin + k < job.tokens; k += QUADS) {
      const float cosine = cosines[row][k];
      total += cosine;
      if (cosine > job.threshold) {
        column = static_cast<int>(begin + k);
        value = cosine;
      } else if (begin + k == 0) {
        value = cosine;
      }
    }
    __syncthreads();
  }
  total = quad_sum(total);
  for (int step = 1; step < QUADS; step *= 2) {
    const int other = __shfl_xor_sync(0xffffffffu, column, step);
    const float with = __shfl_xor_sync(0xffffffffu, value, step);
    // Without a column above the threshold, part 0 holds the cosine with column 0.
    const bool better = other > column || (other == column && other < 0 && (part & step));
    if (better) {
      column = other;
      value = with;
    }
  }
  if (part != 0 || a >= job.tokens) return;
  job.sums[head * job.tokens + a] = total;
  const long long fixed = __double2ll_rn(static_cast<double>(value) * FIXED_POINT);
  atomicAdd(job.exempted + head * job.tokens + max(column, 0),
            static_cast<unsigned long long>(fixed));
}

__global__ void similarity_means(SimilarityJob job, float* means) {
  const int64_t t = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (t >= job.tokens) return;
  const int64_t i = blockIdx.y * job.tokens + t;
  const double off = static_cast<double>(static_cast<long long>(job.exempted[i])) / FIXED_POINT;
  means[i] = static_cast<float>((job.sums[i] - off) / static_cast<double>(job.tokens));
}

}  // namespace kvb

extern "C" int64_t kvb_similarity_workspace(int64_t heads, int64_t tokens, int64_t) {
  return heads * tokens * 16;
}

extern "C" int kvb_similarity(const void* keys, int32_t dtype, int64_t key_head, int64_t key_row,
                              int64_t heads, int64_t tokens, int64_t head_dim, float threshold,
                              float* means, void* workspace, int32_t, void* stream) {
  using namespace kvb;
  if (heads == 0 || tokens == 0) return 0;
  const auto queue = static_cast<cudaStream_t>(stream);
  SimilarityJob job = {keys,     dtype,     key_head, key_row, tokens,
                       head_dim, threshold, nullptr,  nullptr, nullptr};
  job.exempted = static_cast<unsigned long long*>(workspace);
  job.scales = reinterpret_cast<float*>(job.exempted + heads * tokens);
  job.sums = job.scales + heads * tokens;
  const auto y = static_cast<unsigned>(heads);
  const auto warps = static_cast<unsigned>(ceil_div(tokens, 8));
  KVB_LAUNCH(key_scales, dim3(warps, y), 256, 0, queue, job);
  const auto tiles = static_cast<unsigned>(ceil_div(tokens, TILE_ROWS));
  KVB_LAUNCH(similarity_rows, dim3(tiles, y), TILE_THREADS, 0, queue, job,
             product_kind(dtype, dtype));
  const auto blocks = static_cast<unsigned>(ceil_div(tokens, 256));
  KVB_LAUNCH(similarity_means, dim3(blocks, y), 256, 0, queue, job, means);
  return cudaGetLastError();
}

#endif
