"""How weights lie in memory, and how one layer's are made ready to be computed with."""
