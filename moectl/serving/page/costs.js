/* The view What it costs: figures of the server, from the differences of its counters. */

import { ask, at, bytes, colour, made, number, percent, say, sum } from "./parts.js";

const RECENT = 5, KEPT = 121, EVERY_S = 1;
let samples = [], presets = "", receipt = "";

/* What happened between two samples. */
function between(then, now) {
  const took = {}, s = now.uptime_seconds - then.uptime_seconds;
  for (const [name, value] of Object.entries(now.counters)) took[name] = value - then.counters[name];
  const tokens = now.generated_tokens - then.generated_tokens, busy = now.busy_seconds - then.busy_seconds;
  return {
    speed: s > 0 ? tokens / s : 0,
    hits: took.requests ? took.hits / took.requests : null,
    drafts: took.drafted ? took.accepted / took.drafted : null,
    link: s > 0 ? (took.demand_bytes + took.prefetch_bytes) / s : 0,
    stall: busy > 0 ? Math.min(1, (now.exposed_stall_seconds - then.exposed_stall_seconds) / busy) : null,
  };
}

function showRequests(now) {
  at("requests").textContent = `running ${now.running}, waiting ${now.waiting}`;
}

function showCards(now) {
  const recent = between(samples.at(-1 - RECENT) ?? samples[0], now), counts = now.counters, over = now.requests;
  at("requests-more").textContent = `${number(over.answered)} answered, ${number(over.left)} left by the client, ` +
    `${number(over.refused)} refused, ${number(over.failed)} failed`;
  at("speed").textContent = number(recent.speed, 1);
  at("speed-more").textContent = `${number(now.generated_tokens)} so far`;
  at("hits").textContent = recent.hits === null ? "–" : percent(recent.hits);
  at("hits-more").textContent = counts.requests ? `${percent(counts.hits / counts.requests)} since the start` : "no token yet";
  at("drafts-card").hidden = !counts.drafted;
  at("drafts").textContent = recent.drafts === null ? "–" : percent(recent.drafts);
  at("drafts-more").textContent = `${number(counts.accepted)} of ${number(counts.drafted)} since the start`;
  at("stall").textContent = recent.stall === null ? "–" : percent(recent.stall);
  at("stall-more").textContent = `of computing time, waiting for experts; ${number(now.exposed_stall_seconds, 1)} s so far`;
  at("link").textContent = `${bytes(recent.link)}/s`;
  at("link-more").textContent = `${bytes(counts.demand_bytes)} on demand, ${bytes(counts.prefetch_bytes)} ahead of use`;
  at("first").textContent = now.first_tokens ? `${number(1000 * now.to_first_token_seconds / now.first_tokens)} ms` : "–";
  at("first-more").textContent = "mean, from the request's arrival";
}

/* Users that name themselves, who has taken most first. */
function showOwners(now) {
  const owners = Object.entries(now.owners).sort(([, one], [, other]) => other.busy_seconds - one.busy_seconds);
  at("users").hidden = !owners.some(([name]) => name);
  at("owners").replaceChildren(...owners.map(([name, { counters, ...took }]) => made("tr", {}, ...[
    name || "not named", number(took.first_tokens), number(took.generated_tokens),
    counters.requests ? percent(counters.hits / counters.requests) : "–", bytes(counters.demand_bytes + counters.prefetch_bytes),
    `${number(took.busy_seconds, 1)} s`, `${number(took.exposed_stall_seconds, 1)} s`,
  ].map(textContent => made("td", { textContent })))));
}

/* Charts */

const WIDE = 400, LEFT = 44;

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
const words = (x, y, text, anchor = "start") => svg("text", { x, y, "text-anchor": anchor }, text);
const marks = (values, y, label) => values.flatMap(v =>
  [svg("line", { x1: LEFT, x2: WIDE, y1: y(v), y2: y(v) }), words(LEFT - 6, y(v) + 4, label(v), "end")]);

