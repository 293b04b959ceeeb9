// Deals the work of ops.paged_attention out over threads. How it is dealt out does not show in the results.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace palimpsest::cpu {
namespace {

// Tiles first .. last of a task. shares: where in the buffer the task's partial results start, or -1 for a whole task.
struct Piece {
    Index task, first, last, shares;
};

void check(const AttentionCall& c) {
    for (Index i = 0; i < c.spans; i++) {
        Index tokens = c.query_start[i + 1] - c.query_start[i], length = c.kv_length[i];
        Index pages = (length + c.page_size - 1) / c.page_size;
        bool good = c.query_start[0] == 0 && tokens >= 0 && tokens <= length && pages <= c.pages_stride;
        for (Index p = 0; good && p < pages; p++) {
            Index page = c.pages[i * c.pages_stride + p];
            good = page >= 0 && page < c.page_count;
        }
        if (!good)
            throw std::invalid_argument("paged_attention: span " + std::to_string(i) + " lies outside its pages");
    }
}

std::vector<AttentionTask> cut_into_tasks(const AttentionCall& c) {
    std::vector<AttentionTask> tasks;
    Index most = std::max<Index>(1, kAttentionMaxRows / (c.heads / c.kv_heads));
    for (Index span = 0; span < c.spans; span++) {
        Index tokens = c.query_start[span + 1] - c.query_start[span];
        for (Index head = 0; head < c.kv_heads; head++)
            for (Index first = 0; first < tokens; first += most)
                tasks.push_back({span, head, first, std::min(most, tokens - first)});
    }
    return tasks;
}

Index tiles_of(const AttentionCall& c, const AttentionTask& task) {
    Index tokens = c.query_start[task.span + 1] - c.query_start[task.span];
    Index seen = c.kv_length[task.span] - tokens + task.first_token + task.tokens;
    return (seen + kAttentionTile - 1) / kAttentionTile;
}

}  // namespace

void paged_attention(const Kernels& kernels, const AttentionCall& c) {
    check(c);
    std::vector<AttentionTask> tasks = cut_into_tasks(c);
    Index count = Index(tasks.size()), threads = max_threads(), tiles = 0, floats = 0;
    for (const AttentionTask& task : tasks) tiles += tiles_of(c, task);
    // With many tasks each thread folds as it goes; with few, a task's tiles are dealt out and folded afterwards.
    Index longest = threads == 1 || count >= 4 * threads ? tiles : std::max<Index>(2, tiles / (4 * threads));
    std::vector<Piece> pieces;
    std::vector<Index> cut, shares;
    for (Index t = count - 1; t >= 0; t--) {  // the later tasks of a span see more: the largest come first
        Index all = tiles_of(c, tasks[t]);
        if (all <= longest) {
            pieces.push_back({t, 0, all, -1});
            continue;
        }
        for (Index first = 0; first < all; first += longest)
            pieces.push_back({t, first, std::min(first + longest, all), floats});
        cut.push_back(t);
        shares.push_back(floats);
        floats += all * tasks[t].tokens * (c.heads / c.kv_heads) * attention_share(c.head_dim);
    }
    std::vector<float> buffer(floats);
    bool parallel = pieces.size() > 1 && tiles > 4;
#pragma omp parallel for schedule(dynamic, 1) if (parallel)
    for (Index i = 0; i < Index(pieces.size()); i++) {
        const Piece& piece = pieces[i];
        kernels.attention_piece(c, tasks[piece.task], piece.first, piece.last,
                                piece.shares < 0 ? nullptr : buffer.data() + piece.shares);
    }
    for (Index i = 0; i < Index(cut.size()); i++) kernels.attention_fold(c, tasks[cut[i]], buffer.data() + shares[i]);
}

}  // namespace palimpsest::cpu
