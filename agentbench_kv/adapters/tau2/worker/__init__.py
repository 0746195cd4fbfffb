"""What runs in the tau2 environment: nothing here imports the package above it."""
