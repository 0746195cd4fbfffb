// Attention of the few rows of a decode: lanes are keys there, most of which would stay empty if each
// held a (query, head) row as in attention.inl. Processors with AVX512-BF16, bf16, whole vectors.
#pragma once
#include "attend_rows.h"

#ifdef __AVX512BF16__

namespace kvb {

constexpr int64_t FEW = 8;       // (query, head) rows at most
constexpr int64_t GROUPS = 8;    // of LANES keys, in a tile
constexpr int64_t TURNED = GROUPS * LANES;
constexpr int64_t VECTOR = sizeof(Ints), WORD = sizeof(Pairs::Key);  // bytes

// R (query, head) rows of a (session, KV head).
template <int R>
class AttendFew : AttendRows {
  // LANES rows at equal distances.
  struct Line {
    const char* base;
    int64_t stride;
    const char* at(int64_t i) const { return base + i * stride; }
  };

 public:
  AttendFew(const kvb_attend& job, Place p)
      : AttendRows(job, p),
        bytes_(job.head_dim * size_of(job.dtype)),
        depth_(bytes_ / WORD),
        units_(bytes_ / VECTOR),
        queries_(depth_ * R),
        sums_(units_ * R * 2),
        copied_keys_(TURNED * bytes_),
        copied_values_(TURNED * bytes_) {
    for (int64_t r = 0; r < R; ++r) {
      const char* query = query_at(r);
      for (int64_t c = 0; c < depth_; ++c) memcpy(&queries_[c * R + r], query + c * WORD, WORD);
      maximum_[r] = job.sinks ? job.sinks[head_of_row(r)] : MINUS_INFINITY;
      total_[r] = job.sinks ? 1.0f : 0.0f;
    }
    std::fill_n(sums_.get(), units_ * R * 2, Floats{});
  }

  void run() {
    const int64_t begin = begin_of_row(0), end = end_of_row(R - 1);
    // Tiles begin at the same rows whatever a row sees: sums do not depend on it.
    for (int64_t first = begin - begin % TURNED; first < end; first += TURNED) {
      const int64_t count = smaller(TURNED, end - first), groups = ceil_div(count, LANES);
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t k = first + g * LANES, here = smaller(LANES, count - g * LANES);
        const int64_t copy = g * LANES * bytes_;
        const auto key = [this](int64_t i) { return key_at(i); };
        const auto value = [this](int64_t i) { return value_at(i); };
        values_of_[g] = line(value, k, here, copied_values_.get() + copy);
        multiply_keys(line(key, k, here, copied_keys_.get() + copy), values_of_[g], g);
      }
      if (first < begin_of_row(R - 1) || first + groups * LANES > end_of_row(0)) {
        hide(first, groups);
      }
      for (int64_t r = 0; r < R; ++r) exponentiate(r, groups);
      for (int64_t u = 0; u < units_; ++u) weigh_values(groups, u);
    }
    for (int64_t r = 0; r < R; ++r) write(r);
  }

 private:
  // Rows from `first` on: where they lie, or, if that is in two places or they are fewer, a copy that
  // zeros fill up.
  template <class At>
  Line line(const At& at, int64_t first, int64_t count, char* copy) const {
    if (count == LANES && in_one_place(first, count)) return {at(first), at(first + 1) - at(first)};
    for (int64_t i = 0; i < count; ++i) memcpy(copy + i * bytes_, at(first + i), bytes_);
    std::fill(copy + count * bytes_, copy + LANES * bytes_, 0);
    return {copy, bytes_};
  }

