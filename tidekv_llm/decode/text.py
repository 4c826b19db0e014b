"""From token ids to text deltas: whole characters only, reasoning apart, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tidekv_llm.decode.reasoning import Delta, ReasoningFormat, Splitter, partial_start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A character can span several tokens: its bytes decode to this until the last one is there.
_INCOMPLETE = "\ufffd"


class TextStream:
    """Turns a growing list of ids into deltas of answer and reasoning.

    Text that could be the beginning of a stop string is held back until it is clear; the stop string itself and
    everything after it never come out. Reasoning has no stop strings.

    Args:
        tokenizer: decodes.
        stop: strings that end the answer.
        reasoning: how the model marks its reasoning.
        prompt_end: the end of the prompt's text, which may have begun the reasoning.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: tuple[str, ...] = (),
        reasoning: ReasoningFormat | None = None,
        prompt_end: str = "",
    ) -> None:
        reasoning = reasoning or ReasoningFormat()
        self._characters = Characters(tokenizer, reasoning.marks)
        self._splitter: Splitter = reasoning.splitter(prompt_end)
        self._stop, self._pending = stop, ""
        self._text, self._reasoning = list[str](), list[str]()
        self._cut = False

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._reasoning)

    @property
    def stopped(self) -> bool:
        """Whether a stop string, or the end of the answer's channel, has come."""
        return self._cut or self._splitter.ended

    def push(self, token_id: int) -> Delta:
        """Add an id; return what is certain by now."""
        return self._release(self._splitter.push(self._characters.push(token_id)), final=False)

    def finish(self) -> Delta:
        """The rest, once no more ids come."""
        return self._release(self._splitter.push(self._characters.finish(), final=True), final=True)

    def _release(self, new: Delta, *, final: bool) -> Delta:
        out = Delta(self._before_stop(new.text, final), new.reasoning)
        self._text.append(out.text)
        self._reasoning.append(out.reasoning)
        return out

    def _before_stop(self, new: str, final: bool) -> str:
        """Text up to the stop string that is complete first, however many characters come at once."""
        for character in "" if self._cut else new:
            self._pending += character
            if ended := [len(stop) for stop in self._stop if self._pending.endswith(stop)]:
                self._cut, final = True, True
                self._pending = self._pending[: -max(ended)]
                break
        cut = len(self._pending) - (0 if final else partial_start(self._pending, self._stop))
        text, self._pending = self._pending[:cut], self._pending[cut:]
        return text


class Characters:
    """Whole characters from ids; special tokens leave no text.

    Args:
        tokenizer: decodes.
        visible: spellings that leave their text even where they are special.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, visible: Iterable[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Ids before _read are decoded and done with; those from _context on are decoded together, since some
        # tokenizers drop the first token's leading space.
        self._context = self._read = 0
        special = special_tokens(tokenizer)
        shown = {token_id for token_id, spelled in special.items() if spelled in visible}
        self._hidden = special.keys() - shown if shown else None

    def push(self, token_id: int) -> str:
        """Add an id; return the characters that are whole by now."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._context : self._read])
        after = self._decode(self._ids[self._context :])
        if len(after) <= len(before) or after.endswith(_INCOMPLETE):
            return ""
        self._context, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def finish(self) -> str:
        """The rest, whole or not."""
        before = self._decode(self._ids[self._context : self._read])
        rest = self._decode(self._ids[self._context :])[len(before) :]
        self._context = self._read = len(self._ids)
        return rest

    def _decode(self, ids: list[int]) -> str:
        if self._hidden is not None:
            ids = [token for token in ids if token not in self._hidden]
        skip = self._hidden is None
        text = self._tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Id and spelling of the tokens that a tokenizer leaves out of text."""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", None) or {}
    marked = {int(token_id): str(token) for token_id, token in added.items() if getattr(token, "special", False)}
    named = zip(getattr(tokenizer, "all_special_ids", ()), getattr(tokenizer, "all_special_tokens", ()), strict=False)
    return {**marked, **dict(named)}
