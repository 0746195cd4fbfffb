// Puts saved rows back into llama.cpp's cache, and turns keys to other positions: one call each.
//
// Through the public interface of llama.h. The same in Python is server/cells.py (`load`) and
// server/blob.py (`rotate`), which say why; a block of 20 tokens costs those twice the time.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ggml-cpu.h"
#include "llama.h"

// A saved sequence, as server/blob.py reads it.
struct kvb_state {
    uint8_t * data;
    int64_t size;
    int64_t keys;  // where the first layer's keys start
    int64_t tokens;
};

// The first layer's keys of all cells: rows of `row_bytes`.
struct kvb_cells {
    uint8_t * keys;
    int64_t count, row_bytes;
};

// Keys of all layers, each [tokens][heads][head_dim]; layers are `layer_bytes` apart.
struct kvb_keys {
    uint8_t * first;
    int64_t layers, layer_bytes, tokens;
    int32_t heads, head_dim, halved, interleaved;  // halved: float16 instead of float32
};

namespace {

enum { DONE, NO_ROOM, LOST };

int64_t mark(const uint8_t * row) {
    int64_t value;
    std::memcpy(&value, row, sizeof value);
    return value;
}

void set_mark(uint8_t * row, int64_t value) { std::memcpy(row, &value, sizeof value); }

// Finds the cells whose rows are tagged `tag` to `tag + tokens`, and gives them their heads back.
bool find(const kvb_cells & cells, int64_t tag, const std::vector<int64_t> & heads, int64_t * found) {
    int64_t left = (int64_t) heads.size();
    std::fill(found, found + left, -1);
    for (int64_t cell = 0; cell < cells.count && left > 0; ++cell) {
        uint8_t * row = cells.keys + cell * cells.row_bytes;
        const uint64_t token = (uint64_t) mark(row) - (uint64_t) tag;
        if (token >= heads.size() || found[token] >= 0) continue;
        set_mark(row, heads[token]);
        found[token] = cell;
        --left;
    }
    return left == 0;
}

// Turns the pairs of one head: neighbours, or half a head apart.
template <bool INTERLEAVED>
void turn(float * head, int pairs, const float * cosines, const float * sines) {
    float * __restrict first = head;
    float * __restrict second = head + (INTERLEAVED ? 1 : pairs);
    for (int f = 0; f < pairs; ++f) {
        const int i = INTERLEAVED ? 2 * f : f;
        const float a = first[i], b = second[i];
        first[i] = a * cosines[f] - b * sines[f];
        second[i] = a * sines[f] + b * cosines[f];
    }
}

}  // namespace

extern "C" {

// Adds a saved sequence to `target`, and says to which cells its tokens went [tokens].
int kvb_load(llama_context * context, const kvb_state * state, const kvb_cells * cells, int64_t row_tag,
             llama_seq_id scratch, llama_seq_id target, int64_t * found) {
    std::vector<int64_t> heads(state->tokens);
    uint8_t * rows = state->data + state->keys;
    for (int64_t i = 0; i < state->tokens; ++i) {
        heads[i] = mark(rows + i * cells->row_bytes);
        set_mark(rows + i * cells->row_bytes, row_tag + i);
    }
    const size_t got = llama_state_seq_set_data(context, state->data, state->size, scratch);
    for (int64_t i = 0; i < state->tokens; ++i) set_mark(rows + i * cells->row_bytes, heads[i]);
    if (got != (size_t) state->size) return NO_ROOM;
    if (!find(*cells, row_tag, heads, found)) return LOST;
    llama_memory_t memory = llama_get_memory(context);
    llama_memory_seq_cp(memory, scratch, target, -1, -1);
    llama_memory_seq_rm(memory, scratch, -1, -1);
    return DONE;
}

// Turns keys by `by` positions; pair f turns by `frequencies[f]` radians per position.
void kvb_turn(const kvb_keys * keys, int64_t by, const double * frequencies) {
    const int pairs = keys->head_dim / 2, width = keys->heads * keys->head_dim;
    std::vector<float> cosines(pairs), sines(pairs), wide(width);
    for (int f = 0; f < pairs; ++f) {
        cosines[f] = (float) std::cos(by * frequencies[f]);
        sines[f] = (float) std::sin(by * frequencies[f]);
    }
    const auto turn_head = keys->interleaved ? turn<true> : turn<false>;
    for (int64_t i = 0; i < keys->layers * keys->tokens; ++i) {
        const int64_t layer = i / keys->tokens, token = i % keys->tokens;
        uint8_t * row = keys->first + layer * keys->layer_bytes + token * width * (keys->halved ? 2 : 4);
        auto * half = reinterpret_cast<ggml_fp16_t *>(row);
        float * floats = keys->halved ? wide.data() : reinterpret_cast<float *>(row);
        if (keys->halved) ggml_cpu_fp16_to_fp32(half, floats, width);
        for (int h = 0; h < width; h += keys->head_dim) {
            turn_head(floats + h, pairs, cosines.data(), sines.data());
        }
        if (keys->halved) ggml_cpu_fp32_to_fp16(floats, half, width);
    }
}

}  // extern "C"