function showChart(id, height, label, ...children) {
  at(id).replaceChildren(svg("svg", { viewBox: `0 0 ${WIDE} ${height}`, role: "img", "aria-label": label }, ...children));
}

/* A line over the samples; null where nothing happened. */
function showLine(id, values, top, label) {
  const height = 120, x = i => LEFT + (WIDE - LEFT) * i / (KEPT - 2), y = v => 8 + (height - 26) * (1 - v / top);
  const first = KEPT - 1 - values.length, runs = [[]];
  values.forEach((v, i) => v === null ? runs.push([]) : runs.at(-1).push(`${x(first + i).toFixed(1)},${y(v).toFixed(1)}`));
  const lines = runs.filter(run => run.length).map(run => svg("polyline", { points: run.length > 1 ? run.join(" ") : `${run} ${run}` }));
  const known = values.filter(v => v !== null);
  showChart(id, height, known.length ? `now ${label(known.at(-1))}, lowest ${label(Math.min(...known))}, highest ${label(Math.max(...known))}` : "nothing yet",
    ...marks([0, top / 2, top], y, label), ...lines, words(LEFT, height - 4, "2 min ago"), words(WIDE, height - 4, "now", "end"));
}

function showLayers(now) {
  const then = samples[Math.max(0, samples.length - 61)], isRecent = now.counters.requests > then.counters.requests;
  const kinds = [["hits", "hit"], ["late", "late"], ["misses", "miss"]];
  const shares = now.by_layer.map((layer, i) => {
    const since = name => layer[name] - (isRecent ? then.by_layer[i][name] : 0), all = since("requests");
    return { all, of: kinds.map(([name]) => all ? since(name) / all : 0) };
  });
  at("misses-title").textContent = `Hits and misses by layer, ${isRecent ? "last minute" : "since the start"}`;
  const height = 170, step = (WIDE - LEFT) / shares.length, y = v => 8 + (height - 28) * (1 - v), every = Math.ceil(shares.length / 16);
  const bars = shares.flatMap(({ all, of }, i) => {
    let below = 0;
    const title = svg("title", {}, `layer ${i}: ${kinds.map(([name], kind) => `${name} ${percent(of[kind])}`).join(", ")}, of ${number(all)}`);
    const parts = kinds.map(([, style], kind) => {
      const top = y(below + of[kind]), part = svg("rect", { class: style, x: LEFT + i * step + step * .12, width: step * .76, y: top, height: y(below) - top });
      below += of[kind];
      return part;
    });
    return [svg("g", { class: "layer" }, title, ...parts), ...(i % every ? [] : [words(LEFT + (i + .5) * step, height - 4, i, "middle")])];
  });
  showChart("misses-chart", height, shares.map(({ of }, i) => `layer ${i} ${percent(of[2])} misses`).join(", "),
    ...marks([0, .5, 1], y, v => `${number(100 * v)} %`), ...bars);
}

function showExperts(now) {
  const canvas = at("residency"), rows = now.residency;
  const cell = Math.max(2, Math.floor(1280 / rows[0].length)), tall = Math.max(cell > 8 ? 14 : 2, Math.min(cell, 26, Math.floor(480 / rows.length)));
  const states = ["--cold", "--coming", "--held"].map(colour), gap = cell > 5 ? 1 : 0;
  canvas.width = cell * rows[0].length;
  canvas.height = tall * rows.length;
  const pen = canvas.getContext("2d"), fill = (x, y, style) => { pen.fillStyle = style; pen.fillRect(x * cell, y * tall, cell - gap, tall - gap); };
  rows.forEach((row, y) => [...row].forEach((state, x) => fill(x, y, states[state])));
  now.last_token.forEach(({ hit, missed }, y) => {
    hit.forEach(x => fill(x, y, colour("--strong")));
    missed.forEach(x => fill(x, y, colour("--warm")));
  });
  const held = rows.map(row => [...row].filter(state => state === "2").length);
  at("residency-more").textContent = `A row is a layer, layer 0 on top; a column is an expert. ${number(sum(held))} of ${number(rows.length * rows[0].length)} experts are there, in ${number(now.slots)} slots.`;
  const used = i => now.last_token[i] ? `, the last tokens used ${[...now.last_token[i].hit, ...now.last_token[i].missed].join(" ")}` : "";
  canvas.setAttribute("aria-label", held.map((n, i) => `layer ${i}: ${n} of ${rows[0].length} resident${used(i)}`).join("; "));
}

