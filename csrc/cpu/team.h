// Loops that one team of threads shares. Called by a whole team (inside of a parallel region, by all of its threads)
// the iterations are dealt out to it, and all wait for the last; called by one thread alone a team is made for the
// loop. So the same kernel serves a single op and the whole layer stack, which opens one parallel region for all its
// ops.
#pragma once

#include <omp.h>

#include "kernels.h"

namespace palimpsest::cpu {
namespace {  // each instruction set's translation unit keeps its own copy

// Equal shares in order. worthwhile: whether the loop is worth waking a team for.
template <class Body>
inline void share_evenly(Index count, bool worthwhile, Body body) {
    if (omp_in_parallel()) {
#pragma omp for schedule(static)
        for (Index i = 0; i < count; i++) body(i);
    } else {
#pragma omp parallel for schedule(static) if (worthwhile)
        for (Index i = 0; i < count; i++) body(i);
    }
}

// One at a time to whoever is free: for iterations of unequal cost.
template <class Body>
inline void share_by_demand(Index count, bool worthwhile, Body body) {
    if (omp_in_parallel()) {
#pragma omp for schedule(dynamic, 1)
        for (Index i = 0; i < count; i++) body(i);
    } else {
#pragma omp parallel for schedule(dynamic, 1) if (worthwhile)
        for (Index i = 0; i < count; i++) body(i);
    }
}

}  // namespace
}  // namespace palimpsest::cpu
