// The view of the engines: one stream of events while it is on screen, and what is drawn of it.

import { events, needKey, Refused } from "./api.js";
import { drawPages, drawSpark, drawSteps, drawTree } from "./charts.js";
import { $, count, h, ms, percent, s, seconds, short } from "./dom.js";

const MAX_STEPS = 400; // that are kept here
const MAX_LINES = 60;
const MAX_SAMPLES = 90; // of a spark line: 45 seconds
const RETRY_MS = 3000;
const FIGURES = ["Running", "Waiting", "Output", "Prompts", "Prefix hits", "Step", "Padding", "Pool in use"];

let stream = null; // the AbortController of what is read
let rank = 0;
let frozen = false;
let latest = null;
let replicas = new Map(); // by rank: steps and samples so far

const empty = () => ({ steps: [], samples: [], totals: null, at: 0 });
const of = (number) => {
  if (!replicas.has(number)) replicas.set(number, empty());
  return replicas.get(number);
};

// The frame, made once.

function card(title, id, kind, ...children) {
  const hint = h("span", { class: "hint", id: `${id}-hint` });
  return h("section", { class: `card ${kind}`, id: `${id}-card`, "aria-labelledby": `${id}-title` }, h("header", {}, h("h2", { id: `${id}-title` }, title), hint), ...children);
}
const legend = (id, entries) => h("p", { class: "legend", id }, entries.map(([name, text]) => h("span", {}, h("i", { class: `key ${name}` }), text)));
const scrolled = (id, label) => h("div", { class: "rows", id, tabindex: "0", role: "region", "aria-label": label });

function figure(name) {
  const id = name.toLowerCase().replaceAll(" ", "-");
  const spark = s("svg", { class: "spark", viewBox: "0 0 100 22", preserveAspectRatio: "none", id: `spark-${id}`, "aria-hidden": "true" });
  return h("div", { class: "figure" }, h("dt", {}, name), h("dd", { id: `figure-${id}` }, "–"), spark);
}

function build() {
  const freeze = h("button", { type: "button", class: "quiet", id: "freeze", "aria-pressed": "false" }, "Freeze");
  freeze.addEventListener("click", () => {
    frozen = !frozen;
    freeze.setAttribute("aria-pressed", String(frozen));
    freeze.textContent = frozen ? "Go on" : "Freeze";
    if (!frozen) draw();
  });
  const choice = h("select", { id: "replica" });
  choice.addEventListener("change", () => { rank = Number(choice.value); draw(); });
  $("engine").replaceChildren(
    h("div", { class: "engine-bar" }, h("h1", {}, "Engine"), h("span", { class: "state", id: "engine-state" }, "connecting"),
      h("label", { id: "replica-label", hidden: true }, h("span", { class: "sr" }, "Replica"), choice), freeze,
      h("span", { class: "hint", id: "engine-hint" }, "")),
    h("dl", { class: "figures" }, FIGURES.map(figure)),
    h("div", { class: "grid", id: "engine-grid" },
      card("KV pool", "pages", "", h("canvas", { id: "pages-map", role: "img" }), legend("pages-legend", [["free", ""], ["cached", ""], ["locked", ""], ["owned", ""]])),
      card("Prefix tree", "tree", "", s("svg", { class: "chart", id: "tree-chart", role: "img" }), legend("tree-legend", [["cached", "cached, can be evicted"], ["locked", "locked by one request"], ["owned", "shared by several"]])),
      card("Time of steps", "steps", "", s("svg", { class: "chart", id: "steps-chart", role: "img" }), legend("steps-legend", [["extend", "extend"], ["decode", "decode"], ["other", "score, verify"], ["free", "pale: padding"]])),
      card("Plans", "plans", "", h("ol", { class: "lines", id: "plans", tabindex: "0", "aria-label": "Plans of the last steps, the newest first" })),
      card("Requests", "requests", "wide", scrolled("requests", "Running and waiting requests")),
      card("Compiled shapes", "shapes", "", h("div", { class: "shapes", id: "shapes" })),
      card("Since the start", "facts", "", h("dl", { class: "facts", id: "facts" })),
      card("Replicas", "replicas", "", scrolled("replicas", "Replicas")),
      card("Adapters", "adapters", "", scrolled("adapters", "LoRA adapters")),
    ),
  );
  addEventListener("theme", () => latest && draw());
  addEventListener("resize", () => latest && draw());
}

// The stream.

export function showEngine() {
  if (!$("engine").hasChildNodes()) build();
  if (!stream && !document.hidden) listen();
}

export function hideEngine() {
  stream?.abort();
  stream = null;
}

