"""Text on a PDF page with its place: what is drawn twice for boldness counts once, and captions can be found.

Runs in the PDF worker only.
"""

from __future__ import annotations

from typing import Any

from tidekv_llm.documents.pdf_forms import Placed

_MOVES = frozenset((b"BT", b"Td", b"TD", b"Tm", b"T*", b"cm", b"Q"))
_NEAR = 0.15  # of the font size: bold by overprinting moves the pen less, the next letter is farther


class Ink:
    """Two visitors for ``extract_text``: one silences what was drawn before in the same place, one notes places."""

    def __init__(self) -> None:
        self.placed: list[Placed] = []
        self.doubled = 0
        self._drawn: set[tuple[str, int, int]] = set()
        self._moved = True
        self._font_size = 12.0

    def before(self, operator: bytes, operands: Any, cm: list[float], tm: list[float]) -> None:
        """Empty the operands of a text operator that draws once more what stands there already."""
        if operator in _MOVES:
            self._moved = True
        elif operator == b"Tf" and len(operands) > 1:
            self._font_size = abs(float(operands[1])) or 12.0
        elif operator in (b"Tj", b"TJ") and operands:
            # Only the first text after a move starts where the matrix says; what follows stands farther right.
            if self._moved and self._is_drawn(_spelled(operands[0]), *_place(cm, tm), self._font_size * _scale(cm, tm)):
                operands[0] = type(operands[0])()
                self.doubled += 1
            else:
                self._moved = False

    def text(self, text: str, cm: list[float], tm: list[float], font: Any, size: float) -> None:
        """Note where a piece of text begins."""
        if text.strip():
            self.placed.append((*_place(cm, tm), text))

    def _is_drawn(self, spelled: str, x: float, y: float, size: float) -> bool:
        cell = max(size * _NEAR, 0.01)
        column, row = round(x / cell), round(y / cell)
        near = ((spelled, column + dx, row + dy) for dx in (-1, 0, 1) for dy in (-1, 0, 1))
        if spelled.strip() and any(place in self._drawn for place in near):
            return True
        self._drawn.add((spelled, column, row))
        return False


def _spelled(operand: Any) -> str:
    """The string, or the strings of a ``TJ`` array without the gaps between them."""
    if isinstance(operand, list):
        return "".join(_spelled(part) for part in operand if isinstance(part, (str, bytes)))
    return operand.decode("latin-1") if isinstance(operand, bytes) else str(operand)


def _place(cm: list[float], tm: list[float]) -> tuple[float, float]:
    return tm[4] * cm[0] + tm[5] * cm[2] + cm[4], tm[4] * cm[1] + tm[5] * cm[3] + cm[5]


def _scale(cm: list[float], tm: list[float]) -> float:
    return float(abs((tm[0] * tm[3] - tm[1] * tm[2]) * (cm[0] * cm[3] - cm[1] * cm[2])) ** 0.5)
