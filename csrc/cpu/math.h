// Elementary functions on vectors, from operations that every instruction set rounds alike.
#pragma once

#include <initializer_list>

#include "vec.h"

namespace palimpsest::cpu::PALIMPSEST_ISA {

// e^x to about 1 ulp for x in [-87.3, 88.3]; below, the value at the end of that range. e^x = 2^n e^r with n = round(x
// / ln 2) and |r| <= ln 2 / 2; e^r is the polynomial of the Cephes library's expf.
inline F16 exp_below(F16 x) {
    x = maximum(F16::set(-87.3f), x);
    F16 magic = F16::set(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number, which stands in the low bits
    F16 shifted = fma(x, F16::set(1.44269504f), magic);
    F16 n = shifted - magic;
    F16 r = fma(n, F16::set(-0.693359375f), x);
    r = fma(n, F16::set(2.12194440e-4f), r);
    F16 p = F16::set(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = fma(p, r, F16::set(c));
    p = fma(p, r * r, r) + F16::set(1.0f);
    return scale_by_power(p, shifted);
}

// The same, and above that range the value at its end.
inline F16 exp(F16 x) {
    // `maximum` hands on its second operand when that is not a number.
    return exp_below(F16::zero() - maximum(F16::set(-88.3f), F16::zero() - x));
}

inline float exp(float x) {
    float lanes[kWidth];
    exp(F16::set(x)).store(lanes);
    return lanes[0];
}

}  // namespace palimpsest::cpu::PALIMPSEST_ISA
