"""What runs inside SGLang's processes: 0.5.12 only, checked when it starts.

`launch` starts the server, `plugin` installs the hooks listed in `hooks`. In the scheduler's
process one `runtime.Runtime` has everything: `book` the sessions, `steps` what happens around a
forward, `worker` the rows and queries, `compaction` rows and pages that become free, `admission`
who may start, `memory` who gives way, `commands` what the harness may ask and `desk` the queue it
waits in, `forks` shared prefixes.
"""

from __future__ import annotations
