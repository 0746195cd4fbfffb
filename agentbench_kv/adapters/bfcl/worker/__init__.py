"""What runs in the bfcl environment: nothing here imports the package above it."""
