from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.common.serde import context_from_proto, context_to_proto
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lying_server import Server, signed

from pina_flwr.secure_sum.memory import (
    NUMBERS,
    TABLES,
    HasAdvertised,
    HasMasked,
    HasShared,
    HasUnmasked,
    Stage,
    recall,
    remember,
)
from pina_flwr.secure_sum.participant import Advertised, Masked, Roster, Shared
from pina_flwr.secure_sum.session import Rules, Session, Terms
from pina_flwr.secure_sum.wire import ADVERTISE, AGREE, MASK, SHARE, UNMASK, Malformed, pack

PLAYED = {
    "advertised": (HasAdvertised, (ADVERTISE,)),
    "shared": (HasShared, (ADVERTISE, SHARE)),
    "masked": (HasMasked, (ADVERTISE, SHARE, MASK)),
    "agreed": (HasMasked, (ADVERTISE, SHARE, MASK, AGREE)),
    "unmasked": (HasUnmasked, (ADVERTISE, SHARE, MASK, AGREE, UNMASK)),
}


def in_bytes(state: RecordDict) -> bytes:
    """As a node keeps it between two messages."""
    return bytes(context_to_proto(Context(1, 2, {}, state, {})).SerializeToString(deterministic=True))


def kept(state: RecordDict) -> RecordDict:
    return context_from_proto(context_to_proto(Context(1, 2, {}, state, {}))).state


@functools.cache
def state_of(name: str, hosted: int = 1) -> RecordDict:
    return signed(6, hosted=hosted).play(*PLAYED[name][1]).contexts[0].state


@pytest.fixture(scope="module", params=PLAYED)
def stage(request: pytest.FixtureRequest) -> Stage:
    found = recall(state_of(request.param))
    assert found is not None
    assert type(found) is PLAYED[request.param][0]
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two stages are equal, arrays and all."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dataclass_fields__"):
        fields = one.__dataclass_fields__
        return type(one) is type(other) and all(same(getattr(one, f), getattr(other, f)) for f in fields)
    return type(one) is type(other) and bool(one == other)


class TestRemember:
    def test_nothing_at_first(self) -> None:
        assert recall(RecordDict()) is None
        assert recall(RecordDict({"others": ConfigRecord({"run": "7"})})) is None

    @pytest.mark.parametrize("hosted", [1, 3])
    @pytest.mark.parametrize("name", PLAYED)
    def test_a_stage_comes_back_from_flowers_format(self, name: str, hosted: int) -> None:
        server = signed(6, hosted=hosted).play(*PLAYED[name][1])
        first = recall(server.contexts[1].state if hosted == 3 else server.contexts[4].state)
        assert first is not None
        assert type(first) is PLAYED[name][0]
        state = RecordDict()
        remember(state, first)
        again = recall(kept(state))
        assert again is not first
        assert same(first, again)
        if not isinstance(first, HasUnmasked):
            assert len(first.members) == hosted

    def test_same_notices_differences(self, stage: Stage) -> None:
        others = [recall(signed().play(*phases).contexts[0].state) for _, phases in PLAYED.values()]
        unalike = [not same(stage, other) for other in others]
        assert sum(unalike) == (4 if isinstance(stage, HasUnmasked) else 5)
        assert not same(stage, None)

    def test_a_stage_takes_the_place_of_the_one_before(self) -> None:
        state = RecordDict({"others": ConfigRecord({"x": 1})})
        for name in PLAYED:
            found = recall(state_of(name))
            assert found is not None
            remember(state, found)
            assert set(state) == {"others", NUMBERS, TABLES}
            assert same(recall(state), found)

    def test_members_that_all_left(self) -> None:
        for name in ("advertised", "shared", "masked"):
            found: Any = recall(state_of(name))
            alone = replace(found, members=[])
            state = RecordDict()
            remember(state, alone)
            assert same(recall(kept(state)), alone)


