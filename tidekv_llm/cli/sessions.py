"""``tidekv sessions``: the documents that ``tidekv ask --session`` keeps."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tidekv_llm.cli.terminal import print_json, print_table
from tidekv_llm.sizes import format_bytes

if TYPE_CHECKING:
    from tidekv_llm.prefixes.named import StoredSession


def add_command(commands: Any) -> None:
    """Add it to the command line's subparsers."""
    summary = "list or remove the documents that 'ask --session' keeps"
    parser = commands.add_parser("sessions", help=summary, description=summary)
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION", parser_class=type(parser))
    listing = actions.add_parser("list", help="list the sessions", description="List the sessions.")
    listing.set_defaults(run=_list)
    removal = actions.add_parser("rm", help="remove a session", description="Remove a session's files.")
    removal.add_argument("name", metavar="NAME", help="as given to --session")
    removal.set_defaults(run=_remove)
    for action in (listing, removal):
        action.add_argument("--json", action="store_true", help="print JSON")


def _list(options: argparse.Namespace) -> int:
    from tidekv_llm.prefixes.named import list_sessions

    sessions = list_sessions()
    if options.json:
        print_json([asdict(session) for session in sessions])
    elif not sessions:
        print("No sessions; tidekv ask --session NAME makes one.")
    else:
        _show(sessions)
    return 0


def _show(sessions: Sequence[StoredSession]) -> None:
    def row(one: StoredSession) -> list[str]:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.used))
        return [one.name, str(one.documents), f"{one.tokens:,}", format_bytes(one.bytes), used]

    headings = ("name", "documents", "tokens", "size", "last used")
    print_table([row(one) for one in sessions], headings, right=(1, 2, 3))


def _remove(options: argparse.Namespace) -> int:
    from tidekv_llm.prefixes.named import remove_session

    freed = remove_session(options.name)
    if options.json:
        print_json({"removed": options.name, "bytes": freed})
    else:
        print(f"Removed session {options.name}: {format_bytes(freed)} freed.")
    return 0
