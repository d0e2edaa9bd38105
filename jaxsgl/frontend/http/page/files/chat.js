// The chat: conversations, messages, and one answer at a time that streams.

import { events, needKey, Refused } from "./api.js";
import { $, announce, count, h, ms, nameOf } from "./dom.js";
import { codeBlock, render } from "./markdown.js";
import { fillSettings, sampling, systemPrompt } from "./settings.js";
import { allChats, dropChat, keepChat } from "./store.js";

const STARTERS = ["What is 3 + 4?", "Count from 1 to 20", "Write a table of three planets and their moons"];
const MAX_IMAGE_BYTES = 12e6; // with base64, what a server takes in a body by default
let info = null;
let chats = [];
let chat = fresh();
let attached = [];
let answering = null; // the AbortController of the answer that streams

function fresh() {
  return { id: crypto.randomUUID?.() ?? String(Math.random()), title: "New chat", changed: Date.now(), messages: [] };
}

export function showChat(modelInfo, names) {
  info = modelInfo;
  $("model").replaceChildren(...names.map((name) => h("option", { value: name, title: name }, nameOf(name))));
  $("attach").hidden = !info.has_image_understanding;
  if (!info.is_generation) {
    $("empty-text").textContent = "This server makes embeddings and scores; it doesn't chat.";
    $("send").disabled = true;
  }
}

// History.

async function keep() {
  chat.changed = Date.now();
  if (!chats.some((other) => other.id === chat.id)) chats.unshift(chat);
  drawHistory();
  await keepChat(chat).catch(() => {});
}

function drawHistory() {
  $("history-list").replaceChildren(...chats.map((other) => {
    const open = h("button", { type: "button", class: "entry", "aria-current": other.id === chat.id ? "true" : null }, other.title);
    open.addEventListener("click", () => openChat(other));
    const drop = h("button", { type: "button", class: "quiet tiny", "aria-label": `Delete ${other.title}` }, "Delete");
    drop.addEventListener("click", async () => {
      chats = chats.filter((each) => each.id !== other.id);
      await dropChat(other.id).catch(() => {});
      if (other.id === chat.id) openChat(fresh());
      else drawHistory();
      $("new-chat").focus();
    });
    return h("li", {}, open, drop);
  }));
}

function openChat(other) {
  answering?.abort();
  chat = other;
  attached = [];
  drawAttached();
  drawHistory();
  draw();
  openHistory(false);
  $("prompt").focus({ preventScroll: true });
}

// Messages.

function words(text, kind) {
  const name = { user: "You", assistant: "Model", tool: "Tool result" }[kind];
  return h("p", { class: "who" }, name, text ? h("span", { class: "hint" }, text) : null);
}

function stats(message) {
  const { stats: had } = message;
  if (!had) return null;
  const parts = [];
  if (had.tokens > 1 && had.ms > 0) parts.push(`${(((had.tokens - 1) * 1000) / had.ms).toFixed(1)} tokens/s`);
  if (had.tokens) parts.push(`${count(had.tokens)} tokens`);
  if (had.first_ms) parts.push(`first after ${ms(had.first_ms)}`);
  if (had.prompt) parts.push(`prompt ${count(had.prompt)}${had.cached ? `, ${count(had.cached)} cached` : ""}`);
  if (message.end && message.end !== "stop" && message.end !== "error") parts.push({ length: "cut at the limit", stopped: "stopped", tool_calls: "calls a tool" }[message.end] ?? message.end);
  return h("p", { class: "stats" }, parts.join("  ·  "));
}

function toolBlock(message, made, open) {
  let shown = made.function.arguments ?? "";
  try {
    shown = JSON.stringify(JSON.parse(shown), null, 2);
  } catch { /* it is still coming */ }
  const block = h("div", { class: "tool" }, h("p", { class: "tool-name" }, "calls ", h("code", {}, made.function.name)), codeBlock(shown, "json"));
  if (open) {
    const id = `result-${made.id}`;
    const input = h("textarea", { id, rows: 2, placeholder: "What the tool returns" });
    block.append(h("label", { for: id, class: "hint" }, "Result"), input);
    input.dataset.call = made.id;
  }
  return block;
}

