"""Serving engines: a backend in a process of its own, driven over HTTP and a control channel.

`engine` is the base class, `wire` what each engine must say about itself, `process` and `links`
start a backend, `control` and `streams` talk to it. `backend/` is what runs inside.
"""
