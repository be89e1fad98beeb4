"""The Ray transport: workers are actors of a Ray cluster, tensors travel through its object store."""
