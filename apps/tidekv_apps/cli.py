"""``tidekv app``: arguments and the wait until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from pathlib import Path

from tidekv_apps.security import check_bind, parse_auth
from tidekv_apps.settings import AppOptions
from tidekv_llm.arguments import count, whole_number
from tidekv_llm.errors import ConfigError

SUMMARY = "open the document-QA web app"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``tidekv app``."""
    parser.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help="alias, hub id, folder or GGUF file; repeat it to let users choose (default: smollm2-135m)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=whole_number, help="port (default: the first free one from 7860 on)")
    parser.add_argument("--auth", metavar="USER:PASSWORD", help="ask for a login; or set $TIDEKV_APP_AUTH")
    parser.add_argument(
        "--context-window", type=whole_number, help="most tokens, prompt and answer (default: the model's own)"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: the GPU if there is one)")
    parser.add_argument("--dtype", help="of the weights: bfloat16, float32... (default: the checkpoint's bytes)")
    parser.add_argument(
        "--compute-dtype", help="what layers compute in, one made ready at a time (default: what is fastest here)"
    )
    parser.add_argument(
        "--weight-bits", type=count, default=16, help="8 or 4: quantise while loading, on a CPU (default: %(default)s)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def run(options: argparse.Namespace) -> int:
    """Start, say where, and wait."""
    models = tuple(options.model or ("smollm2-135m",))
    auth = parse_auth(options.auth or os.environ.get("TIDEKV_APP_AUTH"))
    check_bind(options.host, auth)
    if all(_is_local(model) for model in models):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from tidekv_apps.server import start
    except ImportError as error:
        raise ConfigError(f"the app needs {error.name}; install it with pip install 'tidekv-llm[app]'") from None
    chosen = AppOptions(
        models=models,
        host=options.host,
        port=options.port,
        auth=auth,
        device=options.device,
        dtype=options.dtype,
        load_options={"compute_dtype": options.compute_dtype, "weight_bits": options.weight_bits},
        context_window=options.context_window,
    )
    try:
        server = start(chosen, open_browser=options.open)
    except ImportError as error:
        raise ConfigError(f"the app needs {error.name}; install it with pip install 'tidekv-llm[app]'") from None
    except OSError:
        raise ConfigError(f"port {options.port or 7860} is taken; choose another with --port") from None
    try:
        print(f"TideKV is at {server.url} (Ctrl-C ends it)", file=sys.stderr, flush=True)
        threading.Event().wait()
    finally:
        server.close()
    return 0


def _is_local(model: str) -> bool:
    from tidekv_llm.models import list_models

    return Path(model).expanduser().exists() or model in [known.alias for known in list_models()]
