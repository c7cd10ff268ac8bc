"""`TransferClient`: what a role asks of other nodes."""

import contextlib

import numpy as np
from numpy.typing import NDArray

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import BadArgument, JobFailed
from omni_flow.data.kv_client import Keys
from omni_flow.data.messages import L2, JobAdd, PoolName
from omni_flow.data.protocol import MAX_BATCH, Op, keys_array
from omni_flow.data.transfer import messages as m
from omni_flow.data.transfer.directory import divide

Mask = NDArray[np.bool_]


class TransferClient:
    """Transfer calls of one client of the memory manager; like it, for one thread at a time.

    Nodes are named as in their configuration. Nothing pairs them: prefill to decode, AR to DiT and turn to turn are the
    same calls.
    """

    def __init__(self, client: MemoryManagerClient) -> None:
        self.client = client

    def nodes(self) -> tuple[str, ...]:
        """The other nodes that live. Raises: NoMover when this node has no transfer process."""
        return self._locate(self.client.welcome.pools[0].name, np.empty((0, 32), np.uint8))[0]

    def locate(self, pool: str, keys: Keys) -> dict[str, Mask]:
        """Node → per key whether it probably holds it; a hint, the holder itself decides."""
        return self._locate(pool, keys_array(keys))[1]

    def pull(self, pool: str, keys: Keys, from_: str | None = None, *, timeout_s: float = 30.0) -> Mask:
        """Bring objects of other nodes into L2 here: from one node, or (None) from whoever the directory names.

        Returns: per key whether it is here now; a key that was here before counts. A node that the directory named and
        that does not deliver in time counts as one that does not hold the key. Raises: JobFailed when the node `from_`
        does not deliver in time, NoMover, BadArgument, PoolFull.
        """
        wanted = keys_array(keys)
        if len(wanted) > MAX_BATCH:
            raise BadArgument(f"{len(wanted)} keys at once", f"at most {MAX_BATCH}")
        here: Mask = self.client.probe(pool, wanted) != 0
        missing = np.flatnonzero(~here)
        if not len(missing):
            return here
        if from_ is not None:
            here[missing] = self._job("pull", pool, wanted[missing], from_, timeout_s)
            return here
        for node, share in divide(self.locate(pool, wanted[missing]), len(missing)).items():
            with contextlib.suppress(JobFailed):
                here[missing[share]] = self._job("pull", pool, wanted[missing[share]], node, timeout_s)
        return here

    def push(self, pool: str, keys: Keys, to: str, *, timeout_s: float = 30.0) -> Mask:
        """Have another node pull objects from here. Returns: per key whether it is there now. Raises: as `pull`."""
        return self._job("push", pool, keys_array(keys), to, timeout_s)

    def _job(self, kind: str, pool: str, keys: NDArray[np.uint8], node: str, timeout_s: float) -> Mask:
        body = JobAdd(kind, pool, int(timeout_s * 1000), node, L2)
        reply = self.client.call(Op.JOB_ADD, body, (keys,), timeout=timeout_s + self.client.timeout)
        ok: Mask = reply.column(0, "|u1", len(keys)) != 0
        return ok

    def _locate(self, pool: str, keys: NDArray[np.uint8]) -> tuple[tuple[str, ...], dict[str, Mask]]:
        reply = self.client.call(m.DIR_LOCATE, PoolName(pool), (keys,))
        answer = reply.body(m.DirAnswer)
        width = -(-len(keys) // 8)
        bits = reply.column(0, "|u1", width * len(answer.masks)).reshape(len(answer.masks), width)
        masks = {
            node: np.unpackbits(row, count=len(keys)).astype(np.bool_)
            for node, row in zip(answer.masks, bits, strict=True)
        }
        return answer.nodes, masks
