"""A small run of the kernels under CUDA's memory checker: reads and writes outside the arena of
slots.

python -m tools.gpu.probes.sanitizer
"""

import subprocess
import sys

from tools.gpu.groups import tell
from tools.gpu.probes.options import parsed

_RUN = """
from tools.gpu.checks.kernels import experts, prompts
print(experts("{device}", (64, 48, 2, 4), calls=4)[0], prompts("{device}", (64, 48, 2, 4), num_tokens=(9,), calls=4)[0])
"""


def main() -> None:
    options = parsed(__doc__)
    command = [
        "compute-sanitizer",
        "--tool",
        "memcheck",
        "--error-exitcode",
        "9",
        sys.executable,
        "-c",
    ]
    done = subprocess.run(
        [*command, _RUN.format(device=options.device)], capture_output=True, text=True, check=False
    )
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    tell(
        name="memcheck of the kernels",
        passed=done.returncode == 0,
        detail=" / ".join(said[-3:])[-300:],
    )


if __name__ == "__main__":
    main()
