"""Messages that make no sense to a node."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lying_server import RUN, UNSIGNED, Server, in_bytes, signed, unchanged

from pina_flwr.secure_sum.members import answer
from pina_flwr.secure_sum.wire import (
    ADVERTISE,
    ARRAYS,
    HEADER,
    PHASES,
    Header,
    Malformed,
)


def values() -> st.SearchStrategy[Any]:
    numbers = st.integers(-(2**63), 2**63 - 1)
    single = st.one_of(numbers, st.floats(), st.text(max_size=5), st.binary(max_size=5), st.booleans())
    lists = st.one_of(*[st.lists(kind, max_size=3) for kind in (numbers, st.floats(), st.text(max_size=3))])
    return st.one_of(single, lists, st.sampled_from([*PHASES, str(RUN), [10], [10, 20]]))


def arrays() -> st.SearchStrategy[Array]:
    dtypes = [np.uint8, np.int64, np.bool_, np.float64, ">i8", np.uint32, np.int32]
    shapes = [(), (0,), (1,), (5,), (6,), (1, 5), (1, 5, 92), (6, 96), (6, 64), (1, 0), (2**10,)]
    made = st.builds(
        lambda dtype, shape, fill: Array(np.full(shape, fill, dtype)),
        st.sampled_from(dtypes),
        st.sampled_from(shapes),
        st.sampled_from([0, 1, 2, 3, 5, 200]),
    )
    raw = st.builds(
        lambda data, kind: Array("uint8", (1, 5), kind, data),
        st.binary(max_size=200),
        st.sampled_from(["numpy.ndarray", "other"]),
    )
    return st.one_of(made, made, raw)


class TestNonsense:
    """Only `Malformed` comes out, or a refusal; and what the node remembers is as before."""

    servers: ClassVar = {
        "signed": {done: signed().play(*PHASES[:done]) for done in range(5)},
        "unsigned": {done: Server().play(*UNSIGNED[:done]) for done in range(4)},
    }

    @settings(
        max_examples=200,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def test_fields_of_any_type(self, data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(sorted(self.servers)))
        done = data.draw(st.sampled_from(sorted(self.servers[kind])))
        server = self.servers[kind][done]
        phase = (PHASES if kind == "signed" else UNSIGNED)[done]
        content = server.request(phase, 0)
        record: dict[str, Any] = dict(content.config_records[HEADER])
        told = dict(content.array_records[ARRAYS])
        changes = data.draw(
            st.dictionaries(st.sampled_from(sorted(record)), values() | st.none(), max_size=2)
        )
        for name, value in changes.items():
            record.pop(name) if value is None else record.update({name: value})
        other = data.draw(
            st.dictionaries(
                st.sampled_from([*told, "status", "present"]),
                arrays() | st.none(),
                min_size=not changes,
                max_size=2,
            )
        )
        for name, array in other.items():
            told.pop(name, None) if array is None else told.update({name: array})
        content[HEADER], content[ARRAYS] = ConfigRecord(record), ArrayRecord(told)
        before = server.contexts[0].state
        context = Context(RUN, 0, {}, RecordDict(dict(before)), {})
        secrets = server.secrets(0)
        try:
            reply = answer(phase, content, context, server.side(0))
        except Malformed:
            pass
        else:
            if Header.from_record(reply).members:
                return
            assert not [secret for secret in secrets if secret in in_bytes(reply)]
        assert in_bytes(context.state) == in_bytes(before)

    @pytest.mark.parametrize("phase", PHASES)
    @pytest.mark.parametrize("missing", [HEADER, ARRAYS])
    def test_records_missing(self, phase: str, missing: str) -> None:
        server = signed().play(*PHASES[: PHASES.index(phase)])
        content = server.request(phase, 0)
        del content[missing]
        if (phase, missing) == (ADVERTISE, ARRAYS):
            server.send(phase, 0, content)  # there are none to read
            return
        unchanged(server, phase, content, "no header|no arrays")

    @pytest.mark.parametrize("phase", PHASES)
    def test_records_of_another_kind(self, phase: str) -> None:
        server = signed().play(*PHASES[: PHASES.index(phase)])
        content = server.request(phase, 0)
        content[HEADER], content[ARRAYS] = content[ARRAYS], content[HEADER]
        unchanged(server, phase, content, "no header")

    def test_each_array_missing(self) -> None:
        for done, phase in enumerate(PHASES):
            server = signed().play(*PHASES[:done])
            for name in server.arrays(phase, 0):
                unchanged(server, phase, server.request(phase, 0, {name: None}), f"{name}: missing")
