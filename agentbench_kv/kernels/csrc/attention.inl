// Attention of new rows over caches whose last rows are their own. CPU only: on CUDA it is PyTorch's.
//
// A block of (query, head of the group) rows passes over the keys tile by tile with an online
// softmax. Logits have one vector lane a row; sums of values have one lane a channel, so that neither
// keys nor values are transposed. The strips of a block share a tile's values. Tiles of keys are not
// the processor's own (tiles.h), on which `Tiles` multiplies.

#ifndef KVB_DEVICE

#include "attend_few.h"
#include "attend_rows.h"
#include "tiles.h"

namespace kvb {

constexpr int64_t SEEN = 128;    // keys of a tile, an even number
constexpr int64_t STRIPS = 8;    // of a block at most
constexpr int WEIGHED = 6;       // rows whose sums of values are held in registers together
constexpr int CHANNELS_HELD = TOTALS / WEIGHED;  // vectors of channels, likewise

// sums[r][c] += sum over steps of weights[step][r] * values[step][c], for R rows and C vectors.
template <class Kind, int R, int C>
inline void weigh(const typename Kind::Key* weights, int64_t stride,
                  const typename Kind::Query* values, int64_t width, int64_t steps, Floats* sums) {
  Floats total[R][C];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) total[r][c] = sums[r * width + c];
  }
  for (int64_t s = 0; s < steps; ++s) {
    typename Kind::Query row[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) row[c] = values[s * width + c];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) Kind::add(total[r][c], weights[s * stride + r], row[c]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) sums[r * width + c] = total[r][c];
  }
}

template <class Kind, int R>
inline void weigh_channels(const typename Kind::Key* weights, int64_t stride,
                           const typename Kind::Query* values, int64_t width, int64_t steps,
                           Floats* sums) {
  int64_t c = 0;
  for (; c + CHANNELS_HELD <= width; c += CHANNELS_HELD) {
    weigh<Kind, R, CHANNELS_HELD>(weights, stride, values + c, width, steps, sums + c);
  }
  for (; c < width; ++c) weigh<Kind, R, 1>(weights, stride, values + c, width, steps, sums + c);
}

// The rows of a (session, KV head) from `first` on, up to V * LANES in each of `strips`.
template <class Kind, int V>
class AttendBlock : AttendRows {
  typedef typename Kind::Key Key;
  typedef typename Kind::Query Query;
  static constexpr int64_t STRIP = V * LANES;

  struct Strip {
    int64_t first, rows;  // of the block's (query, head) rows
    int64_t begin, end;   // keys that any of them sees
    int64_t common_begin, common_end;  // keys that all of them see
    Floats maximum[V], total[V];
    Ints broken[V];  // lanes that met what is no number
  };

 public:
  AttendBlock(const kvb_attend& job, Place p, int64_t first, int64_t rows)
      : AttendRows(job, p),
        depth_(job.head_dim / Kind::CHANNELS),
        width_(ceil_div(job.head_dim, LANES)),
        direct_(job.head_dim % LANES == 0 &&
                (std::is_same<Key, uint32_t>::value || job.dtype == KVB_F32)),
        strips_(ceil_div(rows, STRIP)),
        state_(strips_),
        packed_(strips_ * depth_ * V),
        sums_(strips_ * STRIP * width_),
        logits_(SEEN * V),
        weights_(SEEN / Kind::CHANNELS * V),
        rows_of_weights_(SEEN / 2 * LANES),
        tile_(SEEN / Kind::CHANNELS * width_),
        row_(2 * width_ * LANES),
        floats_(std::is_same<Key, uint32_t>::value ? LANES * depth_
                : job.dtype == KVB_F32             ? 0
                                                   : SEEN * job.head_dim),
        pointers_(SEEN) {
    for (int64_t s = 0; s < strips_; ++s) {
      begin_strip(state_[s], first + s * STRIP, smaller(STRIP, rows - s * STRIP));
      pack(state_[s], packed_.get() + s * depth_ * V);
    }
    std::fill_n(sums_.get(), strips_ * STRIP * width_, Floats{});
  }

