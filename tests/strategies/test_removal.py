"""Noise in excess, measured: with shares sized for dropout, and with the part added in vain removed."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from scipy import stats
from support import Wire, by_round, lost, node_id, rows_of, run

from pina_flwr.config import RunConfig, parse
from pina_flwr.messages import KEYS, REVEAL, TRAIN, Task, request
from pina_flwr.privacy.cohort import shares
from pina_flwr.privacy.noise import KEY_BYTES, OSEntropy
from pina_flwr.privacy.plan import Shapes
from pina_flwr.privacy.sum_mechanism import IntegerSum, component_key, open_mechanism
from pina_flwr.secure_sum.interface import REFUSAL, VECTOR, SumRound
from pina_flwr.secure_sum.session import Session
from pina_flwr.secure_sum.trusted import TrustedSum
from pina_flwr.strategies.removal import remove_excess

Make = Callable[..., RunConfig]
TINY_P = 1e-8  # how rarely a statistical test may fail by chance
SIZE, SEED, STD = 4096, (1, "rotation"), 1.5
HUNDRED = (30, 1, 19, 10, 2, 8, 10, 15, 5)  # users of each node
TWENTY = (8, 1, 4, 2, 5)


def opened(users: int, **options: Any) -> IntegerSum:
    """The mechanism of the private mean, at the default 20 bits."""
    usual = {"num-users": users, "sampling-rate": 1.0, "noise-cohort-size": 0, "secure-sum": "trusted"}
    found = open_mechanism(parse(usual | options), "mean", STD, users, Shapes(SIZE, 1))
    assert isinstance(found, IntegerSum)
    return found


def question(node: int) -> Message:
    return request(RecordDict(), node, TRAIN, 1)


def answer(node: int, content: RecordDict) -> Message:
    return Message(content, reply_to=question(node))


def revealed(node: int, keys: object, users: object) -> Message:
    record = ConfigRecord({"keys": keys, "users": users})  # type: ignore[dict-item]
    return answer(node, RecordDict({KEYS: record}))


@dataclass
class Round:
    """One round, up to the server: some nodes vanished, the others sent their noise around zero vectors.

    groups: sizes of the groups that add noise together, for each node. vanished: nodes. keys: of each node,
    one a group. vectors: what arrived.
    """

    mechanism: IntegerSum
    groups: Sequence[Sequence[int]]
    vanished: Sequence[int]
    keys: Sequence[Sequence[bytes]]
    vectors: Sequence[Message]

    @classmethod
    def of(
        cls, spread: Sequence[int], vanished: Sequence[int], apart: bool = False, **options: Any
    ) -> "Round":
        """spread: users of each node. apart: each adds its own noise, as with SecAgg+."""
        cohort = sum(spread)
        groups = [[1] * users if apart else [users] for users in spread]
        found, keys = opened(cohort, **options), [[os.urandom(KEY_BYTES) for _ in own] for own in groups]

        def sum_of(node: int) -> np.ndarray:
            pairs = zip(groups[node], keys[node], strict=True)
            parts = [found.protect(torch.zeros(n, SIZE), cohort, SEED, OSEntropy(), key) for n, key in pairs]
            return np.asarray(np.sum(parts, axis=0, dtype=np.int64) % (1 << found.bits), np.uint32)

        there = [node for node in range(len(spread)) if node not in vanished]
        sent = [answer(node, RecordDict({VECTOR: ArrayRecord([sum_of(node)])})) for node in there]
        return cls(found, groups, vanished, keys, sent)

    @classmethod
    def of_twenty(cls, *vanished: int, apart: bool = False, **options: Any) -> "Round":
        """Twenty users on five nodes, of whom half may vanish, and removable noise."""
        usual = {"dropout-tolerance": 0.5, "dropout-noise": "removable"}
        return cls.of(TWENTY, vanished, apart, **(usual | options))

    @property
    def spread(self) -> list[int]:
        return [sum(own) for own in self.groups]

    @property
    def about(self) -> SumRound:
        """Ids of members are 100 times their node's, and on."""
        config, size, bits = self.mechanism.budget.config, self.mechanism.size, self.mechanism.bits
        members = {node: [100 * node + i for i in range(n)] for node, n in enumerate(self.spread)}
        return SumRound(Session("1", 1), size, bits, members, shares(config, sum(self.spread)).survivors)

    @property
    def components(self) -> range:
        """Those that were added in vain."""
        lost = sum(self.spread[node] for node in self.vanished)
        return range(lost + 1, self.about.cohort - self.about.fewest + 1)

    def reveals(self, node: int) -> Message:
        """What a node answers that follows the protocol."""
        return revealed(node, self.right(node), list(self.groups[node]))

    def right(self, node: int) -> list[bytes]:
        """The keys that such a node answers with."""
        return [component_key(key, k) for key in self.keys[node] for k in self.components]

    def answers(self, *without: int) -> list[Message]:
        """Those of all nodes that are left but for some."""
        return [self.reveals(i) for i in range(len(self.spread)) if i not in (*self.vanished, *without)]

    def noise(self, answers: Sequence[Message]) -> tuple[np.ndarray, float]:
        """The noise on the sum after these answers, and σ as the server reports it."""
        asked = replace(self.about, reveal=lambda survivors, vanished: [question(n) for n in survivors])
        requests = [question(node) for node in self.about.members]
        result = TrustedSum().run(Wire(list(self.vectors), list(answers)), requests, asked, 1.0)
        assert result.total is not None
        total, excess = remove_excess(self.mechanism, self.about, result)
        budget = self.mechanism.budget
        std = budget.mean_std(self.about.cohort, result.survivors, excess) * budget.expected_cohort
        return self.mechanism.decode(total, SEED), std


