// Turns what a model writes into elements: headings, lists, tables, quotes, code, emphasis, links. All text stays text.

import { h } from "./dom.js";

const INLINE = /(`+)([\s\S]+?)\1|\*\*([\s\S]+?)\*\*|__([\s\S]+?)__|~~([\s\S]+?)~~|\*([^\s*][^*]*?)\*|\b_([^_]+?)_\b|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)|(https?:\/\/[^\s<>"')\]]+)/g;

function link(text, address) {
  return h("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, text);
}

function inline(text) {
  const parts = [];
  let last = 0;
  for (const found of text.matchAll(INLINE)) {
    if (found.index > last) parts.push(text.slice(last, found.index));
    const [, , code, bold, bold2, struck, italic, italic2, label, address, bare] = found;
    if (code !== undefined) parts.push(h("code", {}, code.trim()));
    else if (bold ?? bold2) parts.push(h("strong", {}, ...inline(bold ?? bold2)));
    else if (struck) parts.push(h("s", {}, ...inline(struck)));
    else if (italic ?? italic2) parts.push(h("em", {}, ...inline(italic ?? italic2)));
    else if (address) parts.push(link(label, address));
    else parts.push(link(bare, bare));
    last = found.index + found[0].length;
  }
  if (last < text.length) parts.push(text.slice(last));
  return parts;
}

export function codeBlock(text, language) {
  const copy = h("button", { type: "button", class: "quiet tiny" }, "Copy");
  copy.addEventListener("click", async () => {
    await navigator.clipboard?.writeText(text);
    copy.textContent = "Copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  });
  const bar = h("div", { class: "code-bar" }, h("span", {}, language || "text"), copy);
  const body = h("pre", { tabindex: "0", role: "region", "aria-label": "Code" }, h("code", {}, text));
  return h("div", { class: "code" }, bar, body);
}

const ITEM = /^(\s*)([-*+]|\d+[.)])\s+(.*)$/;
const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

function list(lines, at) {
  const [, indent, mark] = lines[at].match(ITEM);
  const ordered = /\d/.test(mark);
  const element = h(ordered ? "ol" : "ul", ordered && parseInt(mark, 10) !== 1 ? { start: parseInt(mark, 10) } : {});
  let item;
  while (at < lines.length) {
    const found = lines[at].match(ITEM);
    if (!found) {
      if (!lines[at].trim() || !/^\s+/.test(lines[at]) || !item) break;
      item.append(" ", ...inline(lines[at].trim()));
      at += 1;
    } else if (found[1].length < indent.length) {
      break;
    } else if (found[1].length > indent.length + 1 && item) {
      const [inner, next] = list(lines, at);
      item.append(inner);
      at = next;
    } else {
      item = h("li", {}, ...inline(found[3]));
      element.append(item);
      at += 1;
    }
  }
  return [element, at];
}

function table(lines, at) {
  const head = h("tr", {}, cells(lines[at]).map((cell) => h("th", { scope: "col" }, ...inline(cell))));
  const rows = [];
  at += 2;
  while (at < lines.length && lines[at].includes("|")) {
    rows.push(h("tr", {}, cells(lines[at]).map((cell) => h("td", {}, ...inline(cell)))));
    at += 1;
  }
  const element = h("table", {}, h("thead", {}, head), h("tbody", {}, rows));
  return [h("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, element), at];
}

export function render(text) {
  const lines = text.split("\n");
  const blocks = [];
  let paragraph = [];
  const end = () => {
    if (!paragraph.length) return;
    const children = paragraph.flatMap((line, at) => (at ? [h("br"), ...inline(line)] : inline(line)));
    blocks.push(h("p", {}, ...children));
    paragraph = [];
  };
  for (let at = 0; at < lines.length;) {
    const line = lines[at];
    const fence = line.match(/^\s*(```+|~~~+)\s*([\w+#.-]*)/);
    const heading = line.match(/^(#{1,6})\s+(.*)$/);
    if (fence) {
      end();
      let stop = at + 1;
      while (stop < lines.length && !lines[stop].trim().startsWith(fence[1])) stop += 1;
      blocks.push(codeBlock(lines.slice(at + 1, stop).join("\n"), fence[2]));
      at = stop + 1;
    } else if (heading) {
      end();
      blocks.push(h(`h${Math.min(heading[1].length + 2, 6)}`, {}, ...inline(heading[2])));
      at += 1;
    } else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) {
      end();
      blocks.push(h("hr"));
      at += 1;
    } else if (line.startsWith(">")) {
      end();
      const quoted = [];
      while (at < lines.length && lines[at].startsWith(">")) quoted.push(lines[at++].replace(/^>\s?/, ""));
      blocks.push(h("blockquote", {}, ...render(quoted.join("\n"))));
    } else if (ITEM.test(line)) {
      end();
      const [element, next] = list(lines, at);
      blocks.push(element);
      at = next;
    } else if (line.includes("|") && /^\s*\|?\s*:?-{2,}.*\|/.test(lines[at + 1] ?? "")) {
      end();
      const [element, next] = table(lines, at);
      blocks.push(element);
      at = next;
    } else {
      if (line.trim()) paragraph.push(line);
      else end();
      at += 1;
    }
  }
  end();
  return blocks;
}