function body(message, isLast) {
  if (message.role === "user") {
    return [
      (message.images ?? []).map((address) => h("img", { src: address, alt: "attached image", class: "picture" })),
      h("div", { class: "said" }, message.content),
    ];
  }
  if (message.role === "tool") return [codeBlock(message.content, "result")];
  const parts = [];
  if (message.reasoning) {
    const thinks = !message.content && !message.end;
    const words = h("div", { class: "reasoning" }, render(message.reasoning));
    const block = h("details", { class: "thinking", open: message.open ?? thinks }, h("summary", {}, thinks ? "Reasoning ..." : "Reasoning"), words);
    block.addEventListener("toggle", () => { if (block.isConnected) message.open = block.open; });
    parts.push(block);
  }
  if (message.content) parts.push(h("div", { class: "said" }, ...render(message.content)));
  const open = isLast && message.end === "tool_calls";
  for (const made of message.tool_calls ?? []) parts.push(toolBlock(message, made, open));
  if (open) parts.push(h("button", { type: "button", class: "solid", onclick: () => sendResults(message) }, "Send results"));
  if (!parts.length && !message.end && !message.error) parts.push(h("p", { class: "waiting" }, "waiting for the first token"));
  if (message.error) parts.push(h("p", { class: "error", role: "alert" }, message.error));
  return parts;
}

function actions(message, at, isLast) {
  const made = [];
  const button = (name, work) => made.push(h("button", { type: "button", class: "quiet tiny", onclick: work }, name));
  if (message.role === "assistant" && message.content) button("Copy", () => navigator.clipboard?.writeText(message.content));
  if (message.role === "assistant" && isLast) button("Regenerate", regenerate);
  if (message.role === "user") button("Edit", () => edit(at));
  return made;
}

function draw() {
  const scroll = $("scroll");
  $("chat-title").textContent = chat.title;
  $("empty").hidden = chat.messages.length > 0;
  $("messages").replaceChildren(...chat.messages.map((message, at) => drawn(message, at)));
  scroll.scrollTop = scroll.scrollHeight;
  drawSend();
}

function drawn(message, at) {
  const isLast = at === chat.messages.length - 1;
  const streams = isLast && answering !== null;
  return h("li", { class: `message ${message.role}`, "aria-busy": streams ? "true" : null },
    words(message.role === "assistant" && message.model ? nameOf(message.model) : "", message.role),
    ...body(message, isLast),
    h("div", { class: "foot" }, streams ? null : actions(message, at, isLast), stats(message)));
}

// Draws the message that streams, at most once a frame; keeps the end in sight unless the reader has scrolled away.
let due = false;
function drawSoon() {
  if (due) return;
  due = true;
  const paint = () => {
    if (!due) return;
    due = false;
    const scroll = $("scroll");
    const atEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80;
    const at = chat.messages.length - 1;
    $("messages").children[at]?.replaceWith(drawn(chat.messages[at], at));
    if (atEnd) scroll.scrollTop = scroll.scrollHeight;
  };
  requestAnimationFrame(paint);
  setTimeout(paint, 250); // a hidden page has no frames
}

function drawSend() {
  const button = $("send");
  button.textContent = answering ? "Stop" : "Send";
  button.classList.toggle("stop", answering !== null);
}

// Asking.

function asBody() {
  const messages = chat.messages.slice(0, -1).filter((message) => !message.error || message.content).map((message) => {
    if (message.role === "tool") return { role: "tool", tool_call_id: message.tool_call_id, content: message.content };
    const whole = message.end === "tool_calls"; // calls of an answer that was cut are none
    if (message.role === "assistant") return { role: "assistant", content: message.content, ...(whole ? { tool_calls: message.tool_calls } : {}) };
    if (!message.images?.length) return { role: "user", content: message.content };
    const pictures = message.images.map((url) => ({ type: "image_url", image_url: { url } }));
    return { role: "user", content: [...pictures, { type: "text", text: message.content }] };
  });
  const system = systemPrompt();
  if (system) messages.unshift({ role: "system", content: system });
  return { model: $("model").value, messages, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true }, ...sampling() };
}

function take(message, delta) {
  if (delta.content) message.content += delta.content;
  if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
  for (const piece of delta.tool_calls ?? []) {
    message.tool_calls ??= [];
    const made = (message.tool_calls[piece.index] ??= { id: piece.id ?? `call-${piece.index}`, type: "function", function: { name: "", arguments: "" } });
    if (piece.id) made.id = piece.id;
    if (piece.function?.name) made.function.name = piece.function.name;
    made.function.arguments += piece.function?.arguments ?? "";
  }
}

