// What attention and its backward pass share in dealing out their work.
#pragma once

#include <vector>

#include "kernels.h"

namespace palimpsest::cpu {

// Throws std::invalid_argument when a span or its pages point outside of what they describe.
void check_spans(const AttentionCall& call);

// The work in parts of at most `rows` rows.
std::vector<AttentionTask> attention_tasks(const AttentionCall& call, Index rows);

}  // namespace palimpsest::cpu
