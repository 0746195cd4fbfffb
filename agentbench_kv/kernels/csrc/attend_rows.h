// What attention of a (session, KV head) reads and writes: its rows of queries, keys and values.
#pragma once
#include "host.h"

namespace kvb {

// Its (query, head of the group) rows are numbered query by query.
class AttendRows {
 protected:
  AttendRows(const kvb_attend& job, Place p)
      : job_(job),
        place_(p),
        length_(job.lengths[p.session]),
        keys_(rows_of(job.keys, {}, p)),
        values_(rows_of(job.values, {}, p)),
        before_(job.before ? job.before[p.session] : kvb_before{}) {}

  const char* key_at(int64_t index) const { return row_at(before_.keys, keys_, index); }
  const char* value_at(int64_t index) const { return row_at(before_.values, values_, index); }

  // Whether rows lie behind one another: not some before the session's own, and some of these.
  bool in_one_place(int64_t first, int64_t count) const {
    return first >= before_.rows || first + count <= before_.rows;
  }

  int64_t query_of_row(int64_t row) const { return row / job_.group; }
  int64_t head_of_row(int64_t row) const { return place_.head * job_.group + row % job_.group; }
  // The keys that a row sees: from `begin` to before `end`.
  int64_t end_of_row(int64_t row) const { return length_ - job_.n + query_of_row(row) + 1; }
  int64_t begin_of_row(int64_t row) const {
    return job_.window ? larger(0, end_of_row(row) - job_.window) : 0;
  }

  const char* query_at(int64_t row) const {
    return static_cast<const char*>(job_.queries) + place_.session * job_.query_session +
           head_of_row(row) * job_.query_head + query_of_row(row) * job_.query_row;
  }
  char* output_at(int64_t row) const {
    const int64_t number = place_.session * job_.n + query_of_row(row);
    const int64_t place = number * job_.shape.heads * job_.group + head_of_row(row);
    return static_cast<char*>(job_.output) + place * job_.head_dim * size_of(job_.dtype);
  }

  const kvb_attend& job_;
  Place place_;
  int64_t length_;

 private:
  const char* row_at(const char* shared, const Rows& own, int64_t index) const {
    if (index >= before_.rows) return own.at(index - before_.rows);
    return shared + place_.head * before_.head + index * job_.head_dim * size_of(job_.dtype);
  }

  Rows keys_, values_;
  kvb_before before_;
};

}  // namespace kvb
