"""TideKV models for LlamaIndex.

    from llama_index.llms.tidekv import TideKVLLM, WholeDocumentQueryEngine, load_pdf

    engine = WholeDocumentQueryEngine(TideKVLLM(model="smollm2-135m"), load_pdf("manual.pdf"))
    response = engine.query("How tall is the tower?")
    print(response, response.metadata["citations"])

``llama_index`` is somebody else's namespace: neither it nor ``llama_index/llms`` may have an ``__init__.py`` here.
"""

from llama_index.llms.tidekv.base import TideKVLLM
from llama_index.llms.tidekv.loaders import load_pdf
from llama_index.llms.tidekv.query_engine import WholeDocumentQueryEngine
from llama_index.llms.tidekv.settings import configure_settings

__all__ = ["TideKVLLM", "WholeDocumentQueryEngine", "configure_settings", "load_pdf"]
