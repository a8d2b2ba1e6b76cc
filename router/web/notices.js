// What goes wrong, in words, at the top of the page: it comes by itself and goes by itself.

import { byId, h } from "./dom.js";
import { problem } from "./format.js";

const STAY_MS = 8000;

export class Notices {
  #region = byId("notices");
  #shown = new Map();
  #wasReady = new Map(); // role and address → said so last

  link(state, why) {
    this.#set("link", {
      away: ["bad", `${why} This page tries again by itself; what you see below is how it was.`],
      full: ["warn", `${why} This page waits for a place.`],
      tenant: ["warn", "This key is not an operator's: you can chat and see your own requests; the cluster is for operators."],
    }[state]);
    if (state === "live" || state === "tenant") this.#set("key");
  }

  keyNeeded(onOpen) {
    const button = h("button", { type: "button", class: "ghost", onclick: onOpen }, "Give a key");
    this.#set("key", ["warn", "This router asks for an API key.", button]);
  }

  restarted() {
    this.#passing("restarted", "warn", "The router has restarted: it knows no earlier requests.");
  }

  cluster(cluster) {
    for (const worker of cluster.workers) {
      const name = `${worker.role} ${worker.address}`;
      const before = this.#wasReady.get(name);
      this.#wasReady.set(name, worker.ready);
      if (before === undefined || before === worker.ready) continue;
      if (worker.ready) this.#passing(name, "good", `${worker.name} is back.`);
      else this.#passing(name, "bad", lost(worker, cluster));
    }
    this.#set("ready", cluster.ready ? undefined : ["bad", missing(cluster)]);
  }

  #passing(name, kind, text) {
    this.#set(name, [kind, text]);
    const element = this.#shown.get(name);
    setTimeout(() => {
      if (this.#shown.get(name) === element) this.#set(name);
    }, STAY_MS);
  }

  #set(name, told) {
    const before = this.#shown.get(name);
    if (before && told && before.dataset.text === told[1]) return;
    before?.remove();
    this.#shown.delete(name);
    if (!told) return;
    const [kind, text, extra = null] = told;
    const element = h("p", { class: `notice ${kind}`, "data-text": text }, h("span", {}, text), extra);
    this.#shown.set(name, element);
    this.#region.append(element);
  }
}

function lost(worker, cluster) {
  const others = cluster.workers.filter((one) => one.role === worker.role && one.ready);
  const then = others.length
    ? "Its requests go on at another one, unbroken."
    : worker.role === "prefill"
      ? "No prefill worker is left: prompts are computed on decode."
      : "No decode worker is left: requests wait for one.";
  return `${worker.name} takes no requests (${problem(worker.problem)}). ${then}`;
}

function missing(cluster) {
  const ready = (role) => cluster.workers.some((one) => one.role === role && one.ready);
  if (!ready("decode")) return "No decode worker is ready. Requests wait a while for one, then fail.";
  return "No prefill worker is ready. Prompts are computed on decode, without a handoff.";
}
