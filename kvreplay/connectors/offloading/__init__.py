"""vLLM's OffloadingConnector: KV chunks go to CPU memory and come back.

Sources: vllm/distributed/kv_transfer/kv_connector/v1/offloading/ and vllm/v1/kv_offload/.
"""
