"""The tables of the store: their columns with types and meanings.

The meanings are comments in each store, and the page schema.md of the site.
"""

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass

SCHEMA_VERSION = 7
"""Rises with the tables, and when a column may hold what older code takes for damage: 5 has
fractions of bits, 6 verifications, 7 drafts in benches."""


@dataclass(frozen=True, slots=True)
class StoredColumn:
    """A column: its definition after the name, and what its values are."""

    definition: str
    meaning: str

    @property
    def type(self) -> str:
        """The type as DuckDB names it."""
        return self.definition.split()[0]


@dataclass(frozen=True, slots=True)
class StoredTable:
    """A table: what it has one row for, and its columns by name."""

    row: str
    columns: Mapping[str, StoredColumn]


_RUN = "run_id INTEGER NOT NULL -- the run that wrote the row"


def _table(row: str, text: str) -> StoredTable:
    """A table of lines `name definition -- meaning`; a line `-- more` goes on with the meaning."""
    columns = {}
    for line in re.sub(r"\n +-- ", " ", text).strip().splitlines():
        column, _, meaning = line.partition(" -- ")
        name, definition = column.split(maxsplit=1)
        columns[name] = StoredColumn(" ".join(definition.split()), meaning.strip())
    return StoredTable(row, columns)


def _artefact(row: str, text: str) -> StoredTable:
    return _table(row, f"{_RUN}\n{text.strip()}")


# Big tables have no key and no index: they are append-only, and a key would make writing four times
# slower and the file five times larger.
CONTROL_TABLES = {
    "schema_version": _table(
        "version of these tables that the store has had",
        """
        version INTEGER NOT NULL -- the schema's number
        applied_at TIMESTAMP NOT NULL -- when the store was brought to it, UTC
        app_version VARCHAR NOT NULL -- the moectl that did it
        """,
    ),
    "models": _table(
        "model, known by its fingerprint",
        """
        model_id VARCHAR PRIMARY KEY -- the first 16 digits of the fingerprint
        name VARCHAR NOT NULL -- what the user called it: a folder, a file or a name of the Hub
        fingerprint VARCHAR NOT NULL -- SHA-256 of its configuration and of samples of its weights
        family VARCHAR NOT NULL -- the model_type of its configuration
        num_layers INTEGER NOT NULL -- MoE layers
        num_experts INTEGER NOT NULL -- routed experts of a layer
        top_k INTEGER NOT NULL -- experts that a token selects in a layer
        expert_bytes BIGINT NOT NULL -- bytes of one expert as the checkpoint stores it
        """,
    ),
    "runs": _table(
        "command that wrote artefacts: what, from what, with which versions",
        """
        run_id INTEGER PRIMARY KEY -- counts from 1
        command VARCHAR NOT NULL -- the command, as in moectl profile
        status VARCHAR NOT NULL CHECK (status IN ('running', 'complete', 'failed')) -- others
            -- are not read
        model_id VARCHAR -- the model, empty where there was none
        data VARCHAR NOT NULL -- the text or trace, as the user named it
        data_digest VARCHAR NOT NULL -- SHA-256 of what was read from it
        tokens BIGINT NOT NULL -- how many tokens these were
        seed BIGINT NOT NULL -- what random draws began with
        parameters VARCHAR NOT NULL -- the options in force, a JSON object
        started_at TIMESTAMP NOT NULL -- UTC
        seconds DOUBLE NOT NULL -- how long it took, s
        versions VARCHAR NOT NULL -- of Python, moectl and its packages, a JSON object
        contents VARCHAR NOT NULL -- rows and bytes written, a JSON object by table
        """,
    ),
}

