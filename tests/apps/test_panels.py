"""HTML: everything escaped, numbers with units, the strip, the page view."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.apps.support import Tags, entry, make_visit, turn
from tidekv_apps import export, panels, viewer
from tidekv_apps.budget import Budget
from tidekv_apps.figures import figures_panel
from tidekv_apps.jobs import Job
from tidekv_apps.quotes import find_quote
from tidekv_apps.records import Comparison
from tidekv_apps.visits import Visit
from tidekv_llm.errors import ConfigError

EVIL = (
    '<img src=x onerror="window.pwned=1"><script>window.pwned=2</script>\'"><b onclick=x>'
    "![x](http://192.0.2.1/leak.png) [l](javascript:window.pwned=3) $$\\href{javascript:alert(1)}{x}$$ &lt;"
)
ALLOWED = {
    "aside", "b", "button", "details", "div", "h3", "header", "i", "input", "label", "li", "mark", "p", "pre", "q",
    "rect", "small", "span", "strong", "summary", "svg", "table", "td", "th", "tr", "ul",
}  # fmt: skip


def evil_visit(folder: Path) -> Visit:
    visit = make_visit(folder)
    visit.entries = [entry(EVIL, EVIL, "second"), entry(EVIL, state="failed"), entry(EVIL, state="locked")]
    for broken in visit.entries[1:]:
        broken.error = EVIL
    visit.parked = [entry(EVIL, "x")]
    done = turn(EVIL, EVIL, name=EVIL, quote=EVIL)
    done.comparisons = [Comparison(EVIL, {"active_kv": 1}, 2, 3, 4.0)]
    done.predictions = {EVIL: {"active_kv": 5}}
    failed = turn(EVIL)
    failed.state, failed.error, failed.answer = "failed", EVIL, None
    visit.turns = [done, failed]
    visit.notice, visit.by_layer = EVIL, True
    return visit


def every_panel(visit: Visit) -> dict[str, str]:
    job = Job()
    job.show(EVIL, EVIL, 0.5)
    speaking = Job()
    speaking.add_text(EVIL)
    document = visit.entries[0].document
    assert document is not None
    return {
        "documents": panels.documents_panel(visit, job),
        "budget": panels.budget_panel(Budget(1, 2, 3, 4, 100, {}), EVIL),
        "conversation": panels.conversation_panel(visit),
        "live": panels.live_panel(job),
        "answering": panels.live_panel(speaking),
        "figures": figures_panel(visit),
        "notice": panels.notice(EVIL),
        "page": viewer.page_view(document, 1, EVIL, None),
        "text": viewer.text_view(visit.entries[0], {}, 0),
    }


@pytest.mark.parametrize(
    "name", ["documents", "budget", "conversation", "live", "answering", "figures", "notice", "page", "text"]
)
def test_nothing_from_outside_becomes_markup(tmp_path: Path, name: str) -> None:
    html = every_panel(evil_visit(tmp_path))[name]
    tags = Tags(html)
    assert tags.tags <= ALLOWED
    assert not [
        attribute for attribute, _ in tags.attributes if attribute.startswith("on") or attribute in ("src", "href")
    ]
    assert "window.pwned" in html  # it is there, as text


def test_exports_carry_no_live_markdown(tmp_path: Path) -> None:
    text = export.as_markdown(evil_visit(tmp_path))
    assert "![x](" not in text and "[l](" not in text and "<script>" not in text
    assert "\\<script\\>" in text


ADDRESSES = ("http://192.0.2.1/leak?q=1", "HTTPS://x.example", "ftp://x.example", "www.x.example/a", "ida@x.example")


@pytest.mark.parametrize("address", ADDRESSES)
def test_no_address_becomes_a_link_by_itself_wherever_it_stands(tmp_path: Path, address: str) -> None:
    """Viewers make links of bare addresses; code is the one thing that they leave alone."""
    visit = make_visit(tmp_path)
    failed, done = turn(f"Is {address} safe?"), turn("q", f"See {address}.", name=f"{address}.pdf", quote=address)
    failed.state, failed.error, failed.answer, failed.text = "failed", f"no answer from {address}", None, ""
    visit.entries, visit.turns = [entry(address, "x")], [failed, done]
    text = export.as_markdown(visit)
    outside = re.sub(r"`[^`]*`", "", text)
    assert text.count(address) >= 6
    assert address not in outside and not re.search(r"://|www\.|@", outside)


def test_an_error_is_shown_as_it_is_in_the_export(tmp_path: Path) -> None:
    visit, failed = make_visit(tmp_path), turn()
    failed.state, failed.error, failed.answer, failed.text = "failed", "[x](javascript:1) <b>", None, ""
    visit.turns = [failed]
    assert "\\[x\\](javascript:1) \\<b\\>" in export.as_markdown(visit)


def test_json_export_holds_the_figures(tmp_path: Path) -> None:
    import json

    visit = make_visit(tmp_path)
    visit.entries, visit.turns = [entry("a.pdf", "one", "two")], [turn()]
    data = json.loads(export.as_json(visit))
    (asked,) = data["turns"]
    assert asked["metrics"]["prompt_tokens"] == 50
    assert asked["page_strip"] == [{"document": 0, "page": 1, "kept": 30}, {"document": 0, "page": 2, "kept": 10}]
    assert data["documents"][0]["readable_pages"] == 2


def test_the_budget_names_both_sizes_when_it_does_not_fit() -> None:
    over = Budget(900, 50, 25, 100, 1000, {})
    assert not over.fits
    text = Tags(panels.budget_panel(over)).text
    assert "1,075 / 1,000 tokens" in text and "(75 too many)" in text
    assert "Fits" in Tags(panels.budget_panel(Budget(800, 50, 25, 100, 1000, {}))).text


def test_figures_have_units_and_show_predictions_and_runs(tmp_path: Path) -> None:
    visit = make_visit(tmp_path)
    done = turn()
    done.predictions = {"one-shot": {"weights": 1, "activations": 50 << 20}, "post-prefill": {"activations": 30 << 20}}
    done.comparisons = [Comparison("chunked", {"active_kv": 9 << 20}, 1, 2 << 20, 0.5)]
    visit.turns = [done]
    text = Tags(figures_panel(visit)).text
    for part in (
        "One-shot prefill, planned",
        "50.00 MiB",
        "SnapKV, post-prefill, planned",
        "chunked, run",
        "200.00 MiB",
    ):
        assert part in text


def test_the_store_for_follow_ups_is_no_part_of_the_working_set(tmp_path: Path) -> None:
    visit = make_visit(tmp_path)
    done = turn()
    assert done.answer is not None
    done.answer.metrics.components["document_store"] = 70 << 20
    visit.turns = [done]
    text = Tags(figures_panel(visit)).text
    assert "This answer, measured 25.00 MiB" in text and "store for follow-ups 70.00 MiB" in text


def test_the_strip_has_a_button_per_page_as_high_as_its_share(tmp_path: Path) -> None:
    visit = make_visit(tmp_path)
    visit.turns = [turn()]
    html = figures_panel(visit)
    assert "p. 1: 30 positions kept, 75.0% of all" in html
    # 30 of 10 tokens against 10 of 20: 3 to 0.5
    assert "height:100%" in html and "height:17%" in html


def test_unverified_and_verified_citations_say_so(tmp_path: Path) -> None:
    visit = make_visit(tmp_path)
    visit.turns = [turn()]
    assert "unverified" in Tags(panels.conversation_panel(visit)).text


def test_a_page_shows_its_quotation_marked_or_says_that_it_is_not_there() -> None:
    document = turn().documents[0]
    assert "<mark>Because</mark>" in viewer.page_view(document, 1, "because", None)
    assert "does not stand on the page" in viewer.page_view(document, 1, "never said", None)


def test_quotes_are_found_across_line_breaks_hyphens_and_ligatures() -> None:
    text = "The ﬁrst of-\nfice  opens “early”."
    start, stop = find_quote(text, 'first office opens "early"') or (0, 0)
    assert text[start:stop] == "ﬁrst of-\nfice  opens “early"
    assert find_quote(text, "late") is None
    assert find_quote(text, "...") is None


@pytest.mark.parametrize("argument", ["", "x", "x:0", ":", "0:999999999999999999999"])
def test_clicks_with_nonsense_are_refused(tmp_path: Path, argument: str) -> None:
    visit = make_visit(tmp_path)
    visit.turns = [turn()]
    with pytest.raises(ConfigError):
        viewer.open_citation(visit, argument)
    with pytest.raises(ConfigError):
        viewer.open_strip(visit, f"{visit.turns[0].key}:99")
