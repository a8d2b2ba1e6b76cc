// Calls of this router: JSON, and streams of server-sent events. With an API key if there is one;
// it lives in this tab's session storage only.

const NAME = "baton-key";
let inMemory = "";

export const key = {
  get() {
    try {
      return sessionStorage.getItem(NAME) ?? inMemory;
    } catch {
      return inMemory; // storage is forbidden here
    }
  },
  set(value) {
    inMemory = value;
    try {
      if (value) sessionStorage.setItem(NAME, value);
      else sessionStorage.removeItem(NAME);
    } catch {
      // As above.
    }
  },
};

export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// The response, if it is a good one. Raises ApiError, or what fetch raises.
export async function call(path, init = {}) {
  const headers = new Headers(init.headers);
  if (key.get()) headers.set("authorization", `Bearer ${key.get()}`);
  const response = await fetch(path, { ...init, headers, cache: "no-store" });
  if (response.ok) return response;
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // Not one of ours: a proxy's, perhaps.
  }
  if (response.status === 401) document.dispatchEvent(new CustomEvent("key-needed"));
  const text = error.message ?? `The router answered ${response.status}.`;
  throw new ApiError(response.status, text, error.code ?? null);
}

// Events of a stream, as {name, data}; a comment is one with an empty name. Ends with the stream.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n")) {
        yield parse(rest.slice(0, end));
        rest = rest.slice(end + 2);
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the connection may be gone already
  }
}

function parse(block) {
  const event = { name: "", data: "" };
  for (const line of block.split("\n")) {
    const colon = line.indexOf(":");
    const field = line.slice(0, colon);
    const value = line.slice(colon + 1).replace(/^ /, "");
    if (field === "event") event.name = value;
    else if (field === "data") event.data += value;
  }
  if (event.data && !event.name) event.name = "message";
  return event;
}
