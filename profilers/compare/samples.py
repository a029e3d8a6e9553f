"""Keeps the samples of a bench under way beside the store, line by line, so that the same command
continues it."""

import json
import os
from dataclasses import asdict
from pathlib import Path

from artifacts.errors import BadInput
from profilers.compare.bench import BenchSample, BenchSetting
from profilers.compare.drafted import Answers, DraftedPairs

Key = tuple[int, BenchSetting]  # round and setting


class KeptSamples:
    """The file of one bench; its name has the `digest` of everything that its numbers depend on."""

    def __init__(self, store_path: Path, digest: str) -> None:
        self.path = store_path.with_name(f"{store_path.name}.bench-{digest}.jsonl")

    def load(self) -> tuple[dict[Key, BenchSample], dict[str, dict[str, str]]]:
        """Return the samples so far, and the options by link that they were measured with.

        Raises BadInput for a damaged file.
        """
        samples = {}
        options = {}
        for line in self._lines():
            setting = BenchSetting(**line["setting"])
            samples[line["round"], setting] = _sample(line["sample"])
            options.setdefault(setting.link, {}).update(line["pace"])
        return samples, options

    def add(
        self, turn: int, setting: BenchSetting, sample: BenchSample, *, pace: dict[str, str]
    ) -> None:
        line = {"round": turn, "setting": asdict(setting), "sample": asdict(sample), "pace": pace}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _lines(self) -> list[dict]:
        """Return the complete lines; the last one may have been cut off."""
        if not self.path.is_file():
            return []
        *whole, rest = self.path.read_bytes().split(b"\n")
        if rest:  # truncated, because rewriting the file would take time and space
            os.truncate(self.path, self.path.stat().st_size - len(rest))
        try:
            return [json.loads(line) for line in whole]
        except ValueError as error:
            raise BadInput(
                f"{self.path} is damaged ({error}): remove it, and the bench begins anew"
            ) from error


def _sample(fields: dict) -> BenchSample:
    pairs = fields.get("drafted") or {}
    answers = {way: Answers(**_with_tuples(one)) for way, one in pairs.items()}
    drafted = DraftedPairs(**answers) if answers else None
    return BenchSample(**_with_tuples(fields) | {"drafted": drafted})


def _with_tuples(fields: dict) -> dict:
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
