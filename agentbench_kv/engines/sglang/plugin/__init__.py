"""What runs inside SGLang's processes: 0.5.12 and 0.5.23, checked when it starts.

`launch` starts the server, `hooks` is the plug-in and `versions` what the versions call things. In
the scheduler's process one `runtime.Runtime` has everything: `sessions`, what happens around a
forward (`worker`), who may start and who gives way (`memory`).
"""
