"""The memory accountant: what a request held, and the highest it went while the cache was built.

The paper (sections 3.2 and 5) splits the working set of cache construction into components and keeps
three peaks apart: what the allocator handed out, what it reserved, and what the process took.

    with MemoryMeter("cpu", weights=weight_bytes(model)) as meter:
        ...                                      # build the compressed cache
        meter.set_component("bridge", bridge.nbytes)
        report = meter.report()                  # now, while the cache is all that is left
    report.transient_bytes                       # peak minus the steady state after it
"""

from tidekv_llm.memory.free import available_bytes, reusable_bytes
from tidekv_llm.memory.meter import COMPONENTS, MemoryMeter, MemoryReport
from tidekv_llm.memory.weights import weight_bytes

__all__ = ["COMPONENTS", "MemoryMeter", "MemoryReport", "available_bytes", "reusable_bytes", "weight_bytes"]