/* What is in force */

/* `a.b` for what lies in an object of its own. */
function flat(value, prefix = "") {
  return Object.entries(value).flatMap(([name, one]) =>
    one && typeof one === "object" && !Array.isArray(one) ? flat(one, `${prefix}${name}.`) : [[prefix + name, one]]);
}

function showForce(now) {
  const said = now.receipt, isEmulated = said.link.kind === "emulated";
  at("about").textContent = `Preset ${now.preset}: ${said.slots} of ${said.experts} experts in the fast tier, ${said.dtype} on ${said.device}.` +
    (isEmulated ? ` The link is emulated${said.scaled_to ? ` in the proportions of ${said.scaled_to}` : ""}: speeds here are not a GPU's.` : "");
  if (receipt === JSON.stringify(said)) return;
  receipt = JSON.stringify(said);
  at("receipt").replaceChildren(...flat(said).filter(([, value]) => value !== null && String(value) !== "")
    .flatMap(([name, value]) => [made("dt", { textContent: name }), made("dd", { textContent: value })]));
}

/* Presets of studies are offered on demand, and shown where one is in force. */
function showPresets(now) {
  const offered = Object.keys(now.presets).filter(name => at("more").checked || name === now.preset || !now.studies.includes(name));
  if (presets === JSON.stringify(offered)) return;
  const chosen = presets && offered.includes(at("preset").value) ? at("preset").value : now.preset;
  presets = JSON.stringify(offered);
  at("preset").replaceChildren(...offered.map(name => new Option(name, name, false, name === chosen)));
  showSummary();
}
const showSummary = () => { at("summary").textContent = samples.at(-1)?.presets[at("preset").value] ?? ""; };

export function showCosts(now) {
  if (samples.length && now.uptime_seconds < samples.at(-1).uptime_seconds) samples = [];  // another server
  showExperts(now);
  showRequests(now);
  if (samples.length && now.uptime_seconds - samples.at(-1).uptime_seconds < .9 * EVERY_S) return;
  samples = [...samples, now].slice(-KEPT);
  const steps = samples.slice(1).map((sample, i) => between(samples[i], sample)), share = v => `${number(100 * v)} %`;
  showForce(now);
  showPresets(now);
  showCards(now);
  showLayers(now);
  showOwners(now);
  showLine("hits-chart", steps.map(step => step.hits), 1, share);
  showLine("stall-chart", steps.map(step => step.stall), 1, share);
  const fastest = Math.max(10, ...steps.map(step => step.speed));
  showLine("speed-chart", steps.map(step => step.speed), Math.ceil(fastest / 10) * 10, v => number(v));
  at("costs-view").setAttribute("aria-busy", false);  // the skeleton goes
}

async function switchPreset(event) {
  event.preventDefault();
  const wanted = at("preset").value, press = at("switch").querySelector("button");
  if (press.getAttribute("aria-disabled") === "true") return;
  press.setAttribute("aria-disabled", true);
  say(`Switching to ${wanted} once earlier requests are answered …`);
  try {
    await ask("preset", { preset: wanted });
    say(`${wanted} is in force.`);
  } catch (error) {
    at("preset").value = samples.at(-1).preset;
    say(error.message, true);
  }
  press.setAttribute("aria-disabled", false);
}

export function beginCosts() {
  at("preset").addEventListener("change", showSummary);
  at("more").addEventListener("change", () => samples.length && showPresets(samples.at(-1)));
  at("switch").addEventListener("submit", switchPreset);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => samples.length && showExperts(samples.at(-1)));
}
