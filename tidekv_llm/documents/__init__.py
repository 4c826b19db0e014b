"""PDF and text to pages, pages to a prompt, an answer back to pages.

Imports neither torch nor transformers.
"""

from tidekv_llm.documents.citations import ORIGINS, Citation, cite_pages
from tidekv_llm.documents.pages import Document, Page
from tidekv_llm.documents.pdf import PdfLimits
from tidekv_llm.documents.prompt import (
    DEFAULT_INSTRUCTIONS,
    DocumentLayout,
    PageSpan,
    Prompt,
    build_prompt,
    chat_prompt,
    count_document_tokens,
    document_ends,
    lay_out,
)

__all__ = [
    "DEFAULT_INSTRUCTIONS",
    "ORIGINS",
    "Citation",
    "Document",
    "DocumentLayout",
    "Page",
    "PageSpan",
    "PdfLimits",
    "Prompt",
    "build_prompt",
    "chat_prompt",
    "cite_pages",
    "count_document_tokens",
    "document_ends",
    "lay_out",
]
