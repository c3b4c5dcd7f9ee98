"""Seals: what they open is what they were given, or a DecodeError."""

from __future__ import annotations

import sys
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskq.errors import (
    ConfigurationError,
    DecodeError,
    EncodeError,
    InvalidArgumentError,
    PayloadTooLargeError,
)
from taskq.seal import Compression, Encryption, Seals, Signing, SizeLimit

K1, K2 = b"1" * 32, b"2" * 32
LAYERS = {
    "signing": Signing({"a": K1}),
    "encryption": Encryption({"a": K1}),
    "compression": Compression(10),
    "limit": SizeLimit(10_000),
    "all": Seals(Compression(10), Signing({"a": K1}), Encryption({"b": K2}), SizeLimit(10_000)),
}
TIGHT = ["signing", "encryption", "all"]


@pytest.mark.parametrize("seal", LAYERS.values(), ids=LAYERS)
@given(payload=st.binary(max_size=200) | st.integers(0, 5000).map(bytes))
def test_a_sealed_payload_opens_to_itself(seal, payload):
    assert payload == seal.open(seal.seal(payload))


@pytest.mark.parametrize("name", TIGHT)
@given(payload=st.binary(max_size=50), data=st.data())
def test_any_change_is_noticed(name, payload, data):
    seal = LAYERS[name]
    sealed = bytearray(seal.seal(payload))
    place = data.draw(st.integers(0, len(sealed) - 1))
    sealed[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DecodeError):
        seal.open(bytes(sealed))


@pytest.mark.parametrize("name", TIGHT)
@given(
    data=st.binary(max_size=60),
    head=st.sampled_from([b"", b"\xc1\x81", b"\xc1\x82", b"\xc1\x83", b"\xc1\x81\x01a"]),
)
def test_what_was_never_sealed_is_refused(name, data, head):
    with pytest.raises(DecodeError):
        LAYERS[name].open(head + data)


@given(data=st.binary(max_size=60), head=st.sampled_from([b"", b"\xc1\x83"]))
def test_damaged_compression_is_refused_and_the_rest_passes(data, head):
    try:
        opened = LAYERS["compression"].open(head + data)
    except DecodeError:
        assert (head + data).startswith(b"\xc1\x83")
    else:
        assert opened == head + data or (head + data).startswith(b"\xc1\x83")


def test_truncation_and_trailing_garbage_are_refused():
    for name in (*TIGHT, "compression"):
        sealed = LAYERS[name].seal(b"x" * 500)
        for wrong in (sealed[:-1], sealed + b"x"):
            with pytest.raises(DecodeError):
                LAYERS[name].open(wrong)


@pytest.mark.parametrize("kind", [Signing, Encryption])
def test_keys_rotate(kind):
    old, both_old, both_new, new = (
        kind(keys) for keys in ({"1": K1}, {"2": K2, "1": K1}, {"1": K1, "2": K2}, {"2": K2})
    )
    for sealed_by in (old, both_old, both_new):
        for opened_by in (both_old, both_new):
            assert opened_by.open(sealed_by.seal(b"x")) == b"x"
    assert old.open(both_old.seal(b"x")) == b"x"
    assert new.open(both_new.seal(b"x")) == b"x"
    with pytest.raises(DecodeError, match="'1', which is not known"):
        new.open(old.seal(b"x"))
    with pytest.raises(DecodeError):
        kind({"1": K2}).open(old.seal(b"x"))


def test_one_payload_is_encrypted_differently_each_time():
    assert LAYERS["encryption"].seal(b"x") != LAYERS["encryption"].seal(b"x")


def test_signing_can_be_introduced_step_by_step():
    lenient = Signing({"a": K1}, accept_unsigned=True)
    assert lenient.open(b"plain") == b"plain"
    assert lenient.open(LAYERS["signing"].seal(b"plain")) == b"plain"
    with pytest.raises(DecodeError):
        lenient.open(LAYERS["signing"].seal(b"plain") + b"x")
    with pytest.raises(DecodeError, match="not signed"):
        LAYERS["signing"].open(b"plain")


def test_small_and_incompressible_payloads_are_left_alone():
    assert Compression(10).seal(b"x" * 9) == b"x" * 9
    packed = zlib.compress(bytes(1000))
    assert packed == Compression(1).seal(packed)
    assert len(Compression(10).seal(bytes(10_000))) < 100


def test_a_bomb_is_not_opened():
    bomb = Compression(10).seal(bytes(1 << 20))
    with pytest.raises(DecodeError, match="more than 1000 bytes"):
        Compression(most=1000).open(bomb)


def test_a_limit_names_both_sizes():
    with pytest.raises(PayloadTooLargeError, match="101 bytes, the limit is 100") as caught:
        SizeLimit(100).seal(b"x" * 101)
    assert isinstance(caught.value, EncodeError)
    with pytest.raises(PayloadTooLargeError, match="11 bytes, the limit is 10"):
        Compression(most=10).seal(b"x" * 11)


@pytest.mark.parametrize("kind", [Signing, Encryption])
@pytest.mark.parametrize(
    "keys", [{}, {"": K1}, {"a" * 256: K1}, {"a": "text" * 8}, {"a": b"secretshort"}, {1: K1}]
)
def test_wrong_keys_are_refused_without_being_shown(kind, keys):
    with pytest.raises(ConfigurationError) as caught:
        kind(keys)
    assert "secretshort" not in str(caught.value)
    assert "text" * 8 not in str(caught.value)


def test_wrong_numbers_are_refused():
    for wrong in (lambda: SizeLimit(0), lambda: Compression(level=10)):
        with pytest.raises(InvalidArgumentError):
            wrong()


def test_encryption_names_the_extra_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ConfigurationError, match=r"taskq\[crypto\]"):
        Encryption({"a": K1})
