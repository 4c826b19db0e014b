"""LangChain: a streaming chat through an LCEL chain.

pip install "tidekv-llm[langchain]"
python examples/langchain_chat_stream.py [question]
"""

import sys

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from langchain_tidekv import ChatTideKV

PROMPT = ChatPromptTemplate.from_messages([("system", "Answer in one sentence."), ("human", "{question}")])


def main(question: str = "What is the capital of England?") -> None:
    with ChatTideKV(model="smollm2-135m", max_tokens=48) as llm:
        chain = PROMPT | llm | StrOutputParser()
        for delta in chain.stream({"question": question}):
            print(delta, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
