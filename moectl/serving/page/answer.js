/* One turn of a conversation as elements: Markdown, folded thinking, calls of tools, its experts. */

import { amount, colour, copier, made, number, percent, sum } from "./parts.js";

const { marked, DOMPurify } = globalThis;
const escaped = text => text.replace(/[&<>"]/g, one => `&#${one.charCodeAt(0)};`);
const markdown = new marked.Marked({ gfm: true, breaks: true }, {
  renderer: {
    html: ({ text }) => /^<br\s*\/?>$/i.test(text.trim()) ? "<br>" : escaped(text),  // shown, not obeyed
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,  // nothing is fetched
    checkbox: ({ checked }) => checked ? "☑ " : "☐ ",
  },
});
const ALLOWED = {
  ALLOWED_TAGS: ["a", "b", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "li",
    "ol", "p", "pre", "s", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["href", "start", "align"], ALLOW_DATA_ATTR: false, RETURN_DOM_FRAGMENT: true,
};

/* A text of a model as elements, whatever is in it. */
export function rendered(text) {
  const found = DOMPurify.sanitize(markdown.parse(text), ALLOWED);
  for (const link of found.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const block of [...found.querySelectorAll("pre, table")]) {
    const frame = made("div", { className: "framed" });
    block.replaceWith(frame);
    block.tabIndex = 0;  // it scrolls sideways, for the keyboard too
    frame.append(block);
    if (block.tagName === "PRE") frame.append(copier(() => block.textContent, "Copy the code"));
  }
  return found;
}

/* What is kept of a token's cost: its text, experts that were there and that were not, stall, and a
   digit for each layer: 0 if all were there, 9 if none was. */
export function costOf(text, { hits, late, misses, stall_ms: ms }) {
  const away = late.map((count, i) => count + misses[i]);
  const layers = away.map((count, i) => count ? Math.max(1, Math.round(9 * count / (count + hits[i]))) : 0).join("");
  return { text, there: sum(hits), away: sum(away), ms, layers };
}

/* The experts of an answer: a column for each token, a row for each layer. */
function expertStrip(costs) {
  const title = made("summary"), canvas = made("canvas", { className: "strip" }), told = made("p", { className: "key" });
  const range = made("input", { type: "range", min: 1, value: 1 });
  const key = made("p", { className: "key" });
  for (const [style, text] of [["hit", "all were there"], ["half", "some were not"], ["miss", "none was"]])
    key.append(made("span", {}, made("i", { className: style }), text));
  const element = made("details", { className: "experts" }, title, made("div", { className: "wide" }, canvas, range), told, key);
  element.open = localStorage.getItem("moectl.experts") !== "closed";
  element.addEventListener("toggle", () => localStorage.setItem("moectl.experts", element.open ? "open" : "closed"));
  canvas.setAttribute("role", "img");
  range.setAttribute("aria-label", "Token whose experts are told");
  let wide = 1, isChosen = false;

  function tell() {
    const i = range.value - 1, one = costs[i], missed = [...one.layers].flatMap((digit, layer) => digit > 0 ? [layer] : []);
    const where = missed.length ? ` (layers ${missed.slice(0, 12).join(", ")}${missed.length > 12 ? " and more" : ""})` : "";
    told.textContent = `Token ${i + 1} of ${costs.length}${one.text ? ` “${one.text}”` : ""}${i ? "" : " with the prompt"}: ` +
      `${amount(one.there)} experts were there, ${amount(one.away)} were not${where}; stall ${number(one.ms, 1)} ms`;
    range.setAttribute("aria-valuetext", told.textContent);
  }

  function draw() {
    if (!costs.length) return;
    const rows = costs[0].layers.length, tall = Math.max(2, Math.min(12, Math.floor(96 / rows)));
    wide = Math.max(2, Math.min(14, Math.floor((element.clientWidth || 600) / costs.length)));
    canvas.width = wide * costs.length;
    canvas.height = tall * rows;
    range.style.width = `${canvas.width}px`;
    range.max = costs.length;
    if (!isChosen) range.value = costs.length;
    const gap = wide > 4 ? 1 : 0;
    const pen = canvas.getContext("2d"), there = colour("--strong"), away = colour("--warm"), ink = colour("--ink");
    costs.forEach((one, x) => [...one.layers].forEach((digit, y) => {
      for (const [style, alpha] of digit > 0 ? [[there, 1], [away, digit / 9]] : [[there, 1]]) {
        pen.fillStyle = style;
        pen.globalAlpha = alpha;
        pen.fillRect(x * wide, y * tall, wide - gap, tall - gap);
      }
    }));
    pen.globalAlpha = 1;
    pen.strokeStyle = ink;
    if (isChosen) pen.strokeRect((range.value - 1) * wide - .5, .5, wide, canvas.height - 1);
    else canvas.parentElement.scrollLeft = canvas.width;  // the newest token
    const all = sum(costs.map(one => one.there)), none = sum(costs.map(one => one.away));
    const share = all + none ? percent(all / (all + none)) : "none wanted";
    title.textContent = `Its experts: ${share} were there`;
    canvas.setAttribute("aria-label", `Experts of ${costs.length} tokens in ${rows} layers: ${share} were there`);
    tell();
  }

  function choose(value) {
    if (isChosen && range.value === String(value)) return;
    isChosen = true;
    range.value = value;
    draw();
  }
  range.addEventListener("input", () => { isChosen = true; draw(); });
  canvas.addEventListener("pointermove", event => choose(Math.min(costs.length, 1 + Math.floor(event.offsetX / wide))));
  new ResizeObserver(draw).observe(element);
  return { element, draw };
}

/* The elements of a message, and `update`, to be called after it has changed. */
export function turnOf(message, actions) {
  const isUser = message.role === "user", body = made("div", { className: "text" });
  const element = made("article", { className: `turn ${message.role}` }, made("h3", { textContent: isUser ? "You" : "Model" }));
  const thinking = made("details", { className: "thinking" }, made("summary"), made("div", { className: "text plain" }));
  const calls = made("div"), strip = expertStrip(message.costs ?? []), foot = made("div", { className: "foot" }), told = made("small");
  foot.append(told, ...actions);
  if (isUser) element.append(body, foot);
  else element.append(thinking, body, calls, strip.element, foot);

  function update(isUnderWay = false) {
    element.setAttribute("aria-busy", isUnderWay);
    element.classList.toggle("under-way", isUnderWay);
    if (isUser) body.textContent = message.content;
    else body.replaceChildren(rendered(message.content));
    body.hidden = !isUser && !message.content;
    body.classList.toggle("plain", isUser);
    thinking.hidden = !message.reasoning;
    const isThinking = isUnderWay && !message.content;
    thinking.firstChild.textContent = `${isThinking ? "Thinks, for" : "Thought for"} ${number(message.thought_s ?? 0, 1)} s`;
    thinking.lastChild.textContent = message.reasoning ?? "";
    calls.replaceChildren(...(message.calls ?? []).map(call => made("details", { className: "call" },
      made("summary", { textContent: `Calls ${call.name}` }), made("pre", { textContent: call.arguments, tabIndex: 0 }))));
    strip.element.hidden = !message.costs?.length;
    strip.draw();
    told.textContent = message.told ?? "";
  }
  update();
  return { element, update, body };
}