  void run() {
    int64_t begin = length_, end = 0;
    for (int64_t s = 0; s < strips_; ++s) {
      begin = smaller(begin, state_[s].begin);
      end = larger(end, state_[s].end);
    }
    // Tiles begin at the same rows whatever else is in the block: sums do not depend on it.
    for (int64_t first = begin - begin % SEEN; first < end; first += SEEN) {
      const int64_t count = smaller(SEEN, end - first);
      for (int64_t k = 0; k < count; ++k) {
        pointers_[k] = key_row(key_at(first + k), k);
      }
      lay_values(first, count);
      for (int64_t s = 0; s < strips_; ++s) {
        if (first < state_[s].end && first + count > state_[s].begin) take_tile(s, first, count);
      }
    }
    for (int64_t s = 0; s < strips_; ++s) write(state_[s], sums_.get() + s * STRIP * width_);
  }

 private:
  void begin_strip(Strip& strip, int64_t first, int64_t rows) {
    const int64_t last = first + rows - 1;
    strip.first = first;
    strip.rows = rows;
    strip.begin = begin_of_row(first);
    strip.end = end_of_row(last);
    strip.common_begin = begin_of_row(last);
    strip.common_end = end_of_row(first);
    for (int v = 0; v < V; ++v) {
      strip.maximum[v] = all(MINUS_INFINITY);
      strip.total[v] = Floats{};
      strip.broken[v] = Ints{};
    }
    if (!job_.sinks) return;
    for (int64_t i = 0; i < rows; ++i) {
      strip.maximum[i / LANES][i % LANES] = job_.sinks[head_of_row(first + i)];
      strip.total[i / LANES][i % LANES] = 1.0f;
    }
  }

  // A strip's queries, channel by channel, one lane a row.
  void pack(const Strip& strip, Query* to) {
    std::fill_n(to, depth_ * V, Query{});
    for (int64_t i = 0; i < strip.rows; ++i) {
      pack_lane(reinterpret_cast<Key*>(to) + i, query_at(strip.first + i));
    }
  }

  void pack_lane(float* lane, const char* query) {
    for (int64_t c = 0; c < depth_; ++c) lane[c * STRIP] = load(query, c, job_.dtype);
  }

  void pack_lane(uint32_t* lane, const char* query) {
    for (int64_t c = 0; c < depth_; ++c) memcpy(lane + c * STRIP, query + c * 4, 4);
  }

  const Key* key_row(const char* row, int64_t k) {
    if (std::is_same<Key, uint32_t>::value || job_.dtype == KVB_F32) {
      return reinterpret_cast<const Key*>(row);
    }
    float* to = floats_.get() + k * job_.head_dim;
    to_floats(row, job_.dtype, job_.head_dim, to);
    return reinterpret_cast<const Key*>(to);
  }

  // A tile's values: CHANNELS rows together, filled up with zeros to whole steps.
  void lay_values(int64_t first, int64_t count) {
    auto row = [&](int64_t k) { return value_at(first + k); };
    Query* to = tile_.get();
    int64_t k = 0;
    if (direct_) {
      for (; k + Kind::CHANNELS <= count; k += Kind::CHANNELS, to += width_) {
        Kind::together(row(k), row(k + 1), width_, to);
      }
    }
    for (; k < count; k += Kind::CHANNELS, to += width_) {
      fill_row(row(k), row_.get());
      fill_row(k + 1 < count ? row(k + 1) : nullptr, row_.get() + width_ * LANES);
      Kind::together(row_.get(), row_.get() + width_ * LANES, width_, to);
    }
    std::fill(to, tile_.get() + steps_of(count) * (Kind::STEP / Kind::CHANNELS) * width_, Query{});
  }

  // One row of values as whole vectors of `Kind`; zeros where there is none.
  void fill_row(const char* row, float* to) {
    std::fill_n(to, width_ * LANES, 0.0f);
    if (!row) return;
    if (std::is_same<Key, uint32_t>::value) {
      memcpy(to, row, job_.head_dim * 2);
    } else {
      to_floats(row, job_.dtype, job_.head_dim, to);
    }
  }

