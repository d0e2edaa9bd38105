// Makes elements. Text is set as text, never as markup, so nothing that a model writes can run here.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== undefined && child !== null && child !== false));
  return element;
}

export const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
export const s = (tag, properties, ...children) => fill(document.createElementNS(SVG, tag), properties, children);
export const $ = (id) => document.getElementById(id);
export const announce = (text) => { $("announcer").textContent = text; };

const whole = new Intl.NumberFormat("en");
export const count = (number) => whole.format(Math.round(number));
export function short(number) {
  if (number < 1e4) return count(number);
  if (number < 1e6) return `${(number / 1e3).toFixed(number < 1e5 ? 1 : 0)}k`;
  return `${(number / 1e6).toFixed(1)}M`;
}
export function ms(number) {
  if (number >= 1e3) return `${(number / 1e3).toFixed(number < 1e4 ? 2 : 1)} s`;
  return `${number >= 100 ? number.toFixed(0) : number.toFixed(number >= 10 ? 1 : 2)} ms`;
}
export const seconds = (number) => (number < 10 ? `${number.toFixed(1)} s` : number < 120 ? `${number.toFixed(0)} s` : `${(number / 60).toFixed(0)} min`);
export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;
// The last part of a path or hub id, by which people know a model.
export const nameOf = (model) => model.split("/").filter(Boolean).at(-1) ?? model;
