/* Conversations and settings, kept in this browser. A conversation has an `id`, a `name`, a `system`
   prompt and `messages`; each lies under a key of its own, so that two tabs lose nothing. */

const PLACE = "moectl.conversation.";

export function all() {
  return Object.keys(localStorage).filter(name => name.startsWith(PLACE))
    .map(name => JSON.parse(localStorage.getItem(name)))
    .sort((one, other) => other.id.localeCompare(one.id));  // the newest first
}

export const find = id => JSON.parse(localStorage.getItem(PLACE + id));
export const begun = () => ({ id: `${new Date().toISOString()}-${Math.random().toString(36).slice(2, 6)}`, name: "", system: "", messages: [] });
export const remove = ({ id }) => localStorage.removeItem(PLACE + id);
export const nameOf = ({ name, messages }) => name || (messages[0]?.content ?? "").trim().slice(0, 60) || "New conversation";

/* Throws a QuotaExceededError where the browser has no room. */
export const keep = one => localStorage.setItem(PLACE + one.id, JSON.stringify(one));

export const current = () => localStorage.getItem("moectl.current");
export const settings = () => JSON.parse(localStorage.getItem("moectl.settings") ?? "{}");
export const setCurrent = ({ id }) => localStorage.setItem("moectl.current", id);
export const setSettings = given => localStorage.setItem("moectl.settings", JSON.stringify(given));
