"""SimpleCPUOffloadConnector: a pool of CPU blocks behind the GPU's (vLLM: v1/simple_kv_offload/)."""
