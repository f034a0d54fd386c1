import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from pina_flwr.secure_sum import field, shamir
from pina_flwr.secure_sum.shamir import join, split

FALSE_ALARM = 1e-7  # of each of the few statistics below: a sound build fails less than once in a million
SECRET = bytes(range(32))


def rows(*secrets: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(secrets), np.uint8).reshape(-1, 32)


class TestJoin:
    def test_any_threshold_many_shares_give_the_secret(self) -> None:
        (shares,) = split(rows(SECRET), holders=6, threshold=3)
        for points in itertools.permutations(range(1, 7), 3):
            assert join(points, shares[[point - 1 for point in points]]) == SECRET

    @pytest.mark.parametrize(
        ("holders", "threshold"), [(1, 1), (2, 2), (3, 1), (20, 11), (100, 51), (200, 200)]
    )
    def test_undoes_split(self, holders: int, threshold: int) -> None:
        secrets = [os.urandom(32) for _ in range(3)]
        shares = split(rows(*secrets), holders, threshold)
        assert shares.shape == (3, holders, 32)
        assert shares.dtype == np.uint8
        points = np.random.default_rng(holders).permutation(holders)[:threshold] + 1
        assert [join(points, theirs[points - 1]) for theirs in shares] == secrets

    def test_of_the_most_holders_there_can_be(self) -> None:
        (shares,) = split(rows(SECRET), holders=65535, threshold=3)
        assert join([65535, 1, 30000], shares[[65534, 0, 29999]]) == SECRET
        assert join(range(64001, 65536), shares[64000:]) == SECRET  # in several chunks of rows

    def test_of_shares_laid_out_otherwise(self) -> None:
        (shares,) = split(rows(SECRET), holders=9, threshold=3)
        assert join([1, 4, 7], np.asfortranarray(shares)[::3]) == SECRET
        assert join([9, 8, 7], shares[::-1][:3]) == SECRET

    def test_with_a_share_changed_is_another_secret(self) -> None:
        (shares,) = split(rows(SECRET), holders=5, threshold=3)
        for row, byte in itertools.product(range(3), range(32)):
            changed = shares[:3].copy()
            changed[row, byte] ^= 1
            assert join([1, 2, 3], changed) != SECRET

    @pytest.mark.parametrize(
        "points",
        [[1, 2], [1, 2, 3, 4], [[1], [2], [3]], [1.0, 2.0, 3.0], [True, False, True], 3, [], [1, 2, None]],
    )
    def test_refuses_other_than_a_point_a_share(self, points: Any) -> None:
        with pytest.raises(ValueError, match="must be 3 whole numbers"):
            join(points, np.zeros((3, 32), np.uint8))

    @pytest.mark.parametrize("points", [[0, 1, 2], [1, 2, 65536], [-1, 1, 2], [1, 2, 2**63 - 1]])
    def test_refuses_points_out_of_range(self, points: list[int]) -> None:
        with pytest.raises(ValueError, match="must be from 1 to 65535"):
            join(points, np.zeros((3, 32), np.uint8))

    def test_refuses_a_point_twice(self) -> None:
        with pytest.raises(ValueError, match="must be distinct"):
            join([4, 2, 4], np.zeros((3, 32), np.uint8))


