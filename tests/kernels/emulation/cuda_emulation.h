// As much of CUDA as the kernels use, on the CPU, made to find errors and not to be fast.
//
// Every thread of a block is a fiber of one OS thread; blocks run one after the other. A fiber runs
// until it waits. What lacks a barrier therefore depends on the order in which fibers run, which
// KVB_EMULATION_ORDER chooses: `ascending`, `descending`, or a number, the seed of a random one.
//
// A launch ends at the first error, and the text of its code says what happened where: lanes of a
// warp or threads of a block that wait at different places, a lane named by a mask that has exited,
// writes beside dynamic shared memory, launches that CUDA refuses, and what the undefined behaviour
// sanitizer finds if the library is built with it.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "rows.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
// All in one section, so that it can be poisoned when a block begins.
#define __shared__ static __attribute__((section("emulated_shared")))

extern char __start_emulated_shared[] __attribute__((visibility("hidden")));
extern char __stop_emulated_shared[] __attribute__((visibility("hidden")));

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

struct alignas(8) float2 {
  float x, y;
};

struct alignas(8) int2 {
  int x, y;
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

inline float2 make_float2(float x, float y) { return {x, y}; }
inline int2 make_int2(int x, int y) { return {x, y}; }

typedef int cudaError_t;
typedef void* cudaStream_t;
constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9,
                      cudaErrorLaunchFailure = 719;

namespace emulation {

constexpr size_t STACK_BYTES = 64 << 10, SHARED_BYTES = 48 << 10, CANARY_BYTES = 4096;
constexpr unsigned WARP = 32, MOST_THREADS = 1024, MOST_BLOCKS = 65535;
constexpr int POISON = 0xff;
constexpr char CANARY = 0x5a;

// Where a fiber waits. Fibers meet only at the same operation of the same line.
struct Site {
  const char* operation;
  const char* file;
  int line;
  int step;  // of a shuffle; 0 for what has none

  bool operator==(const Site& other) const {
    return line == other.line && step == other.step && !strcmp(operation, other.operation) &&
           !strcmp(file, other.file);
  }

