"""The breakdown by op: what a call costs, and that a watched model computes as before."""

import torch
from palimpsest.bench.breakdown import Breakdown, call_cost, explain, ways
from palimpsest.bench.ours import VARIANTS, Ours
from palimpsest.engine.ops import Spans


def test_attention_counts_the_keys_that_each_row_sees():
    # Two spans: rows 0-2 end at 10 tokens, row 3 at 5; 4 heads on 2 kv heads of size 8, float32 keys and values.
    starts, lengths = torch.tensor([0, 3, 4]), torch.tensor([10, 5])
    spans = Spans(starts.int(), lengths.int(), torch.zeros(2, 1, dtype=torch.int32))
    query, pages, key = torch.zeros(4, 4, 8), torch.zeros(1000, 2, 16, 8), torch.zeros(4, 2, 8)
    seen = 8 + 9 + 10 + 5
    slots = torch.zeros(4, dtype=torch.int64)
    cost = call_cost("attend", (query, key, key, None, pages, pages, slots, spans, 1.0), query)
    assert cost.flops == seen * 4 * (2 * 8 + 2 * 8)
    written = 2 * 2 * key.numel() * 4 + 4 * 8
    assert cost.bytes == (10 + 5) * 2 * 8 * (4 + 4) + 2 * query.numel() * 4 + written


def test_linear_counts_its_products_and_everything_that_moves():
    x, weight, y = torch.zeros(3, 8), torch.zeros(5, 8, dtype=torch.bfloat16), torch.zeros(3, 5)
    cost = call_cost("linear", (x, weight, None), y)
    assert (cost.flops, cost.bytes) == (2 * 3 * 8 * 5, 4 * 3 * 8 + 2 * 5 * 8 + 4 * 3 * 5)


def test_watching_sees_every_op_and_leaves_no_trace(tiny_model):
    ours = Ours(tiny_model, VARIANTS["float32"], sequences=1, longest=64, threads=1)
    breakdown, layers = Breakdown(), ours.model_config.num_layers
    with breakdown.watching(ours.engine.runner, op_by_op=True):
        sample = ours.prefill(40, 1)
    totals = breakdown.totals
    assert (totals["linear"].calls, totals["attend"].calls) == (7 * layers + 1, layers)
    assert 0 < sum(total.seconds for total in totals.values()) < sample.seconds
    assert [line.split()[0] for line in breakdown.table(sample).splitlines()[1:]][-1] == "Python"
    ours.prefill(40, 2)
    assert totals["linear"].calls == 7 * layers + 1


def test_layers_in_one_call_are_one_line(tiny_model):
    ours = Ours(tiny_model, VARIANTS["float32"], sequences=1, longest=64, threads=1)
    runner = ours.engine.runner
    usual = runner.run_layers
    assert ways(runner) == [False, True]
    table = explain("title", runner, ours.prefilling(40, 1), False)
    ops = [line[:24].strip() for line in table.splitlines()[2:]]
    assert sorted(ops[:-1]) == ["all layers", "draw", "linear"]
    assert runner.run_layers is usual


def test_a_table_that_is_only_touched_in_places_does_not_count_whole():
    table = torch.zeros(1000, 8)
    assert call_cost("embedding", (torch.zeros(3, dtype=torch.int64), table), torch.zeros(3, 8)).bytes < table.nbytes
