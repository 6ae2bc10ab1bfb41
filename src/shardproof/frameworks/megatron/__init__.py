"""Parts of the adapters of Megatron-Core and of Megatron FSDP."""
