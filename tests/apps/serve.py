"""The app with limits that a test chooses: ``python -m tests.apps.serve '{"model": ..., "limits": {...}}'``."""

from __future__ import annotations

import json
import sys
import threading

from tidekv_apps.server import start
from tidekv_apps.settings import AppOptions, Limits
from tidekv_llm.lifetime import ended_by_signals


def main(options: dict[str, object]) -> None:
    """Serve until a signal ends it."""
    limits = Limits(**options.pop("limits", {}))  # type: ignore[arg-type]
    models = (str(options.pop("model")),)
    auth = options.pop("auth", None)
    with ended_by_signals():
        chosen = AppOptions(models=models, limits=limits, auth=tuple(auth) if auth else None, **options)  # type: ignore[arg-type]
        server = start(chosen)
        try:
            print(f"TideKV is at {server.url} (a test)", file=sys.stderr, flush=True)
            threading.Event().wait()
        finally:
            server.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
