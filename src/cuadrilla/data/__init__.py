"""Text to batches: sources → clean → tokenizer → shards, then order and loader. Only `loader` needs torch."""
