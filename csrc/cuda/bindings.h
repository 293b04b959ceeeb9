#pragma once
#include <pybind11/pybind11.h>

namespace palimpsest::cuda {

void bind(pybind11::module_& m);

}  // namespace palimpsest::cuda