ARTEFACT_TABLES = {
    "activations": _artefact(
        "layer, expert and phase: how often it was selected, and with what weight",
        """
        phase VARCHAR NOT NULL -- prefill or decode
        layer USMALLINT NOT NULL -- MoE layer, from 0
        expert USMALLINT NOT NULL -- expert of the layer, from 0
        count BIGINT NOT NULL -- tokens that selected it
        weight DOUBLE NOT NULL -- sum of its shares of those tokens' routing weights; a
            -- token's shares sum to 1
        """,
    ),
    "coactivations": _artefact(
        "layer and pair of experts: how often one token selected both",
        """
        layer USMALLINT NOT NULL -- MoE layer, from 0
        i USMALLINT NOT NULL -- an expert
        j USMALLINT NOT NULL -- another one; each pair stands twice, as i, j and j, i
        count BIGINT NOT NULL -- tokens that selected both
        weight DOUBLE NOT NULL -- sum over those tokens of the smaller of both shares of the
            -- routing weights
        """,
    ),
    "entropy": _artefact(
        "layer: how evenly routers spread a token over its selected experts",
        """
        layer USMALLINT NOT NULL -- MoE layer, from 0
        percentiles FLOAT[101] NOT NULL -- token activating entropy, 0 to 1, that 0, 1 .. 100
            -- % of the tokens stay below
        histogram BIGINT[] NOT NULL -- tokens in each of 4,096 equal parts of 0 to 1
        """,
    ),
    "similarity": _artefact(
        (
            "layer and pair of experts: how alike their outputs are, and what one costs in the "
            "other's place"
        ),
        """
        layer USMALLINT NOT NULL -- MoE layer, from 0
        i USMALLINT NOT NULL -- the expert that is replaced
        j USMALLINT NOT NULL -- the one in its place, another than i
        cosine DOUBLE NOT NULL -- mean over the sampled tokens of the cosine of both outputs
        loss DOUBLE NOT NULL -- mean squared change of the layer's output with j in i's place
        left_out DOUBLE NOT NULL -- the same with nothing in i's place
        samples BIGINT NOT NULL -- sampled tokens that were routed to i; 0: all sampled tokens
            -- were used instead
        """,
    ),
    "buddies": _artefact(
        "layer, pivot and rank: a peer that may stand in",
        """
        layer USMALLINT NOT NULL -- MoE layer, from 0
        pivot USMALLINT NOT NULL -- the expert that is replaced
        rank USMALLINT NOT NULL -- place in its list, from 0, best first
        buddy USMALLINT NOT NULL -- the expert in its place
        q DOUBLE NOT NULL -- score: its share of the scores of all peers, which sum to 1
        cumulative DOUBLE NOT NULL -- q of this and all better ranks
        """,
    ),
    "quant_loss": _artefact(
        "layer, expert and width: what its output loses",
        """
        layer USMALLINT NOT NULL -- MoE layer, from 0
        expert USMALLINT NOT NULL -- expert of the layer, from 0
        bits DOUBLE NOT NULL -- bits a weight
        mse DOUBLE NOT NULL -- mean squared error of its output, without routing weights
        relative DOUBLE NOT NULL -- mse over the mean square of the output
        samples BIGINT NOT NULL -- tokens that were routed to it
        basis VARCHAR NOT NULL CHECK (basis IN ('own', 'layer')) -- own: judged on these;
            -- layer: on the layer's too
        gated DOUBLE NOT NULL -- sum over its own tokens of squared routing weight times
            -- squared error
        energy DOUBLE NOT NULL -- sum over its own tokens of squared routing weight times
            -- squared output
        """,
    ),
    "replicas": _artefact(
        "layer, expert and width: the file that holds its replica",
        """
        layer USMALLINT NOT NULL -- MoE layer, from 0
        expert USMALLINT NOT NULL -- expert of the layer, from 0
        bits DOUBLE NOT NULL -- bits a weight
        file VARCHAR NOT NULL -- path in the folder STORE.replicas; one file may hold several widths
        nbytes BIGINT NOT NULL -- bytes of this width in the file
        hash VARCHAR NOT NULL -- SHA-256 of the whole file
        """,
    ),
    "hardware": _artefact(
        "number of tokens, width near memory, or link: the seconds of a machine's parts",
        """
        device VARCHAR NOT NULL -- where the model computes, as cpu or cuda
        tokens INTEGER -- tokens of the pass: 1 is a decode step; empty for a link
        link VARCHAR -- where experts come from: disk, ram, pinned, pageable or a rate; empty
            -- for a pass
        bits DOUBLE NOT NULL -- bits a weight of the experts
        attention_s DOUBLE -- one layer without its routed experts, s; medians, as all times here
        attention_iqr_s DOUBLE -- distance between its quartiles, s; so for the others
        moe_s DOUBLE -- routed experts of one layer, top_k for each token, s
        moe_iqr_s DOUBLE -- its interquartile range, s
        head_s DOUBLE -- the head on all tokens, s
        head_iqr_s DOUBLE -- its interquartile range, s
        expert_s DOUBLE -- one expert on as many tokens, s
        expert_iqr_s DOUBLE -- its interquartile range, s
        near_s DOUBLE -- one expert computed by the CPU where it lies in RAM, s
        near_iqr_s DOUBLE -- its interquartile range, s
        expert_load_s DOUBLE -- one expert over the link, s
        expert_load_iqr_s DOUBLE -- its interquartile range, s
        bandwidth_gbps DOUBLE -- bytes of an expert over that median, GB/s
        miss_s DOUBLE -- what each missing expert adds to a decode step, s
        miss_iqr_s DOUBLE -- its interquartile range, s
        host_s DOUBLE -- the part of miss_s that is the engine's own work, s
        host_iqr_s DOUBLE -- its interquartile range, s
        latency_s DOUBLE -- the part of expert_load_s that fewer bytes take too, s
        latency_iqr_s DOUBLE -- its interquartile range, s
        samples INTEGER NOT NULL -- measurements of which each is the median
        """,
    ),
    "curves": _artefact(
        "layer, kind and place on its curve: what a cache of each size would have held",
        """
        layer USMALLINT NOT NULL -- MoE layer, from 0
        kind VARCHAR NOT NULL CHECK (kind IN ('hit', 'prediction', 'prediction_hit')) -- which
            -- of the shares value is
        y USMALLINT -- rank of a predicted expert, from 0; empty for hit
        size USMALLINT -- cached experts; empty for prediction
        value DOUBLE NOT NULL -- share of requests that hit; of rank y that are selected; of
            -- rank y that are cached
        """,
    ),
    "splits": _artefact(
        "layer: its share of a budget, its cached experts and their ratio",
        """
        layer USMALLINT NOT NULL -- MoE layer, from 0
        budget DOUBLE NOT NULL -- fast memory, in whole experts
        cache_size USMALLINT NOT NULL -- experts of which a part is cached
        theta DOUBLE NOT NULL -- the part of each that is cached, 0 to 1
        exposed_s DOUBLE NOT NULL -- expected time in a decode step that nothing hides, s
        """,
    ),
    "expert_maps": _artefact(
        "stored iteration: its embedding and what the routers said",
        """
        map INTEGER NOT NULL -- counts from 0
        request INTEGER NOT NULL -- request it is of
        iteration INTEGER NOT NULL -- its prompt is 0, then one a token
        embedding FLOAT[] NOT NULL -- mean input embedding of its tokens at unit length, [hidden]
        probabilities FLOAT[] NOT NULL -- mean distribution of each router, [layers x experts]
            -- by layer
        """,
    ),
    "predictors": _artefact(
        "layer and distance: a fitted predictor and how good it is",
        """
        layer USMALLINT NOT NULL -- MoE layer whose router input it reads, from 0
        distance USMALLINT NOT NULL -- layers it looks ahead, from 1; past the last layer lies
            -- the next pass
        target VARCHAR NOT NULL CHECK (target IN ('logits', 'selected')) -- what it was fitted to
        recall DOUBLE NOT NULL -- share of the selected experts among its top_k, on held-out tokens
        next_gate_recall DOUBLE NOT NULL -- the same of the router ahead, applied early
        frequent_recall DOUBLE NOT NULL -- the same of the layer's most frequent experts
        samples BIGINT NOT NULL -- tokens that it was fitted to
        scale FLOAT NOT NULL -- 1 over the root mean square of the layer's router inputs
        weights FLOAT[] NOT NULL -- matrix [hidden + random features + 1, experts] by row
        """,
    ),
    "traces": _artefact(
        "pass, layer and token: what the router said",
        """
        request INTEGER NOT NULL -- request of the token
        pass INTEGER NOT NULL -- forward pass, in the order in which they ran
        phase VARCHAR NOT NULL -- prefill or decode
        layer USMALLINT NOT NULL -- MoE layer, from 0
        token INTEGER NOT NULL -- position in the request, from 0
        experts USMALLINT[] NOT NULL -- the selected experts, strongest first, [top_k]
        weights FLOAT[] NOT NULL -- their routing weights, [top_k]
        probabilities FLOAT[] -- the router's distribution, [experts]
        predicted FLOAT[] -- what the routers 1, 2 .. layers ahead say of this input,
            -- [distances x experts] by distance
        learned FLOAT[] -- the same from fitted predictors, which may look fewer layers ahead
        embedding FLOAT[] -- mean input embedding of its request in this pass, in its first
            -- row only, [hidden]
        """,
    ),
    "bench": _artefact(
        "preset and setting: speed next to quality",
        """
        preset VARCHAR NOT NULL -- the preset with its parameters, or another program
        budget VARCHAR NOT NULL -- fast memory for experts, in bytes or in % of all
        link VARCHAR NOT NULL -- where experts come from
        mode VARCHAR NOT NULL -- live, simulated, peer (another way of running) or imported
            -- (another program's file)
        ttft_ms DOUBLE -- time to the first token, ms
        tpot_ms DOUBLE -- time of each later token, ms
        tokens_per_s DOUBLE -- tokens in a second
        hit_rate DOUBLE -- share of requests for an expert that found it in fast memory, 0 to 1
        late BIGINT -- requests whose prefetch was still under way
        misses BIGINT -- requests that loaded on demand
        collisions BIGINT -- misses of experts that the same pass had evicted
        demand_bytes BIGINT -- bytes loaded on demand
        prefetch_bytes BIGINT -- bytes prefetched
        wasted_bytes BIGINT -- bytes prefetched and evicted before use
        exposed_ms DOUBLE -- time for which computing waited for loads, ms
        peak_fast_bytes BIGINT -- most fast memory that experts took
        perplexity_ratio DOUBLE -- perplexity over the full model's
        kl DOUBLE -- mean divergence of the next token's distribution from the full model's, nats
        top1_agreement DOUBLE -- share of tokens whose most probable successor is the full
            -- model's, 0 to 1
        acceptance DOUBLE -- share of drafted tokens that were accepted, 0 to 1
        tokens_per_pass DOUBLE -- decoded tokens of a pass, with drafts
        drafted_tpot_ms DOUBLE -- time of each later token with drafts, ms
        drafted_ratio DOUBLE -- that time over the same without drafts, answer by answer
        """,
    ),
    "bench_layers": _artefact(
        "preset, setting and layer: its counters",
        """
        layer USMALLINT NOT NULL -- MoE layer, from 0
        requests BIGINT NOT NULL -- requests for an expert
        hits BIGINT NOT NULL -- those that found it in fast memory
        late BIGINT NOT NULL -- those whose prefetch was still under way
        misses BIGINT NOT NULL -- those that loaded on demand
        collisions BIGINT NOT NULL -- misses of experts that the same pass had evicted
        evictions BIGINT NOT NULL -- experts put out of fast memory
        few_bits BIGINT NOT NULL -- experts computed below full precision
        replaced BIGINT NOT NULL -- ranks that a stand-in served or that were left out
        """,
    ),
    "presets": _artefact(
        "preset that moectl tune found",
        """
        name VARCHAR NOT NULL -- what --preset calls it
        routing VARCHAR NOT NULL -- policy by axis, with its parameters
        prefetch VARCHAR NOT NULL -- so
        eviction VARCHAR NOT NULL -- so
        miss VARCHAR NOT NULL -- so
        residency VARCHAR NOT NULL -- so
        scope VARCHAR NOT NULL -- layer or model: what shares one cache
        budget VARCHAR NOT NULL -- the budget that it was tuned for
        machine VARCHAR NOT NULL -- the machine that it was tuned for
        max_loss DOUBLE NOT NULL -- share of perplexity that it may lose
        tpot_ms DOUBLE -- time of each token as measured live, ms
        perplexity_ratio DOUBLE -- perplexity over the full model's as measured live
        """,
    ),
    "verifications": _artefact(
        "comparison of a predicted speed with a measured one",
        """
        model VARCHAR NOT NULL -- name of the model's file
        digest VARCHAR NOT NULL -- SHA-256 of its header, or the fingerprint of its checkpoint
        engine VARCHAR NOT NULL -- the engine, as llama.cpp
        version VARCHAR NOT NULL -- its version, as it says
        machine VARCHAR NOT NULL -- processor and cores, or the GPU's machine by name
        setting VARCHAR NOT NULL -- what else decides the speed, as threads or a budget
        predicted DOUBLE NOT NULL -- tokens a second, predicted before
        measured DOUBLE NOT NULL -- tokens a second, median of its runs
        spread DOUBLE NOT NULL -- most less least of the runs over their median
        runs INTEGER NOT NULL -- how many runs
        """,
    ),
}

