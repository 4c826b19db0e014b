"""The check when a model is loaded: a short prompt through our layer path against the model's own forward."""

from __future__ import annotations

import torch
from torch import Tensor

from tidekv_llm.config import PrefillConfig
from tidekv_llm.errors import TideKVError, UnsupportedModelError, reason
from tidekv_llm.hf import Decoder
from tidekv_llm.memory import MemoryMeter
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
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(decoder.vocab_size, (1, PROMPT_TOKENS), generator=generator)
    expected = decoder.model(token_ids.to(decoder.device), use_cache=False).logits[0, -1].float()
    try:
        found = _our_logits(decoder, token_ids)
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


def _our_logits(decoder: Decoder, token_ids: Tensor) -> Tensor:
    task = PrefillTask(PrefillConfig(chunk_size=CHUNK_SIZE), Request(), MemoryMeter(decoder.device))
    built = make_schedule("tidekv").build(decoder, token_ids, task)
    return decoder.logits(built.hidden[:, -1])[0]
