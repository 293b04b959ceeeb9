"""The byte and FLOP model of single kernels against counts made by hand, row by row."""

import pytest
from palimpsest.bench.kernel_costs import (
    Heads,
    attention_backward_cost,
    attention_cost,
    group_cost,
    move_kv_cost,
    moved,
    product_cost,
    turn_and_write_cost,
)

HEADS = Heads(query=6, kv=2, dim=8)


@pytest.mark.parametrize("spans", [[(1, 10)], [(1, 7), (1, 3)], [(4, 4), (2, 9)]])
def test_attention_counts_each_row_with_the_keys_it_sees(spans):
    seen = sum(keys - (rows - 1 - row) for rows, keys in spans for row in range(rows))
    rows, keys = sum(span[0] for span in spans), sum(span[1] for span in spans)
    cost = attention_cost(spans, HEADS, kv_bytes=2)
    assert cost.flops == seen * 6 * (2 * 8 + 2 * 8)  # a dot product, and a value's share of the sum
    assert cost.bytes == keys * 2 * 2 * 8 * 2 + rows * 6 * 8 * (4 + 4)
    backward = attention_backward_cost(spans, HEADS, kv_bytes=2)
    assert backward.flops == seen * 6 * 5 * 2 * 8
    assert backward.bytes == keys * 2 * 2 * 8 * (2 + 4) + rows * 6 * 8 * 4 * 4


def test_a_group_reads_what_it_shares_once():
    one, group = group_cost(1, 100, 60, HEADS, kv_bytes=2), group_cost(3, 100, 60, HEADS, kv_bytes=2)
    assert one == attention_cost([(1, 100)], HEADS, kv_bytes=2)
    assert group.flops == 3 * one.flops
    assert group.bytes == (60 + 3 * 40) * 2 * 2 * 8 * 2 + 3 * 6 * 8 * (4 + 4)


def test_a_product_reads_its_weight_once_however_many_rows_there_are():
    one, many = (product_cost(rows, 30, 50, weight_bytes=2) for rows in (1, 9))
    assert (one.flops, many.flops) == (2 * 30 * 50, 9 * 2 * 30 * 50)
    assert many.bytes - one.bytes == 8 * 4 * (30 + 50)
    assert one.bytes == 2 * 30 * 50 + 4 * (30 + 50)


def test_a_decode_step_of_qwen2_5_7b_reads_12_megabytes_of_kv_a_layer():
    cost = attention_cost([(1, 6144)], Heads(28, 4, 128), kv_bytes=2)
    assert cost.bytes == pytest.approx(12.6e6, rel=0.01)
    assert moved(1000, 3).bytes == 12_000


def test_each_number_that_is_put_into_pages_or_moved_counts_once():
    written = 6 * 8 * (4 + 4) + 2 * 2 * 8 * (4 + 2) + 2 * 4 * 4  # queries, keys and values, cosines and sines
    assert turn_and_write_cost(10, HEADS, kv_bytes=2).bytes == 10 * written
    assert move_kv_cost(10, HEADS, kv_bytes=2).bytes == 10 * (2 * 2 * 8 * (2 + 2) + 2 * 2 * 4 * 4)
