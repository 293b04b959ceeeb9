// The Python module palimpsest._C: addresses and sizes in, nothing out. Checks are made in engine/cpu.py.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace py = pybind11;
using palimpsest::cpu::Index;
using Address = std::uintptr_t;

namespace {

const float* floats(Address address) { return reinterpret_cast<const float*>(address); }
float* floats_out(Address address) { return reinterpret_cast<float*>(address); }
const std::int32_t* ints(Address address) { return reinterpret_cast<const std::int32_t*>(address); }
void* bytes_out(Address address) { return reinterpret_cast<void*>(address); }
const void* bytes(Address address) { return reinterpret_cast<const void*>(address); }

// `count` indices, each in [0, limit).
const Index* indices(Address address, Index count, Index limit, const char* what) {
    auto values = reinterpret_cast<const Index*>(address);
    for (Index i = 0; i < count; i++)
        if (values[i] < 0 || values[i] >= limit)
            throw std::invalid_argument(std::string(what) + " " + std::to_string(values[i]) + " is not below " +
                                        std::to_string(limit));
    return values;
}

// One instruction set's kernels. Every call releases the GIL.
class CpuKernels {
  public:
    explicit CpuKernels(const std::string& isa)
        : table_(isa == "best" ? &palimpsest::cpu::best_kernels() : palimpsest::cpu::find_kernels(isa.c_str())) {
        if (table_ == nullptr) throw std::invalid_argument("this machine cannot run the kernels for '" + isa + "'");
    }

    const char* isa() const { return table_->isa; }

    void rms_norm(Address x, Address weight, bool weight_bf16, Address out, Index rows, Index n, Index x_stride,
                  float eps) const {
        table_->rms_norm(floats(x), bytes(weight), weight_bf16, floats_out(out), rows, n, x_stride, eps);
    }

    void linear(Address x, Index x_stride, Address weight, bool weight_bf16, Address bias, bool bias_bf16, Address y,
                Index rows, Index in, Index out) const {
        table_->linear(floats(x), x_stride, bytes(weight), weight_bf16, bytes(bias), bias_bf16, floats_out(y), rows, in,
                       out);
    }

    void paged_attention(Address query, Index query_stride, Address key_pages, Address value_pages, bool kv_bf16,
                         Address query_start, Address kv_length, Address pages, Index pages_stride, Index spans,
                         Index heads, Index kv_heads, Index head_dim, Index page_size, Index page_count, float scale,
                         Address out) const {
        palimpsest::cpu::paged_attention(
            *table_, {floats(query), query_stride, bytes(key_pages), bytes(value_pages), kv_bf16, ints(query_start),
                      ints(kv_length), ints(pages), pages_stride, spans, heads, kv_heads, head_dim, page_size,
                      page_count, scale, floats_out(out)});
    }

    void silu_product(Address gate, Index gate_stride, Address up, Index up_stride, Address out, Index rows,
                      Index n) const {
        table_->silu_product(floats(gate), gate_stride, floats(up), up_stride, floats_out(out), rows, n);
    }

    void rotate(Address x, Index x_stride, Address positions, Address cos, Address sin, Index window, Address out,
                Index tokens, Index heads, Index head_dim) const {
        const Index* at = indices(positions, tokens, window, "position");
        table_->rotate(floats(x), x_stride, at, floats(cos), floats(sin), floats_out(out), tokens, heads, head_dim);
    }

    void write_kv(Address key, Index key_stride, Address value, Index value_stride, Address key_pages,
                  Address value_pages, bool kv_bf16, Address slots, Index tokens, Index kv_heads, Index page_count,
                  Index page_size, Index head_dim) const {
        const Index* to = indices(slots, tokens, page_count * page_size, "slot");
        table_->write_kv(floats(key), key_stride, floats(value), value_stride, bytes_out(key_pages),
                         bytes_out(value_pages), kv_bf16, to, tokens, kv_heads, page_size, head_dim);
    }

    void embedding(Address ids, Address weight, bool weight_bf16, Index vocabulary, Address out, Index tokens,
                   Index hidden) const {
        const Index* which = indices(ids, tokens, vocabulary, "token id");
        table_->embedding(which, bytes(weight), weight_bf16, floats_out(out), tokens, hidden);
    }

    void log_sum_exp(Address x, Index x_stride, Address out, Index rows, Index n) const {
        using palimpsest::cpu::kVocabularyTile;
        std::vector<palimpsest::cpu::TileSum> tiles(rows * ((n + kVocabularyTile - 1) / kVocabularyTile));
        table_->log_sum_exp(floats(x), x_stride, floats_out(out), tiles.data(), rows, n);
    }

    double multiply_add(Index repeats) const { return table_->multiply_add(repeats); }

    double read_memory(Address data, Index n) const { return table_->read_memory(floats(data), n); }

  private:
    const palimpsest::cpu::Kernels* table_;
};

}  // namespace

PYBIND11_MODULE(_C, m) {
    using Release = py::call_guard<py::gil_scoped_release>;
    py::class_<CpuKernels>(m, "CpuKernels")
        .def(py::init<const std::string&>(), py::arg("isa"))
        .def_property_readonly("isa", &CpuKernels::isa)
        .def("rms_norm", &CpuKernels::rms_norm, Release())
        .def("linear", &CpuKernels::linear, Release())
        .def("paged_attention", &CpuKernels::paged_attention, Release())
        .def("silu_product", &CpuKernels::silu_product, Release())
        .def("rotate", &CpuKernels::rotate, Release())
        .def("write_kv", &CpuKernels::write_kv, Release())
        .def("embedding", &CpuKernels::embedding, Release())
        .def("log_sum_exp", &CpuKernels::log_sum_exp, Release())
        .def("multiply_add", &CpuKernels::multiply_add, Release())
        .def("read_memory", &CpuKernels::read_memory, Release());
}
