"""adapters.tau2.worker."""
