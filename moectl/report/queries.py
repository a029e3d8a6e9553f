"""The queries of a report. All its numbers are computed here, in SQL, so that a reader can repeat
them."""

from collections.abc import Sequence

from artifacts.store.schema import literal
from moectl.show.losses import LEAST_SCORED

# The newest row of each setting of one bench; `altered` counts requests whose output differs from
# the full model's, `error` is the standard error of `loss`: as it was kept, else what the
# divergence makes likely.
_ROWS = """
WITH rows AS (
  SELECT b.*, a.altered, b.budget || ' ' || b.link AS place,
    json_extract(r.parameters, '$.spread.tpot_ms[0]')::DOUBLE AS tpot_lower,
    json_extract(r.parameters, '$.spread.tpot_ms[1]')::DOUBLE AS tpot_upper,
    json_extract(r.parameters, '$.quality.loss_error')::DOUBLE AS kept_error,
    coalesce(json_extract(r.parameters, '$.quality.scored')::BIGINT,
      r.tokens // json_extract(r.parameters, '$.length')::INT
        * ((json_extract(r.parameters, '$.length')::INT + 1) // 2)
    ) AS scored
  FROM bench b JOIN runs r USING (run_id)
  LEFT JOIN (
    SELECT run_id, sum(few_bits + replaced) AS altered FROM bench_layers GROUP BY run_id
  ) a USING (run_id)
  WHERE json_extract_string(r.parameters, '$.job') = {job}
  QUALIFY row_number() OVER (PARTITION BY preset, budget, link ORDER BY run_id DESC) = 1
), beside AS (
  SELECT *,
    coalesce(
      min(tpot_ms) FILTER (preset = 'full') OVER (PARTITION BY link),
      min(tpot_ms) FILTER (preset = 'full') OVER ()
    ) AS full_tpot_ms,
    coalesce(
      min(ttft_ms) FILTER (preset = 'full') OVER (PARTITION BY link),
      min(ttft_ms) FILTER (preset = 'full') OVER ()
    ) AS full_ttft_ms
  FROM rows
), judged AS (
  SELECT *, altered = 0 AS is_lossless,
    CASE WHEN altered = 0 AND perplexity_ratio IS NOT NULL THEN 0 ELSE perplexity_ratio - 1 END
      AS loss,
    coalesce(kept_error, perplexity_ratio * sqrt(2 * greatest(kl, 0) / scored)) AS error,
    mode IN ('live', 'simulated') AND preset NOT IN ('full', 'oracle') AS is_ours,
    max(peak_fast_bytes) OVER (PARTITION BY budget) AS size,
    tpot_ms / full_tpot_ms AS times_full, tpot_lower / full_tpot_ms AS times_lower,
    tpot_upper / full_tpot_ms AS times_upper, ttft_ms / full_ttft_ms AS times_full_ttft
  FROM beside
)"""

MODELS = """
SELECT name, family, num_layers, num_experts, top_k, expert_bytes,
  num_layers * num_experts * expert_bytes AS experts_bytes
FROM models WHERE model_id = {model}"""

SUMMARY = (
    _ROWS
    + """
SELECT budget, link, any_value(size) AS size,
  arg_min(preset, tpot_ms) FILTER (is_lossless) AS exact_preset,
  min(tpot_ms) FILTER (is_lossless) AS exact_ms,
  arg_min(times_full, tpot_ms) FILTER (is_lossless) AS exact_times,
  arg_min(preset, tpot_ms) FILTER (is_good) AS good_preset,
  min(tpot_ms) FILTER (is_good) AS good_ms,
  arg_min(times_full, tpot_ms) FILTER (is_good) AS good_times,
  arg_min(loss, tpot_ms) FILTER (is_good) AS good_loss,
  arg_min(error, tpot_ms) FILTER (is_good) AS good_error,
  arg_min(preset, tpot_ms) FILTER (is_known) AS fast_preset,
  min(tpot_ms) FILTER (is_known) AS fast_ms,
  arg_min(times_full, tpot_ms) FILTER (is_known) AS fast_times,
  arg_min(loss, tpot_ms) FILTER (is_known) AS fast_loss,
  arg_min(error, tpot_ms) FILTER (is_known) AS fast_error,
  min(times_full) FILTER (preset = 'on-demand') AS plain_times,
  max(scored) FILTER (NOT is_known) AS scored
FROM (SELECT *, is_known AND loss + 2 * error <= 0.01 AS is_good FROM (
  SELECT *, coalesce(altered = 0 OR loss IS NULL OR scored >= """
    + str(LEAST_SCORED)
    + """, false) AS is_known
  FROM judged WHERE is_ours AND tpot_ms IS NOT NULL))
GROUP BY budget, link ORDER BY size, link"""
)

