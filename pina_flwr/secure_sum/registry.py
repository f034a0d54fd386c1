"""Long-term keys of members, handed out out of band: what keeps a server from swapping keys or survivors.

Members sign what they advertise, and later the list of survivors (the consistency round of Bonawitz et al.
2017, eprint 2017/281). A registry file lists every member's Ed25519 public key:

    [keys]
    0 = "base64 of 32 bytes"
    1 = "…"

and each node has the private keys of its own members, as PEM files `member-0.pem`, `member-1.pem`, ….
"""

from __future__ import annotations

import base64
import struct
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pina_flwr.secure_sum.keys import sign, verify, verify_key_of
from pina_flwr.secure_sum.session import LARGEST_ID, Session, Terms
from pina_flwr.secure_sum.wire import KEY

OF_KEYS, OF_SURVIVORS = b"pina-flwr secure sum: keys", b"pina-flwr secure sum: survivors"


@dataclass(frozen=True)
class Identity:
    """Public keys of all members, and private keys of those that a node hosts; each 32 bytes."""

    registry: Mapping[int, bytes]
    own: Mapping[int, bytes] = field(repr=False)

    def sign(self, member: int, message: bytes) -> bytes:
        """A hosted member's signature, 64 bytes.

        Raises:
            KeyError: its private key is not here.
        """
        return sign(self.own[member], message)

    def verify(self, member: int, message: bytes, signature: bytes) -> bool:
        """Whether a registered member signed this."""
        return member in self.registry and verify(self.registry[member], message, signature)


def keys_message(session: Session, member: int, public: bytes) -> bytes:
    """What a member signs when it advertises its keys."""
    return OF_KEYS + session.to_bytes() + member.to_bytes(8, "little") + public


def survivors_message(terms: Terms, advertised: bytes, survivors: Sequence[int]) -> bytes:
    """What a member signs when it agrees to the list of survivors, ids in ascending order.

    advertised: SHA-256, 32 bytes, of all members and their keys. With it and the terms, those who sign one
    list are also of one mind about whose sum it is and what was asked of it.
    """
    numbers = struct.pack(f"<{len(terms.numbers)}Q", *terms.numbers.values())
    ids = b"".join(member.to_bytes(8, "little") for member in survivors)
    return OF_SURVIVORS + terms.session.to_bytes() + numbers + advertised + ids


def load_registry(path: str | Path) -> dict[int, bytes]:
    """Read a registry file.

    Raises:
        ValueError: it is missing or no TOML, or not every entry is a member's key, or two members share one.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise ValueError(f"{path}: {problem.strerror}; must be a registry of keys") from None
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path}: is not valid TOML: {problem}") from None
    table = values.get("keys")
    if set(values) != {"keys"} or not isinstance(table, dict) or not table:
        raise ValueError(f"{path}: must have one table [keys] and nothing else")
    registry = {_member(path, name): _public(path, name, text) for name, text in table.items()}
    if len(registry) < len(table) or len(set(registry.values())) < len(table):
        raise ValueError(f"{path}: a member or a key is there twice")
    return registry


def _member(path: str | Path, name: str) -> int:
    digits = name.isascii() and name.isdigit() and len(name) <= len(str(LARGEST_ID))
    if not digits or int(name) > LARGEST_ID:
        raise ValueError(f"{path}: {name[:40]!r}: must be a member's number, from 0")
    return int(name)


def _public(path: str | Path, name: str, text: object) -> bytes:
    try:
        key = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except ValueError:
        key = b""
    if len(key) != KEY:
        raise ValueError(f"{path}: key of {name}: must be {KEY} bytes in base64")
    return key


def load_identity(registry: str | Path, folder: str | Path, members: Collection[int]) -> Identity:
    """The registry, and the private keys of these members from a folder.

    Raises:
        ValueError: one is missing or unusable, or a private key is not that of the registered public key.
    """
    known = load_registry(registry)
    own = {member: _private(key_file(folder, member)) for member in members}
    for member, private in own.items():
        if known.get(member) != verify_key_of(private):
            raise ValueError(f"{key_file(folder, member)}: is not the key of {member} in {registry}")
    return Identity(known, own)


def key_file(folder: str | Path, member: int) -> Path:
    """Where a member's private key is."""
    return Path(folder) / f"member-{member}.pem"


def _private(path: Path) -> bytes:
    try:
        key = pem.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as problem:
        raise ValueError(f"{path}: {problem.strerror}; must be a private key") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ValueError(f"{path}: must be an Ed25519 private key in PEM, without a password") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"{path}: must be an Ed25519 key")
    return key.private_bytes_raw()


def new_key_file(folder: str | Path, member: int) -> str:
    """Make a member's private key, readable by its owner only, and return its line for the registry.

    Raises:
        ValueError: there is one already, or it can't be written.
    """
    if not 0 <= member <= LARGEST_ID:
        raise ValueError(f"member {member}: must be from 0 to {LARGEST_ID}")
    path, key = key_file(folder, member), Ed25519PrivateKey.generate()
    form = (pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600, exist_ok=False)
        path.write_bytes(key.private_bytes(*form))
    except FileExistsError:
        if path.parent.is_dir():
            raise ValueError(f"{path}: exists already; must be free, as no key is replaced") from None
        raise ValueError(f"{path.parent}: is no folder; must be one, or free") from None
    except OSError as problem:
        raise ValueError(f"{path}: {problem.strerror}; must be a file that can be made") from None
    return f'{member} = "{base64.b64encode(key.public_key().public_bytes_raw()).decode()}"'
