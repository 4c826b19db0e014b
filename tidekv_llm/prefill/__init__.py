"""Layer-major prefill with delayed eviction (paper, section 4.1)."""
