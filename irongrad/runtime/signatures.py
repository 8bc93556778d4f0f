"""Signatures of artifacts: Ed25519 (RFC 8032) over the manifest's file, which holds the hash of every other file.

Needs the package `cryptography` (the extra `sign`), and only where something is signed or a signature is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from irongrad.runtime.arguments import as_path
from irongrad.runtime.atomic_files import atomic_write
from irongrad.runtime.errors import ArtifactError, UserError
from irongrad.runtime.manifest import MANIFEST, SIGNATURE, Manifest

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

# Public keys: the path of a PEM file, or several.
Trusted: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"

# What is signed begins with this text, so that no signature of anything else is one of an artifact.
_CONTEXT = b"irongrad artifact 1\0"


def new_key(path: Path) -> Path:
    """Write a new private key to `path`, readable by the owner alone, and its public key beside it; return that path.

    Raises:
        UserError: `path` exists already.
    """
    ed25519, serialization = _library()
    public = path.with_name(f"{path.name}.pub")
    if public.exists():
        raise UserError(f"{public} exists already; a key is never replaced")
    key = ed25519.Ed25519PrivateKey.generate()
    encoding, text = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private = key.private_bytes(encoding, text, serialization.NoEncryption())
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UserError(f"{path} exists already; a key is never replaced") from None
    with os.fdopen(handle, "wb") as file:
        file.write(private)
    atomic_write(public, key.public_key().public_bytes(encoding, serialization.PublicFormat.SubjectPublicKeyInfo))
    return public


def sign(directory: Path, manifest: Manifest, key: Path) -> Path:
    """Sign the artifact in `directory` with the private key in the file `key`; return the path of the signature.

    Raises:
        UserError: the file holds no private Ed25519 key.
    """
    ed25519, serialization = _library()
    try:
        private = serialization.load_pem_private_key(_contents(key), None)
    except (TypeError, ValueError) as error:
        raise UserError(f"{key} is no private key in PEM: {error}") from None
    if not isinstance(private, ed25519.Ed25519PrivateKey):
        raise UserError(f"{key} holds a key of another kind; make one with: irongrad sign --new-key FILE")
    path = directory / SIGNATURE
    atomic_write(path, private.sign(_signed(manifest)).hex().encode() + b"\n")
    return path


def check_signature(manifest: Manifest, directory: Path, trusted: Trusted) -> None:
    """Check that one of the keys `trusted` signed the artifact.

    Raises:
        ArtifactError: none of them did.
        UserError: a file holds no public Ed25519 key.
    """
    keys = list(trusted) if isinstance(trusted, Iterable) and not isinstance(trusted, str) else [trusted]
    if not keys:
        raise UserError("trusted names no key, so no artifact can be signed by one of them")
    public = [_public(as_path(key, "a key in trusted")) for key in keys]
    path = directory / SIGNATURE
    try:
        signature = bytes.fromhex(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        raise ArtifactError(f"{directory} is not signed, and a signature by {_names(keys)} is asked for") from None
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} is damaged: {error}") from None
    if not any(_is_by(key, signature, manifest) for key in public):
        raise ArtifactError(f"{path} is no signature of {directory / MANIFEST} by {_names(keys)}")


def _is_by(key: Ed25519PublicKey, signature: bytes, manifest: Manifest) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, _signed(manifest))
    except InvalidSignature:
        return False
    return True


def _signed(manifest: Manifest) -> bytes:
    return _CONTEXT + manifest.digest.encode()


def _public(path: Path) -> Ed25519PublicKey:
    ed25519, serialization = _library()
    try:
        key = serialization.load_pem_public_key(_contents(path))
    except ValueError as error:
        raise UserError(f"{path} is no public key in PEM: {error}") from None
    known: type[Ed25519PublicKey] = ed25519.Ed25519PublicKey
    if not isinstance(key, known):
        raise UserError(f"{path} holds a key of another kind; only Ed25519 is known")
    return key


def _contents(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"the key {path} is no file")
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"the key {path} cannot be read: {error.strerror}") from None


def _names(keys: Iterable[Any]) -> str:
    return ", ".join(map(str, keys))


def _library() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ModuleNotFoundError:
        raise UserError("signatures need the package cryptography: pip install 'irongrad[sign]'") from None
    return ed25519, serialization
