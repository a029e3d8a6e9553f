"""The table of tools.gpu.bench."""


def markdown(report: dict) -> str:
    """A table for each model, with its conditions above it."""
    about = report["gpu"] or {"name": "no GPU, emulated link"}
    rates = report["rates"]
    lines = []
    lines.append(
        (
            f"{about['name']}; link {rates['link'] / 1e9:.1f} GB/s, memory "
            f"{rates['memory'] / 1e9:.0f} GB/s; "
        )
        + ", ".join(
            f"{package} {version}" for package, version in report["versions"].items() if version
        )
    )
    for name, model in report["models"].items():
        lines += ["", _headline(name, model), ""]
        lines += [
            (
                "| | budget | experts by | TTFT ms | TPOT ms | floor ms | share of the floor | "
                "predicted ms "
            )
        ]
        lines[-1] += "| hit rate | MB moved | link used | stall ms |"
        lines.append("|---" * 12 + "|")
        lines += [_line(row) for row in model["rows"]]
    return "\n".join(lines) + "\n"


def _headline(name: str, model: dict) -> str:
    if "experts" not in model:
        return f"**{name}**"
    told = (
        f"**{name}**, random weights, {model['layers']} of {model['layers_published']} layers, "
        f"{model['experts']} experts of {model['expert_nbytes'] / 2**20:.1f} MiB, "
        f"top-{model['top_k']}; prompt of {model['prompt']}, {model['decoded']} tokens decoded."
    )
    if best := model.get("tuned"):
        told += f" Tuned: {', '.join(best.values())}."
    if (said := model.get("routing")) is None:
        return told
    return told + (
        f" Of a token's experts {said['repeated']:.2f} served the token before, "
        f"{said['by_chance']:.2f} by chance; the busiest quarter takes "
        f"{said['busiest_quarter']:.2f} of all choices."
    )


def _line(row: dict) -> str:
    if row["why_not"]:
        return f"| {row['name']} | {row['budget']} | {row['why_not']} |" + " |" * 9
    cells = [row["name"], row["budget"], row["experts"]]
    cells += [
        _cell(row[key], digits) for key, digits in (("ttft_ms", 1), ("tpot_ms", 2), ("floor_ms", 2))
    ]
    cells += [
        _cell(row["floor_share"], 2),
        _cell(row["predicted_ms"], 2),
        _cell(row["hit_rate"], 2),
    ]
    cells += [
        _cell(row["moved_nbytes"] / 1e6, 1),
        _cell(row["link_utilisation"], 2),
        _cell(row["stall_ms"], 2),
    ]
    return f"| {' | '.join(cells)} |"


def _cell(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
