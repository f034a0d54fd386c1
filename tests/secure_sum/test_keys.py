import hashlib
import hmac
import os
from typing import Any

import numpy as np
import pytest

from pina_flwr.secure_sum import keys
from pina_flwr.secure_sum.keys import (
    Tampered,
    agree,
    commitment,
    derive,
    new_private,
    new_signing_key,
    public_of,
    seal,
    sign,
    unseal,
    verify,
    verify_key_of,
)

# RFC 7748, section 6.1.
ALICE = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
ALICE_PUBLIC = bytes.fromhex("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
BOB = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
BOB_PUBLIC = bytes.fromhex("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f")
SECRET = bytes.fromhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")

SESSION = bytes.fromhex("0300000072756e0700000000000000")
KEY = bytes(range(32))
PRIME = 2**255 - 19
# Of all points of order 1, 2, 4 and 8 on the curve and its twist, the coordinate that is sent.
LOW_ORDER = [
    0,
    1,
    PRIME - 1,
    int.from_bytes(
        bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"), "little"
    ),
    int.from_bytes(
        bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"), "little"
    ),
]
NO_KEYS = [b"", bytes(31), bytes(33), bytes(64)]
NO_BYTES = [KEY.hex(), bytearray(KEY), memoryview(KEY), None, 32, np.zeros(32, np.uint8)]


def written(*parts: bytes) -> bytes:
    """What a hash is to be given: the label and all parts, each with its length in front."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in (b"pina-flwr secure sum 1", *parts))


def hkdf(secret: bytes, info: bytes) -> bytes:
    """HKDF-SHA256 without salt, 32 bytes, after RFC 5869."""
    return hmac.digest(hmac.digest(bytes(32), secret, "sha256"), info + b"\x01", "sha256")


class TestAgree:
    def test_known_answers(self) -> None:
        assert public_of(ALICE) == ALICE_PUBLIC
        assert public_of(BOB) == BOB_PUBLIC
        assert agree(ALICE, [BOB_PUBLIC, ALICE_PUBLIC, BOB_PUBLIC])[::2] == [SECRET, SECRET]
        assert agree(BOB, [ALICE_PUBLIC]) == [SECRET]

    def test_of_fresh_keys(self) -> None:
        ours, theirs = new_private(), new_private()
        assert len(ours) == 32
        assert ours != theirs
        assert agree(ours, [public_of(theirs)]) == agree(theirs, [public_of(ours)])

    def test_private_keys_are_from_the_operating_system(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(keys.os, "urandom", lambda count: ALICE[:count])
        assert new_private() == ALICE

    @pytest.mark.parametrize("point", LOW_ORDER)
    def test_refuses_points_of_low_order(self, point: int) -> None:
        # Also written otherwise: numbers count modulo the prime, and the highest bit does not.
        for number in range(point, 2**255, PRIME):
            for top in (0, 2**255):
                with pytest.raises(ValueError, match="must not be a point of low order"):
                    agree(ALICE, [BOB_PUBLIC, (number + top).to_bytes(32, "little")])

    def test_takes_the_points_next_to_those_of_low_order(self) -> None:
        assert all(
            any(agree(ALICE, [(point + 1).to_bytes(32, "little")])[0])
            for point in LOW_ORDER[1:2] + LOW_ORDER[3:]
        )

    @pytest.mark.parametrize("key", NO_KEYS)
    def test_refuses_other_lengths(self, key: bytes) -> None:
        for call in (lambda: public_of(key), lambda: agree(key, [BOB_PUBLIC]), lambda: agree(ALICE, [key])):
            with pytest.raises(ValueError, match=f"of {len(key)} bytes: must be 32"):
                call()

    @pytest.mark.parametrize("key", NO_BYTES)
    def test_refuses_other_types(self, key: Any) -> None:
        for call in (lambda: public_of(key), lambda: agree(key, [BOB_PUBLIC]), lambda: agree(ALICE, [key])):
            with pytest.raises(TypeError, match="must be bytes"):
                call()


class TestDerive:
    def test_hkdf_here_is_that_of_rfc_5869(self) -> None:
        # Test case 3, of whose 42 bytes these are the first.
        expected = "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"
        assert hkdf(b"\x0b" * 22, b"").hex() == expected

    def test_known_answer(self) -> None:
        # Computed with pycryptodome.
        assert derive(SECRET, "pair mask", SESSION, 5, 2**63 - 1).hex() == (
            "e98e791c5ccf2f075f8e512ab961f6c3419f1354585f323e12666efc95db94d1"
        )

    def test_is_hkdf_of_all_that_the_key_is_for(self) -> None:
        info = written(b"derive", "ä".encode(), SESSION, (5).to_bytes(8, "little"), (0).to_bytes(8, "little"))
        assert derive(KEY, "ä", SESSION, 5, 0) == hkdf(KEY, info)

    def test_differs_with_each_argument(self) -> None:
        derived = [
            derive(SECRET, "mask", SESSION, 1, 2),
            derive(KEY, "mask", SESSION, 1, 2),
            derive(SECRET, "masks", SESSION, 1, 2),
            derive(SECRET, "", SESSION, 1, 2),
            derive(SECRET, "mask", SESSION + b"\x00", 1, 2),
            derive(SECRET, "mask", b"", 1, 2),
            derive(SECRET, "mask", SESSION, 2, 1),
            derive(SECRET, "mask", SESSION, 1, 1),
            derive(SECRET, "mask", SESSION, 2, 2),
            derive(SECRET, "mask", SESSION, 1 + 2**32, 2),
        ]
        assert len(set(derived)) == len(derived)

    def test_differs_when_bytes_move_from_one_argument_to_another(self) -> None:
        one = (1).to_bytes(8, "little")
        derived = [
            derive(SECRET, "mask", b"run", 1, 1),
            derive(SECRET, "maskr", b"un", 1, 1),
            derive(SECRET, "maskrun", b"", 1, 1),
            derive(SECRET, "mas", b"krun", 1, 1),
            derive(SECRET, "", b"maskrun", 1, 1),
            derive(SECRET, "mask", b"run" + one, 1, 1),
            derive(SECRET, "mask\x03", b"run", 1, 1),
            derive(SECRET, "mask" + (3).to_bytes(8, "little").decode() + "run", b"", 1, 1),
        ]
        assert len(set(derived)) == len(derived)

    @pytest.mark.parametrize("member", [-1, 2**63, 2**64 + 1])
    def test_refuses_members_out_of_range(self, member: int) -> None:
        with pytest.raises(ValueError, match=rf"first = {member}: must be from 0 to 2\^63 - 1"):
            derive(SECRET, "mask", SESSION, member, 1)
        with pytest.raises(ValueError, match=rf"second = {member}: must be from 0 to 2\^63 - 1"):
            derive(SECRET, "mask", SESSION, 1, member)

    def test_takes_members_of_numpy(self) -> None:
        first, second = np.array([3, 4])
        assert derive(SECRET, "mask", SESSION, first, second) == derive(SECRET, "mask", SESSION, 3, 4)

    def test_refuses_other_types(self) -> None:
        wrong: list[Any] = [
            ("secret", "mask", SESSION, 1, 2),
            (SECRET, b"mask", SESSION, 1, 2),
            (SECRET, "mask", "session", 1, 2),
            (SECRET, "mask", SESSION, 1.0, 2),
            (SECRET, "mask", SESSION, 1, "2"),
        ]
        for arguments in wrong:
            with pytest.raises(TypeError):
                derive(*arguments)

    @pytest.mark.parametrize("secret", NO_KEYS)
    def test_refuses_secrets_of_other_lengths(self, secret: bytes) -> None:
        with pytest.raises(ValueError, match="must be 32"):
            derive(secret, "mask", SESSION, 1, 2)


class TestSeal:
    PLAIN, BOUND = b"two shares of 32 bytes", b"from 1 to 2"

    @pytest.mark.parametrize("plain", [b"", b"\x00", PLAIN, bytes(10_000)])
    def test_unseal_undoes_it(self, plain: bytes) -> None:
        sealed = seal(KEY, plain, self.BOUND)
        assert len(sealed) == len(plain) + keys.SEAL_BYTES
        assert unseal(KEY, sealed, self.BOUND) == plain

    def test_known_answer(self) -> None:
        # GCM specification (McGrew and Viega), test case 14: AES-256, zeros only.
        sealed = bytes(12) + bytes.fromhex("cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919")
        assert unseal(bytes(32), sealed, b"") == bytes(16)

    def test_never_uses_a_nonce_twice(self) -> None:
        nonces = {seal(KEY, self.PLAIN, self.BOUND)[:12] for _ in range(1000)}
        assert len(nonces) == 1000

    def test_nonces_are_from_the_operating_system(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(keys.os, "urandom", lambda count: ALICE[:count])
        assert seal(KEY, self.PLAIN, self.BOUND).startswith(ALICE[:12])

    def test_each_flipped_bit_is_noticed(self) -> None:
        sealed = seal(KEY, self.PLAIN, self.BOUND)
        for bit in range(8 * len(sealed)):
            changed = bytearray(sealed)
            changed[bit // 8] ^= 1 << bit % 8
            with pytest.raises(Tampered, match="was not sealed under this key for this use"):
                unseal(KEY, bytes(changed), self.BOUND)

    def test_other_lengths_are_noticed(self) -> None:
        sealed = seal(KEY, self.PLAIN, self.BOUND)
        for changed in [sealed[:end] for end in range(len(sealed))] + [sealed + b"\x00", b"\x00" + sealed]:
            with pytest.raises(Tampered):
                unseal(KEY, changed, self.BOUND)

    @pytest.mark.parametrize("bound", [b"", b"from 2 to 1", BOUND + b"\x00", BOUND[:-1]])
    def test_another_bound_is_noticed(self, bound: bytes) -> None:
        with pytest.raises(Tampered):
            unseal(KEY, seal(KEY, self.PLAIN, self.BOUND), bound)

    def test_another_key_is_noticed(self) -> None:
        with pytest.raises(Tampered):
            unseal(bytes(32), seal(KEY, self.PLAIN, self.BOUND), self.BOUND)

    def test_tampering_is_a_value_error(self) -> None:
        assert issubclass(Tampered, ValueError)

    @pytest.mark.parametrize("key", [*NO_KEYS, bytes(16), bytes(24)])  # AES-GCM would take 16 and 24 bytes
    def test_refuses_keys_of_other_lengths(self, key: bytes) -> None:
        for call in (seal, unseal):
            with pytest.raises(ValueError, match=f"key of {len(key)} bytes: must be 32"):
                call(key, bytes(100), b"")

    @pytest.mark.parametrize("other", ["text", bytearray(100), None])
    def test_refuses_other_types(self, other: Any) -> None:
        for call in (seal, unseal):
            for arguments in ((other, bytes(100), b""), (KEY, other, b""), (KEY, bytes(100), other)):
                with pytest.raises(TypeError, match="must be bytes"):
                    call(*arguments)


class TestCommitment:
    def test_known_answer(self) -> None:
        # Computed with pycryptodome.
        assert (
            commitment(KEY, SESSION, 5).hex()
            == "dfd9b2978662468cf2ea249b2678797c20eb9e7f1d5b919062f535d72146ec50"
        )

    def test_is_a_hash_for_this_use_alone(self) -> None:
        parts = KEY, SESSION, (5).to_bytes(8, "little")
        expected = hashlib.sha256(written(b"commitment", *parts)).digest()
        assert commitment(KEY, SESSION, 5) == expected
        others = [
            hashlib.sha256(KEY),
            hashlib.sha256(b"".join(parts)),
            hashlib.sha256(written(b"derive", *parts)),
        ]
        assert all(other.digest() != expected for other in others)

    def test_differs_with_each_argument(self) -> None:
        made = [
            commitment(KEY, SESSION, 5),
            commitment(bytes(32), SESSION, 5),
            commitment(KEY, SESSION[:-1], 5),
            commitment(KEY, SESSION + b"\x05", 0),
            commitment(KEY, SESSION, 6),
        ]
        assert len(set(made)) == len(made)

    def test_refuses_other_arguments(self) -> None:
        for seed in NO_KEYS:
            with pytest.raises(ValueError, match=f"seed of {len(seed)} bytes: must be 32"):
                commitment(seed, SESSION, 5)
        with pytest.raises(ValueError, match="member = -1"):
            commitment(KEY, SESSION, -1)
        with pytest.raises(TypeError, match="session_bytes of type str"):
            commitment(KEY, "session", 5)  # type: ignore[arg-type]


class TestSign:
    # RFC 8032, section 7.1, tests 1 to 3: private key, public key, message, signature.
    KNOWN = (
        (
            "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
            "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
            "",
            "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
            "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
        ),
        (
            "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
            "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
            "72",
            "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
            "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
        ),
        (
            "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
            "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
            "af82",
            "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
            "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
        ),
    )

    @pytest.mark.parametrize("known", KNOWN)
    def test_known_answers(self, known: tuple[str, str, str, str]) -> None:
        private, public, message, signature = map(bytes.fromhex, known)
        assert verify_key_of(private) == public
        assert sign(private, message) == signature
        assert verify(public, message, signature)

    def test_each_flipped_bit_is_noticed(self) -> None:
        private, message = new_signing_key(), b"a key of member 3"
        public, signature = verify_key_of(private), sign(private, message)
        assert verify(public, message, signature)
        given = public + message + signature
        for bit in range(8 * len(given)):
            changed = bytearray(given)
            changed[bit // 8] ^= 1 << bit % 8
            assert not verify(bytes(changed[:32]), bytes(changed[32:-64]), bytes(changed[-64:]))

    def test_fresh_keys_are_from_the_operating_system(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert new_signing_key() != new_signing_key()
        monkeypatch.setattr(keys.os, "urandom", lambda count: ALICE[:count])
        assert new_signing_key() == ALICE

    def test_malformed_keys_and_signatures_are_false(self) -> None:
        private = new_signing_key()
        public, signature = verify_key_of(private), sign(private, b"")
        for length in [*range(70), 128, 1000]:
            for filler in (bytes(length), b"\xff" * length, os.urandom(length)):
                assert not verify(filler, b"", signature)
                assert not verify(public, b"", filler)
            assert length == 64 or not verify(public, b"", (2 * signature)[:length])
            assert length == 32 or not verify((4 * public)[:length], b"", signature)

    def test_a_signature_has_one_form(self) -> None:
        # The group's order added to its second half would mean the same (RFC 8032, section 5.1.7).
        private = new_signing_key()
        signature = sign(private, b"")
        order = 2**252 + 27742317777372353535851937790883648493
        half = (int.from_bytes(signature[32:], "little") + order).to_bytes(32, "little")
        assert not verify(verify_key_of(private), b"", signature[:32] + half)

    @pytest.mark.parametrize("other", [*NO_KEYS])
    def test_refuses_private_keys_of_other_lengths(self, other: bytes) -> None:
        for call in (lambda: sign(other, b""), lambda: verify_key_of(other)):
            with pytest.raises(ValueError, match=f"private of {len(other)} bytes: must be 32"):
                call()

    @pytest.mark.parametrize("other", NO_BYTES)
    def test_refuses_other_types(self, other: Any) -> None:
        for arguments in ((other, b"", bytes(64)), (KEY, other, bytes(64)), (KEY, b"", other)):
            with pytest.raises(TypeError, match="must be bytes"):
                verify(*arguments)
        for call in (lambda: sign(other, b""), lambda: sign(KEY, other), lambda: verify_key_of(other)):
            with pytest.raises(TypeError, match="must be bytes"):
                call()