def within(noise: np.ndarray, std: float) -> bool:
    """Whether noise is N(0, std²): by its variance and by its distribution function."""
    energy = (noise**2).sum() / std**2
    low, high = stats.chi2.ppf([TINY_P / 2, 1 - TINY_P / 2], noise.size)
    return bool(low < energy < high and stats.kstest(noise / std, "norm").pvalue > TINY_P)


@pytest.mark.parametrize(
    ("dropout_noise", "vanished", "excess"),
    [
        ("provision", (), 1 / 0.7),
        ("provision", (3,), 0.9 / 0.7),
        ("provision", (0,), 1.0),
        ("removable", (), 1.0),
        ("removable", (3,), 1.0),
        ("removable", (0,), 1.0),
    ],
)
def test_excess_at_0_10_and_30_percent_dropout(
    dropout_noise: str, vanished: tuple[int, ...], excess: float
) -> None:
    """Variance over what ε needs, 100 users, 30 % tolerated: never under 1, and 1 if the rest is removed."""
    found = Round.of(HUNDRED, vanished, **{"dropout-tolerance": 0.3, "dropout-noise": dropout_noise})
    noise, said = found.noise(found.answers() if dropout_noise == "removable" else [])
    assert within(noise, STD * math.sqrt(excess))
    assert said == pytest.approx(STD * math.sqrt(excess))


def test_what_colluders_know_is_not_counted() -> None:
    """A fifth of 20 collude: what stays is enough without their part."""
    found = Round.of_twenty(3, **{"colluding-share": 0.2})
    noise, said = found.noise(found.answers())
    assert within(noise, said)
    assert said == pytest.approx(STD * math.sqrt(18 / 14))


@pytest.mark.parametrize(("silent", "excess"), [((), 1.0), ((0,), 10 / 18 + 8 / 10)])
def test_users_who_add_noise_apart(silent: tuple[int, ...], excess: float) -> None:
    """Each has keys of its own; the sum is as if those of a node had added theirs together."""
    found = Round.of_twenty(3, apart=True)
    assert [len(own) for own in found.groups] == list(TWENTY)
    noise, said = found.noise(found.answers(*silent))
    assert within(noise, said)
    assert said == pytest.approx(STD * math.sqrt(excess))


