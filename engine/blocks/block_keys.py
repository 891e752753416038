"""The keys of blocks: one stands for the tokens of a full block and for everything before them.

A key is SHA-256 over the parent's key and the block's token ids, so it stands for every token up to
the block's end, and for the images at them (`with_images`). The chain starts at a root that stands
for everything else that KV depends on (`root_key`).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from penstock.engine.request import ImageInput


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as 32-bit words, for hashing and comparing."""
    return array("I", token_ids).tobytes()


def root_key(*parts: bytes) -> bytes:
    """The start of a chain. Parts are hashed with their lengths, so different parts cannot give
    the same bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def chain_root(
    cache_root: bytes, *, cache_salt: str, adapter: str | None, num_prompt_tokens: int
) -> bytes:
    """The start of a request's chain.

    Args:
        cache_root: everything that KV depends on and that no request can change.
        adapter: the digest of its adapter, not its name: another one may get the same name.
        num_prompt_tokens: 0 where KV does not depend on the prompt's length.
    """
    return root_key(
        cache_root,
        cache_salt.encode(),
        (adapter or "").encode(),
        num_prompt_tokens.to_bytes(8, "little"),
    )


def block_key(parent: bytes, tokens: bytes) -> bytes:
    """The key of a full block of packed tokens."""
    return hashlib.sha256(parent + tokens).digest()


def with_images(parent: bytes, images: Sequence[ImageInput], start: int, end: int) -> bytes:
    """A key that stands for the images at the positions from `start` to `end` too, and for where
    they begin; the same key if there are none."""
    parts = [
        f"{image.digest} {image.offset - start}".encode()
        for image in images
        if image.offset < end and image.offset + image.num_tokens > start
    ]
    return root_key(parent, *parts) if parts else parent
