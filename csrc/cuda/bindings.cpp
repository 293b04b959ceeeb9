// The CUDA kernels in the Python module. engine/cuda.py makes the checks.
#include "bindings.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <vector>

#include "kernels.h"

namespace py = pybind11;

namespace palimpsest::cuda {
namespace {

using Address = std::uintptr_t;

template <typename T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

void call_gemv(Address x, Index x_stride, Address weight, int type, Address scales, Address bias, bool bias_bf16,
               Address y, int rows, int in, int out, Address stream) {
    gemv({at<const float>(x), x_stride, at<const void>(weight), static_cast<WeightType>(type), at<const float>(scales),
          at<const void>(bias), bias_bf16, at<float>(y), rows, in, out},
         at<void>(stream));
}

void call_paged_decode(Address query, Address key_pages, Address value_pages, Address kv_length, Address tables,
                       Address skipped, int table_stride, int spans, int heads, int kv_heads, int head_dim,
                       int page_size, int tiles, float scale, Address peaks, Address totals, Address partials,
                       Address stream) {
    paged_decode({at<const float>(query), at<const void>(key_pages), at<const void>(value_pages),
                  at<const std::int32_t>(kv_length), at<const std::int32_t>(tables), at<const std::int32_t>(skipped),
                  table_stride, spans, heads, kv_heads, head_dim, page_size, tiles, scale, at<float>(peaks),
                  at<float>(totals), at<float>(partials)},
                 at<void>(stream));
}

void call_all_reduce(Address x, Address y, Index count, Index capacity, const std::vector<Address>& regions, int rank,
                     bool two_shot, Address stream) {
    if (regions.size() > ALL_REDUCE_RANKS) throw std::invalid_argument("all_reduce takes at most 8 ranks");
    AllReduce call = {at<const float>(x), at<float>(y), count, capacity, {}, rank, int(regions.size()), two_shot};
    std::transform(regions.begin(), regions.end(), call.regions, at<void>);
    all_reduce(call, at<void>(stream));
}

}  // namespace

void bind(py::module_& m) {
    m.def("cuda_device_count", &device_count);
    m.def("cuda_gemv", &call_gemv);
    m.def("cuda_paged_decode", &call_paged_decode);
    m.def("cuda_decode_tile", &decode_tile);
    m.def("cuda_all_reduce", &call_all_reduce);
    m.def("cuda_all_reduce_bytes", &all_reduce_bytes);
    m.def("cuda_peer_allocate", [](Index bytes) { return Address(peer_allocate(bytes)); });
    m.def("cuda_peer_handle", [](Address memory) { return py::bytes(peer_handle(at<void>(memory))); });
    m.def("cuda_peer_open", [](const std::string& handle) { return Address(peer_open(handle)); });
}

}  // namespace palimpsest::cuda
