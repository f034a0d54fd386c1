"""What is read back of cells, and figures over rounds and over seeds."""

from __future__ import annotations

import math

import pytest
from made_up_cells import VERSIONS, comparison_of, done, finish, leave, rounds_of

from pina_flwr.compare.cells import State, run_cell
from pina_flwr.compare.results import first_round, late_clustering, measured, score, stage1_rounds


@pytest.fixture
def comparison(tmp_path):
    return comparison_of(tmp_path)


class TestScore:
    def test_mean_and_sample_deviation(self):
        found = score([0.5, 0.7, 0.9])
        assert found is not None
        assert found.mean == pytest.approx(0.7)
        assert found.sd == pytest.approx(0.2)
        assert (found.least, found.greatest) == (0.5, 0.9)

    def test_one_value_has_no_deviation(self):
        found = score([0.5])
        assert found is not None
        assert (found.mean, found.sd) == (0.5, None)

    def test_what_was_not_measured_does_not_count(self):
        found = score([None, 0.5, math.nan, 0.7])
        assert found is not None
        assert found.values == (0.5, 0.7)
        assert score([None, math.nan]) is score([]) is None


class TestRounds:
    def test_those_that_were_measured(self):
        rows = rounds_of([None, 0.5, math.nan, 0.7])
        assert [(row.round, value) for row, value in measured(rows, "clustering_accuracy")] == [
            (2, 0.5),
            (4, 0.7),
        ]

    def test_the_least_from_half_of_them_on(self, comparison):
        cell = comparison.cells[1]

        def late(*clustering):
            return late_clustering(done(cell, clustering).run)

        assert late(0.1, 0.6, 0.7, 0.8) == 0.6
        assert late(0.1, 0.2, 0.9, 0.7, 0.8) == 0.7  # of 5 rounds from the third on
        assert late(0.1, None, None, 0.8) == 0.8
        assert late(0.9, None, None, None) is None

    def test_the_first_at_a_level(self, comparison):
        run = done(comparison.cells[1], [None, 0.5, 0.95, 0.8, 1.0]).run
        assert [first_round(run, level) for level in (0.5, 0.95, 0.99, 1.0)] == [2, 3, 5, 5]
        assert first_round(done(comparison.cells[1], [0.5]).run, 0.95) is None

    def test_one_model_has_no_clustering(self, comparison):
        run = done(comparison.cells[0], [1.0, 1.0]).run  # FedAvg
        assert run.clustering == []
        assert late_clustering(run) is first_round(run, 0.5) is None

    def test_those_of_stage_1_are_counted(self, comparison):
        assert stage1_rounds(done(comparison.cells[1], [None, None, 0.5], stage1=2).run) == 2


def test_a_cell_is_read_back(comparison):
    cell = comparison.cells[1]
    run_cell(cell, comparison.folder_of(cell), comparison.aside, VERSIONS, finish)
    result = comparison.result(cell)
    assert result.status.state is State.DONE
    assert result.run is not None
    assert (result.run.made_with, result.run.summary.seed) == (VERSIONS, 1)
    assert [row.accuracy for row in result.run.rounds] == [0.2, 0.3, 0.4, 0.5]


def test_what_is_not_done_has_no_figures(comparison):
    cell = comparison.cells[1]
    folder = comparison.folder_of(cell)
    folder.mkdir(parents=True)
    leave(folder, None, rounds_of([0.5, 0.6]))
    assert [result.run for result in comparison.results()] == [None] * 8
