/* The view Chat. `shown` is the conversation on the page, `answering` the answer under way. */

import { costOf, turnOf } from "./answer.js";
import * as kept from "./conversations.js";
import { ask, at, button, copier, events, made, number, percent, question, reason, say, send } from "./parts.js";

const FIELDS = [  // name in a request, words, limits
  ["temperature", "Temperature", { min: 0, max: 2, step: "any" }], ["top_p", "Top p", { min: 0, max: 1, step: "any" }],
  ["top_k", "Top k", { min: 0, step: 1 }], ["min_p", "Min p", { min: 0, max: 1, step: "any" }],
  ["max_tokens", "Longest answer, tokens", { min: 1, step: 1 }], ["seed", "Seed", { step: 1 }],
];
const EFFORTS = ["low", "medium", "high"];
const DRAWN_MS = 60, DRAWN_SHARE = 8;  // a long answer takes longer to draw, and the model may want the processor

let shown = kept.find(kept.current()) ?? kept.all()[0] ?? kept.begun();
let answering = null;

function save(conversation) {
  try {
    kept.keep(conversation);
  } catch (error) {
    say(`This browser keeps no more (${error.name}): export or delete a conversation.`, true, "chat-said");
  }
  showList();
}

function showList() {
  const every = kept.all();
  if (!every.some(one => one.id === shown.id)) every.unshift(shown);
  at("name").textContent = kept.nameOf(shown);
  countSettings();
  at("list").replaceChildren(...every.map(one => {
    const isShown = one.id === shown.id, choose = button(kept.nameOf(one), () => show(one));
    choose.className = "name";
    if (!isShown) return made("li", {}, choose);
    choose.setAttribute("aria-current", "true");
    return made("li", {}, choose, made("div", { className: "buttons" }, button("Rename", rename), button("Export", exported), button("Delete", remove)));
  }));
}

function show(conversation) {
  shown = conversation.id === answering?.conversation.id ? answering.conversation : conversation;
  kept.setCurrent(shown);
  showList();
  showTurns();
  openSide(false);
  say("", false, "chat-said");
  at("text").focus();
}

function showTurns() {
  const log = at("turns");
  log.replaceChildren(...shown.messages.map((message, i) => {
    const turn = turnOf(message, [
      copier(() => message.content, "Copy the turn"), button("Edit", () => edit(message, turn)),
      ...(message.role === "assistant" ? [button("Regenerate", () => regenerate(i))] : []),
    ]);
    if (answering?.message === message) answering.turn = turn;
    return turn.element;
  }));
  if (!shown.messages.length) log.append(made("p", { className: "quiet", textContent: "Write something below. The model answers here, and beside each answer stand the experts that it took." }));
  log.scrollTop = log.scrollHeight;
  enable();
}

function enable() {
  at("stop").hidden = !answering;
  at("send").hidden = Boolean(answering);
  for (const one of document.querySelectorAll("#turns .foot button")) one.disabled = Boolean(answering);
}

async function rename() {
  const one = shown, name = await question("Name of the conversation", "Rename", kept.nameOf(one));
  if (name !== null) save(Object.assign(one, { name }));
}

async function remove() {
  const one = shown;
  if (!await question(`Delete “${kept.nameOf(one)}”?`, "Delete")) return;
  if (answering?.conversation === one) answering.controller.abort();
  kept.remove(one);
  show(kept.all()[0] ?? kept.begun());
}

