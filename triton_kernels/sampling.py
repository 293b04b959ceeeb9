"""The draw of one id per row, and its log-probability: Gumbel noise over what top-k, top-p and min-p leave, without
sorting the vocabulary.

Where nothing is left out the logits are read once: a program per tile divides them by the temperature, reduces them for
the log-sum-exp (vocabulary.py) and finds the likeliest under noise; one per row puts the tiles together. A draft is
verified by these ids: each of its rows is drawn so, whatever it foresaw.

Whatever the filters keep is a head of the ranking (larger logit first, of equals the lower id), so it is known by its
last member. That is found by fixing the bits of its logit from the highest on, two at a time, by counts or sums of
masses over the row; all sums are of whole numbers. One program cuts a row, and one per tile makes the masses for it.
Noise and masses are computed as engine/noise.py and draw.py define them, operation by operation and without fused
multiply-adds: the ids are the same. Twin: draw.draw_rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .vocabulary import TILE, WARPS, fold, reduce

__all__ = ["draw", "heads"]

GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND = tl.constexpr(0x94D049BB133111EB)
MANTISSA = tl.constexpr(2**52 - 1)
BITS_OF_ONE = tl.constexpr(0x3FF0000000000000)
BITS_OF_SQRT_HALF = tl.constexpr(0x3FE6A09E00000000)
LN2_HIGH = tl.constexpr(6.93147180369123816490e-01)
LN2_LOW = tl.constexpr(1.90821492927058770002e-10)
LN2_INVERSE = tl.constexpr(1.0 / 0.6931471805599453)
WHOLE = tl.constexpr(1.5 * 2**52)  # added and taken away it leaves the nearest whole number, ties to even
FAINTEST = tl.constexpr(-40.0)
MASS_EXPONENT = tl.constexpr(1023 + 38)


@triton.jit
def order(values):
    """uint32 that rise with float32 values; both zeros are one."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def mass(below):
    """draw._mass: e^below * 2^38 as int64, for float64 below <= 0."""
    x = tl.maximum(below, FAINTEST)
    n = (x * LN2_INVERSE + WHOLE) - WHOLE
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    power = r * 0.0 + 1.0
    for i in tl.static_range(11):
        power = power * r * (1.0 / (11 - i)) + 1.0
    scale = ((n.to(tl.int64) + MASS_EXPONENT) << 52).to(tl.float64, bitcast=True)
    return ((power * scale + WHOLE) - WHOLE).to(tl.int64)


@triton.jit
def logarithm(x):
    """noise._log of normal float64 x > 0."""
    shifted = x.to(tl.int64, bitcast=True) + (BITS_OF_ONE - BITS_OF_SQRT_HALF)
    k = ((shifted >> 52) - 1023).to(tl.float64)
    f = ((shifted & MANTISSA) + BITS_OF_SQRT_HALF).to(tl.float64, bitcast=True) - 1.0
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    h = 0.5 * f * f
    odd = 2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)
    odd = z * (6.666666666666735130e-01 + w * odd)
    even = 3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01)
    rest = odd + w * even
    return s * (h + rest) + k * LN2_LOW - h + f + k * LN2_HIGH


