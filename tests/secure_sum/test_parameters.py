import math
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import combinations, pairwise

import numpy as np
import pytest

from pina_flwr.secure_sum.graph import draw
from pina_flwr.secure_sum.parameters import (
    FAILURE,
    FEW,
    Failures,
    Parameters,
    _split,
    _tails,
    agreement,
    check,
    choose,
    complete,
    failures,
)

RATES = [(0.0, 0.0), (0.1, 0.0), (0.1, 0.1), (0.1, 0.3), (0.3, 0.1), (0.3, 0.3), (0.0, 0.5), (0.4, 0.1)]


def all_pairs(members: int) -> Iterator[Parameters]:
    """Every k and t for so many members, ascending by k, then by t."""
    for k in [*range(2, members - 1, 2), members - 1]:
        yield from (Parameters(k, t) for t in range(k // 2 + 1, k + 1))


def circulant(members: int, neighbours: int) -> np.ndarray:
    """Adjacency [members, members] of the circle in its natural order."""
    distance = np.arange(members)
    near = (np.minimum(distance, members - distance) <= neighbours / 2) & (distance > 0)
    if neighbours == members - 1:
        near = distance > 0
    return np.stack([np.roll(near, i) for i in range(members)])


def adjacency(rows: np.ndarray) -> np.ndarray:
    matrix = np.zeros((len(rows), len(rows)), dtype=bool)
    matrix[np.arange(len(rows))[:, None], rows] = True
    return matrix


def connected(matrix: np.ndarray, kept: np.ndarray) -> bool:
    """Whether the members kept, bool [members], are connected through each other."""
    if not kept.any():
        return True
    reached = np.zeros(len(kept), dtype=bool)
    front = np.zeros(len(kept), dtype=bool)
    front[np.argmax(kept)] = True
    while front.any():
        reached |= front
        front = matrix[front].any(axis=0) & kept & ~reached
    return bool(reached[kept].all())


def sets(members: int, size: int) -> Iterator[np.ndarray]:
    """Every set of that size, as bool [members]."""
    for chosen in combinations(range(members), size):
        marked = np.zeros(members, dtype=bool)
        marked[list(chosen)] = True
        yield marked


def exact_tail(others: int, marked: int, drawn: int, v: int) -> Fraction:
    ways = sum(math.comb(marked, i) * math.comb(others - marked, drawn - i) for i in range(v, drawn + 1))
    return Fraction(ways, math.comb(others, drawn))


class TestTails:
    @pytest.mark.parametrize(
        ("others", "marked", "drawn"),
        [(9, 3, 4), (9, 9, 4), (9, 0, 4), (9, 7, 9), (99, 30, 60), (9999, 1000, 100), (99999, 29999, 120)],
    )
    def test_are_exact_down_to_the_smallest(self, others: int, marked: int, drawn: int) -> None:
        tails = _tails(others, marked, drawn)
        assert tails.shape == (drawn + 2,)
        for v in range(0, drawn + 2, max(1, drawn // 20)):
            exact = float(exact_tail(others, marked, drawn, v))
            assert tails[v] == pytest.approx(exact, rel=1e-10, abs=0)

    def test_cover_what_is_asked_of_them(self) -> None:
        tails = _tails(99999, 9999, 100)
        assert ((tails > 1e-30) & (tails < 1e-15)).sum() > 5  # else the test above has not been there

    def test_of_what_cannot_be_is_zero(self) -> None:
        assert _tails(99, 3, 20)[4:].tolist() == [0.0] * 18
        assert _tails(9, 7, 5)[:4].tolist() == [1.0] * 4  # at least 3 of 5 are marked


class TestSplit:
    @pytest.mark.parametrize(
        ("members", "neighbours"), [(8, 2), (9, 4), (10, 4), (11, 6), (12, 4), (10, 8), (8, 6)]
    )
    def test_bounds_what_all_sets_show(self, members: int, neighbours: int) -> None:
        matrix = circulant(members, neighbours)
        for removed in range(members):
            count = sum(not connected(matrix, ~gone) for gone in sets(members, removed))
            truth = count / math.comb(members, removed)
            bound = _split(members, neighbours, removed)
            assert truth <= bound * (1 + 1e-12)
            if removed < neighbours:
                assert bound == 0
            if removed == neighbours:  # one pair of runs at most: nothing is counted twice
                assert truth == pytest.approx(bound, rel=1e-9)
                assert truth > 0

    def test_takes_two_long_runs(self) -> None:
        """The lemma itself: split if and only if two gaps between survivors hold k/2 or more each."""
        members, neighbours = 11, 4
        matrix = circulant(members, neighbours)
        for removed in range(members - 1):
            for gone in sets(members, removed):
                places = np.flatnonzero(~gone)
                gaps = np.diff(np.append(places, places[0] + members)) - 1
                assert connected(matrix, ~gone) == ((gaps >= neighbours / 2).sum() < 2)

    def test_without_corrupted_members_is_stuck(self) -> None:
        members, neighbours = 11, 4
        matrix = circulant(members, neighbours)
        for gone in sets(members, 6):
            if not connected(matrix, ~gone):
                assert (matrix[~gone] & ~gone).sum(axis=1).min() < neighbours / 2 + 1

    def test_beats_ruling_out_a_single_run(self) -> None:
        members, removed = 1000, 200

        def simple(k: int) -> float:
            return members * (removed / members) ** (k / 2)

        fewest = next(k for k in range(2, 999, 2) if _split(members, k, removed) <= FAILURE)
        fewest_simple = next(k for k in range(2, 999, 2) if simple(k) <= FAILURE)
        assert (fewest, fewest_simple) == (26, 44)


@pytest.mark.parametrize(("members", "marked"), [(9, 3), (10, 4), (8, 1)])
def test_exposed_and_stuck_bound_what_all_sets_show(members: int, marked: int) -> None:
    rate = marked / members
    for parameters in all_pairs(members):
        k, t = parameters.neighbours, parameters.threshold
        matrix = circulant(members, k)
        exposed = stuck = first_exposed = 0
        for chosen in sets(members, marked):
            seen = (matrix & chosen).sum(axis=1)
            exposed += bool((seen[~chosen] >= 2 * t - k).any())
            stuck += bool((k - seen < t).any())
            first_exposed += bool(not chosen[0] and seen[0] >= 2 * t - k)
        every = math.comb(members, marked)
        bounds = failures(parameters, members, 0.0, rate)
        assert exposed / every <= bounds.exposed * (1 + 1e-12)
        assert stuck / every <= failures(parameters, members, rate, 0.0).stuck * (1 + 1e-12)
        # Of one member that is known to be honest, the tail is the truth.
        honest = math.comb(members - 1, marked)
        assert first_exposed / honest == pytest.approx(_tails(members - 1, marked, k)[2 * t - k], rel=1e-9)


def test_fewer_corrupted_or_dropped_are_never_worse() -> None:
    for parameters in all_pairs(14):
        bounds = [failures(parameters, 14, i / 14, i / 14) for i in range(14)]
        for less, more in pairwise(bounds):
            assert less.exposed <= more.exposed * (1 + 1e-12)
            assert less.split <= more.split * (1 + 1e-12)
            assert less.stuck <= more.stuck * (1 + 1e-12)


def test_drawn_graphs_fail_as_often_as_the_bounds_say() -> None:
    members, draws, parameters = 40, 3000, Parameters(8, 6)
    corrupted, dropped = np.zeros(members, dtype=bool), np.zeros(members, dtype=bool)
    corrupted[:4], dropped[4:8] = True, True
    seen = np.zeros(3)
    for _ in range(draws):
        matrix = adjacency(draw(members, parameters.neighbours))
        exposed = ((matrix & corrupted).sum(axis=1)[~corrupted] >= 4).any()
        split = not connected(matrix, ~(corrupted | dropped))
        stuck = ((matrix & ~dropped).sum(axis=1) < 6).any()
        seen += [exposed, split, stuck]
    bounds = failures(parameters, members, 0.1, 0.1)
    for count, bound in zip(seen, [bounds.exposed, bounds.split, bounds.stuck], strict=True):
        assert count / draws <= bound + 5 * math.sqrt(bound / draws)
    # And the bounds are no idle ones: neighbourhoods overlap, which costs a factor of a few.
    assert seen[0] / draws > bounds.exposed / 8
    assert seen[2] / draws > bounds.stuck / 8
    assert 0.01 < bounds.exposed < bounds.stuck < 1


def test_drawn_graphs_split_as_often_as_the_bound_says() -> None:
    members, draws, removed = 16, 4000, np.arange(16) < 6
    count = sum(not connected(adjacency(draw(members, 4)), ~removed) for _ in range(draws))
    bound = _split(members, 4, 6)
    assert 0.1 < bound < 1
    noise = 5 * math.sqrt(bound / draws)
    assert 0.6 * bound - noise < count / draws < bound + noise  # 0.609 of it in 24,000 draws


class TestChoose:
    @pytest.mark.parametrize("members", [2, 3, 4, 5, 7, 12, 13, 30, 61, 120])
    @pytest.mark.parametrize("failure", [FAILURE, 1e-3, 0.3])
    def test_takes_the_first_pair_of_a_full_search(self, members: int, failure: float) -> None:
        for dropout, corrupted in RATES:

            def holds(pair: Parameters, dropout: float = dropout, corrupted: float = corrupted) -> bool:
                bounds = failures(pair, members, dropout, corrupted)
                return bounds.exposed + bounds.split <= failure and bounds.stuck <= failure

            pairs = [p for p in all_pairs(members) if members > FEW or p.neighbours == members - 1]
            first = next(filter(holds, pairs), None)
            if first is None and 2 * dropout + corrupted < 1 and int(members * corrupted) <= members - 2:
                first = complete(members, dropout, corrupted)  # one loss fewer is sure to be borne
            if first is None:
                with pytest.raises(ValueError, match=r"^dropout = "):
                    choose(members, dropout, corrupted, failure)
            else:
                assert choose(members, dropout, corrupted, failure) == first

    @pytest.mark.parametrize(
        ("members", "dropout", "corrupted", "pair"),
        [
            (2, 0.1, 0.1, Parameters(1, 1)),
            (3, 0.1, 0.1, Parameters(2, 2)),
            (10, 0.1, 0.0, Parameters(9, 5)),
            (10, 0.3, 0.1, Parameters(9, 6)),
            (11, 0.1, 0.0, Parameters(4, 3)),
            (100, 0.1, 0.1, Parameters(32, 22)),
            (1000, 0.1, 0.1, Parameters(128, 86)),
            (10_000, 0.3, 0.3, Parameters(5602, 3735)),
        ],
    )
    def test_known_pairs(self, members: int, dropout: float, corrupted: float, pair: Parameters) -> None:
        assert choose(members, dropout, corrupted) == pair

    @pytest.mark.parametrize("members", [50, 1000, 100_000])
    def test_keeps_both_bounds(self, members: int) -> None:
        for dropout, corrupted in RATES:
            bounds = failures(choose(members, dropout, corrupted), members, dropout, corrupted)
            assert bounds.exposed + bounds.split <= FAILURE
            assert bounds.stuck <= FAILURE

    def test_asks_for_more_neighbours_where_more_may_go_wrong(self) -> None:
        rates = [0.0, 0.05, 0.1, 0.2, 0.3]
        by_dropout = [choose(500, rate, 0.1).neighbours for rate in rates]
        by_corrupted = [choose(500, 0.1, rate).neighbours for rate in rates]
        by_failure = [choose(500, 0.1, 0.1, 10.0**-i).neighbours for i in range(1, 15)]
        for series in (by_dropout, by_corrupted, by_failure):
            assert series == sorted(series)
            assert series[0] < series[-1]

    def test_grows_like_the_logarithm_of_members(self) -> None:
        thousand, hundred_thousand = (choose(n, 0.1, 0.1).neighbours for n in (1000, 100_000))
        assert hundred_thousand < 1.5 * thousand

    def test_is_fast(self) -> None:
        start = time.process_time()
        choose(100_000, 0.3, 0.3)
        assert time.process_time() - start < 1.0  # 0.08 s on one core

    def test_takes_a_rate_for_what_it_says(self) -> None:
        """0.29 · 100 is 28.999... in floating point."""
        assert choose(100, 0.29, 0.0) == choose(100, 0.295, 0.0) != choose(100, 0.285, 0.0)

    @pytest.mark.parametrize(("dropout", "corrupted"), [(0.49, 0.0), (0.4, 0.19)])
    def test_more_neighbours_than_there_are_shares(self, dropout: float, corrupted: float) -> None:
        """A server that says so many take part can't keep a client busy for minutes."""
        start = time.process_time()
        with pytest.raises(ValueError, match="would need over 65535 neighbours"):
            choose(2**31, dropout, corrupted)
        assert time.process_time() - start < 10.0  # 0.12 and 0.10 s

    @pytest.mark.parametrize(
        ("members", "dropout", "corrupted", "says"),
        [
            (10, 0.5, 0.1, "of 10 members 5 may drop, must be at most 3 while 1 are corrupted"),
            (10, 0.0, 0.9, "of 10 members 9 may be corrupted, must be at most 8"),
            (1000, 0.25, 0.5, "of 1000 members 250 may drop, must be at most 249 while 500"),
            (2, 0.5, 0.0, "of 2 members 1 may drop, must be at most 0"),
            (100_000, 0.34, 0.34, "of 100000 members 34000 may drop, must be at most 32999"),
        ],
    )
    def test_says_what_would_be_possible(
        self, members: int, dropout: float, corrupted: float, says: str
    ) -> None:
        with pytest.raises(ValueError, match=says) as caught:
            choose(members, dropout, corrupted)
        assert str(caught.value).startswith(f"dropout = {dropout}, corrupted = {corrupted}: ")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("members", "corrupted", "dropout", "neighbours", "threshold"),
    [
        (100, 0.3, 0.3, 92, 62),
        (1000, 0.3, 0.3, 872, 584),
        (1000, 0.05, 0.33, 398, 223),
        (10_000, 0.05, 0.33, 746, 420),
        (100, 0.33, 0.05, 42, 37),
        (1000, 0.33, 0.05, 132, 109),
        (10_000, 0.33, 0.05, 178, 146),
    ],
)
def test_agrees_with_the_authors_own_code(
    members: int, corrupted: float, dropout: float, neighbours: int, threshold: int
) -> None:
    """Pairs in the tests of Google's fcp/secagg/server/graph_parameter_finder, semi-malicious server.

    They are the first with exposed and split at most 2^-41 each, and stuck at most 2^-20.
    """

    def holds(k: int, t: int) -> bool:
        bounds = failures(Parameters(k, t), members, dropout, corrupted)
        return max(bounds.exposed, bounds.split) <= 2.0**-41 and bounds.stuck <= 2.0**-20

    assert holds(neighbours, threshold)
    assert not holds(neighbours, threshold - 1)
    fewer = neighbours - 2
    assert not any(holds(fewer, t) for t in range(fewer // 2 + 1, fewer + 1))


class TestBadNumbers:
    @pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, math.nan, math.inf])
    def test_rates(self, rate: float) -> None:
        for call in (choose, complete, lambda *rest: failures(Parameters(4, 3), *rest)):
            with pytest.raises(ValueError, match=f"^dropout = {rate}: must be at least 0 and below 1$"):
                call(10, rate, 0.1)
            with pytest.raises(ValueError, match=f"^corrupted = {rate}: must be at least 0 and below 1$"):
                call(10, 0.1, rate)
        with pytest.raises(ValueError, match=f"^corrupted = {rate}: must"):
            agreement(10, rate)

    @pytest.mark.parametrize("members", [-1, 0, 1])
    def test_too_few_members(self, members: int) -> None:
        for call in (choose, complete, lambda *rest: failures(Parameters(1, 1), *rest)):
            with pytest.raises(ValueError, match=f"^members = {members}: must be at least 2$"):
                call(members, 0.1, 0.1)
        with pytest.raises(ValueError, match=f"^members = {members}: must"):
            agreement(members, 0.1)

    def test_members_that_are_no_integer(self) -> None:
        with pytest.raises(TypeError):
            choose(10.0, 0.1, 0.1)  # type: ignore[arg-type]

    @pytest.mark.parametrize("failure", [0.0, -1.0, 1.0, math.nan])
    def test_failure(self, failure: float) -> None:
        with pytest.raises(ValueError, match=f"^failure = {failure}: must"):
            choose(10, 0.1, 0.1, failure)


class TestCheck:
    def test_passes_whatever_is_possible(self) -> None:
        for members in range(2, 12):
            for parameters in all_pairs(members):
                check(parameters, members)

    @pytest.mark.parametrize(
        ("neighbours", "threshold", "members"),
        [
            *[(0, 0, 10), (-2, 1, 10), (3, 2, 10), (10, 6, 10), (11, 6, 10), (math.nan, 3, 10)],
            *[(4, 2, 10), (4, 5, 10), (4, 0, 10), (4, -3, 10), (9, 4, 10), (4, math.nan, 10)],
            *[(1, 1, 1), (2, 2, 0)],
        ],
    )
    def test_refuses_the_rest(self, neighbours: int, threshold: int, members: int) -> None:
        with pytest.raises(ValueError, match=r"^(neighbours|threshold|members) = .*: must be "):
            check(Parameters(neighbours, threshold), members)
        with pytest.raises(ValueError, match="must be "):
            failures(Parameters(neighbours, threshold), members, 0.1, 0.1)


class TestCompleteGraph:
    def test_nothing_goes_wrong_and_no_lower_threshold_does(self) -> None:
        for members in range(2, 25):
            for corrupted in range(members - 1):
                for dropped in range((members - 2 - corrupted) // 2 + 1):
                    rates = dropped / members, corrupted / members
                    pair = complete(members, *rates)
                    assert pair.neighbours == members - 1
                    assert failures(pair, members, *rates) == Failures(0.0, 0.0, 0.0)
                    lower = Parameters(pair.neighbours, pair.threshold - 1)
                    if 2 * lower.threshold > lower.neighbours:
                        assert failures(lower, members, *rates).exposed == 1.0
                    assert members - dropped >= agreement(members, rates[1])

    def test_there_is_none_beyond(self) -> None:
        for members in range(2, 25):
            for corrupted in range(members):
                too_many = max(0, (members - 2 - corrupted) // 2 + 1)
                if 2 * too_many + corrupted >= members:
                    with pytest.raises(ValueError, match=r"^dropout = "):
                        complete(members, too_many / members, corrupted / members)
                for threshold in range((members - 1) // 2 + 1, members):
                    pair = Parameters(members - 1, threshold)
                    bounds = failures(pair, members, too_many / members, corrupted / members)
                    assert max(bounds.exposed, bounds.stuck) == 1.0

    @pytest.mark.parametrize(
        ("dropout", "corrupted"),
        [(0.1, 0.0), (0.34, 0.0), (0.45, 0.0), (0.3, 0.3), (0.25, 0.4), (0.33, 0.33)],
    )
    @pytest.mark.parametrize("find", [choose, complete])
    def test_rates_that_leave_room_do_so_for_every_number_of_members(
        self, find: Callable[[int, float, float], Parameters], dropout: float, corrupted: float
    ) -> None:
        """Else some cohorts would always be dropped, and who sees a round dropped would know their size."""
        for members in range(2, 130):
            pair = find(members, dropout, corrupted)
            found = failures(pair, members, dropout, corrupted)
            assert found.exposed + found.split <= FAILURE
            fewer = (math.floor(members * dropout + 1e-9) - 1) / members
            assert failures(pair, members, max(0.0, fewer), corrupted).stuck <= FAILURE

    def test_two_agreed_sets_share_an_honest_signer(self) -> None:
        for members in range(2, 40):
            for corrupted in range(members):
                signers = agreement(members, corrupted / members)
                assert 2 * signers - members > corrupted
                assert 2 * (signers - 1) - members <= corrupted  # and fewer would not do
                assert signers <= members
