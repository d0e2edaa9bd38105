// Draws the pool, the prefix tree and the times of steps. Each takes values and an element, and knows no stream.

import { $, ms, percent, s } from "./dom.js";

const STATES = ["free", "cached", "locked", "owned"]; // by PageState of the cache

// light-dark() is resolved only where a colour is used, so a hidden element is asked for it.
function resolved(names) {
  const probe = document.createElement("i");
  $("pages-map").after(probe);
  const found = names.map((name) => {
    probe.className = name;
    return getComputedStyle(probe).backgroundColor;
  });
  probe.remove();
  return found;
}

export function drawPages(canvas, pages) {
  const scale = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (!width || !height) return;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const { cells } = pages;
  let columns = Math.ceil(Math.sqrt((cells.length * width) / height));
  while (columns > 1 && Math.floor(height / Math.ceil(cells.length / columns)) < 2) columns += 1;
  const rows = Math.ceil(cells.length / columns);
  const gap = Math.min(width / columns, height / rows) > 5 ? 1 : 0;
  const colours = resolved(STATES);
  for (let at = 0; at < cells.length; at += 1) {
    const column = at % columns;
    const row = Math.floor(at / columns);
    context.fillStyle = colours[cells.charCodeAt(at) - 48];
    const left = Math.round((column * width) / columns);
    const top = Math.round((row * height) / rows);
    context.fillRect(left, top, Math.round(((column + 1) * width) / columns) - left - gap, Math.round(((row + 1) * height) / rows) - top - gap);
  }
}

// The tree from the top down: a node is as wide as the pages in it and below it.
export function drawTree(svg, tree) {
  const width = svg.clientWidth || 600;
  const height = svg.clientHeight || 158;
  const weights = tree.map(([, pages]) => pages);
  for (let at = tree.length - 1; at >= 0; at -= 1) if (tree[at][0] >= 0) weights[tree[at][0]] += weights[at];
  const total = tree.reduce((sum, [parent], at) => sum + (parent < 0 ? weights[at] : 0), 0);
  const depth = [];
  tree.forEach(([parent], at) => { depth[at] = parent < 0 ? 0 : depth[parent] + 1; });
  const levels = Math.max(0, ...depth) + 1;
  const tall = Math.min(30, height / levels);
  const next = tree.map(() => 0);
  const from = [];
  let root = 0;
  const marks = [];
  tree.forEach(([parent, pages, locks, children], at) => {
    const wide = (weights[at] * width) / total;
    if (parent < 0) {
      from[at] = root;
      root += wide;
    } else {
      from[at] = from[parent] + next[parent];
      next[parent] += wide;
    }
    if (wide < 0.6) return;
    const kind = locks > 1 ? "owned" : locks ? "locked" : "cached";
    const said = `${pages} pages; ${locks ? `${locks} running requests use it` : "no request uses it"}; ${children} continuations`;
    marks.push(s("rect", { class: `node ${kind}`, x: from[at], y: depth[at] * tall, width: wide, height: tall - 1 }, s("title", {}, said)));
    if (wide > 34 && tall > 13) {
      const text = s("text", { class: `name ${kind === "owned" ? "on-dark" : ""}`, x: from[at] + 5, y: depth[at] * tall + tall / 2 + 3.5 });
      text.textContent = locks > 1 && wide > 60 ? `${pages} ×${locks}` : String(pages);
      marks.push(text);
    }
  });
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren(...marks);
}

const kindOf = (step) => (step.kind === "decode" ? "decode" : step.kind === "extend" ? "extend" : "other");

// The next number that divides well into four.
function roundUp(number) {
  const unit = 10 ** Math.floor(Math.log10(number));
  return unit * [1, 2, 3, 4, 6, 8, 10].find((times) => times * unit >= number);
}

export function drawSteps(svg, steps) {
  const width = svg.clientWidth || 600;
  const height = svg.clientHeight || 158;
  const left = 54;
  const room = Math.max(1, Math.floor((width - left) / 5));
  const shown = steps.slice(-room);
  const most = roundUp(Math.max(0.01, ...shown.map((step) => step.ms)));
  const marks = [];
  for (const share of [0.25, 0.5, 0.75, 1]) {
    const y = height - 4 - share * (height - 14);
    marks.push(s("line", { x1: left, x2: width, y1: y, y2: y }));
    const text = s("text", { x: left - 6, y: y + 3.5, "text-anchor": "end" });
    text.textContent = ms(most * share);
    marks.push(text);
  }
  shown.forEach((step, at) => {
    const x = width - (shown.length - at) * 5;
    const tall = Math.max(1, (step.ms / most) * (height - 14));
    const useful = tall * (step.tokens / step.padded);
    const said = `step ${step.number}: ${step.kind} ${step.bucket}, ${ms(step.ms)}, ${step.tokens} of ${step.padded} tokens (${percent(1 - step.tokens / step.padded)} padding)`;
    marks.push(s("g", { class: kindOf(step) }, s("title", {}, said),
      s("rect", { class: "padding", x, width: 4, y: height - 4 - tall, height: tall - useful }),
      s("rect", { x, width: 4, y: height - 4 - useful, height: useful })));
  });
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren(...marks);
}

export function drawSpark(svg, values) {
  const most = Math.max(1e-9, ...values);
  const points = values.map((value, at) => `${((at * 100) / Math.max(1, values.length - 1)).toFixed(2)},${(20 - (18 * value) / most).toFixed(2)}`);
  svg.replaceChildren(
    s("path", { class: "under", d: `M0,22L${points.join("L")}L100,22Z` }),
    s("path", { d: `M${points.join("L")}` }),
  );
}
