"""The server process; runs with the interpreter of the environment `llamacpp`."""
