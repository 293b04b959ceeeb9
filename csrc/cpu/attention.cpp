// Deals the work of ops.paged_attention out over threads. How it is dealt out does not show in the results.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention_tasks.h"
#include "team.h"

namespace palimpsest::cpu {
void check_spans(const AttentionCall& c) {
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

std::vector<AttentionTask> attention_tasks(const AttentionCall& c) {
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

namespace {

Index tiles_of(const AttentionCall& c, const AttentionTask& task) {
    Index tokens = c.query_start[task.span + 1] - c.query_start[task.span];
    Index seen = c.kv_length[task.span] - tokens + task.first_token + task.tokens;
    return (seen + kAttentionTile - 1) / kAttentionTile;
}

}  // namespace

AttentionPlan::AttentionPlan(const AttentionCall& c) : call_(c) {
    check_spans(c);
    tasks_ = attention_tasks(c);
    Index count = Index(tasks_.size()), threads = max_threads(), tiles = 0;
    for (const AttentionTask& task : tasks_) tiles += tiles_of(c, task);
    // With many tasks each thread folds as it goes; with few, a task's tiles are dealt out and folded afterwards.
    Index longest = threads == 1 || count >= 4 * threads ? tiles : std::max<Index>(2, tiles / (4 * threads));
    for (Index t = count - 1; t >= 0; t--) {  // the later tasks of a span see more: the largest come first
        Index all = tiles_of(c, tasks_[t]);
        if (all <= longest) {
            pieces_.push_back({t, 0, all, -1});
            continue;
        }
        for (Index first = 0; first < all; first += longest)
            pieces_.push_back({t, first, std::min(first + longest, all), floats_});
        cut_.push_back(t);
        cut_shares_.push_back(floats_);
        floats_ += all * tasks_[t].tokens * (c.heads / c.kv_heads) * attention_share(c.head_dim);
    }
    parallel_ = pieces_.size() > 1 && tiles > 4;
}

void AttentionPlan::run(const Kernels& kernels, const void* key_pages, const void* value_pages, const float* query,
                        float* out, float* scratch) const {
    AttentionCall call = call_;
    call.key_pages = key_pages, call.value_pages = value_pages, call.query = query, call.out = out;
    share_by_demand(Index(pieces_.size()), parallel_, [&](Index i) {
        const Piece& piece = pieces_[i];
        kernels.attention_piece(call, tasks_[piece.task], piece.first, piece.last,
                                piece.shares < 0 ? nullptr : scratch + piece.shares);
    });
    share_evenly(Index(cut_.size()), false,
                 [&](Index i) { kernels.attention_fold(call, tasks_[cut_[i]], scratch + cut_shares_[i]); });
}

}  // namespace palimpsest::cpu
