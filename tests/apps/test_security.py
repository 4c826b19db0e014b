"""Where the app listens, what it answers, what it tells."""

from __future__ import annotations

import logging

import pytest

from tidekv_apps import cli
from tidekv_apps.security import check_bind, parse_auth, plain_error, safe_name
from tidekv_llm.cli import main
from tidekv_llm.errors import ConfigError


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.org"])
def test_addresses_that_others_reach_need_a_login(host: str) -> None:
    with pytest.raises(ConfigError, match="add --auth"):
        check_bind(host, None)
    check_bind(host, ("ida", "long enough"))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.9"])
def test_this_machine_needs_none(host: str) -> None:
    check_bind(host, None)


def test_the_command_refuses_an_open_address_with_a_usage_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIDEKV_APP_AUTH", raising=False)
    assert main(["app", "--host", "0.0.0.0"]) == 2
    assert "add --auth" in capsys.readouterr().err
    assert main(["app", "--auth", "ida:short"]) == 2


def test_the_default_address_is_this_machine() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    assert parser.parse_args([]).host == "127.0.0.1"


def test_logins_are_a_name_and_a_long_password() -> None:
    assert parse_auth("ida:pass:word") == ("ida", "pass:word")
    assert parse_auth(None) is None
    for wrong in ("ida", ":password1", "ida:1234567"):
        with pytest.raises(ConfigError, match="USER:PASSWORD"):
            parse_auth(wrong)


def test_names_lose_folders_controls_and_direction_marks() -> None:
    assert safe_name("../../etc/passwd") == "passwd"
    assert safe_name("C:\\x\\evil\u202efdp.exe\n") == "evilfdp.exe"
    assert safe_name("...") == "document"
    assert len(safe_name("a" * 999 + ".pdf")) == 120
    for long in ("\N{GRINNING FACE}" * 300 + ".pdf", "\u3042" * 300 + ".pdf"):
        assert len(safe_name(long).encode()) <= 255 and safe_name(long).endswith(".pdf")


def test_unknown_errors_tell_no_path_and_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        text = plain_error(RuntimeError("/home/ida/secret.py line 3"))
    assert "secret" not in text and "RuntimeError" not in text
    assert "secret" in caplog.text  # the operator can find it by its reference
    assert plain_error(ConfigError("kept_tokens=1 is too small")) == "kept_tokens=1 is too small"
