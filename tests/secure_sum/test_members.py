"""A node through whole sums: whose turn it is, what it may be asked only once, and what it keeps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from lying_server import REGULAR, RUN, UNSIGNED, Server, in_bytes, next_round, played, signed, unchanged

from pina_flwr.secure_sum.keys import sign
from pina_flwr.secure_sum.members import Side, answer, mount, survivors_of
from pina_flwr.secure_sum.memory import TABLES, HasMasked, HasUnmasked, recall
from pina_flwr.secure_sum.once import Once
from pina_flwr.secure_sum.participant import SURVIVED, VANISHED, Roster
from pina_flwr.secure_sum.registry import survivors_message
from pina_flwr.secure_sum.session import Session
from pina_flwr.secure_sum.wire import (
    ADVERTISE,
    AGREE,
    ARRAYS,
    MASK,
    PHASES,
    SHARE,
    UNMASK,
    Header,
    Malformed,
    action_of,
    kind_of,
)


class TestAnHonestRun:
    @pytest.mark.parametrize(
        "server",
        [
            Server(),
            Server(members=12, hosted=3),
            Server(rules=REGULAR, members=14),
            Server(rules=REGULAR, members=14, hosted=2),
            signed(),
            signed(members=12, hosted=3),
        ],
        ids=["complete", "hosted", "regular", "regular hosted", "signed", "signed hosted"],
    )
    def test_goes_through_all_phases_and_leaves_no_secret(self, server: Server) -> None:
        secrets: list[bytes] = []
        for phase in [p for p in PHASES if p != AGREE or server.rules.signed]:
            server.play(phase)
            known = [secret for node in server.nodes for secret in server.secrets(node)]
            replies = b"".join(in_bytes(server.replies[phase, node]) for node in server.nodes)
            assert not [secret for secret in known if secret in replies]
            secrets += known if phase in (ADVERTISE, SHARE) else []
            if phase in (MASK, AGREE, UNMASK):
                states = b"".join(server.remembered(node) for node in server.nodes)
                k = server.rules.parameters(server.members).neighbours
                pairs = server.members * k // 2  # each has a secret and a key
                assert len(set(secrets)) == 3 * server.members + 2 * pairs
                assert not [secret for secret in secrets if secret in states]
        for node in server.nodes:
            state = server.contexts[node].state
            assert survivors_of(state, server.session) == (server.members, server.members)
            assert survivors_of(state, replace(server.session, round=2)) is None
            assert sum(len(a.data) for a in state.array_records[TABLES].values()) < 200  # numpy's own header
            assert recall(state) == HasUnmasked(server.session, server.members, server.members)

    def test_no_count_of_survivors_before_the_end(self) -> None:
        server = Server()
        assert survivors_of(server.contexts[0].state, server.session) is None
        for phase in (ADVERTISE, SHARE, MASK):
            server.play(phase)
            assert survivors_of(server.contexts[0].state, server.session) is None

    def test_the_next_round_has_other_keys(self) -> None:
        first = played(*UNSIGNED)
        second = next_round(first).play(*UNSIGNED)
        keys = np.concatenate([first.public.reshape(-1, 32), second.public.reshape(-1, 32)])
        assert len({key.tobytes() for key in keys}) == len(keys)

    def test_a_round_may_begin_before_the_last_one_has_ended(self) -> None:
        for done in itertools.accumulate([(p,) for p in UNSIGNED]):
            server = next_round(played(*done)).play(*UNSIGNED)
            assert survivors_of(server.contexts[0].state, server.session) is not None

    def test_members_left_out_by_the_server_are_out_for_good(self) -> None:
        server = played(ADVERTISE, members=6, hosted=2)
        server.send(SHARE, 0, server.request(SHARE, 0, self.alone(server, SHARE), members=[10]))
        server.play(SHARE, nodes=[1, 2])
        with pytest.raises(Malformed, match="not all in the session"):
            server.send(MASK, 0, server.request(MASK, 0))
        assert [m.member for m in recall(server.contexts[0].state).members] == [10]  # type: ignore

    @staticmethod
    def alone(server: Server, phase: str) -> dict[str, np.ndarray]:
        return {"neighbours": server.arrays(phase, 0)["neighbours"][:1]}


class TestOrder:
    @pytest.mark.parametrize("kind", [Server, signed], ids=["unsigned", "signed"])
    def test_any_phase_but_the_next_is_refused(self, kind: Callable[[], Server]) -> None:
        phases = PHASES if kind is signed else UNSIGNED
        for done in range(len(phases) + 1):
            server = kind().play(*phases[:done])
            for phase in PHASES:
                if phases[done : done + 1] == (phase,):
                    continue
                if kind is signed and phase == UNMASK and done == 3:
                    reason = "stage out of order"  # nobody has agreed on anything
                else:
                    reason = "stale round" if phase == ADVERTISE else "stage out of order"
                for status in (None, self.another_status(server)):
                    content = server.request(phase, 0, {"status": status} if status is not None else {})
                    assert server.refused(phase, 0, content) == reason, (phases[:done], phase)

    @staticmethod
    def another_status(server: Server) -> np.ndarray:
        status = server.status.copy()
        status[-1] = VANISHED
        return status

    def test_a_second_request_for_masks_gets_nothing(self) -> None:
        server = played(ADVERTISE, SHARE)
        request = server.request(MASK, 0)
        server.play(MASK)
        assert server.refused(MASK, 0, request) == "stage out of order"
        server.vectors[10] += 1
        assert server.refused(MASK, 0, request) == "stage out of order"
        assert server.asked_for_vectors == 6

    def test_a_second_unmasking_gets_nothing(self) -> None:
        server = played(*UNSIGNED)
        for changed in ({}, {5: VANISHED}, {1: VANISHED}):
            status = server.status.copy()
            status[list(changed)] = list(changed.values())
            content = server.request(UNMASK, 0, {"status": status}, {"survivors": int((status == 1).sum())})
            assert server.refused(UNMASK, 0, content) == "stage out of order"

    def test_members_of_one_node_can_not_be_asked_one_after_the_other(self) -> None:
        server = played(ADVERTISE, SHARE, MASK, members=6, hosted=2)
        first = server.send(UNMASK, 0, server.request(UNMASK, 0, members=[10]))
        assert list(Header.from_record(first).members) == [10]
        status = server.status.copy()
        status[5] = VANISHED
        for told in (server.status, status):
            content = server.request(UNMASK, 0, {"status": told}, {"survivors": 5}, members=[20])
            assert server.refused(UNMASK, 0, content) == "stage out of order"

    @pytest.mark.parametrize("round_", [1, 4, 5])
    def test_rounds_only_go_up(self, round_: int) -> None:
        for done in itertools.accumulate([(p,) for p in UNSIGNED]):
            server = played(*done, round=5)
            stale = server.request(ADVERTISE, 0, session=Session(str(RUN), round_))
            assert server.refused(ADVERTISE, 0, stale) == "stale round"

    def test_messages_of_other_sessions_are_refused(self) -> None:
        first = Server(round=1)
        requests = {}
        for phase in UNSIGNED:
            requests[phase] = first.request(phase, 0)
            first.play(phase)
        second = next_round(first)
        for phase in UNSIGNED:
            second.play(phase)
            for old, content in requests.items():
                assert second.refused(old, 0, content) == "stale round"
        ahead = second.request(SHARE, 0, session=Session(str(RUN), 9))
        assert second.refused(SHARE, 0, ahead) == "stage out of order"

    @pytest.mark.parametrize("phase", UNSIGNED[1:])
    def test_the_next_phase_of_another_session_is_refused(self, phase: str) -> None:
        """As if it were this one's; Flower keeps one state for all runs of a series."""
        server = played(*UNSIGNED[: UNSIGNED.index(phase)])
        ahead = server.request(phase, 0, session=Session(str(RUN), 2))
        assert server.refused(phase, 0, ahead) == "stage out of order"
        server.contexts[0].run_id = RUN + 1
        for round_ in (1, 2):
            other = server.request(phase, 0, session=Session(str(RUN + 1), round_))
            assert server.refused(phase, 0, other) == "stage out of order"

    def test_another_run_begins_anew(self) -> None:
        server = played(ADVERTISE, SHARE, MASK, round=5)
        secrets = server.secrets(0)
        server.contexts[0].run_id = RUN + 1
        content = server.request(ADVERTISE, 0, session=Session(str(RUN + 1), 1))
        assert list(Header.from_record(server.send(ADVERTISE, 0, content)).members) == [10]
        assert not [secret for secret in secrets if secret in server.remembered(0)]
        server.contexts[0].run_id = RUN
        assert server.refused(UNMASK, 0, server.request(UNMASK, 0)) == "stage out of order"

    def test_relabelled_messages_of_other_sessions_are_refused(self) -> None:
        first = played(ADVERTISE, SHARE)
        second = next_round(first).play(ADVERTISE)
        old = first.arrays(SHARE, 0)
        assert second.refused(SHARE, 0, second.request(SHARE, 0, old)) == "keys altered"
        others = old["public"].copy()
        others[0] = second.public[0]
        # With its own key right, a member can't tell old keys from new ones; nobody has the private keys.
        second.send(SHARE, 0, second.request(SHARE, 0, {"public": others}))
        second.play(SHARE, nodes=range(1, 6))
        second.status[0] = VANISHED
        content = second.request(MASK, 0, {"sealed": first.for_rows([0])})
        assert second.refused(MASK, 0, content) == "shares altered"
        assert second.refused(MASK, 0, second.request(MASK, 0)) == "shares altered"

    @pytest.mark.parametrize("phase", PHASES)
    def test_another_run_is_none_of_its_business(self, phase: str) -> None:
        server = played(ADVERTISE)
        content = server.request(phase, 0, session=Session("8", 2))
        unchanged(server, phase, content, "phase, run or members")

    @pytest.mark.parametrize("phase", PHASES)
    def test_a_message_says_of_which_phase_it_is(self, phase: str) -> None:
        server = played(ADVERTISE)
        for other in set(PHASES) - {phase}:
            unchanged(server, phase, server.request(other, 0), "phase, run or members")


