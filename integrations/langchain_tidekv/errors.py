"""TideKV's errors as LangChain's: each class below can be caught by either name.

langchain_core.exceptions.ModelError
├── TideKVModelError                 weights, memory, use after close()
│   ├── TideKVContextOverflowError   also ContextOverflowError of both packages
│   ├── TideKVInvalidRequestError    also ModelInvalidRequestError and ValueError
│   ├── TideKVModelNotFoundError     also ModelNotFoundError of both packages
│   └── TideKVTimeoutError           also ModelTimeoutError and TimeoutError
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_core import exceptions as lc

from tidekv_llm import errors
from tidekv_llm.service import RequestTimeoutError


class TideKVModelError(lc.ModelError, errors.TideKVError):
    """The model cannot be had, does not fit or was closed."""


class TideKVContextOverflowError(TideKVModelError, lc.ContextOverflowError, errors.ContextOverflowError):
    """The input does not fit the context window; nothing was run.

    Attributes:
        prompt_tokens: tokens the prompt would take, the answer's included.
        limit: tokens the model can take.
    """


class TideKVInvalidRequestError(TideKVModelError, lc.ModelInvalidRequestError, errors.ConfigError):
    """An option, a prompt or a document that cannot work."""


class TideKVModelNotFoundError(TideKVModelError, lc.ModelNotFoundError, errors.ModelNotFoundError):
    """No model by that name."""


class TideKVTimeoutError(TideKVModelError, lc.ModelTimeoutError, RequestTimeoutError):
    """The request took longer than ``timeout``."""


_SAME = (
    (RequestTimeoutError, TideKVTimeoutError),
    (errors.ConfigError, TideKVInvalidRequestError),
    (errors.DocumentError, TideKVInvalidRequestError),
    (errors.ModelNotFoundError, TideKVModelNotFoundError),
)


@contextmanager
def langchain_errors() -> Iterator[None]:
    """Raise TideKV's errors as LangChain's; a cancelled request stays :class:`tidekv_llm.errors.Cancelled`."""
    try:
        yield
    except (errors.Cancelled, TideKVModelError):
        raise
    except errors.TideKVError as error:
        raise translate(error) from error


def translate(error: errors.TideKVError) -> TideKVModelError:
    """The LangChain error of the same meaning and message."""
    if isinstance(error, errors.ContextOverflowError):
        return TideKVContextOverflowError(str(error), prompt_tokens=error.prompt_tokens, limit=error.limit)
    kind = next((ours for theirs, ours in _SAME if isinstance(error, theirs)), TideKVModelError)
    return kind(str(error))