class TestSplit:
    def test_is_a_polynomial_with_coefficients_of_the_operating_system(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drawn = bytes(range(100, 228))
        wanted: list[int] = []

        def urandom(count: int) -> bytes:
            wanted.append(count)
            return drawn[:count]

        monkeypatch.setattr(shamir.os, "urandom", urandom)
        shares = split(rows(SECRET, SECRET[::-1]), holders=4, threshold=3).view("<u2")
        assert wanted == [2 * 2 * 32]
        second, first = np.frombuffer(drawn, "=u2").reshape(2, 2, 16)
        for point in range(1, 5):
            x = np.array([point], np.uint16)
            linear, square = field.multiply(first, x), field.multiply(second, field.multiply(x, x))
            words = np.frombuffer(SECRET + SECRET[::-1], "<u2").reshape(2, 16)
            np.testing.assert_array_equal(shares[:, point - 1], words ^ linear ^ square)

    def test_draws_anew_for_each_secret_and_each_time(self) -> None:
        once, again = split(rows(SECRET, SECRET), 5, 3), split(rows(SECRET, SECRET), 5, 3)
        assert len({share.tobytes() for share in [*once.reshape(-1, 32), *again.reshape(-1, 32)]}) == 20

    @pytest.mark.parametrize(
        ("holders", "threshold", "wrong"),
        [
            (0, 1, "holders = 0"),
            (65536, 2, "holders = 65536"),
            (5, 6, "threshold = 6"),
            (5, 0, "threshold = 0"),
        ],
    )
    def test_refuses_numbers_out_of_range(self, holders: int, threshold: int, wrong: str) -> None:
        with pytest.raises(ValueError, match=f"{wrong}: must be from 1 to"):
            split(rows(SECRET), holders, threshold)


@pytest.mark.parametrize("call", [lambda array: split(array, 3, 2), lambda array: join([1], array)])
class TestBothRefuse:
    @pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.float32, np.bool_])
    def test_other_types(self, call: Callable[[Any], object], dtype: type) -> None:
        with pytest.raises(ValueError, match="must be a numpy array of uint8"):
            call(np.zeros((1, 32), dtype))

    @pytest.mark.parametrize("value", [SECRET, [list(SECRET)], None])
    def test_no_arrays(self, call: Callable[[Any], object], value: object) -> None:
        with pytest.raises(ValueError, match="must be a numpy array of uint8"):
            call(value)

    @pytest.mark.parametrize("shape", [(32,), (1, 31), (1, 33), (0, 32), (1, 1, 32), ()])
    def test_other_shapes(self, call: Callable[[Any], object], shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"must be \[at least 1, 32\]"):
            call(np.zeros(shape, np.uint8))


class TestFewerShares:
    """t - 1 shares tell nothing: they are uniform together, whatever the secret."""

    SPLITS, CELLS = 20_000, 2**12

    def looks_uniform(self, cells: NDArray[Any]) -> bool:
        counts = np.bincount(cells.reshape(-1), minlength=self.CELLS)
        assert counts.size == self.CELLS
        return bool(stats.chisquare(counts).pvalue > FALSE_ALARM)

    def shares(self, secret: bytes) -> NDArray[np.uint16]:
        """Words [splits, holders, 16] of one secret split again and again with threshold 3."""
        return split(np.tile(rows(secret), (self.SPLITS, 1)), holders=4, threshold=3).view(np.uint16)

    @pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32])
    def test_are_uniform_together(self, secret: bytes) -> None:
        shares = self.shares(secret)
        for low in (0, 10):
            bits = shares >> low & 63
            assert self.looks_uniform(bits[:, 0] << 6 | bits[:, 3])

    def test_weighted_as_for_joining_are_uniform(self) -> None:
        # The best guess that two shares allow is right no more often than any other.
        shares = self.shares(SECRET)
        guesses = np.array(
            [np.frombuffer(join([1, 2], share), "<u2") for share in self.bytes_of(shares[:4000])]
        )
        assert self.looks_uniform(guesses & self.CELLS - 1)

    def test_with_one_more_would_be_noticed(self) -> None:
        shares = self.shares(SECRET)
        joined = np.array(
            [np.frombuffer(join([1, 2, 3], share), "<u2") for share in self.bytes_of(shares[:4000], 3)]
        )
        assert not self.looks_uniform(joined & self.CELLS - 1)

    @pytest.mark.parametrize(("holders", "threshold"), [(2, 2), (5, 3), (20, 11)])
    def test_never_give_the_secret(self, holders: int, threshold: int) -> None:
        for _ in range(200):
            secret = os.urandom(32)
            (shares,) = split(rows(secret), holders, threshold)
            assert join(range(1, threshold), shares[: threshold - 1]) != secret

    @staticmethod
    def bytes_of(shares: NDArray[np.uint16], count: int = 2) -> NDArray[np.uint8]:
        return np.ascontiguousarray(shares[:, :count]).view(np.uint8)
