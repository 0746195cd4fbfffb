// How much attention each key gets from some queries.
//
// CPU: strips of queries, one vector lane a query, pass over the keys tile by tile with an online
// softmax; a strip's exponentials wait in memory until its sums are known, so that nothing larger
// than one strip exists.

#ifndef KVB_DEVICE  // a GPU's own matrix products are faster

#include "tiles.h"

namespace kvb {

constexpr int64_t TILE = 384;  // keys whose logits are made at a time

// One KV head's scoring: what all its strips share. `Kind` says how products are made: of floats, or
// of pairs of bf16, on the processor's tiles or not.
template <class Kind>
class MassHead {
  typedef typename Kind::Key Key;
  typedef typename Kind::Query Query;

 public:
  MassHead(const kvb_mass& job, Place p, float* mass)
      : job_(job),
        merge_(merge_of(job.gqa, job.group, job.n)),
        mass_(mass),
        length_(length_of(job.lengths, job.length, p.session)),
        keys_(rows_of(job.keys, job.table, p)),
        head_dim_(job.head_dim),
        depth_(job.head_dim / Kind::CHANNELS),
        exponentials_(length_ * WIDE),
        packed_(depth_ * WIDE * merge_.merged),
        floats_(std::is_same<Key, uint32_t>::value ? LANES * depth_
                : job.key_dtype == KVB_F32         ? 0
                                                   : TILE * head_dim_),
        maxima_(ceil_div(length_, TILE) * WIDE),
        pointers_(TILE),
        column_(length_) {
    const int64_t size = size_of(job.query_dtype);
    const int64_t head = (static_cast<int64_t>(p.session) * job.shape.layers + p.layer) *
                             job.shape.heads + p.head;
    queries_ = static_cast<const char*>(job.queries) + head * job.group * job.n * head_dim_ * size;
    if (job.query_positions) query_positions_ = job.query_positions + p.session * job.n;
    if (job.valid) valid_ = job.valid + p.session * job.n;
    if (job.key_positions.base && query_positions_) {
      causal_ = true;
      key_positions_ = rows_of(job.key_positions, job.table, p);
    }
  }

  void run() {
    for (int32_t output = 0; output < merge_.outputs; ++output) {
      std::fill_n(column_.get(), length_, 0.0f);
      const std::vector<int32_t> rows = valid_rows();
      const int64_t count = rows.size();
      for (int64_t i = 0; i < count;) i += next_strip(output, rows.data() + i, count - i);
      write(output, rows.empty() ? 0.0f : 1.0f / rows.size());
    }
  }

 private:
  std::vector<int32_t> valid_rows() const {
    std::vector<int32_t> rows;
    for (int32_t row = 0; row < merge_.rows; ++row) {
      if (!valid_ || valid_[row % job_.n]) rows.push_back(row);
    }
    return rows;
  }

  void write(int32_t output, float scale) {
    const int64_t width = job_.length;
    float* to = mass_ + (job_.gqa == KVB_PER_HEAD ? output * width : 0);
    const bool maximum = job_.gqa == KVB_MAX_PROB && output > 0;
    for (int64_t j = 0; j < length_; ++j) {
      const float value = column_[j] * scale;
      to[j] = maximum ? std::max(to[j], value) : value;
    }
    std::fill(to + length_, to + width, 0.0f);
  }

  // Takes as many of the rows as fit into the strip that suits them.
  int64_t next_strip(int32_t output, const int32_t* rows, int64_t left) {
    if (left > NARROW * LANES) return strip<WIDE>(output, rows, smaller(WIDE * LANES, left));
    return strip<NARROW>(output, rows, left);
  }

  // Adds the probabilities of up to V vectors of rows to the column.
  template <int V>
  int64_t strip(int32_t output, const int32_t* rows, int64_t count) {
    for (int32_t g = 0; g < merge_.merged; ++g) pack<V>(output, g, rows, count);
    Floats maximum[V], total[V] = {};
    for (auto& each : maximum) each = all(MINUS_INFINITY);
    for (int64_t first = 0; first < length_; first += TILE) {
      logits<V>(first, smaller(TILE, length_ - first));
      if (causal_) hide<V>(rows, count, first, smaller(TILE, length_ - first));
      exponentiate<V>(first, smaller(TILE, length_ - first), maximum, total);
    }
    Floats weight[V];
    for (int v = 0; v < V; ++v) {
      for (int i = 0; i < LANES; ++i) {
        weight[v][i] = v * LANES + i < count && total[v][i] > 0 ? 1.0f / total[v][i] : 0.0f;
      }
    }
    add_columns<V>(maximum, weight);
    return count;
  }

  // Queries as vectors over the rows of the strip, channel by channel.
  template <int V>
  void pack(int32_t output, int32_t merged, const int32_t* rows, int64_t count) {
    Query* to = packed_.get() + merged * depth_ * V;
    std::fill_n(to, depth_ * V, Query{});
    for (int64_t i = 0; i < count; ++i) {
      const int64_t query = query_of(job_.n, output, merged, rows[i]) * head_dim_;
      pack_lane<V * LANES>(reinterpret_cast<Key*>(to) + i, query);
    }
  }

  template <int STRIP>
  void pack_lane(float* lane, int64_t query) {
    for (int64_t c = 0; c < depth_; ++c) lane[c * STRIP] = load(queries_, query + c, job_.query_dtype);
  }

  template <int STRIP>
  void pack_lane(uint32_t* lane, int64_t query) {
    const char* pairs = queries_ + query * 2;
    for (int64_t c = 0; c < depth_; ++c) memcpy(lane + c * STRIP, pairs + c * 4, 4);
  }

