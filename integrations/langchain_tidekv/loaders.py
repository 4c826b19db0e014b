"""PDF pages as LangChain documents, read in TideKV's limited child process."""

from __future__ import annotations

import os
from typing import Any

from langchain_core.documents import Document

from langchain_tidekv.errors import langchain_errors


def load_pdf(path: str | os.PathLike[str], **options: Any) -> list[Document]:
    """One Document per page that has text, with the metadata of PyPDFLoader: source, page from 0, page_label.

    Args:
        path: the file.
        options: ``password`` and ``pages``, as in :meth:`tidekv_llm.Document.from_pdf`.

    Raises:
        TideKVInvalidRequestError: no such file, encrypted, damaged, or a scan.
    """
    from tidekv_llm.documents import Document as TideDocument

    with langchain_errors():
        document = TideDocument.from_pdf(path, **options)
    return [
        Document(
            page_content=page.text,
            metadata={"source": os.fspath(path), "page": page.number - 1, "page_label": page.label},
        )
        for page in document.pages
        if page.readable
    ]