# The data and conditions of benches.
CONDITIONS = """
SELECT data, tokens, coalesce(json_extract(parameters, '$.tokens_asked')::BIGINT, tokens) AS asked,
  json_extract(parameters, '$.quality.scored')::BIGINT AS scored,
  json_extract_string(parameters, '$.machine.name') AS machine,
  json_extract(parameters, '$.rounds')::INT AS rounds,
  json_extract(parameters, '$.length')::INT AS length,
  json_extract_string(parameters, '$.machine.processor') AS processor,
  json_extract_string(parameters, '$.machine.gpu') AS gpu,
  json_extract(parameters, '$.machine.cores')::INT AS cores,
  json_extract_string(parameters, '$.model.name') AS model,
  json_extract(parameters, '$.model.shape.num_layers')::BIGINT
    * json_extract(parameters, '$.model.shape.num_experts')::BIGINT
    * json_extract(parameters, '$.model.shape.expert_nbytes')::BIGINT AS experts_bytes,
  coalesce(json_extract_string(parameters, '$.device'), 'cpu') AS device,
  json_extract(parameters, '$.threads')::INT AS threads, seed,
  coalesce(json_extract(parameters, '$.base')::INT, 16) AS base,
  json_extract(parameters, '$.dense')::INT AS dense
FROM runs WHERE json_extract_string(parameters, '$.job') IN ({jobs})
QUALIFY
  row_number() OVER (PARTITION BY json_extract_string(parameters, '$.job') ORDER BY run_id) = 1"""

MARKS = (
    _ROWS
    + """
SELECT budget, link, preset, tpot_ms, tpot_lower, tpot_upper, times_full, times_lower, times_upper,
  loss, error, peak_fast_bytes, is_lossless, is_ours
FROM judged WHERE tpot_ms IS NOT NULL AND peak_fast_bytes IS NOT NULL
ORDER BY size, link, tpot_ms, preset"""
)

TABLE = (
    _ROWS
    + """
SELECT budget, link, preset, mode, ttft_ms, tpot_ms, tpot_lower, tpot_upper, times_full,
  times_lower, times_upper, times_full_ttft, tokens_per_s, hit_rate,
  demand_bytes + prefetch_bytes AS moved_bytes, wasted_bytes, exposed_ms,
  peak_fast_bytes, perplexity_ratio, loss, error, kl, top1_agreement, is_lossless, is_ours, run_id,
  drafted_ratio, acceptance, tokens_per_pass
FROM judged ORDER BY size, link, tpot_ms, preset"""
)

IMPORTED = """
SELECT preset, link, ttft_ms, tpot_ms, tokens_per_s, run_id
FROM bench WHERE mode = 'imported' ORDER BY run_id, preset"""

TASKS = (
    _ROWS
    + """
SELECT budget, link, preset, t.task, t.metric, t.value, t.stderr, t.count, run_id
FROM judged JOIN runs USING (run_id),
  unnest(from_json(json_extract(parameters, '$.tasks'),
    '[{{"task": "VARCHAR", "metric": "VARCHAR", "value": "DOUBLE", "stderr": "DOUBLE",
      "count": "INT"}}]'
  )) AS u(t)
ORDER BY t.task, t.metric, t.value DESC, run_id"""
)

# The cost of buddies and controls in nats of KL for each replaced rank of a token, which makes
# different shares of replaced ranks comparable. Errors are those of the difference to the buddies,
# paired by text.
STAND_IN_PRICES = (
    _ROWS
    + """, priced AS (
  SELECT g.budget, g.link, g.size, g.preset, g.kl, g.perplexity_ratio, g.run_id,
    g.altered / r.tokens AS a_token,
    g.altered / (r.tokens * m.num_layers * m.top_k) AS share,
    from_json(json_extract(r.parameters, '$.by_text.kl'), '["DOUBLE"]') AS by_text
  FROM judged g JOIN runs r USING (run_id) JOIN models m USING (model_id)
  WHERE g.mode = 'live' AND
    g.preset IN ('buddymoe', 'buddymoe-random', 'buddymoe-best', 'buddymoe-zero')
    AND g.altered > 0 AND json_extract(r.parameters, '$.by_text') IS NOT NULL
), paired AS (
  SELECT p.*, p.kl / p.a_token AS price,
    list_transform(list_zip(p.by_text, b.by_text),
      lambda x: x[1] / p.a_token - x[2] / b.a_token) AS beside
  FROM priced p JOIN priced b ON b.preset = 'buddymoe' AND (b.budget, b.link) = (p.budget, p.link)
)
SELECT budget, link, preset, share, kl, perplexity_ratio, price, list_avg(beside) AS difference,
  list_aggregate(beside, 'stddev_samp') / sqrt(len(beside)) AS error, len(beside) AS texts, run_id
FROM paired QUALIFY count(*) OVER (PARTITION BY budget, link) > 1
ORDER BY size, link, price, preset"""
)