  std::string text() const {
    const char* slash = strrchr(file, '/');
    return std::string(operation) + " (" + (slash ? slash + 1 : file) + ":" + std::to_string(line) +
           (step ? ", step " + std::to_string(step) : "") + ")";
  }
};

enum State { READY, AT_WARP, AT_BLOCK, EXITED };

struct Fiber {
  ucontext_t context;
  State state;
  Site site;
  unsigned mask;
  uint64_t given, taken;  // what lanes exchange
};

struct Machine {
  std::string kernel, said;
  cudaError_t error = cudaSuccess, explained = cudaSuccess;
  void (*body)(const void*) = nullptr;
  const void* arguments = nullptr;
  std::vector<Fiber> fibers;
  unsigned threads = 0, current = 0;
  ucontext_t scheduler;
  char* stacks = nullptr;
  std::vector<char> dynamic;
  bool descending = false, shuffled = false;
  std::mt19937_64 random;
};

inline Machine machine;

inline void fail(cudaError_t code, const std::string& what) {
  if (machine.error) return;
  machine.error = machine.explained = code;
  machine.said = machine.kernel + ": " + what;
}

inline std::string name_of(unsigned thread) {
  return "thread " + std::to_string(thread) + " of block (" + std::to_string(blockIdx.x) + ", " +
         std::to_string(blockIdx.y) + ", " + std::to_string(blockIdx.z) + ")";
}

// 0 to count - 1, in the order that is tried.
inline std::vector<unsigned> in_order(unsigned count) {
  std::vector<unsigned> numbers(count);
  for (unsigned i = 0; i < count; ++i) numbers[i] = machine.descending ? count - 1 - i : i;
  if (machine.shuffled) std::shuffle(numbers.begin(), numbers.end(), machine.random);
  return numbers;
}

inline void choose_order() {
  const char* asked = getenv("KVB_EMULATION_ORDER");
  const std::string wanted = asked ? asked : "ascending";
  machine.descending = wanted == "descending";
  machine.shuffled = wanted != "descending" && wanted != "ascending";
  if (machine.shuffled) machine.random.seed(strtoull(wanted.c_str(), nullptr, 10));
}

// ---- fibers ----

inline Fiber& self() { return machine.fibers[machine.current]; }

inline void wait(State state, const Site& site) {
  self().state = state;
  self().site = site;
  swapcontext(&self().context, &machine.scheduler);
}

inline void fiber_main() {
  machine.body(machine.arguments);
  self().state = EXITED;
}

inline void start_fiber(unsigned thread) {
  Fiber& fiber = machine.fibers[thread];
  fiber.state = READY;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = machine.stacks + thread * STACK_BYTES;
  fiber.context.uc_stack.ss_size = STACK_BYTES;
  fiber.context.uc_link = &machine.scheduler;
  makecontext(&fiber.context, fiber_main, 0);
}

inline void resume(unsigned thread) {
  machine.current = thread;
  threadIdx = dim3(thread % blockDim.x, thread / blockDim.x % blockDim.y,
                   thread / blockDim.x / blockDim.y);
  swapcontext(&machine.scheduler, &machine.fibers[thread].context);
}

// ---- warps ----

inline unsigned lanes_of(unsigned warp) { return std::min(WARP, machine.threads - warp * WARP); }

inline Fiber& lane_of(unsigned warp, unsigned lane) { return machine.fibers[warp * WARP + lane]; }

inline bool meets(const Fiber& fiber, unsigned warp, unsigned lane) {
  if (lane >= lanes_of(warp)) return false;
  const Fiber& other = lane_of(warp, lane);
  return other.state == AT_WARP && other.site == fiber.site && other.mask == fiber.mask;
}

// The first lane of the fiber's mask that has not come to it; WARP if all have.
inline unsigned missing(const Fiber& fiber, unsigned warp) {
  for (unsigned lane = 0; lane < WARP; ++lane) {
    if (fiber.mask >> lane & 1u && !meets(fiber, warp, lane)) return lane;
  }
  return WARP;
}

inline uint64_t exchanged(const Fiber& fiber, unsigned warp, unsigned lane) {
  if (fiber.site.step) return lane_of(warp, lane ^ static_cast<unsigned>(fiber.site.step)).given;
  uint64_t ballot = 0;
  for (unsigned i = 0; i < WARP; ++i) {
    if (fiber.mask >> i & 1u) ballot |= lane_of(warp, i).given << i;
  }
  return ballot;
}

inline void report_stuck(const Fiber& fiber, unsigned warp, unsigned lane) {
  const unsigned absent = missing(fiber, warp);
  std::string why = " does not exist";
  if (absent < lanes_of(warp)) {
    const Fiber& other = lane_of(warp, absent);
    why = other.state == EXITED ? " has exited" : " waits at " + other.site.text();
  }
  fail(cudaErrorLaunchFailure, name_of(warp * WARP + lane) + " waits at " + fiber.site.text() +
                                   ", but lane " + std::to_string(absent) + why);
}

// Ends the operations that all their lanes have come to. Lanes that wait while none can go on would
// wait for ever.
inline void release_warp(unsigned warp) {
  std::vector<unsigned> free;
  int stuck = -1;
  for (unsigned lane = 0; lane < lanes_of(warp); ++lane) {
    Fiber& fiber = lane_of(warp, lane);
    if (fiber.state != AT_WARP) continue;
    if (missing(fiber, warp) == WARP) {
      fiber.taken = exchanged(fiber, warp, lane);
      free.push_back(lane);
    } else {
      stuck = static_cast<int>(lane);
    }
  }
  for (const unsigned lane : free) lane_of(warp, lane).state = READY;
  if (free.empty() && stuck >= 0) report_stuck(lane_of(warp, stuck), warp, stuck);
}

// Runs every lane that can to where it waits next; whether there was one.
inline bool step_warp(unsigned warp) {
  bool ran = false;
  for (const unsigned lane : in_order(lanes_of(warp))) {
    if (lane_of(warp, lane).state != READY || machine.error) continue;
    resume(warp * WARP + lane);
    ran = true;
  }
  if (ran && !machine.error) release_warp(warp);
  return ran && !machine.error;
}

// ---- blocks ----

// Whether a fiber is left that can run.
inline bool release_block() {
  const Fiber* first = nullptr;
  for (const Fiber& fiber : machine.fibers) {
    if (fiber.state == READY) return true;
    if (fiber.state != AT_BLOCK) continue;
    if (first && !(fiber.site == first->site)) {
      fail(cudaErrorLaunchFailure, "threads of block " + std::to_string(blockIdx.x) + " wait at " +
                                       first->site.text() + " and at " + fiber.site.text());
      return false;
    }
    if (!first) first = &fiber;
  }
  for (Fiber& fiber : machine.fibers) {
    if (fiber.state == AT_BLOCK) fiber.state = READY;
  }
  return first != nullptr;
}

inline void prepare_shared(size_t bytes) {
  memset(__start_emulated_shared, POISON, __stop_emulated_shared - __start_emulated_shared);
  machine.dynamic.assign(bytes + 2 * CANARY_BYTES + 16, CANARY);
}

// Aligned to 16 bytes, and no better.
inline char* dynamic_shared() {
  const auto start = reinterpret_cast<uintptr_t>(machine.dynamic.data()) + CANARY_BYTES;
  return reinterpret_cast<char*>((start + 15) / 16 * 16);
}

inline void check_canaries(size_t bytes) {
  const char* begin = dynamic_shared();
  for (const char& byte : machine.dynamic) {
    if (byte != CANARY && (&byte < begin || &byte >= begin + bytes)) {
      return fail(cudaErrorLaunchFailure, "writes " + std::to_string(&byte - begin) +
                                              " bytes into dynamic shared memory of " +
                                              std::to_string(bytes) + " bytes");
    }
  }
}

// A warp after the other as far as it gets, or in turns of any length.
inline void run_block(size_t dynamic_bytes) {
  prepare_shared(dynamic_bytes);
  memset(dynamic_shared(), POISON, dynamic_bytes);
  for (unsigned thread = 0; thread < machine.threads; ++thread) start_fiber(thread);
  do {
    for (const unsigned warp : in_order((machine.threads + WARP - 1) / WARP)) {
      while (step_warp(warp) && !(machine.shuffled && machine.random() % 4 == 0)) {
      }
    }
  } while (!machine.error && release_block());
  if (!machine.error) check_canaries(dynamic_bytes);
}

inline bool refused(dim3 grid, dim3 block, size_t dynamic_bytes) {
  const bool empty = !grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z;
  const bool wide = grid.x > INT32_MAX || grid.y > MOST_BLOCKS || grid.z > MOST_BLOCKS;
  if (empty || wide || 1ull * block.x * block.y * block.z > MOST_THREADS) {
    fail(cudaErrorInvalidConfiguration, "no such grid or block can be launched");
  } else if (dynamic_bytes > SHARED_BYTES) {
    fail(cudaErrorInvalidValue, "more than 48 KB of shared memory");
  }
  return machine.error != cudaSuccess;
}

template <class Body>
void launch(const char* kernel, dim3 grid, dim3 block, size_t dynamic_bytes, cudaStream_t,
            const Body& body) {
  if (machine.error) return;
  machine.kernel = kernel;
  if (refused(grid, block, dynamic_bytes)) return;
  choose_order();
  gridDim = grid;
  blockDim = block;
  machine.threads = block.x * block.y * block.z;
  machine.fibers.resize(machine.threads);
  machine.arguments = &body;
  machine.body = [](const void* arguments) { (*static_cast<const Body*>(arguments))(); };
  if (!machine.stacks) {
    machine.stacks = static_cast<char*>(mmap(nullptr, STACK_BYTES * MOST_THREADS,
                                             PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                                             -1, 0));
  }
  for (const unsigned i : in_order(grid.x * grid.y * grid.z)) {
    blockIdx = dim3(i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y);
    run_block(dynamic_bytes);
    if (machine.error) return;
  }
}

// Waits for all lanes in the mask, and returns what they exchange.
inline uint64_t meet(unsigned mask, uint64_t given, const Site& site) {
  const unsigned lane = machine.current % WARP, other = lane ^ static_cast<unsigned>(site.step);
  if (!(mask >> lane & 1u) || other >= WARP || !(mask >> other & 1u)) {
    fail(cudaErrorLaunchFailure, name_of(machine.current) + " is outside of the mask, or lane " +
                                     std::to_string(other) + " is, at " + site.text());
  }
  self().mask = mask;
  self().given = given;
  wait(AT_WARP, site);
  return self().taken;
}

// ---- tensor cores ----

inline bool has_halves() { return true; }

struct Registers {
  uint32_t a[4], b[2];
};

inline Registers registers[MOST_THREADS];

inline float half_at(uint32_t word, int which, bool bf16) {
  const uint16_t bits = static_cast<uint16_t>(word >> 16 * which);
  return bf16 ? kvb::from_bf16(bits) : kvb::from_f16(bits);
}

// Row `r` and channel `c` of the left factor, from the lanes that hold it.
inline float left_at(const Registers* lanes, int r, int c, bool bf16) {
  return half_at(lanes[r % 8 * 4 + c % 8 / 2].a[c / 8 * 2 + r / 8], c % 2, bf16);
}

inline float right_at(const Registers* lanes, int c, int key, bool bf16) {
  return half_at(lanes[key * 4 + c % 8 / 2].b[c / 8], c % 2, bf16);
}

// A warp's product of 16 x 16 by 16 x 8 halves, laid out as PTX says of mma.m16n8k16.
template <int32_t DTYPE>
void mma(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
         const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  const unsigned lane = machine.current % WARP;
  const Registers* lanes = registers + machine.current - lane;
  memcpy(registers[machine.current].a, a, sizeof a);
  memcpy(registers[machine.current].b, b, sizeof b);
  meet(0xffffffffu, 0, {"mma", file, line, 0});
  for (int i = 0; i < 4; ++i) {
    const int r = static_cast<int>(lane) / 4 + i / 2 * 8, key = static_cast<int>(lane) % 4 * 2 + i % 2;
    for (int c = 0; c < 16; ++c) {
      sums[i] += left_at(lanes, r, c, DTYPE == KVB_BF16) * right_at(lanes, c, key, DTYPE == KVB_BF16);
    }
  }
  meet(0xffffffffu, 0, {"mma, read", file, line, 0});
}

}  // namespace emulation

// ---- what device code calls ----

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulation::wait(emulation::AT_BLOCK, {"__syncthreads", file, line, 0});
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int step, const char* file = __builtin_FILE(),
                  int line = __builtin_LINE()) {
  uint64_t bits = 0;
  static_assert(sizeof value <= sizeof bits, "wider than CUDA shuffles");
  memcpy(&bits, &value, sizeof value);
  bits = emulation::meet(mask, bits, {"__shfl_xor_sync", file, line, step});
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline unsigned __ballot_sync(unsigned mask, bool yes, const char* file = __builtin_FILE(),
                              int line = __builtin_LINE()) {
  return static_cast<unsigned>(emulation::meet(mask, yes, {"__ballot_sync", file, line, 0}));
}

template <class T>
T atomicAdd(T* place, T value) {
  const T before = *place;
  *place = before + value;
  return before;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int max(int a, int b) { return a > b ? a : b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline long long __double2ll_rn(double x) { return llrint(x); }

inline cudaError_t cudaGetLastError() {
  const cudaError_t error = emulation::machine.error;
  emulation::machine.error = cudaSuccess;
  return error;
}

inline const char* cudaGetErrorString(cudaError_t code) {
  const bool known = code != cudaSuccess && code == emulation::machine.explained;
  emulation::machine.explained = cudaSuccess;
  if (known) return emulation::machine.said.c_str();
  return code == cudaErrorInvalidValue ? "invalid argument" : "no error";
}

// ---- the undefined behaviour sanitizer ----

#ifdef KVB_EMULATION_SANITIZED
extern "C" void __ubsan_get_current_report_data(const char** kind, const char** message,
                                                const char** file, unsigned* line, unsigned* column,
                                                char** address);

// The sanitizer calls this for every finding.
extern "C" void __ubsan_on_report() {
  const char *kind, *message, *file;
  unsigned line, column;
  char* address;
  __ubsan_get_current_report_data(&kind, &message, &file, &line, &column, &address);
  emulation::fail(cudaErrorLaunchFailure, emulation::name_of(emulation::machine.current) + " at " +
                                              file + ":" + std::to_string(line) + ": " + message);
}
#endif
