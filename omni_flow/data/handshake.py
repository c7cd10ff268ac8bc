"""What client and server compare when they meet: that both would name the same page the same."""

from __future__ import annotations

import functools

import numpy as np

from omni_flow.data.identity import MediaDigest, MediaSpan, Namespace, page_hashes


@functools.cache
def naming_vector() -> bytes:
    """Hash of the last page of a fixed sequence with a fixed media span in a fixed namespace."""
    namespace = Namespace(
        model="vector",
        revision="1",
        weight_version=7,
        dtype="bfloat16",
        page_size=4,
        attention_layout="mha",
        tenant_salt=b"salt",
    )
    span = MediaSpan(3, 4, MediaDigest(bytes(range(32))))
    return page_hashes(namespace.root(), np.arange(12, dtype=np.uint32), 4, [span])[-1]
