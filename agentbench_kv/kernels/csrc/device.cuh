// What the CUDA entries share: launches, a tile of products held in registers, and reductions of
// four threads.
#pragma once
#include "rows.h"

#ifdef KVB_DEVICE
#ifdef __CUDACC__
#include <cuda_runtime.h>
#define KVB_LAUNCH(kernel, grid, block, shared, stream, ...) \
  kernel<<<grid, block, shared, stream>>>(__VA_ARGS__)
#else
#include "cuda_emulation.h"  // tests/kernels/emulation
#define KVB_LAUNCH(kernel, grid, block, shared, stream, ...) \
  emulation::launch(#kernel, grid, block, shared, stream, [&] { kernel(__VA_ARGS__); })
#endif

namespace kvb {

#ifdef __CUDACC__
// What a launch asks for; aligned for any word.
__device__ __forceinline__ char* dynamic_shared() {
  extern __shared__ uint4 words[];
  return reinterpret_cast<char*>(words);
}
#else
using emulation::dynamic_shared;
#endif

constexpr int TILE_ROWS = 64, TILE_KEYS = 64, TILE_DEPTH = 32, TILE_THREADS = 256;
constexpr int QUADS = TILE_THREADS / TILE_ROWS;  // threads that share a row
static_assert(TILE_ROWS == TILE_KEYS, "tile_products loads both factors in one loop");

// A slice of both factors, TILE_DEPTH channels deep.
struct ProductStage {
  float left[TILE_DEPTH][TILE_ROWS + 1];
  float right[TILE_DEPTH][TILE_KEYS + 1];
};

__device__ __forceinline__ float quad_sum(float x) {
  for (int step = 1; step < QUADS; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// finish(row, key, sum over c of left(row, c) * right(key, c)) for every pair of the tile; a thread
// holds 4 x 4 of them. The caller synchronises before it reads what `finish` wrote.
template <class Left, class Right, class Finish>
__device__ __forceinline__ void tile_products(int32_t depth, const Left& left, const Right& right,
                                              const Finish& finish, ProductStage& stage) {
  const int x = threadIdx.x % 16, y = threadIdx.x / 16;
  float total[4][4] = {};
  for (int32_t begin = 0; begin < depth; begin += TILE_DEPTH) {
    __syncthreads();
    for (int i = threadIdx.x; i < TILE_ROWS * TILE_DEPTH; i += TILE_THREADS) {
      const int c = i % TILE_DEPTH, row = i / TILE_DEPTH;
      const bool inside = begin + c < depth;
      stage.left[c][row] = inside ? left(row, begin + c) : 0.0f;
      stage.right[c][row] = inside ? right(row, begin + c) : 0.0f;
    }
    __syncthreads();
#pragma unroll 8
    for (int c = 0; c < TILE_DEPTH; ++c) {
      float a[4], b[4];
      for (int i = 0; i < 4; ++i) a[i] = stage.left[c][y * 4 + i];
      for (int j = 0; j < 4; ++j) b[j] = stage.right[c][x + 16 * j];
      for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 4; ++j) total[i][j] = fmaf(a[i], b[j], total[i][j]);
      }
    }
  }
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) finish(y * 4 + i, x + 16 * j, total[i][j]);
  }
}

// ---- products of halves, on tensor cores ----

constexpr int HALF_DEPTH = 64, HALF_PITCH = HALF_DEPTH + 8;  // 8: no two lanes share a bank

// A slice of both factors, HALF_DEPTH channels deep, each row's channels one after the other.
struct HalfStage {
  alignas(16) uint16_t left[TILE_ROWS][HALF_PITCH];
  alignas(16) uint16_t right[TILE_KEYS][HALF_PITCH];
};

