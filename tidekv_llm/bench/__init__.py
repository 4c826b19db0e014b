"""Benchmarks: every figure in the README comes from here, each method in a fresh process.

A benchmark is a module of this package with ``add_arguments(parser)`` and ``run(harness) -> Report``, and a line in
:data:`BENCHMARKS`.
"""

BENCHMARKS = {
    "headline": "the README's table: transient, time to first token, fidelity, decode rate",
    "fidelity": "hidden states and next tokens against the whole forward (Table 8, Fig. 6)",
    "memory": "construction memory over prompt length (Fig. 5, Tables 5a and 6)",
    "latency": "time to first token and decode rate of the schedules (Tables 9 and 10)",
    "chunks": "chunk sizes: time to first token against memory (Table 11)",
    "persistent": "no growth over many requests in one process (Table 5b)",
    "capacity": "the longest prompt under a memory limit (Table 6)",
    "selectors": "who stays: selectors and budgets against each other",
    "quotes": "identifiers that must be copied whole: what eviction tears",
    "sessions": "many questions about one document",
    "decode-rate": "tokens per second of the cache's layouts and precisions",
}
