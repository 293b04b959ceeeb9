// Deals the work of ops.quantised_linear out over threads. How it is dealt out does not show in the results.
#include <algorithm>

#include "team.h"

namespace palimpsest::cpu {
namespace {

constexpr Index kPanelOutputs = 16;
constexpr Index kTaskRows = 128;          // the rounded x of a task stays in the second level of the cache
constexpr Index kParallelWork = 1 << 16;  // fewer products are done sooner than a second thread wakes up

Index groups_of(Index in) { return (in + kQuantisedGroup - 1) / kQuantisedGroup; }

}  // namespace

Index quantised_scratch(Index rows, Index in) {
    return rows * groups_of(in) * Index(sizeof(float) + sizeof(std::int32_t) + kQuantisedGroup);
}

void quantised_linear(const Kernels& kernels, const LinearCall& c, void* scratch) {
    Index groups = groups_of(c.in), together = c.finish == Finish::kSiluProduct ? 2 : 1, panels = 0;
    float* scales = static_cast<float*>(scratch);
    std::int32_t* sums = reinterpret_cast<std::int32_t*>(scales + c.rows * groups);
    std::int8_t* values = reinterpret_cast<std::int8_t*>(sums + c.rows * groups);
    share_evenly(c.rows, c.rows * c.in > kParallelWork, [&](Index r) {
        kernels.quantise_row(c.x + r * c.x_stride, c.in, values + r * groups * kQuantisedGroup, scales + r * groups,
                             sums + r * groups);
    });
    QuantisedRows x{values, scales, sums, groups};
    auto panels_of = [&c](Index l) { return (c.layers[l].out + kPanelOutputs - 1) / kPanelOutputs; };
    for (Index l = 0; l < c.count; l += together) panels += panels_of(l);
    Index blocks = (c.rows + kTaskRows - 1) / kTaskRows;
    auto task = [&](Index t) {
        Index first = t / panels * kTaskRows, panel = t % panels, l = 0;
        for (; panel >= panels_of(l); l += together) panel -= panels_of(l);
        kernels.quantised_panel(c, x, l, panel, first, std::min(first + kTaskRows, c.rows));
    };
    // Few rows read the weights once: each thread gets one stream.
    if (blocks == 1)
        share_evenly(panels, c.rows * c.in * panels * kPanelOutputs > kParallelWork, task);
    else
        share_by_demand(blocks * panels, true, task);
}

}  // namespace palimpsest::cpu