#ifdef __CUDACC__
// Adds a product of 16 x 16 by 16 x 8 halves to a warp's 16 x 8 sums; PTX ISA, mma.m16n8k16, says
// which lane holds what.
template <int32_t DTYPE>
__device__ __forceinline__ void mma(float (&sums)[4], const uint32_t (&a)[4],
                                    const uint32_t (&b)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if (DTYPE == KVB_BF16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
#else
  (void)sums, (void)a, (void)b;  // `has_halves` keeps older GPUs from coming here
#endif
}

// Whether this device multiplies halves as `mma` does.
inline bool has_halves() {
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major >= 8;
}
#else
using emulation::has_halves;
using emulation::mma;
#endif

// Copies a slice of rows of halves, zeros where there is no row (null) or no channel.
template <class Row>
__device__ __forceinline__ void stage_halves(int32_t begin, int32_t depth, const Row& row,
                                             uint16_t (*to)[HALF_PITCH]) {
  constexpr int WORDS = HALF_DEPTH / 8;  // of 16 bytes
  for (int i = threadIdx.x; i < TILE_ROWS * WORDS; i += TILE_THREADS) {
    const int r = i / WORDS, c = i % WORDS * 8;
    const uint16_t* from = row(r);
    const bool whole = from && begin + c + 8 <= depth &&
                       reinterpret_cast<uintptr_t>(from + begin + c) % 16 == 0;
    if (whole) {
      memcpy(&to[r][c], __builtin_assume_aligned(from + begin + c, 16), 16);
    } else {
      for (int j = 0; j < 8; ++j) {
        to[r][c + j] = from && begin + c + j < depth ? from[begin + c + j] : uint16_t{0};
      }
    }
  }
}

// As `tile_products`, of halves of one dtype: `left(row)` and `right(key)` say where their channels
// are, null for none. A warp has 16 rows by 32 keys. Products are exact, sums are floats.
template <int32_t DTYPE, class Left, class Right, class Finish>
__device__ __forceinline__ void half_products(int32_t depth, const Left& left, const Right& right,
                                              const Finish& finish, HalfStage& stage) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp / 2 * 16 + lane / 4, key = warp % 2 * 32, pair = lane % 4 * 2;
  float sums[4][4] = {};
  for (int32_t begin = 0; begin < depth; begin += HALF_DEPTH) {
    __syncthreads();
    stage_halves(begin, depth, left, stage.left);
    stage_halves(begin, depth, right, stage.right);
    __syncthreads();
    const auto two = [](const uint16_t* from) {
      uint32_t both;
      memcpy(&both, __builtin_assume_aligned(from, 4), 4);
      return both;
    };
#pragma unroll
    for (int c = 0; c < HALF_DEPTH; c += 16) {
      const uint32_t a[4] = {two(&stage.left[row][c + pair]), two(&stage.left[row + 8][c + pair]),
                             two(&stage.left[row][c + pair + 8]),
                             two(&stage.left[row + 8][c + pair + 8])};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint16_t* other = &stage.right[key + j * 8 + lane / 4][c + pair];
        const uint32_t b[2] = {two(other), two(other + 8)};
        mma<DTYPE>(sums[j], a, b);
      }
    }
  }
  for (int j = 0; j < 4; ++j) {
    for (int i = 0; i < 4; ++i) {
      finish(row + i / 2 * 8, key + j * 8 + pair + i % 2, sums[j][i]);
    }
  }
}

// What a kernel that multiplies keys takes shared memory for.
union AnyStage {
  ProductStage floats;
  HalfStage halves;
};

// `half_products` of a dtype that is known when the kernel is launched.
template <class Left, class Right, class Finish>
__device__ __forceinline__ void half_products(int32_t dtype, int32_t depth, const Left& left,
                                              const Right& right, const Finish& finish,
                                              HalfStage& stage) {
  if (dtype == KVB_BF16) {
    half_products<KVB_BF16>(depth, left, right, finish, stage);
  } else {
    half_products<KVB_F16>(depth, left, right, finish, stage);
  }
}

// Which products a launch makes: a dtype of halves, or KVB_F32 for floats made of any.
inline int32_t product_kind(int32_t left, int32_t right) {
  return left == right && left != KVB_F32 && has_halves() ? left : KVB_F32;
}

}  // namespace kvb
#endif
