// Included last by the .cpp of each instruction set: the table of its kernels.
#pragma once

#include "attention.h"
#include "attention_backward.h"
#include "elementwise.h"
#include "elementwise_backward.h"
#include "limits.h"
#include "linear.h"
#include "linear_backward.h"
#include "log_sum_exp.h"
#include "norm.h"
#include "quantised_linear.h"
#include "sampler.h"
#include "token_scores.h"

namespace palimpsest::cpu {

#define PALIMPSEST_STRING_(x) #x
#define PALIMPSEST_STRING(x) PALIMPSEST_STRING_(x)

extern const Kernels PALIMPSEST_TABLE;
const Kernels PALIMPSEST_TABLE = {
    PALIMPSEST_STRING(PALIMPSEST_ISA),
    PALIMPSEST_ISA::rms_norm,
    PALIMPSEST_ISA::linear,
    PALIMPSEST_ISA::attention_piece,
    PALIMPSEST_ISA::attention_fold,
    PALIMPSEST_ISA::silu_product,
    PALIMPSEST_ISA::rotate,
    PALIMPSEST_ISA::write_kv,
    PALIMPSEST_ISA::embedding,
    PALIMPSEST_ISA::log_sum_exp,
    PALIMPSEST_ISA::fold_sums,
    PALIMPSEST_ISA::draw_tile,
    PALIMPSEST_ISA::whole_mass,
    PALIMPSEST_ISA::gather,
    PALIMPSEST_ISA::linear_input_grad,
    PALIMPSEST_ISA::linear_weight_grad,
    PALIMPSEST_ISA::column_sums,
    PALIMPSEST_ISA::silu_product_grad,
    PALIMPSEST_ISA::log_sum_exp_grad,
    PALIMPSEST_ISA::token_scores,
    PALIMPSEST_ISA::token_scores_grad,
    PALIMPSEST_ISA::attention_query_grad,
    PALIMPSEST_ISA::attention_key_grad,
    PALIMPSEST_ISA::multiply_add,
    PALIMPSEST_ISA::read_memory,
    PALIMPSEST_ISA::quantise_row,
    PALIMPSEST_ISA::quantised_panel,
};

}  // namespace palimpsest::cpu