class TestNeverBothShares:
    """Of each neighbour a node holds two shares; asked whatever in whatever order, it gives one."""

    @staticmethod
    def moves(server: Server) -> dict[str, RecordDict]:
        """Requests to node 0, each right for itself; statuses differ in what they say of member 60."""
        found = {}
        for phase in (AGREE, UNMASK):
            for name, said in (("survived", SURVIVED), ("vanished", VANISHED)):
                status = server.status.copy()
                status[5] = said
                arrays: dict[str, np.ndarray] = {"status": status}
                if phase == UNMASK and server.rules.signed:
                    ids = server.ids[status == SURVIVED].tolist()
                    message = survivors_message(server.terms, Roster(server.ids, server.public).digest(), ids)
                    signers = ids[1:]  # all but node 0 collude
                    texts = [np.frombuffer(sign(server.keys[m], message), np.uint8) for m in signers]
                    arrays |= {"signers": np.array(signers, np.int64), "signatures": np.array(texts)}
                numbers = {"survivors": int((status == SURVIVED).sum())} if phase == UNMASK else {}
                found[f"{phase}: {name}"] = server.request(phase, 0, arrays, numbers)
        for phase in (ADVERTISE, SHARE, MASK):
            found[phase] = server.request(phase, 0)
        found["next"] = server.request(ADVERTISE, 0, session=Session(str(RUN), 2))
        return found

    @pytest.mark.parametrize("kind", [Server, signed], ids=["unsigned", "signed"])
    def test_in_no_order(self, kind: Callable[..., Server]) -> None:
        server = kind(members=6).play(ADVERTISE, SHARE, MASK)
        stage = recall(server.contexts[0].state)
        assert isinstance(stage, HasMasked)
        held = stage.members[0].held[stage.members[0].neighbours.tolist().index(5)]
        halves = {held[:32].tobytes(), held[32:].tobytes()}
        start, moves, got = server.contexts[0].state, self.moves(server), []
        for order in itertools.product(moves, repeat=3):
            server.contexts[0] = Context(RUN, 0, {}, RecordDict(dict(start)), {})
            said = b"".join(
                in_bytes(server.send(name.split(":")[0], 0, moves[name]))
                if name != "next"
                else in_bytes(server.send(ADVERTISE, 0, moves[name]))
                for name in order
            )
            got.append(frozenset(half for half in halves if half in said))
        assert set(got) == {frozenset(), frozenset({held[:32].tobytes()}), frozenset({held[32:].tobytes()})}


