// Watches llama.cpp evaluate a graph, through the public callback of llama_context_params.
//
// What it sees of every batch: the cache cell each token was written to, and (if asked) every
// layer's queries behind RoPE, of which a listener is told before the layer's attention is computed.
// What it learns once: where the cache tensors lie. Written against the headers that the
// llama-cpp-python wheel installs; the same in Python is server/watch.py.

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "ggml-backend.h"
#include "ggml.h"

// Told of a layer's queries [tokens][heads][head_dim], so many numbers.
typedef void (*kvb_listener)(int layer, const float * queries, int64_t count);

struct kvb_watch {
    bool want_queries;
    kvb_listener listener;
    std::atomic<bool> aborted;  // set by other threads while a batch is computed
    std::vector<ggml_tensor *> keys, values;   // the cache of every layer
    std::vector<int64_t> cells;                // of the tokens since kvb_watch_begin, in order
    std::vector<std::vector<float>> queries;   // per layer [tokens][heads][head_dim]
};

namespace {

// Returns the layer of a cache tensor and whether it holds keys, or -1 for any other tensor.
int cache_layer(const ggml_tensor * tensor, bool & holds_keys) {
    char kind = 0;
    int layer = -1;
    if (std::sscanf(tensor->name, "cache_%c_l%d", &kind, &layer) != 2) return -1;
    holds_keys = kind == 'k';
    return layer;
}

// The projection, the reshape and the rotated tensor all carry this name; only the last counts.
int query_layer(const ggml_tensor * tensor) {
    if (tensor->op != GGML_OP_ROPE || std::strncmp(tensor->name, "Qcur-", 5) != 0) return -1;
    return std::atoi(tensor->name + 5);
}

bool ask(kvb_watch * watch, ggml_tensor * tensor) {
    if (tensor->op == GGML_OP_SET_ROWS && tensor->view_src != nullptr) {
        bool holds_keys = false;
        const int layer = cache_layer(tensor->view_src, holds_keys);
        if (layer < 0 || layer >= (int) watch->keys.size()) return false;
        (holds_keys ? watch->keys : watch->values)[layer] = tensor->view_src;
        return holds_keys && layer == 0;
    }
    return (watch->want_queries || watch->listener != nullptr) && query_layer(tensor) >= 0;
}

void take(kvb_watch * watch, ggml_tensor * tensor) {
    if (tensor->op == GGML_OP_SET_ROWS) {
        const ggml_tensor * index = tensor->src[1];
        const size_t before = watch->cells.size();
        watch->cells.resize(before + index->ne[0]);
        ggml_backend_tensor_get(index, &watch->cells[before], 0, index->ne[0] * sizeof(int64_t));
        return;
    }
    const int layer = query_layer(tensor);
    if (layer >= (int) watch->queries.size()) return;
    std::vector<float> & rows = watch->queries[layer];
    const size_t before = rows.size();
    rows.resize(before + ggml_nelements(tensor));
    ggml_backend_tensor_get(tensor, &rows[before], 0, ggml_nbytes(tensor));
    if (watch->listener != nullptr) {
        watch->listener(layer, &rows[before], (int64_t) (rows.size() - before));
    }
}

bool callback(ggml_tensor * tensor, bool asking, void * data) {
    kvb_watch * watch = static_cast<kvb_watch *>(data);
    if (asking) return ask(watch, tensor);
    take(watch, tensor);
    return true;
}

bool aborted(void * data) { return static_cast<kvb_watch *>(data)->aborted; }

}  // namespace

extern "C" {

kvb_watch * kvb_watch_new(int layers) {
    kvb_watch * watch = new kvb_watch;
    watch->want_queries = false;
    watch->listener = nullptr;
    watch->aborted = false;
    watch->keys.assign(layers, nullptr);
    watch->values.assign(layers, nullptr);
    watch->queries.resize(layers);
    return watch;
}

void kvb_watch_want_queries(kvb_watch * watch, int wanted) { watch->want_queries = wanted != 0; }

void kvb_watch_listen(kvb_watch * watch, kvb_listener listener) { watch->listener = listener; }

void kvb_watch_free(kvb_watch * watch) { delete watch; }

void kvb_watch_abort(kvb_watch * watch, int wanted) { watch->aborted = wanted != 0; }

void * kvb_watch_abort_callback() { return reinterpret_cast<void *>(aborted); }

void * kvb_watch_callback() { return reinterpret_cast<void *>(callback); }

size_t kvb_tensor_size() { return sizeof(ggml_tensor); }

void kvb_watch_begin(kvb_watch * watch) {
    watch->cells.clear();
    for (auto & rows : watch->queries) rows.clear();
}

void * kvb_watch_base(kvb_watch * watch, int values, int layer) {
    return (values ? watch->values : watch->keys)[layer];
}

const int64_t * kvb_watch_cells(kvb_watch * watch, int64_t * count) {
    *count = (int64_t) watch->cells.size();
    return watch->cells.data();
}

const float * kvb_watch_queries(kvb_watch * watch, int layer, int64_t * count) {
    *count = (int64_t) watch->queries[layer].size();
    return watch->queries[layer].data();
}

}  // extern "C"
