from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from raptr.data.batch import Batch
from raptr.methods import make_method
from raptr.models.bert.config import SIZES, BertConfig
from raptr.models.contract import ModelConfig
from raptr.models.decoder.config import SIZES as DECODERS
from raptr.models.decoder.config import DecoderConfig
from raptr.subnetworks import Shape, Subnetwork
from raptr.train.flops import TRAINING, flops, planned_flops
from raptr.train.plan import plan

TINY = replace(SIZES["tiny"], vocabulary=300, positions=32)
ODD = BertConfig(layers=3, width=20, heads=3, head_size=8, mlp=28, vocabulary=70, positions=16, parts=2)
DECODER = replace(DECODERS["tiny"], vocabulary=300, positions=32)
GROUPED = replace(DECODER, kv_heads=2, tied=False)
WIDTH = TINY.resized(Shape(6, heads=2, parts=1))  # of a model that gets the others later
QUERIES = {TINY: 1, WIDTH: 1, ODD: 1, DECODER: 1, GROUPED: 2}  # query heads of one head of a subnetwork


@pytest.mark.parametrize(
    ("config", "subnetwork"),
    [
        (TINY, Subnetwork.full(6)),
        (TINY, Subnetwork((1.0, 0.0, 2.0, 0.0, 0.0, 1.0))),
        (TINY, Subnetwork((0.0,) * 6)),
        (TINY, Subnetwork((1.0,) * 6, heads=((0, 3),) * 6)),
        (TINY, Subnetwork((1.0,) * 6, parts=((1,), (1, 2), (0,), (3,), (0, 1, 2), (2,)))),
        (TINY, Subnetwork((1.0, 0.0, 1.0, 0.0, 1.5, 0.0), heads=((1,),) * 6, parts=((0, 2),) * 6)),
        (ODD, Subnetwork.full(3)),
        (ODD, Subnetwork((1.0, 0.0, 1.0), heads=((0,), (), (1, 2)), parts=((1,), (), (0,)))),
        (DECODER, Subnetwork.full(6)),
        (DECODER, Subnetwork((1.0, 0.0, 1.0, 0.0, 1.5, 0.0), heads=((1,),) * 6, parts=((0, 2),) * 6)),
        (TINY, Subnetwork((1.0,) * 6, head_gates=(1.0, 1.0, 0.0, 0.0), part_gates=(1.0, 0.0, 0.0, 0.0))),
        (WIDTH, Subnetwork.full(6)),
        (GROUPED, Subnetwork.full(6)),
        (GROUPED, Subnetwork((1.0, 0.0, 1.0, 0.0, 1.5, 0.0), heads=((1,),) * 6, parts=((0, 2),) * 6)),
    ],
)
@pytest.mark.parametrize(("sequences", "length", "targets"), [(2, 16, 2), (3, 11, 4)])
def test_closed_form_equals_the_counter(
    config: ModelConfig, subnetwork: Subnetwork, sequences: int, length: int, targets: int
) -> None:
    model = config.build(seed=0)
    batch = Batch(
        torch.zeros(sequences, length, dtype=torch.long),
        torch.arange(targets).expand(sequences, -1),
        torch.ones(sequences, targets, dtype=torch.long),
    )
    # the plain kernel: fused ones are counted by other conventions, or on the CPU not at all
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(batch, model.inputs(subnetwork)).backward()
    count = flops(config, subnetwork, sequences=sequences, length=length, targets=targets)
    # The counter takes every key for every query; where attention is causal, (S + 1) / 2 of S are needed on average.
    uncounted = 0
    if isinstance(config, DecoderConfig):
        heads = sum(len(subnetwork.heads[n]) if subnetwork.heads else config.shape.heads for n in subnetwork.kept)
        inner = heads * QUERIES[config] * config.head_size
        uncounted = TRAINING * sequences * 2 * 2 * inner * (length * length - length * (length + 1) // 2)
    assert counter.get_total_flops() == count.total + uncounted
    assert 0 <= count.layers < count.total


@pytest.mark.parametrize(
    ("settings", "exact"),
    [
        ({}, True),
        ({"schedule": "6-6", "heads": "2-4", "parts": "1-4"}, True),
        ({"selection": "bernoulli"}, False),
    ],
)
def test_a_run_costs_what_was_planned(settings: dict[str, Any], exact: bool) -> None:
    method = make_method("raptr", shape=TINY.shape, steps=2000, **settings)
    cost = {"sequences": 2, "length": 16, "targets": 2}
    spent = sum(flops(TINY, method.subnetwork(step), **cost).total for step in range(2000))
    planned = planned_flops(TINY, method, **cost).total
    assert spent == pytest.approx(planned, rel=1e-12 if exact else 0.02)


def test_the_plan_of_the_papers_schedules() -> None:
    base = replace(SIZES["base"], vocabulary=30_000, positions=128)
    cost = {"sequences": 256, "length": 128, "targets": 19}
    made = plan(make_method("raptr", shape=base.shape, steps=675_000, schedule="6-8-10-12"), base, **cost)
    assert made.relative_layers == pytest.approx(0.75)
    assert [row.size for row in made.rows] == pytest.approx([6, 8, 10, 12])
    assert made.speedup == pytest.approx(1.316, abs=2e-3)
    full = plan(make_method("full", shape=base.shape, steps=10), base, **cost)
    assert (full.relative_layers, full.relative_model) == (1, 1)
    # 85 million weights in the layers, 6 FLOPs each a token, and attention on top
    assert full.full_flops / 10 / (256 * 128) / 6 == pytest.approx(85e6 + 12 * 128 * 768 * 2 + 0.15 * 24e6, rel=0.02)


@pytest.mark.parametrize(
    ("settings", "counts", "relative"),
    [
        ({"heads": "6-9-12"}, [(6, 4), (9, 4), (12, 4)], [0.8243, 0.9122, 1]),
        ({"parts": "1-2-4"}, [(12, 1), (12, 2), (12, 4)], [0.5135, 0.6757, 1]),
        ({"schedule": "6-12", "heads": "6-12", "parts": "2-4"}, [(6, 2), (12, 4)], [0.25, 1]),
    ],
)
def test_the_plan_of_a_model_that_grows_in_width(
    settings: dict[str, Any], counts: list[tuple[int, int]], relative: list[float]
) -> None:
    """Of a layer's 12·768² weights and 2·128·768 products of attention a token, heads make 4·768² and the latter."""
    base = replace(SIZES["base"], vocabulary=30_000, positions=128)
    made = plan(
        make_method("msg", shape=base.shape, steps=300_000, **settings), base, sequences=256, length=128, targets=19
    )
    assert [(row.heads, row.parts) for row in made.rows] == counts
    assert [row.layers_flops for row in made.rows] == pytest.approx(relative, abs=1e-4)
