"""PDF pages as LlamaIndex documents, read in TideKV's limited child process."""

from __future__ import annotations

import os
from typing import Any

from llama_index.core.schema import Document


def load_pdf(path: str | os.PathLike[str], **options: Any) -> list[Document]:
    """One Document per page that has text, with the metadata of other readers: page_label, file_name, file_path.

    Args:
        path: the file.
        options: ``password`` and ``pages``, as in :meth:`tidekv_llm.Document.from_pdf`.

    Raises:
        DocumentError: no such file, encrypted, damaged, or a scan.
    """
    from tidekv_llm.documents import Document as TideDocument

    document = TideDocument.from_pdf(path, **options)
    return [
        Document(
            text=page.text,
            metadata={"file_name": document.name, "file_path": os.fspath(path), "page_label": page.label},
            excluded_embed_metadata_keys=["file_path"],  # a place on this machine is nothing to read or to find by
            excluded_llm_metadata_keys=["file_path"],
        )
        for page in document.pages
        if page.readable
    ]