class TestSecrets:
    @pytest.mark.parametrize("kind", [Server, signed], ids=["unsigned", "signed"])
    def test_go_with_the_phase_that_needs_them(self, kind: Callable[[], Server]) -> None:
        server = kind().play(ADVERTISE)
        own, held = server.secrets(0), []
        assert len(own) == 3
        server.play(SHARE)
        shared = server.secrets(0)
        assert shared[0] == own[2]  # the seed; private keys are gone
        assert not [secret for secret in own[:2] if secret in server.remembered(0)]
        assert len(shared) == 11
        assert [secret for secret in shared if secret in server.remembered(0)] == shared
        own += shared
        server.play(MASK)
        assert not [secret for secret in own if secret in server.remembered(0)]
        held = server.secrets(0)
        assert len(held) == 10
        assert [share for share in held if share in server.remembered(0)] == held
        server.play(*([AGREE] if server.rules.signed else []))
        assert server.secrets(0) == held
        server.play(UNMASK)
        assert not [share for share in own + held if share in server.remembered(0)]

    def test_of_an_unfinished_round_go_with_the_next(self) -> None:
        for done in ((ADVERTISE,), (ADVERTISE, SHARE), (ADVERTISE, SHARE, MASK)):
            server = Server().play(*done)
            secrets = server.secrets(0)
            assert secrets
            server.round += 1
            server.play(ADVERTISE)
            assert not [secret for secret in secrets if secret in server.remembered(0)]


class TestSize:
    @pytest.mark.parametrize("neighbours", [22, 64])
    def test_is_some_kilobytes_a_member(self, neighbours: int) -> None:
        k, names = neighbours, 1500  # of up to seven arrays in numpy's format, and of numbers
        terms = Terms(Session("1" * 19, 2**40), 10**6, 32, 10**6, k, k, 10**6)
        rng = np.random.default_rng(0)
        roster = Roster(np.arange(k + 1), rng.integers(0, 256, (k + 1, 96), dtype=np.uint8))
        keys = rng.integers(0, 256, (k, 64), dtype=np.uint8)
        own, row, flags = Advertised.new(0), np.arange(1, k + 1), np.ones(k + 1, np.bool_)
        masked = Masked(0, row, rng.integers(0, 256, (k, 64), dtype=np.uint8))
        seen = (8 + 96) * (k + 1)  # ids and keys of its neighbours and itself
        stages: list[tuple[Stage, int]] = [
            (HasAdvertised(terms.session, [own]), 96),
            (HasShared(terms, roster, [Shared(0, own.seed, row, keys)]), 32 + (64 + 8) * k + seen),
            (
                HasMasked(terms, roster, flags, [masked], flags.view(np.uint8)),
                (64 + 8) * k + seen + 2 * (k + 1),
            ),
            (HasUnmasked(terms.session, 10**6, 10**6), 0),
        ]
        for stage, bytes_ in stages:
            state = RecordDict()
            remember(state, stage)
            assert same(recall(kept(state)), stage)
            assert bytes_ < len(in_bytes(state)) <= bytes_ + names

    def test_of_a_node_with_many_members_grows_with_the_members_only(self) -> None:
        sizes = []
        for hosted in (3, 6):
            server = Server(Rules(neighbours=10), members=12, hosted=hosted).play(ADVERTISE, SHARE, MASK)
            sizes.append(len(server.remembered(0)))
        assert sizes[1] - sizes[0] == pytest.approx(3 * (8 + 72 * 10), abs=100)


