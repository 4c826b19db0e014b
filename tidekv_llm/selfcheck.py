"""The checks when a model is loaded: our layer path against the model's own forward, plain steps against our layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tidekv_llm.config import PrefillConfig
from tidekv_llm.decode.loop import LayerByLayer
from tidekv_llm.decode.plain import PlainDecoder
from tidekv_llm.errors import TideKVError, UnsupportedModelError, reason
from tidekv_llm.hf import Decoder
from tidekv_llm.layers import NotPlainError
from tidekv_llm.memory import MemoryMeter
from tidekv_llm.prefill.result import Construction
from tidekv_llm.prefill.task import PrefillTask
from tidekv_llm.request import Request
from tidekv_llm.schedules import make_schedule

PROMPT_TOKENS = 40
CHUNK_SIZE = 16  # chunks of 16, 16 and 8: history, diagonal and a short tail are all met
# Relative L2 error of the logits that is still rounding. A forgotten multiplier or mask is far above it.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}


@torch.no_grad()
def check_decoder(decoder: Decoder) -> float:
    """Compare next-token logits of a fixed pseudo-random prompt; return their relative L2 error.

    Raises:
        UnsupportedModelError: the error is above rounding, or the layers cannot be called our way.
    """
    name = type(decoder.model).__name__
    token_ids = _random_ids(decoder, PROMPT_TOKENS)
    expected = decoder.own_logits(token_ids)
    try:
        # As the model computes itself: in another dtype a router may choose other experts, which is no fault.
        with _computing_as_stored(decoder):
            found = _our_logits(decoder, token_ids)
        if decoder.compute_dtype != decoder.dtype and not _our_logits(decoder, token_ids).isfinite().all():
            raise UnsupportedModelError(f"{name}: its layers cannot be computed in {decoder.compute_dtype}")
    except TideKVError:
        raise
    except Exception as error:
        raise UnsupportedModelError(f"{name}: its layers cannot be run one by one ({reason(error)})") from error
    error_size = float((found - expected).norm() / expected.norm().clamp_min(1e-30))
    if not error_size <= TOLERANCE.get(decoder.dtype, 0.1):  # a NaN must fail too
        if decoder.model.training:
            raise UnsupportedModelError(
                f"{name}: the self-check failed, and the model is in training mode, where dropout makes every "
                "forward another; call model.eval() first"
            )
        raise UnsupportedModelError(
            f"{name}: the self-check's logits differ from the model's own by {error_size:.3g} (relative L2); "
            "this family is unsupported, and answers would be wrong"
        )
    return error_size


@contextmanager
def _computing_as_stored(decoder: Decoder) -> Iterator[None]:
    """Layers compute in the dtype that they are stored in while the block runs."""
    before, decoder.compute_dtype = decoder.compute_dtype, decoder.dtype
    try:
        yield
    finally:
        decoder.compute_dtype = before


def plain_decoder(decoder: Decoder, alone: Callable[[], bool]) -> tuple[PlainDecoder | None, str]:
    """The quick way to decode with a model, and why there is none.

    It must give what the model's own layers give: for tokens one by one, and for several at once.
    """
    try:
        plain = PlainDecoder(decoder, alone)
        error_size = _plain_error(decoder, plain)
    except NotPlainError as error:
        return None, f"decoding takes the model's own layers, which is slower: {error}"
    if not error_size <= TOLERANCE.get(decoder.dtype, 0.1):
        return None, f"decoding takes the model's own layers, which is slower: plain ones differ by {error_size:.3g}"
    return plain, ""


@torch.no_grad()
def _plain_error(decoder: Decoder, plain: PlainDecoder) -> float:
    """Relative L2 error of plain steps' logits: three tokens, then the same three at once."""
    prompt, tokens = _random_ids(decoder, CHUNK_SIZE), _random_ids(decoder, 3)[0].tolist()
    cache, attention = _build(decoder, prompt, reserve=2 * len(tokens)).cache, decoder.attention("auto")
    own, row = LayerByLayer(decoder), plain.row(cache, attention)
    expected = own.step([own.row(cache, attention)], [tokens])
    found = []
    for steps in ([[token] for token in tokens], [tokens]):
        for layer in cache.layers:
            layer.rollback(len(tokens))
        found.append(torch.cat([plain.step([row], [step]) for step in steps]))
    return max(float((each - expected).norm() / expected.norm().clamp_min(1e-30)) for each in found)


def _random_ids(decoder: Decoder, count: int) -> Tensor:
    return torch.randint(decoder.vocab_size, (1, count), generator=torch.Generator().manual_seed(0))


def _our_logits(decoder: Decoder, token_ids: Tensor) -> Tensor:
    return decoder.logits(_build(decoder, token_ids).hidden[:, -1])[0]


def _build(decoder: Decoder, token_ids: Tensor, reserve: int = 0) -> Construction:
    config = PrefillConfig(chunk_size=CHUNK_SIZE)
    task = PrefillTask(config, Request(), MemoryMeter(decoder.device), reserve=reserve)
    return make_schedule("tidekv").build(decoder, token_ids, task)
