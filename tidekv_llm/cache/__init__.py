"""Compressed decode caches: storage layouts, and what ``model.generate()`` sees of them."""
