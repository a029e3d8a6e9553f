"""A run says which code made it."""

from pathlib import Path

import pytest

from artifacts.store import runs


def test_versions_name_what_compiles_and_reads_weights() -> None:
    assert {"python", "moectl", "numba", "safetensors", "torch", "duckdb"} <= runs.versions().keys()


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_commit_of_a_checkout_and_of_a_worktree(tmp_path: Path, is_packed: bool) -> None:
    git = tmp_path / "main" / ".git"
    commit = "a" * 40
    (git / "worktrees" / "two").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/one\n")
    if is_packed:
        (git / "packed-refs").write_text(
            f"# pack-refs\n{commit} refs/heads/one\n{'b' * 40} refs/heads/two\n"
        )
    else:
        (git / "refs" / "heads").mkdir(parents=True)
        (git / "refs" / "heads" / "one").write_text(f"{commit}\n")
        (git / "refs" / "heads" / "two").write_text(f"{'b' * 40}\n")
    assert runs._commit(git) == commit
    (worktree := tmp_path / "two").mkdir()
    (worktree / ".git").write_text(f"gitdir: {git / 'worktrees' / 'two'}\n")
    (git / "worktrees" / "two" / "HEAD").write_text("ref: refs/heads/two\n")
    (git / "worktrees" / "two" / "commondir").write_text("../..\n")
    assert runs._commit(worktree / ".git") == "b" * 40
    (git / "HEAD").write_text(f"{commit}\n")
    assert runs._commit(git) == commit
    assert runs._commit(tmp_path / "none" / ".git") is None
