// The Python module palimpsest._C. Tensors come as addresses and sizes, and engine/cpu.py makes the checks.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/decoder.h"
#include "cpu/kernels.h"
#ifdef PALIMPSEST_WITH_CUDA
#include "cuda/bindings.h"
#endif
#include "huge_pages.h"
#include "suffix_automaton.h"

namespace py = pybind11;
using palimpsest::cpu::Index;
using palimpsest::cpu::KvType;
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

const palimpsest::cpu::Kernels& kernels_for(const std::string& isa) {
    using namespace palimpsest::cpu;
    const Kernels* table = isa == "best" ? &best_kernels() : find_kernels(isa.c_str());
    if (table == nullptr) throw std::invalid_argument("this machine cannot run the kernels for '" + isa + "'");
    return *table;
}

// values, scales, minima, bits, in, out, scale_groups, scale_shift
using PackedArgument = std::tuple<Address, Address, Address, Index, Index, Index, Index, Index>;

palimpsest::cpu::PackedWeight packed_weight(const PackedArgument& argument) {
    auto [values, scales, minima, bits, in, out, scale_groups, scale_shift] = argument;
    auto halves = [](Address address) { return reinterpret_cast<const std::uint16_t*>(address); };
    return {reinterpret_cast<const std::uint8_t*>(values),
            halves(scales),
            halves(minima),
            bits,
            in,
            out,
            scale_groups,
            scale_shift};
}

// {seed, sample, turn, index}, temperature, top_k, top_p, depth
using DrawArgument = std::tuple<std::array<std::uint64_t, 4>, double, Index, double, double>;

// One instruction set's kernels. Every call releases the GIL.
class CpuKernels {
  public:
    explicit CpuKernels(const std::string& isa) : table_(&kernels_for(isa)) {}

    const char* isa() const { return table_->isa; }

    void rms_norm(Address x, Address weight, bool weight_bf16, Address out, Index rows, Index n, Index x_stride,
                  float eps) const {
        table_->rms_norm(floats(x), bytes(weight), weight_bf16, floats_out(out), rows, n, x_stride, eps);
    }

    void linear(Address x, Index x_stride, Address weight, bool weight_bf16, Address bias, bool bias_bf16, Address y,
                Index rows, Index in, Index out) const {
        table_->linear({floats(x),
                        x_stride,
                        rows,
                        in,
                        {{bytes(weight), weight_bf16, {}, bytes(bias), bias_bf16, out, floats_out(y)}}});
    }

