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

std::vector<AttentionTask> attention_tasks(const AttentionCall& c, Index rows) {
    std::vector<AttentionTask> tasks;
    Index most = std::max<Index>(1, rows / (c.heads / c.kv_heads));
    for (Index span = 0; span < c.spans; span++) {
        Index tokens = c.query_start[span + 1] - c.query_start[span];
        for (Index head = 0; head < c.kv_heads; head++)
            for (Index first = 0; first < tokens; first += most)
                tasks.push_back({span, head, first, std::min(most, tokens - first)});
    }
    return tasks;
}

namespace {

Index first_position(const AttentionCall& c, const AttentionTask& task) {
    return c.kv_length[task.span] - (c.query_start[task.span + 1] - c.query_start[task.span]) + task.first_token;
}

Index tiles_of(const AttentionCall& c, const AttentionTask& task) {
    return (first_position(c, task) + task.tokens + kAttentionTile - 1) / kAttentionTile;
}

const std::int32_t* pages_of(const AttentionCall& c, const AttentionTask& task) {
    return c.pages + task.span * c.pages_stride;
}

// Tiles from the start on that lie before all rows of a task: what it may share with others. Many rows make good use of
// a tile by themselves.
Index shareable_tiles(const AttentionCall& c, const AttentionTask& task) {
    bool few = 2 * task.tokens * (c.heads / c.kv_heads) <= kAttentionPieceRows;
    return few ? first_position(c, task) / kAttentionTile : 0;
}

Index shareable_pages(const AttentionCall& c, const AttentionTask& task) {
    return (shareable_tiles(c, task) * kAttentionTile + c.page_size - 1) / c.page_size;
}

// Tiles from the start on that both may share, and that lie in the same pages.
Index common_tiles(const AttentionCall& c, const AttentionTask& a, const AttentionTask& b) {
    const std::int32_t* pages = pages_of(c, a);
    Index most = std::min(shareable_pages(c, a), shareable_pages(c, b));
    Index same = std::mismatch(pages, pages + most, pages_of(c, b)).first - pages;
    Index tiles = same * c.page_size / kAttentionTile;
    return std::min({tiles, shareable_tiles(c, a), shareable_tiles(c, b)});
}

}  // namespace

AttentionPlan::AttentionPlan(const AttentionCall& c) : call_(c) {
    check_spans(c);
    std::vector<AttentionTask> tasks = attention_tasks(c, kAttentionPieceRows);
    tasks.erase(std::remove_if(tasks.begin(), tasks.end(), [](const AttentionTask& t) { return t.kv_head > 0; }),
                tasks.end());
    // Those with the same pages become neighbours.
    std::stable_sort(tasks.begin(), tasks.end(), [&](const AttentionTask& a, const AttentionTask& b) {
        const std::int32_t *x = pages_of(c, a), *y = pages_of(c, b);
        return std::lexicographical_compare(x, x + shareable_pages(c, a), y, y + shareable_pages(c, b));
    });
    std::vector<Index> common;
    for (std::size_t i = 0; i + 1 < tasks.size(); i++) common.push_back(common_tiles(c, tasks[i], tasks[i + 1]));
    share(tasks, common, 0, Index(tasks.size()), 0, 0);
    for (Level& level : levels_) deal_out(level);
    if (levels_.size() > 1 && c.stats == nullptr) stats_ = 2 * c.query_start[c.spans] * c.heads;
    floats_ += stats_;
}

// The tasks first .. last, which have the same pages before `tile`. common[i]: tiles that task i shares with the next.
void AttentionPlan::share(const std::vector<AttentionTask>& tasks, const std::vector<Index>& common, Index first,
                          Index last, Index tile, std::size_t level) {
    for (Index next; first < last; first = next) {
        next = first + 1;
        Index to = tiles_of(call_, tasks[first]), own = to;
        while (next < last && common[next - 1] > tile) to = std::min(to, common[next++ - 1]);
        if (next == first + 1) {
            add(level, &tasks[first], 1, tile, own);
            continue;
        }
        add(level, &tasks[first], next - first, tile, to);
        share(tasks, common, first, next, to, level + 1);
    }
}

// For each key head, in works of at most kAttentionPieceRows rows.
void AttentionPlan::add(std::size_t level, const AttentionTask* tasks, Index count, Index first_tile, Index last_tile) {
    if (levels_.size() <= level) levels_.resize(level + 1);
    Index most = kAttentionPieceRows / (call_.heads / call_.kv_heads);
    for (Index head = 0; head < call_.kv_heads; head++) {
        Index tokens = most;  // of the work being filled; at first there is none
        for (Index i = 0; i < count; i++) {
            std::vector<Work>& works = levels_[level].whole;
            if (tokens + tasks[i].tokens > most) {
                works.push_back({Index(tasks_.size()), 0, first_tile, last_tile, -1});
                tokens = 0;
            }
            tokens += tasks[i].tokens;
            tasks_.push_back({tasks[i].span, head, tasks[i].first_token, tasks[i].tokens});
            works.back().task_count++;
        }
    }
}

Index AttentionPlan::rows_of(const Work& work) const {
    Index tokens = 0;
    for (Index i = 0; i < work.task_count; i++) tokens += tasks_[work.first_task + i].tokens;
    return tokens * (call_.heads / call_.kv_heads);
}

// With many works each thread folds as it goes; with few, a work's tiles are dealt out and folded afterwards.
void AttentionPlan::deal_out(Level& level) {
    Index count = Index(level.whole.size()), threads = max_threads(), tiles = 0;
    for (const Work& work : level.whole) tiles += work.last_tile - work.first_tile;
    Index longest = threads == 1 || count >= 4 * threads ? tiles : std::max<Index>(2, tiles / (4 * threads));
    // The later tasks of a span see more: the largest come first.
    for (auto work = level.whole.rbegin(); work != level.whole.rend(); ++work) {
        if (work->last_tile - work->first_tile <= longest) {
            level.pieces.push_back(*work);
            continue;
        }
        Index a_tile = rows_of(*work) * attention_share(call_.head_dim);
        work->shares = floats_;
        for (Work piece = *work; piece.first_tile < work->last_tile; piece.first_tile = piece.last_tile) {
            piece.last_tile = std::min(piece.first_tile + longest, work->last_tile);
            piece.shares = floats_;
            floats_ += (piece.last_tile - piece.first_tile) * a_tile;
            level.pieces.push_back(piece);
        }
        level.cuts.push_back(*work);
    }
    level.parallel = level.pieces.size() > 1 && tiles > 4;
}

void AttentionPlan::run(const Kernels& kernels, const void* key_pages, const void* value_pages, const float* query,
                        float* out, float* scratch) const {
    AttentionCall call = call_;
    call.key_pages = key_pages, call.value_pages = value_pages, call.query = query, call.out = out;
    if (stats_) call.stats = scratch + floats_ - stats_;
    auto piece = [&](const Work& work) {
        return AttentionPiece{&tasks_[work.first_task], work.task_count, work.first_tile, work.last_tile};
    };
    for (const Level& level : levels_) {
        share_by_demand(Index(level.pieces.size()), level.parallel, [&](Index i) {
            const Work& work = level.pieces[i];
            kernels.attention_piece(call, piece(work), work.shares < 0 ? nullptr : scratch + work.shares);
        });
        share_evenly(Index(level.cuts.size()), false, [&](Index i) {
            kernels.attention_fold(call, piece(level.cuts[i]), scratch + level.cuts[i].shares);
        });
    }
}

}  // namespace palimpsest::cpu
