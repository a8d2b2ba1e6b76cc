// The cluster as it changes. Connects, and connects again by itself: the router may go away and
// come back. A tab that nobody looks at leaves after a while, and is back at once when looked at.

import { ApiError, call, events } from "./api.js";

const SILENCE_MS = 6000; // the router says something every two seconds
const HIDDEN_MS = 60_000;
const PAUSES_MS = [250, 500, 1000, 2000, 3000];

export class Feed extends EventTarget {
  #failures = 0;
  #abort = null;
  #state = "";
  #wake = null;
  #hidden = null;

  // Emits `state` ({state, detail}), and each topic of the router with its data.
  start() {
    document.addEventListener("visibilitychange", () => this.#look());
    addEventListener("online", () => this.retry());
    this.#run();
  }

  // At once, instead of after the pause.
  retry() {
    this.#failures = 0;
    this.#wake?.();
  }

  #look() {
    clearTimeout(this.#hidden);
    if (document.hidden) this.#hidden = setTimeout(() => this.#abort?.abort(), HIDDEN_MS);
    else this.retry();
  }

  async #run() {
    for (;;) {
      if (!document.hidden) await this.#follow();
      // Another key is needed: nothing changes before there is one, and then `retry` is called.
      const isBarred = this.#state === "locked" || this.#state === "tenant";
      const pause = isBarred ? HIDDEN_MS : PAUSES_MS[Math.min(this.#failures, PAUSES_MS.length - 1)];
      this.#failures += 1;
      await new Promise((resolve) => {
        this.#wake = resolve;
        setTimeout(resolve, document.hidden ? HIDDEN_MS : pause);
      });
    }
  }

  async #follow() {
    this.#abort = new AbortController();
    let silence = null;
    const heard = () => {
      clearTimeout(silence);
      silence = setTimeout(() => this.#abort.abort(), SILENCE_MS);
    };
    try {
      heard();
      const response = await call("/v1/cluster/events", { signal: this.#abort.signal });
      for await (const event of events(response)) {
        heard();
        this.#failures = 0;
        this.#say("live");
        if (event.name === "bye") break;
        if (event.name) this.#emit(event.name, JSON.parse(event.data));
      }
      this.#say("away", "The router has ended the connection.");
    } catch (error) {
      if (error instanceof ApiError) this.#say(stateOf(error), error.message);
      else if (!document.hidden) this.#say("away", "The router does not answer.");
    } finally {
      clearTimeout(silence);
    }
  }

  #say(state, detail = "") {
    this.#state = state;
    this.#emit("state", { state, detail });
  }

  #emit(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}

function stateOf(error) {
  if (error.status === 401) return "locked";
  if (error.status === 403) return "tenant";
  return error.code === "too_many_viewers" ? "full" : "away";
}
