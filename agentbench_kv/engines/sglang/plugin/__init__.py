"""What runs inside SGLang's processes: 0.5.12 only, checked when it starts.

`launch` starts the server and `hooks` is the plug-in. In the scheduler's process one
`runtime.Runtime` has everything: `sessions`, what happens around a forward (`worker`), who may
start and who gives way (`memory`).
"""
