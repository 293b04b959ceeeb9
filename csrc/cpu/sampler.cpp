// A token drawn from each row of logits, without a copy of them: engine/draw.py and engine/noise.py say which one, and
// are its twin to the last bit.
//
// Order: the best id of each tile of the vocabulary is found on its own, and the tiles are compared in order; what the
// filters add up are whole numbers. So how the work is dealt out over threads does not show.
#include <algorithm>
#include <memory>

#include "noise.h"
#include "team.h"

namespace palimpsest::cpu {
namespace {

constexpr float kFirstDepth = 8.0f, kDeepest = 1000.0f;  // how far below the largest z the ranking is made

// The natural logarithm of engine/noise.py, rounding by rounding.
double log_in_order(double x) {
    constexpr std::int64_t kOne = 0x3FF0000000000000, kSqrtHalf = 0x3FE6A09E00000000;
    std::int64_t bits;
    std::memcpy(&bits, &x, 8);
    bits += kOne - kSqrtHalf;
    double k = double((bits >> 52) - 1023);
    bits = (bits & ((std::int64_t(1) << 52) - 1)) + kSqrtHalf;
    double f;
    std::memcpy(&f, &bits, 8);
    f -= 1.0;
    double s = f / (2.0 + f), z = s * s, w = z * z, h = 0.5 * f * f;
    double odd = 6.666666666666735130e-01 +
                 w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01));
    double even = 3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01);
    double rest = z * odd + w * even;
    return s * (h + rest) + k * 1.90821492927058770002e-10 - h + f + k * 6.93147180369123816490e-01;
}

// The `most` first of the ranking (0: all): the larger z first, of equal ones the lower id. -> how many there are.
Index sort_ranked(Ranked* found, Index count, Index most) {
    auto before = [](const Ranked& a, const Ranked& b) { return a.z > b.z || (a.z == b.z && a.id < b.id); };
    if (most > 0 && most < count) {
        std::nth_element(found, found + most, found + count, before);
        count = most;
    }
    std::sort(found, found + count, before);
    return count;
}

// How many of the ranking's first `count` ids the filters keep, or -1 when that depends on ids that come later.
// complete: no other id can be kept. whole: the mass of all ids, where top_k is off.
Index kept(const DrawRow& row, const Ranked* ranked, Index count, bool complete, std::int64_t whole) {
    double top = ranked[0].z;
    if (row.top_p < 1.0 && row.top_k > 0) {
        if (!complete) return -1;
        whole = 0;
        for (Index i = 0; i < count; i++) whole += mass(double(ranked[i].z) - top);
    }
    double needed = row.top_p * double(whole);
    std::int64_t sum = 0;
    for (Index i = 0; i < count; i++) {
        double below = double(ranked[i].z) - top;
        if (!(below >= row.depth)) return i;
        if (row.top_p < 1.0 && double(sum += mass(below)) >= needed) return i + 1;
    }
    return complete ? count : -1;
}

Index draw_filtered(const Kernels& kernels, const DrawRow& row, const float* logits, Index n, float top) {
    std::unique_ptr<Ranked[]> ranked(new Ranked[n]);
    std::int64_t whole = row.top_p < 1.0 && row.top_k == 0 ? kernels.whole_mass(row, logits, n, top) : 0;
    Index count = -1;
    for (float depth = kFirstDepth; count < 0; depth *= 3.0f) {
        bool all = depth > kDeepest;
        Index found = kernels.gather(row, logits, n, all ? -INFINITY : top - depth, ranked.get());
        found = sort_ranked(ranked.get(), found, row.top_k);
        count = kept(row, ranked.get(), found, all || (row.top_k > 0 && found == row.top_k), whole);
    }
    Candidate best{-INFINITY, 0};
    for (Index i = 0; i < count; i++) {
        std::uint64_t bits = noise_bits(row.key, ranked[i].id);
        if (ranked[i].z + most_noise(bits) < just_below(best.value)) continue;
        double value = double(ranked[i].z) + gumbel(bits);
        if (value > best.value || (value == best.value && ranked[i].id < best.id)) best = {value, ranked[i].id};
    }
    return best.id;
}

// tiles: those of the row. sums: scratch for one each.
Drawn fold_row(const Kernels& kernels, const DrawRow& row, const float* logits, Index n, const DrawnTile* tiles,
               TileSum* sums, Index each) {
    Candidate best = tiles[0].best;
    Index highest = 0;
    for (Index i = 0; i < each; i++) {
        sums[i] = tiles[i].sum;
        if (sums[i].top > sums[highest].top) highest = i;
        if (tiles[i].best.value > best.value) best = tiles[i].best;
    }
    float top = sums[highest].top, total = kernels.fold_sums(sums, each);
    if (!(std::fabs(total) < INFINITY)) return {0, 0.0f, total};
    Index id = best.id;
    if (row.greedy) {
        id = highest * kVocabularyTile;
        while (logits[id] != top) id++;
    } else if (!row.is_plain()) {
        id = draw_filtered(kernels, row, logits, n, top);
    }
    return {id, logits[id] / row.temperature - total, total};
}

}  // namespace

std::uint64_t noise_key(std::uint64_t seed, std::uint64_t sample, std::uint64_t turn, std::uint64_t index) {
    std::uint64_t key = 0;
    for (std::uint64_t number : {seed, sample, turn, index}) key = mix(key + kGamma + number);
    return key;
}

double gumbel(std::uint64_t bits) {
    double uniform = (double(bits >> 12) + 0.5) * 0x1p-52;
    return -log_in_order(-log_in_order(uniform));
}

void draw(const Kernels& kernels, const DrawCall& call) {
    Index n = call.vocabulary, each = (n + kVocabularyTile - 1) / kVocabularyTile, count = call.rows * each;
    std::vector<DrawnTile> tiles(count);
    std::vector<TileSum> sums(count);
    share_evenly(count, call.rows * n > 8192, [&](Index i) {
        Index r = i / each, first = i % each * kVocabularyTile;
        tiles[i] =
            kernels.draw_tile(call.row[r], call.logits + r * call.stride, first, std::min(kVocabularyTile, n - first));
    });
    bool filtered = std::any_of(call.row, call.row + call.rows, [](const DrawRow& row) { return row.filters(); });
    share_by_demand(call.rows, call.rows > 1 && filtered, [&](Index r) {
        call.out[r] =
            fold_row(kernels, call.row[r], call.logits + r * call.stride, n, &tiles[r * each], &sums[r * each], each);
    });
}

}  // namespace palimpsest::cpu
