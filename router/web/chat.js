// The playground: one conversation, kept in this page only. Each answer streams in, can be stopped,
// and has its own waterfall under it.

import { ApiError, call, events } from "./api.js";
import { announce, byId, h, setText } from "./dom.js";
import { factList } from "./detail.js";
import { facts } from "./facts.js";
import { ms } from "./format.js";
import { Sampling } from "./sampling.js";
import { waterfall } from "./waterfall.js";

const HEADER = "x-baton-request-id";
const TRIES = [
  ["A question", "What is the capital of France?"],
  ["A story", "Tell me a short story about a relay race."],
  ["A long prompt", long()],
];
const NUM_LOOKS = 10;
const LOOK_MS = 150;

export class Chat {
  model = null;
  onEnd = null; // called after each answer
  #log = byId("log");
  #messages = [];
  #sampling = new Sampling();
  #abort = null;
  #follows = true; // the end of the conversation stays in sight
  #onExplain;

  constructor(onExplain) {
    this.#onExplain = onExplain;
    const prompt = byId("prompt");
    const log = this.#log;
    log.addEventListener("scroll", () => {
      this.#follows = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    });
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("composer").requestSubmit();
    });
    byId("stop").addEventListener("click", () => this.#abort?.abort());
    byId("chat-clear").addEventListener("click", () => this.#clear());
    for (const [name, text] of TRIES) {
      const use = () => { prompt.value = text; prompt.focus(); };
      byId("tries").append(h("button", { type: "button", class: "ghost", onclick: use }, name));
    }
  }

  #clear() {
    this.#abort?.abort();
    this.#messages = [];
    this.#log.replaceChildren(byId("welcome") ?? this.welcome);
    byId("chat-clear").hidden = true;
    byId("prompt").focus();
  }

  async #submit() {
    const text = byId("prompt").value.trim();
    if (!text || this.#abort || !this.#sampling.check()) return;
    byId("prompt").value = "";
    this.welcome ??= byId("welcome");
    this.welcome.remove();
    byId("chat-clear").hidden = false;
    const messages = this.#messages;
    messages.push({ role: "user", content: text });
    this.#log.append(h("article", { class: "said user" }, h("h3", { class: "hidden" }, "You"), h("p", {}, text)));
    const answer = new Answer(this.#onExplain);
    this.#log.append(answer.element);
    this.#follows = true;
    answer.element.scrollIntoView({ block: "nearest" });
    this.#setBusy(true);
    const said = await this.#ask(answer, messages);
    // What cannot go on is taken back: the next question shall not carry a half of a pair.
    if (said) messages.push({ role: "assistant", content: said });
    else messages.pop();
    this.#setBusy(false);
    this.onEnd?.();
  }

  async #ask(answer, messages) {
    const begin = performance.now();
    try {
      const response = await call("/v1/chat/completions", {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify(await this.#body(messages)),
        signal: this.#abort.signal,
      });
      answer.id = response.headers.get(HEADER);
      for await (const { data } of events(response)) {
        if (data === "[DONE]") break;
        if (data) answer.take(JSON.parse(data), performance.now() - begin);
        this.#follow();
      }
    } catch (error) {
      if (error.name !== "AbortError") answer.fail(error);
      else answer.stopped = true;
    }
    await answer.end(performance.now() - begin);
    this.#follow();
    return answer.text;
  }

  async #body(messages) {
    const { system } = this.#sampling;
    this.model ??= (await (await call("/v1/models")).json()).data[0].id;
    return {
      model: this.model,
      messages: system ? [{ role: "system", content: system }, ...messages] : messages,
      stream: true,
      ...this.#sampling.body(),
    };
  }

  #setBusy(isBusy) {
    this.#abort = isBusy ? new AbortController() : null;
    const had = document.activeElement;
    byId("stop").hidden = !isBusy;
    byId("send").hidden = isBusy;
    if (had === byId("send") || had === byId("stop")) byId("prompt").focus();
    this.#follow();
  }

  // Unless somebody has scrolled away from it.
  #follow() {
    if (this.#follows) this.#log.scrollTop = this.#log.scrollHeight;
  }
}

class Answer {
  id = null;
  stopped = false;
  text = "";
  #failed = false;
  #firstMs = null;

  constructor(onExplain) {
    this.thoughts = h("p", { class: "answer-thoughts" });
    this.body = h("p", { class: "answer-text" });
    this.note = h("p", { class: "answer-note" }, "Waiting for the first token…");
    this.more = h("div", { class: "answer-more" });
    this.element = h("article", { class: "said assistant", "aria-busy": "true" },
      h("h3", { class: "hidden" }, "Answer"), this.thoughts, this.body, this.note, this.more);
    this.onExplain = onExplain;
  }

  take(chunk, atMs) {
    if (chunk.error) throw new ApiError(chunk.error.status ?? 0, chunk.error.message, chunk.error.code);
    const { content: text, reasoning_content: thought } = chunk.choices[0]?.delta ?? {};
    if (!text && !thought) return;
    if (this.#firstMs === null) {
      this.#firstMs = atMs;
      setText(this.note, `First token after ${ms(atMs)}, as this page saw it`);
    }
    if (thought) this.thoughts.append(thought);
    if (!text) return;
    this.text += text;
    this.body.append(text);
  }

  fail(error) {
    this.#failed = true;
    const text = error instanceof ApiError ? error.message : "The router does not answer.";
    this.element.append(h("p", { class: "notice bad", role: "alert" }, text));
  }

  async end(wholeMs) {
    const seen = this.#firstMs === null ? "" : ` First token after ${ms(this.#firstMs)}, all of it after ${ms(wholeMs)}, as this page saw it.`;
    setText(this.note, `${this.stopped ? "Stopped." : this.#failed ? "Not completed." : "Done."}${seen}`);
    this.element.setAttribute("aria-busy", "false");
    const told = this.id ? await this.#explained() : null;
    if (told) {
      const open = h("button", { type: "button", class: "ghost", onclick: () => this.onExplain(this.id) }, "All of its explanation");
      this.more.append(...[factList(facts(told)), waterfall(told), open].filter(Boolean));
      announce(`Answer complete. First token after ${ms(told.ttft_ms)}.`);
    }
  }

  // Once the router has counted it as ended; null if it cannot tell.
  async #explained() {
    let told = null;
    for (let look = 0; look < NUM_LOOKS; look += 1) {
      try {
        told = await (await call(`/v1/requests/${this.id}`)).json();
      } catch {
        return told;
      }
      if (told.state !== "running") return told;
      await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
    }
    return told;
  }
}

// Long enough that the handoff has something to carry.
function long() {
  const runners = ["the first runner keeps the pace", "the second one waits with an open hand",
    "nobody looks back", "the stick passes within the zone", "the crowd counts the seconds"];
  const lines = Array.from({ length: 60 }, (_, index) => `Lap ${index + 1}: ${runners[index % runners.length]}.`);
  return `Read this report of a race, and say in one sentence what happened.\n\n${lines.join("\n")}`;
}
