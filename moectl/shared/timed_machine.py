"""A machine as users name it, with their own times in place of its bandwidths:
`a100-pcie4:load=14ms,layer=0.3ms`."""

from dataclasses import replace

from artifacts.common.suggestions import unknown
from artifacts.errors import BadUsage
from artifacts.hardware.machines import Machine, machine
from runtime.control.sizes import seconds

_FIELDS = {"load": "load_s", "layer": "layer_s", "head": "head_s"}


def timed_machine(text: str) -> Machine:
    """Return the machine of a name, or of `name:field=time,...`: `load` of one expert over the
    link, `layer` of one layer without its routed experts, `head` of the head. Raises BadUsage."""
    name, _, options = text.partition(":")
    times = {}
    for option in filter(None, options.split(",")):
        field, _, value = option.partition("=")
        if field not in _FIELDS:
            raise BadUsage(unknown("time of a machine", field, _FIELDS))
        times[_FIELDS[field]] = seconds(value)
    found = machine(name)
    return replace(found, name=f"{found.name}:{options}", **times) if times else found
