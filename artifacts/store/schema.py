"""The tables of the store as DDL, and what an older store lacks of them."""

import re
from collections.abc import Mapping, Set

SCHEMA_VERSION = 5
"""Rises with the tables, and when a column may hold what older code takes for damage: 5 has fractions of bits."""

# Big tables have no key and no index: they are append-only, and a key would make writing four times slower and the
# file five times larger.
CONTROL_TABLES = {
    "schema_version": "version INTEGER NOT NULL, applied_at TIMESTAMP NOT NULL, app_version VARCHAR NOT NULL",
    "models": """
        model_id VARCHAR PRIMARY KEY, name VARCHAR NOT NULL, fingerprint VARCHAR NOT NULL, family VARCHAR NOT NULL,
        num_layers INTEGER NOT NULL, num_experts INTEGER NOT NULL, top_k INTEGER NOT NULL,
        expert_bytes BIGINT NOT NULL""",
    "runs": """
        run_id INTEGER PRIMARY KEY, command VARCHAR NOT NULL,
        status VARCHAR NOT NULL CHECK (status IN ('running', 'complete', 'failed')),
        model_id VARCHAR, data VARCHAR NOT NULL, data_digest VARCHAR NOT NULL, tokens BIGINT NOT NULL,
        seed BIGINT NOT NULL, parameters VARCHAR NOT NULL, started_at TIMESTAMP NOT NULL, seconds DOUBLE NOT NULL,
        versions VARCHAR NOT NULL, contents VARCHAR NOT NULL""",
}

ARTEFACT_TABLES = {
    "activations": """
        run_id INTEGER NOT NULL, phase VARCHAR NOT NULL, layer USMALLINT NOT NULL, expert USMALLINT NOT NULL,
        count BIGINT NOT NULL, weight DOUBLE NOT NULL""",
    "coactivations": """
        run_id INTEGER NOT NULL, layer USMALLINT NOT NULL, i USMALLINT NOT NULL, j USMALLINT NOT NULL,
        count BIGINT NOT NULL, weight DOUBLE NOT NULL""",
    "entropy": """
        run_id INTEGER NOT NULL, layer USMALLINT NOT NULL, percentiles FLOAT[101] NOT NULL,
        histogram BIGINT[] NOT NULL""",
    "similarity": """
        run_id INTEGER NOT NULL, layer USMALLINT NOT NULL, i USMALLINT NOT NULL, j USMALLINT NOT NULL,
        cosine DOUBLE NOT NULL, loss DOUBLE NOT NULL, left_out DOUBLE NOT NULL, samples BIGINT NOT NULL""",
    "buddies": """
        run_id INTEGER NOT NULL, layer USMALLINT NOT NULL, "pivot" USMALLINT NOT NULL, rank USMALLINT NOT NULL,
        buddy USMALLINT NOT NULL, q DOUBLE NOT NULL, cumulative DOUBLE NOT NULL""",
    "quant_loss": """
        run_id INTEGER NOT NULL, layer USMALLINT NOT NULL, expert USMALLINT NOT NULL, bits DOUBLE NOT NULL,
        mse DOUBLE NOT NULL, relative DOUBLE NOT NULL, samples BIGINT NOT NULL,
        basis VARCHAR NOT NULL CHECK (basis IN ('own', 'layer')), gated DOUBLE NOT NULL, energy DOUBLE NOT NULL""",
    "replicas": """
        run_id INTEGER NOT NULL, layer USMALLINT NOT NULL, expert USMALLINT NOT NULL, bits DOUBLE NOT NULL,
        file VARCHAR NOT NULL, nbytes BIGINT NOT NULL, hash VARCHAR NOT NULL""",
    "hardware": """
        run_id INTEGER NOT NULL, device VARCHAR NOT NULL, tokens INTEGER, link VARCHAR, bits DOUBLE NOT NULL,
        attention_s DOUBLE, attention_iqr_s DOUBLE, moe_s DOUBLE, moe_iqr_s DOUBLE, head_s DOUBLE, head_iqr_s DOUBLE,
        expert_s DOUBLE, expert_iqr_s DOUBLE, near_s DOUBLE, near_iqr_s DOUBLE,
        expert_load_s DOUBLE, expert_load_iqr_s DOUBLE, bandwidth_gbps DOUBLE,
        miss_s DOUBLE, miss_iqr_s DOUBLE, host_s DOUBLE, host_iqr_s DOUBLE, latency_s DOUBLE, latency_iqr_s DOUBLE,
        samples INTEGER NOT NULL""",
    "curves": """
        run_id INTEGER NOT NULL, layer USMALLINT NOT NULL,
        kind VARCHAR NOT NULL CHECK (kind IN ('hit', 'prediction', 'prediction_hit')),
        y USMALLINT, size USMALLINT, value DOUBLE NOT NULL""",
    "splits": """
        run_id INTEGER NOT NULL, layer USMALLINT NOT NULL, budget DOUBLE NOT NULL, cache_size USMALLINT NOT NULL,
        theta DOUBLE NOT NULL, exposed_s DOUBLE NOT NULL""",
    "expert_maps": """
        run_id INTEGER NOT NULL, map INTEGER NOT NULL, request INTEGER NOT NULL, iteration INTEGER NOT NULL,
        embedding FLOAT[] NOT NULL, probabilities FLOAT[] NOT NULL""",
    "predictors": """
        run_id INTEGER NOT NULL, layer USMALLINT NOT NULL, distance USMALLINT NOT NULL,
        target VARCHAR NOT NULL CHECK (target IN ('logits', 'selected')), recall DOUBLE NOT NULL,
        next_gate_recall DOUBLE NOT NULL, frequent_recall DOUBLE NOT NULL, samples BIGINT NOT NULL,
        scale FLOAT NOT NULL, weights FLOAT[] NOT NULL""",
    "traces": """
        run_id INTEGER NOT NULL, request INTEGER NOT NULL, pass INTEGER NOT NULL, phase VARCHAR NOT NULL,
        layer USMALLINT NOT NULL, token INTEGER NOT NULL, experts USMALLINT[] NOT NULL, weights FLOAT[] NOT NULL,
        probabilities FLOAT[], predicted FLOAT[], learned FLOAT[], embedding FLOAT[]""",
    "bench": """
        run_id INTEGER NOT NULL, preset VARCHAR NOT NULL, budget VARCHAR NOT NULL, link VARCHAR NOT NULL,
        mode VARCHAR NOT NULL, ttft_ms DOUBLE, tpot_ms DOUBLE, tokens_per_s DOUBLE, hit_rate DOUBLE, late BIGINT,
        misses BIGINT, collisions BIGINT, demand_bytes BIGINT, prefetch_bytes BIGINT, wasted_bytes BIGINT,
        exposed_ms DOUBLE, peak_fast_bytes BIGINT, perplexity_ratio DOUBLE, kl DOUBLE, top1_agreement DOUBLE""",
    "bench_layers": """
        run_id INTEGER NOT NULL, layer USMALLINT NOT NULL, requests BIGINT NOT NULL, hits BIGINT NOT NULL,
        late BIGINT NOT NULL, misses BIGINT NOT NULL, collisions BIGINT NOT NULL, evictions BIGINT NOT NULL,
        few_bits BIGINT NOT NULL, replaced BIGINT NOT NULL""",
    "presets": """
        run_id INTEGER NOT NULL, name VARCHAR NOT NULL, routing VARCHAR NOT NULL, prefetch VARCHAR NOT NULL,
        eviction VARCHAR NOT NULL, miss VARCHAR NOT NULL, residency VARCHAR NOT NULL, scope VARCHAR NOT NULL,
        budget VARCHAR NOT NULL, machine VARCHAR NOT NULL, max_loss DOUBLE NOT NULL, tpot_ms DOUBLE,
        perplexity_ratio DOUBLE""",
}


