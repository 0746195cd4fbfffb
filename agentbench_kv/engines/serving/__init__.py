"""Serving engines: a backend in a process of its own, driven over HTTP and a control channel.

`engine` is the base class, `wire` what each engine must say about itself, `process` the backend as
the harness sees it, `plugin` what every engine runs inside the backend.
"""
