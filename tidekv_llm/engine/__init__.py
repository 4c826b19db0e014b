"""The engine: a model, and how prompts are run on it.

facade.py     TideKV, the object that users hold
session.py    documents that stay open for several questions
run.py        the path from token ids to an answer: read this first
decoding.py   one request's decode loop
together.py   many questions, their answers decoded as one batch
weights.py    the model in memory, shared and let go
answers.py    what comes back
"""

from tidekv_llm.engine.answers import Answer, AnswerStream, Generation, Stream
from tidekv_llm.engine.facade import PromptInput, TideKV
from tidekv_llm.engine.session import Session

__all__ = ["Answer", "AnswerStream", "Generation", "PromptInput", "Session", "Stream", "TideKV"]