document.addEventListener("visibilitychange", () => {
  if ($("engine").hidden) return;
  if (document.hidden) hideEngine();
  else showEngine();
});
addEventListener("newkey", () => { if (!$("engine").hidden) { hideEngine(); showEngine(); } });

async function listen() {
  const mine = (stream = new AbortController());
  while (stream === mine) {
    try {
      for await (const event of events("engine_events", { signal: mine.signal })) take(event);
      state("reconnecting", "");
    } catch (error) {
      if (mine.signal.aborted) return;
      state("not connected", error.message);
      if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
        if (error.status === 401) needKey();
        else $("engine-hint").textContent = "Engine needs the administrator's key (--admin-api-key): press Key";
        stream = null;
        return;
      }
    }
    await new Promise((resolve) => { setTimeout(resolve, RETRY_MS); });
  }
}

function state(text, hint) {
  $("engine-state").textContent = text;
  $("engine-state").className = `state ${text === "ready" ? "running" : ""}`;
  $("engine-hint").textContent = hint ?? "";
}

// Takes an event: steps go to those that are kept, and the change of counters to the lines of figures.
function take(event) {
  const now = performance.now();
  for (const replica of event.replicas) {
    const kept = of(replica.rank);
    const last = kept.steps.at(-1)?.number ?? 0;
    for (const [number, kind, bucket, tokens, padded, seqs, seqsPadded, took, plan] of replica.view?.steps ?? []) {
      if (number > last) kept.steps.push({ number, kind, bucket, tokens, padded, seqs, seqsPadded, ms: took, plan });
    }
    kept.steps.splice(0, kept.steps.length - MAX_STEPS);
    if (replica.view) sample(kept, replica, now);
  }
  latest = event;
  if (!frozen) draw();
}

function sample(kept, { load, view }, now) {
  const elapsed = (now - kept.at) / 1000;
  const rate = (name) => (kept.totals ? Math.max(0, load[name] - kept.totals[name]) / elapsed : 0);
  const steps = kept.steps.slice(-40);
  const padded = steps.reduce((sum, step) => sum + step.padded, 0);
  const { free, evictable, locked, owned } = view.pages;
  kept.samples.push({
    Running: view.num_running,
    Waiting: view.num_waiting,
    Output: rate("output_tokens_total"),
    Prompts: rate("prompt_tokens_total"),
    "Prefix hits": load.prompt_tokens_total ? load.cached_prompt_tokens_total / load.prompt_tokens_total : 0,
    Step: steps.length ? steps.map((step) => step.ms).sort((a, b) => a - b)[steps.length >> 1] : 0,
    Padding: padded ? 1 - steps.reduce((sum, step) => sum + step.tokens, 0) / padded : 0,
    "Pool in use": (locked + owned) / (free + evictable + locked + owned),
  });
  kept.samples.splice(0, kept.samples.length - MAX_SAMPLES);
  kept.totals = load;
  kept.at = now;
}

// Drawing.

function draw() {
  const { replicas: all } = latest;
  if (rank >= all.length) rank = 0;
  const replica = all[rank];
  drawChoice(all);
  const { view } = replica;
  state(replica.state, replica.problem ?? (view?.blocked ? `Admission waits for ${{ tokens: "room in the pool", rows: "a free row", chunk: "room in the step", adapters: "an adapter's place" }[view.blocked]}` : ""));
  drawReplicas(all);
  if (!view) return;
  const kept = of(replica.rank);
  drawFigures(kept, view);
  drawPool(view.pages);
  drawPrefixes(view);
  drawTimes(kept.steps);
  drawPlans(kept.steps);
  drawRequests(view);
  drawShapes(view.buckets);
  drawFacts(replica);
  drawAdapters(view.resources.adapters ?? []);
}

function drawChoice(all) {
  $("replica-label").hidden = all.length < 2;
  if ($("replica").children.length === all.length) return;
  $("replica").replaceChildren(...all.map((each) => h("option", { value: each.rank }, `Replica ${each.rank}`)));
}

function drawFigures(kept, view) {
  const now = kept.samples.at(-1);
  if (!now) return;
  const said = {
    Running: [count(now.Running), `of ${view.max_running}`],
    Waiting: [count(now.Waiting), ""],
    Output: [short(now.Output), "tokens/s"],
    Prompts: [short(now.Prompts), "tokens/s"],
    "Prefix hits": [percent(now["Prefix hits"]), "of prompts"],
    Step: now.Step ? ms(now.Step).split(" ") : ["–", ""],
    Padding: [percent(now.Padding), "of tokens"],
    "Pool in use": [percent(now["Pool in use"]), ""],
  };
  for (const name of FIGURES) {
    const id = name.toLowerCase().replaceAll(" ", "-");
    const [value, unit] = said[name];
    $(`figure-${id}`).replaceChildren(value, " ", h("small", {}, unit));
    drawSpark($(`spark-${id}`), kept.samples.map((each) => each[name]));
  }
}

