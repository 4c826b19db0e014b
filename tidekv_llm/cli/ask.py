"""``tidekv ask``: a question to whole documents, once or in a named session."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from tidekv_llm.arguments import chunk_size, count, whole_number
from tidekv_llm.cli.answers import AskConsole
from tidekv_llm.cli.questions import AnswerLines, read_lines
from tidekv_llm.config import PrefillConfig
from tidekv_llm.errors import ConfigError, ContextOverflowError
from tidekv_llm.options import DEFAULT_DRAFTS, settle

if TYPE_CHECKING:
    from tidekv_llm.documents import Document
    from tidekv_llm.engine import Answer, TideKV

DEFAULT_MODEL = "smollm2-135m"


def add_command(commands: Any) -> None:
    """Add it to the command line's subparsers."""
    ask = commands.add_parser(
        "ask",
        help="answer a question from whole documents",
        usage="tidekv ask [options] FILE [FILE ...] QUESTION, or [options] --questions FILE FILE [FILE ...]",
        description="Answer a question from whole PDF, text or Markdown files, with page citations.",
    )
    ask.add_argument("files", nargs="+", metavar="FILE", help="documents, read whole; last comes the question")
    ask.add_argument(
        "--questions", metavar="FILE", help="answer every line of a file instead (- for standard input), as JSON lines"
    )
    ask.add_argument("--model", default=DEFAULT_MODEL, help="alias, hub id, folder or GGUF file (default: %(default)s)")
    _add_prefill_arguments(ask)
    ask.add_argument("--max-new-tokens", type=whole_number, default=128, help="longest answer (default: %(default)s)")
    ask.add_argument(
        "--drafts",
        type=whole_number,
        default=DEFAULT_DRAFTS,
        help="most tokens that the documents may suggest per step, 0 for none (default: %(default)s)",
    )
    ask.add_argument(
        "--context-window", type=whole_number, help="most tokens, prompt and answer (default: the model's own)"
    )
    ask.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: the GPU if there is one)")
    ask.add_argument("--dtype", help="of the weights: bfloat16, float16 or float32 (default: the checkpoint's bytes)")
    ask.add_argument(
        "--compute-dtype", help="what layers compute in, one made ready at a time (default: what is fastest here)"
    )
    ask.add_argument(
        "--weight-bits", type=count, default=16, help="8 or 4: quantise while loading, on a CPU (default: %(default)s)"
    )
    ask.add_argument("--pages", help="only these pages of every file, such as 1-3,7")
    ask.add_argument("--password", help="for encrypted PDFs")
    ask.add_argument("--session", metavar="NAME", help="keep what was read on disk: later questions cost a fraction")
    ask.add_argument("--independent", action="store_true", help="with --session: neither see nor join earlier turns")
    ask.add_argument("--json", action="store_true", help="print JSON")
    ask.add_argument("--quiet", action="store_true", help="no progress on standard error")
    ask.set_defaults(run=run)


def _add_prefill_arguments(ask: argparse.ArgumentParser) -> None:
    defaults = PrefillConfig.__dataclass_fields__
    ask.add_argument(
        "--kept-tokens", type=whole_number, default=1024, help="KV positions kept per layer (default: %(default)s)"
    )
    ask.add_argument(
        "--chunk-size", type=chunk_size, default="auto", help="prompt tokens per step, or auto (default: %(default)s)"
    )
    ask.add_argument("--selector", default=defaults["selector"].default, help="who stays (default: %(default)s)")
    ask.add_argument(
        "--schedule", default=defaults["schedule"].default, help="how the cache is built (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Read, load, ask and print."""
    questions = _questions(options)
    _check(options, questions)
    config = PrefillConfig(
        kept_tokens=options.kept_tokens,
        chunk_size=options.chunk_size,
        selector=options.selector,
        schedule=options.schedule,
    )
    with AskConsole(as_json=options.json, quiet=options.quiet) as console:
        documents = _read(options, console)
        from tidekv_llm.engine import TideKV  # torch: only once the files are known to be readable

        with TideKV.from_pretrained(
            options.model,
            prefill=config,
            device=options.device,
            dtype=options.dtype,
            compute_dtype=options.compute_dtype,
            weight_bits=options.weight_bits,
            context_window=options.context_window,
            load_progress=console.loading,
        ) as llm:
            if options.questions is not None:
                return _ask_many(llm, documents, questions, options, console)
            ask = _ask_once if options.session is None else _ask_session
            answer = ask(llm, documents, options, console)
            console.show(answer, documents, llm.name)
    return 0


def _questions(options: argparse.Namespace) -> list[str]:
    """What is asked: the lines of a file, or the last argument, which is no file then."""
    if options.questions is not None:
        return read_lines(options.questions)
    if len(options.files) < 2:
        raise ConfigError(f"{options.files[0]!r} is the only argument; give one file or more, then the question")
    options.question = options.files.pop()
    return [options.question]


def _check(options: argparse.Namespace, questions: list[str]) -> None:
    """What is wrong with the command is told before anything is read."""
    if not all(question.strip() for question in questions):
        raise ConfigError("the question is empty; write what you want to know")
    settle({"max_new_tokens": options.max_new_tokens, "drafts": options.drafts})
    if options.independent and options.session is None:
        raise ConfigError("--independent needs --session; without one every question is independent")
    if options.session is not None:
        from tidekv_llm.prefixes.named import session_folder

        session_folder(options.session)


def _read(options: argparse.Namespace, console: AskConsole) -> list[Document]:
    from tidekv_llm.documents import Document

    return [
        Document.from_file(path, password=options.password, pages=options.pages, progress=console.reading(path))
        for path in options.files
    ]


def _ask_once(llm: TideKV, documents: list[Document], options: argparse.Namespace, console: AskConsole) -> Answer:
    return llm.ask(
        documents,
        options.question,
        max_new_tokens=options.max_new_tokens,
        drafts=options.drafts,
        on_text=console.text,
        on_reasoning=console.reasoning,
        progress=console.prefilling,
    )


def _ask_session(llm: TideKV, documents: list[Document], options: argparse.Namespace, console: AskConsole) -> Answer:
    """Ask in a named session; unless told otherwise the conversation goes on where the last command left it."""
    from tidekv_llm.prefixes.conversation import Conversation
    from tidekv_llm.prefixes.named import session_folder

    folder = session_folder(options.session)
    with llm.open(documents, store="disk", name=options.session) as session:
        conversation = Conversation.load(folder, session.fingerprint)
        session.history = conversation.turns
        try:
            answer = session.ask(
                options.question,
                remember=not options.independent,
                max_new_tokens=options.max_new_tokens,
                drafts=options.drafts,
                on_text=console.text,
                on_reasoning=console.reasoning,
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


def _ask_many(
    llm: TideKV, documents: list[Document], questions: list[str], options: argparse.Namespace, console: AskConsole
) -> int:
    """All questions, independent of each other; 1 if one of them has no answer."""
    lines = AnswerLines(questions, console)
    store = "memory" if options.session is None else "disk"
    with llm.open(documents, store=store, name=options.session) as session:
        session.ask_many(
            questions,
            on_answer=lines.add,
            progress=console.prefilling,
            max_new_tokens=options.max_new_tokens,
            drafts=options.drafts,
        )
    return lines.failed
