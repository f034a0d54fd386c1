from __future__ import annotations

import base64
import itertools
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from pina_flwr.secure_sum.keys import new_signing_key, sign, verify, verify_key_of
from pina_flwr.secure_sum.registry import (
    Identity,
    key_file,
    keys_message,
    load_identity,
    load_registry,
    new_key_file,
    survivors_message,
)
from pina_flwr.secure_sum.session import LARGEST_ID, Session, Terms

SESSION = Session("run", 3)
TERMS = Terms(SESSION, 100, 20, 6, 5, 3, 2)
PUBLIC = bytes(range(96))
DIGEST = bytes(range(32))
ONE, OTHER = (base64.b64encode(bytes([x]) * 32).decode() for x in (1, 2))


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def one_line(raised: pytest.ExceptionInfo[ValueError], path: Path) -> None:
    """The error names the file, on one line."""
    text = str(raised.value)
    assert text.startswith(str(path))
    assert "\n" not in text
    assert len(text) < len(str(path)) + 200


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Private keys of members 0, 1 and 7, and the registry of all three in `registry.toml`."""
    lines = [new_key_file(tmp_path, member) for member in (0, 1, 7)]
    written(tmp_path / "registry.toml", "[keys]\n" + "\n".join(lines))
    return tmp_path


class TestMessages:
    def test_say_all_that_is_signed(self) -> None:
        session = SESSION.to_bytes()
        assert keys_message(SESSION, 5, PUBLIC) == (
            b"pina-flwr secure sum: keys" + session + b"\5" + bytes(7) + PUBLIC
        )
        numbers = b"".join(n.to_bytes(8, "little") for n in (100, 20, 6, 5, 3, 2))
        assert survivors_message(TERMS, DIGEST, [1, 258]) == (
            b"pina-flwr secure sum: survivors" + session + numbers + DIGEST
            + b"\1" + bytes(7) + b"\2\1" + bytes(6)
        )  # fmt: skip

    def test_differ_with_each_part_and_are_never_the_start_of_one_another(self) -> None:
        sessions = [
            Session("run", 3),
            Session("run", 4),
            Session("ru", 3),
            Session("run\3", 3),
            Session("r", 1),
        ]
        messages = [
            keys_message(session, member, public)
            for session in sessions
            for member in (0, 1, 256, LARGEST_ID)
            for public in (PUBLIC, PUBLIC[::-1])
        ]
        terms = [replace(TERMS, session=session) for session in sessions]
        changes = {"size": 101, "bits": 21, "members": 7, "neighbours": 4, "threshold": 4, "fewest": 3}
        terms += [Terms.of(SESSION, TERMS.numbers | {name: value}) for name, value in changes.items()]
        messages += [survivors_message(t, digest, [1, 2]) for t in terms for digest in (DIGEST, DIGEST[::-1])]
        messages += [survivors_message(TERMS, DIGEST, ids) for ids in ([1, 3], [2, 1], [258, 2])]
        for one, other in itertools.permutations(messages, 2):
            assert not one.startswith(other)

    def test_lists_of_other_lengths_differ(self) -> None:
        lists = [survivors_message(TERMS, DIGEST, range(count)) for count in range(5)]
        assert len(set(lists)) == 5


class TestIdentity:
    def test_signs_for_its_own_members_and_verifies_registered_ones(self) -> None:
        private = {member: new_signing_key() for member in (0, 1)}
        public = {member: verify_key_of(key) for member, key in private.items()}
        identity = Identity(public, {0: private[0]})
        signature = identity.sign(0, b"text")
        assert signature == sign(private[0], b"text")
        assert identity.verify(0, b"text", signature)
        assert identity.verify(1, b"text", sign(private[1], b"text"))
        for member, text, said in (
            (1, b"text", signature),
            (0, b"Text", signature),
            (2, b"text", signature),
            (0, b"text", bytes(64)),
            (0, b"text", b""),
        ):
            assert not identity.verify(member, text, said)
        with pytest.raises(KeyError):
            identity.sign(1, b"text")

    def test_does_not_show_private_keys(self) -> None:
        key = new_signing_key()
        shown = repr(Identity({0: verify_key_of(key)}, {0: key}))
        assert "own" not in shown
        assert repr(key)[2:-1] not in shown


class TestRegistry:
    def test_holds_a_key_of_each_member(self, tmp_path: Path) -> None:
        path = written(tmp_path / "r.toml", f'[keys]\n0 = "{ONE}"\n{LARGEST_ID} = "{OTHER}"  # é\n')
        assert load_registry(path) == {0: bytes([1]) * 32, LARGEST_ID: bytes([2]) * 32}
        assert load_registry(str(path)) == load_registry(path)

    @pytest.mark.parametrize(
        ("text", "right"),
        [
            ("", "must have one table [keys] and nothing else"),
            ("[keys]", "must have one table [keys] and nothing else"),
            ("keys = 3", "must have one table [keys] and nothing else"),
            (f'0 = "{ONE}"', "must have one table [keys] and nothing else"),
            (f'[keys]\n0 = "{ONE}"\n[more]', "must have one table [keys] and nothing else"),
            (f'[[keys]]\n0 = "{ONE}"', "must have one table [keys] and nothing else"),
            (f'[Keys]\n0 = "{ONE}"', "must have one table [keys] and nothing else"),
            ("[keys", "is not valid TOML"),
            ("[keys]\n0 = é", "is not valid TOML"),
            (f'[keys]\n0 = "{ONE}"\n0 = "{OTHER}"', "is not valid TOML"),
            (b"[keys]\n0 = \xff", "is not valid TOML"),
            (b"\0" * 100, "is not valid TOML"),
            ("x = " + "[" * 3000, "is not valid TOML"),
            (f'[keys]\n-1 = "{ONE}"', "must be a member's number, from 0"),
            (f'[keys]\na = "{ONE}"', "must be a member's number, from 0"),
            (f'[keys]\n"" = "{ONE}"', "must be a member's number, from 0"),
            (f'[keys]\n" 1" = "{ONE}"', "must be a member's number, from 0"),
            (f'[keys]\n"1\\n2" = "{ONE}"', "must be a member's number, from 0"),
            (f'[keys]\n"\u0661" = "{ONE}"', "must be a member's number, from 0"),
            (f'[keys]\n"²" = "{ONE}"', "must be a member's number, from 0"),
            (f'[keys]\n{LARGEST_ID + 1} = "{ONE}"', "must be a member's number, from 0"),
            (f'[keys]\n{"9" * 5000} = "{ONE}"', "must be a member's number, from 0"),
            (f'[keys]\n"0.5" = "{ONE}"', "must be a member's number, from 0"),
            (f'[keys]\n0.5 = "{ONE}"', "must be 32 bytes in base64"),
            ('[keys]\n0 = ""', "must be 32 bytes in base64"),
            ("[keys]\n0 = 5", "must be 32 bytes in base64"),
            (f'[keys]\n0 = ["{ONE}"]', "must be 32 bytes in base64"),
            (f'[keys]\n0 = "{ONE[:-1]}"', "must be 32 bytes in base64"),
            (f'[keys]\n0 = "{ONE[4:]}"', "must be 32 bytes in base64"),
            (f'[keys]\n0 = "{ONE} "', "must be 32 bytes in base64"),
            (f'[keys]\n0 = "{"é" * 44}"', "must be 32 bytes in base64"),
            (f'[keys]\n0 = "{"00" * 32}"', "must be 32 bytes in base64"),
            (f'[keys.0]\n1 = "{ONE}"', "must be 32 bytes in base64"),
            (f'[keys]\n0 = "{ONE}"\n1 = "{ONE}"', "a member or a key is there twice"),
            (f'[keys]\n0 = "{ONE}"\n00 = "{OTHER}"', "a member or a key is there twice"),
        ],
        ids=lambda text: repr(text)[:30],
    )
    def test_says_what_is_wrong(self, tmp_path: Path, text: str | bytes, right: str) -> None:
        path = written(tmp_path / "r.toml", text)
        with pytest.raises(ValueError, match=r".") as raised:
            load_registry(path)
        one_line(raised, path)
        assert right in str(raised.value)

    def test_missing_or_no_file(self, tmp_path: Path) -> None:
        for path in (tmp_path / "no.toml", tmp_path, tmp_path / "a" / "b"):
            with pytest.raises(ValueError, match="must be a registry of keys") as raised:
                load_registry(path)
            one_line(raised, path)


class TestIdentityFiles:
    def test_hold_the_keys_of_some_members(self, folder: Path) -> None:
        identity = load_identity(folder / "registry.toml", folder, [1, 7])
        assert set(identity.registry) == {0, 1, 7}
        assert set(identity.own) == {1, 7}
        for member in (1, 7):
            assert identity.verify(member, b"text", identity.sign(member, b"text"))

    def test_of_no_members(self, folder: Path) -> None:
        assert load_identity(folder / "registry.toml", folder / "none", []).own == {}

    @pytest.mark.parametrize("member", [2, 7])
    def test_missing(self, folder: Path, member: int) -> None:
        key_file(folder, 7).unlink()
        with pytest.raises(ValueError, match="must be a private key") as raised:
            load_identity(folder / "registry.toml", folder, [0, member])
        one_line(raised, folder / f"member-{member}.pem")

    def test_not_in_the_registry(self, folder: Path) -> None:
        new_key_file(folder, 2)
        with pytest.raises(ValueError, match="is not the key of 2 in") as raised:
            load_identity(folder / "registry.toml", folder, [2])
        one_line(raised, folder / "member-2.pem")

    def test_of_another_member(self, folder: Path) -> None:
        os.replace(key_file(folder, 0), key_file(folder, 1))
        with pytest.raises(ValueError, match="is not the key of 1 in") as raised:
            load_identity(folder / "registry.toml", folder, [1])
        one_line(raised, folder / "member-1.pem")

    @staticmethod
    def in_pem(key: Any, how: Any = None, form: Any = pem.PrivateFormat.PKCS8) -> bytes:
        return bytes(key.private_bytes(pem.Encoding.PEM, form, how or pem.NoEncryption()))

    def test_of_another_kind(self, folder: Path) -> None:
        good = key_file(folder, 7).read_bytes()
        password = pem.BestAvailableEncryption(b"word")
        public = Ed25519PrivateKey.generate().public_key()
        for text in (
            b"",
            b"\0" * 32,
            b"\xff\xfe",
            good[:60],
            good.replace(b"PRIVATE", b"PUBLIC"),
            self.in_pem(Ed25519PrivateKey.generate(), password),
            self.in_pem(X25519PrivateKey.generate()),
            self.in_pem(generate_private_key(SECP256R1())),
            self.in_pem(generate_private_key(SECP256R1()), form=pem.PrivateFormat.TraditionalOpenSSL),
            public.public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo),
            new_signing_key(),
        ):
            written(key_file(folder, 7), text)
            with pytest.raises(ValueError, match="must be an Ed25519") as raised:
                load_identity(folder / "registry.toml", folder, [7])
            one_line(raised, folder / "member-7.pem")
        key_file(folder, 7).unlink()
        key_file(folder, 7).mkdir()
        with pytest.raises(ValueError, match="must be a private key") as raised:
            load_identity(folder / "registry.toml", folder, [7])
        one_line(raised, folder / "member-7.pem")


class TestNewKeyFile:
    @pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
    def test_is_for_its_owner_only(self, tmp_path: Path, mask: int) -> None:
        before = os.umask(mask)
        try:
            new_key_file(tmp_path / "a" / "b", 3)
        finally:
            os.umask(before)
        mode = (tmp_path / "a" / "b" / "member-3.pem").stat().st_mode
        assert stat.S_IMODE(mode) == 0o600

    def test_says_what_goes_into_the_registry(self, tmp_path: Path) -> None:
        line = new_key_file(tmp_path, 3)
        registry = load_registry(written(tmp_path / "r.toml", f"[keys]\n{line}"))
        identity = load_identity(tmp_path / "r.toml", tmp_path, [3])
        assert verify(registry[3], b"text", identity.sign(3, b"text"))
        assert verify_key_of(identity.own[3]) == registry[3]

    def test_keys_are_new_each_time(self, tmp_path: Path) -> None:
        assert len({new_key_file(tmp_path / str(i), 3) for i in range(5)}) == 5

    def test_replaces_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "member-3.pem"
        for make in (
            lambda: new_key_file(tmp_path, 3),
            lambda: written(path, b"precious"),
            lambda: path.symlink_to(tmp_path / "elsewhere"),
            lambda: path.mkdir(),
        ):
            make()
            before = path.read_bytes() if path.is_file() else b""
            with pytest.raises(ValueError, match="no key is replaced") as raised:
                new_key_file(tmp_path, 3)
            one_line(raised, path)
            assert (path.read_bytes() if path.is_file() else b"") == before
            path.rmdir() if path.is_dir() else path.unlink()
        assert not (tmp_path / "elsewhere").exists()

    def test_where_there_can_be_no_file(self, tmp_path: Path) -> None:
        written(tmp_path / "file", b"")
        with pytest.raises(ValueError, match="is no folder; must be one, or free") as raised:
            new_key_file(tmp_path / "file", 3)
        one_line(raised, tmp_path / "file")
        for member in (-1, LARGEST_ID + 1):
            with pytest.raises(ValueError, match=f"^member {member}: must be from 0 to {LARGEST_ID}$"):
                new_key_file(tmp_path / "fresh", member)
        assert not (tmp_path / "fresh").exists()
        with pytest.raises(ValueError, match="must be a file that can be made") as raised:
            new_key_file(tmp_path / "file" / "more", 3)
        one_line(raised, tmp_path / "file" / "more" / "member-3.pem")
