// The frame of the page: which view is shown, the server's state, the key, and the theme.

import { getJson, hasKey, Refused, setKey } from "./api.js";
import { showChat } from "./chat.js";
import { $, announce, nameOf } from "./dom.js";
import { hideEngine, showEngine } from "./engine.js";

const POLL_MS = 5000;
const THEMES = { "": "Theme", light: "Light", dark: "Dark" };
const THEME_NAMES = { "": "as the system", light: "light", dark: "dark" };
let model = null;

// The key.

function askForKey(reason) {
  const dialog = $("key-dialog");
  if (reason) $("key-reason").textContent = reason;
  if (!dialog.open) dialog.showModal();
  $("key-input").focus();
}

addEventListener("needkey", (event) => askForKey(event.detail));
$("key-button").addEventListener("click", () => askForKey());
$("key-cancel").addEventListener("click", () => $("key-dialog").close());
$("key-form").addEventListener("submit", () => {
  setKey($("key-input").value.trim(), $("key-keep").checked);
  $("key-input").value = "";
  model = null;
  look();
  dispatchEvent(new Event("newkey"));
});

// The theme.

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  $("theme-button").textContent = THEMES[theme];
  $("theme-button").setAttribute("aria-label", `Theme: ${THEME_NAMES[theme]}`);
  localStorage.setItem("jaxsgl-theme", theme);
  window.dispatchEvent(new Event("theme"));
}

$("theme-button").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(document.documentElement.dataset.theme ?? "") + 1) % names.length]);
});
setTheme(Object.hasOwn(THEMES, localStorage.getItem("jaxsgl-theme") ?? "") ? localStorage.getItem("jaxsgl-theme") ?? "" : "");

// The views.

function route() {
  const view = location.hash === "#engine" ? "engine" : "chat";
  for (const name of ["chat", "engine"]) {
    $(name).hidden = name !== view;
    if (name === view) $(`to-${name}`).setAttribute("aria-current", "page");
    else $(`to-${name}`).removeAttribute("aria-current");
  }
  document.title = view === "engine" ? "Engine - jaxsgl" : "Chat - jaxsgl";
  if (view === "engine") showEngine();
  else hideEngine();
}
addEventListener("hashchange", () => {
  if (location.hash === "#main") return;
  route();
});

// The server.

function say(kind, text) {
  const dot = $("status-dot");
  if (dot.dataset.kind !== kind) announce(`Server: ${text}`);
  dot.dataset.kind = kind;
  $("status-text").textContent = text;
}

async function look() {
  try {
    const health = await getJson("health");
    const problems = health.problems ?? [];
    if (!model) {
      const [info, models] = await Promise.all([getJson("get_model_info"), getJson("v1/models")]);
      model = info;
      showChat(info, models.data.map((card) => card.id));
    }
    say(problems.length ? "warn" : "good", problems.length ? problems.join("; ") : nameOf(model.served_model_name));
  } catch (error) {
    if (error instanceof Refused && error.status === 401) {
      say("warn", "a key is needed");
      if (!look.asked) askForKey(hasKey() ? "The server doesn't know this key. Enter another one." : undefined);
      look.asked = true;
    } else if (error instanceof Refused) {
      say("warn", error.message);
    } else {
      say("bad", "the server can't be reached");
    }
  }
}

route();
look();
setInterval(() => { if (!document.hidden) look(); }, POLL_MS);
