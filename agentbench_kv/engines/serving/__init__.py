"""Serving engines: a backend in a process of its own, driven over HTTP and a control channel.

`engine` is the base class, `session` what it keeps of each session, `wire` what each engine must
say about itself, `transport` how it is spoken to, `model_facts` what a model folder says,
`process` the backend as the harness sees it, `refusals` what is refused before one starts.
"""
