"""What to predict for, and what a prediction is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tidekv_llm.cache.rows import GROUP
from tidekv_llm.config import PrefillConfig
from tidekv_llm.hardware import prefers_tiles
from tidekv_llm.shapes import ModelShape

FLOAT32 = 4
INT64 = 8
INT32 = 4

Components = dict[str, int]
Positions = Callable[[int], int]  # of a layer
COMPONENTS = (
    "weights",
    "ready_layer",
    "compressed_cache",
    "active_kv",
    "bridge",
    "activations",
    "temporary",
    "bookkeeping",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to predict for.

    Attributes:
        shape: the model.
        prompt_length: S.
        config: chunk size (a number here), budget, window, bridge.
        batch: B.
        device: ``"cuda"`` or ``"cpu"``; host memory counts on a CPU, scratch tiles are the CPU backend's.
        reserve: slots for decoded tokens.
    """

    shape: ModelShape
    prompt_length: int
    config: PrefillConfig
    batch: int = 1
    device: str = "cuda"
    reserve: int = 0

    @property
    def chunk_size(self) -> int:
        """C, at most the prompt."""
        return min(self.config.tokens_per_chunk, self.prompt_length)

    @property
    def scratch(self) -> bool:
        """Whether attention works in scratch buffers (CPU) or inside a fused kernel (CUDA)."""
        return self.device == "cpu"

    @property
    def merged(self) -> bool:
        """Whether a CPU attends with the fused kernel twice, else on tiles (:mod:`tidekv_llm.attention`)."""
        chosen = self.config.attention
        return self.scratch and (
            chosen == "merge" or (chosen == "auto" and not prefers_tiles(self.shape.element_bytes))
        )

    def kv_bytes(self, positions: int) -> int:
        """Keys and values of one layer: 2 * B * Hkv * positions * D * b."""
        return self.batch * self.shape.kv_bytes(positions)

    def kept(self, layer: int) -> int:
        """Positions that layer keeps: its window if it has one, else the budget."""
        window = self.shape.window(layer)
        return min(self.config.kept_tokens if window is None else window, self.prompt_length)

    def everything(self, layer: int) -> int:
        """Positions that layer keeps where nothing is evicted."""
        return self.prompt_length

    def hidden_bytes(self, tokens: int) -> int:
        """Hidden states: B * tokens * d_model * b."""
        return self.batch * tokens * self.shape.hidden_size * self.shape.element_bytes

    def apart(self, on_host: bool) -> bool:
        """Whether what is put on the host leaves the device; a CPU's host memory is its device memory."""
        return on_host and self.device != "cpu"

    def held(
        self, layers: int, positions: Positions, *, on_host: bool = False, position_size: int = INT32
    ) -> Components:
        """What stays once so many layers are stored: weights, caches, kept positions and evidence."""
        kept = self.batch * self.shape.num_kv_heads * position_size * sum(map(positions, range(layers)))
        return {
            "weights": self.shape.weight_bytes,
            "compressed_cache": 0 if self.apart(on_host) else self.caches(layers, positions),
            "bookkeeping": self.evidence_bytes + kept,
        }

    def caches(self, layers: int, positions: Positions) -> int:
        """Bytes of the first ``layers`` layers' storage."""
        return sum(self.stored_bytes(layer, positions(layer)) for layer in range(layers))

    def stored_bytes(self, layer: int, positions: int) -> int:
        """One layer's storage: all in full precision, or ``kv_bits`` but for the newest ``kv_residual``.

        Quantised, every ``GROUP`` numbers share a float32 scale and zero (:mod:`tidekv_llm.cache.rows`).
        """
        bits = self.config.kv_bits
        if bits >= 16 or self.shape.window(layer) is not None:
            return self.kv_bytes(positions + self.reserve)
        full = min(self.config.kv_residual, positions)
        numbers = 2 * self.batch * self.shape.num_kv_heads * self.shape.head_dim * (positions - full)
        return numbers * bits // 8 + numbers * 2 * FLOAT32 // GROUP + self.kv_bytes(full + self.reserve)

    @property
    def evidence_bytes(self) -> int:
        """Float32 evidence per prompt position, in host memory."""
        return self.prompt_length * FLOAT32 if self.device == "cpu" else 0


@dataclass(frozen=True, slots=True)
class Moments:
    """What a schedule holds: components at its critical moments, what stays, and what lies in host memory."""

    moments: tuple[Components, ...]
    steady: Components
    host_bytes: int = 0
