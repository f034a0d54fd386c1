from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pina_flwr.secure_sum.graph import draw
from pina_flwr.secure_sum.keys import agree, commitment, derive, public_of, unseal
from pina_flwr.secure_sum.masks import expand
from pina_flwr.secure_sum.packing import packed_size, unpack
from pina_flwr.secure_sum.participant import (
    CIPHER,
    COMMITMENT,
    GONE,
    PAIR,
    REASONS,
    SEED_SHARE,
    SURVIVED,
    VANISHED,
    Advertised,
    Bytes,
    Masked,
    Opened,
    Refused,
    Roster,
    Shared,
    check_status,
    pair_keys,
    self_key,
    vector_bytes,
)
from pina_flwr.secure_sum.session import Session, Terms
from pina_flwr.secure_sum.shamir import join, split

SESSION = Session("run", 3)


@dataclass
class Group:
    """Members 0, 3, 6, … of one sum, all played here by an honest server."""

    count: int = 5
    neighbours: int = 4
    threshold: int = 3
    session: Session = SESSION
    bits: int = 20
    size: int = 7
    advertised: list[Advertised] = field(init=False)
    shared: list[Shared] = field(init=False)
    sealed: list[Bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = np.arange(self.count, dtype=np.int64) * 3
        self.terms = Terms(self.session, self.size, self.bits, self.count, self.neighbours, self.threshold, 2)
        self.graph = draw(self.count, self.neighbours)
        self.advertised = [Advertised.new(member) for member in self.ids.tolist()]
        public = b"".join(member.public(self.session) for member in self.advertised)
        self.roster = Roster(self.ids, np.frombuffer(public, np.uint8).reshape(self.count, 96))
        self.everybody = np.ones(self.count, np.bool_)
        done = [
            m.share(self.terms, self.roster, row) for m, row in zip(self.advertised, self.graph, strict=True)
        ]
        self.shared, self.sealed = [one for one, _ in done], [text for _, text in done]

    def for_row(self, row: int) -> Bytes:
        """What the neighbours sealed for a member."""
        columns = [self.graph[other].tolist().index(row) for other in self.graph[row].tolist()]
        return np.array([self.sealed[o][c] for o, c in zip(self.graph[row].tolist(), columns, strict=True)])

    def open(self, row: int, sealed: Bytes | None = None, present: Sequence[int] | None = None) -> Opened:
        there = self.everybody if present is None else np.isin(np.arange(self.count), present)
        text = self.for_row(row) if sealed is None else sealed
        return self.shared[row].open(self.terms, self.roster, there, text)

    def masked(self, row: int) -> Masked:
        return self.open(row).mask(self.terms, np.zeros(self.size, np.uint32))[0]

    def unmask(self, row: int, status: Sequence[int]) -> Bytes:
        given = np.array(status, np.uint8)
        return self.masked(row).unmask(self.terms, self.roster, given != GONE, given)

    def share_with(self, **changes: Any) -> None:
        """Member 0 shares, with another roster or other neighbours."""
        roster = replace(self.roster, **{k: v for k, v in changes.items() if k != "row"})
        roster.check()
        self.advertised[0].share(self.terms, roster, np.array(changes.get("row", self.graph[0]), np.int64))

    def joined(self, row: int, given: Sequence[tuple[int, Bytes]]) -> bytes:
        """A secret of a member, from shares by the rows of its neighbours."""
        points = [self.graph[row].tolist().index(holder) + 1 for holder, _ in given]
        return join(points, np.array([share for _, share in given], np.uint8))


@pytest.fixture(scope="module")
def group() -> Group:
    return Group()


def reason(problem: pytest.ExceptionInfo[Refused]) -> str:
    assert str(problem.value) == problem.value.reason
    return problem.value.reason


class TestRefused:
    @pytest.mark.parametrize("phrase", REASONS)
    def test_has_one_of_some_phrases(self, phrase: str) -> None:
        assert Refused(phrase).reason == phrase
        assert "\n" not in phrase

    @pytest.mark.parametrize("phrase", ["", "no", "keys altered ", "Keys altered", "member 3"])
    def test_and_no_other(self, phrase: str) -> None:
        with pytest.raises(ValueError, match="is no reason that a server may be told"):
            Refused(phrase)


class TestRoster:
    def test_positions(self, group: Group) -> None:
        for row, member in enumerate(group.ids.tolist()):
            assert group.roster.position(member) == row
        for member in (-1, 1, 2, 13, 2**62):
            assert group.roster.position(member) == -1
        assert Roster(np.zeros(0, np.int64), np.zeros((0, 96), np.uint8)).position(0) == -1

    def test_keys(self, group: Group) -> None:
        for row, member in enumerate(group.advertised):
            assert group.roster.key(row, CIPHER) == public_of(member.cipher)
            assert group.roster.key(row, PAIR) == public_of(member.pair)
            committed = commitment(member.seed, SESSION.to_bytes(), member.member)
            assert group.roster.key(row, COMMITMENT) == committed
        group.roster.check()

    @pytest.mark.parametrize("ids", [[0, 3, 3], [3, 0, 6], [6, 3, 0], [-1, 0, 3], [-3, -2, -1]])
    def test_members_ascend_from_0(self, group: Group, ids: list[int]) -> None:
        with pytest.raises(Refused) as raised:
            Roster(np.array(ids, np.int64), group.roster.public[:3]).check()
        assert reason(raised) == "neighbours wrong"

    @pytest.mark.parametrize("part", [CIPHER, PAIR, COMMITMENT])
    def test_keys_are_all_different(self, group: Group, part: slice) -> None:
        for one, other in itertools.permutations(range(5), 2):
            public = group.roster.public.copy()
            public[one, part] = public[other, part]
            with pytest.raises(Refused) as raised:
                Roster(group.ids, public).check()
            assert reason(raised) == "keys altered"

    @pytest.mark.parametrize("part", [CIPHER, PAIR])
    @pytest.mark.parametrize("number", [2**255 - 19, 2**255 - 1, 2**255 + 9, 2**256 - 1])
    def test_keys_have_one_form(self, group: Group, part: slice, number: int) -> None:
        public = group.roster.public.copy()
        public[2, part] = np.frombuffer(number.to_bytes(32, "little"), np.uint8)
        with pytest.raises(Refused) as raised:
            Roster(group.ids, public).check()
        assert reason(raised) == "keys altered"

    def test_commitments_may_be_any_bytes(self, group: Group) -> None:
        public = group.roster.public.copy()
        public[2, COMMITMENT] = 255
        Roster(group.ids, public).check()

    def test_digest_is_of_all_that_is_in_it(self, group: Group) -> None:
        digests = {group.roster.digest(), Roster(group.ids + 1, group.roster.public).digest()}
        for at in range(0, 5 * 96, 17):
            public = group.roster.public.copy()
            public.reshape(-1)[at] ^= 1
            digests.add(Roster(group.ids, public).digest())
        for count in range(5):
            digests.add(Roster(group.ids[:count], group.roster.public[:count]).digest())
        assert len(digests) == 2 + 29 + 5
        assert {len(digest) for digest in digests} == {32}


class TestShare:
    @pytest.mark.parametrize("part", [CIPHER, PAIR, COMMITMENT])
    def test_own_key_altered(self, group: Group, part: slice) -> None:
        public = group.roster.public.copy()
        public[0, part.start + 7] ^= 1
        with pytest.raises(Refused) as raised:
            group.share_with(public=public)
        assert reason(raised) == "keys altered"

    def test_own_key_missing(self, group: Group) -> None:
        with pytest.raises(Refused) as raised:
            group.share_with(ids=group.ids + 1)
        assert reason(raised) == "keys altered"

    @pytest.mark.parametrize(
        "row",
        [
            [1, 2, 3],
            [],
            [1, 2, 3, 4, 4],
            [1, 2, 3, 3],
            [0, 1, 2, 3],
            [1, 2, 3, 5],
            [1, 2, 3, -1],
            [4, 3, 2, 2**40],
        ],
        ids=str,
    )
    def test_neighbours_wrong(self, group: Group, row: list[int]) -> None:
        with pytest.raises(Refused) as raised:
            group.share_with(row=row)
        assert reason(raised) == "neighbours wrong"

    @pytest.mark.parametrize("number", [0, 1, 2**255 - 20])
    def test_a_point_of_low_order(self, group: Group, number: int) -> None:
        public = group.roster.public.copy()
        public[4, CIPHER] = np.frombuffer(number.to_bytes(32, "little"), np.uint8)
        with pytest.raises(Refused) as raised:
            group.share_with(public=public)
        assert reason(raised) == "keys altered"

    def test_any_threshold_many_shares_give_both_secrets_and_fewer_neither(self, group: Group) -> None:
        held = {}
        for holder in group.graph[0].tolist():
            column = group.graph[holder].tolist().index(0)
            held[holder] = group.open(holder).after.held[column]
        owner = group.advertised[0]
        for holders in itertools.combinations(held, 3):
            given = [(h, held[h][SEED_SHARE]) for h in holders]
            assert group.joined(0, given) == owner.seed
            assert group.joined(0, [(h, held[h][32:]) for h in holders]) == owner.pair
            assert group.joined(0, given[:2]) != owner.seed

    def test_secrets_are_never_in_what_is_sent(self, group: Group) -> None:
        sent = b"".join(text.tobytes() for text in group.sealed) + group.roster.public.tobytes()
        for member in group.advertised:
            for secret in (member.cipher, member.pair, member.seed):
                assert secret not in sent

    def test_is_sealed_for_this_use_between_these_two_in_this_session(self, group: Group) -> None:
        session, ids = SESSION.to_bytes(), group.ids.tolist()
        for one, other in itertools.permutations(range(5), 2):
            sender, receiver = group.advertised[one], group.advertised[other]
            (secret,) = agree(receiver.cipher, [public_of(sender.cipher)])
            key = derive(secret, "shares", session, ids[one], ids[other])
            bound = session + bytes([ids[one]]) + bytes(7) + bytes([ids[other]]) + bytes(7)
            text = group.sealed[one][group.graph[one].tolist().index(other)].tobytes()
            column = group.graph[other].tolist().index(one)
            assert unseal(key, text, bound) == group.open(other).after.held[column].tobytes()

    def test_sealed_shares_never_repeat(self, group: Group) -> None:
        texts = [group.advertised[0].share(group.terms, group.roster, group.graph[0])[1] for _ in range(2)]
        rows = [row.tobytes() for text in texts for row in text]
        assert len(set(rows)) == 8
        assert len({row[:12] for row in rows}) == 8


class TestOpen:
    def altered(self, group: Group, row: int, sealed: Bytes) -> None:
        with pytest.raises(Refused) as raised:
            group.open(row, sealed)
        assert reason(raised) == "shares altered"

    @pytest.mark.parametrize("part", range(4))
    def test_each_flipped_bit_of_one_is_noticed(self, group: Group, part: int) -> None:
        sealed = group.for_row(2)
        for bit in range(part * 184, (part + 1) * 184):
            flipped = sealed.copy()
            flipped[1, bit // 8] ^= 1 << bit % 8
            self.altered(group, 2, flipped)

    def test_a_flipped_bit_of_any_is_noticed(self, group: Group) -> None:
        rng = np.random.default_rng(0)
        for row in range(5):
            for column in range(4):
                for bit in rng.choice(736, 5, replace=False):
                    flipped = group.for_row(row)
                    flipped[column, bit // 8] ^= 1 << bit % 8
                    self.altered(group, row, flipped)

    def test_shares_of_another_sender(self, group: Group) -> None:
        for one, other in itertools.permutations(range(4), 2):
            sealed = group.for_row(0)
            sealed[one] = sealed[other]
            self.altered(group, 0, sealed)
            sealed = group.for_row(0)
            sealed[[one, other]] = sealed[[other, one]]
            self.altered(group, 0, sealed)

    def test_shares_for_another_receiver(self, group: Group) -> None:
        for row, other in itertools.permutations(range(5), 2):
            self.altered(group, row, group.for_row(other))

    def test_own_shares_sent_back(self, group: Group) -> None:
        """The same two members agree on the same secret, yet not on the same key in both directions."""
        self.altered(group, 0, group.sealed[0])

    def test_shares_of_another_session_with_the_same_keys(self, group: Group) -> None:
        for session in (Session("run", 4), Session("run2", 3), Session("r", 3)):
            terms = replace(group.terms, session=session)
            sender = group.advertised[1]
            public = group.roster.public.copy()
            public[1] = np.frombuffer(sender.public(session), np.uint8)
            _, text = sender.share(terms, Roster(group.ids, public), group.graph[1])
            sealed = group.for_row(0)
            sealed[0] = text[0]
            self.altered(group, 0, sealed)

    def test_too_few_neighbours_shared(self, group: Group) -> None:
        for count in range(4):
            for others in itertools.combinations(range(1, 5), count):
                if count >= 3:
                    group.open(0, present=[0, *others])
                    continue
                with pytest.raises(Refused) as raised:
                    group.open(0, present=[0, *others])
                assert reason(raised) == "too few neighbours"

    def test_it_is_not_among_those_who_shared(self, group: Group) -> None:
        with pytest.raises(Refused) as raised:
            group.open(0, present=[1, 2, 3, 4])
        assert reason(raised) == "survivors wrong"

    @pytest.mark.parametrize("part", [CIPHER, PAIR])
    def test_a_point_of_low_order_is_noticed_before(self, group: Group, part: slice) -> None:
        public = group.roster.public.copy()
        public[4, part] = 0
        with pytest.raises(Refused) as raised:
            group.advertised[0].share(group.terms, Roster(group.ids, public), group.graph[0])
        assert reason(raised) == "keys altered"


class TestMask:
    def test_is_the_sum_of_the_masks_of_the_protocol(self, group: Group) -> None:
        for row in range(5):
            vector = np.random.default_rng(row).integers(0, 2**20, 7, dtype=np.uint32)
            before = vector.copy()
            masked, packed = group.open(row).mask(group.terms, vector)
            me, own = int(group.ids[row]), group.advertised[row]
            expected = vector + expand(derive(own.seed, "self mask", SESSION.to_bytes(), me, me), 7)
            for other in group.graph[row].tolist():
                them = int(group.ids[other])
                (secret,) = agree(own.pair, [public_of(group.advertised[other].pair)])
                low, high = min(me, them), max(me, them)
                mask = expand(derive(secret, "pair mask", SESSION.to_bytes(), low, high), 7)
                expected = expected + mask if me < them else expected - mask
            assert packed.nbytes == vector_bytes(group.terms) == packed_size(7, 20)
            assert (unpack(packed, 20, 7) == expected % 2**20).all()
            assert (vector == before).all()
            assert masked.member == me

    def test_masks_of_pairs_cancel(self, group: Group) -> None:
        vectors = np.random.default_rng(0).integers(0, 2**20, (5, 7), dtype=np.uint32)
        total = np.zeros(7, np.uint32)
        for row in range(5):
            _, packed = group.open(row).mask(group.terms, vectors[row])
            total += unpack(packed, 20, 7)
            total -= expand(self_key(group.advertised[row].seed, SESSION, int(group.ids[row])), 7)
        assert (total % 2**20 == vectors.sum(axis=0, dtype=np.uint32) % 2**20).all()

    def test_both_members_of_a_pair_have_the_same_key_and_no_others(self, group: Group) -> None:
        keys = []
        for one, other in itertools.combinations(range(5), 2):
            a, b, i, j = (
                *(group.advertised[x] for x in (one, other)),
                int(group.ids[one]),
                int(group.ids[other]),
            )
            mine = pair_keys(a.pair, [public_of(b.pair)], SESSION, i, [j])
            assert mine == pair_keys(b.pair, [public_of(a.pair)], SESSION, j, [i])
            keys += [*mine, *pair_keys(a.pair, [public_of(b.pair)], Session("run", 4), i, [j])]
        keys += [
            self_key(m.seed, s, m.member) for m in group.advertised for s in (SESSION, Session("run", 4))
        ]
        assert len(set(keys)) == len(keys)

    @pytest.mark.parametrize(
        "vector",
        [
            np.zeros(6, np.uint32),
            np.zeros((1, 7), np.uint32),
            np.zeros(7, np.int64),
            np.zeros(7, np.float32),
            np.full(7, 2**20, np.uint32),
            np.full(7, 2**32 - 1, np.uint32),
        ],
        ids=repr,
    )
    def test_refuses_other_vectors_and_does_not_tell_their_numbers(self, group: Group, vector: Any) -> None:
        with pytest.raises(ValueError, match=r"^vector.*must be") as raised:
            group.open(0).mask(group.terms, vector)
        assert str(2**32 - 1) not in str(raised.value)
        assert "1048576" not in str(raised.value)

    def test_takes_the_largest_numbers(self) -> None:
        for bits in (8, 32):
            group = Group(bits=bits)
            group.open(0).mask(group.terms, np.full(7, 2**bits - 1, np.uint32))


class TestUnmask:
    """Member 0 of 5 in a complete graph: neighbours 1 to 4, t = 3."""

    @pytest.mark.parametrize("others", list(itertools.product([GONE, SURVIVED, VANISHED], repeat=4)), ids=str)
    def test_gives_one_share_of_each_who_shared(self, group: Group, others: tuple[int, ...]) -> None:
        held = group.masked(0).held
        if others.count(SURVIVED) < 3:
            with pytest.raises(Refused) as raised:
                group.unmask(0, [SURVIVED, *others])
            assert reason(raised) == "too few neighbours"
            return
        given = group.unmask(0, [SURVIVED, *others])
        for column, status in enumerate(others):
            expected = {GONE: np.zeros(32), SURVIVED: held[column, :32], VANISHED: held[column, 32:]}[status]
            assert (given[column] == expected).all()

    @pytest.mark.parametrize("own", [GONE, VANISHED])
    def test_only_survivors_help(self, group: Group, own: int) -> None:
        with pytest.raises(Refused) as raised:
            group.unmask(0, [own, 1, 1, 1, 1])
        assert reason(raised) == "survivors wrong"

    def test_check_is_what_unmask_checks(self, group: Group) -> None:
        member = group.masked(0)
        for status in itertools.product(range(4), repeat=5):
            said = np.array(status, np.uint8)
            outcomes = []
            for act in (member.check, member.unmask):
                try:
                    act(group.terms, group.roster, group.everybody, said)
                    outcomes.append("")
                except Refused as refusal:
                    outcomes.append(refusal.reason)
            assert outcomes[0] == outcomes[1]

    @pytest.mark.parametrize(
        ("present", "status", "holds"),
        [
            ([1, 1, 1], [1, 2, 1], True),
            ([1, 1, 0], [1, 2, 0], True),
            ([1, 1, 0], [1, 2, 1], False),
            ([1, 1, 0], [1, 2, 2], False),
            ([1, 1, 1], [1, 2, 0], False),
            ([1, 1, 0], [1, 2, 3], False),
            ([1, 1, 1], [1, 2, 3], False),
            ([1, 1, 1], [1, 2, 255], False),
            ([1, 1, 1], [1, 2], False),
            ([1, 1], [1, 2, 1], False),
            ([2, 1, 0], [1, 2, 0], True),
        ],
        ids=str,
    )
    def test_status(self, present: list[int], status: list[int], holds: bool) -> None:
        flags = np.array(present, np.uint8).view(np.bool_)
        if holds:
            check_status(flags, np.array(status, np.uint8))
            return
        with pytest.raises(Refused) as raised:
            check_status(flags, np.array(status, np.uint8))
        assert reason(raised) == "survivors wrong"


class TestLiesToDifferentNeighbours:
    """Each neighbour of member 0 is told that it survived or that it vanished, as suits the server best.

    Who colludes gives both shares. The server has both secrets if t shares of each are among what it gets.
    """

    @staticmethod
    def secrets_had(group: Group, told: Sequence[int], colluding: NDArray[np.bool_]) -> list[bool]:
        """Whether the server can join member 0's seed, and its mask key, after it told neighbours this."""
        owner, secrets = group.advertised[0], []
        got: dict[int, list[tuple[int, Bytes]]] = {SURVIVED: [], VANISHED: []}
        for holder, said, corrupted in zip(group.graph[0].tolist(), told, colluding, strict=True):
            member, column = group.masked(holder), group.graph[holder].tolist().index(0)
            if corrupted:
                got[SURVIVED].append((holder, member.held[column, :32]))
                got[VANISHED].append((holder, member.held[column, 32:]))
                continue
            status = np.full(group.count, SURVIVED, np.uint8)
            status[0] = said
            shares = member.unmask(group.terms, group.roster, group.everybody, status)
            got[said].append((holder, shares[column]))
        for said, secret in ((SURVIVED, owner.seed), (VANISHED, owner.pair)):
            enough = len(got[said]) >= group.threshold
            secrets.append(enough and group.joined(0, got[said][: group.threshold]) == secret)
        return secrets

    @pytest.mark.parametrize(("neighbours", "threshold"), [(4, 3), (5, 3), (5, 4), (6, 4), (6, 5), (7, 5)])
    def test_give_one_secret_while_few_collude_and_both_if_more_do(
        self, neighbours: int, threshold: int
    ) -> None:
        group = Group(neighbours + 1, neighbours, threshold)
        for corrupted in range(neighbours + 1):
            honest = neighbours - corrupted
            colluding = np.arange(neighbours) >= honest
            had = []
            for survived in range(honest + 1):
                told = [SURVIVED] * survived + [VANISHED] * (honest - survived) + [SURVIVED] * corrupted
                had.append(self.secrets_had(group, told, colluding))
            safe = 2 * threshold > neighbours + corrupted
            assert any(map(all, had)) == (not safe), corrupted
            assert any(map(any, had))  # one of them is what the protocol is for

    @pytest.mark.parametrize("neighbours", [4, 6, 7, 20])
    def test_would_give_both_with_a_threshold_that_nobody_takes(self, neighbours: int) -> None:
        threshold = neighbours // 2
        secrets = np.random.default_rng(neighbours).integers(0, 256, (2, 32), dtype=np.uint8)
        shares = split(secrets, neighbours, threshold)
        ones, others = np.arange(1, threshold + 1), np.arange(threshold + 1, 2 * threshold + 1)
        assert join(ones, shares[0, ones - 1]) == secrets[0].tobytes()
        assert join(others, shares[1, others - 1]) == secrets[1].tobytes()
        with pytest.raises(ValueError, match="threshold"):
            Terms(SESSION, 7, 20, neighbours + 1, neighbours, threshold, 2)


class TestSecretsDoNotShow:
    def test_in_any_phase(self, group: Group) -> None:
        member, opened = group.advertised[0], group.open(0)
        masked, _ = opened.mask(group.terms, np.zeros(7, np.uint32))
        shown = "".join(map(repr, (member, group.shared[0], opened, masked, [opened], {"x": masked})))
        assert "member=0" in shown
        for name in ("cipher", "pair", "seed", "held", "plus", "minus"):
            assert f"{name}=" not in shown
        for secret in (member.cipher, member.pair, member.seed, *opened.plus, *opened.minus):
            assert repr(secret)[2:-1] not in shown
            assert secret.hex() not in shown
        assert repr(masked.held[0])[7:40] not in shown
