// Trees of block drafters with a Markov head, grown as trees/growth.py grows dynamic trees.

#pragma once

#include "search.h"

enum MarkovKind { VANILLA, GATED, RECURRENT };

struct BlockTree {
    long rows, depths, size;          // sizes of the logits
    long vocabulary, rank, kind;      // of the Markov head
    long nodes, steps, width;         // limits of the tree; `width` children per node, and expanded nodes per level
    float least;                      // see `Budget.min_level_probability`
};

static inline float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

// The numbers from which one token's correction is computed, and the state after it (heads/dflash.py, `MarkovHead.mix`).
//
// `slot` holds the slot's part of the gates with their biases. The weights [inputs, outputs] are those of the other
// inputs: the token's embedding, before it the state.
static void mix(const BlockTree &b, const float *embedding, const float *state, const float *slot, const float *weights,
                float *numbers, float *after) {
    const long rank = b.rank, count = b.kind == RECURRENT ? 3 * rank : rank;
    if (b.kind == VANILLA) {
        std::copy(embedding, embedding + rank, numbers);
        return;
    }
    static thread_local std::vector<float> gates;
    gates.assign(slot, slot + count);
    float *sums = gates.data();
    const auto add = [&](const float *input) {
        for (long i = 0; i < rank; i++, weights += count)
            for (long j = 0; j < count; j++) sums[j] += input[i] * weights[j];
    };
    if (b.kind == RECURRENT) add(state);
    add(embedding);
    for (long i = 0; i < rank; i++) {
        const float gate = sigmoid(sums[i]);
        if (b.kind == GATED)
            numbers[i] = gate * embedding[i];
        else {
            after[i] = gate * state[i] + (1 - gate) * std::tanh(sums[rank + i]);
            numbers[i] = std::tanh(sums[2 * rank + i]);
        }
    }
}

struct Candidate {
    float score, edge;  // log-probability of the path and of the last token
    int64_t token;
    long parent;        // the parent's index among the candidates, -1 for the root
};

// The nodes of one level whose children are scored next: `count` of each row.
struct Frontier {
    long count;
    std::vector<float> scores, states;
    std::vector<int64_t> tokens;
    std::vector<long> ids;  // their indices among the candidates
};

// The best `count` of some candidates, best first; of equal ones the first wins. No score is NaN.
static std::vector<long> best_of(const Candidate *candidates, long size, long count) {
    std::vector<long> order(size);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](long i, long j) {
        return candidates[i].score > candidates[j].score;
    });
    order.resize(std::min(size, count));
    return order;
}

// Write the root and the best candidates of a row, in order of growth; returns the number of nodes.
static long write_best(const BlockTree &b, const std::vector<Candidate> &grown, int64_t root, int64_t *tokens,
                       int64_t *parents, float *edges) {
    std::vector<long> kept = best_of(grown.data(), grown.size(), b.nodes - 1), node(grown.size(), 0);
    std::sort(kept.begin(), kept.end());
    tokens[0] = root, parents[0] = -1, edges[0] = 0;
    for (long i = 0; i < long(kept.size()); i++) {
        const Candidate &one = grown[kept[i]];
        node[kept[i]] = i + 1;
        tokens[i + 1] = one.token, edges[i + 1] = one.edge, parents[i + 1] = one.parent < 0 ? 0 : node[one.parent];
    }
    return kept.size() + 1;
}

// Score the children of the frontier, add them to the candidates, and make the best of them the next frontier. Returns
// whether the frontier's tokens are in the vocabulary.
template <class T>
static bool grow_level(const BlockTree &b, long depth, const T *logits, const T *embeddings, const float *slots,
                       const float *weights, const T *outputs, const int64_t *hot, Frontier &frontier,
                       std::vector<std::vector<Candidate>> &grown, long threads) {
    const long rank = b.rank, total = b.rows * frontier.count, parts = b.kind == RECURRENT ? 3 * rank : rank;
    std::vector<float> numbers(total * rank), after(b.kind == RECURRENT ? total * rank : 0), embedding(rank);
    for (long i = 0; i < total; i++) {
        if (frontier.tokens[i] < 0 || frontier.tokens[i] >= b.vocabulary) return false;
        const T *from = embeddings + frontier.tokens[i] * rank;
        for (long j = 0; j < rank; j++) embedding[j] = widen(from[j]);
        mix(b, embedding.data(), frontier.states.data() + i * rank,
            slots + (i / frontier.count * b.depths + depth) * parts, weights, numbers.data() + i * rank,
            after.data() + i * rank);
    }
    std::vector<float> log_probs(total * b.width);
    std::vector<int64_t> ids(total * b.width);
    find_best_corrected(logits + depth * b.size, outputs, numbers.data(), total, frontier.count, b.size,
                        b.depths * b.size, rank, b.width, log_probs.data(), ids.data(), threads);
    Frontier next{b.width};
    for (long row = 0; row < b.rows; row++) {
        std::vector<Candidate> &all = grown[row];
        const long first = all.size();
        for (long i = row * frontier.count; i < (row + 1) * frontier.count; i++)
            for (long child = i * b.width; child < (i + 1) * b.width; child++) {
                const float edge = log_probs[child] == log_probs[child] ? log_probs[child] : -INFINITY;
                all.push_back({frontier.scores[i] + edge, edge, hot ? hot[ids[child]] : ids[child], frontier.ids[i]});
            }
        for (long best : best_of(all.data() + first, all.size() - first, b.width)) {
            next.scores.push_back(all[first + best].score);
            next.tokens.push_back(all[first + best].token);
            next.ids.push_back(first + best);
            const float *state = after.data() + (row * frontier.count + best / b.width) * rank;
            if (b.kind == RECURRENT) next.states.insert(next.states.end(), state, state + rank);
        }
    }
    frontier = std::move(next);
    return true;
}

// Grow one tree per row; returns the number of nodes of each, or 0 if a token that it grows from is not in the vocabulary.
//
// Logits [rows, depths, size] are those of the slots; `slots` [rows, depths, ...] and `weights` are explained at `mix`;
// `embeddings` [vocabulary, rank]; `outputs` [rank, size]; `hot` are the target's ids of the draft vocabulary, or null;
// `states` [rows, rank] precede the roots. The trees are written to arrays [rows, nodes].
template <class T>
static long grow_trees(const BlockTree &b, const T *logits, const T *embeddings, const float *slots,
                       const float *weights, const T *outputs, const int64_t *hot, const int64_t *roots,
                       const float *states, int64_t *tokens, int64_t *parents, float *edges, long threads) {
    std::vector<std::vector<Candidate>> grown(b.rows);
    Frontier frontier{1, std::vector<float>(b.rows, 0), {}, {roots, roots + b.rows}, std::vector<long>(b.rows, -1)};
    if (b.kind == RECURRENT) frontier.states.assign(states, states + b.rows * b.rank);
    for (long depth = 0; depth < b.steps; depth++) {
        float likely = 0;
        for (long row = 0; row < b.rows; row++) likely += std::exp(frontier.scores[row * frontier.count]);
        if (depth && likely < b.least) break;
        if (!grow_level(b, depth, logits, embeddings, slots, weights, outputs, hot, frontier, grown, threads)) return 0;
    }
    long nodes = 0;
    for (long row = 0; row < b.rows; row++)
        nodes = write_best(b, grown[row], roots[row], tokens + row * b.nodes, parents + row * b.nodes,
                           edges + row * b.nodes);
    return nodes;
}