    void paged_attention(Address query, Index query_stride, Address key_pages, Address value_pages, int kv_type,
                         Address query_start, Address kv_length, Address pages, Index pages_stride, Index spans,
                         Index heads, Index kv_heads, Index head_dim, Index page_size, Index page_count, float scale,
                         Address out, Address stats) const {
        palimpsest::cpu::AttentionPlan plan(
            {nullptr, query_stride, nullptr, nullptr, KvType(kv_type), ints(query_start), ints(kv_length), ints(pages),
             pages_stride, spans, heads, kv_heads, head_dim, page_size, page_count, scale, nullptr, floats_out(stats)});
        std::vector<float> scratch(plan.floats());
        plan.run(*table_, bytes(key_pages), bytes(value_pages), floats(query), floats_out(out), scratch.data());
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
                  Address value_pages, int kv_type, Address slots, Index tokens, Index kv_heads, Index page_count,
                  Index page_size, Index head_dim) const {
        const Index* to = indices(slots, tokens, page_count * page_size, "slot");
        table_->write_kv(floats(key), key_stride, floats(value), value_stride, bytes_out(key_pages),
                         bytes_out(value_pages), KvType(kv_type), to, tokens, kv_heads, page_size, head_dim);
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

    // -> token, log-probability and total of each row.
    std::vector<std::tuple<Index, float, float>> draw(Address logits, Index stride, Index vocabulary,
                                                      const std::vector<DrawArgument>& rows) const {
        std::vector<palimpsest::cpu::DrawRow> row;
        for (const auto& [stream, temperature, top_k, top_p, depth] : rows)
            row.push_back({palimpsest::cpu::noise_key(stream[0], stream[1], stream[2], stream[3]), temperature == 0,
                           temperature == 0 ? 1.0f : float(temperature), top_k, top_p, depth});
        std::vector<palimpsest::cpu::Drawn> out(row.size());
        palimpsest::cpu::draw(*table_, {floats(logits), stride, Index(row.size()), vocabulary, row.data(), out.data()});
        std::vector<std::tuple<Index, float, float>> drawn;
        for (const auto& one : out) drawn.emplace_back(one.id, one.logprob, one.total);
        return drawn;
    }

    double multiply_add(Index repeats) const { return table_->multiply_add(repeats); }

    double read_memory(Address data, Index n) const { return table_->read_memory(floats(data), n); }

    void quantised_linear(Address x, Index x_stride, Index rows, const PackedArgument& weight, Address bias,
                          bool bias_bf16, Address y) const {
        palimpsest::cpu::PackedWeight packed = packed_weight(weight);
        palimpsest::cpu::LinearCall call{floats(x),
                                         x_stride,
                                         rows,
                                         packed.in,
                                         {{nullptr, false, packed, bytes(bias), bias_bf16, packed.out, floats_out(y)}}};
        std::unique_ptr<char[]> scratch(new char[palimpsest::cpu::quantised_scratch(rows, call.in)]);
        palimpsest::cpu::quantised_linear(*table_, call, scratch.get());
    }

    void linear_input_grad(Address dy, Address weight, bool weight_bf16, Address dx, Index rows, Index in,
                           Index out) const {
        table_->linear_input_grad(floats(dy), bytes(weight), weight_bf16, floats_out(dx), rows, in, out);
    }

    void linear_weight_grad(Address dy, Address x, Index x_stride, Address dw, Index rows, Index in, Index out,
                            bool add) const {
        table_->linear_weight_grad(floats(dy), floats(x), x_stride, floats_out(dw), rows, in, out, add);
    }

    void column_sums(Address x, Address out, Index rows, Index n) const {
        table_->column_sums(floats(x), floats_out(out), rows, n);
    }

    void silu_product_grad(Address gate, Index gate_stride, Address up, Index up_stride, Address dy, Address dgate,
                           Address dup, Index rows, Index n) const {
        table_->silu_product_grad(floats(gate), gate_stride, floats(up), up_stride, floats(dy), floats_out(dgate),
                                  floats_out(dup), rows, n);
    }

    void log_sum_exp_grad(Address x, Index x_stride, Address result, Address dy, Address dx, Index rows,
                          Index n) const {
        table_->log_sum_exp_grad(floats(x), x_stride, floats(result), floats(dy), floats_out(dx), rows, n);
    }

    void token_scores(Address logits, float temperature, Address targets, Address logprobs, Address entropies,
                      Address log_sums, Index rows, Index n) const {
        using palimpsest::cpu::kVocabularyTile;
        Index count = rows * ((n + kVocabularyTile - 1) / kVocabularyTile);
        std::vector<palimpsest::cpu::TileSum> tiles(count);
        std::vector<float> weighted(count);
        table_->token_scores({floats_out(logits), temperature, indices(targets, rows, n, "token id"),
                              floats_out(logprobs), floats_out(entropies), floats_out(log_sums), rows, n},
                             tiles.data(), weighted.data());
    }

    void token_scores_grad(Address logits, float temperature, Address targets, Address entropies, Address log_sums,
                           Address logprob_grads, Address entropy_grads, Index rows, Index n) const {
        table_->token_scores_grad({floats_out(logits), temperature, indices(targets, rows, n, "token id"), nullptr,
                                   floats_out(entropies), floats_out(log_sums), rows, n},
                                  floats(logprob_grads), floats(entropy_grads));
    }

    void attention_backward(Address query, Address key, Address value, Address query_start, Address kv_length,
                            Address rows, Index rows_stride, Index spans, Index tokens, Index heads, Index kv_heads,
                            Index head_dim, float scale, Address stats, Address out_grad, Address delta,
                            Address query_grad, Address key_grad, Address value_grad) const {
        palimpsest::cpu::AttentionCall forward{floats(query),
                                               heads * head_dim,
                                               bytes(key),
                                               bytes(value),
                                               KvType::float32,
                                               ints(query_start),
                                               ints(kv_length),
                                               ints(rows),
                                               rows_stride,
                                               spans,
                                               heads,
                                               kv_heads,
                                               head_dim,
                                               1,
                                               tokens,
                                               scale,
                                               floats_out(query_grad),
                                               floats_out(stats)};
        palimpsest::cpu::attention_backward(
            *table_, {forward, floats(out_grad), floats(delta), floats_out(key_grad), floats_out(value_grad)});
    }

  private:
    const palimpsest::cpu::Kernels* table_;
};

// (address, is bfloat16); address 0 for none
using ParameterArgument = std::pair<Address, bool>;
// weight, bias, in, out, or instead of the weight a packed one
using LinearArgument = std::tuple<ParameterArgument, ParameterArgument, Index, Index, std::optional<PackedArgument>>;

palimpsest::cpu::Parameter parameter(const ParameterArgument& argument) {
    return {bytes(argument.first), argument.second};
}

palimpsest::cpu::LinearWeights linear_weights(const LinearArgument& argument) {
    return {parameter(std::get<0>(argument)), parameter(std::get<1>(argument)), std::get<2>(argument),
            std::get<3>(argument),
            std::get<4>(argument) ? packed_weight(*std::get<4>(argument)) : palimpsest::cpu::PackedWeight{}};
}

// The layer stack of one model over one set of pages. The tensors whose addresses it holds must outlive it.
class CpuDecoder {
  public:
    CpuDecoder(const std::string& isa, Index hidden, Index heads, Index kv_heads, Index head_dim, Index vocabulary,
               Index window, Index page_size, Index page_count, int kv_type, float eps, float scale, Address cos,
               Address sin, const ParameterArgument& embedding, const ParameterArgument& norm)
        : decoder_(kernels_for(isa),
                   {hidden, heads, kv_heads, head_dim, vocabulary, window, page_size, page_count, KvType(kv_type), eps,
                    scale, floats(cos), floats(sin)},
                   parameter(embedding), parameter(norm)) {}

