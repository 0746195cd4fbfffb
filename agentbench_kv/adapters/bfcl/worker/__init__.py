"""adapters.bfcl.worker."""
