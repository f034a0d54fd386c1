"""Shamir's secret sharing (1979): any t shares of a secret give it, fewer tell nothing about it.

A secret of 32 bytes is 16 elements of GF(2^16), little-endian. Each is the value at 0 of its own polynomial
of degree t - 1, whose other coefficients are uniform; holder i, from 1, gets the values at the element i.
Given the secret, t - 1 shares are uniform too, as for all their values there is exactly one polynomial. A
share that was tampered with gives another secret and no error: whoever joins must know how to tell, as by a
commitment.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pina_flwr.secure_sum import field

SECRET_BYTES = 32
WORDS = SECRET_BYTES // 2
MOST_HOLDERS = field.ORDER


def split(secrets: NDArray[np.uint8], holders: int, threshold: int) -> NDArray[np.uint8]:
    """Shares of secrets: uint8 [secrets, 32] → uint8 [secrets, holders, 32], that of point i at [:, i - 1].

    Args:
        secrets: one a row.
        holders: 1 to 65,535.
        threshold: t, 1 to `holders`; coefficients come from the operating system.

    Raises:
        ValueError: an argument of another shape, dtype or range.
    """
    _check_rows("secrets", secrets)
    if not 1 <= holders <= MOST_HOLDERS:
        raise ValueError(f"holders = {holders}: must be from 1 to {MOST_HOLDERS}")
    if not 1 <= threshold <= holders:
        raise ValueError(f"threshold = {threshold}: must be from 1 to the {holders} holders")
    constant = np.ascontiguousarray(secrets).view("<u2").astype(np.uint16)
    drawn = np.frombuffer(os.urandom((threshold - 1) * secrets.size), np.uint16)
    coefficients = drawn.reshape(threshold - 1, len(secrets), 1, WORDS)
    points = np.arange(1, holders + 1, dtype=np.uint16)[:, np.newaxis]
    shares = np.zeros((len(secrets), holders, WORDS), np.uint16)
    # Horner's rule: the highest coefficient first, the secret last.
    for coefficient in coefficients:
        shares ^= coefficient
        shares = field.multiply(shares, points)
    shares ^= constant[:, np.newaxis]
    return shares.astype("<u2").view(np.uint8)


def join(points: Sequence[int] | NDArray[np.int64], shares: NDArray[np.uint8]) -> bytes:
    """The secret, 32 bytes, of exactly threshold many shares: uint8 [t, 32], that of `points[i]` in row i.

    Σᵢ wᵢ·shareᵢ with Lagrange's weights at 0, wᵢ = Πⱼ xⱼ / (xⱼ - xᵢ) over all j but i.

    Raises:
        ValueError: points that are not distinct from 1 to 65,535, or shares of another shape or dtype.
    """
    _check_rows("shares", shares)
    at = _checked_points(points, len(shares))
    words = np.ascontiguousarray(shares).view("<u2").astype(np.uint16)
    weighted = field.multiply(_weights(at)[:, np.newaxis], words)
    return np.bitwise_xor.reduce(weighted, axis=0).astype("<u2").tobytes()


def _weights(points: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Lagrange's weights at 0: [t] distinct points, none of them 0 → [t]."""
    logs = field.log(points).astype(np.int64)
    weights = np.empty_like(points)
    for i in range(0, len(points), 64):  # rows at a time: t² numbers may be too many
        differences = field.log(points[i : i + 64, np.newaxis] ^ points).astype(np.int64)
        below = differences.sum(axis=1) - field.LOG_OF_0  # but that of the point itself, which is 0
        weights[i : i + 64] = field.EXP[(logs.sum() - logs[i : i + 64] - below) % field.ORDER]
    return weights


def _checked_points(points: Sequence[int] | NDArray[np.int64], shares: int) -> NDArray[np.uint16]:
    at = np.asarray(points)
    if at.ndim != 1 or not np.issubdtype(at.dtype, np.integer) or len(at) != shares:
        raise ValueError(f"points of {at.dtype} {list(at.shape)}: must be {shares} whole numbers")
    if at.min() < 1 or at.max() > MOST_HOLDERS:
        raise ValueError(f"points from {at.min()} to {at.max()}: must be from 1 to {MOST_HOLDERS}")
    if len(np.unique(at)) < len(at):
        raise ValueError(f"points = {at.tolist()}: must be distinct")
    return at.astype(np.uint16)


def _check_rows(name: str, rows: NDArray[np.uint8]) -> None:
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8:
        kind = getattr(rows, "dtype", type(rows).__name__)
        raise ValueError(f"{name} of {kind}: must be a numpy array of uint8")
    if rows.ndim != 2 or len(rows) < 1 or rows.shape[1] != SECRET_BYTES:
        raise ValueError(f"{name} of shape {list(rows.shape)}: must be [at least 1, {SECRET_BYTES}]")