def test_of_a_node_some_users_may_reveal() -> None:
    """As where the others' vectors never came: those that are in the sum keep theirs, or don't."""
    found = Round.of_twenty(apart=True)
    some = revealed(0, found.right(0)[: 3 * len(found.components)], [1] * 3)
    noise, said = found.noise([*found.answers(0), some])
    assert within(noise, said)
    assert said == pytest.approx(STD * math.sqrt(15 / 20 + 5 / 10))


class TestWhoDoesNotReveal:
    def test_leaves_noise_in_excess_and_the_server_says_so(self) -> None:
        found = Round.of_twenty(3)  # 18 are left, 8 of them of node 0
        noise, said = found.noise(found.answers(0))
        assert within(noise, said)
        assert said == pytest.approx(STD * math.sqrt(10 / 18 + 8 / 10))

    def test_at_all(self) -> None:
        noise, said = Round.of_twenty(3).noise([])
        assert within(noise, said)
        assert said == pytest.approx(STD * math.sqrt(18 / 10))

    def test_nothing_is_left_to_reveal_when_the_most_vanished(self) -> None:
        found = Round.of_twenty(0, 3)
        assert not found.components
        noise, said = found.noise([])
        assert within(noise, said)
        assert said == pytest.approx(STD)


class TestWrongAnswers:
    """Of node 0 with 8 of 20 users, while the others do as they should."""

    untouched = math.sqrt(12 / 20 + 8 / 10) * STD  # as if it had not answered

    KINDS: ClassVar[dict[str, Callable[[list[bytes]], tuple[object, object]]]] = {
        "too few": lambda right: (right[:-1], [8]),
        "too many": lambda right: ([*right, bytes(KEY_BYTES)], [8]),
        "short": lambda right: ([*right[:-1], right[-1][:-1]], [8]),
        "text": lambda right: (["x" * KEY_BYTES] * len(right), [8]),
        "none": lambda right: ([], [8]),
        "no list": lambda right: (3, [8]),
        "of nobody": lambda right: (right, []),
        "of nobody, and none": lambda right: ([], []),
        "of more users than it has": lambda right: (right, [9]),
        "of more users in all": lambda right: (right * 2, [8, 1]),
        "of a user too few": lambda right: (right, [0]),
        "of minus one user": lambda right: (right * 2, [8, -1]),
        "of users as text": lambda right: (right, ["8"]),
        "of users as truth": lambda right: (right * 8, [True] * 8),
        "of half a user": lambda right: (right, [7.5]),
        "of no list of users": lambda right: (right, 8),
        "of more groups than keys": lambda right: (right, [4, 4]),
    }

    @pytest.mark.parametrize("kind", KINDS)
    def test_that_are_none_remove_nothing(self, kind: str) -> None:
        found = Round.of_twenty()
        self.check_untouched(found, revealed(0, *self.KINDS[kind](found.right(0))))

    @pytest.mark.parametrize("kind", ["empty", "keys alone", "a refusal", "a vector beside", "an array"])
    def test_other_records_remove_nothing(self, kind: str) -> None:
        found = Round.of_twenty()
        right, vector = found.reveals(0).content, ArrayRecord([np.zeros(found.mechanism.size, np.uint32)])
        contents = {
            "empty": RecordDict({KEYS: ConfigRecord()}),
            "keys alone": RecordDict({KEYS: ConfigRecord({"keys": found.right(0)})}),
            "a refusal": RecordDict({REFUSAL: ConfigRecord({"reason": "budget spent"})}),
            "a vector beside": RecordDict({**right, VECTOR: vector}),
            "an array": RecordDict({KEYS: vector}),
        }
        self.check_untouched(found, answer(0, contents[kind]))

    def check_untouched(self, found: Round, reply: Message) -> None:
        noise, said = found.noise([*found.answers(0), reply])
        assert within(noise, said)
        assert said == pytest.approx(self.untouched)

    def test_a_wrong_key_never_reduces_noise(self) -> None:
        """Subtracting what was never added is adding as much again."""
        found = Round.of_twenty()
        wrong = [component_key(os.urandom(KEY_BYTES), k) for k in found.components]
        noise, _ = found.noise([*found.answers(0), revealed(0, wrong, [8])])
        assert within(noise, math.sqrt(self.untouched**2 + STD**2 * (8 / 10 - 8 / 20)))

    def test_keys_in_another_order_take_away_nothing_that_is_needed(self) -> None:
        """Streams of one key and two variances are alike: some noise goes, of that in excess."""
        found = Round.of_twenty()
        noise, _ = found.noise([*found.answers(0), revealed(0, found.right(0)[::-1], [8])])
        assert noise.var() > STD**2 * stats.chi2.ppf(TINY_P, SIZE) / SIZE
        assert not np.array_equal(noise, found.noise(found.answers())[0])

    def test_twice_counts_once(self) -> None:
        found = Round.of_twenty()
        noise, said = found.noise([*found.answers(), found.reveals(0), found.reveals(0)])
        assert within(noise, said)
        assert said == pytest.approx(STD)

    def test_of_nobody_who_was_asked(self) -> None:
        found = Round.of_twenty()
        noise, said = found.noise([*found.answers(0), answer(99, found.reveals(0).content)])
        assert within(noise, said)
        assert said == pytest.approx(self.untouched)

    def test_keys_of_a_node_whose_vector_never_came(self) -> None:
        """Its noise is not in the sum, so there is nothing to take away, nor any excess of it."""
        found = Round.of_twenty(4)
        noise, said = found.noise([*found.answers(), found.reveals(4)])
        assert within(noise, STD)
        assert said == pytest.approx(STD)


