// The C interface of the compaction kernels: raw pointers, sizes, strides and a stream.
//
// One header for two libraries with the same symbols: the CPU one, built by a C++17 compiler, and
// the CUDA one, built by nvcc. Nothing here knows PyTorch, so one library serves every engine.
//
// Conventions
//   - Pointers are device pointers in the CUDA library, except the structs passed by value.
//   - Strides are in bytes unless said otherwise; the innermost dimension is contiguous.
//   - A cache is paged: row `r` of session `s` lies in block `blocks[s][r / block_size]`. A
//     contiguous cache is one whose sessions have one block each, of `block_size` = capacity.
//   - Functions return 0, or an error code that `kvb_error` explains. CUDA calls are asynchronous.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum kvb_dtype { KVB_F32 = 0, KVB_F16 = 1, KVB_BF16 = 2 };

enum kvb_gqa { KVB_MEAN_PROB = 0, KVB_MAX_PROB = 1, KVB_MAX_LOGIT = 2, KVB_PER_HEAD = 3 };

// Rows of one tensor: keys, values, positions, or anything else that belongs to a row.
typedef struct {
  char* base;                    // the first row of block 0, head 0, of the first layer
  const int64_t* layer_offsets;  // bytes from base to each layer; NULL: `layer` apart
  int64_t layer, head, block, row;
  int64_t bytes;  // of one row
} kvb_rows;

// Which blocks a session's rows lie in.
typedef struct {
  const int32_t* blocks;  // [sessions, stride]; NULL: session s has the one block s
  int64_t stride;         // entries
  int64_t block_size;     // rows
  int64_t block_shift;    // its logarithm to base 2; -1 if it is no power of two
} kvb_table;

typedef struct {
  int32_t sessions, layers, heads;  // heads: KV heads
} kvb_shape;

// Moves the kept rows of every (session, layer, head) to rows 0..counts[s]-1, in place.
//   kept [sessions, layers, heads, budget]: ascending and distinct, the first counts[s] count.
//   counts [sessions]: NULL means `budget` for all.
//   sorted: keep the order of `kept`; otherwise rows past the new end fill holes.
//   CUDA takes up to 8 tensors, and sorts rows of up to 48 KB.
//   moved: int64, the rows moved are added to it.
int kvb_compact(const kvb_rows* tensors, int32_t n_tensors, kvb_table table, kvb_shape shape,
                const int64_t* kept, int64_t budget, const int64_t* counts, int32_t sorted,
                int64_t* moved, int32_t threads, void* stream);

typedef struct {
  const void* queries;  // [sessions, layers, heads * group, n, head_dim], contiguous
  int32_t query_dtype, key_dtype, gqa;
  int32_t group, n, head_dim;
  kvb_rows keys;
  kvb_table table;
  kvb_shape shape;
  const int64_t* lengths;  // [sessions]; NULL: `length` for all
  int64_t length;          // the longest
  const int64_t* query_positions;  // [sessions, n] or NULL
  kvb_rows key_positions;          // int64 rows in the same table; base NULL: nothing is hidden
  const uint8_t* valid;            // [sessions, n], 0 for an empty ring slot; NULL: all valid
  float* mass;       // [sessions, layers, heads, (group if per head), length], fp32; 0 past a length
} kvb_mass;

int kvb_attention_mass(const kvb_mass* job, int32_t threads, void* stream);

// The first rows of a session, which others read too: row after row of each head.
typedef struct {
  const char *keys, *values;
  int64_t head;  // bytes from head to head
  int64_t rows;
} kvb_before;

