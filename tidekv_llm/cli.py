"""The command line: thin, and no traceback for bad input.

Exit codes: 0 done, 1 run-time error, 2 usage error, 130 interrupted. With ``--json`` errors are JSON too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from tidekv_llm import __version__
from tidekv_llm.bench.cli import add_commands as add_bench_commands
from tidekv_llm.config import PrefillConfig
from tidekv_llm.errors import (
    ConfigError,
    ContextOverflowError,
    EncryptedDocumentError,
    MemoryLimitError,
    TideKVError,
)
from tidekv_llm.hardware import limit_libraries
from tidekv_llm.lifetime import ended_by_signals

if TYPE_CHECKING:
    from tidekv_llm.console import AskConsole
    from tidekv_llm.documents import Document
    from tidekv_llm.engine import Answer, TideKV

DEFAULT_MODEL = "smollm2-135m"
EXIT_RUNTIME, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing usage and leaving, so that ``--json`` holds for usage errors too."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see '{self.prog} --help'")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments
    try:
        _check_text(arguments)
        limit_libraries()
        options = _parser().parse_args(arguments)
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
        print(json.dumps({"error": {"type": kind, "message": message, "exit_code": code}}))
    else:
        print(f"tidekv: {message}", file=sys.stderr)
    return code


def _check_text(arguments: Sequence[str]) -> None:
    """Refuse bytes that are no text: no tokenizer takes them, and JSON cannot hold them."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = argument.encode(errors="replace").decode()
            raise ConfigError(f"{shown!r} is not UTF-8 text; write it in UTF-8") from None


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tidekv", description="Ask whole documents on the hardware you own.")
    parser.add_argument("--version", action="version", version=f"tidekv-llm {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Parser)
    _add_ask(commands)
    _add_sessions(commands)
    for name, summary, run in (
        ("models", "list model aliases and where they are cached", _models),
        ("doctor", "say what this machine can use", _doctor),
    ):
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(run=run)
    add_bench_commands(commands)
    _add_app(commands)
    return parser


def _add_app(commands: Any) -> None:
    """``tidekv app``, where it is installed: the core knows it by name only."""
    try:
        app = importlib.import_module("tidekv_apps.cli")
    except ImportError:
        return
    command = commands.add_parser("app", help=app.SUMMARY, description=f"{app.SUMMARY[0].upper()}{app.SUMMARY[1:]}.")
    app.add_arguments(command)
    command.set_defaults(run=app.run)


def _add_ask(commands: Any) -> None:
    defaults = PrefillConfig.__dataclass_fields__
    ask = commands.add_parser(
        "ask",
        help="answer a question from whole documents",
        description="Answer a question from whole PDF, text or Markdown files, with page citations.",
    )
    ask.add_argument("files", nargs="+", metavar="FILE", help="documents, read whole")
    ask.add_argument("question", metavar="QUESTION", help="what you want to know")
    ask.add_argument("--model", default=DEFAULT_MODEL, help="alias, hub id, folder or GGUF file (default: %(default)s)")
    ask.add_argument("--kept-tokens", type=int, default=1024, help="KV positions kept per layer (default: %(default)s)")
    ask.add_argument(
        "--chunk-size",
        type=_chunk_size,
        default="auto",
        help="prompt tokens per step, or auto (default: %(default)s)",
    )
    ask.add_argument("--selector", default=defaults["selector"].default, help="who stays (default: %(default)s)")
    ask.add_argument(
        "--schedule",
        default=defaults["schedule"].default,
        help="how the cache is built (default: %(default)s)",
    )
    ask.add_argument("--max-new-tokens", type=int, default=128, help="longest answer (default: %(default)s)")
    ask.add_argument("--context-window", type=int, help="most tokens, prompt and answer (default: the model's own)")
    ask.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: the GPU if there is one)")
    ask.add_argument("--dtype", help="bfloat16, float16 or float32 (default: what the device is good at)")
    ask.add_argument("--pages", help="only these pages of every file, such as 1-3,7")
    ask.add_argument("--password", help="for encrypted PDFs")
    ask.add_argument("--session", metavar="NAME", help="keep what was read on disk: later questions cost a fraction")
    ask.add_argument("--independent", action="store_true", help="with --session: neither see nor join earlier turns")
    ask.add_argument("--json", action="store_true", help="print JSON")
    ask.add_argument("--quiet", action="store_true", help="no progress on standard error")
    ask.set_defaults(run=_ask)


