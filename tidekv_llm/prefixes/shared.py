"""Reuse between consecutive prompts that begin alike, without being told where the document ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tidekv_llm.prefixes.base import StoredPrefix
from tidekv_llm.prefixes.memory import MemoryPrefix
from tidekv_llm.prefixes.plan import PromptIdentity, ReusePlan, reusable
from tidekv_llm.prefixes.pool import PrefixPool

# A shorter common prefix is not worth a look: computing it takes milliseconds.
MINIMUM_TOKENS = 64


class SharedPrefix:
    """Keeps what prompts have in common.

    A prompt is cut where the common prefix ends, which a fresh prefill does not do: the two agree up to rounding
    (float32: 1e-5), where a session agrees to the bit. So chunk size and attention backend may differ as well.

    Args:
        limit_bytes: most bytes of host memory for stored prefixes; the least recently used go first.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.pool = PrefixPool(limit_bytes)

    def plan(
        self, token_ids: Sequence[int], boundaries: Sequence[int], window_size: int, identity: PromptIdentity
    ) -> ReusePlan:
        length = len(token_ids)
        kept = max((end for end in boundaries if end < length), default=length)
        plan = self._reading(token_ids, window_size, identity)
        # What was mostly there already is not stored a second time.
        if kept < MINIMUM_TOKENS or plan.reused >= min(kept, length // 2):
            return plan
        prefix, limit_bytes = token_ids[:kept], self.pool.limit_bytes
        writer = MemoryPrefix(identity.key(prefix), prefix, identity.num_layers, limit_bytes=limit_bytes)
        return replace(plan, writer=writer)

    def keep(self, store: StoredPrefix) -> None:
        self.pool.add(store)

    def drop(self, store: StoredPrefix) -> None:
        self.pool.remove(store.key)

    def _reading(self, token_ids: Sequence[int], window_size: int, identity: PromptIdentity) -> ReusePlan:
        found = self.pool.longest(identity.model, token_ids)
        if found is None:
            return ReusePlan()
        store, common = found
        reused = reusable(store, common, len(token_ids), window_size)
        return ReusePlan(store, reused) if reused >= MINIMUM_TOKENS else ReusePlan()