  // One row of keys as `Key`s, converted if they are neither.
  const Key* key_row(const char* row, int64_t k) {
    if (std::is_same<Key, uint32_t>::value || job_.key_dtype == KVB_F32) {
      return reinterpret_cast<const Key*>(row);
    }
    float* to = floats_.get() + k * head_dim_;
    to_floats(row, job_.key_dtype, head_dim_, to);
    return reinterpret_cast<const Key*>(to);
  }

  template <int V>
  void logits(int64_t first, int64_t count) {
    for (int64_t k = 0; k < count; ++k) pointers_[k] = key_row(keys_.at(first + k), k);
    const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim_));
    Floats* out = exponentials_.get() + first * V;
    products_of_kind<Kind, V, false>(pointers_.get(), count, packed_.get(), depth_, scale,
                                     floats_.get(), out);
    for (int32_t g = 1; g < merge_.merged; ++g) {
      const Query* queries = packed_.get() + g * depth_ * V;
      products_of_kind<Kind, V, true>(pointers_.get(), count, queries, depth_, scale,
                                      floats_.get(), out);
    }
  }

  // A query does not see keys at later positions.
  template <int V>
  void hide(const int32_t* rows, int64_t count, int64_t first, int64_t keys) {
    Ints positions[V] = {};
    for (int64_t i = 0; i < count; ++i) {
      positions[i / LANES][i % LANES] = static_cast<int32_t>(query_positions_[rows[i] % job_.n]);
    }
    for (int64_t k = 0; k < keys; ++k) {
      int64_t position;
      memcpy(&position, key_positions_.at(first + k), sizeof position);
      const Ints at = all(static_cast<int32_t>(position));
      Floats* out = exponentials_.get() + (first + k) * V;
      for (int v = 0; v < V; ++v) out[v] = at > positions[v] ? all(MINUS_INFINITY) : out[v];
    }
  }

  // Turns a tile's logits into exponentials above the running maximum, and notes that maximum.
  template <int V>
  void exponentiate(int64_t first, int64_t count, Floats* maximum, Floats* total) {
    Floats* tile = exponentials_.get() + first * V;
    for (int v = 0; v < V; ++v) {
      const Floats before = maximum[v];
      Floats top = before;
      for (int64_t k = 0; k < count; ++k) top = larger(top, tile[k * V + v]);
      maximum[v] = top;
      // Where all is hidden so far, 0 stands in for a maximum of minus infinity.
      const Floats base = top == MINUS_INFINITY ? Floats{} : top;
      Floats added = {};
      for (int64_t k = 0; k < count; ++k) {
        Floats& place = tile[k * V + v];
        place = exponential(place - base);
        added += place;
      }
      const Floats shrink = before == MINUS_INFINITY ? Floats{} : exponential(before - base);
      total[v] = total[v] * shrink + added;
      maxima_[first / TILE * V + v] = base;
    }
  }

  template <int V>
  void add_columns(const Floats* maximum, const Floats* weight) {
    for (int64_t first = 0; first < length_; first += TILE) {
      Floats factor[V];
      for (int v = 0; v < V; ++v) {
        const Floats base = maxima_[first / TILE * V + v];
        const Floats last = maximum[v] == MINUS_INFINITY ? Floats{} : maximum[v];
        factor[v] = weight[v] * exponential(base - last);
      }
      const Floats* tile = exponentials_.get() + first * V;
      for (int64_t k = 0; k < smaller(TILE, length_ - first); ++k) {
        Floats weighted = tile[k * V] * factor[0];
        for (int v = 1; v < V; ++v) weighted += tile[k * V + v] * factor[v];
        column_[first + k] += sum(weighted);
      }
    }
  }

  const kvb_mass& job_;
  Merge merge_;
  float* mass_;
  int64_t length_;
  Rows keys_, key_positions_{};
  int64_t head_dim_, depth_;
  const char* queries_;
  const int64_t* query_positions_ = nullptr;
  const uint8_t* valid_ = nullptr;
  bool causal_ = false;
  Buffer<Floats> exponentials_;
  Buffer<Query> packed_;
  Buffer<float> floats_;
  Buffer<Floats> maxima_;
  Buffer<const Key*> pointers_;
  Buffer<float> column_;
};

template <class Kind>
void mass_of_heads(const kvb_mass& job, int32_t threads) {
  const int64_t outputs = job.gqa == KVB_PER_HEAD ? job.group : 1;
  const int64_t items = places(job.shape);
  const int64_t work = items * job.group * job.n * job.length * job.head_dim;
  parallel_for(items, work, threads, [&](int64_t i) {
    [[maybe_unused]] const Using<Kind> use;
    MassHead<Kind>(job, place(job.shape, i), job.mass + i * outputs * job.length).run();
  });
}

}  // namespace kvb

extern "C" int kvb_attention_mass(const kvb_mass* job, int32_t threads, void*) {
#ifdef __AVX512BF16__
  const bool halves = job->query_dtype == KVB_BF16 && job->key_dtype == KVB_BF16;
#ifdef KVB_TILES
  if (halves && job->head_dim % kvb::Tiles::STEP == 0 && kvb::may_use_tiles()) {
    kvb::mass_of_heads<kvb::Tiles>(*job, threads);
    return 0;
  }
#endif
  if (halves && job->head_dim % 2 == 0) {
    kvb::mass_of_heads<kvb::Pairs>(*job, threads);
    return 0;
  }
#endif
  kvb::mass_of_heads<kvb::Singles>(*job, threads);
  return 0;
}

#endif
