"""Every error a user can meet, one tree, each one line long with the value and the remedy.

TideKVError
├── ConfigError (ValueError)          a bad option; the command line exits with 2
│   └── BudgetError                   a KV budget that cannot be met
├── ContextOverflowError (ValueError) the prompt is longer than the window
├── DocumentError                     a document that cannot be read
│   ├── DocumentNotFoundError
│   ├── DocumentTimeoutError          reading takes longer than it may
│   ├── EncryptedDocumentError        needs a password, or the password is wrong
│   └── NoTextError                   nothing a language model could read (a scan)
├── ModelError                        weights that cannot be had
│   ├── ModelNotFoundError
│   ├── ModelDownloadError
│   ├── UnsafeWeightsError            pickle weights or remote code
│   └── UnsupportedModelError         a family whose layers we would compute wrongly
├── SelectorError                     a selector returned something unusable
├── CacheError                        a stored cache that cannot be used
├── MemoryLimitError                  the planner predicts more than there is
├── BusyError                         too many wait already, or something else must end first
├── Cancelled                         the caller asked to stop
└── ClosedError                       use after close()
"""

from __future__ import annotations


class TideKVError(Exception):
    """Root of the tree: ``except TideKVError`` catches all that this package raises on purpose."""


class ConfigError(TideKVError, ValueError):
    """An option has a value that cannot work."""


class BudgetError(ConfigError):
    """The KV budget is below what must be kept; the message names the smallest feasible one."""


class ContextOverflowError(TideKVError, ValueError):
    """The prompt does not fit the context window.

    Attributes:
        prompt_tokens: tokens the prompt would take, the answer reserve included.
        limit: tokens the model can take.
    """

    def __init__(self, message: str, *, prompt_tokens: int, limit: int) -> None:
        super().__init__(message)
        self.prompt_tokens = prompt_tokens
        self.limit = limit


class DocumentError(TideKVError):
    """A document cannot be turned into text."""


class DocumentNotFoundError(DocumentError):
    """No such file, or it is a folder."""


class DocumentTimeoutError(DocumentError):
    """The document was not read within its time."""


class EncryptedDocumentError(DocumentError):
    """The document needs a password, or the one given is wrong."""


class NoTextError(DocumentError):
    """The document has no text a model could read."""


class ModelError(TideKVError):
    """A model cannot be had or used."""


class ModelNotFoundError(ModelError):
    """Nothing by that name: the message says what was tried."""


class ModelDownloadError(ModelError):
    """The weights could not be fetched, checked or stored."""


class UnsafeWeightsError(ModelError):
    """Pickle weights or remote code, which run programs when they are loaded."""


class UnsupportedModelError(ModelError):
    """The model's layers do not follow the conventions that the adapter relies on."""


class SelectorError(TideKVError):
    """A selector returned scores or indices that cannot be used; nothing was evicted."""


class CacheError(TideKVError):
    """A saved cache is truncated, foreign or damaged."""


class MemoryLimitError(TideKVError):
    """The request would need more memory than there is."""


class BusyError(TideKVError):
    """Too much is going on; the message says what to wait for."""


class Cancelled(TideKVError):
    """The request was stopped on demand; the engine can be used again."""


class ClosedError(TideKVError):
    """The object was closed."""


def one_line(text: str, limit: int = 300) -> str:
    """Text on one line, cut at ``limit`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def reason(error: BaseException, limit: int = 160) -> str:
    """What a foreign error says, with its class, on one line: to be quoted in an error of ours."""
    return one_line(f"{type(error).__name__}: {error}", limit)
