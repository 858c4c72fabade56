"""The Mooncake pair: a producer writes into the memory of the consumer that asked it (vLLM's MooncakeConnector)."""