async function answer() {
  const message = { role: "assistant", content: "", model: $("model").value, stats: {} };
  const mine = chat;
  mine.messages.push(message);
  const stop = (answering = new AbortController());
  draw();
  const start = performance.now();
  let first = 0;
  try {
    for await (const chunk of events("v1/chat/completions", { body: asBody(), signal: stop.signal })) {
      const now = performance.now();
      if (chunk.usage) {
        message.stats.tokens = chunk.usage.completion_tokens;
        message.stats.prompt = chunk.usage.prompt_tokens;
        message.stats.cached = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
      }
      for (const choice of chunk.choices ?? []) {
        take(message, choice.delta ?? {});
        if (!first && (choice.delta?.content || choice.delta?.reasoning_content || choice.delta?.tool_calls)) {
          first = now;
          message.stats.first_ms = first - start;
        }
        if (first) message.stats.ms = now - first;
        if (choice.finish_reason) message.end = choice.finish_reason;
      }
      if (mine === chat) drawSoon();
    }
    message.end ??= "stop";
    announce("The answer is complete");
  } catch (error) {
    if (stop.signal.aborted) {
      message.end = "stopped";
      announce("The answer was stopped");
    } else {
      message.end = "error";
      message.error = error instanceof Error ? error.message : String(error);
      if (error instanceof Refused && error.status === 401) needKey();
    }
  }
  if (answering === stop) answering = null;
  if (mine === chat) draw();
  await keep();
}

function ask(text) {
  if (answering || !info?.is_generation) return;
  if (!chat.messages.length) chat.title = text.slice(0, 60) || "Image";
  chat.messages.push({ role: "user", content: text, ...(attached.length ? { images: attached } : {}) });
  attached = [];
  drawAttached();
  answer();
}

function regenerate() {
  if (answering) return;
  chat.messages.pop();
  answer();
}

function edit(at) {
  if (answering) answering.abort();
  const message = chat.messages[at];
  $("prompt").value = message.content;
  attached = message.images ?? [];
  chat.messages.length = at;
  drawAttached();
  draw();
  grow();
  $("prompt").focus();
}

function sendResults(message) {
  for (const made of message.tool_calls) {
    const input = document.querySelector(`[data-call="${CSS.escape(made.id)}"]`);
    chat.messages.push({ role: "tool", tool_call_id: made.id, content: input?.value || "{}" });
  }
  answer();
}

// Images.

function drawAttached() {
  $("attached").replaceChildren(...attached.map((address, at) => h("li", {}, h("img", { src: address, alt: `image ${at + 1}` }),
    h("button", { type: "button", class: "quiet tiny", "aria-label": `Remove image ${at + 1}`, onclick: () => { attached.splice(at, 1); drawAttached(); } }, "Remove"))));
}

function fault(file) {
  if (!file.type.startsWith("image/")) return `${file.name} is no image.`;
  if (file.size > MAX_IMAGE_BYTES) return `${file.name} has ${(file.size / 1e6).toFixed(1)} MB; an image may have ${MAX_IMAGE_BYTES / 1e6}.`;
  return "";
}

async function attach(files) {
  const faults = [...files].map(fault);
  $("attach-error").textContent = faults.filter(Boolean).join(" ");
  $("attach-error").hidden = !faults.some(Boolean);
  for (const file of [...files].filter((_, at) => !faults[at])) {
    attached.push(await new Promise((resolve) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.readAsDataURL(file);
    }));
  }
  drawAttached();
}

// The composer and the panels.

function grow() {
  const prompt = $("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight + 2, 240)}px`; // and the border
  prompt.style.overflowY = prompt.scrollHeight > 240 ? "auto" : "hidden";
}

function openHistory(open) {
  $("chat").classList.toggle("with-history", open);
  $("history-button").setAttribute("aria-expanded", String(open));
}

function openSettings(open) {
  $("settings").hidden = !open;
  $("settings-button").setAttribute("aria-expanded", String(open));
  (open ? $("settings").querySelector("textarea") : $("settings-button")).focus();
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (answering) {
    answering.abort();
    return;
  }
  const text = $("prompt").value.trim();
  if (!info?.is_generation || (!text && !attached.length)) return;
  $("prompt").value = "";
  grow();
  ask(text);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!answering) $("composer").requestSubmit();
  }
});
$("prompt").addEventListener("input", grow);
$("prompt").addEventListener("paste", (event) => {
  if (info?.has_image_understanding && event.clipboardData?.files.length) attach(event.clipboardData.files);
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (answering) answering.abort();
  else if (!$("settings").hidden) openSettings(false);
  else openHistory(false);
});
$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => { attach($("file").files); $("file").value = ""; });
$("new-chat").addEventListener("click", () => openChat(fresh()));
$("history-button").addEventListener("click", () => openHistory(!$("chat").classList.contains("with-history")));
$("settings-button").addEventListener("click", () => openSettings($("settings").hidden));
$("starters").replaceChildren(...STARTERS.map((text) => h("button", { type: "button", onclick: () => ask(text) }, text)));
fillSettings($("settings"), () => openSettings(false));
drawSend();
allChats().then((kept) => {
  chats = kept;
  drawHistory();
});