  void take_tile(int64_t s, int64_t first, int64_t count) {
    Strip& strip = state_[s];
    Floats* sums = sums_.get() + s * STRIP * width_;
    const Query* queries = packed_.get() + s * depth_ * V;
    const int64_t used = smaller(count, strip.end - first);
    products_of_kind<Kind, V, false>(pointers_.get(), used, queries, depth_, job_.scale,
                                     floats_.get(), logits_.get());
    if (first < strip.common_begin || first + used > strip.common_end) hide(strip, first, used);
    exponentiate(strip, used, sums);
    const int64_t whole = steps_of(used) * Kind::STEP;
    std::fill(logits_.get() + used * V, logits_.get() + whole * V, Floats{});
    weigh_values(strip.rows, whole / Kind::CHANNELS, sums);
  }

  static int64_t steps_of(int64_t rows) { return ceil_div(rows, Kind::STEP); }

  // Adds the values of `steps` times CHANNELS keys, weighed by what has become of the logits.
  void weigh_values(int64_t rows, int64_t steps, Floats* sums) {
    const Key* weights = Kind::template as_weights<V>(logits_.get(), steps, weights_.get());
    int64_t r = 0;
#ifdef KVB_TILES
    if constexpr (std::is_same<Kind, Tiles>::value) {
      for (; r < rows; r += SIDE) weigh_on_tiles(r, steps, sums + r * width_);
      return;
    }
#endif
    for (; r + WEIGHED <= rows; r += WEIGHED) {
      weigh_channels<Kind, WEIGHED>(weights + r, STRIP, tile_.get(), width_, steps,
                                    sums + r * width_);
    }
    for (; r < rows; ++r) {
      weigh_channels<Kind, 1>(weights + r, STRIP, tile_.get(), width_, steps, sums + r * width_);
    }
  }

#ifdef KVB_TILES
  // The same for 16 rows from `r` on.
  void weigh_on_tiles(int64_t r, int64_t pairs, Floats* sums) {
    constexpr int64_t LONG = SEEN / 2;
    uint32_t* rows = rows_of_weights_.get();
    for (int64_t s = 0; s < pairs; s += SIDE) {
      transpose(weights_.get() + s * V + r / LANES, V, rows + s, LONG);
    }
    int64_t c = 0;
    for (; c + 2 <= width_; c += 2) {
      tile_sums<2>(rows, LONG * 4, tile_.get() + c, width_, pairs, sums + c);
    }
    if (c < width_) tile_sums<1>(rows, LONG * 4, tile_.get() + c, width_, pairs, sums + c);
  }
#endif

  void hide(const Strip& strip, int64_t first, int64_t count) {
    Ints begins[V] = {}, ends[V] = {};
    for (int64_t i = 0; i < strip.rows; ++i) {
      begins[i / LANES][i % LANES] = static_cast<int32_t>(begin_of_row(strip.first + i));
      ends[i / LANES][i % LANES] = static_cast<int32_t>(end_of_row(strip.first + i));
    }
    for (int64_t k = 0; k < count; ++k) {
      const Ints at = all(static_cast<int32_t>(first + k));
      for (int v = 0; v < V; ++v) {
        Floats& logit = logits_[k * V + v];
        logit = at < begins[v] || at >= ends[v] ? all(MINUS_INFINITY) : logit;
      }
    }
  }

  // Turns a tile's logits into exponentials above the running maximum; what was summed follows it.
  void exponentiate(Strip& strip, int64_t count, Floats* sums) {
    Floats shrink[V];
    for (int v = 0; v < V; ++v) {
      const Floats before = strip.maximum[v];
      Floats top = before;
      for (int64_t k = 0; k < count; ++k) top = larger(top, logits_[k * V + v]);
      strip.maximum[v] = top;
      // Where all is hidden so far, 0 stands in for a maximum of minus infinity.
      const Floats base = top == MINUS_INFINITY ? Floats{} : top;
      Floats added = {};
      Ints broken = strip.broken[v];
      for (int64_t k = 0; k < count; ++k) {
        Floats& place = logits_[k * V + v];
        const Floats above = place - base;
        broken |= above != above;
        place = exponential(above);
        added += place;
      }
      strip.broken[v] = broken;
      shrink[v] = before == MINUS_INFINITY ? Floats{} : exponential(before - base);
      strip.total[v] = strip.total[v] * shrink[v] + added;
    }
    for (int64_t r = 0; r < strip.rows; ++r) {
      const float factor = shrink[r / LANES][r % LANES];
      if (factor == 1.0f) continue;
      for (int64_t c = 0; c < width_; ++c) sums[r * width_ + c] *= factor;
    }
  }

