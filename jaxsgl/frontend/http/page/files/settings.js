// The settings of chat: system prompt, sampling, tools. Kept in this browser; a field that is empty is not sent.

import { h } from "./dom.js";

const NAME = "jaxsgl-settings";
const NUMBERS = [
  // name, label, smallest, largest, step, hint
  ["temperature", "Temperature", 0, 2, 0.05, "0: always the likeliest token"],
  ["top_p", "Top p", 0.01, 1, 0.01, "the likeliest tokens with this probability together"],
  ["top_k", "Top k", 1, 1000, 1, "so many of the likeliest tokens"],
  ["min_p", "Min p", 0, 1, 0.01, "of the likeliest token's probability"],
  ["max_tokens", "Most tokens", 1, 1e6, 1, "of the answer"],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1, "for tokens that were there"],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.1, "for each time that they were there"],
  ["seed", "Seed", 0, 2 ** 31, 1, "the same answer each time"],
];

let values = {};
try {
  values = JSON.parse(localStorage.getItem(NAME) ?? "{}");
} catch { /* begin anew */ }

function keep(name, value) {
  if (value === "" || value === undefined || Number.isNaN(value)) delete values[name];
  else values[name] = value;
  localStorage.setItem(NAME, JSON.stringify(values));
}

export const systemPrompt = () => (values.system ?? "").trim();

// What a request has besides its messages. Throws for tools that are no JSON.
export function sampling() {
  const body = {};
  for (const [name] of NUMBERS) if (values[name] !== undefined) body[name] = values[name];
  if (values.thinking) body.enable_thinking = values.thinking === "on";
  const stop = (values.stop ?? "").split("\n").filter((line) => line);
  if (stop.length) body.stop = stop;
  if ((values.tools ?? "").trim()) {
    try {
      body.tools = JSON.parse(values.tools);
    } catch (error) {
      throw new Error(`Settings, Tools: this is no JSON (${error.message})`);
    }
  }
  return body;
}

function number([name, label, smallest, largest, step, hint]) {
  const input = h("input", { type: "number", id: `set-${name}`, min: smallest, max: largest, step, placeholder: "default", inputmode: "decimal", "aria-describedby": `hint-${name}`, value: values[name] });
  input.addEventListener("change", () => keep(name, input.value === "" ? "" : Number(input.value)));
  return h("div", { class: "field" }, h("label", { for: `set-${name}` }, label), input, h("span", { class: "hint", id: `hint-${name}` }, hint));
}

function text(name, label, rows, placeholder) {
  const input = h("textarea", { id: `set-${name}`, rows, placeholder, spellcheck: name === "system" ? "true" : "false" });
  input.value = values[name] ?? "";
  input.addEventListener("change", () => keep(name, input.value));
  return h("div", { class: "field tall" }, h("label", { for: `set-${name}` }, label), input);
}

export function fillSettings(panel, close) {
  const thinking = h("select", { id: "set-thinking" }, ["", "on", "off"].map((value) => h("option", { value, selected: (values.thinking ?? "") === value }, value || "as the model likes")));
  thinking.addEventListener("change", () => keep("thinking", thinking.value));
  const reset = h("button", { type: "button", class: "quiet" }, "Back to defaults");
  reset.addEventListener("click", () => {
    values = {};
    keep("system", "");
    fillSettings(panel, close);
    panel.querySelector("textarea").focus();
  });
  panel.replaceChildren(
    h("div", { class: "row between" }, h("h2", {}, "Settings"), h("button", { type: "button", class: "quiet", onclick: close }, "Close")),
    text("system", "System prompt", 4, "You are ..."),
    h("div", { class: "numbers" }, NUMBERS.map(number)),
    h("div", { class: "field" }, h("label", { for: "set-thinking" }, "Reasoning"), thinking, h("span", { class: "hint" }, "of models whose template can switch it")),
    text("stop", "Stop at these texts, one a line", 2, ""),
    text("tools", "Tools, as OpenAI's JSON", 5, '[{"type": "function", "function": {"name": "weather", ...}}]'),
    reset,
  );
}
