"""Keys of a secure sum: agreed, derived, used to seal and to sign, and committed to.

X25519 (RFC 7748), HKDF-SHA256 (RFC 5869), AES-256-GCM (NIST SP 800-38D) and Ed25519 (RFC 8032) are those of
the package `cryptography`; keys are raw bytes. What is here is how they are bound to their use. Whatever is
hashed is written injectively, each part with its length in front, so that no two uses share an input: a key
belongs to one purpose of one session between two members in one order.
"""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Sequence

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_BYTES = 32  # private, public and symmetric keys, secrets and seeds alike
NONCE_BYTES, TAG_BYTES = 12, 16
SEAL_BYTES = NONCE_BYTES + TAG_BYTES  # by which a sealed message is longer than the plain one
LABEL = b"pina-flwr secure sum 1"  # change the number with the meaning of anything derived below


class Tampered(ValueError):
    """A sealed message that was not sealed under this key for this use."""


def new_private() -> bytes:
    """A fresh X25519 private key, 32 bytes from the operating system (any 32 bytes are one)."""
    return os.urandom(KEY_BYTES)


def public_of(private: bytes) -> bytes:
    """The X25519 public key, 32 bytes, of a private one.

    Raises:
        TypeError, ValueError: `private` is not 32 bytes.
    """
    _check_key("private", private)
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, publics: Sequence[bytes]) -> list[bytes]:
    """The secret, 32 bytes, that a private key's owner shares with the owner of each public key.

    They are not uniform, so for `derive` only. The private key is parsed once, which takes as long as one
    exchange.

    Raises:
        TypeError, ValueError: a key is not 32 bytes.
        ValueError: a public key is a point of low order, with which everybody's secret would be 0.
    """
    _check_key("private", private)
    ours, secrets = X25519PrivateKey.from_private_bytes(private), []
    for public in publics:
        _check_key("public", public)
        try:
            secrets.append(ours.exchange(X25519PublicKey.from_public_bytes(public)))
        except ValueError:
            raise ValueError(f"public = {public.hex()}: must not be a point of low order") from None
    return secrets


def derive(secret: bytes, purpose: str, session_bytes: bytes, first: int, second: int) -> bytes:
    """A key for one purpose of one session between two members: HKDF-SHA256 of the secret, without salt.

    The order of the members counts: where both are to have the same key, both put the same one first.

    Args:
        secret: 32 bytes of `agree`, or a seed of 32 bytes.
        purpose: what the key is for, e.g. "mask".
        session_bytes: `Session.to_bytes()`.
        first, second: members, 0 to 2^63 - 1.

    Returns:
        32 bytes.

    Raises:
        TypeError, ValueError: an argument is of another type, length or range.
    """
    _check_key("secret", secret)
    _check_bytes("session_bytes", session_bytes)
    if not isinstance(purpose, str):
        raise TypeError(f"purpose of type {type(purpose).__name__}: must be str")
    members = _written("first", first), _written("second", second)
    info = _encoded(b"derive", purpose.encode(), session_bytes, *members)
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(secret)


def seal(key: bytes, plaintext: bytes, bound: bytes) -> bytes:
    """`plaintext` encrypted and authenticated together with `bound`: nonce, ciphertext, tag.

    AES-256-GCM under a random nonce of 96 bits, good for 2^32 messages a key (SP 800-38D, section 8.3).

    Args:
        key: 32 bytes.
        plaintext: of any length.
        bound: what the message is tied to and does not hold, such as who sends it to whom; `unseal` needs it.

    Returns:
        `SEAL_BYTES` more than `plaintext`.

    Raises:
        TypeError, ValueError: an argument is not bytes, or `key` not 32.
    """
    _check_seal(key, bound)
    _check_bytes("plaintext", plaintext)
    nonce = os.urandom(NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, plaintext, bound)


def unseal(key: bytes, sealed: bytes, bound: bytes) -> bytes:
    """The plaintext of `seal`.

    Raises:
        Tampered: `sealed` is not a message sealed under `key` with `bound`, to the last bit.
        TypeError, ValueError: an argument is not bytes, or `key` not 32.
    """
    _check_seal(key, bound)
    _check_bytes("sealed", sealed)
    if len(sealed) < SEAL_BYTES:
        raise Tampered(f"sealed message of {len(sealed)} bytes: must be at least {SEAL_BYTES}")
    try:
        return AESGCM(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], bound)
    except InvalidTag:
        raise Tampered("sealed message: was not sealed under this key for this use") from None


def commitment(seed: bytes, session_bytes: bytes, member: int) -> bytes:
    """SHA-256, 32 bytes, of a member's seed in a session: fixes the seed, and hides it if it is random.

    Raises:
        TypeError, ValueError: an argument is of another type, length or range.
    """
    _check_key("seed", seed)
    _check_bytes("session_bytes", session_bytes)
    return hashlib.sha256(_encoded(b"commitment", seed, session_bytes, _written("member", member))).digest()


def new_signing_key() -> bytes:
    """A fresh Ed25519 private key, 32 bytes from the operating system (any 32 bytes are one)."""
    return os.urandom(KEY_BYTES)


def verify_key_of(private: bytes) -> bytes:
    """The Ed25519 public key, 32 bytes, of a private one.

    Raises:
        TypeError, ValueError: `private` is not 32 bytes.
    """
    _check_key("private", private)
    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def sign(private: bytes, message: bytes) -> bytes:
    """The Ed25519 signature, 64 bytes, of a message, which must say itself what it is for.

    Raises:
        TypeError, ValueError: an argument is not bytes, or `private` not 32.
    """
    _check_key("private", private)
    _check_bytes("message", message)
    return Ed25519PrivateKey.from_private_bytes(private).sign(message)


def verify(public: bytes, message: bytes, signature: bytes) -> bool:
    """Whether the owner of the Ed25519 key `public` signed `message`; False for a malformed key or signature.

    Raises:
        TypeError: an argument is not bytes.
    """
    _check_bytes("public", public)
    _check_bytes("message", message)
    _check_bytes("signature", signature)
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def _encoded(*parts: bytes) -> bytes:
    """The label and the parts, each after its length in 8 bytes: different parts never look the same."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in (LABEL, *parts))


def _written(name: str, member: int) -> bytes:
    number = operator.index(member)
    if not 0 <= number < 2**63:
        raise ValueError(f"{name} = {number}: must be from 0 to 2^63 - 1")
    return number.to_bytes(8, "little")


def _check_seal(key: bytes, bound: bytes) -> None:
    _check_key("key", key)
    _check_bytes("bound", bound)


def _check_key(name: str, key: bytes) -> None:
    _check_bytes(name, key)
    if len(key) != KEY_BYTES:
        raise ValueError(f"{name} of {len(key)} bytes: must be {KEY_BYTES}")


def _check_bytes(name: str, value: bytes) -> None:
    if not isinstance(value, bytes):
        raise TypeError(f"{name} of type {type(value).__name__}: must be bytes")
