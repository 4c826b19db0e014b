"""From token ids to text deltas: whole characters only, cut at the first stop string."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A character can span several tokens: its bytes decode to this until the last one is there.
_INCOMPLETE = "\ufffd"


class TextStream:
    """Turns a growing list of ids into text deltas.

    Text that could be the beginning of a stop string is held back until it is clear; the stop string itself and
    everything after it never come out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._ids: list[int] = []
        # Ids before _read are decoded and done with; those from _context on are decoded together, since some
        # tokenizers drop the first token's leading space.
        self._context = self._read = 0
        self._pending = ""
        self.text = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Add an id; return the text that is certain by now."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._context : self._read])
        after = self._decode(self._ids[self._context :])
        if len(after) <= len(before) or after.endswith(_INCOMPLETE):
            return ""
        self._context, self._read = self._read, len(self._ids)
        return self._release(after[len(before) :], final=False)

    def finish(self) -> str:
        """The rest, once no more ids come."""
        before = self._decode(self._ids[self._context : self._read])
        rest = self._decode(self._ids[self._context :])[len(before) :]
        self._context = self._read = len(self._ids)
        return self._release(rest, final=True)

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _release(self, new: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        pending = self._pending + new
        found = [index for index in (pending.find(stop) for stop in self._stop) if index >= 0]
        if found:
            self.stopped, self._pending, delta = True, "", pending[: min(found)]
        else:
            held = 0 if final else _possible_stop_start(pending, self._stop)
            cut = len(pending) - held
            delta, self._pending = pending[:cut], pending[cut:]
        self.text += delta
        return delta


def _possible_stop_start(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of ``text`` that begins a stop string: ("see Qu", ("Question:",)) gives 2."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:length]):
                longest = max(longest, length)
                break
    return longest
