"""Text to batches: sources → clean → tokenizer → data folder, then order and loader. Only `loader` needs torch."""
