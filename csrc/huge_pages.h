// Memory that is read from end to end at every step, on huge pages: with pages of 4 KiB a core reads it a third slower.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace palimpsest {

// Asks for huge pages under these (address, bytes), where they fill whole ones; what lies in them stays. The kernel may
// refuse any of it, such as a mapped file's: then nothing changes.
inline void use_huge_pages(std::vector<std::pair<std::uintptr_t, std::size_t>> ranges) {
#if defined(__linux__)
    constexpr std::uintptr_t kHuge = 2 << 20, kGap = 64 << 10;  // between neighbours lie at most headers and padding
    constexpr int kCollapse = 25;                               // MADV_COLLAPSE, Linux 6.1
    std::sort(ranges.begin(), ranges.end());
    for (std::size_t i = 0; i < ranges.size();) {
        std::uintptr_t first = ranges[i].first, end = first;
        for (; i < ranges.size() && ranges[i].first <= end + kGap; i++)
            end = std::max<std::uintptr_t>(end, ranges[i].first + ranges[i].second);
        for (std::uintptr_t at = (first + kHuge - 1) / kHuge * kHuge; at + kHuge <= end; at += kHuge)
            (void)madvise(reinterpret_cast<void*>(at), kHuge, kCollapse);
    }
#else
    (void)ranges;
#endif
}

// Floats on huge pages where Linux has some.
class HugeBuffer {
  public:
    // At least `count` of them; what they held is lost when there were fewer before.
    float* floats(std::size_t count) {
        if (count > count_) {
            constexpr std::size_t kHuge = 2 << 20;
            std::size_t bytes = (count * sizeof(float) + kHuge - 1) / kHuge * kHuge;
            count_ = 0;
            data_.reset(static_cast<float*>(std::aligned_alloc(kHuge, bytes)));
            if (!data_) throw std::bad_alloc();
#if defined(__linux__)
            (void)madvise(data_.get(), bytes, MADV_HUGEPAGE);
#endif
            count_ = count;
        }
        return data_.get();
    }

  private:
    struct Free {
        void operator()(float* p) const { std::free(p); }
    };
    std::unique_ptr<float[], Free> data_;
    std::size_t count_ = 0;
};

}  // namespace palimpsest