class TestBrokenStates:
    """What a node remembers is its own; if it makes no sense all the same, the node stops."""

    @staticmethod
    def broken(state: RecordDict) -> None:
        with pytest.raises(Malformed, match=r"^what the node remembers: makes no sense$"):
            recall(state)

    @pytest.mark.parametrize("name", PLAYED)
    def test_each_number_missing_or_of_another_type(self, name: str) -> None:
        state = state_of(name)
        for field in state.config_records[NUMBERS]:
            for other in (None, -1, 2**63 - 1, 0.5, "", "a", b"7", True, [1], []):
                if other == 2**63 - 1 and field in ("round", "advertised", "survivors"):
                    continue
                if other in (-1, 2**63 - 1) and field in ("advertised", "survivors"):
                    continue  # numbers that nobody computes with
                if other == "a" and field == "run":
                    continue
                numbers: dict[str, Any] = dict(state.config_records[NUMBERS])
                numbers.pop(field) if other is None else numbers.update({field: other})
                self.broken(RecordDict({NUMBERS: ConfigRecord(numbers), TABLES: state[TABLES]}))

    @pytest.mark.parametrize("name", list(PLAYED)[:4])
    def test_each_array_missing_or_of_another_kind(self, name: str) -> None:
        state = state_of(name)
        arrays = {key: array.numpy() for key, array in state.array_records[TABLES].items()}
        for field, array in arrays.items():
            others = [
                None,
                array.astype(np.float32),
                array[..., np.newaxis],
                np.zeros(3),
                array[:, :-1] if array.ndim > 1 else array[:-1],
            ]
            for other in others:
                if other is not None and same(other, array):
                    continue
                changed = {k: v for k, v in arrays.items() if k != field or other is not None}
                changed |= {} if other is None else {field: other}
                self.broken(RecordDict({NUMBERS: state[NUMBERS], TABLES: pack(changed)}))
            data = Array(str(array.dtype), array.shape, "numpy.ndarray", b"noise")
            tables = ArrayRecord(dict(state.array_records[TABLES]) | {field: data})
            self.broken(RecordDict({NUMBERS: state[NUMBERS], TABLES: tables}))

    @pytest.mark.parametrize(
        ("name", "field", "value"),
        [
            ("advertised", "members", -1),
            ("shared", "members", 15),
            ("masked", "members", 15),
            ("shared", "neighbours", 6),
            ("shared", "neighbours", -1),
            ("masked", "neighbours", 6),
            ("masked", "neighbours", 2**40),
            ("masked", "ids", 5),
            ("shared", "ids", 5),
        ],
    )
    def test_numbers_that_point_nowhere(self, name: str, field: str, value: int) -> None:
        state = state_of(name)
        arrays = {key: array.numpy().copy() for key, array in state.array_records[TABLES].items()}
        arrays[field].reshape(-1)[-1] = value
        self.broken(RecordDict({NUMBERS: state[NUMBERS], TABLES: pack(arrays)}))

    def test_a_member_that_is_there_twice(self) -> None:
        state = state_of("advertised", hosted=2)
        arrays = {key: array.numpy().copy() for key, array in state.array_records[TABLES].items()}
        arrays["members"][1] = arrays["members"][0]
        self.broken(RecordDict({NUMBERS: state[NUMBERS], TABLES: pack(arrays)}))

    def test_records_missing_or_of_another_kind(self) -> None:
        for name in PLAYED:
            state = state_of(name)
            self.broken(RecordDict({NUMBERS: state[NUMBERS]}))
            self.broken(RecordDict({TABLES: state[TABLES]}))
            self.broken(RecordDict({NUMBERS: state[TABLES], TABLES: state[NUMBERS]}))
            self.broken(RecordDict({NUMBERS: ConfigRecord(), TABLES: state[TABLES]}))

    def test_stages_of_one_another(self) -> None:
        states = {name: state_of(name) for name in PLAYED}
        for one, state in states.items():
            for other, another in states.items():
                if PLAYED[one][0] is PLAYED[other][0] or "unmasked" in (one, other):
                    continue
                numbers = dict(state.config_records[NUMBERS]) | {"stage": PLAYED[other][0].__name__}
                mixed = RecordDict({NUMBERS: ConfigRecord(numbers), TABLES: state[TABLES]})
                if (one, other) != ("shared", "advertised"):  # which knows all that is needed, and more
                    self.broken(mixed)
                assert another is not state

    @settings(
        max_examples=150,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def test_only_ever_raise_malformed(self, data: st.DataObject) -> None:
        state = state_of(data.draw(st.sampled_from(sorted(PLAYED))))
        numbers: dict[str, Any] = dict(state.config_records[NUMBERS])
        arrays = dict(state.array_records[TABLES])
        name = data.draw(st.sampled_from([*numbers, *arrays]))
        if name in numbers:
            numbers[name] = data.draw(
                st.one_of(
                    st.integers(-(2**63), 2**63 - 1), st.text(max_size=3), st.floats(), st.binary(max_size=3)
                )
            )
        else:
            text = bytearray(arrays[name].data)
            text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
            arrays[name] = Array(arrays[name].dtype, arrays[name].shape, "numpy.ndarray", bytes(text))
        try:
            found = recall(RecordDict({NUMBERS: ConfigRecord(numbers), TABLES: ArrayRecord(arrays)}))
        except Malformed:
            return
        assert isinstance(found, HasAdvertised | HasShared | HasMasked | HasUnmasked)


class TestSecretsDoNotShow:
    def test_in_any_stage(self, stage: Stage) -> None:
        shown = repr(stage)
        for name in ("cipher=", "pair=", "seed=", "held="):
            assert name not in shown
        state = RecordDict()
        remember(state, stage)
        server = signed()
        server.contexts[0] = Context(7, 0, {}, state, {})
        for secret in server.secrets(0):
            assert repr(secret)[2:-1] not in shown
