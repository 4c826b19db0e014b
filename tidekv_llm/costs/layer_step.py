"""The tensors of one decoder layer's step, and the workspace of one layer end.

The activation term is not a fitted ``c * C * d_ff``: it is the list of tensors that a dense decoder layer of
transformers holds together, which gives c = 3 for the gated MLP and says what else lives beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidekv_llm import attention
from tidekv_llm.costs.plan import FLOAT32, INT64, Plan

# transformers' RMSNorm holds two float32 tensors together: the upcast input and its square, then its scaled copy.
NORM_COPIES = 2


@dataclass(frozen=True, slots=True)
class LayerStep:
    """Tensors of one decoder layer over C tokens, as transformers' dense gated layers hold them.

    Attributes:
        plan: dimensions.
        tokens: C.
        mlp_tokens: tokens the MLP sees at a time; C, or less when it is split.
        history: positions the attention looks back on.
        own_input: the layer's input is a tensor of its own (chunk-major), not a slot of the bridge.
        repeats_kv: keys and values are repeated for every query head (transformers' SDPA on a CPU).
        window_only: only keys and values are computed (the last layer before the observation window).
        heads_at_once: KV heads that are attended to together, 0 for all.
        scores: the attention also gives the log-sum-exp of the observation window.
    """

    plan: Plan
    tokens: int
    mlp_tokens: int
    history: int
    own_input: bool = False
    repeats_kv: bool = False
    window_only: bool = False
    heads_at_once: int = 0
    scores: bool = False

    def activation_bytes(self) -> int:
        """The largest of the moments in one layer's forward."""
        if self.window_only:
            return self._resident + max(self._norm(), self._rotary())
        return self._resident + max(self._norm(), self._rotary(), self._attend(), self._second_norm(), self._mlp())

    @property
    def _width(self) -> tuple[int, int, int]:
        """Bytes per token of hidden states, queries, and keys."""
        shape = self.plan.shape
        b = shape.activation_bytes
        return (
            shape.hidden_size * b,
            shape.num_heads * shape.head_dim * b,
            shape.num_kv_heads * shape.head_dim * b,
        )

    def _rows(self, per_token: int, tokens: int | None = None) -> int:
        return self.plan.batch * (self.tokens if tokens is None else tokens) * per_token

    @property
    def _resident(self) -> int:
        """Rotary tables and positions, and the input if it is nobody else's."""
        shape = self.plan.shape
        tables = 2 * self.tokens * shape.head_dim * shape.activation_bytes + self.tokens * INT64
        return tables + (self._rows(self._width[0]) if self.own_input or self._converts else 0)

    @property
    def _converts(self) -> bool:
        """Whether the layer computes in another dtype than hidden states, keys and values are stored in."""
        return self.plan.shape.activation_bytes != self.plan.shape.element_bytes

    def _norm(self) -> int:
        return self._rows(NORM_COPIES * FLOAT32 * self.plan.shape.hidden_size)

    def _rotary(self) -> int:
        """Normed input, q, k, v, and q * cos, the rotated half, its product with sin, then the same for k."""
        hidden, query, key = self._width
        return self._rows(hidden + query + 2 * key + max(3 * query, query + 3 * key))

    def _attend(self) -> int:
        """Normed input, q, the attention's output (in scratch on a CPU) and its projection.

        A layer that converts has q as it is stored while it attends, and then its output in both dtypes.
        """
        hidden, query, _ = self._width
        shape = self.plan.shape
        # One output for all head groups, beside the scratch that each of them uses.
        in_scratch = self.plan.scratch and not self.repeats_kv and not self.heads_at_once
        output = 0 if in_scratch else query + FLOAT32 * shape.num_heads
        repeated = 2 * query if self.repeats_kv else 0
        own = self._merged() if self.plan.merged and not self.repeats_kv else self._window_lse()
        stored = shape.num_heads * shape.head_dim * shape.element_bytes if self._converts else 0
        output, after = (min(output, stored), query) if self._converts else (output, 0)
        attending = max(self._rows(repeated), own) + self._rows(stored)
        return self._rows(hidden + query + output) + max(self._rows(hidden + after), attending)

    def _merged(self) -> int:
        """The merge backend's output of the history, or of one head per group, and float32 log-sum-exps."""
        shape = self.plan.shape
        heads, sums = (
            (self._heads, 3) if self._has_history else (self._heads * shape.num_kv_heads // shape.num_heads, 2)
        )
        return self._rows(heads * shape.head_dim * shape.element_bytes + sums * self._heads * FLOAT32)

    @property
    def _has_history(self) -> bool:
        return self.history > self.tokens

    @property
    def _heads(self) -> int:
        """Query heads that are attended to together."""
        shape = self.plan.shape
        return self.heads_at_once * (shape.num_heads // shape.num_kv_heads) or shape.num_heads

    def _window_lse(self) -> int:
        """The tiled backend's float32 copy of the observation window's scores, one KV head's group at a time."""
        shape = self.plan.shape
        if not self.scores or not self.plan.scratch or shape.element_bytes == FLOAT32:
            return 0
        rows = min(self.plan.config.window_size, self.tokens, self._tile_rows())
        return shape.num_heads // shape.num_kv_heads * rows * self.history * FLOAT32

    def _tile_rows(self) -> int:
        """Queries per tile."""
        shape = self.plan.shape
        group = shape.num_heads // shape.num_kv_heads
        backend = attention.TiledAttention(attention.TILE_BYTES)
        return backend.tile_queries(group, self.history, self.tokens, shape.element_bytes)

    def _second_norm(self) -> int:
        return self._rows(self._width[0]) + self._norm()

    def _mlp(self) -> int:
        """Residual and normed input; activated gate, up and their product (c = 3 in Eq. 9)."""
        hidden, shape = self._width[0], self.plan.shape
        inner = self._rows(3 * shape.intermediate_size * shape.activation_bytes, self.mlp_tokens)
        output = hidden if self.mlp_tokens < self.tokens else 0
        return self._rows(2 * hidden + output) + inner

    def scratch_bytes(self) -> int:
        """A CPU backend's buffers: its output, and the folded queries (merge) or what one tile takes (tiled)."""
        if not self.plan.scratch or self.repeats_kv:
            return 0
        output = self._rows(self._heads * self.plan.shape.head_dim * self.plan.shape.element_bytes)
        if not self.plan.merged:
            return output + self._tile_bytes()
        # Sliding-window layers are computed on tiles.
        folded = output if self._has_history else 0
        return output + (max(folded, self._tile_bytes()) if any(self.plan.shape.windows) else folded)

    def _tile_bytes(self) -> int:
        """One tile of scores, and the tile's queries and output."""
        shape = self.plan.shape
        rows = shape.num_heads // shape.num_kv_heads * self._tile_rows()
        scores = max(attention.TILE_BYTES, rows * self.history * shape.element_bytes)
        return scores + 2 * rows * shape.head_dim * shape.element_bytes


def scoring_bytes(plan: Plan, block_size: int, kept: int, length: int) -> int:
    """Workspace of Algorithm 2, O(Hq * (W * b_s + K)): a block of float32 logits, or the streaming top-k."""
    if kept >= length:
        return plan.batch * plan.shape.num_kv_heads * kept * INT64
    shape, config = plan.shape, plan.config
    block = min(block_size, length)
    copies = FLOAT32 + (shape.element_bytes if shape.element_bytes != FLOAT32 else 0)
    logits = shape.num_heads * min(config.window_size, length) * block * copies
    # Packed keys of best and block together, top-k values and indices, and the block's pooled scores with indices.
    top_k = shape.num_kv_heads * (3 * INT64 * (kept + block) + block * (INT64 + 2 * FLOAT32))
    return plan.batch * max(logits + shape.num_kv_heads * kept * INT64, top_k)
