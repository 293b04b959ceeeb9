"""The random numbers of sampling: noise that is a function of five whole numbers and has no state.

    mix(x)   = the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014; constants of Vigna's splitmix64.c),
               arithmetic modulo 2**64, shifts logical:
               x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9;  x ^= x >> 27;  x *= 0x94D049BB133111EB;  x ^= x >> 31
    GAMMA    = 0x9E3779B97F4A7C15
    key      = 0;  for n in (seed, sample, turn, index):  key = mix(key + GAMMA + n)
    bits(v)  = mix(key + GAMMA * (v + 1))             the output number v of a SplitMix64 generator seeded with key
    u(v)     = ((bits(v) >> 12) + 0.5) * 2**-52       float64, exact, within [2**-53, 1 - 2**-53]
    noise(v) = -log(-log(u(v)))                       float64, standard Gumbel

    log(x)   = for x = 2**k * (1 + f) with sqrt(1/2) <= 1 + f < sqrt(2), in this order of roundings:
               s = f / (2 + f);  z = s * s;  w = z * z;  h = 0.5 * f * f
               R = z * (L1 + w * (L3 + w * (L5 + w * L7))) + w * (L2 + w * (L4 + w * L6))
               log = s * (h + R) + k * LN2_LOW - h + f + k * LN2_HIGH
               (FreeBSD's e_log.c, below 1 ulp). A library's log would give other last bits on other machines.

csrc/cpu/sampler.cpp computes the same bits: every operation above is rounded by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LN2_HIGH", "LN2_LOW", "gumbel", "stream_key"]

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MANTISSA = 2**52 - 1
BITS_OF_ONE = 0x3FF0000000000000
BITS_OF_SQRT_HALF = 0x3FE6A09E00000000  # a little below sqrt(1/2)
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10  # high has 32 bits: k * high is exact
L1, L2, L3, L4 = 6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01, 2.222219843214978396e-01
L5, L6, L7 = 1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01


def stream_key(seed: int, sample: int, turn: int, index: int) -> int:
    """The 64-bit key of one token's noise (see the module's head)."""
    key = 0
    for number in (seed, sample, turn, index):
        key = _mix(key + GAMMA + number)
    return key


def gumbel(key: int, ids: Tensor) -> Tensor:
    """The noise (float64) of vocabulary `ids` (int64) under a 64-bit key."""
    x = _signed(key) + (ids + 1) * _signed(GAMMA)
    x = (x ^ _shift_right(x, 30)) * _signed(MULTIPLIERS[0])
    x = (x ^ _shift_right(x, 27)) * _signed(MULTIPLIERS[1])
    x = x ^ _shift_right(x, 31)
    uniform = (_shift_right(x, 12).double() + 0.5) * 2.0**-52
    return -_log(-_log(uniform))


def _log(x: Tensor) -> Tensor:
    """The natural logarithm of normal float64 numbers above 0, as the module's head defines it."""
    shifted = x.view(torch.int64) + (BITS_OF_ONE - BITS_OF_SQRT_HALF)
    k = ((shifted >> 52) - 1023).double()
    f = ((shifted & MANTISSA) + BITS_OF_SQRT_HALF).view(torch.float64) - 1.0
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    h = 0.5 * f * f
    rest = z * (L1 + w * (L3 + w * (L5 + w * L7))) + w * (L2 + w * (L4 + w * L6))
    return s * (h + rest) + k * LN2_LOW - h + f + k * LN2_HIGH


def _mix(x: int) -> int:
    x &= MASK
    x = ((x ^ (x >> 30)) * MULTIPLIERS[0]) & MASK
    x = ((x ^ (x >> 27)) * MULTIPLIERS[1]) & MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """The int64 with the bits of an unsigned 64-bit x: torch has no arithmetic on uint64."""
    return x - 2**64 if x >= 2**63 else x


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Logical shift of int64; torch's own keeps the sign."""
    return torch.bitwise_and(x >> by, 2 ** (64 - by) - 1)
