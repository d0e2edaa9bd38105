// The list of endpoints: what each takes, and a call of it. Made of openapi.json, which needs the key like any call.

import { call, getJson, setKey } from "./api.js";
import { $, h } from "./dom.js";

let schema = null;

const follow = (part) => (part?.$ref ? follow(part.$ref.split("/").slice(1).reduce((at, name) => at[name], schema)) : part ?? {});

function typeOf(part) {
  if (part?.$ref) return part.$ref.split("/").at(-1);
  const several = part?.anyOf ?? part?.oneOf;
  if (several) return [...new Set(several.map(typeOf).filter((name) => name !== "null"))].join(" or ");
  if (part?.enum) return part.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (part?.type === "array") return `list of ${typeOf(part.items)}`;
  return part?.const !== undefined ? JSON.stringify(part.const) : part?.type ?? "any";
}

const descriptionOf = (part) => part?.description ?? (part?.anyOf ?? []).map((each) => each.description).find(Boolean) ?? "";

function fields(title, rows) {
  if (!rows.length) return null;
  return h("div", { class: "table", tabindex: "0", role: "region", "aria-label": title }, h("table", {},
    h("thead", {}, h("tr", {}, [title, "Type", "Meaning"].map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, rows.map(([name, type, about, needed]) => h("tr", {}, h("td", {}, h("code", {}, name), needed ? " *" : ""), h("td", {}, type), h("td", {}, about))))));
}

function example(body) {
  const found = {};
  for (const name of body.required ?? []) {
    if (name === "messages") found[name] = [{ role: "user", content: "What is 3 + 4?" }];
    else if (typeOf(body.properties[name]).includes("string")) found[name] = "text";
    else found[name] = null;
  }
  return JSON.stringify(found, null, 2);
}

function tryIt(path, method, parameters, body) {
  const id = `${method}${path}`.replace(/\W/g, "-");
  const inputs = parameters.map((each) => {
    const input = h("input", { id: `${id}-${each.name}`, placeholder: each.name });
    return { each, input, field: h("div", { class: "field" }, h("label", { for: input.id }, each.name), input) };
  });
  const text = body ? h("textarea", { id: `${id}-body`, rows: 6, spellcheck: "false" }) : null;
  if (text) text.value = example(body);
  const answer = h("pre", { tabindex: "0", role: "region", "aria-label": "Answer", hidden: true });
  const send = h("button", { type: "button" }, "Send");
  send.addEventListener("click", async () => {
    answer.hidden = false;
    answer.textContent = "...";
    try {
      let at = path.slice(1);
      const query = new URLSearchParams();
      for (const { each, input } of inputs) {
        if (each.in === "path") at = at.replace(new RegExp(`{${each.name}(:path)?}`), input.value);
        else if (input.value) query.set(each.name, input.value);
      }
      const response = await call(query.size ? `${at}?${query}` : at, { method: method.toUpperCase(), body: text ? JSON.parse(text.value || "null") : undefined });
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      answer.textContent = "";
      for (let got = await reader.read(); !got.done; got = await reader.read()) {
        answer.append(got.value);
        if (answer.textContent.length > 200000) { reader.cancel(); break; }
      }
      if (response.headers.get("content-type")?.includes("json")) answer.textContent = JSON.stringify(JSON.parse(answer.textContent), null, 2);
    } catch (error) {
      answer.textContent = error.message;
    }
  });
  return [inputs.map(({ field }) => field), text ? h("div", { class: "field" }, h("label", { for: text.id }, "Body"), text) : null, h("div", { class: "row" }, send), answer];
}

function endpoint(path, method, operation) {
  const inside = h("div", { class: "inside" });
  const details = h("details", {}, h("summary", {}, h("span", { class: "method" }, method.toUpperCase()), h("span", { class: "path" }, path), h("span", { class: "hint" }, (operation.description ?? operation.summary ?? "").split("\n")[0])), inside);
  details.addEventListener("toggle", () => {
    if (!details.open || inside.hasChildNodes()) return;
    const parameters = operation.parameters ?? [];
    const content = operation.requestBody?.content?.["application/json"]?.schema;
    const body = content ? follow(content.anyOf ? content.anyOf.find((each) => each.$ref) : content) : null;
    const rows = Object.entries(body?.properties ?? {}).map(([name, part]) => [name, typeOf(part), descriptionOf(part), (body.required ?? []).includes(name)]);
    inside.append(...[
      operation.description ? h("p", {}, operation.description) : null,
      fields("Parameter", parameters.map((each) => [each.name, typeOf(each.schema), each.description ?? "", each.required])),
      fields("Field", rows),
      ...tryIt(path, method, parameters, body).flat(),
    ].filter(Boolean));
  });
  return details;
}

async function show() {
  try {
    schema = await getJson("openapi.json");
  } catch (error) {
    $("failed").textContent = error.message;
    $("failed").hidden = false;
    return;
  }
  $("failed").hidden = true;
  const groups = new Map();
  for (const [path, operations] of Object.entries(schema.paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      const name = path.startsWith("/v1/") || path.startsWith("/v2/") ? "OpenAI's API and its kin" : operation.tags?.includes("sglang") ? "SGLang's API" : "This server";
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push(endpoint(path, method, operation));
    }
  }
  $("list").replaceChildren(...[...groups].flatMap(([name, made]) => [h("h2", {}, name), ...made]));
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key").value.trim(), false);
  show();
});
show();