typedef struct {
  const void* queries;  // of every session, query head and query; strides in bytes
  int64_t query_session, query_head, query_row;
  void* output;         // [sessions, n, heads * group, head_dim], contiguous
  int32_t dtype;        // of queries, keys, values and output
  int32_t group, n, head_dim;
  kvb_rows keys, values;   // `block` bytes from session to session
  kvb_shape shape;         // of one layer
  const int64_t* lengths;  // [sessions], at least n: a session's rows, its queries' own last
  int64_t length;          // the longest
  int64_t window;          // rows that a query sees, its own included; 0: all before it
  const float* sinks;      // [heads * group] logits beside the rows' own; NULL: none
  const kvb_before* before;  // [sessions], counted in `lengths`; `keys` begin behind. NULL: none
  float scale;
} kvb_attend;

// Attention of each session's last n rows over its rows, each over those up to its own. In the CPU's
// library only.
int kvb_attention(const kvb_attend* job, int32_t threads, void* stream);

// Indices [rows, budget] of the highest scores [rows, tokens] of each row, ascending. Ties go to the
// lower of `positions` (distinct in a row, below 2^32; nullptr: the indices), NaN ranks last, entries
// with always != 0 come first. budget <= tokens.
int kvb_select_top(const float* scores, const uint8_t* always, const int64_t* positions,
                   int64_t rows, int64_t tokens, int64_t budget, int64_t* indices, int32_t threads,
                   void* stream);

// ring[slots[i]] = rows[i], cast. Rings and rows are [*, heads, width]; strides in elements.
// Nothing is allocated and nothing waits: safe inside a captured CUDA graph.
int kvb_ring_write(void* ring, int32_t ring_dtype, int64_t ring_row, int64_t ring_head,
                   const void* rows, int32_t row_dtype, int64_t row_row, int64_t row_head,
                   const int64_t* slots, int64_t n, int64_t heads, int64_t width, int32_t threads,
                   void* stream);

// Turns the keys of rows 0..lengths[s]-1 by shifts [sessions, layers, heads, length] positions;
// shift_layer and shift_head are strides in entries, 0 where shared. inv_freq [pairs], float64: the
// first 2 * pairs values of a row turn. interleaved: pairs are (2f, 2f+1), else (f, f + pairs).
int kvb_rope_rotate(kvb_rows keys, int32_t dtype, kvb_table table, kvb_shape shape,
                    const int64_t* lengths, int64_t length, const int64_t* shifts,
                    int64_t shift_session, int64_t shift_layer, int64_t shift_head,
                    const double* inv_freq, int32_t pairs, int32_t interleaved, int32_t threads,
                    void* stream);

// Smallest and largest value of every channel in each run of `block` rows of keys
// [heads, tokens, head_dim] (strides in elements). lows, highs [heads, blocks, head_dim], fp32.
int kvb_aabb(const void* keys, int32_t dtype, int64_t key_head, int64_t key_row, int64_t heads,
             int64_t tokens, int64_t head_dim, int64_t block, float* lows, float* highs,
             int32_t threads, void* stream);

// CPU: scores [q_heads, n, blocks] = sum over channels of max(q * high, q * low).
int kvb_aabb_score(const float* queries, const float* lows, const float* highs, int64_t q_heads,
                   int64_t n, int64_t group, int64_t blocks, int64_t head_dim, float* scores,
                   int32_t threads, void* stream);

// R-KV's column means of the cosines of keys [heads, tokens, head_dim] (strides in elements), the
// diagonal and one exempted column of every row counted 0. workspace: see the function below.
int64_t kvb_similarity_workspace(int64_t heads, int64_t tokens, int64_t head_dim);
int kvb_similarity(const void* keys, int32_t dtype, int64_t key_head, int64_t key_row,
                   int64_t heads, int64_t tokens, int64_t head_dim, float threshold, float* means,
                   void* workspace, int32_t threads, void* stream);

// CPU: runs loops on the caller's OpenMP team instead of on threads of their own, which would compete
// with the team's waiting ones. The function is GOMP_parallel of the OpenMP runtime in use.
typedef void (*kvb_team)(void (*work)(void*), void* data, unsigned threads, unsigned flags);
void kvb_use_team(kvb_team team);

const char* kvb_error(int code);

#ifdef __cplusplus
}
#endif
