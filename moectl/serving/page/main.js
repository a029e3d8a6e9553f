/* Shows the view that the address names, and asks the server how it is. */

import { beginChat } from "./chat.js";
import { beginCosts, showCosts } from "./costs.js";
import { ask, at, number, reason, say, useKey } from "./parts.js";

const EVERY_MS = 1000, BUSY_MS = 250, VIEWS = ["chat", "costs"];
let began = 0, isLost = false;

const view = () => VIEWS.find(name => location.hash === `#${name}`) ?? VIEWS[0];

function showView() {
  for (const name of VIEWS) at(`${name}-view`).hidden = name !== view();
  for (const link of document.querySelectorAll("nav a"))
    link.hash === `#${view()}` ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
}

async function poll() {
  let isBusy = false;
  if (!document.hidden) {
    try {
      const now = await ask("live");
      at("model").textContent = now.model;
      document.title = `${now.model}: moectl serve`;
      showCosts(now);
      isBusy = now.running > 0 && view() === "costs";
      if (isLost) { say(""); isLost = false; }
    } catch (error) {
      isLost = true;
      began ||= Date.now();
      const isLoading = error.code === "loading";
      say(isLoading ? `The model is loading (${number((Date.now() - began) / 1000)} s).` : reason(error), !isLoading);
    }
  }
  setTimeout(poll, isBusy ? BUSY_MS : EVERY_MS);
}

at("unlock").addEventListener("submit", event => { event.preventDefault(); useKey(at("key").value); say(""); });
window.addEventListener("hashchange", showView);
beginChat();
beginCosts();
showView();
poll();
