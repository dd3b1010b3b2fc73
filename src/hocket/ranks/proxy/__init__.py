"""The proxy check's side in ranks."""
