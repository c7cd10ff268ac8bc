"""A role with an engine: its pages lie in the deployment's KV pool, its sampling follows the graph's params."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, Final, Protocol

import msgspec

from omni_flow.compute.checkpoint import read_config
from omni_flow.compute.engine import EndEvent, Event, Request, TokenEvent, Tokens
from omni_flow.compute.errors import BadRequest, ComputeError, EngineDied, EngineFull, PromptTooLong
from omni_flow.compute.kv_layout import kv_layout
from omni_flow.compute.sampling import Sampling
from omni_flow.compute.sglang.config import EngineConfig
from omni_flow.compute.sglang.kernel import SGLangEngine
from omni_flow.compute.sglang.pages import LOT
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.session_leases import lease_name
from omni_flow.models.tokenizer import ChatMessage, Processor

log = logging.getLogger("omni_flow.models")

POOL: Final = "kv"
"""The pool of roles that name none."""
_PAUSE_S: Final = (1.0, 30.0)
"""Between tries to replace a dead engine: the first, and the longest; each is twice the one before."""


class Turn(Protocol):
    """What a role reads of an activation's context."""

    @property
    def session(self) -> str | None: ...
    @property
    def tenant(self) -> str: ...
    @property
    def params(self) -> SimpleNamespace: ...
    @property
    def seed(self) -> int: ...
    @property
    def retries(self) -> int: ...
    def prefix(self, pool: str, marks: Sequence[tuple[int, bytes]]) -> None: ...


class Memory(Protocol):
    """What a role reads of the memory manager's client."""

    @property
    def address(self) -> str: ...


