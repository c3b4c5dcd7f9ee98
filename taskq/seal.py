"""Seals: an optional layer around encoded payloads that signs, encrypts, compresses or limits them.

>>> seal = Seals(Compression(), Encryption({"2026": key}), SizeLimit(1 << 20))

Sealing goes through the layers from left to right, opening from right to left. Each layer that changes a payload
puts a header before it, so that what is opened says itself how it was sealed: byte 0 is 0xC1 as in the codec,
byte 1 the layer, and where there are keys, the length and text of the key's id follow.

A seal vouches for the payload alone, not for the task or queue that it arrives with: who may write to the backend
can still repeat a payload that was sealed once.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import zlib
from collections.abc import Container, Mapping
from typing import Any, Final, Protocol

from taskq.errors import ConfigurationError, DecodeError, InvalidArgumentError, PayloadTooLargeError

_SIGNED: Final = b"\xc1\x81"
_ENCRYPTED: Final = b"\xc1\x82"
_COMPRESSED: Final = b"\xc1\x83"


class Seal(Protocol):
    """One layer. Both methods are pure functions of the payload and thread-safe."""

    def seal(self, payload: bytes) -> bytes:
        """The payload as it is stored. Raises :class:`EncodeError` if it cannot be."""
        ...

    def open(self, payload: bytes) -> bytes:
        """What ``seal`` was given. Raises :class:`DecodeError` if that cannot be told for certain."""
        ...


class Seals:
    """Several layers as one."""

    def __init__(self, *layers: Seal) -> None:
        self.layers = layers

    def seal(self, payload: bytes) -> bytes:
        for layer in self.layers:
            payload = layer.seal(payload)
        return payload

    def open(self, payload: bytes) -> bytes:
        for layer in reversed(self.layers):
            payload = layer.open(payload)
        return payload


class Signing:
    """HMAC-SHA256 over header and payload.

    ``keys`` maps ids to secrets of at least 16 bytes (32 random ones are best). The *last* key signs, all verify:
    to rotate, deploy the new key as the first one everywhere, then move it to the end, then drop the old one once
    no job signed with it is left. With ``accept_unsigned``, payloads without a signature pass, for the time in
    which signing is introduced.
    """

    def __init__(self, keys: Mapping[str, bytes], *, accept_unsigned: bool = False) -> None:
        self._keys = _checked(keys, "Signing", lengths=_ANY_LENGTH)
        self._header = _header(_SIGNED, list(keys)[-1])
        self._key = self._keys[list(keys)[-1]]
        self._accept_unsigned = accept_unsigned

    def seal(self, payload: bytes) -> bytes:
        return self._header + _mac(self._key, self._header + payload) + payload

    def open(self, payload: bytes) -> bytes:
        if not payload.startswith(_SIGNED):
            if self._accept_unsigned:
                return payload
            raise DecodeError("the payload is not signed")
        key_id, end = _key_id(payload)
        key = _known(self._keys, key_id)
        header, mac, rest = payload[:end], payload[end : end + _MAC], payload[end + _MAC :]
        if not hmac.compare_digest(mac, _mac(key, header + rest)):
            raise DecodeError("the signature is wrong: the payload was changed, or signed with another key")
        return rest


class Encryption:
    """AES-GCM through the package ``cryptography`` (``pip install taskq[crypto]``): secret and tamper-proof.

    ``keys`` maps ids to 16, 24 or 32 random bytes; rotation is that of :class:`Signing`. Nonces are random: change
    the key before four thousand million payloads.
    """

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        checked = _checked(keys, "Encryption", lengths=_AES_LENGTHS)
        cipher = _cipher()
        self._ciphers = {key_id: cipher(key) for key_id, key in checked.items()}
        self._current = list(keys)[-1]
        self._header = _header(_ENCRYPTED, self._current)

    def seal(self, payload: bytes) -> bytes:
        nonce = os.urandom(_NONCE)
        sealed: bytes = self._ciphers[self._current].encrypt(nonce, payload, self._header)
        return self._header + nonce + sealed

    def open(self, payload: bytes) -> bytes:
        if not payload.startswith(_ENCRYPTED):
            raise DecodeError("the payload is not encrypted")
        key_id, end = _key_id(payload)
        cipher = _known(self._ciphers, key_id)
        header, nonce, rest = payload[:end], payload[end : end + _NONCE], payload[end + _NONCE :]
        try:
            opened: bytes = cipher.decrypt(nonce, rest, header)
        except Exception as error:  # InvalidTag, and ValueError for what is too short
            raise DecodeError("the payload was changed, or encrypted with another key") from error
        return opened


class Compression:
    """zlib, for payloads of at least ``threshold`` bytes that it makes smaller.

    What would open to more than ``most`` bytes is refused, so that a small message cannot fill the memory.
    Before encryption, compression shows in the length how well a payload compressed: leave it out where an
    attacker can choose parts of a payload that holds secrets.
    """

    def __init__(self, threshold: int = 1024, *, level: int = 6, most: int = 1 << 28) -> None:
        if not 0 <= level <= 9:
            raise InvalidArgumentError(f"level={level!r}: expected 0 to 9")
        self.threshold = threshold
        self.level = level
        self.most = most

    def seal(self, payload: bytes) -> bytes:
        if len(payload) > self.most:
            raise _too_large(len(payload), self.most)
        marked = payload.startswith(_COMPRESSED)  # left alone, it would be taken for ours
        if len(payload) < self.threshold and not marked:
            return payload
        packed = _COMPRESSED + zlib.compress(payload, self.level)
        return packed if marked or len(packed) < len(payload) else payload

    def open(self, payload: bytes) -> bytes:
        if not payload.startswith(_COMPRESSED):
            return payload
        reader = zlib.decompressobj()
        try:
            opened = reader.decompress(payload[len(_COMPRESSED) :], self.most + 1)
        except zlib.error as error:
            raise DecodeError(f"the compressed payload is damaged: {error}") from error
        if len(opened) > self.most:
            raise DecodeError(f"the payload opens to more than {self.most} bytes")
        if not reader.eof or reader.unused_data:
            raise DecodeError("the compressed payload is truncated, or something follows it")
        return opened


class SizeLimit:
    """Refuses payloads of more than ``most`` bytes, as sealed so far, when they are sent."""

    def __init__(self, most: int) -> None:
        if most < 1:
            raise InvalidArgumentError(f"SizeLimit({most!r}): expected a positive number of bytes")
        self.most = most

    def seal(self, payload: bytes) -> bytes:
        if len(payload) > self.most:
            raise _too_large(len(payload), self.most)
        return payload

    def open(self, payload: bytes) -> bytes:
        return payload


_MAC: Final = 32
_ANY_LENGTH: Final = range(16, 1 << 16)
_AES_LENGTHS: Final = (16, 24, 32)
_NONCE: Final = 12


def _mac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, hashlib.sha256)


def _too_large(size: int, most: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"the payload has {size} bytes, the limit is {most}: send a reference (a key, a path) to what is large"
    )


def _header(layer: bytes, key_id: str) -> bytes:
    name = key_id.encode()
    return layer + bytes([len(name)]) + name


def _key_id(payload: bytes) -> tuple[str, int]:
    """The id of the key, and where the header ends."""
    length = payload[2] if len(payload) > 2 else 0
    end = 3 + length
    return payload[3:end].decode("utf-8", "replace"), end


def _known(keys: Mapping[str, Any], key_id: str) -> Any:
    try:
        return keys[key_id]
    except KeyError:
        raise DecodeError(
            f"the payload was sealed with the key {key_id!r}, which is not known here"
        ) from None


def _checked(keys: Mapping[Any, Any], owner: str, *, lengths: Container[int]) -> dict[str, bytes]:
    """A copy of ``keys``. Raises :class:`ConfigurationError`, which never shows a secret."""
    if not keys:
        raise ConfigurationError(f"{owner}({{}}): expected at least one key")
    for key_id, key in keys.items():
        if not isinstance(key_id, str) or not 1 <= len(key_id.encode()) <= 255:
            raise ConfigurationError(f"{owner}: the key id {key_id!r} is not a text of 1 to 255 bytes")
        if not isinstance(key, bytes):
            raise ConfigurationError(f"{owner}: the key {key_id!r} is {type(key).__name__}, expected bytes")
        if len(key) not in lengths:
            expected = "at least 16" if lengths is _ANY_LENGTH else "16, 24 or 32"
            raise ConfigurationError(f"{owner}: the key {key_id!r} has {len(key)} bytes, expected {expected}")
    return dict(keys)


def _cipher() -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise ConfigurationError(
            "Encryption needs the package cryptography: pip install taskq[crypto]"
        ) from error
    return AESGCM
