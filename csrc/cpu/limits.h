// What no kernel can beat, for the benchmarks: the multiply-adds that the cores do from registers, and the bytes that
// they read from memory.
#pragma once

#include "vec.h"

namespace palimpsest::cpu::PALIMPSEST_ISA {

// Independent chains: as many as hide the latency of an FMA and still fit into the registers.
#if defined(__AVX512F__)
constexpr int kLimitChains = 16;
#else
constexpr int kLimitChains = 6;
#endif

inline double multiply_add(Index repeats) {
    double flops = 0;
#pragma omp parallel reduction(+ : flops)
    {
        // The factors come from memory that the compiler can't see through, so that nothing is computed beforehand.
        volatile float one = 1.0f, little = 1e-9f;
        F16 x = F16::set(one), y = F16::set(little), chains[kLimitChains];
        for (F16& chain : chains) chain = y;
        for (Index r = 0; r < repeats; r++)
            for (F16& chain : chains) chain = fma(chain, x, y);
        F16 all = F16::zero();
        for (const F16& chain : chains) all = all + chain;
        volatile float used = sum(all);
        (void)used;
        flops = 2.0 * kWidth * kLimitChains * double(repeats);
    }
    return flops;
}

inline double read_memory(const float* data, Index n) {
    constexpr Index kBlock = 8 * kWidth;  // eight sums, so that none waits for the one before
    double total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total)
    for (Index part = 0; part < max_threads(); part++) {
        Index blocks = n / kBlock, first = blocks * part / max_threads(), last = blocks * (part + 1) / max_threads();
        F16 sums[8];
        for (F16& s : sums) s = F16::zero();
        for (const float* p = data + first * kBlock; p < data + last * kBlock; p += kBlock)
            for (int i = 0; i < 8; i++) sums[i] = sums[i] + F16::load(p + i * kWidth);
        F16 all = F16::zero();
        for (const F16& s : sums) all = all + s;
        total += sum(all);
    }
    return total;
}

}  // namespace palimpsest::cpu::PALIMPSEST_ISA
