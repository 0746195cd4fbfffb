"""Where plug-ins written for 0.1 find `param`: see `agentbench_kv.params`."""

from agentbench_kv.params import ParamSpec as ParamSpec
from agentbench_kv.params import param as param
