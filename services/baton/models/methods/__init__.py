"""The methods by which checkpoints are quantized, read from their quantization_config without torch."""
