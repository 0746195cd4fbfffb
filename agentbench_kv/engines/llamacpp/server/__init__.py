"""What runs inside the llamacpp environment: llama.cpp's cache, sessions over it, and a server.

Nothing outside this folder imports it: the core talks to it over a socket.
"""

from __future__ import annotations
