"""LlamaIndex: answer questions from a whole PDF, with page citations.

pip install "tidekv-llm[llama-index]"
python examples/llama_index_query_pdf.py [manual.pdf] [question]
"""

import sys
from pathlib import Path

from llama_index.llms.tidekv import TideKVLLM, WholeDocumentQueryEngine, load_pdf

SAMPLE = Path(__file__).parent / "lighthouse.pdf"


def main(path: str = str(SAMPLE), question: str = "What is the name of the harbour master?") -> None:
    with TideKVLLM(model="smollm2-135m", max_tokens=48, kept_tokens=2048) as llm:
        engine = WholeDocumentQueryEngine(llm, load_pdf(path), overflow="retrieve")
        response = engine.query(question)
    print(response)
    for citation in response.metadata["citations"]:
        checked = "verified" if citation["verified"] else "unverified"
        print(f"  p. {citation['page_label']} ({checked}): {citation['quote']}")
    for page in response.metadata["pages"]["left_out"]:
        print(f"  not read: p. {page['page_label']}, {page['tokens']} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
