"""Layer-end compression: scoring, selectors and budgets (paper, section 4.2)."""
