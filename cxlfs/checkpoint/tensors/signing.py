"""Signatures with Ed25519, by the package ``cryptography`` (the extra ``sign``), which is imported
when a signature is made or checked.

Other modules say what is signed. Keys are PEM files, as ``openssl genpkey -algorithm ed25519``
makes them; a private key with a passphrase is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from cxlfs.errors import FrameworkMissingError, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

_KEY_BYTES_MAX = 1 << 16
_MAKE = "make one with: openssl genpkey -algorithm ed25519 -out KEY"
_WRITE = "write it with: openssl pkey -in KEY -pubout -out PUBLIC_KEY"

_Key = TypeVar("_Key")


def sign(data: bytes, key: Path) -> bytes:
    """Of 64 bytes. Raises FrameworkMissingError, UsageError (no such key), OSError."""
    signature: bytes = _private(key).sign(data)
    return signature


def is_signed(data: bytes, signature: bytes, public_key: Path) -> bool:
    """True if the owner of the key has signed it. Raises as :func:`sign`."""
    key = _public(public_key)
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415  an extra

    try:
        key.verify(signature, data)
    except InvalidSignature:
        return False
    return True


def _pem(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(_KEY_BYTES_MAX + 1)
    if len(data) > _KEY_BYTES_MAX:
        raise UsageError(f"{path} is no key: it is larger than 64 KiB", next_step=_MAKE)
    return data


def _private(path: Path) -> Ed25519PrivateKey:
    ed25519, pem = _library()
    kind: type[Ed25519PrivateKey] = ed25519.Ed25519PrivateKey
    return _key(path, lambda data: pem.load_pem_private_key(data, None), kind, "private", _MAKE)


def _public(path: Path) -> Ed25519PublicKey:
    ed25519, pem = _library()
    kind: type[Ed25519PublicKey] = ed25519.Ed25519PublicKey
    return _key(path, pem.load_pem_public_key, kind, "public", _WRITE)


def _key(
    path: Path, load: Callable[[bytes], object], kind: type[_Key], what: str, next_step: str
) -> _Key:
    from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415  an extra

    data = _pem(path)
    try:
        key = load(data)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{path} is no {what} key: {error}"[:300], next_step=next_step) from error
    if not isinstance(key, kind):
        raise UsageError(f"{path} is not a key of Ed25519", next_step=next_step)
    return key


def _library() -> tuple[ModuleType, ModuleType]:
    """The kinds of keys, and what reads them. Raises FrameworkMissingError."""
    try:
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415  an extra
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415  an extra
    except ImportError as error:
        raise FrameworkMissingError(
            "signatures need the package cryptography, which is not installed",
            next_step="pip install 'cxlfs[sign]', or: pip install cryptography",
        ) from error
    return ed25519, serialization
