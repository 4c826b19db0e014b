"""The document-QA web app: ``tidekv app``."""
