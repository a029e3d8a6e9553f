"""Lists of docs/models.md: which families open, with which formats they were tested, which requests
are answered one at a time, and which families are refused, with the reason.

python -m tools.docs.models                          prints them
python -m tools.docs.models --write docs/models.md   puts them there
"""

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from textwrap import fill

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from runtime.model.families import REFUSED
from runtime.model.gguf.architectures import ARCHITECTURES
from tools.arguments import parser_of
from tools.make.families import ALONE, FAMILIES, PUBLISHED


def parts() -> dict[str, str]:
    """Return the lists by the name of their place on the page."""
    multimodal = [family for family in sorted(FAMILIES) if CONFIG_MAPPING[family].sub_configs]
    texts = sorted({*FAMILIES} - {*multimodal})
    return {
        "families": f"moectl opens every model of transformers {version('transformers')} whose "
        "experts go through its experts interface:\n\n"
        f"- **Text models** ({len(texts)}): {_names(texts)}.\n"
        f"- **Language part of multimodal models** ({len(multimodal)}): {_names(multimodal)}.\n",
        "refused": _by_reason(REFUSED),
        "alone": _by_reason({family: _why_alone(kind) for family, kind in ALONE.items()}),
        "pairs": "".join(f"- {name}: {_names(found)}.\n" for name, found in PUBLISHED.items()),
        "architectures": f"{', '.join(map(_read_as, sorted(ARCHITECTURES)))}.\n",
    }


def written_into(page: str) -> str:
    """Return the page with each list in its place."""
    for name, text in parts().items():
        head, begin, rest = page.partition(f"<!-- {name}: -->\n")
        _, end, tail = rest.partition(f"<!-- :{name} -->")
        assert begin and end, f"the page needs the lines <!-- {name}: --> and <!-- :{name} -->"
        lines = [
            fill(line, 140, subsequent_indent="  " * line.startswith("-"), break_on_hyphens=False)
            for line in text.splitlines()
        ]
        page = "\n".join([f"{head}{begin}", *lines, f"\n{end}{tail}"])
    return page


def _by_reason(reasons: Mapping[str, str]) -> str:
    ordered = groupby(sorted(reasons, key=lambda family: (reasons[family], family)), reasons.get)
    return "".join(f"- {_names(families)}: {why}.\n" for why, families in ordered)


def _why_alone(kind: str) -> str:
    if kind:
        return f"layers of the kind {kind} hold more than keys and values"
    return "transformers' scan forgets the state where several tokens follow others"


def _read_as(architecture: str) -> str:
    families = [name for name in ARCHITECTURES[architecture].families if name != architecture]
    return f"`{architecture}`" + (f" ({_names(families)})" if families else "")


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main() -> None:
    page = parser_of(__doc__, write=(Path, "write the lists there")).parse_args().write
    if page:
        page.write_text(written_into(page.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n".join(parts().values()), end="")


if __name__ == "__main__":
    main()