    // norms: input, post, query, key. linears: query, key, value, output, gate, up, down.
    void add_layer(const std::array<ParameterArgument, 4>& norms, const std::array<LinearArgument, 7>& linears,
                   Address key_pages, Address value_pages) {
        decoder_.add_layer({parameter(norms[0]), parameter(norms[1]), parameter(norms[2]), parameter(norms[3]),
                            linear_weights(linears[0]), linear_weights(linears[1]), linear_weights(linears[2]),
                            linear_weights(linears[3]), linear_weights(linears[4]), linear_weights(linears[5]),
                            linear_weights(linears[6]), bytes_out(key_pages), bytes_out(value_pages)});
    }

    void run(Address ids, Address positions, Address slots, Index tokens, Address query_start, Address kv_length,
             Address pages, Address wanted_start, Index pages_stride, Index spans, Address hidden) {
        auto index = [](Address address) { return reinterpret_cast<const Index*>(address); };
        decoder_.run({index(ids), index(positions), index(slots), ints(query_start), ints(kv_length), ints(pages),
                      ints(wanted_start), tokens, spans, pages_stride},
                     floats_out(hidden));
    }

  private:
    palimpsest::cpu::Decoder decoder_;
};

// Token ids of an array("i") and the like, read in place.
py::buffer_info token_ids(const py::buffer& ids) {
    py::buffer_info info = ids.request();
    if (info.ndim != 1 || !info.item_type_is_equivalent_to<palimpsest::Token>() || info.strides[0] != info.itemsize)
        throw std::invalid_argument("token ids must be a dense array of int32");
    return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
    using Release = py::call_guard<py::gil_scoped_release>;
#ifdef PALIMPSEST_WITH_CUDA
    palimpsest::cuda::bind(m);
#endif
    py::class_<CpuKernels>(m, "CpuKernels")
        .def(py::init<const std::string&>(), py::arg("isa"))
        .def_property_readonly("isa", &CpuKernels::isa)
        .def("rms_norm", &CpuKernels::rms_norm, Release())
        .def("linear", &CpuKernels::linear, Release())
        .def("paged_attention", &CpuKernels::paged_attention, Release())
        .def("quantised_linear", &CpuKernels::quantised_linear, Release())
        .def("silu_product", &CpuKernels::silu_product, Release())
        .def("rotate", &CpuKernels::rotate, Release())
        .def("write_kv", &CpuKernels::write_kv, Release())
        .def("embedding", &CpuKernels::embedding, Release())
        .def("log_sum_exp", &CpuKernels::log_sum_exp, Release())
        .def("draw", &CpuKernels::draw, Release())
        .def("multiply_add", &CpuKernels::multiply_add, Release())
        .def("read_memory", &CpuKernels::read_memory, Release())
        .def("linear_input_grad", &CpuKernels::linear_input_grad, Release())
        .def("linear_weight_grad", &CpuKernels::linear_weight_grad, Release())
        .def("column_sums", &CpuKernels::column_sums, Release())
        .def("silu_product_grad", &CpuKernels::silu_product_grad, Release())
        .def("log_sum_exp_grad", &CpuKernels::log_sum_exp_grad, Release())
        .def("token_scores", &CpuKernels::token_scores, Release())
        .def("token_scores_grad", &CpuKernels::token_scores_grad, Release())
        .def("attention_backward", &CpuKernels::attention_backward, Release());
    py::class_<CpuDecoder>(m, "CpuDecoder")
        .def(py::init<const std::string&, Index, Index, Index, Index, Index, Index, Index, Index, int, float, float,
                      Address, Address, const ParameterArgument&, const ParameterArgument&>())
        .def("add_layer", &CpuDecoder::add_layer)
        .def("run", &CpuDecoder::run, Release());
    m.def("use_huge_pages", &palimpsest::use_huge_pages, Release());
    using palimpsest::SuffixAutomaton;
    using palimpsest::Token;
    py::class_<SuffixAutomaton>(m, "SuffixAutomaton")
        .def(py::init<>())
        .def_property_readonly("states", &SuffixAutomaton::states)
        .def("add", &SuffixAutomaton::add)
        .def("extend",
             [](SuffixAutomaton& self, int text, const py::buffer& ids) {
                 py::buffer_info info = token_ids(ids);
                 self.extend(text, static_cast<const Token*>(info.ptr), info.size);
             })
        .def("advance",
             [](SuffixAutomaton& self, const py::buffer& ids) {
                 py::buffer_info info = token_ids(ids);
                 self.advance(static_cast<const Token*>(info.ptr), info.size);
             })
        .def("match", [](const SuffixAutomaton& self) {
            auto [length, text, position] = self.match();
            return std::make_tuple(length, text, position);
        });
}
