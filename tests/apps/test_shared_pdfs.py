"""The shared collection of real and hostile PDFs, through a running app; skipped where it is not there."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.apps.conftest import ROOT, Running
from tests.apps.test_api import connect, upload

FOLDERS = [ROOT.parent / "shared" / "pdfs", ROOT.parents[1] / "shared" / "pdfs"]
FOLDER = next((folder for folder in FOLDERS if (folder / "MANIFEST.tsv").exists()), FOLDERS[0])

pytestmark = [
    pytest.mark.skipif(not (FOLDER / "MANIFEST.tsv").exists(), reason="no shared PDF collection here"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
# What a user must be able to read, in the answer of the upload, for each file of MANIFEST.tsv.
SHOWN = {
    "01": ("ready", '"pages": 4'),
    "02": ("ready", '"readable_pages": 1'),
    "03": ("locked", ""),
    "04": ("failed", "page 1 has no text layer (scan?)"),
    "05": ("ready", '"pages": 6'),
    "06": ("ready", '"pages": 3'),
    "07": ("ready", ""),
    "08": ("ready", ""),
    "09": ("ready", ""),
    "10": (None, ""),
    "11": ("ready", ""),
    "12": ("failed", "cyclic"),
    "13": ("ready", '"readable_pages": 2'),
    "14": ("ready", ""),
    "15": ("ready", "placeholder"),
    "16": ("ready", "1 attachment (image.png) ignored"),
    "17": ("ready", '"pages": 117'),
}


def names() -> list[str]:
    if not (FOLDER / "MANIFEST.tsv").exists():
        return []
    with (FOLDER / "MANIFEST.tsv").open() as table:
        return [row["file"] for row in csv.DictReader(table, delimiter="\t")]


def read(app: Running, path: Path, **options: Any) -> dict[str, Any]:
    return upload(connect(app), path, **options)


@pytest.mark.parametrize("name", names())
def test_every_file_of_the_manifest_is_shown_as_it_is(app: Running, name: str) -> None:
    listed = read(app, FOLDER / "give" / name)
    state, fragment = SHOWN[name[:2]]
    (entry,) = listed["documents"]
    text = json.dumps(entry, ensure_ascii=False)
    assert state is None or entry["state"] == state, text
    assert fragment in text
    assert app.alive()
    assert entry["name"] == name and "Traceback" not in text and "/sessions/" not in text


def test_the_locked_file_opens_with_its_password_only(app: Running) -> None:
    (path,) = (FOLDER / "give").glob("03_*")
    wrong = read(app, path, password="nope")
    assert "wrong password" in wrong["documents"][0]["error"]
    right = read(app, path, password="openpassword")
    assert right["documents"][0]["state"] == "ready"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    subprocess.run([sys.executable, str(FOLDER / "hostile.py"), str(folder)], check=True)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "flate_bomb_200MB.pdf",
        "pages_5000.pdf",
        "wrong_length.pdf",
        "no_xref_truncated.pdf",
        "html_injection.pdf",
        "prompt_injection_hidden.pdf",
    ],
)
def test_hostile_files_leave_the_server_alive_and_say_what_is_wrong(app: Running, hostile: Path, name: str) -> None:
    before = app.rss()
    listed = read(app, hostile / name)
    (entry,) = listed["documents"]
    assert app.alive()
    assert app.rss() - before < 400 << 20
    assert entry["state"] == "ready" or (entry["error"] and "\n" not in entry["error"])
    assert "Traceback" not in json.dumps(entry)