function drawPool(pages) {
  const { free, evictable, locked, owned } = pages;
  const total = free + evictable + locked + owned;
  $("pages-hint").textContent = `${count(total)} pages of ${pages.page_size} tokens${pages.pages_per_cell > 1 ? `, ${pages.pages_per_cell} to a cell` : ""}`;
  drawPages($("pages-map"), pages);
  const entries = [["free", free, "free"], ["cached", evictable, "cached"], ["locked", locked, "locked"], ["owned", owned, "in use"]];
  $("pages-legend").replaceChildren(...entries.map(([name, pagesOf, text]) => h("span", {}, h("i", { class: `key ${name}` }), h("b", {}, count(pagesOf)), ` ${text}`)));
  $("pages-map").setAttribute("aria-label", `KV pool: ${entries.map(([, pagesOf, text]) => `${pagesOf} pages ${text}`).join(", ")}`);
}

function drawPrefixes(view) {
  const shared = view.tree.filter(([, , locks]) => locks > 1).length;
  const shown = view.tree.reduce((sum, [, pages]) => sum + pages, 0);
  const part = shown < view.tree_pages ? `, ${count(shown)} shown` : "";
  const text = view.tree.length ? `${count(view.tree_pages)} pages${part}, ${view.tree.length} nodes, ${shared} shared` : "empty";
  $("tree-hint").textContent = text;
  $("tree-chart").setAttribute("aria-label", `Prefix tree: ${text}`);
  drawTree($("tree-chart"), view.tree);
}

function drawTimes(steps) {
  const last = steps.at(-1);
  const slowest = Math.max(0, ...steps.map((step) => step.ms));
  const text = last ? `last ${ms(last.ms)}, slowest of ${steps.length} ${ms(slowest)}` : "no step since you look";
  $("steps-hint").textContent = text;
  $("steps-chart").setAttribute("aria-label", `Time of steps: ${text}`);
  drawSteps($("steps-chart"), steps);
}

const VERBS = /^(extend|decode|steps|verify|admit|retract|preempt|blocked by|encode|load|place|no step)\b/;
const shortIds = (text) => text.replace(/[\w.-]*?([\w]{6})(?:\/\d+)+(?=[+ ]|$)/g, "$1");

function line(step) {
  const parts = step.plan.split(" | ").flatMap((part, at) => {
    const verb = part.match(VERBS)?.[0];
    const rest = shortIds(verb ? part.slice(verb.length) : part);
    return [at ? h("span", { class: "bar-mark" }, " | ") : null, verb ? h("b", {}, verb) : null, rest];
  });
  return h("li", {}, h("span", { class: "num" }, String(step.number)), h("span", { class: "took" }, ms(step.ms)), h("span", { class: "plan", title: step.plan }, parts));
}

function drawPlans(steps) {
  const list = $("plans");
  $("plans-hint").textContent = steps.length ? `step ${count(steps.at(-1).number)}` : "";
  if (list.dataset.last === String(steps.at(-1)?.number)) return;
  list.dataset.last = String(steps.at(-1)?.number);
  list.replaceChildren(...steps.slice(-MAX_LINES).reverse().map(line));
  if (!steps.length) list.replaceChildren(h("li", { class: "blank" }, "Steps appear here as they run."));
}

function meter(parts, total, label) {
  return h("span", { class: "meter", role: "img", "aria-label": label }, parts.map(([name, size]) => h("i", { class: name, style: { width: `${(100 * size) / Math.max(1, total)}%` } })));
}

