"""Replay of scheduler and KV-connector traces of LLM inference engines, in virtual time, with faults."""

__version__ = "0.1.0"
