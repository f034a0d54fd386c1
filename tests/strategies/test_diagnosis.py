import math

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from pina_flwr.client import DIAGNOSTICS
from pina_flwr.messages import pack
from pina_flwr.strategies.diagnosis import diagnose


def answer(**arrays: list) -> RecordDict:  # type: ignore[type-arg]
    return RecordDict({DIAGNOSTICS: pack({name: np.array(value) for name, value in arrays.items()})})


# Four users in two groups; node 0 hosts users 0 and 2, node 1 hosts 1 and 3. User 3 picks the wrong cluster.
NODE_0 = answer(
    users=[0, 2],
    test_group=[0, 0],
    choices=[1, 1],
    losses=[[5.0, 1.0], [5.0, 2.0]],
    groups=[0, 1],
    correct=[[0, 4], [3, 1]],
    total=[5, 5],
    norms=[1.0, math.inf],
    left_out=[2],
)
NODE_1 = answer(
    users=[1, 3],
    test_group=[1, 1],
    choices=[0, 1],
    losses=[[3.0, 9.0], [9.0, 6.0]],
    groups=[0, 1],
    correct=[[1, 2], [4, 2]],
    total=[5, 5],
    norms=[3.0],
    left_out=np.zeros(0, dtype=int),
)


def test_by_hand() -> None:
    d = diagnose([NODE_0, NODE_1], 2, groups_known=True)
    assert d is not None
    assert d.loss == (1 + 2 + 3 + 6) / 4
    # Group 0: both users have model 1, right on 6 of 10. Group 1: model 0 is right on 7 of 10, model 1 on 3.
    np.testing.assert_allclose(d.cluster_accuracy, [0.6, 0.5])
    np.testing.assert_allclose([d.accuracy, d.worst_cluster_accuracy], [0.55, 0.5])
    assert d.clustering_accuracy == 0.75
    assert d.cluster_sizes == [1, 3]
    assert (d.norm_mean, d.norm_max, d.left_out) == (2.0, 3.0, 1)


def test_a_natural_split_has_accuracy_by_chosen_cluster() -> None:
    """Each user is its own test group; user 2 holds no test image."""
    node = answer(
        users=[0, 1, 2],
        test_group=[0, 1, 2],
        choices=[0, 2, 2],
        losses=[[1.0, 2.0, 3.0]] * 3,
        groups=[0, 1, 2],
        correct=[[2, 0, 0], [1, 1, 3], [0, 0, 0]],
        total=[4, 4, 0],
        left_out=np.zeros(0, dtype=int),
    )
    d = diagnose([node], 3, groups_known=False)
    assert d is not None
    np.testing.assert_allclose(d.cluster_accuracy, [0.5, math.nan, 0.75])
    assert d.accuracy == (0.5 + 0.75) / 2
    assert d.worst_cluster_accuracy == 0.5
    assert math.isnan(d.clustering_accuracy)
    assert math.isnan(d.ari)
    assert d.cluster_sizes == [1, 0, 2]
    assert math.isnan(d.norm_mean)


def test_nobody_answered() -> None:
    assert diagnose([], 2, groups_known=True) is None
    assert diagnose([RecordDict({"x": ConfigRecord({"a": 1})})], 2, groups_known=True) is None
