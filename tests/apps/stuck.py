"""The app with a model that answers no question but those that begin with "quick", until it is told to stop.

``python -m tests.apps.stuck NOTES '{"model": ...}'`` notes which questions reach the model, and how they end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.apps import serve


def stick(notes: Path) -> None:
    """Put the stuck model in place."""
    from tidekv_apps.reader import Reader
    from tidekv_llm.errors import Cancelled

    ask = Reader.ask

    def note(what: str) -> None:
        with notes.open("a") as out:
            out.write(what + "\n")

    def stuck(self: Reader, question: str, history: Any, **options: Any) -> Any:
        note(f"begun {question}")
        if question.startswith("quick"):
            return ask(self, question, history, **options)
        options["cancel"].wait()
        note(f"cancelled {question}")
        raise Cancelled("stopped")

    Reader.ask = stuck  # type: ignore[method-assign]


if __name__ == "__main__":
    stick(Path(sys.argv[1]))
    serve.main(json.loads(sys.argv[2]))
