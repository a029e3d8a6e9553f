/* What both views use: elements, numbers in words, and requests to the server. */

export const at = id => document.getElementById(id);

/* An element with these properties and children. */
export function made(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export function button(text, press, label) {
  const element = made("button", { type: "button", textContent: text, onclick: press });
  if (label) element.setAttribute("aria-label", label);
  return element;
}

export const number = (x, digits = 0) =>
  x.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
/* A count, which is a fraction where requests share a pass. */
export const amount = x => number(x, Number.isInteger(x) ? 0 : 1);
export const percent = x => `${number(100 * x, 1)} %`;
export const sum = numbers => numbers.reduce((a, b) => a + b, 0);

export function bytes(x) {
  const units = ["B", "kB", "MB", "GB"];
  while (x >= 1000 && units.length > 1) { x /= 1000; units.shift(); }
  return `${number(x, x < 10 ? 1 : 0)} ${units[0]}`;
}

export const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name);

export function say(text, isBad = false, where = "said") {
  if (at(where).textContent !== text) at(where).textContent = text;
  at(where).classList.toggle("bad", isBad);
}

/* The key ends with the tab. */
export const useKey = key => sessionStorage.setItem("moectl.key", key);

/* The answer to a request. Throws an Error with the server's message, and its code. */
export async function send(path, body, signal) {
  const key = sessionStorage.getItem("moectl.key"), headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  at("unlock").hidden = answer.status !== 401;
  if (answer.ok) return answer;
  const { error } = await answer.json();
  throw Object.assign(new Error(error.message), { code: error.code });
}
export const ask = async (path, body) => (await send(path, body)).json();
export const reason = error => error instanceof TypeError ? "The server does not answer." : error.message;

/* The events of a stream, as objects. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const { value, done } = await reader.read();
    if (done) return;
    const whole = (rest + value).split("\n\n");
    rest = whole.pop();
    for (const one of whole) if (one.startsWith("data: {")) yield JSON.parse(one.slice(6));
  }
}

/* Ask in a dialog; the text that was given, "yes" where there is none to give, or null. */
export function question(title, yes, text = null) {
  const dialog = at("question"), input = at("question-text");
  at("question-title").textContent = title;
  at("question-yes").textContent = yes;
  input.hidden = text === null;
  input.required = text !== null;
  input.value = text ?? "";
  dialog.returnValue = "";
  dialog.showModal();
  input.select();
  return new Promise(resolve => dialog.addEventListener("close", () =>
    resolve(dialog.returnValue !== "yes" ? null : text === null ? "yes" : input.value), { once: true }));
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = made("textarea", { value: text });  // a page that came without TLS from another machine
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/* A button that copies what `text` gives, and says so. */
export function copier(text, label) {
  const one = button("Copy", async () => {
    one.textContent = await copy(text()).then(() => "Copied", () => "Not copied");
    setTimeout(() => { one.textContent = "Copy"; }, 1500);
  }, label);
  return one;
}
