"""Sums in which members sign: swapped keys, and more than one story about who survived."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from lying_server import RUN, Server, next_round, signed, unchanged

from pina_flwr.secure_sum.keys import public_of, sign
from pina_flwr.secure_sum.members import Side, answer
from pina_flwr.secure_sum.parameters import agreement
from pina_flwr.secure_sum.participant import CIPHER, COMMITMENT, PAIR, SURVIVED, VANISHED, Roster
from pina_flwr.secure_sum.registry import survivors_message
from pina_flwr.secure_sum.session import Rules, Session
from pina_flwr.secure_sum.wire import (
    ADVERTISE,
    AGREE,
    MASK,
    PHASES,
    SHARE,
    UNMASK,
    Header,
)


class TestSignedKeys:
    def test_swapped_keys(self) -> None:
        server = signed().play(ADVERTISE)
        public = server.public.copy()
        public[3, PAIR] = np.frombuffer(public_of(b"the server's own private key 32b"), np.uint8)
        assert server.refused(SHARE, 0, server.request(SHARE, 0, {"public": public})) == "signature wrong"

    @pytest.mark.parametrize("part", [CIPHER, PAIR, COMMITMENT])
    def test_any_part_is_signed(self, part: slice) -> None:
        server = signed().play(ADVERTISE)
        public = server.public.copy()
        public[3, part.start] ^= 1
        assert server.refused(SHARE, 0, server.request(SHARE, 0, {"public": public})) == "signature wrong"

    def test_two_members_swapped(self) -> None:
        server = signed().play(ADVERTISE)
        order = [0, 1, 3, 2, 4, 5]
        told = {"public": server.public[order], "signatures": server.signatures[order]}
        assert server.refused(SHARE, 0, server.request(SHARE, 0, told)) == "signature wrong"

    def test_signatures_missing(self) -> None:
        server = signed().play(ADVERTISE)
        unchanged(server, SHARE, server.request(SHARE, 0, {"signatures": None}), "signatures: missing")
        few = {"signatures": server.signatures[:5]}
        unchanged(server, SHARE, server.request(SHARE, 0, few), "signatures: of another type or shape")
        none = {"signatures": np.zeros((6, 64), np.uint8)}
        assert server.refused(SHARE, 0, server.request(SHARE, 0, none)) == "signature wrong"

    @pytest.mark.parametrize("bit", range(0, 512, 31))
    def test_a_flipped_bit_of_a_signature(self, bit: int) -> None:
        server = signed().play(ADVERTISE)
        signatures = server.signatures.copy()
        signatures[4, bit // 8] ^= 1 << bit % 8
        content = server.request(SHARE, 0, {"signatures": signatures})
        assert server.refused(SHARE, 0, content) == "signature wrong"

    def test_a_member_that_is_not_registered(self) -> None:
        server = signed().play(ADVERTISE)
        server.registry = {m: key for m, key in server.registry.items() if m != 60}
        assert server.refused(SHARE, 0, server.request(SHARE, 0)) == "not a registered key"

    def test_a_stranger_with_a_key_of_its_own(self) -> None:
        server = signed().play(ADVERTISE)
        server.registry = {m: server.registry[50 if m == 60 else m] for m in server.registry}
        assert server.refused(SHARE, 0, server.request(SHARE, 0)) == "signature wrong"

    def test_signatures_of_an_earlier_round(self) -> None:
        first = signed().play(*PHASES)
        second = next_round(first).play(ADVERTISE)
        public, signatures = second.public.copy(), second.signatures.copy()
        public[3], signatures[3] = first.public[3], first.signatures[3]
        told = {"public": public, "signatures": signatures}
        assert second.refused(SHARE, 0, second.request(SHARE, 0, told)) == "signature wrong"

    def test_an_unsigned_side_has_no_use_for_keys(self) -> None:
        server = signed()
        identity = server.side(0).identity
        with pytest.raises(ValueError, match="identity: must be given"):
            Side(Rules(signed=True), server.make_vectors)
        with pytest.raises(ValueError, match="identity: must be given"):
            Side(Rules(), server.make_vectors, identity)


class TestAgreement:
    """6 members, T = 4 signatures."""

    @staticmethod
    def masked() -> Server:
        server = signed().play(ADVERTISE, SHARE, MASK)
        assert agreement(6, 0.0) == 4
        return server

    @staticmethod
    def signatures(
        server: Server, signers: list[int], survivors: list[int], **lies: Any
    ) -> dict[str, np.ndarray]:
        """What these members would sign about these survivors, if they did."""
        roster = Roster(server.ids, lies.get("public", server.public))
        message = survivors_message(lies.get("terms", server.terms), roster.digest(), survivors)
        texts = [np.frombuffer(sign(server.keys[member], message), np.uint8) for member in signers]
        found = np.array(texts, np.uint8).reshape(-1, 64)
        return {"signers": np.array(signers, np.int64), "signatures": found}

    def test_unmasking_without_it(self) -> None:
        server = self.masked()
        told = self.signatures(server, server.ids.tolist(), server.ids.tolist())
        assert server.refused(UNMASK, 0, server.request(UNMASK, 0, told)) == "stage out of order"

    def test_agreeing_twice(self) -> None:
        server = self.masked().play(AGREE)
        assert server.refused(AGREE, 0, server.request(AGREE, 0)) == "stage out of order"
        other = server.status.copy()
        other[5] = VANISHED
        content = server.request(AGREE, 0, {"status": other})
        assert server.refused(AGREE, 0, content) == "stage out of order"

    def test_another_list_when_unmasking(self) -> None:
        server = self.masked().play(AGREE)
        other = server.status.copy()
        other[5] = VANISHED
        told = self.signatures(server, [20, 30, 40, 50], [10, 20, 30, 40, 50])
        content = server.request(UNMASK, 0, told | {"status": other}, {"survivors": 5})
        assert server.refused(UNMASK, 0, content) == "survivors wrong"

    @pytest.mark.parametrize(
        ("status", "reason"),
        [
            ([2, 1, 1, 1, 1, 1], "survivors wrong"),
            ([0, 1, 1, 1, 1, 1], "survivors wrong"),
            ([1, 1, 1, 1, 1, 0], "survivors wrong"),
            ([1, 1, 1, 1, 1, 3], "survivors wrong"),
            ([1, 1, 1, 2, 2, 2], "too few members"),
        ],
        ids=str,
    )
    def test_lists_that_nobody_signs(self, status: list[int], reason: str) -> None:
        server = self.masked()
        content = server.request(AGREE, 0, {"status": np.array(status, np.uint8)})
        assert server.refused(AGREE, 0, content) == reason
        server.play(AGREE, UNMASK)

    def test_too_few_signatures(self) -> None:
        server = self.masked().play(AGREE)
        for count in range(4):
            told = self.signatures(server, server.ids[:count].tolist(), server.ids.tolist())
            assert server.refused(UNMASK, 0, server.request(UNMASK, 0, told)) == "too few members"

    def test_just_enough_signatures(self) -> None:
        server = self.masked().play(AGREE)
        told = self.signatures(server, [60, 20, 50, 40], server.ids.tolist())
        reply = server.send(UNMASK, 0, server.request(UNMASK, 0, told))
        assert list(Header.from_record(reply).members) == [10]

    @pytest.mark.parametrize("signers", [[10, 20, 30, 30], [10, 20, 30, 40, 40], [10] * 6])
    def test_signers_named_twice(self, signers: list[int]) -> None:
        server = self.masked().play(AGREE)
        told = self.signatures(server, signers, server.ids.tolist())
        assert server.refused(UNMASK, 0, server.request(UNMASK, 0, told)) == "signature wrong"

    def test_a_signer_that_did_not_survive_or_is_unknown(self) -> None:
        server = signed().play(ADVERTISE, SHARE).play(MASK, AGREE, nodes=range(5))
        survivors = [10, 20, 30, 40, 50]
        server.keys[99] = server.keys[60]
        for signers in ([20, 30, 40, 60], [20, 30, 40, 99], [20, 30, 40, -1], [20, 30, 40, 50, 60]):
            told = (
                self.signatures(server, signers, survivors)
                if 99 not in signers and -1 not in signers
                else {
                    "signers": np.array(signers, np.int64),
                    "signatures": np.zeros((len(signers), 64), np.uint8),
                }
            )
            assert server.refused(UNMASK, 0, server.request(UNMASK, 0, told)) == "signature wrong"
        server.play(UNMASK, nodes=range(5))

    def test_signatures_of_something_else(self) -> None:
        server = self.masked().play(AGREE)
        everybody, four = server.ids.tolist(), [20, 30, 40, 50]
        lies = [
            self.signatures(server, four, everybody[:5]),
            self.signatures(server, four, everybody, public=server.public[::-1].copy()),
            self.signatures(server, four, everybody, terms=replace(server.terms, fewest=3)),
            self.signatures(server, four, everybody, terms=replace(server.terms, size=6)),
            self.signatures(server, four, everybody, terms=replace(server.terms, session=Session("7", 2))),
            self.signatures(server, four, everybody, terms=replace(server.terms, session=Session("8", 1))),
        ]
        lies.append(self.signatures(server, four, everybody) | {"signers": np.array([30, 20, 40, 50])})
        swapped = self.signatures(server, four, everybody)
        swapped["signatures"][0, 5] ^= 1
        for told in [*lies, swapped]:
            assert server.refused(UNMASK, 0, server.request(UNMASK, 0, told)) == "signature wrong"
        server.play(UNMASK)

    def test_signed_keys_are_no_signed_list(self) -> None:
        server = self.masked().play(AGREE)
        told = {"signers": server.ids[:4], "signatures": server.signatures[:4]}
        assert server.refused(UNMASK, 0, server.request(UNMASK, 0, told)) == "signature wrong"

    def test_signatures_missing(self) -> None:
        server = self.masked().play(AGREE)
        for name in ("signers", "signatures"):
            unchanged(server, UNMASK, server.request(UNMASK, 0, {name: None}), f"{name}: missing")

    def test_who_did_not_agree_does_not_unmask(self) -> None:
        server = self.masked().play(AGREE, nodes=range(1, 6))
        assert server.refused(UNMASK, 0, server.request(UNMASK, 0)) == "stage out of order"

    def test_two_lists_never_get_enough_signatures(self) -> None:
        """A server with one colluding member tells two halves two stories: nobody unmasks for one of them."""
        rules = Rules(corrupted=0.2, signed=True)
        server = Server(rules, members=5).play(ADVERTISE, SHARE, MASK)
        needed, colluding = agreement(5, 0.2), 50
        for told_first in itertools.product([SURVIVED, VANISHED], repeat=4):
            contexts = {
                n: Context(RUN, n, {}, RecordDict(dict(c.state)), {}) for n, c in server.contexts.items()
            }
            signers: dict[int, list[int]] = {SURVIVED: [colluding], VANISHED: [colluding]}
            for node, first in enumerate(told_first):
                for said in (first, SURVIVED + VANISHED - first):
                    status = server.status.copy()
                    status[3] = said
                    content = server.request(AGREE, node, {"status": status})
                    reply = Header.from_record(answer(AGREE, content, contexts[node], server.side(node)))
                    signers[said] += list(reply.members)
            assert len(signers[SURVIVED]) + len(signers[VANISHED]) == 4 + 2  # each once, but who colludes
            assert not all(len(found) >= needed for found in signers.values())


class TestAgreementAgainstColluders:
    """10 members, 2 may collude: T = 7 signatures, where 6 would do without them."""

    RULES = Rules(corrupted=0.2, signed=True)

    def test_takes_more_signatures(self) -> None:
        assert (agreement(10, 0.2), agreement(10, 0.0)) == (7, 6)
        few = Server(self.RULES, members=10).play(ADVERTISE, SHARE, MASK)
        few.play(AGREE, nodes=range(6))
        assert few.refused(UNMASK, 0, few.request(UNMASK, 0)) == "too few members"
        enough = Server(self.RULES, members=10).play(ADVERTISE, SHARE, MASK)
        enough.play(AGREE, nodes=range(7)).play(UNMASK, nodes=range(7))
        assert list(Header.from_record(enough.replies[UNMASK, 0]).members) == enough.own(0)

    def test_takes_more_survivors(self) -> None:
        few = Server(self.RULES, members=10).play(ADVERTISE, SHARE).play(MASK, nodes=range(6))
        assert few.refused(AGREE, 0, few.request(AGREE, 0)) == "too few members"
        enough = Server(self.RULES, members=10).play(ADVERTISE, SHARE).play(MASK, nodes=range(7))
        enough.play(AGREE, nodes=range(7)).play(UNMASK, nodes=range(7))
        assert list(Header.from_record(enough.replies[UNMASK, 0]).members) == enough.own(0)