def _add_sessions(commands: Any) -> None:
    summary = "list or remove the documents that 'ask --session' keeps"
    actions = commands.add_parser("sessions", help=summary, description=summary).add_subparsers(
        title="actions", required=True, metavar="ACTION", parser_class=_Parser
    )
    listing = actions.add_parser("list", help="list the sessions", description="List the sessions.")
    listing.set_defaults(run=_list_sessions)
    removal = actions.add_parser("rm", help="remove a session", description="Remove a session's files.")
    removal.add_argument("name", metavar="NAME", help="as given to --session")
    removal.set_defaults(run=_remove_session)
    for action in (listing, removal):
        action.add_argument("--json", action="store_true", help="print JSON")


def _chunk_size(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1, or auto") from None


def _ask(options: argparse.Namespace) -> int:
    from tidekv_llm.console import AskConsole
    from tidekv_llm.documents import Document

    if not options.question.strip():
        raise ConfigError("the question is empty; write what you want to know")
    if options.independent and options.session is None:
        raise ConfigError("--independent needs --session; without one every question is independent")
    if options.session is not None:
        from tidekv_llm.prefixes.named import session_folder

        session_folder(options.session)  # a bad name is told before anything is read
    config = PrefillConfig(
        kept_tokens=options.kept_tokens,
        chunk_size=options.chunk_size,
        selector=options.selector,
        schedule=options.schedule,
    )
    with AskConsole(as_json=options.json, quiet=options.quiet) as console:
        documents = [
            Document.from_file(path, password=options.password, pages=options.pages, progress=console.reading(path))
            for path in options.files
        ]
        from tidekv_llm.engine import TideKV  # torch: only once the files are known to be readable

        with TideKV.from_pretrained(
            options.model,
            prefill=config,
            device=options.device,
            dtype=options.dtype,
            context_window=options.context_window,
            load_progress=console.loading,
        ) as llm:
            ask = _ask_once if options.session is None else _ask_session
            answer = ask(llm, documents, options, console)
            console.show(answer, documents, llm.name)
    return 0


def _ask_once(llm: TideKV, documents: list[Document], options: argparse.Namespace, console: AskConsole) -> Answer:
    return llm.ask(
        documents,
        options.question,
        max_new_tokens=options.max_new_tokens,
        on_text=console.text,
        progress=console.prefilling,
    )


def _ask_session(llm: TideKV, documents: list[Document], options: argparse.Namespace, console: AskConsole) -> Answer:
    """Ask in a named session; unless told otherwise the conversation goes on where the last command left it."""
    from tidekv_llm.prefixes.conversation import Conversation
    from tidekv_llm.prefixes.named import session_folder

    folder = session_folder(options.session)
    with llm.open(documents, store="disk", name=options.session) as session:
        conversation = Conversation.load(folder, session.fingerprint)
        session.resume(conversation.turns)
        try:
            answer = session.ask(
                options.question,
                remember=not options.independent,
                max_new_tokens=options.max_new_tokens,
                on_text=console.text,
                progress=console.prefilling,
            )
        except ContextOverflowError as error:
            if not conversation.turns or options.independent:
                raise
            message = f"{error}; or use --independent to ask without the {len(conversation.turns)} earlier turns"
            raise ContextOverflowError(message, prompt_tokens=error.prompt_tokens, limit=error.limit) from error
        if not options.independent:
            Conversation(session.fingerprint, session.history).save(folder)
    return answer


def _list_sessions(options: argparse.Namespace) -> int:
    from tidekv_llm.console import show_sessions
    from tidekv_llm.prefixes.named import list_sessions

    show_sessions(list_sessions(), as_json=options.json)
    return 0


def _remove_session(options: argparse.Namespace) -> int:
    from tidekv_llm.console import show_removed
    from tidekv_llm.prefixes.named import remove_session

    show_removed(options.name, remove_session(options.name), as_json=options.json)
    return 0


def _models(options: argparse.Namespace) -> int:
    from tidekv_llm.console import show_models
    from tidekv_llm.models import list_models

    show_models(list_models(), as_json=options.json)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from tidekv_llm.console import show_checks
    from tidekv_llm.doctor import doctor

    checks = doctor()
    show_checks(checks, as_json=options.json)
    return 0 if all(check.ok for check in checks) else EXIT_RUNTIME


if __name__ == "__main__":
    sys.exit(main())
