"""Synthetic samples: the id law, independence of the split, labels that can be learned."""

from __future__ import annotations

import pytest
import torch

from tests.trainers.jobs import model_of, plan_of, whole_on_rank_0
from trainers.counter_rng import hash64, normal, uniform
from trainers.data.source import Slice, open_source
from trainers.data.synthetic import SampleMaker, ZipfLaw
from trainers.metrics import quality
from trainers.task import TrainTask

MODEL = model_of()


def test_counters_give_uniform_independent_numbers() -> None:
    index = torch.arange(100_000)
    drawn = uniform(1, index)
    assert float(drawn.min()) >= 0.0 and float(drawn.max()) < 1.0
    assert abs(float(drawn.mean()) - 0.5) < 0.005
    assert abs(float(drawn.var()) - 1 / 12) < 0.002
    pair = torch.stack([drawn, uniform(2, index)])
    assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.02
    assert abs(float(torch.corrcoef(torch.stack([drawn[1:], drawn[:-1]]))[0, 1])) < 0.02
    assert len(torch.unique(hash64(3, index))) == len(index)
    gauss = normal(4, index)
    assert abs(float(gauss.mean())) < 0.02 and abs(float(gauss.std()) - 1) < 0.02


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.0, 1.05, 2.0])
@pytest.mark.parametrize("rows", [1, 7, 5000, 20_000])
def test_zipf_law(rows: int, exponent: float) -> None:
    weights = torch.arange(1, rows + 1, dtype=torch.float64) ** -exponent
    exact = torch.cumsum(weights / weights.sum(), 0)
    grid = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    ranks = ZipfLaw(rows, exponent).rank(grid)
    assert int(ranks.min()) >= 0 and int(ranks.max()) < rows
    drawn = torch.cumsum(torch.bincount(ranks, minlength=rows).double() / len(grid), 0)
    assert float((drawn - exact).abs().max()) < 1e-3


@pytest.mark.parametrize("rows", [1, 2, 10, 10_007, 65_536])
def test_ranks_are_scattered_one_to_one(rows: int) -> None:
    law = ZipfLaw(rows, 0.0)
    ranks = torch.arange(rows)
    assert len(torch.unique(ranks * law._stride % rows)) == rows


def test_a_slice_equals_the_same_part_of_the_whole() -> None:
    maker = SampleMaker(MODEL, seed=3)
    whole, part = maker.batch(1000, 50), maker.batch(1012, 9)
    assert torch.equal(part.dense, whole.dense[12:21])
    assert torch.equal(part.labels, whole.labels[12:21])
    for feature in whole.sparse.keys():  # noqa: SIM118 (not a dict)
        assert torch.equal(
            torch.cat(part.sparse[feature].to_dense()),
            torch.cat(whole.sparse[feature].to_dense()[12:21]),
        )


def test_poolings_and_ids() -> None:
    batch = SampleMaker(MODEL, seed=0).batch(0, 4000)
    factors = [factor for table in MODEL.all_tables for factor in table.pooling_factors]
    lengths = batch.sparse.lengths().view(len(factors), -1).double().mean(1)
    torch.testing.assert_close(lengths, torch.tensor(factors).double(), atol=0.03, rtol=0)
    for table in MODEL.all_tables:
        for feature in table.feature_names:
            ids = batch.sparse[feature].values()
            assert int(ids.min()) >= 0 and int(ids.max()) < table.num_embeddings


def test_labels_follow_the_planted_model() -> None:
    maker = SampleMaker(MODEL, seed=0)
    batch = maker.batch(0, 20_000)
    lengths = batch.sparse.lengths().view(4, -1).long()
    truth = maker._logits(batch.dense.double(), lengths, batch.sparse.values())
    found = quality(truth, batch.labels)
    assert found.auc is not None and 0.75 < found.auc < 0.9
    assert found.calibration == pytest.approx(1.0, abs=0.05)
    assert 0.15 < float(batch.labels.mean()) < 0.4


def test_holdout_differs_from_training() -> None:
    plan = plan_of({"p": (1, 64, whole_on_rank_0(MODEL))}, MODEL)
    source = open_source(TrainTask(plan, steps=9, eval_fraction=0.1))
    trained = list(source.train_batches(Slice(0, 64)))
    held = list(source.holdout_batches(Slice(0, 64)))
    assert len(trained) == 9 and len(held) == 1 and held[0][1] == 64
    assert not any(torch.equal(held[0][0].dense, batch.dense) for batch in trained)
