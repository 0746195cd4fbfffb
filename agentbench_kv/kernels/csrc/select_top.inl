// Exact top-B of every row by radix selection; ties to the lower position, or to the lower index.
//
// A candidate's key is 64 bits wide: its score's order-preserving bits, then its position upside down.
// Keys of one row are distinct, so the rows taken are those from some key up, which is found digit
// by digit from the top, 8 bits a pass. Scores seldom tie: most rows are settled before the positions.

namespace kvb {

// One row of what is chosen from.
struct Candidates {
  const float* scores;
  const uint8_t* always;
  const int64_t* positions;

  KVB_HD uint64_t key(int64_t i) const {
    const uint32_t rank = always && always[i] ? ALWAYS : rank_of(scores[i]);
    const int64_t position = positions ? positions[i] : i;
    return static_cast<uint64_t>(rank) << 32 | (0xffffffffu - static_cast<uint32_t>(position));
  }
};

KVB_HD Candidates candidates_of(const float* scores, const uint8_t* always, const int64_t* positions,
                                int64_t tokens, int64_t row) {
  Candidates c;
  c.scores = scores + row * tokens;
  c.always = always ? always + row * tokens : nullptr;
  c.positions = positions ? positions + row * tokens : nullptr;
  return c;
}

// The digits fixed so far, and how many keys that begin with them to take. Once those are all there
// are, every key from `prefix` up is taken.
struct Threshold {
  uint64_t prefix;
  int64_t take;
  int32_t shift;  // of the digit that comes next

  KVB_HD bool matches(uint64_t key) const {
    return shift == 56 || (key ^ prefix) >> (shift + 8) == 0;
  }

  KVB_HD int digit(uint64_t key) const { return static_cast<int>(key >> shift & 255u); }

  // Fixes a digit, given how many matching keys have each value of it; returns whether to go on.
  template <class Count>
  KVB_HD bool narrow(const Count* histogram) {
    int digit = 255;
    while (digit > 0 && static_cast<int64_t>(histogram[digit]) < take) {
      take -= static_cast<int64_t>(histogram[digit--]);
    }
    prefix |= static_cast<uint64_t>(digit) << shift;
    const bool whole = static_cast<int64_t>(histogram[digit]) == take;
    shift -= 8;
    return !whole && shift >= 0;
  }
};

}  // namespace kvb

#ifndef KVB_DEVICE

namespace kvb {

inline void select_row(const Candidates& row, int64_t tokens, int64_t budget, int64_t* indices) {
  const Buffer<uint64_t> keys(tokens);
  for (int64_t i = 0; i < tokens; ++i) keys[i] = row.key(i);
  Threshold threshold = {0, budget, 56};
  for (bool going = true; going;) {
    int64_t histogram[256] = {};
    for (int64_t i = 0; i < tokens; ++i) {
      if (threshold.matches(keys[i])) ++histogram[threshold.digit(keys[i])];
    }
    going = threshold.narrow(histogram);
  }
  for (int64_t i = 0, at = 0; at < budget; ++i) {
    if (keys[i] >= threshold.prefix) indices[at++] = i;
  }
}

}  // namespace kvb

extern "C" int kvb_select_top(const float* scores, const uint8_t* always, const int64_t* positions,
                              int64_t rows, int64_t tokens, int64_t budget, int64_t* indices,
                              int32_t threads, void*) {
  if (budget == 0) return 0;
  kvb::parallel_for(rows, rows * tokens * 8, threads, [&](int64_t row) {
    kvb::select_row(kvb::candidates_of(scores, always, positions, tokens, row), tokens, budget,
                    indices + row * budget);
  });
  return 0;
}

#else

namespace kvb {

constexpr int SELECT_THREADS = 1024;

// For each thread, how many threads before it in the block say yes, and how many do in all.
__device__ __forceinline__ int2 count_before(bool yes, int* warps) {
  const unsigned ballot = __ballot_sync(0xffffffffu, yes);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 0) warps[warp] = __popc(ballot);
  __syncthreads();
  int before = __popc(ballot & ((1u << lane) - 1)), total = 0;
  for (int w = 0; w < SELECT_THREADS / 32; ++w) {
    if (w < warp) before += warps[w];
    total += warps[w];
  }
  __syncthreads();
  return make_int2(before, total);
}

__global__ void __launch_bounds__(SELECT_THREADS)
    select_rows(const float* scores, const uint8_t* always, const int64_t* positions, int64_t tokens,
                int64_t budget, int64_t* all_indices) {
  __shared__ unsigned histogram[256];
  __shared__ Threshold threshold;
  __shared__ bool going;
  __shared__ int warps[SELECT_THREADS / 32];
  const Candidates row = candidates_of(scores, always, positions, tokens, blockIdx.x);
  int64_t* indices = all_indices + blockIdx.x * budget;
  if (threadIdx.x == 0) {
    threshold.prefix = 0;
    threshold.take = budget;
    threshold.shift = 56;
    going = true;
  }
  __syncthreads();
  while (going) {
    for (int i = threadIdx.x; i < 256; i += SELECT_THREADS) histogram[i] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < tokens; i += SELECT_THREADS) {
      const uint64_t key = row.key(i);
      if (threshold.matches(key)) atomicAdd(&histogram[threshold.digit(key)], 1u);
    }
    __syncthreads();
    if (threadIdx.x == 0) going = threshold.narrow(histogram);
    __syncthreads();
  }
  int64_t written = 0;
  for (int64_t first = 0; first < tokens; first += SELECT_THREADS) {
    const int64_t i = first + threadIdx.x;
    const bool taken = i < tokens && row.key(i) >= threshold.prefix;
    const int2 takens = count_before(taken, warps);
    // Keys are equal where positions are, against the rules; then more rows are above the threshold.
    if (taken && written + takens.x < budget) indices[written + takens.x] = i;
    written += takens.y;
  }
}

}  // namespace kvb

extern "C" int kvb_select_top(const float* scores, const uint8_t* always, const int64_t* positions,
                              int64_t rows, int64_t tokens, int64_t budget, int64_t* indices,
                              int32_t, void* stream) {
  if (rows == 0 || budget == 0) return 0;
  const auto queue = static_cast<cudaStream_t>(stream);
  KVB_LAUNCH(kvb::select_rows, static_cast<unsigned>(rows), kvb::SELECT_THREADS, 0, queue, scores,
             always, positions, tokens, budget, indices);
  return cudaGetLastError();
}

#endif