@triton.jit
def gumbel(key, ids):
    """noise.gumbel: float64 noise of ids under a uint64 key."""
    x = key + (ids.to(tl.uint64) + 1) * GAMMA
    x = (x ^ (x >> 30)) * FIRST
    x = (x ^ (x >> 27)) * SECOND
    x = x ^ (x >> 31)
    return -logarithm(-logarithm(((x >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16))


@triton.jit
def is_kept(ranks, ids, cut, last):
    """Whether ids belong to the head of the ranking that ends with id `last` of rank `cut`."""
    return (ranks > cut) | ((ranks == cut) & (ids <= last))


@triton.jit
def id_of(row, vocabulary, cut, wanted, TILE: tl.constexpr):
    """The id that is number `wanted` (from 1) of those with rank `cut`."""
    seen = tl.zeros((), tl.int64)
    found = tl.zeros((), tl.int64)
    for start in range(0, vocabulary, TILE):
        at = start + tl.arange(0, TILE)
        inside = at < vocabulary
        equal = inside & (order(tl.load(row + at, mask=inside, other=0.0)) == cut)
        numbers = seen + tl.cumsum(equal.to(tl.int32), axis=0)
        found += tl.sum(tl.where(equal & (numbers == wanted), at, 0).to(tl.int64), axis=0)
        seen += tl.sum(equal.to(tl.int64), axis=0)
    return found


@triton.jit
def cut_of(row, masses, vocabulary, limit, COUNTED: tl.constexpr, TILE: tl.constexpr):
    """The highest rank whose ids, with those of higher ones, reach `limit` in number, or in mass."""
    cut = tl.zeros((), tl.uint32)
    step = tl.full((), 1 << 30, tl.uint32)
    for _ in range(16):
        first = tl.zeros((TILE,), tl.int64)
        second, third = first, first
        for start in range(0, vocabulary, TILE):
            at = start + tl.arange(0, TILE)
            inside = at < vocabulary
            ranks = order(tl.load(row + at, mask=inside, other=0.0))
            weights = inside.to(tl.int64) if COUNTED else tl.load(masses + at, mask=inside, other=0)
            first += tl.where(ranks >= cut + step, weights, 0)
            second += tl.where(ranks >= cut + step + step, weights, 0)
            third += tl.where(ranks >= cut + step + step + step, weights, 0)
        reached = (tl.sum(first, axis=0).to(tl.float64) >= limit).to(tl.uint32)
        reached += (tl.sum(second, axis=0).to(tl.float64) >= limit).to(tl.uint32)
        reached += (tl.sum(third, axis=0).to(tl.float64) >= limit).to(tl.uint32)
        cut += reached * step
        step = step >> 2
    return cut


@triton.jit
def top_k_kernel(logits, top_k, cuts, lasts, vocabulary, TILE: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * vocabulary
    k = tl.load(top_k + number)
    if k > 0:
        cut = cut_of(row, row, vocabulary, k.to(tl.float64), True, TILE)
        above = tl.zeros((), tl.int64)
        for start in range(0, vocabulary, TILE):
            at = start + tl.arange(0, TILE)
            inside = at < vocabulary
            ranks = order(tl.load(row + at, mask=inside, other=0.0))
            above += tl.sum((inside & (ranks > cut)).to(tl.int64), axis=0)
        tl.store(cuts + number, cut.to(tl.int64))
        tl.store(lasts + number, id_of(row, vocabulary, cut, k - above, TILE))


@triton.jit
def mass_kernel(logits, peaks, top_p, cuts, lasts, masses, vocabulary, TILE: tl.constexpr):
    """The masses of a tile of a row, 0 where top-k left an id out."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(top_p + row) < 1.0:
        at = tile * TILE + tl.arange(0, TILE)
        inside = at < vocabulary
        values = tl.load(logits + row * vocabulary + at, mask=inside, other=0.0)
        kept = is_kept(order(values), at, tl.load(cuts + row).to(tl.uint32), tl.load(lasts + row))
        below = values.to(tl.float64) - tl.load(peaks + row).to(tl.float64)
        tl.store(masses + row * vocabulary + at, tl.where(kept, mass(below), 0), mask=inside)


@triton.jit
def top_p_kernel(logits, masses, top_p, cuts, lasts, vocabulary, TILE: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    row, weights = logits + number * vocabulary, masses + number * vocabulary
    p = tl.load(top_p + number)
    if p < 1.0:
        total = tl.zeros((), tl.int64)
        for start in range(0, vocabulary, TILE):
            at = start + tl.arange(0, TILE)
            total += tl.sum(tl.load(weights + at, mask=at < vocabulary, other=0), axis=0)
        limit = p * total.to(tl.float64)
        cut = cut_of(row, weights, vocabulary, limit, False, TILE)
        above = tl.zeros((), tl.int64)
        each = tl.zeros((), tl.int64)
        for start in range(0, vocabulary, TILE):
            at = start + tl.arange(0, TILE)
            inside = at < vocabulary
            ranks = order(tl.load(row + at, mask=inside, other=0.0))
            some = tl.load(weights + at, mask=inside, other=0)
            above += tl.sum(tl.where(ranks > cut, some, 0), axis=0)
            each = tl.maximum(each, tl.max(tl.where(ranks == cut, some, 0), axis=0))
        fewest = tl.full((), 1, tl.int64)
        most = tl.full((), 0, tl.int64) + vocabulary
        while fewest < most:
            middle = (fewest + most) // 2
            if (above + middle * each).to(tl.float64) >= limit:
                most = middle
            else:
                fewest = middle + 1
        tl.store(cuts + number, cut.to(tl.int64))
        tl.store(lasts + number, id_of(row, vocabulary, cut, fewest, TILE))


@triton.jit
def draw_kernel(
    logits, temperatures, cuts, lasts, depths, peaks, noisy, keys, tile_peaks, totals, best, best_id, vocabulary, tiles,
    FILTERED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What a tile of a row gives to its log-sum-exp, and the likeliest id of those kept (all, if not FILTERED)."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tile * TILE + tl.arange(0, TILE)
    kept = at < vocabulary
    values = tl.load(logits + row * vocabulary + at, mask=kept, other=float("-inf"))
    values = tl.div_rn(values, tl.load(temperatures + row).to(tl.float32))
    place = row * tiles + tile
    peak, total = reduce(values)
    tl.store(tile_peaks + place, peak)
    tl.store(totals + place, total)
    scores = values.to(tl.float64)
    if FILTERED:
        kept = kept & is_kept(order(values), at, tl.load(cuts + row).to(tl.uint32), tl.load(lasts + row))
        kept = kept & (scores - tl.load(peaks + row).to(tl.float64) >= tl.load(depths + row))
    if tl.load(noisy + row) != 0:
        scores += gumbel(tl.load(keys + row).to(tl.uint64, bitcast=True), at)
    scores = tl.where(kept, scores, float("-inf"))
    score = tl.max(scores, axis=0)
    tl.store(best + place, score)
    tl.store(best_id + place, tl.min(tl.where(kept & (scores == score), at, vocabulary), axis=0))


@triton.jit(do_not_specialize=["rows"])
def pick_kernel(logits, temperatures, peaks, totals, best, best_id, out, rows, vocabulary, tiles):
    """Id, log-probability and log-sum-exp of a row."""
    row = tl.program_id(0).to(tl.int64)
    first = row * tiles
    total = fold(peaks + first, totals + first, tiles)
    score, token = tl.load(best + first), tl.load(best_id + first)
    for tile in range(1, tiles):
        other, other_id = tl.load(best + first + tile), tl.load(best_id + first + tile)
        token = tl.where(other > score, other_id, token)
        score = tl.maximum(other, score)
    token = tl.where(tl.abs(total) < float("inf"), token, 0)  # of the other rows it means nothing
    scaled = tl.div_rn(tl.load(logits + row * vocabulary + token), tl.load(temperatures + row).to(tl.float32))
    tl.store(out + row, token.to(tl.float64))
    tl.store(out + rows + row, (scaled - total).to(tl.float64))
    tl.store(out + 2 * rows + row, total.to(tl.float64))


def draw(
    logits: Tensor, keys: Tensor, random: Tensor, top_k: Tensor, top_p: Tensor, depths: Tensor, temperatures: Tensor, *,
    cut: bool, filtered: bool,
) -> Tensor:  # fmt: skip
    """float32 [R, vocabulary], dense -> float64 [3, R]: id, log-probability, log-sum-exp as in draw.Drawn.

    Of each row [R]: keys (int64, the bits of noise.stream_key), whose noise is added where `random` (int64) is not 0;
    top_k (int64, 0 is off), top_p and depths (float64, 1 and -inf are off), temperatures (float64, not 0) as in
    draw.Draw. cut: whether any top_k or top_p is on. filtered: or any depth.
    """
    rows, vocabulary = logits.shape
    device, tiles = logits.device, triton.cdiv(vocabulary, TILE)
    cuts, lasts, peaks = keys, keys, temperatures
    if filtered:
        logits, temperatures = logits / temperatures.float().unsqueeze(1), torch.ones_like(temperatures)
        peaks = logits.amax(dim=1)
        cuts, lasts = torch.zeros_like(keys), torch.full_like(keys, vocabulary)
    if cut:
        cuts, lasts = heads(logits, peaks, top_k, top_p)
    tile_peaks, totals = (torch.empty(rows, tiles, dtype=torch.float32, device=device) for _ in range(2))
    best = torch.empty(rows, tiles, dtype=torch.float64, device=device)
    best_id = torch.empty(rows, tiles, dtype=torch.int64, device=device)
    out = torch.empty(3, rows, dtype=torch.float64, device=device)
    draw_kernel[(rows, tiles)](
        logits, temperatures, cuts, lasts, depths, peaks, random, keys, tile_peaks, totals, best, best_id, vocabulary,
        tiles, filtered, TILE, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    pick_kernel[(rows,)](
        logits, temperatures, tile_peaks, totals, best, best_id, out, rows, vocabulary, tiles, enable_fp_fusion=False
    )
    return out


def heads(logits: Tensor, peaks: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """What top-k, then top-p keep of each row, by the last member: its rank as `order` has it, and its id, int64 [R].

    logits: float32 [R, vocabulary], dense. peaks: [R], the largest of each row. top_k, top_p [R]: as in `draw`.
    """
    rows, vocabulary = logits.shape
    cuts, lasts = torch.zeros_like(top_k), torch.full_like(top_k, vocabulary)
    masses = torch.empty(rows, vocabulary, dtype=torch.int64, device=logits.device)
    options = {"num_warps": WARPS, "enable_fp_fusion": False}
    grid = (rows, triton.cdiv(vocabulary, TILE))
    top_k_kernel[(rows,)](logits, top_k, cuts, lasts, vocabulary, TILE, **options)
    mass_kernel[grid](logits, peaks, top_p, cuts, lasts, masses, vocabulary, TILE, **options)
    top_p_kernel[(rows,)](logits, masses, top_p, cuts, lasts, vocabulary, TILE, **options)
    return cuts, lasts
