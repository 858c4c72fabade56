"""Several connectors in one engine (vLLM: multi_connector.py)."""
