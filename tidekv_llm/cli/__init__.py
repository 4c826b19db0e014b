"""The command line: one file a command, and no traceback for bad input.

A command is a module with ``add_command(commands)``, which names its ``run(options) -> int``. Exit codes: 0 done,
1 run-time error, 2 usage error, 130 interrupted. With ``--json`` errors are JSON too.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from tidekv_llm.cli import ask, bench, doctor, models, plan, sessions
from tidekv_llm.cli.terminal import forgive_encodings, one_row, print_json
from tidekv_llm.errors import ConfigError, EncryptedDocumentError, MemoryLimitError, TideKVError
from tidekv_llm.hardware import limit_libraries
from tidekv_llm.lifetime import ended_by_signals
from tidekv_llm.version import __version__

EXIT_RUNTIME, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing usage and leaving, so that ``--json`` holds for usage errors too."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see '{self.prog} --help'")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments
    forgive_encodings()
    try:
        _check_text(arguments)
        limit_libraries()
        options = parser().parse_args(arguments)
        with ended_by_signals():
            code: int = options.run(options)
        return code
    except KeyboardInterrupt:
        return _fail("interrupted", "Interrupted", EXIT_INTERRUPTED, as_json)
    except BrokenPipeError:
        sys.stderr.close()
        return EXIT_RUNTIME
    except TideKVError as error:
        code = EXIT_USAGE if isinstance(error, ConfigError) else EXIT_RUNTIME
        return _fail(f"{error}{_hint(error)}", type(error).__name__, code, as_json)
    except OSError as error:  # a full disk under standard output, say
        return _fail(f"cannot write or read: {error.strerror or error}", "OSError", EXIT_RUNTIME, as_json=False)


def _hint(error: TideKVError) -> str:
    """How the command line helps; the errors themselves are also read in the app and in programs."""
    if isinstance(error, EncryptedDocumentError):
        return " with --password"
    return "; 'tidekv plan' shows what would fit" if isinstance(error, MemoryLimitError) else ""


def _fail(message: str, kind: str, code: int, as_json: bool) -> int:
    if as_json:
        print_json({"error": {"type": kind, "message": message, "exit_code": code}})
    else:
        print(f"tidekv: {one_row(message, sys.stderr)}", file=sys.stderr)
    return code


def _check_text(arguments: Sequence[str]) -> None:
    """Refuse bytes that are no text: no tokenizer takes them, and JSON cannot hold them."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = argument.encode(errors="replace").decode()
            raise ConfigError(f"{shown!r} is not UTF-8 text; write it in UTF-8") from None


def parser() -> argparse.ArgumentParser:
    """Of all commands that are installed."""
    top = _Parser(prog="tidekv", description="Ask whole documents on the hardware you own.")
    top.add_argument("--version", action="version", version=f"tidekv-llm {__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Parser)
    for command in (ask, sessions, models, doctor, plan, bench):
        command.add_command(commands)
    _add_app(commands)
    return top


def _add_app(commands: Any) -> None:
    """``tidekv app``, where it is installed: the core knows it by name only."""
    try:
        app = importlib.import_module("tidekv_apps.cli")
    except ImportError:
        return
    command = commands.add_parser("app", help=app.SUMMARY, description=f"{app.SUMMARY[0].upper()}{app.SUMMARY[1:]}.")
    app.add_arguments(command)
    command.set_defaults(run=app.run)