  void write(const Strip& strip, const Floats* sums) {
    for (int64_t i = 0; i < strip.rows; ++i) {
      float total = strip.total[i / LANES][i % LANES];
      if (strip.broken[i / LANES][i % LANES]) total = std::numeric_limits<float>::quiet_NaN();
      Floats* scaled = reinterpret_cast<Floats*>(row_.get());
      for (int64_t c = 0; c < width_; ++c) scaled[c] = sums[i * width_ + c] / total;
      from_floats(row_.get(), job_.dtype, job_.head_dim, output_at(strip.first + i));
    }
  }

  int64_t depth_, width_;
  bool direct_;  // rows of values are whole vectors of `Kind`
  int64_t strips_;
  std::vector<Strip> state_;
  Buffer<Query> packed_;
  Buffer<Floats> sums_, logits_;
  Buffer<Query> weights_, tile_;
  Buffer<uint32_t> rows_of_weights_;  // of `Tiles`
  Buffer<float> row_, floats_;
  Buffer<const Key*> pointers_;
};

template <class Kind, int V>
void attend(const kvb_attend& job, int32_t threads) {
  const int64_t rows = job.group * job.n, strips = ceil_div(rows, V * LANES);
  const int64_t each = places(job.shape);
  // As few blocks as keep the threads busy: strips of one block share its tiles of values.
  const int64_t wanted = ceil_div(each * strips, 4 * static_cast<int64_t>(threads));
  const int64_t size = smaller(STRIPS, larger(1, wanted)) * V * LANES;
  const int64_t blocks = ceil_div(rows, size);
  const int64_t work = each * rows * job.length * job.head_dim;
  parallel_for(each * blocks, work, threads, [&](int64_t i) {
    // The last rows see most: who begins with them ends with small blocks.
    const int64_t first = (blocks - 1 - i / each) * size;
    [[maybe_unused]] const Using<Kind> use;
    AttendBlock<Kind, V>(job, place(job.shape, i % each), first, smaller(size, rows - first)).run();
  });
}

template <class Kind>
void attend_by_width(const kvb_attend& job, int32_t threads) {
  const int64_t rows = job.group * job.n;
  if (rows <= LANES) return attend<Kind, 1>(job, threads);
  if (rows <= NARROW * LANES) return attend<Kind, NARROW>(job, threads);
  attend<Kind, WIDE>(job, threads);
}

}  // namespace kvb

extern "C" int kvb_attention(const kvb_attend* job, int32_t threads, void*) {
#ifdef KVB_TILES
  if (job->dtype == KVB_BF16 && job->head_dim % kvb::Tiles::STEP == 0 && kvb::may_use_tiles()) {
    kvb::attend_by_width<kvb::Tiles>(*job, threads);
    return 0;
  }
#endif
#ifdef __AVX512BF16__
  const int64_t rows = job->group * job->n;
  const bool few = 0 < rows && rows <= kvb::FEW && job->head_dim % (2 * kvb::LANES) == 0;
  if (job->dtype == KVB_BF16 && few) {
    kvb::attend_few<kvb::FEW>(*job, threads);
    return 0;
  }
  if (job->dtype == KVB_BF16 && job->head_dim % 2 == 0) {
    kvb::attend_by_width<kvb::Pairs>(*job, threads);
    return 0;
  }
#endif
  kvb::attend_by_width<kvb::Singles>(*job, threads);
  return 0;
}

#endif