# Columns whose type holds less in older stores.
_WIDENED = {table: [("bits", "DOUBLE")] for table in ("quant_loss", "replicas", "hardware")}


def columns() -> dict[str, dict[str, str]]:
    """By table, the definition of each column by name."""
    return {table: _columns(ddl) for table, ddl in (CONTROL_TABLES | ARTEFACT_TABLES).items()}


def lacking(present: Mapping[str, Set[str]]) -> str:
    """What a store with these columns by table lacks, in words; empty if it is up to date."""
    missing = {table: definitions.keys() - present.get(table, set()) for table, definitions in columns().items()}
    tables = [table for table in missing if table not in present]
    names = [f"{table}.{name}" for table, names in missing.items() if table in present for name in sorted(names)]
    return ", ".join([*tables, *names])


def unmendable(present: Mapping[str, Set[str]], filled: Set[str]) -> str:
    """Required columns that the `filled` tables of an older store lack, in words; empty if there are none.

    No release left such a store: columns that a version adds may be NULL.
    """
    missing = {
        table: [name for name, text in definitions.items() if name not in present[table] and "NOT NULL" in text]
        for table, definitions in columns().items()
        if table in present and table in filled
    }
    return "; ".join(f"{table} lacks {', '.join(names)}" for table, names in missing.items() if names)


def migration(present: Mapping[str, Set[str]]) -> list[str]:
    """The statements that upgrade a store with these columns by table to this version; versions only add columns and
    widen types."""
    changes = []
    for table, definitions in columns().items():
        missing = {name: definition for name, definition in definitions.items() if name not in present.get(table, ())}
        is_required = any("NOT NULL" in definition for definition in missing.values())
        if table in present and is_required:  # it has no rows, or `unmendable` refused it
            changes.append(f"DROP TABLE {table}")
        elif table in present:
            changes += [f"ALTER TABLE {table} ADD COLUMN {definition}" for definition in missing.values()]
            changes += [f"ALTER TABLE {table} ALTER {name} TYPE {kind}" for name, kind in _WIDENED.get(table, ())]
            continue
        changes.append(f"CREATE TABLE {table} ({(CONTROL_TABLES | ARTEFACT_TABLES)[table]})")
    return changes


def statements() -> list[str]:
    """The statements that create an empty store."""
    return migration({})


def _columns(ddl: str) -> dict[str, str]:
    """Split a definition at the commas that no parenthesis encloses; a name may be quoted."""
    definitions = [part.strip() for part in re.split(r",(?![^(]*\))", ddl)]
    return {definition.split()[0].strip('"'): definition for definition in definitions}
