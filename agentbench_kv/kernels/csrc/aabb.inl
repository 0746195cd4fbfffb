// MemArt's block index: a box around the keys of each block, and the most a query can get from it.

namespace kvb {

struct BoxJob {
  const void* keys;
  int32_t dtype;
  int64_t key_head, key_row, tokens, head_dim, block;
  float *lows, *highs;
};

KVB_HD int64_t blocks_of(const BoxJob& job) { return ceil_div(job.tokens, job.block); }

}  // namespace kvb

#ifdef KVB_DEVICE

namespace kvb {

__global__ void boxes(BoxJob job) {
  const int64_t first = blockIdx.x * job.block, end = smaller(first + job.block, job.tokens);
  const int64_t to = (blockIdx.y * blocks_of(job) + blockIdx.x) * job.head_dim;
  for (int64_t c = threadIdx.x; c < job.head_dim; c += blockDim.x) {
    float low = INFINITY, high = -INFINITY;
    for (int64_t t = first; t < end; ++t) {
      const float x = load(job.keys, blockIdx.y * job.key_head + t * job.key_row + c, job.dtype);
      low = fminf(low, x);
      high = fmaxf(high, x);
    }
    job.lows[to + c] = low;
    job.highs[to + c] = high;
  }
}

}  // namespace kvb

#else

namespace kvb {

constexpr int64_t BOX_STRIP = NARROW * LANES;  // queries

inline void box(const BoxJob& job, int64_t head, int64_t number) {
  const int64_t first = number * job.block, end = smaller(first + job.block, job.tokens);
  float* __restrict low = job.lows + (head * blocks_of(job) + number) * job.head_dim;
  float* __restrict high = job.highs + (head * blocks_of(job) + number) * job.head_dim;
  std::fill_n(low, job.head_dim, -MINUS_INFINITY);
  std::fill_n(high, job.head_dim, MINUS_INFINITY);
  const Buffer<float> buffer(job.head_dim);
  float* __restrict row = buffer.get();
  for (int64_t t = first; t < end; ++t) {
    const int64_t start = head * job.key_head + t * job.key_row;
    const char* from = static_cast<const char*>(job.keys) + start * size_of(job.dtype);
    to_floats(from, job.dtype, job.head_dim, row);
    for (int64_t c = 0; c < job.head_dim; ++c) {
      low[c] = row[c] < low[c] ? row[c] : low[c];
      high[c] = row[c] > high[c] ? row[c] : high[c];
    }
  }
}

// Scores of a strip of one KV head's queries. max(q * high, q * low) is q * high where q is positive
// and q * low elsewhere: a product of [q+, q-] with [high, low].
inline void box_strip(const float* queries, int64_t count, const float* const* corners,
                      int64_t blocks, int64_t head_dim, float* scores) {
  Buffer<Floats> packed(2 * head_dim * NARROW), products(blocks * NARROW);
  std::fill_n(packed.get(), 2 * head_dim * NARROW, Floats{});
  float* lanes = reinterpret_cast<float*>(packed.get());
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t c = 0; c < head_dim; ++c) {
      const float q = queries[i * head_dim + c];
      lanes[c * BOX_STRIP + i] = q > 0 ? q : 0.0f;
      lanes[(head_dim + c) * BOX_STRIP + i] = q > 0 ? 0.0f : q;
    }
  }
  all_products<Singles, NARROW, false>(corners, blocks, packed.get(), 2 * head_dim, 1.0f, products.get());
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t b = 0; b < blocks; ++b) {
      scores[i * blocks + b] = products[b * NARROW + i / LANES][i % LANES];
    }
  }
}

inline void box_head(const float* queries, int64_t rows, const float* lows, const float* highs,
                     int64_t blocks, int64_t head_dim, float* scores) {
  Buffer<float> both(blocks * 2 * head_dim);
  std::vector<const float*> corners(blocks);
  for (int64_t b = 0; b < blocks; ++b) {
    float* to = both.get() + b * 2 * head_dim;
    std::copy_n(highs + b * head_dim, head_dim, to);
    std::copy_n(lows + b * head_dim, head_dim, to + head_dim);
    corners[b] = to;
  }
  for (int64_t first = 0; first < rows; first += BOX_STRIP) {
    box_strip(queries + first * head_dim, smaller(BOX_STRIP, rows - first), corners.data(), blocks,
              head_dim, scores + first * blocks);
  }
}

}  // namespace kvb

#endif

extern "C" int kvb_aabb(const void* keys, int32_t dtype, int64_t key_head, int64_t key_row,
                        int64_t heads, int64_t tokens, int64_t head_dim, int64_t block, float* lows,
                        float* highs, int32_t threads, void* stream) {
  const kvb::BoxJob job = {keys, dtype, key_head, key_row, tokens, head_dim, block, lows, highs};
  const int64_t blocks = kvb::blocks_of(job);
  if (heads == 0 || blocks == 0) return 0;
#ifdef KVB_DEVICE
  (void)threads;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(heads));
  KVB_LAUNCH(kvb::boxes, grid, 128, 0, static_cast<cudaStream_t>(stream), job);
  return cudaGetLastError();
#else
  (void)stream;
  kvb::parallel_for(heads * blocks, heads * tokens * head_dim, threads,
                    [&](int64_t i) { kvb::box(job, i / blocks, i % blocks); });
  return 0;
#endif
}

#ifndef KVB_DEVICE  // a GPU's own matrix products are faster
extern "C" int kvb_aabb_score(const float* queries, const float* lows, const float* highs,
                              int64_t q_heads, int64_t n, int64_t group, int64_t blocks,
                              int64_t head_dim, float* scores, int32_t threads, void* stream) {
  (void)stream;
  const int64_t count = q_heads * n * blocks, rows = group * n, corners = blocks * head_dim;
  if (count == 0) return 0;
  kvb::parallel_for(q_heads / group, count * head_dim, threads, [&](int64_t h) {
    kvb::box_head(queries + h * rows * head_dim, rows, lows + h * corners, highs + h * corners,
                  blocks, head_dim, scores + h * rows * blocks);
  });
  return 0;
}
#endif