# In a run ---------------------------------------------------------------------------------------------


def options_of(tolerance: float) -> Mapping[str, Any]:
    return {
        "dropout_noise": "removable",
        "dropout_tolerance": tolerance,
        "noise_cohort_size": 0,
        "noise_multiplier": 1.0,
        "strategy": "fedavg",
        "sampling_rate": 1.0,
        "diagnostics": False,
        "secure_sum": "trusted",
        "t_tr": 3,
    }


def test_a_run_reports_what_is_left(config: Make) -> None:
    """Five nodes of 14 users; node 0, with three of them, vanishes in round 2."""
    c = config(**options_of(0.5))
    grid = run(c, 5, intercept=by_round({2: lost}))
    assert [row.survivors for row in rows_of(c)] == [14, 11, 14]
    assert [row.noise_std for row in rows_of(c)] == pytest.approx([1 / 14] * 3)
    questions = grid.trained(REVEAL)
    assert [e.task.vanished for e in questions] == [0] * 5 + [3] * 4 + [0] * 5
    for e in questions:  # keys, as many as were not needed, and nothing else
        ((name, record),) = e.reply.content.items()
        assert name == KEYS
        assert set(record) == {"keys", "users"}
        assert len(cast("list[bytes]", record["keys"])) == 7 - e.task.vanished
        assert record["users"] == [len(e.task.users)]


def test_a_run_in_which_a_node_never_reveals(config: Make) -> None:
    def silent(message: Message, reply: Message) -> list[Message]:
        about = message.metadata
        asked = about.message_type == TRAIN and Task.from_record(message.content).step == REVEAL
        return [] if asked and about.dst_node_id == node_id(0) else [reply]

    c = config(**options_of(0.5))
    run(c, 5, intercept=silent)
    expected = math.sqrt(11 / 14 + 3 / 7) / 14
    assert [row.noise_std for row in rows_of(c)] == pytest.approx([expected] * 3)


def test_a_run_that_too_many_leave_asks_for_nothing(config: Make) -> None:
    c = config(**options_of(0.2))
    grid = run(c, 5, intercept=by_round({2: lost}))
    assert [row.dropped is not None for row in rows_of(c)] == [False, True, False]
    assert {e.task.round for e in grid.trained(REVEAL)} == {1, 3}
