"""A disk that is full as the store puts its log into its file."""

from pathlib import Path

from tests.helpers.stores import said_by, verified, write

AT_CHECKPOINT = """
import resource, signal
from artifacts.errors import OutOfResources
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
class Full:
    def __init__(self, connection): self._connection = connection
    def __getattr__(self, name): return getattr(self._connection, name)
    def execute(self, query, *arguments):
        if query.startswith("CHECKPOINT"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        return self._connection.execute(query, *arguments)
store = Store.open(Path(sys.argv[1]))
store._connection = Full(store._connection)
try:
    store.write_run(run_info(), {"activations": activations(3000)})
except OutOfResources as error:
    print(error)
try:
    store.runs()
except OutOfResources as error:
    print("again:", error)
store.close()
print("closed")
"""


def test_it_is_said_and_nothing_is_lost(filled: Path) -> None:
    said = said_by(AT_CHECKPOINT, filled)
    assert (
        said.startswith(f"no space left on the disk of {filled}; free some and try again")
        and "closed" in said
    )
    assert verified(filled) == [1, 2], "the run was in the log when the disk was full, and is whole"
    assert write(filled) == 3
    assert [entry.name for entry in filled.parent.iterdir()] == [filled.name]