TABLES = CONTROL_TABLES | ARTEFACT_TABLES


def quoted(name: str) -> str:
    """Return an identifier for SQL, whatever it holds."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Return a text for SQL, whatever it holds."""
    return "'" + text.replace("'", "''") + "'"


def lacking(present: Mapping[str, Set[str]]) -> str:
    """Return what a store with these columns by table lacks, in words; empty if it is whole."""
    missing = {
        table: each.columns.keys() - present.get(table, set()) for table, each in TABLES.items()
    }
    tables = [table for table in missing if table not in present]
    names = [
        f"{table}.{name}"
        for table, names in missing.items()
        if table in present
        for name in sorted(names)
    ]
    return ", ".join([*tables, *names])


def statements() -> list[str]:
    """Return the statements that create an empty store, with comments that say what its columns
    are."""
    created = []
    for table, each in TABLES.items():
        columns = ", ".join(
            f"{quoted(name)} {column.definition}" for name, column in each.columns.items()
        )
        created.append(f"CREATE TABLE {quoted(table)} ({columns})")
        about = literal(f"one row per {each.row}")
        created.append(f"COMMENT ON TABLE {quoted(table)} IS {about}")
        created += [
            f"COMMENT ON COLUMN {quoted(table)}.{quoted(name)} IS {literal(column.meaning)}"
            for name, column in each.columns.items()
        ]
    return created
