"""LangChain: answer questions from a whole PDF, with page citations.

pip install "tidekv-llm[langchain]"
python examples/langchain_stuff_pdf.py [manual.pdf] [question]
"""

import sys
from pathlib import Path

from langchain_tidekv import ChatTideKV, load_pdf, stuff_documents_chain

SAMPLE = Path(__file__).parent / "lighthouse.pdf"


def main(path: str = str(SAMPLE), question: str = "What is the name of the harbour master?") -> None:
    with ChatTideKV(model="smollm2-135m", max_tokens=48, kept_tokens=2048) as llm:
        chain = stuff_documents_chain(llm, overflow="retrieve")
        result = chain.invoke({"context": load_pdf(path), "question": question})
    print(result["answer"])
    for citation in result["citations"]:
        checked = "verified" if citation["verified"] else "unverified"
        print(f"  p. {citation['page_label']} ({checked}): {citation['quote']}")
    figures = result["tidekv"]
    print(f"{figures['prompt_tokens']} prompt tokens, {figures['kept_tokens']} kept, {figures['ttft_seconds']:.1f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