const RIGHT = new Set(["stored", "to extend", "tokens", "Pages", "For"]);
function table(heads, rows, blank) {
  if (!rows.length) return h("p", { class: "blank" }, blank);
  return h("table", {}, h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col", class: RIGHT.has(head) ? "right" : null }, head)))), h("tbody", {}, rows));
}

function drawRequests({ running, waiting, num_running: numRunning, num_waiting: numWaiting }) {
  const listed = running.length + waiting.length;
  $("requests-hint").textContent = `${count(numRunning)} running, ${count(numWaiting)} waiting${listed < numRunning + numWaiting ? `, ${listed} shown` : ""}`;
  const rows = [...running, ...waiting].map((req) => {
    const prompt = req.prompt_tokens;
    const stored = Math.min(req.kv_tokens, prompt);
    const cached = Math.min(req.cached_tokens, stored);
    const time = req.running_s ?? req.waited_s;
    return h("tr", {},
      h("td", { class: "id", title: req.request_id }, req.request_id.replace(/\/\d+$/, "").slice(-12) + (req.sample ? `/${req.sample}` : "")),
      h("td", {}, h("span", { class: `state ${req.state}` }, req.state)),
      h("td", {}, meter([["cached", cached], ["owned", stored - cached]], prompt, `${stored} of ${prompt} prompt tokens, ${cached} from the cache`)),
      h("td", { class: "right" }, `${count(stored)} / ${count(prompt)}`),
      h("td", { class: "right" }, req.extend_left ? count(req.extend_left) : ""),
      h("td", {}, meter([["decode", req.output_tokens]], req.max_new_tokens, `${req.output_tokens} of ${req.max_new_tokens} output tokens`)),
      h("td", { class: "right" }, `${count(req.output_tokens)} / ${count(req.max_new_tokens)}`),
      h("td", { class: "right" }, count(req.pages)),
      h("td", { class: "right" }, time === null ? "" : seconds(time)));
  });
  $("requests").replaceChildren(table(["Request", "State", "Prompt", "stored", "to extend", "Output", "tokens", "Pages", "For"], rows, "No request now."));
}

function drawShapes(buckets) {
  const ran = buckets.filter(([, , steps]) => steps).length;
  $("shapes-hint").textContent = `${ran} of ${buckets.length} have run`;
  const kinds = [...new Set(buckets.map(([kind]) => kind))];
  $("shapes").replaceChildren(...kinds.map((kind) => h("div", {}, h("h3", {}, kind === "decode" ? "decode: rows" : `${kind}: tokens x sequences`),
    h("ul", {}, buckets.filter((each) => each[0] === kind).map(([, name, steps, took]) => {
      const said = steps ? `${count(steps)} steps of ${ms(took / steps)} on average` : "compiled, has not run";
      return h("li", { class: `shape ${steps ? "ran" : ""}`, title: said }, name, h("span", { class: "sr" }, `: ${said}`));
    })))));
}

function drawFacts({ load }) {
  const { host, speculation, transfer } = load;
  const facts = [
    ["Steps", count(load.steps_total)],
    ["Output tokens", count(load.output_tokens_total)],
    ["Prompt tokens, from the cache", `${count(load.prompt_tokens_total)}, ${count(load.cached_prompt_tokens_total)}`],
    ["Padding of decode rows", share(load.decode_rows_total, load.decode_rows_padded_total)],
    ["Padding of extend tokens", share(load.extend_tokens_total, load.extend_tokens_padded_total)],
    ["Retractions", count(load.retractions_total)],
    ["Recompiles, leaks, failed requests", `${load.recompiles_total}, ${load.leaks_total}, ${load.failed_requests_total}`],
    ["Weights", load.weight_version],
  ];
  if (host.total_tokens) facts.push(["Host memory, tokens", `${short(host.used_tokens)} of ${short(host.total_tokens)}`], ["Written to it, loaded from it", `${short(host.written_tokens)}, ${short(host.loaded_tokens)}`]);
  if (speculation.runs) facts.push(["Drafts accepted", `${count(speculation.accepted_tokens)} of ${count(speculation.draft_tokens)}`]);
  if (transfer) facts.push([`As ${transfer.mode} server, on the way`, `${transfer.num_bootstrapping + transfer.num_moving} requests`]);
  $("facts").replaceChildren(...facts.flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)]));
}
const share = (real, padded) => (padded ? percent(1 - real / padded) : "–");

function drawReplicas(all) {
  $("replicas-card").hidden = all.length < 2;
  if (all.length < 2) return;
  $("replicas").replaceChildren(table(["Replica", "State", "Running", "Waiting", "Tokens in use", "Steps"], all.map(({ rank: number, state: at, load }) => h("tr", {},
    h("td", {}, String(number)), h("td", {}, h("span", { class: `state ${at === "ready" ? "running" : ""}` }, at)), h("td", {}, count(load.num_running)),
    h("td", {}, count(load.num_waiting)), h("td", {}, count(load.used_tokens)), h("td", {}, count(load.steps_total)))), ""));
}

function drawAdapters(adapters) {
  $("adapters-card").hidden = !adapters.length;
  $("adapters").replaceChildren(table(["Adapter", "Rank", "On the device", "Requests"], adapters.map((each) => h("tr", {},
    h("td", {}, each.name), h("td", {}, String(each.rank)), h("td", {}, each.on_device ? "yes" : "no"), h("td", {}, count(each.num_requests)))), ""));
}