function exported() {
  const file = new Blob([JSON.stringify(shown, null, 2)], { type: "application/json" });
  const link = made("a", { href: URL.createObjectURL(file), download: "conversation.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/* Edit a turn in its place. A message of the user is sent again, and later turns are dropped. */
function edit(message, { element, body, update }) {
  const isUser = message.role === "user", area = made("textarea", { value: message.content, rows: 4 });
  area.setAttribute("aria-label", "Text of the turn");
  const end = () => { box.remove(); body.hidden = false; element.querySelector(".foot").hidden = false; };
  const box = made("form", { className: "edit" }, area, made("div", { className: "buttons" },
    made("button", { className: "first", textContent: isUser ? "Send again" : "Save" }), button("Cancel", end)));
  box.addEventListener("submit", event => {
    event.preventDefault();
    if (answering || !area.value.trim()) return;
    end();
    if (isUser) {
      const before = shown.messages.slice(0, shown.messages.indexOf(message));
      answer([...before, { role: "user", content: area.value }]);
    } else {
      message.content = area.value;
      update();
      save(shown);
    }
  });
  body.hidden = true;
  element.querySelector(".foot").hidden = true;
  body.after(box);
  area.focus();
}

const regenerate = i => answer(shown.messages.slice(0, i));

/* What an answer took, in words. */
function toldOf({ counters, tpot_ms: ms, token_ids: ids }, reason) {
  return `${number(ids.length)} tokens${ms ? `, ${number(1000 / ms, 1)} per second` : ""}` +
    `${counters.requests ? `, hit rate ${percent(counters.hits / counters.requests)}` : ""}, stall ${number(counters.exposed_ms)} ms` +
    `${reason === "length" ? "; ended at the longest answer" : ""}`;
}

/* Takes the events of one answer into a message. */
function taker(message) {
  let text = "", firstMs = 0, thoughtMs = 0;
  return ({ choices: [choice], moectl, error }) => {
    if (error) throw new Error(error.message);
    const { content = "", reasoning_content: reasoning = "", tool_calls: calls = [] } = choice?.delta ?? {}, now = performance.now();
    if (reasoning) {
      thoughtMs ||= now;
      message.thought_s = (now - thoughtMs) / 1000;
      message.reasoning = (message.reasoning ?? "") + reasoning;
    }
    message.content += content ?? "";
    for (const { index, function: called } of calls) {
      message.calls ??= [];
      const call = message.calls[index] ??= { name: called.name, arguments: "" };
      call.arguments += called.arguments ?? "";
    }
    text += (reasoning ?? "") + (content ?? "") + calls.map(({ function: { name = "", arguments: more = "" } }) => name + more).join("");
    if (moectl?.token) {
      message.costs.push(costOf(text, moectl.token));
      text = "";
      firstMs ||= now;
      const count = message.costs.length;
      message.told = `${number(count)} tokens${count > 1 ? `, ${number(1000 * (count - 1) / (now - firstMs), 1)} per second` : ""}`;
    } else if (moectl) {
      message.told = toldOf(moectl, choice?.finish_reason);
      return true;
    }
    return false;
  };
}

/* Have the model answer these messages of the conversation that is shown. What nothing came of is undone. */
async function answer(messages) {
  const conversation = shown, before = shown.messages, message = { role: "assistant", content: "", costs: [] };
  const controller = new AbortController(), log = at("turns"), take = taker(message);
  const sent = [...(shown.system ? [{ role: "system", content: shown.system }] : []), ...messages.map(({ role, content }) => ({ role, content }))];
  answering = { conversation, message, controller, turn: null };
  shown.messages = [...messages, message];
  say("", false, "chat-said");
  save(conversation);
  showTurns();
  let isOver = false, nextMs = 0;
  try {
    const model = (await ask("v1/models")).data[0].id;
    const asked = { ...kept.settings(), model, messages: sent, stream: true, counters: "by_token" };
    for await (const event of events(await send("v1/chat/completions", asked, controller.signal))) {
      isOver = take(event) || isOver;
      const now = performance.now();
      if (now < nextMs || shown !== conversation) continue;
      const isAtEnd = log.scrollTop + log.clientHeight > log.scrollHeight - 40;
      answering.turn.update(true);
      if (isAtEnd) log.scrollTop = log.scrollHeight;
      nextMs = now + Math.max(DRAWN_MS, DRAWN_SHARE * (performance.now() - now));
    }
  } catch (error) {
    if (error.name === "AbortError") message.told = `${message.told ? `${message.told}; ` : ""}stopped`;
    else say(reason(error), true, "chat-said");
  }
  const turn = answering.turn;
  answering = null;
  const isAtEnd = log.scrollTop + log.clientHeight > log.scrollHeight - 40;
  if (!isOver && !message.content && !message.reasoning) {
    conversation.messages = before;
    at("text").value ||= messages.length > before.length ? messages.at(-1).content : "";
    if (shown === conversation) showTurns();
  }
  if (kept.find(conversation.id)) save(conversation);  // else it was deleted
  turn.update();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
  enable();
}

/* Settings */

function fillSettings() {
  const given = kept.settings();
  at("sampling").replaceChildren(...FIELDS.map(([name, words, limits]) => made("label", {}, words,
    made("input", { type: "number", id: `set-${name}`, value: given[name] ?? "", ...limits }))),
  made("label", {}, "Reasoning effort", made("select", { id: "set-reasoning_effort" },
    ...["", ...EFFORTS].map(effort => new Option(effort || "the model's", effort, false, effort === given.reasoning_effort)))));
  at("system").value = shown.system;
}

/* The number of settings in force beside the word, so that none is forgotten. */
function countSettings() {
  const count = Object.keys(kept.settings()).length + (shown.system ? 1 : 0);
  at("show-settings").textContent = count ? `Settings (${count})` : "Settings";
}

function takeSettings() {
  const effort = at("set-reasoning_effort").value;
  const numbers = FIELDS.map(([name]) => [name, at(`set-${name}`)]).filter(([, input]) => input.value);
  kept.setSettings({ ...Object.fromEntries(numbers.map(([name, input]) => [name, input.valueAsNumber])), ...(effort && { reasoning_effort: effort }) });
  shown.system = at("system").value.trim();
  if (shown.messages.length) save(shown);
  countSettings();
}

function openSide(isOpen) {
  at("side").classList.toggle("open", isOpen);
  at("show-side").setAttribute("aria-expanded", isOpen);
}

export function beginChat() {
  at("ask").addEventListener("submit", event => {
    event.preventDefault();
    const content = at("text").value.trim();
    if (!content || answering) return;
    at("text").value = "";
    answer([...shown.messages, { role: "user", content }]);
  });
  at("text").addEventListener("keydown", event => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    at("ask").requestSubmit();
  });
  document.addEventListener("keydown", event => {
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    if (at("side").classList.contains("open")) { openSide(false); at("show-side").focus(); } else answering?.controller.abort();
  });
  at("stop").addEventListener("click", () => answering?.controller.abort());
  at("new").addEventListener("click", () => show(shown.messages.length ? kept.begun() : shown));
  at("show-side").addEventListener("click", () => {
    openSide(!at("side").classList.contains("open"));
    if (at("side").classList.contains("open")) at("new").focus();
  });
  at("show-settings").addEventListener("click", () => { fillSettings(); at("settings").showModal(); });
  at("settings").addEventListener("submit", takeSettings);  // Esc leaves all as it was
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => answering || showTurns());
  window.addEventListener("storage", showList);
  window.addEventListener("pagehide", () => answering && kept.keep(answering.conversation));
  showList();
  showTurns();
}