class EngineRole:
    """One engine with one model, over the pool that the deployment makes for it (`kv_pools`).

    Roles with equal checkpoints, dtype and page size share their pages, and their weights. Without a memory manager the
    pages stay in the engine's process. An engine process that died is replaced at once; until then the role says that
    it can't serve. What the dead one had left in the pool is found again. A request of which no token had come is asked
    once more of the new engine; one whose interface declares `retries` as often as that says, even in the middle of its
    answer. All others fail with `EngineDied`.

    Args:
        model: folder of the checkpoint in its official layout.
        engine: further fields of `EngineConfig`; `pool` names the pool.
        sampling: fields of `Sampling`; a param of the graph that is called as a field goes before it.
        template: chat template where the tokenizer has none.
        cache_tokens: tokens of KV that the pool keeps for each replica beyond what its engine may hold at once.
        l2_tokens: tokens of KV for which the pool has room in CPU memory (L2) for each replica. What L1 has no room for
            goes down there, and comes back when a prompt needs it; with `Memory.ssd` it goes on to a disk.
    """

    def __init__(
        self,
        model: str,
        *,
        engine: dict[str, Any] | None = None,
        sampling: dict[str, Any] | None = None,
        template: str | None = None,
        cache_tokens: int = 0,
        l2_tokens: int = 0,
    ) -> None:
        self._config = EngineConfig(model=model, **(engine or {}))
        self._sampling = sampling or {}
        Sampling(**self._sampling)
        self._template = template
        self.cache_tokens = cache_tokens
        self.l2_tokens = l2_tokens
        self.engine = SGLangEngine(self._config)
        self._replacing = asyncio.Lock()
        self._caring: asyncio.Task[None] | None = None
        self._counters: Counter[str] = Counter()
        self._processor: Processor | None = None

    @classmethod
    def kv_pools(
        cls,
        model: str,
        *,
        engine: dict[str, Any] | None = None,
        cache_tokens: int = 0,
        l2_tokens: int = 0,
        **more: Any,
    ) -> tuple[PoolSpec, ...]:
        """The pool that one replica needs: its engine's quota, a lot more for each end of it, the cache, and L2.

        Raises:
            BadCheckpoint: the folder has no config.json, or not that of a language model.
        """
        config = EngineConfig(model=model, **(engine or {}))
        layout = kv_layout(read_config(model))
        on_gpu = config.device == "cuda"
        return (
            PoolSpec(
                name=config.pool or POOL,
                page_bytes=layout.page_bytes(config.page_size, config.dtype),
                l1_pages=config.max_tokens // config.page_size + 2 * LOT + -(-cache_tokens // config.page_size),
                l2_pages=-(-l2_tokens // config.page_size),
                padding=1,
                l1_device=0 if on_gpu else -1,
                planes=layout.planes if on_gpu else 1,
            ),
        )

    @property
    def processor(self) -> Processor:
        """The checkpoint's tokenizer. Raises RuntimeError: the role is not set up."""
        if self._processor is None:
            raise RuntimeError(f"{type(self).__name__} has no model: call setup() first")
        return self._processor

    async def setup(self, data: Memory | None = None) -> None:
        """Start the engine and read the tokenizer.

        Raises:
            ComputeError: what is missing or wrong.
        """
        self._processor = Processor(self._config.model, self._template)
        if data is not None:
            pool = self._config.pool or POOL
            self._config = msgspec.structs.replace(self._config, manager=data.address, pool=pool)
            self.engine = SGLangEngine(self._config)
        await self.engine.start()
        config = self._config
        log.info("the engine of %s computes on %s in %s", config.model, config.device, config.dtype)
        self._caring = asyncio.create_task(self._replace_when_dead())

    async def warm_up(self) -> None:
        """Compute a prompt and two tokens."""
        prompt = self.processor.chat([{"role": "user", "content": "Hello!"}])
        async for _ in self.engine.generate(Request(spans=[prompt], sampling=Sampling(max_tokens=2))):
            pass

    async def close(self) -> None:
        """End the engine."""
        if self._caring is not None:
            self._caring.cancel()
            await asyncio.wait((self._caring,))
        await self.engine.close()

    def ails(self) -> str:
        """Why the role can't serve for now: what its engine died of. Empty while that lives."""
        failure = self.engine.failure
        return "" if failure is None else str(failure)

    def sampling(self, turn: Turn) -> Sampling:
        """How the tokens of an activation are chosen: its params, then the role's init; the activation's seed.

        Raises:
            BadRequest: a param is out of range or of the wrong type.
        """
        given = vars(turn.params)
        named = {name: given[name] for name in Sampling.__struct_fields__ if given.get(name) is not None}
        try:
            return msgspec.convert({"seed": turn.seed, **self._sampling, **named}, Sampling, str_keys=True)
        except msgspec.ValidationError as wrong:
            raise BadRequest(f"a param of sampling is wrong: {wrong}", "see omni_flow.compute.sampling") from wrong

    def prompt(self, question: str) -> Tokens:
        """The prompt for the answer to a question without history. Raises PromptTooLong."""
        self.check_length([question])
        asked: ChatMessage = {"role": "user", "content": question}
        return self.processor.chat([asked])

    def check_length(self, texts: Iterable[str]) -> None:
        """Refuse what is too long whatever its tokens are: making millions of them would hold up all other requests.

        Raises:
            PromptTooLong: with numbers.
        """
        least, most = sum(map(self.processor.least, texts)), self.engine.ready.max_prompt
        if least > most:
            raise PromptTooLong(
                f"the prompt has {least} tokens or more; model and pool take {most}",
                "shorten it, or raise context or max_tokens",
            )

    async def tokens(self, turn: Turn, prompt: Tokens, sampling: Sampling) -> AsyncGenerator[int | EndEvent, None]:
        """As `events`, of a token only its id."""
        async with aclosing(self.events(turn, prompt, sampling)) as events:
            async for event in events:
                yield event.token if isinstance(event, TokenEvent) else event

    async def events(self, turn: Turn, prompt: Tokens, sampling: Sampling) -> AsyncGenerator[Event, None]:
        """The tokens behind a prompt, then how it ended. Closing ends the computation.

        Raises:
            PromptTooLong: it does not fit model or pool.
            EngineFull: too many requests wait for the engine.
            EngineDied: the engine's process ended oftener than `turn.retries`, or than once before the first token; or
                the next one chose another token than had been given.
        """
        session = "" if turn.session is None else lease_name(turn.session, turn.tenant)
        request = Request(spans=[prompt], sampling=sampling, tenant=turn.tenant.encode(), session=session)
        deaths, given = 0, list[int]()
        while True:
            engine = await self._living()
            again = deque(given)
            try:
                async with aclosing(engine.generate(request)) as events:
                    async for event in events:
                        token = event.token if isinstance(event, TokenEvent) else None
                        if again:
                            if again.popleft() != token:
                                break
                            continue
                        if isinstance(event, EndEvent):
                            self._ended(turn, event)
                        else:
                            given.append(event.token)
                        yield event
                    else:
                        return
            except EngineDied:
                deaths += 1
                if deaths > (turn.retries if given else max(turn.retries, 1)):
                    raise
                await engine.ended()
                continue
            except EngineFull:
                if not given:
                    raise
                await asyncio.sleep(_PAUSE_S[0])  # it had its turn
                continue
            raise EngineDied(f"the engine ended, and of {len(given)} tokens the next one chose others", "ask again")

    def _ended(self, turn: Turn, end: EndEvent) -> None:
        self._counters["prompt_tokens"] += end.prompt_tokens
        self._counters["generated_tokens"] += end.tokens
        for tier, tokens in zip(("l1", "l2", "l3"), end.hits, strict=True):
            self._counters[f"kv_hit_tokens/{tier}"] += tokens
        if end.marks:
            turn.prefix(self._config.pool, end.marks)

    def counters(self) -> Mapping[str, int]:
        """Tokens of prompts, those found in each tier, and tokens made, of requests that came to their end."""
        return self._counters

    async def end_session(self, session: str, tenant: str) -> None:
        """A session is over: its KV is dropped."""
        await self.engine.end_session(lease_name(session, tenant))

    async def _living(self) -> SGLangEngine:
        """The engine; a new one where it has died. Raises ComputeError if that does not start."""
        async with self._replacing:
            if self.engine.failure is not None:
                await self.engine.close()
                fresh = SGLangEngine(self._config)
                await fresh.start()
                self.engine = fresh
            return self.engine

    async def _replace_when_dead(self) -> None:
        pause, longest = _PAUSE_S
        while True:
            await self.engine.ended()
            try:
                await self._living()
                pause = _PAUSE_S[0]
            except ComputeError as error:
                log.error("a dead engine could not be replaced, and is tried again in %g s: %s", pause, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, longest)
