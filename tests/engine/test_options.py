"""Options of a generation: one check for every call, a typed error for everything that cannot work."""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import numpy as np
import pytest

from tests.sessions_for_tests import document, engine
from tidekv_llm import TideKV
from tidekv_llm.engine import Session
from tidekv_llm.errors import ConfigError
from tidekv_llm.options import GenerationOptions, settle

BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": 0}, "max_new_tokens=0 must be"),
    ({"max_new_tokens": "3"}, "max_new_tokens='3' must be"),
    ({"max_new_tokens": True}, "max_new_tokens=True must be"),
    ({"temperature": "hot"}, "temperature='hot' must be a number"),
    ({"temperature": None}, "temperature=None must be a number"),
    ({"temperature": math.nan}, "temperature=nan"),
    ({"temperature": math.inf}, "temperature=inf"),
    ({"temperature": -0.1}, "temperature=-0.1"),
    ({"top_p": "0.9"}, "top_p='0.9' must be a number"),
    ({"top_p": 1.1}, "top_p=1.1"),
    ({"top_p": [0.9]}, "top_p="),
    ({"top_k": 2.5}, "top_k=2.5 must be a whole number"),
    ({"top_k": "5"}, "top_k='5' must be a whole number"),
    ({"top_k": -1}, "top_k=-1"),
    ({"seed": 2**64}, "seed=18446744073709551616 must be"),
    ({"seed": -(2**63) - 1}, "seed=-9223372036854775809 must be"),
    ({"seed": "a"}, "seed='a' must be"),
    ({"seed": 1.5}, "seed=1.5 must be"),
    ({"seed": True}, "seed=True must be"),
    ({"stop": [3]}, r"stop=\[3\] must be a string or a list of strings"),
    ({"stop": None}, "stop=None must be a string or a list of strings"),
    ({"stop": 3}, "stop=3 must be"),
    ({"stop": ["a", None]}, "stop="),
    ({"stop": b"a"}, "stop=b'a' must be"),
    ({"stop": [""]}, "a stop string is empty"),
    ({"stop": ""}, "a stop string is empty"),
    ({"stop": ["a", "b\ud83d"]}, r"stop string 'b\\ud83d' holds half of a character"),
    ({"max_tokens": 3}, "unknown option 'max_tokens'; the options are max_new_tokens, temperature"),
    ({"best_of": 2}, "unknown option 'best_of'"),
    ({"min_p": 1.1}, "min_p=1.1 must be from 0 to 1"),
    ({"min_p": "a"}, "min_p='a' must be a number"),
    ({"repetition_penalty": 0}, "repetition_penalty=0 must be"),
    ({"repetition_penalty": math.nan}, "repetition_penalty=nan must be"),
    ({"presence_penalty": 3}, "presence_penalty=3 must be from -2 to 2"),
    ({"frequency_penalty": None}, "frequency_penalty=None must be a number"),
    ({"logit_bias": [5]}, r"logit_bias=\[5\] must be a mapping"),
    ({"logit_bias": {"5": 1.0}}, "logit_bias has '5'; its keys must be token ids"),
    ({"logit_bias": {5: math.inf}}, r"logit_bias\[5\]=inf must be"),
    ({"grammar": "json"}, "grammar='json' must be a function"),
    ({"logprobs": 21}, "logprobs=21 must be a whole number from 0 to 20"),
    ({"logprobs": True}, "logprobs=True must be"),
]


@functools.cache
def shared() -> TideKV:
    return engine()


@functools.cache
def session() -> Session:
    return shared().open(document(200))


CALLS = {
    "ask": lambda options: shared().ask(document(200), "Why?", **options),
    "generate": lambda options: shared().generate("Why?", **options),
    "stream": lambda options: shared().stream("Why?", **options),
    "session ask": lambda options: session().ask("Why?", **options),
    "session stream": lambda options: session().stream("Why?", **options),
}


@pytest.mark.parametrize(("options", "message"), BAD, ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_what_cannot_work_is_named_at_every_call(call: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CALLS[call](options)


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 2**64 - 1, "temperature": 1.0},
        {"seed": -(2**63), "temperature": 1},
        {"seed": np.int64(3), "temperature": np.float32(0.5)},
        {"stop": "x"},
        {"stop": ("x", "yz")},
        {"top_k": np.int32(5), "top_p": np.float64(0.5), "temperature": 1.0},
    ],
    ids=str,
)
def test_what_can_work_does(options: Any) -> None:
    assert len(shared().generate("Why?", max_new_tokens=3, **options).token_ids) <= 3


def test_every_call_takes_the_same_options() -> None:
    for call in (TideKV.ask, TideKV.generate, TideKV.stream, Session.ask, Session.stream):
        assert inspect.signature(call).parameters["options"].annotation == "Unpack[GenerationOptions]"
    assert settle({}) == settle(GenerationOptions(max_new_tokens=256, temperature=0.0, top_p=1.0, top_k=0, stop=()))