LAYERS = (
    _ROWS
    + """
SELECT g.budget, g.link, g.preset, l.layer, l.hits / l.requests AS hit_rate,
  l.collisions / l.requests AS collision_rate
FROM bench_layers l JOIN judged g USING (run_id)
WHERE l.requests > 0 AND g.preset <> 'full'
ORDER BY g.size, g.link, g.hit_rate DESC, g.preset, l.layer"""
)

PREFETCH = (
    _ROWS
    + """
SELECT budget, link, preset, prefetch_bytes, wasted_bytes,
  1 - wasted_bytes / prefetch_bytes AS useful, late, exposed_ms
FROM judged WHERE prefetch_bytes > 0 AND mode IN ('live', 'simulated')
ORDER BY size, link, useful DESC, preset"""
)

USE = """
SELECT layer, expert, sum(count) AS tokens,
  sum(count) / sum(sum(count)) OVER (PARTITION BY layer) * count(*) OVER (PARTITION BY layer)
    AS times_even
FROM activations WHERE run_id = {run} GROUP BY layer, expert ORDER BY layer, expert"""

TOGETHER = """
SELECT layer, i, j, count / sum(count) OVER (PARTITION BY layer, i) AS q
FROM coactivations WHERE run_id = {run} AND layer IN ({layers}) ORDER BY layer, i, j"""

PAIRS = """
SELECT layer, i, j, count AS tokens, q FROM (
  SELECT *, count / sum(count) OVER (PARTITION BY layer, i) AS q FROM coactivations
  WHERE run_id = {run}
) WHERE i < j ORDER BY tokens DESC, layer, i, j LIMIT 8"""

STANDINS = """
SELECT layer, i, j, loss / nullif(left_out, 0) AS share
FROM similarity WHERE run_id = {run} AND layer IN ({layers}) ORDER BY layer, i, j"""

BEST_STANDINS = """
SELECT layer, median(share) AS median_share, sum((share < 1)::INT) AS better,
  count(*) AS experts FROM (
  SELECT layer, i, min(loss / nullif(left_out, 0)) AS share FROM similarity
  WHERE run_id = {run} GROUP BY layer, i
) GROUP BY layer ORDER BY layer"""

LOSS = """
SELECT bits, layer, expert, relative FROM quant_loss WHERE run_id = {run}
ORDER BY bits DESC, layer, expert"""

LOSS_MEANS = """
SELECT bits, avg(relative) AS mean, max(relative) AS worst, sum(nbytes) AS total
FROM quant_loss JOIN replicas USING (run_id, layer, expert, bits)
WHERE run_id = {run} GROUP BY bits ORDER BY bits DESC"""

SPLITS = """
SELECT layer, budget, cache_size, theta,
  exposed_s / nullif(sum(exposed_s) OVER (), 0) AS stall_share
FROM splits WHERE run_id = {run} ORDER BY layer"""

TUNED = """
SELECT name, budget, machine, max_loss, tpot_ms, perplexity_ratio,
  (((parameters->'$.quality')::MAP(VARCHAR, JSON))[name]->>'$.loss_error')::DOUBLE AS error,
  routing, prefetch, eviction, miss,
  residency, scope, run_id
FROM presets JOIN runs USING (run_id) WHERE model_id = {model}
ORDER BY run_id DESC, budget, max_loss"""

RECEIPT = """
SELECT command, count(*) AS runs, max(run_id) AS newest, any_value(data) AS data,
  any_value(tokens) AS tokens, any_value(seed) AS seed, round(sum(seconds), 1) AS seconds,
  strftime(max(started_at), '%Y-%m-%d %H:%M') AS started,
  any_value(versions) AS versions,
  any_value(
    json_merge_patch(parameters, '{{"settings": null, "spread": null, "job": null}}')
  ) AS parameters
FROM runs WHERE run_id IN ({runs}) OR json_extract_string(parameters, '$.job') IN ({jobs})
GROUP BY command, json_extract_string(parameters, '$.job') ORDER BY newest"""

JOBS = """
SELECT json_extract_string(parameters, '$.job') AS job,
  json_extract_string(parameters, '$.mode') AS mode,
  arg_max(model_id, run_id) AS model, max(run_id) AS newest
FROM runs WHERE command = 'bench' AND status = 'complete' GROUP BY ALL ORDER BY newest DESC"""

NEWEST_DAY = "SELECT strftime(max(started_at), '%-d %B %Y') AS day FROM runs"

NEWEST = """
SELECT max(run_id) AS run FROM runs
WHERE status = 'complete' AND model_id = {model} AND json_extract(contents, {path}) IS NOT NULL"""


def filled(query: str, **values: str | int | Sequence[int] | Sequence[str] | None) -> str:
    """Return the query with these values in their places, texts quoted: a store may hold any
    text."""
    return query.format(**{name: _sql(value) for name, value in values.items()})


def _sql(value: str | int | Sequence[int] | Sequence[str] | None) -> str:
    if isinstance(value, int):
        return str(value)
    if value is None or isinstance(value, str):
        return literal(str(value))
    return ", ".join(map(_sql, value)) or "NULL"
