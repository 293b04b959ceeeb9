// Deals the gradient of ops.attend out over threads. How it is dealt out does not show in the results.
#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention_tasks.h"
#include "team.h"

namespace palimpsest::cpu {
namespace {

// Sets of spans that see no row of each other's, each in rising order. Keys of different sets, heads or positions are
// different rows: their gradients can be computed at the same time.
std::vector<std::vector<Index>> families(const AttentionCall& c) {
    std::vector<Index> leader(c.spans), seen_by(c.page_count, -1), position(c.page_count);
    std::iota(leader.begin(), leader.end(), Index(0));
    auto find = [&](Index i) {
        while (leader[i] != i) i = leader[i] = leader[leader[i]];
        return i;
    };
    for (Index i = 0; i < c.spans; i++)
        for (Index at = 0; at < c.kv_length[i]; at++) {
            Index row = c.pages[i * c.pages_stride + at];
            if (seen_by[row] < 0) seen_by[row] = i, position[row] = at;
            if (position[row] != at)
                throw std::invalid_argument("attention_backward: row " + std::to_string(row) + " is seen at position " +
                                            std::to_string(position[row]) + " and at " + std::to_string(at));
            Index a = find(i), b = find(seen_by[row]);
            leader[std::max(a, b)] = std::min(a, b);
        }
    std::vector<std::vector<Index>> sets(c.spans);
    for (Index i = 0; i < c.spans; i++) sets[find(i)].push_back(i);
    return sets;
}

}  // namespace

void attention_backward(const Kernels& kernels, const AttentionGradCall& g) {
    const AttentionCall& c = g.forward;
    check_spans(c);
    std::vector<std::vector<Index>> sets = families(c);
    std::vector<AttentionTask> query_tasks = attention_tasks(c, kAttentionMaxRows);
    std::vector<KeyTask> key_tasks;
    for (const std::vector<Index>& set : sets) {
        Index longest = 0;
        for (Index span : set) longest = std::max<Index>(longest, c.kv_length[span]);
        for (Index head = 0; head < c.kv_heads; head++)
            for (Index key = 0; key < longest; key += kAttentionMaxRows)
                key_tasks.push_back({set.data(), Index(set.size()), head, key});
    }
    Index queries = Index(query_tasks.size()), keys = Index(key_tasks.size());
    // The later queries of a span see more keys, its first keys are seen by more queries: the largest come first.
    share_by_demand(keys + queries, keys + queries > 2, [&](Index i) {
        if (i < keys)
            kernels.attention_key_grad(g, key_tasks[i]);
        else
            kernels.attention_query_grad(g, query_tasks[queries - 1 - (i - keys)]);
    });
}

}  // namespace palimpsest::cpu
