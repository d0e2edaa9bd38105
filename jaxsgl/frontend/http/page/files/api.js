// Calls of the server: adds the key, reads streams of events, and turns refusals into errors with the server's words.

const NAME = "jaxsgl-key";
let key = sessionStorage.getItem(NAME) ?? localStorage.getItem(NAME) ?? "";

export const hasKey = () => key !== "";
export function setKey(text, keep) {
  key = text;
  sessionStorage.setItem(NAME, text);
  if (keep && text) localStorage.setItem(NAME, text);
  else localStorage.removeItem(NAME);
}

// Has main.js ask for a key.
export const needKey = (reason) => dispatchEvent(new CustomEvent("needkey", { detail: reason }));

export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

async function refusal(response) {
  let text = `${response.status} ${response.statusText}`;
  try {
    const body = await response.json();
    text = body.error?.message ?? body.message ?? body.detail ?? text;
  } catch { /* not JSON: the status must do */ }
  return new Refused(response.status, typeof text === "string" ? text : JSON.stringify(text));
}

export async function call(path, { body, signal, method } = {}) {
  const headers = {};
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(path, {
    method: method ?? (body === undefined ? "GET" : "POST"),
    body: body === undefined ? undefined : JSON.stringify(body),
    headers,
    signal,
    cache: "no-store",
  });
  if (!response.ok) throw await refusal(response);
  return response;
}

export const getJson = async (path) => (await call(path)).json();

// Yields what each event of a stream holds, until [DONE].
export async function* events(path, options) {
  const response = await call(path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ")) continue;
        const data = part.slice(6);
        if (data === "[DONE]") return;
        const found = JSON.parse(data);
        if (found.error) throw new Refused(found.error.code ?? 500, found.error.message ?? "the server failed");
        yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