  // Logits of a group's keys: a vector of lanes for each row. What is wanted soon is fetched.
  void multiply_keys(Line keys, Line values, int64_t group) {
    for (int64_t i = 0; i < LANES; ++i) {
      fetch(keys.at(i + 2 * LANES), bytes_);
      fetch(values.at(i), bytes_);
    }
    Floats total[R] = {};
    for (int64_t c = 0; c < depth_; c += LANES) {
      Ints words[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) memcpy(&words[i], keys.at(i) + c * WORD, VECTOR);
      turn(words);
      const uint32_t* queries = queries_.get() + c * R;
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) Pairs::add(total[r], queries[i * R + r], words[i]);
      }
    }
    for (int r = 0; r < R; ++r) logits_[r][group] = total[r] * job_.scale;
  }

  void hide(int64_t first, int64_t groups) {
    Ints lane;
    for (int i = 0; i < LANES; ++i) lane[i] = i;
    for (int64_t r = 0; r < R; ++r) {
      const Ints begin = all(static_cast<int32_t>(begin_of_row(r)));
      const Ints end = all(static_cast<int32_t>(end_of_row(r)));
      for (int64_t g = 0; g < groups; ++g) {
        const Ints at = all(static_cast<int32_t>(first + g * LANES)) + lane;
        logits_[r][g] = at < begin || at >= end ? all(MINUS_INFINITY) : logits_[r][g];
      }
    }
  }

  // Turns a tile's logits into weights, bf16, above the running maximum; what was summed follows it.
  void exponentiate(int64_t r, int64_t groups) {
    const float before = maximum_[r];
    Floats top = all(before);
    for (int64_t g = 0; g < groups; ++g) top = larger(top, logits_[r][g]);
    const float now = maximum_[r] = _mm512_reduce_max_ps((__m512)top);
    // Where all is hidden so far, 0 stands in for a maximum of minus infinity.
    const Floats base = all(now == MINUS_INFINITY ? 0.0f : now);
    Floats added = {};
    Ints broken = {};
    for (int64_t g = 0; g < groups; ++g) {
      const Floats above = logits_[r][g] - base;
      broken |= above != above;
      const Floats weight = exponential(above);
      added += weight;
      const __m256bh halves = _mm512_cvtneps_pbh((__m512)weight);
      memcpy(weights_[r] + g * LANES / 2, &halves, sizeof halves);
    }
    broken_[r] |= _mm512_test_epi32_mask((__m512i)broken, (__m512i)broken) != 0;
    const float shrink = before == MINUS_INFINITY ? 0.0f : exponential(all(before - base[0]))[0];
    total_[r] = total_[r] * shrink + sum(added);
    if (shrink == 1.0f) return;
    for (int64_t u = 0; u < units_ * 2; ++u) sums_[u * R + r] *= shrink;
  }

  // Adds the weighed values of a tile's keys in the `unit`-th 32 channels, two keys at a time.
  void weigh_values(int64_t groups, int64_t unit) {
    Floats* sums = sums_.get() + unit * 2 * R;
    Floats low[R], high[R];
    for (int r = 0; r < R; ++r) low[r] = sums[r], high[r] = sums[R + r];
    for (int64_t k = 0; k < groups * LANES; k += 2) {
      const Line& values = values_of_[k / LANES];
      const __m512i a = _mm512_loadu_si512(values.at(k % LANES) + unit * VECTOR);
      const __m512i b = _mm512_loadu_si512(values.at(k % LANES + 1) + unit * VECTOR);
      const Ints lows = (Ints)_mm512_unpacklo_epi16(a, b);
      const Ints highs = (Ints)_mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Pairs::Key weights = weights_[r][k / 2];
        Pairs::add(low[r], weights, lows);
        Pairs::add(high[r], weights, highs);
      }
    }
    for (int r = 0; r < R; ++r) sums[r] = low[r], sums[R + r] = high[r];
  }

  // Of 32 channels, `lows` had the first four of each eight, `highs` the others.
  void write(int64_t r) {
    const float total = broken_[r] ? std::numeric_limits<float>::quiet_NaN() : total_[r];
    Buffer<float> row(job_.head_dim);
    for (int64_t c = 0; c < job_.head_dim; ++c) {
      const int64_t unit = c / 32, half = c / 4 % 2, lane = c % 32 / 8 * 4 + c % 4;
      row[c] = sums_[(unit * 2 + half) * R + r][lane] / total;
    }
    from_floats(row.get(), job_.dtype, job_.head_dim, output_at(r));
  }

  int64_t bytes_, depth_, units_;  // of a row of keys: also in pairs, and in vectors
  Buffer<Pairs::Key> queries_;     // pair by pair
  Buffer<Floats> sums_;
  Buffer<char> copied_keys_, copied_values_;
  Line values_of_[GROUPS];
  Floats logits_[R][GROUPS];
  Pairs::Key weights_[R][TURNED / 2];
  float maximum_[R], total_[R];
  bool broken_[R] = {};
};

template <int R>
void attend_few(const kvb_attend& job, int32_t threads) {
  const int64_t rows = job.group * job.n;
  if constexpr (R > 1) {
    if (rows < R) return attend_few<R - 1>(job, threads);
  }
  const int64_t work = places(job.shape) * rows * job.length * job.head_dim;
  parallel_for(places(job.shape), work, threads,
               [&](int64_t i) { AttendFew<R>(job, place(job.shape, i)).run(); });
}

}  // namespace kvb

#endif