class TestMemoryAcrossMessages:
    def test_a_state_that_makes_no_sense_answers_nothing(self) -> None:
        for done, phase in enumerate(PHASES):
            server = signed().play(*PHASES[:done])
            requests = [server.request(p, 0) for p in PHASES]
            server.contexts[0].state = RecordDict({TABLES: ConfigRecord({"run": "7"})})
            for request, other in zip(requests, PHASES, strict=True):
                unchanged(server, other, request, "what the node remembers")
            assert phase in PHASES

    def test_files_keep_a_node_from_answering_twice(self, tmp_path: Path) -> None:
        """A node that died after its reply left and before its state was saved."""
        server = Server()
        side = replace(server.side(0), once=Once(tmp_path))
        for phase in UNSIGNED:
            before = RecordDict(dict(server.contexts[0].state))
            request = server.request(phase, 0)
            server.play(phase, nodes=range(1, 6))
            reply = answer(phase, request, server.contexts[0], side)
            assert list(Header.from_record(reply).members) == [10]
            lost = Context(RUN, 0, {}, before, {})
            again = answer(phase, request, lost, side)
            assert list(Header.from_record(again).refused) == ["stale round"]
            assert not again.array_records[ARRAYS]
            assert in_bytes(lost.state) == in_bytes(before)
            server.replies[phase, 0] = reply
            server.take(phase, [0])

    def test_refusals_are_not_counted_as_answers(self, tmp_path: Path) -> None:
        server = played(ADVERTISE)
        side = replace(server.side(0), once=Once(tmp_path))
        lie = server.request(SHARE, 0, terms={"threshold": 5})
        for _ in range(2):
            reply = answer(SHARE, lie, server.contexts[0], side)
            assert list(Header.from_record(reply).refused) == ["terms differ from the rules"]
        reply = answer(SHARE, server.request(SHARE, 0), server.contexts[0], side)
        assert list(Header.from_record(reply).members) == [10]

    def test_files_that_can_not_be_read_stop_all_and_are_not_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        server = Server()
        side = replace(server.side(0), once=Once(tmp_path / "file"))
        before = server.remembered(0)
        with pytest.raises(RuntimeError, match="what was answered can't be looked up") as raised:
            answer(ADVERTISE, server.request(ADVERTISE, 0), server.contexts[0], side)
        assert str(tmp_path) not in str(raised.value)
        assert server.remembered(0) == before


class TestMount:
    def test_answers_each_phase_by_its_own_action(self) -> None:
        server, app = Server(), ClientApp()
        asked: list[int] = []

        def side(context: Context) -> Side:
            asked.append(context.node_id)
            return server.side(context.node_id)

        mount(app, side)
        message = Message(server.request(ADVERTISE, 0), message_type=kind_of(ADVERTISE), dst_node_id=0)
        reply = app(message, server.contexts[0])
        assert list(Header.from_record(reply.content).members) == [10]
        assert asked == [0]
        for phase in PHASES:
            assert kind_of(phase) == f"train.{action_of(phase)}"
            late = Message(server.request(ADVERTISE, 0), message_type=kind_of(phase), dst_node_id=0)
            if phase != ADVERTISE:
                with pytest.raises(Malformed):
                    app(late, server.contexts[0])

    def test_secrets_do_not_show(self) -> None:
        server = signed().play(ADVERTISE)
        side = server.side(0)
        for key in side.identity.own.values():  # type: ignore[union-attr]
            assert repr(key) not in repr(side)
            assert key.hex() not in repr(side)
